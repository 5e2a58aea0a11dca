"""Some integers of a pass are the token ids behind hidden states of a shape."""

import pytest
import torch

from geomon.capture.tokens.token_ids import Lookup, TokenIds

WORDS = torch.tensor([[7, 3, 9, 4], [1, 8, 2, 6], [5, 5, 0, 3]])
PLACES = torch.arange(5).expand(2, 5)


def token_ids(*tables, width=8):
    found = TokenIds()
    for number, ids in enumerate(tables):
        table = torch.nn.Embedding(10, 8)
        found.lookups.append(Lookup(ids, table, passed=True, number=number, width=width))
    return found


@pytest.mark.parametrize(
    ("tables", "shapes", "first"),
    [
        ([PLACES, WORDS], [(2, 5), (3, 4)], (3, 4)),  # positions come last
        ([PLACES], [(2, 5)], (2, 5)),  # but before nothing
        ([WORDS], [(4, 3), (3, 4)], (3, 4)),  # transposed ids come later
        ([WORDS], [(4, 3)], (4, 3)),
        ([WORDS], [(12,)], (12,)),  # flattened
        ([WORDS], [(1, 3, 4)], (1, 3, 4)),  # with a batch dimension of 1
        ([WORDS], [(2, 6), (13,)], None),
        ([], [(3, 4)], None),
    ],
)
def test_the_first_shape_that_fits_the_token_ids_is_found(tables, shapes, first):
    assert token_ids(*tables).first_fitting(shapes) == first


@pytest.mark.parametrize(
    ("width", "shape", "may"),
    [
        (8, (3, 4, 8), True),
        (None, (3, 4, 8), True),  # a table of unknown width
        (4, (3, 4, 8), False),  # as wide as the sequences are long
        (8, (3, 5, 8), False),  # other tokens
        (8, (12, 8), True),
    ],
)
def test_a_table_may_have_made_hidden_states_of_its_width_with_a_row_of_each_token(
    width, shape, may
):
    assert token_ids(WORDS, width=width).may_have_made(torch.zeros(shape)) is may


TYPES = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]])
TARGETS = WORDS.roll(-1, dims=1)


@pytest.mark.parametrize(
    ("tables", "shape", "number"),
    [
        ([WORDS], (3, 4), 0),
        ([torch.arange(4).expand(3, 4), WORDS], (3, 4), 1),  # rather than positions
        ([TYPES, WORDS], (3, 4), 1),  # rather than token types
        ([WORDS], (4, 3), 0),
        ([WORDS], (12,), 0),
        ([WORDS], (2, 3, 4), None),
        ([], (3, 4), None),
    ],
)
def test_the_token_ids_of_a_shape_are_those_of_the_table_that_knows_most_tokens(
    tables, shape, number
):
    found = token_ids(*tables)
    table = None if number is None else found.lookups[number].table
    assert found.table(shape) is table
    ids = found.find(shape)
    assert (ids is None) == (number is None)
    if ids is not None:
        arranged = ids.arrange(ids.lookup.ids)
        assert arranged.tolist() == (WORDS.T if shape == (4, 3) else WORDS.view(shape)).tolist()
        assert (ids.streams, ids.turned) == (1, shape == (4, 3))


def test_integers_that_come_after_the_hidden_states_did_not_make_them():
    found = token_ids(TYPES)
    found.begin()
    found.lookups += token_ids(TARGETS).lookups
    assert found.find((3, 4)).lookup.ids is TYPES
    found.forget_states()  # of another pass, whose tables were called before
    assert found.find((3, 4)).lookup.ids is TARGETS


def test_hidden_states_have_the_ids_that_they_were_traced_to_whatever_fits():
    found, order = token_ids(TARGETS, WORDS), torch.arange(12).view(3, 4).flip(1)
    found.meet((3, 4), lambda: {1: order})
    found.meet((3, 4), dict)  # asked once for each shape
    assert found.find((3, 4)).arrange(WORDS).tolist() == WORDS.flip(1).tolist()
    assert not found.turned((3, 4))
    assert found.streams((3, 4)) is None
    found.meet((2, 3, 4), lambda: {1: torch.stack([order, order])})
    streams = found.streams((2, 3, 4))
    assert streams.streams == 2
    assert streams.arrange(WORDS).tolist() == [WORDS.flip(1).tolist()] * 2
    found.meet((4, 3), lambda: {1: torch.arange(12).view(3, 4).T})
    assert found.turned((4, 3))


@pytest.mark.parametrize(
    ("given", "fewer"),
    [
        ([WORDS], {(3, 6)}),  # two places of each sequence have no id
        ([WORDS, torch.arange(6).expand(3, 6)], {(3, 6)}),  # positions are no ids
        ([WORDS, torch.tensor([[5, 1, 7, 2, 8, 3]] * 3)], set()),
        ([torch.tensor([5, 1, 7])], set()),
        ([], set()),
    ],
)
def test_sequences_may_have_more_hidden_states_than_ids(given, fewer):
    found = token_ids(*given)
    shapes = [(3, 6), (3, 4), (3, 3), (2, 6), (18,), (3, 6, 2)]
    assert {shape for shape in shapes if found.fewer_than(shape)} == fewer
