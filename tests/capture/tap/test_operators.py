"""Recorded operators are understood without a model, each by its rule."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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
