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
from geomon.kernels.neighbours import Neighbours
from geomon.metrics.layer_values import LayerValues
from geomon.metrics.metric import ENDING, said
from geomon.metrics.views import Groups, MissingViewError, renamed, spread_rows

# Nearest rows that are compared: of the 24 that are listed, so many are left where some are copies
# of others at one of the two layers.
SHARED = 10
# Rows whose neighbours are compared, and of which they are kept.
_ROWS = 1024

_LAYER_BEFORE = "the layer before it"
_NOTHING_BEFORE = "the layer before it has nothing to compare with"


class Comparison(NamedTuple):
    """What two layers, or two readings of one, have been found to differ by.

    Attributes:
        parts: Values by part, "" for the value itself.
        without: The value without each group of sequences; empty where there are none.
    """

    parts: dict[str, float]
    without: list[float]


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
    """Compare what a metric kept of each layer with what it kept of the one before."""

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
    """Add the values of a metric that compares layers to those of a layer."""
    if name not in layer.kept:
        return layer
    try:
        found = [*compare()]
    except MissingViewError as error:
        return replace(layer, unseen={**layer.unseen, name: str(error)})
    except ENDING:
        raise
    except BaseException as error:
        if strict:
            raise
        return replace(layer, failed={**layer.failed, name: said(error)})
    each = zip(*(one.without for one in found), strict=True)
    without = [sum(group) / len(found) for group in each]
    return replace(
        layer,
        parts={**layer.parts, name: [dict(one.parts) for one in found]},
        without={**layer.without, name: {"": without} if without else {}},
    )


# -- overlap of neighbours -------------------------------------------------------------------------


class NearRows(NamedTuple):
    """Neighbours of some rows of a layer, on the host.

    Attributes:
        labels: Numbers by which the tokens of the rows are known, [tokens] or [tokens, labels].
        copies: For each row the first row of the same content, [tokens].
        rows: Indices of the rows whose neighbours are kept, ascending, each the first of its
            content, [rows].
        near: Indices of their nearest rows, each the first of its content, nearest first,
            [rows, k].
        groups: Groups of all rows.
    """

    labels: Tensor
    copies: Tensor
    rows: Tensor
    near: Tensor
    groups: Groups


def keep_near_rows(
    nearest: Neighbours, query_rows: Tensor, copies: Tensor, labels: Tensor, groups: Groups
) -> NearRows:
    """Choose up to 1,024 rows of a layer, evenly spread, and copy their neighbours to the host.

    Of rows that are copies at either of two layers one is compared in both.
    """
    rows = spread_rows(query_rows, _ROWS)
    near = nearest.indices[torch.searchsorted(query_rows, rows)]
    kept = Groups(groups.of.cpu(), groups.size)
    return NearRows(labels.cpu(), copies.cpu(), rows.cpu(), near.int().cpu(), kept)


def compare_near_rows(
    before: NearRows, after: NearRows, earlier: str = _LAYER_BEFORE
) -> Comparison:
    """Compare the neighbours of the rows of a layer with those that the same rows had elsewhere."""
    if not torch.equal(before.labels, after.labels):
        raise MissingViewError(f"its rows are not the tokens that the rows of {earlier} are")
    kept = _without_copies(before, after)
    rows = kept[torch.isin(before.copies[kept], before.rows)
                & torch.isin(after.copies[kept], after.rows)]  # fmt: skip
    shares = _shares([_lists(own, rows, kept) for own in (before, after)])
    known = shares.isfinite()
    if not known.any():
        raise MissingViewError(
            f"most rows are copies of others, here or in {earlier}: of no row are {SHARED} of the "
            "nearest that are listed left to compare"
        )
    own = after.groups.of[rows]
    groups = range(after.groups.size if after.groups.size > 1 else 0)
    without = [float(shares[known & (own != group)].mean()) for group in groups]
    return Comparison({"": float(shares[known].mean()), "n": int(known.sum())}, without)


def _without_copies(before: NearRows, after: NearRows) -> Tensor:
    """Choose rows of which no two are copies at either of the two layers, ascending."""
    if (before.copies == after.copies).all():
        return before.copies.unique()
    taken: tuple[set[int], set[int]] = set(), set()
    kept = []
    contents = zip(before.copies.tolist(), after.copies.tolist(), strict=True)
    for row, (one, other) in enumerate(contents):
        if one not in taken[0] and other not in taken[1]:
            taken[0].add(one)
            taken[1].add(other)
            kept.append(row)
    return torch.tensor(kept, dtype=torch.int64, device="cpu")


def _lists(own: NearRows, rows: Tensor, kept: Tensor) -> Tensor:
    """List the neighbours of rows by the row that is kept of their content; -1 where none is."""
    of_content = torch.full_like(own.copies, -1)
    of_content[own.copies[kept]] = kept
    places = torch.searchsorted(own.rows, own.copies[rows])
    return of_content[own.near[places].long()]


def _shares(lists: Sequence[Tensor]) -> Tensor:
    """Compute the overlap of the first 10 of each list that are kept; NaN if there are fewer."""
    inside = [near >= 0 for near in lists]
    enough = (inside[0].sum(dim=1) >= SHARED) & (inside[1].sum(dim=1) >= SHARED)
    one, other = (
        near[enough][own[enough] & (own[enough].cumsum(dim=1) <= SHARED)].view(-1, SHARED)
        for near, own in zip(lists, inside, strict=True)
    )
    found = torch.full((len(enough),), torch.nan, dtype=torch.float64, device=enough.device)
    found[enough] = neighbourhoods.neighbour_overlap(one, other)
    return found


NEAR_VIEWS = ("nearest", "query_rows", "copies")

neighbour_overlap = BetweenLayers(
    renamed(keep_near_rows, *NEAR_VIEWS, "positions", "groups"), compare_near_rows
)
