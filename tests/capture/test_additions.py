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
