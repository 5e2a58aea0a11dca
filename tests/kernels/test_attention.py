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
    extremes_of_scores,
    mean_over,
    medians_of_scores,
    row_medians,
    score_blocks,
    score_rows,
    sequence_extremes,
)
from tests.new_tensors import LargestNewTensor

METRICS = [attention_entropy, attention_entropy_normalised, attention_sink]
LENGTHS = [64, 700]
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


def full_softmax(query, key, visible, scale, bias=None):
    """Every row of every head in float64 at once, in numpy: the fields of AttentionRows."""
    heads = query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    scores = query.double().numpy() @ key.double().mT.numpy() * scale
    if bias is not None:
        scores = scores + bias.double().numpy()
    visible = np.broadcast_to(visible.numpy(), scores.shape)
    seen = visible.any(axis=-1)
    weights = np.zeros_like(scores)
    lowest = np.where(visible, scores, -np.inf)
    weights[seen] = np.exp(log_softmax(lowest[seen], axis=-1))
    first = np.take_along_axis(weights, visible.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    fields = [
        entr(weights).sum(axis=-1), weights.max(axis=-1), first, visible.sum(axis=-1),
        np.where(seen, np.where(visible, weights, 1).min(axis=-1), 0),
    ]  # fmt: skip
    # [sequences, heads, queries] -> [heads, sequences x queries]
    return AttentionRows(
        *(torch.from_numpy(f.astype(float).swapaxes(0, 1).reshape(heads, -1)) for f in fields)
    )


def assert_rows_close(got, want, *, atol, fields=AttentionRows._fields):
    for name in fields:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == torch.float64
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def uniform_causal(length, rows):
    nothing = torch.zeros(1, 1, length, 8)
    return attention_rows(nothing[:, :, rows], nothing, mask("causal", 1, length)[:, :, rows], 1.0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_sampled_rows_agree_with_the_full_softmax(length, kind, key_heads):
    query, key = normal(2, 4, length, 16), normal(2, key_heads, length, 16, seed=1)
    visible, rows = mask(kind, 2, length), sampled(length)
    got = attention_rows(query[:, :, rows], key, visible[:, :, rows], 0.25)
    want = full_softmax(query[:, :, rows], key, visible[:, :, rows], 0.25)
    # Scores of order 1 in float32, errors of 1e-7 each.
    assert_rows_close(got, want, atol=1e-5)
    assert got.entropy.shape == (4, 2 * len(rows))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
def test_large_logits_agree_with_the_full_softmax(length, kind):
    query, key = whole(2, 2, length, 8), whole(2, 2, length, 8, seed=1)
    visible, rows = mask(kind, 2, length), sampled(length, seed=2)
    scale = 16.0  # logits up to 8 x 9 x 16 = 1,152, many of them tied at the top
    got = attention_rows(query[:, :, rows], key, visible[:, :, rows], scale)
    want = full_softmax(query[:, :, rows], key, visible[:, :, rows], scale)
    assert_rows_close(got, want, atol=2e-6)
    # exp overflows without a shift by the maximum, and log 0 meets 0 in -p log p.
    scores = scale * query[:, :, rows] @ key.transpose(-1, -2)
    assert scores.max() > 500
    assert scores.exp().isinf().any()
    weights = scores.softmax(dim=-1)
    assert (weights * weights.log()).sum(dim=-1).isnan().any()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", ["slopes per head", "per sequence", "one row for all", "float64"])
def test_bias_agrees_with_the_full_softmax(length, form):
    query, key = normal(2, 4, length, 16), normal(2, 2, length, 16, seed=1)
    rows = sampled(length, seed=3)
    distance = (torch.arange(length) - rows[:, None]).float()
    bias = {
        "slopes per head": distance * torch.tensor([0.5, 0.25, 0.1, 0.01])[:, None, None],
        "per sequence": 3 * normal(2, 1, len(rows), length, seed=4),
        "one row for all": 3 * normal(length, seed=4),
        "float64": distance.double()[None, None] / 30,
    }[form]
    visible = mask("causal", 2, length)[:, :, rows]
    got = attention_rows(query[:, :, rows], key, visible, 0.25, bias)
    want = full_softmax(query[:, :, rows], key, visible, 0.25, bias)
    assert_rows_close(got, want, atol=2e-5)


def test_uniform_causal_attention_has_the_entropy_of_the_visible_keys():
    rows = torch.arange(0, 2048, 16)
    got = uniform_causal(2048, rows)
    torch.testing.assert_close(got.visible[0], (rows + 1).double())
    assert attention_entropy(got).item() == pytest.approx(6.594, abs=5e-4)
    want = (rows + 1).double().log().mean().item()
    # Taking the 128 sampled queries for the length of the causal mask gives 7.622.
    assert attention_entropy(got).item() == pytest.approx(want, abs=1e-5)
    assert attention_entropy_normalised(got).item() == pytest.approx(1, abs=1e-6)
    inverse = 1 / (rows[1:] + 1).double()
    torch.testing.assert_close(got.maximum[0, 1:], inverse, rtol=1e-5, atol=0)
    assert attention_sink(got).item() == pytest.approx(inverse.mean().item(), rel=1e-5)


def test_metrics_without_any_row_to_measure_are_nan():
    query, key = normal(1, 2, 6, 8), normal(1, 2, 6, 8, seed=1)
    blind = attention_rows(query, key, torch.zeros(6, 6, dtype=torch.bool), 1.0)
    for metric in METRICS:
        assert metric(blind).isnan().tolist() == [True, True]
    single = attention_rows(query, key, torch.eye(6, dtype=torch.bool), 1.0)
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
    want = attention_rows(query, key, visible, 0.3)
    hidden = ~visible.any(dim=2).squeeze(1)
    assert hidden.any()
    key[hidden[:, None].expand(2, 2, length)] = garbage
    assert_rows_close(attention_rows(query, key, visible, 0.3), want, atol=0)


@pytest.mark.parametrize("block", [1, 3000, 20_000, 10**9])
def test_the_size_of_the_block_does_not_change_the_rows(cut_blocks, block):
    query, key = whole(3, 4, 20, 8), whole(3, 2, 600, 8, seed=1)
    visible = torch.rand(3, 1, 20, 600, generator=torch.Generator().manual_seed(2)) < 0.4
    bias = whole(4, 20, 600, seed=3)
    want = attention_rows(query, key, visible, 0.125, bias)
    cut_blocks(block)
    # Keys after the last visible one of a block are left out: float32 sums in another order.
    assert_rows_close(attention_rows(query, key, visible, 0.125, bias), want, atol=2e-6)


@pytest.mark.parametrize("form", ["tokens", "sequences", "heads"])
def test_under_a_causal_mask_about_half_of_the_scores_are_computed(form):
    query, key = normal(1, 4, 1024, 8), normal(1, 2, 1024, 8, seed=1)
    shape = {"tokens": (1, 1), "sequences": (1, 1), "heads": (1, 4)}[form]
    causal = torch.ones(1024, 1024, dtype=torch.bool).tril().expand(*shape, 1024, 1024)
    causal = causal.contiguous() if form == "heads" else causal
    blocks = [
        (scores.numel(), tuple(seen.shape))
        for _, scores, seen in score_blocks(query, key, causal, 0.3, None, None)
    ]
    assert sum(number for number, _ in blocks) <= 0.6 * 4 * 1024**2
    assert {shape[1] for _, shape in blocks} == ({1} if form != "heads" else {4})


def test_a_visible_key_of_score_minus_infinity_has_no_weight():
    query, key = normal(1, 1, 2, 8), normal(1, 1, 5, 8, seed=1)
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0])
    got = attention_rows(query, key, torch.ones(1, 1, 2, 5, dtype=torch.bool), 0.3, bias)
    kept = torch.tensor([True, False, True, True, True])
    want = attention_rows(query, key, kept.expand(1, 1, 2, 5), 0.3)
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
        attention_rows(query, key, visible, 0.3, bias)
    assert at_once.bytes == 4 * 4 * 32 * 1024  # four heads, half of the queries of a sequence
    cut_blocks(4 * 16 * 1024)
    with LargestNewTensor(*inputs) as in_blocks:
        attention_rows(query, key, visible, 0.3, bias)
    assert in_blocks.bytes == 4 * 4 * 16 * 1024


def test_float16_scores_do_not_overflow():
    query = torch.full((1, 1, 3, 64), 100.0, dtype=torch.float16)
    assert (query @ query.transpose(-1, -2)).isinf().all()
    got = attention_rows(query, query, torch.tensor(True), 0.125)
    assert got.entropy[0].tolist() == pytest.approx([math.log(3)] * 3)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 7)),
        ((2, 4, 5, 8), (2, 3, 5, 8)),
        ((2, 4, 5, 8), (3, 4, 5, 8)),
        ((4, 5, 8), (4, 5, 8)),
        ((2, 4, 0, 8), (2, 4, 5, 8)),
        ((2, 4, 5, 8), (2, 4, 0, 8)),
    ],
)
def test_rows_name_the_shapes_they_cannot_use(query, key):
    with pytest.raises(ValueError, match="expected queries") as caught:
        attention_rows(torch.ones(query), torch.ones(key), torch.tensor(True), 1.0)
    assert str(list(query)) in str(caught.value)
    assert str(list(key)) in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7), (4, 7)])
def test_rows_name_a_mask_or_a_bias_that_does_not_fit(shape):
    query, key = normal(2, 4, 5, 8), normal(2, 4, 7, 8)
    with pytest.raises(ValueError, match="expected"):
        attention_rows(query, key, torch.ones(shape, dtype=torch.bool), 1.0)
    with pytest.raises(ValueError, match="expected"):
        attention_rows(query, key, torch.tensor(True), 1.0, torch.zeros(shape))


@pytest.mark.parametrize("kind", MASKS)
def test_median_is_that_of_the_visible_weights(kind):
    length = 130
    query, key = normal(2, 4, length, 16), normal(2, 2, length, 16, seed=1)
    visible = mask(kind, 2, length)
    scores = (query.double() @ key.repeat_interleave(2, dim=1).double().mT) * 0.25
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    expected = []
    for head in range(4):
        medians = [
            np.sort(weights[s, head, i][visible[s, 0, i]].numpy())[(n - 1) // 2]
            for s in range(2)
            for i in range(length)
            if (n := int(visible[s, 0, i].sum())) > 1
        ]
        expected.append(np.mean(medians))
    found = row_medians(query, key, visible, 0.25)
    got = mean_over(found.median, found.visible > 1)
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
    given_scores = medians_of_scores(scores, visible)
    for one, other in zip(given_scores, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [3000, 10**9])
@pytest.mark.parametrize("kind", MASKS)
def test_softcap_bounds_the_scores_before_the_bias(cut_blocks, kind, block):
    cut_blocks(block)
    query, key = normal(2, 4, 64, 16), normal(2, 2, 64, 16, seed=1)
    bias, visible = normal(1, 4, 1, 64, seed=2), mask(kind, 2, 64)
    capped = 3 * torch.tanh(query @ key.repeat_interleave(2, dim=1).mT / 3)
    got = attention_rows(query, key, visible, 1.0, bias, softcap=3.0)
    assert_rows_close(got, score_rows(capped + bias, visible), atol=1e-5)
    # An identity for keys turns queries into scores: the reference knows no caps.
    identity = torch.eye(64).expand(2, 4, 64, 64)
    assert_rows_close(got, full_softmax(capped + bias, identity, visible, 1.0), atol=1e-5)
    median = row_medians(query, key, visible, 1.0, bias, 3.0).median
    same = medians_of_scores(capped + bias, visible).median
    torch.testing.assert_close(median, same, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("block", [3000, 10**9])
@pytest.mark.parametrize("kind", MASKS)
def test_a_learned_sink_is_an_outcome_but_no_key(cut_blocks, kind, block):
    cut_blocks(block)
    query, key, logits = normal(2, 4, 64, 16), normal(2, 2, 64, 16, seed=1), normal(4, seed=3)
    visible = mask(kind, 2, 64)
    got = attention_rows(query, key, visible, 0.25, sink=5 * logits)
    # The same softmax with one more key, whose score is the logit for every query.
    scores = query @ key.repeat_interleave(2, dim=1).mT * 0.25
    more = torch.cat([scores, (5 * logits)[None, :, None, None].expand(2, 4, 64, 1)], dim=-1)
    seen = visible.any(dim=-1, keepdim=True)
    with_sink = score_rows(more, torch.cat([visible, seen], dim=-1))
    weights = more.masked_fill(~torch.cat([visible, seen], dim=-1), -math.inf).softmax(dim=-1)
    weights = weights.nan_to_num()
    for name in ("entropy", "visible"):
        torch.testing.assert_close(getattr(got, name), getattr(with_sink, name), atol=1e-5, rtol=0)
    rows = seen.expand(2, 4, 64, 1).transpose(0, 1).flatten(1)
    by_head = weights.transpose(0, 1).flatten(1, 2)
    largest = by_head[..., :-1].amax(dim=-1).double()
    torch.testing.assert_close(got.maximum, largest, atol=1e-5, rtol=0)
    taken = (by_head[..., -1] + with_sink.first.float()).double()
    torch.testing.assert_close(got.first[rows], taken[rows], atol=1e-5, rtol=0)
    median = row_medians(query, key, visible, 0.25, sink=5 * logits).median
    real = weights[..., :-1].masked_fill(~visible, math.nan).nanmedian(dim=-1).values
    want = real.transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(median, want, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("scores", [torch.zeros(3, 4), torch.zeros(1, 2, 0, 4)])
def test_scores_that_are_no_scores_are_named(scores):
    with pytest.raises(ValueError, match=r"expected scores \[sequences, heads, queries, keys\]"):
        score_rows(scores, torch.ones(1, dtype=torch.bool))


def test_sink_logits_are_one_for_each_head():
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"sink logits \[heads\] = \[2\], got \[3\]"):
        attention_rows(query, query, torch.ones(1, dtype=torch.bool), 1.0, sink=torch.zeros(3))


# -- extremes of whole sequences (figure 10), beside those of rows (figure 9) --


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("block", [50, 1 << 20])
@pytest.mark.parametrize("with_sink", [False, True])
def test_extremes_of_sequences_are_those_of_all_their_weights(kind, block, with_sink, cut_blocks):
    cut_blocks(block)
    query, key = normal(4, 4, 16, 5), normal(4, 2, 16, 5, seed=1)
    visible, bias = mask(kind, 4, 16), normal(1, 4, 16, 16, seed=2)
    sink = normal(4, seed=3) if with_sink else None
    found = sequence_extremes(query, key, visible, 0.7, bias, 5.0, sink)
    scores = 0.7 * query @ key.repeat_interleave(2, dim=1).transpose(2, 3)
    scores = 5 * (scores / 5).tanh() + bias
    if sink is None:
        for one, other in zip(extremes_of_scores(scores, visible), found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0, equal_nan=True)
    scores = scores.double().numpy()
    seen = visible.expand(4, 4, 16, 16).numpy()
    for sequence, head in np.ndindex(4, 4):
        weights = []
        for row, keys in zip(scores[sequence, head], seen[sequence, head], strict=True):
            logits = row[keys] if sink is None else np.append(row[keys], sink[head].item())
            weights += [*np.exp(log_softmax(logits))[: keys.sum()]] if keys.sum() > 1 else []
        if not weights:
            assert found.maximum[head, sequence].isnan()
            continue
        weights = np.sort(weights)
        want = weights[-1], weights[(len(weights) - 1) // 2], weights[0]
        assert [part[head, sequence].item() for part in found] == pytest.approx(want, rel=1e-5)


def test_sequences_without_a_choice_are_left_out():
    visible = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    visible[1, :, :, 1:] = False
    found = sequence_extremes(normal(2, 1, 3, 2), normal(2, 1, 4, 2), visible, 1.0)
    assert found.maximum.isnan().tolist() == [[False, True]]
