"""Recorded operators are understood without a model, each by its rule."""

import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture.tap import AttentionWeights
from geomon.capture.tap.columns import layout_of
from geomon.capture.tap.operators import op_of
from geomon.capture.tap.provenance import Provenance

SHAPE, WIDTH = (3, 5, 8), 12
ORDER = torch.tensor([4, 0, 2, 1, 3])
EVERY_OTHER = torch.arange(5) % 2 == 0


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append(op_of(func, types, args, kwargs or {}, result))
        return result


@contextmanager
def recorded():
    with torch.no_grad(), Recorder() as recorder:
        yield recorder.ops


def understand(ops, hidden):
    """Follow these operators in a block that received hidden states."""
    found = Provenance()
    found.start((), hidden)
    for op in ops:
        found.at += 1
        found.follow(op)
    return found


def halves(x):
    return x[..., : WIDTH // 2], x[..., WIDTH // 2 :]


def windows(x):
    return torch.stack(x.unfold(1, 2, 1).unbind(-1), -1)


# Functions that move elements of a projection, [sequences, tokens, width]; numbers show where to.
MOVES = {
    "as it is": lambda x: x,
    "heads": lambda x: x.view(3, 5, 4, 3).transpose(1, 2),
    "copied": lambda x: x.transpose(1, 2).contiguous(),
    "in halves": lambda x: torch.cat(halves(x)[::-1], -1),
    "joined along tokens": lambda x: torch.cat([x[:, 3:], x[:, :3]], 1),
    "stacked": lambda x: torch.stack(halves(x)),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1), value=0.0),
    "selected": lambda x: x.index_select(1, ORDER),
    "selected from the end": lambda x: x.index_select(-2, ORDER),
    "indexed": lambda x: x[:, ORDER],
    "indexed twice": lambda x: x[torch.tensor([[2], [0]]), ORDER],
    "indexed by truth": lambda x: x.flatten(0, 1)[EVERY_OTHER.repeat(3)],
    "rolled": lambda x: x.roll((1, -2), (0, 1)),
    "flipped": lambda x: x.flip(1, 2),
    "chosen": lambda x: torch.where(EVERY_OTHER[:, None], x, x.flip(0)),
    "repeated": lambda x: x.repeat(2, 1, 1),
    "repeated by heads": lambda x: x.view(3, 5, 4, 3).repeat_interleave(2, 2),
    "in windows": windows,
    "written behind zeros": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:],
    "copied into": lambda x: x.clone().copy_(x.flip(1)),
}


def origins(ops, x, y) -> np.ndarray:
    """Number of the element of the projection behind each element; negative without one."""
    made = understand(ops, x).made_of(y)
    indices = np.stack([each.ravel() for each in np.indices(tuple(y.shape))])
    known = []
    projection, row, column = made.trace(layout_of(y).addresses(indices), known)
    assert [root.is_input for root in known] == [False]
    return np.where(projection == 0, row * WIDTH + column, projection)


@pytest.mark.parametrize("move", MOVES)
def test_elements_come_from_where_their_numbers_show(move):
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        y = MOVES[move](x @ weight)
    # From 1 on, because padding is 0.
    numbers = torch.arange(1, x[..., 0].numel() * WIDTH + 1).view(*SHAPE[:2], WIDTH).double()
    expected = MOVES[move](numbers).flatten().long().numpy() - 1
    found = origins(ops, x, y)
    assert np.array_equal(found[expected >= 0], expected[expected >= 0])
    assert (found[expected < 0] < 0).all()


KEEPING = {
    "scaled": lambda x: x * 0.5,
    "normed": lambda x: F.layer_norm(x, (WIDTH,)),
    "cast": lambda x: x.to(torch.bfloat16),
    "dropped": lambda x: F.dropout(x, 0.5),
    "shifted by places": lambda x: x + torch.randn(5, WIDTH),
    "scaled in place": lambda x: x.clone().mul_(2.0),
    "turned": lambda x: x * torch.rand(5, 1) + torch.cat([-x[..., 6:], x[..., :6]], -1),
    "with a filter": lambda x: (
        x + F.conv1d(x.transpose(1, 2), torch.randn(WIDTH, 1, 3), padding=2, groups=WIDTH)[..., :5]
        .transpose(1, 2)
    ),
    "with a filter first": lambda x: (
        F.conv1d(x.transpose(1, 2), torch.randn(WIDTH, 1, 3), padding=2, groups=WIDTH)[..., :5]
        .transpose(1, 2) + x
    ),
}  # fmt: skip


@pytest.mark.parametrize("keep", KEEPING)
def test_numbers_at_the_same_place_keep_it(keep):
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        y = KEEPING[keep](x @ weight)
    assert np.array_equal(origins(ops, x, y), np.arange(y.numel()))


MIXING = {
    "softmax": lambda x: x.softmax(-1),
    "sum so far": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1).values,
    "gathered": lambda x: x.gather(1, torch.zeros(3, 5, WIDTH, dtype=torch.int64)),
}


@pytest.mark.parametrize("mix", MIXING)
def test_numbers_of_many_places_are_of_none(mix):
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        y = MIXING[mix](x @ weight)
    assert understand(ops, x).made_of(y) is None


BIASES = {
    "of features": lambda x, b: x + b,
    "of heads": lambda x, b: x.view(3, 5, 4, 3) + b.view(4, 3),
    "of heads, turned": lambda x, b: x.view(3, 5, 4, 3).transpose(1, 2) + b.view(4, 1, 3),
    "of heads, first": lambda x, b: b.view(4, 3) + x.view(3, 5, 4, 3),
    "in place": lambda x, b: x.add_(b),
}


@pytest.mark.parametrize("add", BIASES)
def test_a_bias_makes_a_projection_of_its_own(add):
    x, weight, bias = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH), torch.randn(WIDTH)
    with recorded() as ops:
        y = BIASES[add](x @ weight, bias)
    (root,) = understand(ops, x).made_of(y).roots
    found = root.by_token[0].reshape(15, WIDTH)
    torch.testing.assert_close(found, (x @ weight + bias).flatten(0, 1))


@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 5, 1, 3), (3, 1, 4, 3)])
def test_numbers_of_places_or_sequences_are_no_bias(shape):
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        projected = x @ weight
        y = projected.view(3, 5, 4, 3) + torch.randn(shape)
    (root,) = understand(ops, x).made_of(y).roots
    assert torch.equal(root.by_token[0].reshape(3, 5, WIDTH), projected)


SCALES = {
    "none": (lambda s: s, 1.0),
    "a factor": (lambda s: s * 0.25, 0.25),
    "a quotient in place": (lambda s: s.div_(8), 0.125),
    "two": (lambda s: (s / 2).masked_fill(torch.eye(5).bool(), -1e9) * 3, 1.5),
    "a number of the host": (lambda s: s * torch.tensor(0.5), 0.5),
    "a number for each": (lambda s: s * torch.rand(5), None),
    "a cap": (lambda s: torch.tanh(s / 30) * 30, None),
}


@pytest.mark.parametrize("scale", SCALES)
def test_the_factor_from_products_to_scores_is_known_if_it_is_a_number(scale):
    x, weights = torch.randn(SHAPE), torch.randn(2, SHAPE[-1], WIDTH)
    with recorded() as ops:
        q, k = x @ weights[0], x @ weights[1]
        scores = SCALES[scale][0](q @ k.transpose(-1, -2))
    found = understand(ops, x)
    (product,) = found.products(scores)
    assert torch.equal(product.left, q)
    assert torch.equal(product.right, k.transpose(-1, -2))
    assert found.scale(scores) == SCALES[scale][1]
    assert found.reads_numbers == (scale == "a number of the host")


def test_understanding_depends_on_the_list_alone():
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        y = MOVES["in halves"](x @ weight)
    first, second = (origins(ops, x, y) for _ in range(2))
    assert np.array_equal(first, second)
    assert understand(ops[:0], x).made_of(y) is None


# -- heads -----------------------------------------------------------------------------------------


def by_heads(x):
    return x.view(*x.shape[:2], 4, 3).transpose(1, 2)


EVERY = torch.arange(15).view(3, 5)
OTHER = torch.randn(3, 4, 2, 3)
STEPS = [0, 3, 6, 9]
# Functions of heads, [sequences, heads, tokens, width]; first column of each head, how often
# each is repeated in a row, and the row of the hidden states behind each token.
HEADS = {
    "as projected": (lambda h: h, STEPS, 1, EVERY),
    "copied": (lambda h: h.contiguous(), STEPS, 1, EVERY),
    "the other way round": (lambda h: h.flip(1), STEPS[::-1], 1, EVERY),
    "some": (lambda h: h[:, 1:3], [3, 6], 1, EVERY),
    "repeated": (lambda h: h.repeat_interleave(2, 1), [0, 0, 3, 3, 6, 6, 9, 9], 2, EVERY),
    "expanded": (
        lambda h: h[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2),
        [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9], 3, EVERY,
    ),
    "one after another": (lambda h: h.repeat(1, 2, 1, 1), STEPS * 2, 1, EVERY),
    "one of them twice": (lambda h: torch.cat([h, h[:, :1]], 1), [*STEPS, 0], 1, EVERY),
    "padded": (lambda h: F.pad(h, (0, 2)), STEPS, 1, EVERY),
    "turned by pairs": (lambda h: h[..., :2] * 0.5 - h[..., :2].flip(-1), STEPS, 1, EVERY),
    "rolled": (lambda h: h.roll(1, 2), STEPS, 1, EVERY.roll(1, 1)),
    "every other token": (lambda h: h[:, :, ::2], STEPS, 1, EVERY[:, ::2]),
    "behind others": (
        lambda h: torch.cat([OTHER, h], 2), STEPS, 1,
        torch.cat([torch.full((3, 2), -1), EVERY], 1),
    ),
    "a token twice": (lambda h: torch.cat([h, h[:, :, :1]], 2), STEPS, 1, None),
    "chosen": (lambda h: h[:, :, ORDER], STEPS, 1, EVERY[:, ORDER]),
    "chosen by each head": (lambda h: by_each(h, 5), STEPS, 1, EVERY),
}  # fmt: skip
PICKS = torch.rand(12, 5).argsort(1)


def by_each(heads, count):
    """Tokens that each head of each sequence picks for itself."""
    found = heads.flatten(0, 1)[torch.arange(12)[:, None], PICKS[:, :count]]
    return found.unflatten(0, (3, 4))


BY_NUMBERS = {"the other way round", "turned by pairs", "rolled", "chosen", "chosen by each head"}


@pytest.mark.parametrize("way", HEADS)
def test_heads_are_known_by_their_columns_and_tokens(way):
    make, firsts, repeats, tokens = HEADS[way]
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        heads = make(by_heads(x @ weight))
    found = understand(ops, x)
    columns = found.columns(heads)
    assert columns.numbers == tuple(firsts)
    assert columns.repeats == repeats
    assert columns.width == min(3, heads.shape[-1])
    assert columns.distinct().numbers == tuple(dict.fromkeys(firsts))
    assert columns.distinct().repeats == 1
    assert (columns.tokens is None) is (tokens is None)
    if tokens is not None:
        assert np.array_equal(columns.tokens, tokens)
    is_plain = tokens is not None and torch.equal(tokens, EVERY)
    assert columns.pattern.is_plain is is_plain
    assert found.reads_numbers is (way in BY_NUMBERS)
    run = columns.pattern.run
    expected = [first + n for first in firsts for n in range(columns.width)]
    assert isinstance(run, slice) is (expected == [*range(firsts[0], firsts[0] + len(expected))])
    assert ([*range(WIDTH)][run] if isinstance(run, slice) else run.tolist()) == expected


UNKNOWN = {
    "the hidden states": lambda x, h: by_heads(torch.cat([x, x[..., :4]], -1)),
    "a column twice": lambda x, h: torch.cat([h[..., :1], h[..., :1], h[..., 2:]], -1),
    "weights": lambda x, h: h.softmax(-1),
    "zeros": lambda x, h: torch.zeros_like(h),
    "a part of the tokens for each head": lambda x, h: by_each(h, 3),
    "other heads beside": lambda x, h: torch.cat([h, OTHER[:, :, :1].expand(-1, -1, 5, -1)], 1),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_heads_that_are_no_columns_of_projections_are_unknown(way):
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        heads = UNKNOWN[way](x, by_heads(x @ weight))
    assert understand(ops, x).columns(heads) is None


@pytest.mark.parametrize("kinds", [2, 8, 9])
def test_tokens_have_up_to_eight_kinds_of_weights(kinds):
    x, weights = torch.randn(2, 9, 8), torch.randn(kinds, 8, WIDTH)
    with recorded() as ops:
        parts = [x[:, n : n + 1] @ weight for n, weight in enumerate(weights)]
        heads = by_heads(torch.cat(parts, 1))
    columns = understand(ops, x).columns(heads)
    if kinds == 9:  # each token has its own, as experts have
        assert columns is None
        return
    assert len(columns.projections) == kinds
    assert columns.pattern.kinds.tolist() == [[*range(kinds)]] * 2
    assert columns.tokens.tolist() == [[*range(kinds)], [*range(9, 9 + kinds)]]
    assert not columns.pattern.is_plain
    for number, rows in enumerate(columns.pattern.rows):
        expected = np.full((2, kinds), -1)
        expected[:, number] = [0, 1]  # rows of this projection
        assert np.array_equal(rows, expected)


def test_first_features_of_projections_on_other_ranks_are_counted():
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        projected = x @ weight
    found = understand(ops, x)
    found.projected(projected, x, 24)
    assert found.columns(by_heads(projected)).numbers == (24, 27, 30, 33)


def test_a_module_that_projects_in_its_own_way_is_a_projection_of_what_it_was_given():
    x, made = torch.randn(SHAPE), [torch.randn(3, 5, WIDTH) for _ in range(2)]
    found = understand([], x)
    for number, output in enumerate(made):
        found.projected(output, x, 12 * number)
    for number, output in enumerate(made):
        columns = found.columns(by_heads(output))
        assert columns.numbers == tuple(12 * number + first for first in STEPS)
        assert np.array_equal(columns.tokens, EVERY)
        (root,) = columns.projections
        assert root.made_at == -1 - number
        assert torch.equal(root.by_token[0], output)


def test_a_norm_of_a_projection_is_no_projection_of_its_own():
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1], WIDTH)
    with recorded() as ops:
        projected = x @ weight
        normed = F.layer_norm(projected, (WIDTH,))
    found = understand(ops, x)
    found.projected(normed, projected)
    (root,) = found.columns(by_heads(normed)).projections
    assert torch.equal(root.by_token[0].reshape(projected.shape), projected)


def test_tokens_of_projections_are_counted_once_for_each_number():
    x, context = torch.randn(SHAPE), torch.randn(3, 7, SHAPE[-1])
    weights = torch.randn(3, SHAPE[-1], WIDTH)
    with recorded() as ops:
        queries, keys = x @ weights[0], x @ weights[1]
        both = torch.cat([context @ weights[2], queries + keys], 1)
    found = Provenance()
    found.start([context], x)
    for op in ops:
        found.at += 1
        found.follow(op)
    assert found.token_counts(both) == [15, 21]
    assert found.token_counts(queries) == [15]
    assert found.token_counts(x) == found.token_counts(torch.ones(3)) == []


# -- products --------------------------------------------------------------------------------------

# Scores of queries and keys: how many products flowed into them, the factor of both before, and
# the one since.
SCORES = {
    "a product": (lambda q, k: q @ k.mT, 1, 1.0, 1.0),
    "both scaled before": (lambda q, k: (q * 0.5) @ (k * 0.5).mT, 1, 0.5, 1.0),
    "one scaled before": (lambda q, k: (q * 0.5) @ k.mT, 1, 1.0, 1.0),
    "with a mask, scaled": (
        lambda q, k: torch.baddbmm(torch.zeros(3, 5, 5), q, k.mT, alpha=0.25), 1, 1.0, 0.25
    ),
    "two": (lambda q, k: q @ k.mT + k @ q.mT, 2, 1.0, 1.0),
    "of two, one scaled": (lambda q, k: (q @ k.mT) * 2 + k @ q.mT, 2, 1.0, 2.0),
    "on another": (lambda q, k: torch.baddbmm(q @ k.mT, k, q.mT), 2, 1.0, None),
    "scaled by nothing": (lambda q, k: (q @ k.mT) * 0, 1, 1.0, None),
    "divided by a number for each": (lambda q, k: (q @ k.mT) / torch.rand(5), 1, 1.0, None),
    "squared": (lambda q, k: (q @ k.mT).square(), 1, 1.0, None),
    "copied, cast and hidden": (
        lambda q, k: ((q @ k.mT).clone().double() / 4).masked_fill(torch.eye(5) > 0, -9.0),
        1, 1.0, 0.25,
    ),
    "joined": (lambda q, k: torch.cat([q @ k.mT * 2, torch.zeros(3, 5, 1)], -1), 1, 1.0, 2.0),
    "with weights": (lambda q, k: q @ torch.ones(WIDTH, 5), 0, None, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("way", SCORES)
def test_products_of_queries_and_keys_flow_into_scores_with_a_factor(way):
    make, count, before, since = SCORES[way]
    x, weights = torch.randn(SHAPE), torch.randn(2, SHAPE[-1], WIDTH)
    with recorded() as ops:
        q, k = x @ weights[0], x @ weights[1]
        scores = make(q, k)
    found = understand(ops, x)
    products = found.products(scores)
    assert len(products) == count
    assert all(product.factor == before for product in products)
    assert all(product.size == 75 for product in products)
    assert found.scale(scores) == since


# Functions of softmax weights, and whether they change them before values are mixed by them.
WEIGHED = {
    "as they are": (lambda w, v: w @ v, False),
    "dropped": (lambda w, v: F.dropout(w, 0.5) @ v, False),
    "by a mask": (lambda w, v: (w * torch.ones(5)).masked_fill(torch.eye(5) > 0, 0.0) @ v, False),
    "sharpened": (lambda w, v: w.square() @ v, True),
    "by numbers of tokens": (lambda w, v: (w * v[..., :1]) @ v, True),
    "as they are, then changed": (lambda w, v: w @ v + w.square() @ v, False),
    "never": (lambda w, v: w.sum(), None),
}


@pytest.mark.parametrize("way", WEIGHED)
def test_softmax_weights_are_followed_until_they_first_meet_values(way):
    make, changed = WEIGHED[way]
    x, weights = torch.randn(SHAPE), torch.randn(3, SHAPE[-1], WIDTH)
    with recorded() as ops:
        q, k, v = (x @ weight for weight in weights)
        make((q @ k.mT).softmax(-1), v)
    found, watched = Provenance(), AttentionWeights()
    found.start((), x)
    for op in ops:
        found.at += 1
        if op.name == "_softmax":
            found.expect(watched)
        found.follow(op)
    assert watched.changed is changed


def one_sequence(make):
    """Follow heads of a sequence of five tokens."""
    x, weight = torch.randn(1, 5, 8), torch.randn(8, WIDTH)
    with recorded() as ops:
        heads = make(by_heads(x @ weight))
    return understand(ops, x).columns(heads)


@pytest.mark.parametrize("token", [0, 4])
def test_tokens_are_known_one_by_one_but_not_if_one_of_them_comes_twice(token):
    columns = one_sequence(lambda h: torch.cat([OTHER[:1], h[:, :, token : token + 1]], 2))
    assert columns.tokens.tolist() == [[-1, -1, token]]
    assert columns.pattern.kinds.tolist() == [[-1, -1, 0]]
    columns = one_sequence(lambda h: torch.cat([h, h[:, :, token : token + 1]], 2))
    assert columns.tokens is None
    assert columns.numbers == tuple(STEPS)


def test_tensors_of_a_block_are_freed_as_they_are_forgotten():
    x = torch.randn(SHAPE)
    with recorded() as ops:
        made = x @ torch.randn(SHAPE[-1], WIDTH)
    found = understand(ops, x)
    kept = [weakref.ref(x), weakref.ref(made)]
    ops.clear()
    found.forget()
    assert found.made_of(x) is found.made_of(made) is None
    assert not found.is_followed(made)
    del x, made
    assert [each() for each in kept] == [None, None]
