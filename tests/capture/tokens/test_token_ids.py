"""Which integers of a pass are the token ids behind hidden states of a shape."""

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
