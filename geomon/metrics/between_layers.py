"""Metrics that compare a layer with the one before it.

Layers are measured one by one, on one rank or on another, and freed: of each a metric keeps a
little, and compares it where the values of a reading are put together.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.kernels import neighbourhoods
from geomon.kernels.half_samples import HalfSamples
from geomon.kernels.neighbours import Neighbours
from geomon.metrics.layer_values import LayerValues
from geomon.metrics.views import MissingViewError

# Nearest rows that are compared: of the 16 that are kept, so many are left where some are copies of
# others at one of the two layers.
SHARED = 10
# Rows whose neighbours are compared, and of which they are kept.
_ROWS = 1024

_LAYER_BEFORE = "the layer before it"
_NOTHING_BEFORE = "the layer before it has nothing to compare with"


class Comparison(NamedTuple):
    """What two layers, or two readings of one, have been found to differ by.

    Attributes:
        parts: Values by part, "" for the value itself.
        differences: Estimate on the first half of the sequences minus that on the second, for each
            way of cutting them.
    """

    parts: dict[str, float]
    differences: list[float]


class Comparing:
    """A metric that compares a layer with another one, or with itself at another time.

    Args:
        keep: Function of views that returns what is kept of a layer; tensors on the host.
        compare: Function of what was kept earlier and of what is kept of the layer.
    """

    def __init__(self, keep: Callable[..., Any], compare: Callable[[Any, Any], Comparison]) -> None:
        self.keep = keep
        self.compare = compare
        self.__signature__ = inspect.signature(keep)
        self.__doc__ = inspect.getdoc(keep)

    def __call__(self, *views: Any) -> Any:
        """Return what is kept of a layer."""
        return self.keep(*views)


class BetweenLayers(Comparing):
    """A metric that compares each layer with the one before it in its stack.

    Its value at layer l is about what block l does; the first layer has none.
    """


def compare_layers(
    name: str, metric: BetweenLayers, layers: Sequence[LayerValues], *, strict: bool
) -> list[LayerValues]:
    """Compare what a metric kept of each layer with what it kept of the one before.

    Args:
        name: Name of the metric.
        metric: The metric.
        layers: Values of the layers of one stack, in order of depth.
        strict: Whether to raise what the metric raises, instead of a missing value.

    Returns:
        The values of the layers, with those of the metric.
    """

    def compared(before: LayerValues, layer: LayerValues) -> list[Comparison]:
        if name not in before.kept:
            raise MissingViewError(_NOTHING_BEFORE)
        pairs = zip(before.kept[name], layer.kept[name], strict=False)
        return [metric.compare(*pair) for pair in pairs]

    return [
        *layers[:1],
        *(
            with_comparison(name, layer, partial(compared, before, layer), strict=strict)
            for before, layer in pairwise(layers)
        ),
    ]


def with_comparison(
    name: str, layer: LayerValues, compare: Callable[[], Iterable[Comparison]], *, strict: bool
) -> LayerValues:
    """Add the values of a metric that compares layers to those of a layer.

    Args:
        name: Name of the metric.
        layer: Values of the layer. Where the metric kept nothing of it, they stay as they are.
        compare: Function that returns a comparison for each split of the rows.
        strict: Whether to raise what `compare` raises, instead of a missing value.
    """
    if name not in layer.kept:
        return layer
    try:
        found = [*compare()]
    except MissingViewError as error:
        return replace(layer, unseen={**layer.unseen, name: str(error)})
    except Exception as error:
        if strict:
            raise
        return replace(layer, failed={**layer.failed, name: str(error) or type(error).__name__})
    each = zip(*(one.differences for one in found), strict=True)
    differences = [sum(way) / len(found) for way in each]
    return replace(
        layer,
        parts={**layer.parts, name: [one.parts for one in found]},
        differences={**layer.differences, name: {"": differences} if differences else {}},
    )


# -- overlap of neighbours -------------------------------------------------------------------------


class NearRows(NamedTuple):
    """Neighbours of some rows of a layer, on the host.

    Attributes:
        labels: Numbers by which the tokens of the rows are known, [tokens] or [tokens, labels].
        unique: True for one row of each content, [tokens].
        rows: Indices of the rows whose neighbours are kept, ascending, [rows].
        near: Indices of their nearest unique rows, nearest first, int32, [rows, k].
        halves: Groups of all rows, and the ways of cutting them.
    """

    labels: Tensor
    unique: Tensor
    rows: Tensor
    near: Tensor
    halves: HalfSamples


def keep_near_rows(
    nearest: Neighbours, unique_rows: Tensor, positions: Tensor, known_halves: HalfSamples
) -> NearRows:
    """Share of the 10 nearest rows of a row that are so before the block too.

    Mean over up to 1,024 rows, at layer l for the rows that enter block l and those that leave it.
    Copies at either layer are left out of both. Part `n`: how many rows it stands on.
    """
    return near_rows_of(nearest, unique_rows, positions, known_halves)


def near_rows_of(
    nearest: Neighbours, unique_rows: Tensor, labels: Tensor, halves: HalfSamples
) -> NearRows:
    """Choose up to 1,024 rows of a layer, evenly spread, and copy their neighbours to the host.

    Args:
        nearest: Neighbours of every unique row.
        unique_rows: Indices of one row of each content, ascending, [unique].
        labels: Numbers by which the tokens of the rows are known, [tokens] or [tokens, labels].
        halves: Ways of cutting the rows.
    """
    count = len(labels)
    some = min(count, _ROWS)
    order = torch.arange(some, dtype=torch.int64, device=unique_rows.device)
    unique = torch.zeros(count, dtype=torch.bool, device=unique_rows.device)
    unique[unique_rows] = True
    rows = order * count // max(some, 1)
    rows = rows[unique[rows]]
    near = nearest.indices[torch.searchsorted(unique_rows, rows)]
    kept = halves._replace(group=halves.group.cpu(), first=halves.first.cpu())
    return NearRows(labels.cpu(), unique.cpu(), rows.cpu(), near.int().cpu(), kept)


def compare_near_rows(
    before: NearRows, after: NearRows, earlier: str = _LAYER_BEFORE
) -> Comparison:
    """Compare the neighbours of the rows of a layer with those that the same rows had elsewhere.

    Args:
        before: Neighbours where the rows enter the block, or at an earlier reading.
        after: Neighbours where they leave it, or now.
        earlier: Words for where `before` is from, for messages.

    Raises:
        MissingViewError: The rows are not the same tokens, or nearly all are copies of others.
    """
    if not torch.equal(before.labels, after.labels):
        raise MissingViewError(f"its rows are not the tokens that the rows of {earlier} are")
    unique = before.unique & after.unique
    rows = after.rows[torch.isin(after.rows, before.rows)]
    lists = [own.near[torch.searchsorted(own.rows, rows)].long() for own in (before, after)]
    shares = _shares(lists, [unique[near] for near in lists], SHARED)
    known = shares[~shares.isnan()]
    if len(known) == 0:
        raise MissingViewError(
            f"most rows are copies of others, here or in {earlier}: of no row are {SHARED} of the "
            "16 nearest left to compare"
        )
    differences = []
    for way in before.halves.first:
        side = way[before.halves.group]
        # In a half about every second neighbour is left.
        inside = [unique[near] & (side[near] == side[rows, None]) for near in lists]
        half = _shares(lists, inside, SHARED // 2)
        first, second = (half[side[rows] == own].nanmean() for own in (True, False))
        differences.append(before.halves.widening * float(first - second))
    return Comparison({"": float(known.mean()), "n": len(known)}, differences)


def _shares(lists: Sequence[Tensor], inside: Sequence[Tensor], k: int) -> Tensor:
    """Compute the overlap of the first k of each list that are inside; NaN where there are fewer.

    Args:
        lists: Neighbours of the rows at each of the two layers, nearest first, [rows, kept].
        inside: True for the neighbours that count, in each list.
        k: Number of neighbours.
    """
    enough = (inside[0].sum(dim=1) >= k) & (inside[1].sum(dim=1) >= k)
    one, other = (
        near[enough][own[enough] & (own[enough].cumsum(dim=1) <= k)].view(-1, k)
        for near, own in zip(lists, inside, strict=True)
    )
    found = torch.full((len(enough),), torch.nan, dtype=torch.float64, device=enough.device)
    found[enough] = neighbourhoods.neighbour_overlap(one, other)
    return found


neighbour_overlap = BetweenLayers(keep_near_rows, compare_near_rows)
