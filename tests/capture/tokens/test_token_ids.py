import pytest
import torch
from torch import nn

from geomon.capture.tokens.token_ids import Lookup, TokenIds

WORDS = torch.tensor([[7, 3, 5], [1, 1, 8]])
PLACES = torch.arange(3).expand(2, 3)


def given(*integers, width=None):
    found = TokenIds()
    found.lookups += [
        Lookup(each, nn.Embedding(9, 4), number=number, width=width)
        for number, each in enumerate(integers, 1)
    ]
    return found


def traced(*orders):
    """Hidden states that were traced to what tables returned, in the order of their calls."""
    return lambda: dict(enumerate(orders, 1))


@pytest.mark.parametrize(
    ("integers", "shapes", "expected"),
    [
        ((PLACES, WORDS.T), [(2, 3), (3, 2)], (3, 2)),  # words before positions, then as they are
        ((PLACES, WORDS), [(3, 2), (2, 3)], (2, 3)),
        ((PLACES,), [(4, 4), (2, 3)], (2, 3)),
        ((WORDS,), [(4, 4), (2, 4)], None),
        ((), [(2, 3)], None),
    ],
)
def test_the_shape_is_that_of_the_likeliest_token_ids(integers, shapes, expected):
    assert given(*integers).first_fitting(shapes) == expected


@pytest.mark.parametrize(
    ("integers", "shape", "fewer"),
    [
        ((WORDS,), (2, 5), True),
        ((WORDS,), (2, 3), False),
        ((WORDS,), (3, 5), False),
        ((WORDS,), (2, 2), False),
        ((WORDS,), (2, 5, 4), False),
        ((WORDS[0],), (2, 5), False),
        ((PLACES,), (2, 3), False),
        ((PLACES, WORDS[:, :2]), (2, 3), True),
    ],
)
def test_tables_may_be_given_fewer_tokens_than_there_are_in_the_same_sequences(
    integers, shape, fewer
):
    assert given(*integers).fewer_than(shape) is fewer


def test_of_integers_of_one_shape_those_that_are_no_positions_are_the_token_ids():
    found = given(PLACES, WORDS)
    assert found.find((2, 3)).lookup is found.lookups[1]


def test_a_table_may_have_made_what_has_its_width_and_a_row_for_each_integer():
    found = given(WORDS, width=4)
    shapes = [(2, 3, 4), (2, 3, 5), (2, 4, 4)]
    assert [found.may_have_made(torch.ones(shape)) for shape in shapes] == [True, False, False]
    assert given(WORDS).may_have_made(torch.ones(2, 3, 5))  # what it returned was not seen


def test_what_tables_are_given_behind_the_first_hidden_states_counts_where_nothing_else_does():
    found = given(WORDS)
    found.begin()
    found.lookups += given(torch.tensor([[6, 4, 2], [1, 5, 3]])).lookups  # more that differ
    assert found.find((2, 3)).lookup is found.lookups[0]
    assert found.table((2, 3)) is found.lookups[0].table
    late = given()
    late.begin()
    late.lookups += given(WORDS).lookups
    assert late.find((2, 3)).lookup is late.lookups[0]
    assert late.find((2, 4)) is late.table((2, 4)) is None


def test_what_was_found_with_hidden_states_stays():
    found = given(WORDS)
    assert not found.turned((3, 2))
    found.meet((3, 2), dict)
    found.lookups += given(WORDS.T).lookups
    found.meet((3, 2), dict)
    assert found.turned((3, 2))
    assert found.find((3, 2)).lookup is found.lookups[0]
    assert found.streams((3, 2)) is None
    found.forget_states()
    assert not found.turned((3, 2))


ORDER = torch.arange(6)


@pytest.mark.parametrize(
    ("shape", "order", "streams", "turned"),
    [
        ((2, 3), ORDER, 1, False),
        ((3, 2), ORDER.view(2, 3).T, 1, True),
        ((6,), ORDER, 1, False),
        ((2, 3), ORDER.flip(0), 1, False),
        ((4, 3), ORDER.view(2, 3).repeat(2, 1), 2, False),
        ((4, 3), ORDER.view(2, 3).repeat_interleave(2, 0), 2, False),
        ((3, 2, 2), ORDER.view(2, 3).T[..., None].expand(3, 2, 2), 2, True),
        ((2, 2, 3), ORDER.view(2, 3).expand(2, 2, 3), 2, False),
    ],
)
def test_each_row_has_the_id_that_it_is_traced_to(shape, order, streams, turned):
    words = torch.tensor([[7, 3, 5], [1, 2, 8]])
    found = given(words)
    found.meet(shape, traced(order.flatten()))
    known = found.find(shape)
    assert torch.equal(known.arrange(words), words.flatten()[order].view(shape))
    assert (known.streams, known.turned) == (streams, turned)
    assert (found.streams(shape) is None) == (streams == 1)


@pytest.mark.parametrize(
    ("integers", "orders", "chosen"),
    [
        (
            (WORDS, WORDS + 1),
            (torch.full((6,), -1), ORDER),
            1,
        ),  # the other stack's have nothing to do with it
        ((PLACES, WORDS), (ORDER, ORDER), 1),
        ((WORDS, PLACES), (ORDER, ORDER.flip(0)), 0),
        ((WORDS,), (torch.tensor([0, 1, 2, 3, 4, -1]),), 0),  # not of all: the shape says it
    ],
)
def test_of_several_tables_those_count_that_rows_are_traced_to(integers, orders, chosen):
    found = given(*integers)
    found.meet((2, 3), traced(*orders))
    assert found.find((2, 3)).lookup is found.lookups[chosen]


@pytest.mark.parametrize("once", [PLACES[:1], torch.tensor([[0, 0, 1]]), torch.tensor([7, 3, 5])])
def test_positions_and_types_of_one_sequence_are_no_tokens_of_several_streams(once):
    found = given(once)
    found.meet((2, 3), traced(torch.arange(3).repeat(2)))
    assert found.find((2, 3)) is None


def test_other_integers_have_another_checksum():
    sums = [given(*each).checksum() for each in ((WORDS,), (WORDS + 1,), (WORDS, PLACES), ())]
    assert len(set(sums)) == 4
    assert given(WORDS.T.contiguous().T).checksum() == sums[0]
