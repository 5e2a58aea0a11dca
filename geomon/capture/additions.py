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
    alike = [_are_alike(*pair) for pair in itertools.pairwise(layers)]
    known = [rows for rows in layers if rows is not None]
    if len(alike) > 1 and all(alike) and _are_few(known):
        return _compared_together(known)
    found: list[Kept] = [*layers]
    for place, (before, each) in enumerate(itertools.pairwise(layers), 1):
        if alike[place - 1] and before is not None and each is not None:
            found[place] = each._replace(additions=row_additions(before.values, each.values))
    return found


def _are_few(layers: Sequence[SampledRows]) -> bool:
    """Return whether one comparison of all layers is cheaper than one for each."""
    on_host = layers[0].values.device.type == "cpu"
    return not on_host or sum(rows.values.numel() for rows in layers) <= _FEW


def _compared_together(layers: Sequence[SampledRows]) -> list[Kept]:
    """Compare all layers at once; each has the rows of the others."""
    every = torch.stack([rows.values for rows in layers])
    additions = row_additions(every[:-1].flatten(0, 1), every[1:].flatten(0, 1))
    together: Sequence[Tensor] = additions.unflatten(0, (len(layers) - 1, -1)).unbind()
    first, *others = layers
    compared = zip(others, together, strict=True)
    return [first, *(rows._replace(additions=own) for rows, own in compared)]


def _are_alike(one: Kept, other: Kept) -> bool:
    """Return whether two layers have rows of the same tokens and width."""
    if one is None or other is None:
        return False
    first, second = ((rows.shape, rows.start, rows.values.shape) for rows in (one, other))
    same = first == second and one.values.device == other.values.device
    return same and (one.indices is other.indices or torch.equal(one.indices, other.indices))
