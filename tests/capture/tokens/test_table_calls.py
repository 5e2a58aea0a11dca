import pytest
import torch
from torch import nn

from geomon.capture.tokens.table_calls import TableCalls
from geomon.capture.tokens.token_ids import TokenIds

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def calls(tables=(), follow=lambda number, output: None):
    kept = TokenIds()
    return TableCalls(tables, lambda: [kept], follow), kept


def table(width=4):
    torch.manual_seed(0)
    return nn.Embedding(9, width)


def call(found, used, ids):
    found.before(used, used, (ids,), {})
    found.after(used, used, used(ids))


def test_a_call_keeps_its_integers_its_table_and_the_width_of_what_came_back():
    tokens, output = table(), table()
    found, kept = calls()
    found.take_arguments((IDS,), {})
    ids = IDS.clone()
    call(found, tokens, IDS)
    call(found, output, ids)
    ids += 1  # what is kept is a copy
    first, second = kept.lookups
    assert torch.equal(first.ids, IDS)
    assert torch.equal(second.ids, IDS)
    assert (first.table, second.table) == (tokens, output)
    assert (first.number, first.width) == (1, 4)
    assert second.number == 2
    assert kept.find((2, 3)) is not None


@pytest.mark.parametrize(
    ("args", "kwargs", "is_passed"),
    [
        ((IDS,), {}, True),
        ((), {"ids": IDS}, True),
        (({"ids": IDS, "other": 3},), {}, True),
        ((IDS.clone(),), {}, False),
        ((), {}, False),
    ],
)
def test_integers_that_the_model_was_given_are_told_from_those_it_made(args, kwargs, is_passed):
    found, kept = calls()
    found.take_arguments(args, kwargs)
    call(found, table(), IDS)
    assert kept.lookups[0].passed is is_passed


NESTED = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)


@pytest.mark.parametrize("given", [torch.ones(2, 3), None, [1, 2], NESTED])
def test_what_is_no_tensor_of_integers_is_no_call(given):
    found, kept = calls()
    found.before(table(), nn.Identity(), (given,), {})
    found.before(table(), nn.Identity(), (), {})
    assert kept.lookups == []


def test_what_is_followed_is_of_the_last_call_of_the_same_table():
    followed = []
    one, other = table(), table(5)
    found, kept = calls(follow=lambda *call: followed.append(call))
    found.before(one, one, (IDS,), {})
    found.after(other, other, other(IDS))  # it was not seen to begin
    found.after(one, one, one(IDS)[:, :2])  # not a row for each
    assert kept.lookups[0].width is None
    rows = one(IDS)
    found.after(one, one, (rows, None))
    found.after(one, one, one(IDS) + 1)
    assert kept.lookups[0].width == 4
    ((number, output),) = followed
    assert (number, output is rows) == (1, True)


def test_an_operator_on_the_weight_of_a_table_that_is_not_called_is_a_call_of_it():
    own, other = table(), table(5)
    found, kept = calls(tables=[own])
    found.take_operator(other.weight, IDS, other(IDS))
    assert kept.lookups == []
    found.before(own, own, (IDS,), {})
    found.take_operator(own.weight, IDS - 1, own(IDS))  # what its call does is seen already
    found.clear()  # it was left by an error
    found.take_operator(own.weight, IDS, own(IDS))
    assert [(each.table, each.width) for each in kept.lookups] == [(own, None), (own, 4)]
    assert all(torch.equal(each.ids, IDS) for each in kept.lookups)
