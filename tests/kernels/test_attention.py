import math

import numpy as np
import pytest
import torch

from geomon import METRICS, MORE_METRICS
from support import definitions as by_book
from support.hardware import LargestNewTensor
from support.kernels import (
    attention_entropy,
    attention_entropy_normalised,
    attention_rows,
    attention_sink,
    given_scores,
    score_moments,
    scores_of,
)
from support.measuring import Layer, LayerViews
from support.whole_layer import normal

ALL = METRICS | MORE_METRICS
NAMES = [name for name in ALL if name.startswith(("attention", "score", "mean_query_share"))]
MASKS = ["causal", "bidirectional", "padded right", "padded left", "window", "some rows masked",
         "by head"]  # fmt: skip


def whole(*shape, seed=0, low=-3, high=4):
    # Small whole numbers: their dot products are exact in float32, so only the softmax is tested.
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def mask(kind, sequences, length):
    """Visible pairs of whole sequences, [sequences, 1, length, length]."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    used = (length * torch.linspace(1, 0.4, sequences)).long()[:, None, None, None]
    also = {
        "causal": True, "padded right": j < used, "padded left": j >= length - used,
        "window": j > i - 33, "some rows masked": i % 3 > 0,
        "by head": normal(1, 4, length, length, seed=9) > 0, "bidirectional": True,
    }[kind]  # fmt: skip
    visible = torch.ones(sequences, 1, length, length, dtype=torch.bool)
    return visible if kind == "bidirectional" else visible & (j <= i) & also


OPTIONS = {
    "plain": {},
    "bias of heads": {"bias": normal(1, 4, 1, 40, seed=2)},
    "bias of sequences": {"bias": 3 * normal(2, 1, 12, 40, seed=2).double()},
    "bias of keys, cap": {"bias": 3 * normal(40, seed=2), "softcap": 3.0},
    "sink": {"sink": 5 * normal(4, seed=3)},
    "all": {"bias": normal(4, 12, 40, seed=2), "softcap": 2.0, "sink": normal(4, seed=3)},
    # Logits up to 2,304, many of them tied at the top: exp overflows without a shift by the
    # maximum, and log 0 meets 0 in -p log p.
    "large": {"scale": 16.0},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("block", [250, 10**9])
def test_metrics_are_those_of_loops_over_queries(kind, options, block, cut_blocks):
    cut_blocks(block)
    query, key = whole(2, 4, 40, 16), whole(2, 2, 40, 16, seed=1)
    some = torch.tensor([0, 1, 2, 5, 9, 13, 17, 20, 24, 28, 33, 39])
    captured = {"query": query[:, :, some], "key": key, "visible": mask(kind, 2, 40)[:, :, some]}
    captured |= {"scale": 0.5, "bias": None, "softcap": None, "sink": None} | options
    wanted = by_book.of_attention(
        {name: np.asarray(x) if torch.is_tensor(x) else x for name, x in captured.items()}
    )
    every = measured(captured, NAMES)
    for tag, found in every.items():
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(wanted[tag], rel=1e-5, abs=1e-5), tag
    if options.keys() == {"scale"}:  # scores as they were seen
        scores = captured["scale"] * captured["query"] @ key.repeat_interleave(2, dim=1).mT
        seen = {"scores": scores, "visible": captured["visible"]}
        own = measured(seen, [name for name in NAMES if name != "mean_query_share"])
        torch.testing.assert_close(own, {tag: every[tag] for tag in own}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("block", [250, 10**9])
def test_scores_are_the_same_in_every_type_that_holds_their_numbers(dtype, block, cut_blocks):
    cut_blocks(block)
    query, key = whole(2, 4, 40, 16), whole(2, 2, 40, 16, seed=1)
    visible, options = mask("window", 2, 40), OPTIONS["bias of heads"]
    want = attention_rows(scores_of(query, key, visible, 0.5, **options))
    got = attention_rows(scores_of(query.to(dtype), key.to(dtype), visible, 0.5, **options))
    assert all(map(torch.equal, got, want))


def measured(captured, names):
    """Values of metrics on captured views, by tag."""
    views, found = LayerViews(Layer(1, "block", captured)), {}
    for name in names:
        value = views.apply(ALL[name])
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}/{part}".rstrip("/"): each for part, each in parts.items()}
    return found


def test_metrics_without_any_row_to_measure_are_nan():
    query, key = normal(1, 2, 6, 8), normal(1, 2, 6, 8, seed=1)
    kernels = attention_entropy, attention_entropy_normalised, attention_sink
    for visible, missing in ((torch.zeros(6, 6), 3), (torch.eye(6), 2)):
        rows = attention_rows(scores_of(query, key, visible.bool(), 1.0))
        for kernel in kernels[3 - missing :]:
            assert kernel(rows).isnan().tolist() == [True, True]
    assert attention_entropy(rows).tolist() == [0, 0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_values_under_the_mask_do_not_matter(garbage):
    length = 450
    query, key = normal(2, 2, length, 8), normal(2, 2, length, 8, seed=1)
    visible = mask("padded left", 2, length)
    kernels = attention_rows, score_moments
    want = [kernel(scores_of(query, key, visible, 0.3)) for kernel in kernels]
    hidden = ~visible.any(dim=2).squeeze(1)
    assert hidden.any()
    key[hidden[:, None].expand(2, 2, length)] = garbage
    for kernel, wanted in zip(kernels, want, strict=True):
        assert all(map(torch.equal, kernel(scores_of(query, key, visible, 0.3)), wanted))


@pytest.mark.parametrize("heads", [1, 4])
def test_under_a_causal_mask_about_half_of_the_scores_are_computed(heads):
    query, key = normal(1, 4, 1024, 8), normal(1, 2, 1024, 8, seed=1)
    causal = torch.ones(1024, 1024, dtype=torch.bool).tril().expand(1, heads, 1024, 1024)
    found = [*scores_of(query, key, causal.contiguous(), 0.3).blocks()]
    assert [at for at, _, _ in found] == [
        (slice(0, 1), slice(0, 4), slice(start, start + 128)) for start in range(0, 1024, 128)
    ]
    assert [scores.shape[3] for _, scores, _ in found] == [*range(128, 1025, 128)]
    assert {seen.shape[1] for _, _, seen in found} == {heads}


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        # Whole sequences, if an eighth of a block holds one.
        ((10, 4, 16, 2048), [(slice(0, 8), slice(0, 4), slice(0, 16)),
                             (slice(8, 10), slice(0, 4), slice(0, 16))]),
        ((2, 4, 16, 2049), [(slice(n, n + 1), slice(0, 4), slice(0, 16)) for n in range(2)]),
        # Else queries of one sequence, at least 32 at a time, and as many heads as fit.
        ((1, 4, 70, 8192), [(slice(0, 1), slice(0, 4), slice(n, min(n + 32, 70)))
                            for n in (0, 32, 64)]),
        ((1, 5, 70, 16_384), [(slice(0, 1), slice(head, min(head + 2, 5)),
                               slice(n, min(n + 32, 70)))
                              for head in (0, 2, 4) for n in (0, 32, 64)]),
    ],
)  # fmt: skip
def test_blocks_hold_as_many_sequences_heads_and_queries_as_fit(shape, places):
    blocks = given_scores(torch.zeros(1, 1, 1, 1).expand(shape), torch.tensor(True)).blocks()
    assert [at for at, _, _ in blocks] == places


def test_a_visible_key_of_score_minus_infinity_has_no_weight():
    query, key = normal(1, 1, 2, 8), normal(1, 1, 5, 8, seed=1)
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0])
    got = attention_rows(scores_of(query, key, torch.ones(1, 1, 2, 5, dtype=torch.bool), 0.3, bias))
    kept = torch.tensor([True, False, True, True, True])
    want = attention_rows(scores_of(query, key, kept.expand(1, 1, 2, 5), 0.3))
    torch.testing.assert_close(got.entropy, want.entropy)
    torch.testing.assert_close(got.maximum, want.maximum)
    assert (got.minimum == 0).all()
    assert (got.visible == 5).all()


@pytest.mark.parametrize("key_heads", [1, 4])
def test_the_size_of_the_block_bounds_the_temporaries(cut_blocks, key_heads):
    query, key = normal(2, 4, 64, 8), normal(2, key_heads, 1024, 8, seed=1)
    inputs = (query, key, torch.ones(64, 1024, dtype=torch.bool), normal(64, 1024, seed=2))
    for queries in (32, 16):  # of a sequence, with all four heads
        with LargestNewTensor(*inputs) as largest:
            attention_rows(scores_of(*inputs[:3], 0.3, inputs[3]))
        assert largest.bytes == 4 * 4 * queries * 1024
        cut_blocks(4 * 16 * 1024)


FITS = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8)
ALL_SEEN = torch.tensor(True)
# Calls, and words of the error.
REFUSED = [
    *((lambda q=q, k=k: scores_of(torch.ones(q), torch.ones(k), ALL_SEEN, 1.0),
       f"expected queries .*{list(q)} and {list(k)}".replace("[", r"\[")) for q, k in (
        ((2, 4, 5, 8), (2, 4, 5, 7)), ((2, 4, 5, 8), (2, 3, 5, 8)), ((2, 4, 5, 8), (3, 4, 5, 8)),
        ((4, 5, 8), (4, 5, 8)), ((2, 4, 0, 8), (2, 4, 5, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)))),
    *((lambda shape=shape: scores_of(*FITS, torch.ones(shape, dtype=torch.bool), 1.0),
       "expected visible that broadcasts")
      for shape in ((5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7), (4, 7))),
    (lambda: scores_of(*FITS, ALL_SEEN, 1.0, torch.zeros(5, 6)), "expected bias that broadcasts"),
    *((lambda shape=shape: given_scores(torch.zeros(shape), ALL_SEEN),
       r"scores \[sequences, heads, queries, keys\]") for shape in ((3, 4), (1, 2, 0, 4))),
    (lambda: scores_of(*FITS, ALL_SEEN, 1.0, sink=torch.zeros(3)),
     r"sink logits \[heads\] = \[4\], got \[3\]"),
    *((lambda kind=kind: scores_of(*FITS, torch.ones(5, 7, dtype=kind), 1.0),
       "expected visible as booleans") for kind in (torch.float32, torch.uint8)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_an_input_that_makes_no_scores_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
