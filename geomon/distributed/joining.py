"""Join views over different tokens, each in the way that it declares.

Shorter sequences are padded with keys and queries that nobody sees, as one process pads a batch, so
that every softmax row stays the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from geomon.capture import CAPTURED, SOURCES, Layer, source_of

# Captured attention of a layer: sequences, queries per sequence, keys per sequence.
Shape = tuple[int, int, int]

_NOT_ON_ALL = "it is known for the rows of some ranks or batches, but not for others"
_OTHER_FORMS = "ranks or batches captured it in different forms"


def of_source(views: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Keep what is given for the views of one source."""
    return {view: given for view, given in views.items() if source_of(view) == source}


def attention_shape(layer: Layer) -> Shape | None:
    """Return the shape of the layer's captured attention, or None."""
    return _shape(layer.captured)


def _shape(views: Mapping[str, Any]) -> Shape | None:
    """Return the shape from queries and keys, or from scores of hand-written attention."""
    if "query" in views:
        query = views["query"]
        return query.shape[0], query.shape[2], views["key"].shape[2]
    if "scores" in views:
        scores = views["scores"]
        return scores.shape[0], scores.shape[2], scores.shape[3]
    return None


def join_source(parts: Sequence[Layer], source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Join the views of a source, and say why views are missing.

    Parts that saw nothing of the source do not contribute to it.
    """
    holders = [part for part in parts if of_source(part.captured, source)]
    views = [of_source(part.captured, source) for part in holders]
    lost = _not_on_all(views, is_one=SOURCES[source].is_one)
    views = [{name: own[name] for name in own if name not in lost} for own in views]
    missing = dict.fromkeys(lost, _NOT_ON_ALL)
    if any(_forms(own) != _forms(views[0]) for own in views):
        return {}, missing | dict.fromkeys((name for own in views for name in own), _OTHER_FORMS)
    shapes = [_shape(own) for own in views]
    joined = {
        name: _WAYS[CAPTURED[name].merge].join([own[name] for own in views], shapes)
        for name in views[0]
    }
    return joined, missing | of_source(holders[0].missing, source)


def _not_on_all(views: Sequence[Mapping[str, Any]], *, is_one: bool) -> dict[str, None]:
    """List views that some parts lack without an effect on the others.

    If the views describe one operation, only numbers of all rows have no effect on the others.
    """
    return {
        name: None
        for own in views
        for other in views
        for name in own
        if name not in other and (_WAYS[CAPTURED[name].merge].is_reduced or not is_one)
    }


def _forms(views: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that must be equal in all parts."""
    return {name: _WAYS[CAPTURED[name].merge].form(value) for name, value in views.items()}


# -- the ways --------------------------------------------------------------------------------------

_Shapes = Sequence[Shape | None]


class _Way(NamedTuple):
    """A way in which the parts of a view are joined.

    Attributes:
        form: Function of a part that returns what all parts must share.
        join: Function of the parts, and of the shapes of their attention, that returns the whole.
        is_reduced: Whether the whole is a sum or an extreme of the parts.
    """

    form: Callable[[Any], Any]
    join: Callable[[Sequence[Any], _Shapes], Any]
    is_reduced: bool = False


def _any_form(part: Any) -> None:
    """Allow any form: a grid may be given once for all rows, or not at all."""


def _content(part: Any) -> Any:
    return (part.dtype, part.tolist()) if isinstance(part, Tensor) else part


def _first(parts: Sequence[Any], _: _Shapes) -> Any:
    return parts[0]


def _rows(parts: Sequence[Tensor], _: _Shapes) -> Tensor:
    return torch.cat([*parts])


def _numbers(parts: Sequence[Tensor], _: _Shapes) -> Tensor:
    """Concatenate numbers of sequences, which each part counts from 0."""
    counts = [own.max().item() + 1 if len(own) else 0 for own in parts]
    starts = accumulate(counts, initial=0)
    return torch.cat([own + start for own, start in zip(parts, starts, strict=False)])


def _largest(parts: Sequence[Tensor], _: _Shapes) -> Tensor:
    return functools.reduce(torch.fmax, parts)  # `fmax` ignores missing numbers


def _sum(parts: Sequence[Tensor], _: _Shapes) -> Tensor:
    return torch.stack([*parts]).sum(dim=0)


def _padded(parts: Sequence[Tensor], shapes: _Shapes) -> Tensor:
    """Pad queries or keys, [sequences, heads, length, head width], to the longest."""
    own = [part for part, _ in _with_sequences(parts, shapes)]
    longest = max(part.shape[2] for part in own)
    return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[2])) for part in own])


def _grid(parts: Sequence[Tensor | None], shapes: _Shapes) -> Tensor | None:
    """Join grids, [sequences, heads (or 1), queries (or 1), keys]; None if no part has one."""
    sized = _with_sequences(parts, shapes)
    known = next((part for part, _ in sized if part is not None), None)
    if known is None:
        return None
    none = known.new_zeros(1, 1, 1, 1, dtype=torch.float32)
    grids = [none if part is None else part for part, _ in sized]
    _, queries, keys = map(max, zip(*(shape for _, shape in sized), strict=True))
    if all(grid.shape[2] == 1 for grid in grids) and all(n == queries for _, (_, n, _) in sized):
        queries = 1  # one row for all queries
    heads = max(grid.shape[1] for grid in grids)
    whole = []
    for grid, (_, (sequences, own_queries, own_keys)) in zip(grids, sized, strict=True):
        spread = grid.expand(sequences, heads, min(own_queries, queries), own_keys)
        whole.append(F.pad(spread, (0, keys - own_keys, 0, queries - spread.shape[2])))
    return torch.cat(whole)


def _with_sequences(parts: Sequence[Any], shapes: _Shapes) -> list[tuple[Any, Shape]]:
    """Return the parts that have sequences, with their shapes; the first part if none has any."""
    sized = [(part, shape) for part, shape in zip(parts, shapes, strict=True) if shape is not None]
    return [(part, shape) for part, shape in sized if shape[0]] or sized[:1]


_WAYS = {
    "rows": _Way(lambda part: (part.dtype, part.shape[1:]), _rows),
    "numbers": _Way(lambda part: part.dtype, _numbers),
    "padded": _Way(lambda part: (part.dtype, part.shape[1], part.shape[3]), _padded),
    "grid": _Way(_any_form, _grid),
    "largest": _Way(lambda part: (part.dtype, part.shape), _largest, is_reduced=True),
    "sum": _Way(lambda part: part.shape, _sum, is_reduced=True),
    "same": _Way(_content, _first),
    "first": _Way(_any_form, _first),
}
