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
from geomon.kernels.scores import score_moments
from tests.new_tensors import LargestNewTensor

METRICS = [attention_entropy, attention_entropy_normalised, attention_sink]
MASKS = ["causal", "bidirectional", "padded right", "padded left", "window", "some rows masked"]


def whole(*shape, seed=0, low=-3, high=4):
    # Small whole numbers: their dot products are exact in float32, so only the softmax is tested.
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


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


def by_hand(query, key, scale=0.5, bias=None, softcap=None, sink=None):
    """Scores as they enter the softmax, in float64."""
    scores = scale * query.double() @ key.repeat_interleave(2, dim=1).double().mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias.double()


def by_loops(scores, visible, sink):
    """What each row and each sequence holds, one softmax at a time in numpy.

    Returns:
        Rows by head with the fields of `AttentionRows`, the median weight, and mean and variance of
        the scores; and of each sequence of a head the largest, the median and the smallest weight.
    """
    seen = visible.expand(scores.shape).numpy()
    sequences, heads, queries, _ = scores.shape
    rows, ends = np.zeros((heads, sequences, queries, 8)), []
    for head, sequence in np.ndindex(heads, sequences):
        together = []
        for i in range(queries):
            keys = seen[sequence, head, i]
            outcomes = scores[sequence, head, i].numpy()[keys]
            if not len(outcomes):
                continue
            moments = outcomes.mean(), outcomes.var()
            outcomes = outcomes if sink is None else np.append(outcomes, sink[head].item())
            weights = np.exp(log_softmax(outcomes))
            own = weights[: keys.sum()]
            first = own[0] + weights[keys.sum() :].sum()
            median = np.sort(own)[(len(own) - 1) // 2]
            rows[head, sequence, i] = [
                entr(weights).sum(), own.max(), first, len(weights), own.min(), median, *moments,
            ]  # fmt: skip
            together += [*own] if len(own) > 1 else []
        together = np.sort(together) if together else np.full(3, math.nan)
        ends.append([together[-1], together[(len(together) - 1) // 2], together[0]])
    return (
        torch.from_numpy(rows.reshape(heads, -1, 8)),
        torch.tensor(np.array(ends)).view(heads, sequences, 3),
    )


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
@pytest.mark.parametrize("block", [500, 10**9])
def test_rows_and_sequences_are_those_of_loops_over_queries(kind, options, block, cut_blocks):
    cut_blocks(block)
    query, key = whole(2, 4, 40, 16), whole(2, 2, 40, 16, seed=1)
    some = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:12].sort().values
    query, visible = query[:, :, some], mask(kind, 2, 40)[:, :, some]
    source = scores_of(query, key, visible, **{"scale": 0.5} | options)
    scores = by_hand(query, key, **options)
    rows, ends = by_loops(scores, visible, options.get("sink"))
    found, medians, moments = attention_rows(source), row_medians(source), score_moments(source)
    extremes = sequence_extremes(source)
    sees = rows[:, :, 3] > 0
    assert torch.equal(found.visible > 0, sees)
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    of_rows = (*found, medians.median, moments.mean, moments.variance)
    for number, part in enumerate(of_rows):
        assert part.dtype == torch.float64
        torch.testing.assert_close(part[sees], rows[:, :, number][sees], **close)
    for number, part in enumerate(extremes):
        torch.testing.assert_close(part, ends[:, :, number], **close)
    if "sink" not in options:
        assert torch.equal(medians.visible, found.visible)
        assert torch.equal(moments.visible, found.visible)
        given = given_scores(scores.float(), visible)
        for kernel, other in ((attention_rows, found), (row_medians, medians),
                              (sequence_extremes, extremes), (score_moments, moments)):  # fmt: skip
            for got, want in zip(kernel(given), other, strict=True):
                torch.testing.assert_close(got, want, **close)


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


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_does_not_matter(garbage):
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
    assert sum(scores.shape.numel() for _, scores, _ in found) <= 0.6 * 4 * 1024**2
    assert {seen.shape[1] for _, _, seen in found} == {heads}


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


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 7)), ((2, 4, 5, 8), (2, 3, 5, 8)), ((2, 4, 5, 8), (3, 4, 5, 8)),
        ((4, 5, 8), (4, 5, 8)), ((2, 4, 0, 8), (2, 4, 5, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)),
    ],
)  # fmt: skip
def test_scores_name_the_shapes_they_cannot_use(query, key):
    with pytest.raises(ValueError, match="expected queries") as caught:
        scores_of(torch.ones(query), torch.ones(key), torch.tensor(True), 1.0)
    assert f"{list(query)} and {list(key)}" in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7), (4, 7)])
def test_scores_name_a_mask_or_a_bias_that_does_not_fit(shape):
    with pytest.raises(ValueError, match="expected visible that broadcasts"):
        scores_of(*FITS, torch.ones(shape, dtype=torch.bool), 1.0)
    with pytest.raises(ValueError, match="expected bias that broadcasts"):
        scores_of(*FITS, torch.tensor(True), 1.0, torch.zeros(shape))


def test_scores_and_sinks_that_are_none_are_named():
    for shape in ((3, 4), (1, 2, 0, 4)):
        with pytest.raises(ValueError, match=r"scores \[sequences, heads, queries, keys\]"):
            given_scores(torch.zeros(shape), torch.tensor(True))
    with pytest.raises(ValueError, match=r"sink logits \[heads\] = \[4\], got \[3\]"):
        scores_of(*FITS, torch.tensor(True), 1.0, sink=torch.zeros(3))
    for visible in (torch.ones(5, 7), torch.ones(5, 7, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="expected visible as booleans"):
            scores_of(*FITS, visible, 1.0)
