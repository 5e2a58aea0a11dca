import math

import numpy as np
import pytest
import torch
from scipy.special import entr, log_softmax
from whole_layer import normal

from geomon.kernels.attention import (
    AttentionRows,
    attention_entropy,
    attention_entropy_normalised,
    attention_rows,
    attention_sink,
    given_scores,
    row_medians,
    scores_of,
    sequence_extremes,
)
from tests.new_tensors import LargestNewTensor

METRICS = [attention_entropy, attention_entropy_normalised, attention_sink]
MASKS = ["causal", "bidirectional", "padded right", "padded left", "window", "some rows masked"]


def whole(*shape, seed=0, low=-3, high=4):
    # Small whole numbers: their dot products are exact in float32, so only the softmax is tested.
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def sampled(length, count=24, seed=0):
    rows = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count]
    return rows.sort().values


def mask(kind, sequences, length):
    """Visible pairs of whole sequences, [sequences, 1, length, length]."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    if kind == "bidirectional":
        return torch.ones(sequences, 1, length, length, dtype=torch.bool)
    visible = (j <= i).expand(sequences, 1, length, length).clone()
    used = (length * torch.linspace(1, 0.4, sequences)).long()
    if kind == "padded right":
        visible &= (j < used[:, None])[:, None, None]
    if kind == "padded left":
        visible &= (j >= length - used[:, None])[:, None, None]
    if kind == "window":
        visible &= j > i - 33
    if kind == "some rows masked":
        visible[:, :, ::3] = False
    return visible


def by_hand(query, key, scale, bias, softcap):
    """Scores as they enter the softmax, in float64."""
    scores = scale * query.double() @ key.repeat_interleave(2, dim=1).double().mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias.double()


def by_loops(scores, visible, sink):
    """What each row and each sequence holds, one softmax at a time in numpy.

    Returns:
        Rows by head with the fields of `AttentionRows` and the median, and of each sequence of a
        head the largest, the median and the smallest weight.
    """
    seen = visible.expand(scores.shape).numpy()
    sequences, heads, queries, _ = scores.shape
    rows, ends = np.full((heads, sequences, queries, 6), math.nan), []
    for head, sequence in np.ndindex(heads, sequences):
        together = []
        for i in range(queries):
            keys = seen[sequence, head, i]
            outcomes = scores[sequence, head, i].numpy()[keys]
            if not len(outcomes):
                rows[head, sequence, i] = [0, 0, 0, 0, 0, math.nan]
                continue
            outcomes = outcomes if sink is None else np.append(outcomes, sink[head].item())
            weights = np.exp(log_softmax(outcomes))
            own = weights[: keys.sum()]
            first = own[0] + weights[keys.sum() :].sum()
            median = np.sort(own)[(len(own) - 1) // 2]
            rows[head, sequence, i] = [
                entr(weights).sum(), own.max(), first, len(weights), own.min(), median,
            ]  # fmt: skip
            together += [*own] if len(own) > 1 else []
        together = np.sort(together) if together else np.full(3, math.nan)
        ends.append([together[-1], together[(len(together) - 1) // 2], together[0]])
    return (
        torch.from_numpy(rows.reshape(heads, -1, 6)),
        torch.tensor(np.array(ends)).view(heads, sequences, 3),
    )


OPTIONS = {
    "plain": {},
    "bias of heads": {"bias": normal(1, 4, 1, 40, seed=2)},
    "bias of sequences": {"bias": 3 * normal(2, 1, 12, 40, seed=2).double()},
    "bias of keys, cap": {"bias": 3 * normal(40, seed=2), "softcap": 3.0},
    "sink": {"sink": 5 * normal(4, seed=3)},
    "all": {"bias": normal(4, 12, 40, seed=2), "softcap": 2.0, "sink": normal(4, seed=3)},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("block", [500, 10**9])
def test_rows_and_sequences_are_those_of_loops_over_queries(kind, options, block, cut_blocks):
    cut_blocks(block)
    query, key = normal(2, 4, 40, 16), normal(2, 2, 40, 16, seed=1)
    some = sampled(40, 12)
    query, visible = query[:, :, some], mask(kind, 2, 40)[:, :, some]
    source = scores_of(query, key, visible, 0.5, **options)
    scores = by_hand(query, key, 0.5, options.get("bias"), options.get("softcap"))
    rows, ends = by_loops(scores, visible, options.get("sink"))
    found = attention_rows(source)
    medians = row_medians(source)
    extremes = sequence_extremes(source)
    sees = rows[:, :, 3] > 0
    assert torch.equal(found.visible > 0, sees)
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    for number, part in enumerate((*found, medians.median)):
        assert part.dtype == torch.float64
        torch.testing.assert_close(part[sees], rows[:, :, number][sees], **close)
    for number, part in enumerate(extremes):
        torch.testing.assert_close(part, ends[:, :, number], **close)
    if "sink" not in options:
        assert torch.equal(medians.visible, found.visible)
        given = given_scores(scores.float(), visible)
        for kernel, other in ((attention_rows, found), (row_medians, medians),
                              (sequence_extremes, extremes)):  # fmt: skip
            for got, want in zip(kernel(given), other, strict=True):
                torch.testing.assert_close(got, want, **close)


def test_large_logits_agree_with_the_softmax_in_float64():
    query, key, visible = whole(2, 4, 64, 8), whole(2, 2, 64, 8, seed=1), mask("causal", 2, 64)
    # Logits up to 8 x 9 x 16 = 1,152, many of them tied at the top: exp overflows without a shift
    # by the maximum, and log 0 meets 0 in -p log p.
    scores = by_hand(query, key, 16.0, None, None)
    assert scores.float().exp().isinf().any()
    rows, _ = by_loops(scores, visible, None)
    for number, part in enumerate(attention_rows(scores_of(query, key, visible, 16.0))):
        torch.testing.assert_close(part, rows[:, :, number], rtol=0, atol=2e-6)


def test_uniform_causal_attention_has_the_entropy_of_the_visible_keys():
    rows, nothing = torch.arange(0, 2048, 16), torch.zeros(1, 1, 2048, 8)
    got = attention_rows(
        scores_of(nothing[:, :, rows], nothing, mask("causal", 1, 2048)[:, :, rows], 1.0)
    )
    # Taking the 128 sampled queries for the length of the causal mask gives 7.622.
    assert attention_entropy(got).item() == pytest.approx(6.594, abs=5e-4)
    assert attention_entropy_normalised(got).item() == pytest.approx(1, abs=1e-6)
    inverse = 1 / (rows[1:] + 1).double()
    assert attention_sink(got).item() == pytest.approx(inverse.mean().item(), rel=1e-5)


def test_metrics_without_any_row_to_measure_are_nan():
    query, key = normal(1, 2, 6, 8), normal(1, 2, 6, 8, seed=1)
    blind = attention_rows(scores_of(query, key, torch.zeros(6, 6, dtype=torch.bool), 1.0))
    for metric in METRICS:
        assert metric(blind).isnan().tolist() == [True, True]
    single = attention_rows(scores_of(query, key, torch.eye(6, dtype=torch.bool), 1.0))
    assert attention_entropy(single).tolist() == [0, 0]
    for metric in METRICS[1:]:
        assert metric(single).isnan().tolist() == [True, True]


def test_metrics_of_rows_written_by_hand():
    rows = AttentionRows(
        entropy=torch.tensor([[math.log(2), math.log(3), 0.0, 0.0]], dtype=torch.float64),
        maximum=torch.tensor([[0.5, 0.25, 1.0, 0.0]], dtype=torch.float64),
        first=torch.tensor([[0.5, 0.125, 1.0, 0.0]], dtype=torch.float64),
        visible=torch.tensor([[2.0, 9.0, 1.0, 0.0]], dtype=torch.float64),
        minimum=torch.tensor([[0.5, 0.0625, 1.0, 1.0]], dtype=torch.float64),
    )
    assert attention_entropy(rows).item() == pytest.approx(math.log(6) / 3)
    assert attention_entropy_normalised(rows).item() == pytest.approx((1 + 0.5) / 2)
    assert attention_sink(rows).item() == 0.3125


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_does_not_matter(garbage, side):
    length = 450
    query, key = normal(2, 2, length, 8), normal(2, 2, length, 8, seed=1)
    visible = mask(f"padded {side}", 2, length)
    want = attention_rows(scores_of(query, key, visible, 0.3))
    hidden = ~visible.any(dim=2).squeeze(1)
    assert hidden.any()
    key[hidden[:, None].expand(2, 2, length)] = garbage
    for got, expected in zip(
        attention_rows(scores_of(query, key, visible, 0.3)), want, strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["tokens", "sequences", "heads"])
def test_under_a_causal_mask_about_half_of_the_scores_are_computed(form):
    query, key = normal(1, 4, 1024, 8), normal(1, 2, 1024, 8, seed=1)
    shape = {"tokens": (1, 1), "sequences": (1, 1), "heads": (1, 4)}[form]
    causal = torch.ones(1024, 1024, dtype=torch.bool).tril().expand(*shape, 1024, 1024)
    causal = causal.contiguous() if form == "heads" else causal
    blocks = [
        (scores.numel(), tuple(seen.shape))
        for _, scores, seen in scores_of(query, key, causal, 0.3).blocks()
    ]
    assert sum(number for number, _ in blocks) <= 0.6 * 4 * 1024**2
    assert {shape[1] for _, shape in blocks} == ({1} if form != "heads" else {4})


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
    visible, bias = torch.ones(64, 1024, dtype=torch.bool), normal(64, 1024, seed=2)
    inputs = (query, key, visible, bias)
    with LargestNewTensor(*inputs) as at_once:
        attention_rows(scores_of(query, key, visible, 0.3, bias))
    assert at_once.bytes == 4 * 4 * 32 * 1024  # four heads, half of the queries of a sequence
    cut_blocks(4 * 16 * 1024)
    with LargestNewTensor(*inputs) as in_blocks:
        attention_rows(scores_of(query, key, visible, 0.3, bias))
    assert in_blocks.bytes == 4 * 4 * 16 * 1024


def test_float16_scores_do_not_overflow():
    query = torch.full((1, 1, 3, 64), 100.0, dtype=torch.float16)
    assert (query @ query.transpose(-1, -2)).isinf().all()
    got = attention_rows(scores_of(query, query, torch.tensor(True), 0.125))
    assert got.entropy[0].tolist() == pytest.approx([math.log(3)] * 3)


FITS = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 7)), ((2, 4, 5, 8), (2, 3, 5, 8)), ((2, 4, 5, 8), (3, 4, 5, 8)),
        ((4, 5, 8), (4, 5, 8)), ((2, 4, 0, 8), (2, 4, 5, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)),
    ],
)  # fmt: skip
def test_rows_name_the_shapes_they_cannot_use(query, key):
    with pytest.raises(ValueError, match="expected queries") as caught:
        attention_rows(scores_of(torch.ones(query), torch.ones(key), torch.tensor(True), 1.0))
    assert f"{list(query)} and {list(key)}" in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7), (4, 7)])
def test_rows_name_a_mask_or_a_bias_that_does_not_fit(shape):
    with pytest.raises(ValueError, match="expected visible that broadcasts"):
        attention_rows(scores_of(*FITS, torch.ones(shape, dtype=torch.bool), 1.0))
    with pytest.raises(ValueError, match="expected bias that broadcasts"):
        attention_rows(scores_of(*FITS, torch.tensor(True), 1.0, torch.zeros(shape)))


def test_scores_and_sinks_that_are_none_are_named():
    for shape in ((3, 4), (1, 2, 0, 4)):
        with pytest.raises(ValueError, match=r"scores \[sequences, heads, queries, keys\]"):
            given_scores(torch.zeros(shape), torch.tensor(True))
    with pytest.raises(ValueError, match=r"sink logits \[heads\] = \[4\], got \[3\]"):
        attention_rows(scores_of(*FITS, torch.tensor(True), 1.0, sink=torch.zeros(3)))
