"""Between blocks: which tensor is a block's input plus its output, and whose rows enter a block."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture.tap import Stream
from geomon.capture.tap.operators import kind_of, op_of

SHAPE = (3, 5, 8)
WEIGHT, NUMBERS = torch.randn(8, 8), torch.rand(SHAPE) + 1


class Following(TorchDispatchMode):
    """Shows a stream what runs, as a tap does."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = kind_of(func)
        given = kind.by_name(args, kwargs or {})
        self.stream.before_write(kind.name, [given[each] for each in kind.writes], args)
        result = func(*args, **(kwargs or {}))
        self.stream.follow(op_of(func, types, args, kwargs or {}, result))
        return result


@contextmanager
def followed():
    stream = Stream()
    with torch.no_grad(), Following(stream):
        yield stream


GIVEN, RETURNED = {"given", "input"}, {"returned"}
SUM = GIVEN | RETURNED | {"sum"}
BOTH = {"given", "returned"}
# Functions of the input and the output of a block, and what is known of their results.
MADE = {
    "its input": (lambda x, y: x, GIVEN),
    "its output": (lambda x, y: y, RETURNED),
    "neither": (lambda x, y: NUMBERS * 2, set()),
    "a sum": (lambda x, y: x + y, SUM),
    "a sum in place": (lambda x, y: x.add_(y), SUM),
    "a sum in place of the output": (lambda x, y: y.add_(x), SUM),
    "a difference": (lambda x, y: x - y, SUM),
    "a difference the other way": (lambda x, y: torch.rsub(y, x), SUM),
    "a sum, hidden by a number of the host": (
        lambda x, y: (x + y).masked_fill(NUMBERS > 1.5, torch.tensor(0.0)), SUM,
    ),
    "a sum, hidden in place": (
        lambda x, y: (x + y).masked_fill_(NUMBERS > 1.5, torch.tensor(0.0)), SUM,
    ),
    "a gate": (lambda x, y: torch.addcmul(x, y, NUMBERS), SUM),
    "a quotient": (lambda x, y: torch.addcdiv(x, y, NUMBERS), SUM),
    "a highway": (lambda x, y: torch.lerp(x, y, 0.25), SUM),
    "a sum of what is normed": (lambda x, y: F.layer_norm(x, (8,)) + F.layer_norm(y, (8,)), SUM),
    "a sum, scaled": (lambda x, y: (x + y) * 0.5, SUM),
    "a sum and its input again": (lambda x, y: (x + y) + x, SUM),
    "a sum with a projected output": (lambda x, y: x + y @ WEIGHT, SUM),
    "a sum with a projected input": (lambda x, y: x @ WEIGHT + y, BOTH),
    "a projected sum": (lambda x, y: (x + y) @ WEIGHT, BOTH),
    "both projected": (lambda x, y: torch.cat([x, y], -1) @ torch.cat([WEIGHT, WEIGHT]), BOTH),
    "a product": (lambda x, y: x * y, GIVEN | RETURNED),
    "a sum with other numbers": (lambda x, y: x + NUMBERS, GIVEN),
    "a sum of outputs": (lambda x, y: y + y.exp(), RETURNED),
    "sums of both with others": (lambda x, y: (x + NUMBERS) * (y + NUMBERS), GIVEN | RETURNED),
    "rolled": (lambda x, y: x.roll(1, 1), {"given"}),
    "numbers of the largest": (lambda x, y: (x + y).argmax(-1), set()),
    "other numbers in its place": (lambda x, y: torch.mul(NUMBERS, 2, out=torch.empty(SHAPE)),
                                   set()),
}  # fmt: skip


@pytest.mark.parametrize("way", MADE)
def test_a_sum_is_the_input_number_by_number_with_something_of_the_output(way):
    make, expected = MADE[way]
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    with followed() as stream:
        stream.start(x, y)
        made = make(x, y)
    assert stream.origins(made) == expected
    assert stream.is_sum(made) == ("sum" in expected)


def test_each_block_begins_anew_and_its_input_may_be_unknown():
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    with followed() as stream:
        stream.start(x, y)
        first = x + y
        stream.start(first, y)
        assert stream.origins(x) == set()
        assert stream.origins(first) == GIVEN
        assert stream.is_sum(first + y)
        stream.start(None, y)
        assert stream.origins(first) == set()
        assert not stream.is_sum(first + y)
        stream.forget()
        assert stream.origins(y) == set()


ORDER = torch.tensor([4, 0, 2, 2])
# Functions of the rows of a table, and the row behind each row of the result.
ROWS = {
    "as they are": (lambda e: e, lambda n: n),
    "scaled and placed": (lambda e: F.dropout(e * 8 + NUMBERS, 0.1), lambda n: n),
    "turned": (lambda e: e.transpose(0, 1), lambda n: n.transpose(0, 1)),
    "picked": (lambda e: e[:, ORDER], lambda n: n[:, ORDER]),
    "behind another": (
        lambda e: torch.cat([NUMBERS[:, :2], e], 1),
        lambda n: torch.cat([torch.full((3, 2), -1), n], 1),
    ),
    "changed in place": (lambda e: e.mul_(2).add_(1), lambda n: n),
    "projected": (lambda e: e @ WEIGHT, lambda n: n),
}


@pytest.mark.parametrize("way", ROWS)
def test_rows_of_a_table_are_traced_to_what_enters_a_block(way):
    make, rows = ROWS[way]
    with followed() as stream:
        table = torch.randn(SHAPE)
        stream.take_table(7, table)
        made = make(table)
        found = stream.rows_of(made)
    assert found.keys() == {7}
    assert found[7].tolist() == rows(torch.arange(15).view(3, 5)).flatten().tolist()


def test_tables_that_did_not_contribute_are_left_out():
    with followed() as stream:
        first, second, third = (torch.randn(SHAPE) for _ in range(3))
        for number, table in ((1, first), (2, second), (5, third)):
            stream.take_table(number, table)
        both = torch.cat([first, third], 1)
        assert stream.rows_of(NUMBERS) == {}
        assert stream.rows_of(second).keys() == {2}
        found = stream.rows_of(both)
        assert stream.rows_of(first.sum((0, 1))) == {}
        stream.forget()
        assert stream.rows_of(both) == {}
        assert stream.rows_of(first) == {}
    assert found[1].view(3, 10)[1].tolist() == [5, 6, 7, 8, 9, -1, -1, -1, -1, -1]
    assert found[5].view(3, 10)[1].tolist() == [-1, -1, -1, -1, -1, 5, 6, 7, 8, 9]


def test_a_tensor_in_memory_that_was_freed_is_not_traced():
    """Blocks are not followed, so what lies at an address may be another tensor by now."""
    with followed() as stream:
        stream.take_table(1, torch.randn(SHAPE))
        again = torch.empty_strided(SHAPE, (40, 8, 1))
    for _ in range(100):
        with torch.no_grad():
            other = torch.randn(SHAPE)  # which no stream has seen
        assert stream.rows_of(other) == {}
    assert stream.rows_of(again) == {}


def test_tables_are_freed_as_they_are_forgotten():
    with followed() as stream:
        table = torch.randn(SHAPE)
        stream.take_table(1, table)
        made = table * 2
    kept = weakref.ref(table)
    stream.forget()
    del table, made
    assert kept() is None


def test_lookups_are_shown_with_weight_integers_and_result():
    ids, table, shown = torch.tensor([[1, 0], [2, 2]]), torch.randn(3, 8), []
    with followed() as stream:
        F.embedding(ids, table)  # which nobody asks for
        stream.on_lookup = lambda *given: shown.append(given)
        rows = F.embedding(ids, table)
        rows * 2
    ((weight, integers, result),) = shown
    assert weight is table
    assert torch.equal(integers, ids)
    assert torch.equal(result, rows)
