"""Each layer's rows are compared with the rows of the same tokens one layer before."""

import pytest
import torch

from geomon.capture.additions import with_additions
from geomon.capture.tokens.sampling import SampledRows
from geomon.kernels.additions import row_additions


def rows_of(seed: int, width: int = 8) -> SampledRows:
    generator = torch.Generator().manual_seed(seed)
    return SampledRows(torch.randn(6, width, generator=generator), torch.arange(6), (2, 3))


@pytest.mark.parametrize("others", [[], [None, rows_of(3)], [rows_of(3, width=4)]])
def test_layers_with_the_same_tokens_and_width_are_compared(others):
    """A layer that is unknown or of another width costs only the comparisons with itself."""
    layers = [rows_of(0), rows_of(1), rows_of(2), *others]
    found = with_additions(layers, of_last=False)
    for before, each, compared in zip(layers[:2], layers[1:3], found[:2], strict=True):
        expected = row_additions(before.values, each.values)
        torch.testing.assert_close(compared.additions, expected)
    assert all(each is None or each.additions is None for each in found[2:])


# Differences of the second layer, and whether its rows are compared in spite of them.
OTHERS = {
    "nothing": ({}, True),
    "indices of their own": ({"indices": torch.arange(6) + 0}, True),
    "other tokens": ({"indices": torch.arange(6).flip(0)}, False),
    "another batch": ({"shape": (3, 2)}, False),
    "another part of it": ({"start": (1, 0)}, False),
    "fewer rows": ({"values": rows_of(1).values[:5], "indices": torch.arange(5)}, False),
    "another device": ({"values": rows_of(1).values.to("meta")}, False),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("count", [2, 3])
def test_rows_of_other_tokens_are_not_compared(other, count):
    change, is_compared = OTHERS[other]
    layers = [rows_of(0), rows_of(1)._replace(**change), rows_of(2)][:count]
    found = with_additions(layers, of_last=False)
    assert [each.additions is not None for each in found] == [is_compared] * (count - 1)
    for before, each, compared in zip(layers, layers[1:], found, strict=False):
        assert compared.values is each.values
        if is_compared:
            expected = row_additions(before.values, each.values)
            torch.testing.assert_close(compared.additions, expected)


@pytest.mark.parametrize("of_last", [True, False])
def test_rows_of_last_tokens_are_compared_if_they_are_wanted(of_last):
    layers = [rows_of(n)._replace(last=rows_of(10 + n)) for n in range(3)]
    layers += [None, rows_of(3), rows_of(4)._replace(last=rows_of(14))]
    found = with_additions(layers, of_last=of_last)
    assert [each is None for each in found] == [False, False, True, False, False]
    for before, each, compared in zip(layers[:2], layers[1:3], found, strict=False):
        torch.testing.assert_close(compared.additions, row_additions(before.values, each.values))
        if of_last:
            expected = row_additions(before.last.values, each.last.values)
            torch.testing.assert_close(compared.last.additions, expected)
        else:
            assert compared.last.additions is None
    assert found[3].additions is None  # the layer before is unknown
    assert found[4].additions is not None
    assert found[4].last.additions is None


def test_many_rows_are_compared_as_few_are():
    layers = [SampledRows(torch.randn(600, 600), torch.arange(600), (600,)) for _ in range(3)]
    for before, each, compared in zip(
        layers, layers[1:], with_additions(layers, of_last=False), strict=False
    ):
        expected = row_additions(before.values, each.values)
        torch.testing.assert_close(compared.additions, expected)
