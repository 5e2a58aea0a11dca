"""Compare the rows of each layer with the same rows one layer before."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from geomon.capture.tokens.sampling import SampledRows
from geomon.kernels.additions import row_additions

# Numbers of the rows of all layers up to which the host compares them together: then operators cost
# more than their arithmetic.
_FEW = 1 << 20

Kept = SampledRows | None


def with_additions(layers: Sequence[Kept], *, of_last: bool) -> list[Kept]:
    """Add a comparison with the layer before to the rows of all layers but the first.

    Args:
        layers: Rows of each layer, from the input of the first block on; None if unknown.
        of_last: Whether to compare the last tokens too.
    """
    found = _compared(layers)
    if of_last:
        last = _compared([rows and rows.last for rows in layers])
        found = [x and x._replace(last=own) for x, own in zip(found, last, strict=True)]
    return found[1:]


def _compared(layers: Sequence[Kept]) -> list[Kept]:
    found: list[Kept] = [*layers]
    alike = [_are_alike(*pair) for pair in itertools.pairwise(layers)]
    rows = [each.values for each in layers if each is not None]
    few = rows and (rows[0].device.type != "cpu" or sum(x.numel() for x in rows) <= _FEW)
    if len(alike) > 1 and all(alike) and few:
        every = torch.stack(rows)
        additions = row_additions(every[:-1].flatten(0, 1), every[1:].flatten(0, 1))
        together: Sequence[Tensor] = additions.unflatten(0, (len(alike), -1)).unbind()
        return found[:1] + [
            each and each._replace(additions=own)
            for each, own in zip(found[1:], together, strict=True)
        ]
    for place, (before, each) in enumerate(itertools.pairwise(layers), 1):
        if alike[place - 1] and before is not None and each is not None:
            found[place] = each._replace(additions=row_additions(before.values, each.values))
    return found


def _are_alike(one: Kept, other: Kept) -> bool:
    """Return whether two layers have rows of the same tokens and width."""
    if one is None or other is None:
        return False
    first, second = ((rows.shape, rows.start, rows.values.shape) for rows in (one, other))
    same = first == second and one.values.device == other.values.device
    return same and (one.indices is other.indices or torch.equal(one.indices, other.indices))
