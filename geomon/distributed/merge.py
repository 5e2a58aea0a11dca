"""Join the parts of one layer, and reduce each pass to its share.

Parts of the same tokens are joined by index: rows in sampling order, heads in the order of the
weights' features. Passes over different tokens, from several ranks or several batches of one rank,
are concatenated. Nothing here communicates.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from geomon.capture import (
    CAPTURED,
    OF_THE_BATCH,
    Layer,
    MeanLoss,
    Part,
    PassInfo,
    at_places,
    concat_heads,
    query_places,
    source_of,
    whole_sequences,
)

# Captured attention of a layer: sequences, queries per sequence, keys per sequence.
Shape = tuple[int, int, int]

_NOT_ON_ALL = "it is known for the rows of some ranks or batches, but not for others"
_OTHER_ROWS = "its heads are on several ranks, which did not keep the same rows"

# Offset between the row indices of one pass and the next.
_NEXT_PASS = 2**40

_OF_HEADS = ("attention", "projection")
# Sources of a block as a whole: views without rows or heads.
_OF_BLOCK = ("weights", "routing")


def attention_shape(layer: Layer) -> Shape | None:
    """Return the shape of the layer's captured attention, or None."""
    return _shape(_of(layer, "attention"))


def _shape(views: Mapping[str, Any]) -> Shape | None:
    """Return the shape from queries and keys, or from scores of hand-written attention."""
    if "query" in views:
        query = views["query"]
        return query.shape[0], query.shape[2], views["key"].shape[2]
    if "scores" in views:
        scores = views["scores"]
        return scores.shape[0], scores.shape[2], scores.shape[3]
    return None


def subsample_attention(
    layer: Layer, shapes: Sequence[Shape | None], rank: int, rows: int, queries: int
) -> Layer:
    """Reduce a layer's attention to one rank's share, so that all ranks keep as much as one would.

    As many sequences as one rank would keep are chosen, evenly spread over all ranks; from each,
    its share of the queries at places that shift between sequences.
    """
    shape = shapes[rank]
    if shape is None or len(shapes) == 1:
        return layer
    counts = [known[0] if known else 0 for known in shapes]
    longest = max(known[2] for known in shapes if known)
    wanted = max(1, min(sum(counts), whole_sequences(rows, longest)))
    taken = [place * sum(counts) // wanted for place in range(wanted)]
    before = sum(counts[:rank])
    mine = [(n, place - before) for n, place in enumerate(taken) if 0 <= place - before < shape[0]]
    each = min(shape[1], math.ceil(queries / wanted))
    if len(mine) == shape[0] and each == shape[1]:
        return layer
    sequences = torch.tensor([local for _, local in mine], dtype=torch.int64, device="cpu")
    numbers = torch.tensor([n for n, _ in mine], dtype=torch.int64, device="cpu")
    places = query_places(numbers, wanted, each, shape[1])
    (device,) = layer.devices
    sequences, places = sequences.to(device), places.to(device)
    changed: dict[str, Any] = {}
    if "query" in layer.captured:
        changed["query"] = at_places(layer.captured["query"][sequences], places)
        changed["key"] = layer.captured["key"][sequences]
    for name, grid in layer.captured.items():
        if CAPTURED[name].merge == "grid" and grid is not None:
            values = grid[sequences] if len(grid) > 1 else grid
            changed[name] = at_places(values, places) if values.shape[2] > 1 else values
    return replace(layer, captured={**layer.captured, **changed})


def merge_layers(parts: Sequence[Layer]) -> Layer:
    """Join the parts of one layer: first those with the same tokens, then one after another.

    Ranks that saw nothing of a source (a skipped block, for example) do not contribute to it. A
    view that only some of the others have is missing. If they disagree on more than the number of
    rows, the whole source is missing.

    Args:
        parts: Parts of the same layer, in rank order.

    Returns:
        The whole layer.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].of_weights:  # ranks have equal weights, from which each sampled its own rows
        return next((part for part in parts if part.captured), parts[0])
    same: dict[int, list[Layer]] = {}
    for number, part in enumerate(parts):
        tokens = part.part.tokens
        same.setdefault(number if tokens is None else tokens, []).append(part)
    first, *others = map(join_parts, same.values())
    return _one_after_another([first, *others]) if others else first


def join_parts(parts: Sequence[Layer]) -> Layer:
    """Join the parts of a layer on ranks that have the same tokens."""
    if len(parts) == 1:
        return parts[0]
    first, *_ = parts
    captured: dict[str, Any] = {}
    missing = {view: why for part in reversed(parts) for view, why in part.missing.items()}
    numbers: dict[str, Tensor | None] = {}
    for prefix, name in (("", "rows"), ("last_", "last_rows")):
        found, numbers[prefix] = _rows_of_parts(parts, prefix, name)
        captured |= found
    for source in _OF_BLOCK:
        captured |= next((own for part in parts if (own := _of(part, source))), {})
    heads: dict[str, tuple[int, ...]] = {}
    for source in _OF_HEADS:
        holders = [part for part in parts if _of(part, source)]
        found, lacking, known = _heads_of_parts(holders, source)
        captured |= found
        missing |= lacking
        heads |= known
    missing = {view: why for view, why in missing.items() if view not in captured}
    part = Part(numbers[""], numbers["last_"], heads=heads, tokens=first.part.tokens)
    return replace(first, captured=captured, missing=missing, part=part)


def _rows_of_parts(
    parts: Sequence[Layer], prefix: str, name: str
) -> tuple[dict[str, Any], Tensor | None]:
    """Sort rows by index; token ids and positions may come from the first stage."""
    holders = [part for part in parts if f"{prefix}hidden" in part.captured]
    if not holders:
        return {}, None
    source = source_of(f"{prefix}hidden")
    views = [
        view
        for view in holders[0].captured
        if source_of(view) == source and all(view in part.captured for part in holders)
    ]
    rows = {view: [part.captured[view] for part in holders] for view in views}
    number = _numbers(holders, name)
    if number is None or len(holders) == 1:
        found = {view: values[0] for view, values in rows.items()}
    else:
        order = number.argsort()
        number = number[order]
        found = {view: _joined(values, order) for view, values in rows.items()}
    others = [part for part in parts if f"{prefix}hidden" not in part.captured]
    known = [part for part in others if _has_tokens(part, prefix)]
    tokens = _numbers(known, name) if holders[0].part.tokens_elsewhere else None
    if tokens is None or number is None:
        return found, number
    return _with_tokens(found, number, known, tokens, prefix)


def _with_tokens(
    found: Mapping[str, Any], number: Tensor, known: Sequence[Layer], tokens: Tensor, prefix: str
) -> tuple[dict[str, Any], Tensor]:
    """Give rows of a later stage their token ids and positions; rows without any are left out."""
    order = tokens.argsort()
    place = torch.searchsorted(tokens[order], number).clamp_(max=len(tokens) - 1)
    kept = (tokens[order][place] == number).nonzero().squeeze(1)
    at = order[place[kept]]
    rows = {view: _joined([value], kept) for view, value in found.items()}
    for view in (f"{prefix}{view}" for view in OF_THE_BATCH):
        rows.pop(view, None)
        values = [part.captured[view] for part in known if view in part.captured]
        if len(values) == len(known):
            rows[view] = torch.cat(values)[at]
    return rows, number[kept]


def _numbers(parts: Sequence[Layer], name: str) -> Tensor | None:
    """Return the indices of the rows of all parts, or None if there are none."""
    numbers: list[Tensor] = []
    for part in parts:
        own = getattr(part.part, name)
        if own is None:
            return None
        numbers.append(own)
    return torch.cat(numbers) if numbers else None


def _has_tokens(part: Layer, prefix: str) -> bool:
    return any(f"{prefix}{view}" in part.captured for view in OF_THE_BATCH)


def _joined(values: Sequence[Any], order: Tensor) -> Any:
    """Concatenate and sort rows; values other than tensors are equal in all parts."""
    if not isinstance(values[0], Tensor):
        return values[0]
    return torch.cat([*values])[order.to(values[0].device)]


def _heads_of_parts(
    parts: Sequence[Layer], source: str
) -> tuple[dict[str, Any], dict[str, str], dict[str, tuple[int, ...]]]:
    """Concatenate heads, sorted by index, with heads that several ranks hold only once."""
    if not parts:
        return {}, {}, {}
    if len(parts) == 1:
        return _of(parts[0], source), {}, dict(parts[0].part.heads)
    query, key = ("query", "key") if source == "attention" else ("projected_query", "projected_key")
    parts = sorted(parts, key=lambda part: part.part.heads.get(query, ()))
    rows = {_count_rows(_of(part, source)) for part in parts}
    if len(rows) > 1:
        return {}, dict.fromkeys(_of(parts[0], source), _OTHER_ROWS), {}
    found, missing = concat_heads([(_of(part, source), {}) for part in parts])
    numbers = {
        view: tuple(n for part in parts for n in part.part.heads.get(view, ()))
        for view in (query, key)
    }
    once = _keys_once(numbers[query], numbers[key], parts, query, key)
    if key in found and once is not None:
        found[key] = found[key][:, once]
        numbers[key] = tuple(numbers[key][place] for place in once)
    return found, missing, numbers


def _count_rows(views: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sizes that parts with different heads must share."""
    query = views.get("query", views.get("scores"))
    rows = views.get("projected_query")
    return (
        None if query is None else (query.shape[0], query.shape[2]),
        None if rows is None else len(rows),
    )


def _keys_once(
    queries: Sequence[int], keys: Sequence[int], parts: Sequence[Layer], query: str, key: str
) -> list[int] | None:
    """Choose one copy of each key head that several ranks hold, or None to keep all.

    Query heads must share key heads in order; if ranks share them differently, all are kept.
    """
    first = {number: place for place, number in reversed([*enumerate(keys)])}
    order = sorted(first)
    if len(order) == len(keys) or not queries or len(queries) % len(order):
        return None
    each = len(queries) // len(order)
    place = 0
    for part in parts:
        own, their = part.part.heads[query], part.part.heads[key]
        share = len(own) // max(len(their), 1)
        for head in range(len(own)):
            if not share or order.index(their[head // share]) != place // each:
                return None
            place += 1
    return [first[number] for number in order]


def _one_after_another(parts: Sequence[Layer]) -> Layer:
    """Concatenate passes over different tokens."""
    captured: dict[str, Any] = {}
    first, *_ = parts
    missing = dict(first.missing)
    for source in dict.fromkeys(source_of(view) for part in parts for view in part.captured):
        seen = [_of(part, source) for part in parts]
        holders = [views for views in seen if views]
        missing = {view: why for view, why in missing.items() if source_of(view) != source}
        # A view that one rank lacks does not affect the others, unless all are parts of attention.
        lost = dict.fromkeys(
            view
            for views in holders
            for other in holders
            for view in views
            if view not in other
            and (source != "attention" or CAPTURED[view].merge in ("largest", "sum"))
        )
        holders = [{v: x for v, x in views.items() if v not in lost} for views in holders]
        missing |= dict.fromkeys(lost, _NOT_ON_ALL)
        if any(_kind(views) != _kind(holders[0]) for views in holders):
            missing |= dict.fromkeys(
                (view for views in holders for view in views),
                "ranks or batches captured it in different forms",
            )
            continue
        captured |= _joined_views(holders)
        holder = next(part for part, views in zip(parts, seen, strict=True) if views)
        missing |= {v: why for v, why in holder.missing.items() if source_of(v) == source}
    part = replace(
        first.part, rows=_numbered(parts, "rows"), last_rows=_numbered(parts, "last_rows")
    )
    return replace(first, captured=captured, missing=missing, part=part)


def _numbered(parts: Sequence[Layer], name: str) -> Tensor | None:
    """Continue the row indices over several passes; None if some lack indices."""
    numbers = [getattr(part.part, name) for part in parts]
    if any(own is None for own in numbers):
        return None
    return torch.cat([own + number * _NEXT_PASS for number, own in enumerate(numbers)])


def mean_loss(infos: Sequence[PassInfo]) -> MeanLoss | None:
    """Mean loss of several passes, weighted by their sequences, or None if there is none.

    Example:
        >>> losses = MeanLoss(3.0, 10), MeanLoss(6.0, 5)
        >>> mean_loss([PassInfo(64, "eval", "float32", loss=loss) for loss in losses])
        MeanLoss(value=4.0, sequences=15)
    """
    losses = [info.loss for info in infos if info.loss is not None]
    if len(losses) < 2:
        return next(iter(losses), None)
    sequences = sum(loss.sequences for loss in losses)
    whole = math.fsum(loss.value * loss.sequences for loss in losses)
    return MeanLoss(whole / max(sequences, 1), sequences)


def _of(layer: Layer, source: str) -> dict[str, Any]:
    return {view: value for view, value in layer.captured.items() if source_of(view) == source}


# Properties that all parts of a view must share, by the way in which they are joined.
_KINDS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda values: (values.dtype, values.shape[1:]),
    "numbers": lambda values: values.dtype,
    "padded": lambda values: (values.dtype, values.shape[1], values.shape[3]),
    "grid": lambda values: None,  # may be given once for all rows, or not at all
    "largest": lambda values: (values.dtype, values.shape),
    "sum": lambda values: values.shape,
    "same": lambda values: (values.dtype, values.tolist()),
    "first": lambda values: None,
}


def _kind(views: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that must be equal on all ranks."""
    kinds = {name: _KINDS[CAPTURED[name].merge] for name in views}
    return {
        name: kinds[name](value)
        if isinstance(value, Tensor) or CAPTURED[name].merge in ("grid", "first")
        else value
        for name, value in views.items()
    }


def _joined_views(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join views of one source, each as it is declared.

    Shorter sequences are padded with keys and queries that nobody sees, as one process pads a
    batch, so that every softmax row stays the same.
    """
    sized = [(part, shape) for part in parts if (shape := _shape(part)) is not None]
    sized = [(part, shape) for part, shape in sized if shape[0]] or sized[:1]
    joined = {}
    for name, value in parts[0].items():
        own = [part[name] for part, _ in sized]
        way, values = CAPTURED[name].merge, [part[name] for part in parts]
        if way == "grid":
            joined[name] = _grids(name, sized)
        elif not isinstance(value, Tensor) or way in ("same", "first"):
            joined[name] = value
        elif way == "rows":
            joined[name] = torch.cat(values)
        elif way == "numbers":  # each rank counts its own sequences from 0
            counts = [own.max().item() + 1 if len(own) else 0 for own in values]
            starts = accumulate(counts, initial=0)
            joined[name] = torch.cat([own + n for own, n in zip(values, starts, strict=False)])
        elif way == "padded":
            longest = max(values.shape[2] for values in own)
            joined[name] = torch.cat([F.pad(x, (0, 0, 0, longest - x.shape[2])) for x in own])
        elif way == "largest":  # `fmax` ignores missing numbers
            joined[name] = functools.reduce(torch.fmax, values)
        else:
            joined[name] = torch.stack(values).sum(dim=0)
    return joined


def _grids(name: str, sized: Sequence[tuple[Mapping[str, Any], Shape]]) -> Tensor | None:
    """Join grids, [sequences, heads (or 1), queries (or 1), keys]; None if no part has one."""
    given = [part[name] for part, _ in sized]
    known = next((grid for grid in given if grid is not None), None)
    if known is None:
        return None
    _, queries, keys = map(max, zip(*(shape for _, shape in sized), strict=True))
    none = known.new_zeros(1, 1, 1, 1, dtype=torch.float32)
    grids = [none if grid is None else grid for grid in given]
    heads = max(grid.shape[1] for grid in grids)
    alike = all(grid.shape[2] == 1 for grid in grids) and all(
        shape[1] == queries for _, shape in sized
    )
    whole = []
    for grid, (_, (sequences, own_queries, own_keys)) in zip(grids, sized, strict=True):
        spread = grid.expand(sequences, heads, 1 if alike else own_queries, own_keys)
        fill = (0, keys - own_keys, 0, 0 if alike else queries - own_queries)
        whole.append(F.pad(spread, fill))
    return torch.cat(whole)
