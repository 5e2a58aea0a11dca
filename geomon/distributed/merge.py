"""Join the parts of one layer, and reduce each pass to its share.

Parts of the same tokens are joined by index: rows in sampling order, heads in the order of the
weights' features. Passes over different tokens, from several ranks or several batches of one rank,
are concatenated. Nothing here communicates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from geomon.capture import (
    CAPTURED,
    OF_THE_BATCH,
    SOURCES,
    Layer,
    MeanLoss,
    Part,
    PassInfo,
    at_places,
    concat_heads,
    query_places,
    source_of,
    sources_shared_by,
    views_of,
    whole_sequences,
)
from geomon.distributed.joining import Shape, join_source, of_source

_OTHER_ROWS = "its heads are on several ranks, which did not keep the same rows"

# Offset between the row indices of one pass and the next.
_NEXT_PASS = 2**40


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
    wanted, own = _sequences_to_keep(shapes, rank, rows)
    each = min(shape[1], math.ceil(queries / wanted))
    if len(own) == shape[0] and each == shape[1]:
        return layer
    numbers = torch.tensor([*own], dtype=torch.int64, device="cpu")
    sequences = torch.tensor([*own.values()], dtype=torch.int64, device="cpu")
    places = query_places(numbers, wanted, each, shape[1])
    (device,) = layer.devices
    sequences, places = sequences.to(device), places.to(device)
    kept = {
        name: _at_queries(name, value, sequences, places)
        for name, value in layer.captured.items()
        if CAPTURED[name].rows == "sequences" and value is not None
    }
    return replace(layer, captured={**layer.captured, **kept})


def _sequences_to_keep(
    shapes: Sequence[Shape | None], rank: int, rows: int
) -> tuple[int, dict[int, int]]:
    """Return how many sequences all ranks keep, and a rank's own: by number, their local index."""
    counts = [shape[0] if shape else 0 for shape in shapes]
    longest = max(shape[2] for shape in shapes if shape)
    wanted = max(1, min(sum(counts), whole_sequences(rows, longest)))
    first, end = sum(counts[:rank]), sum(counts[: rank + 1])
    taken = {number: number * sum(counts) // wanted for number in range(wanted)}
    return wanted, {n: place - first for n, place in taken.items() if first <= place < end}


def _at_queries(name: str, values: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
    """Take some sequences, and some queries of each; a grid's size of 1 stands for all of them."""
    if CAPTURED[name].merge != "grid" or len(values) > 1:
        values = values[sequences]
    if not CAPTURED[name].is_sampled or values.shape[2] == 1:
        return values
    return at_places(values, places)


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
    numbers: dict[str, Any] = {}
    heads: dict[str, tuple[int, ...]] = {}
    for name, source in SOURCES.items():
        if source.shared == "rows":
            found, numbers[source.number] = _rows_of_parts(parts, name)
        elif source.shared == "heads":
            found, lacking, known = _heads_of_parts(parts, name)
            missing |= lacking
            heads |= known
        else:
            found = next((own for part in parts if (own := of_source(part.captured, name))), {})
        captured |= found
    missing = {view: why for view, why in missing.items() if view not in captured}
    part = Part(**numbers, heads=heads, tokens=first.part.tokens)
    return replace(first, captured=captured, missing=missing, part=part)


def _rows_of_parts(parts: Sequence[Layer], source: str) -> tuple[dict[str, Any], Tensor | None]:
    """Sort rows by index; token ids and positions may come from the first stage."""
    shown_by = SOURCES[source].shown_by
    holders = [part for part in parts if shown_by in part.captured]
    if not holders:
        return {}, None
    found, number = _in_order(holders, source)
    if number is None or not holders[0].part.tokens_elsewhere:
        return found, number
    others = (part for part in parts if shown_by not in part.captured)
    first_stage = [
        part for part in others if OF_THE_BATCH & of_source(part.captured, source).keys()
    ]
    tokens = _numbers(first_stage, source)
    if tokens is None:
        return found, number
    return _with_tokens(found, number, first_stage, tokens, source)


def _in_order(parts: Sequence[Layer], source: str) -> tuple[dict[str, Any], Tensor | None]:
    """Concatenate rows and sort them by index, for the views that all parts have."""
    first, *others = [of_source(part.captured, source) for part in parts]
    rows = {
        view: [value, *(other[view] for other in others)]
        for view, value in first.items()
        if all(view in other for other in others)
    }
    number = _numbers(parts, source)
    if number is None or not others:
        return {view: values[0] for view, values in rows.items()}, number
    order = number.argsort()
    return {view: _joined(values, order) for view, values in rows.items()}, number[order]


def _with_tokens(
    found: Mapping[str, Any], number: Tensor, known: Sequence[Layer], tokens: Tensor, source: str
) -> tuple[dict[str, Any], Tensor]:
    """Give rows of a later stage their token ids and positions; rows without any are left out."""
    order = tokens.argsort()
    place = torch.searchsorted(tokens[order], number).clamp_(max=len(tokens) - 1)
    kept = (tokens[order][place] == number).nonzero().squeeze(1)
    at = order[place[kept]]
    rows = {view: _joined([value], kept) for view, value in found.items()}
    for view in (view for view in views_of(source) if view in OF_THE_BATCH):
        rows.pop(view, None)
        values = [part.captured[view] for part in known if view in part.captured]
        if len(values) == len(known):
            rows[view] = torch.cat(values)[at]
    return rows, number[kept]


def _numbers(parts: Sequence[Layer], source: str) -> Tensor | None:
    """Return the indices of the rows of all parts, or None if there are none."""
    numbers = [getattr(part.part, SOURCES[source].number) for part in parts]
    return torch.cat(numbers) if numbers and all(own is not None for own in numbers) else None


def _joined(values: Sequence[Any], order: Tensor) -> Any:
    """Concatenate and sort rows; values other than tensors are equal in all parts."""
    if not isinstance(values[0], Tensor):
        return values[0]
    return torch.cat([*values])[order.to(values[0].device)]


def _heads_of_parts(
    parts: Sequence[Layer], source: str
) -> tuple[dict[str, Any], dict[str, str], dict[str, tuple[int, ...]]]:
    """Concatenate heads, sorted by index, with heads that several ranks hold only once."""
    parts = [part for part in parts if of_source(part.captured, source)]
    if not parts:
        return {}, {}, {}
    if len(parts) == 1:
        return of_source(parts[0].captured, source), {}, dict(parts[0].part.heads)
    query, key = SOURCES[source].queries, SOURCES[source].keys
    parts = sorted(parts, key=lambda part: part.part.heads.get(query, ()))
    views = [of_source(part.captured, source) for part in parts]
    if len({_rows_of_heads(own.get(query, own.get("scores"))) for own in views}) > 1:
        return {}, dict.fromkeys(views[0], _OTHER_ROWS), {}
    found, missing = concat_heads([(own, {}) for own in views])
    numbers = {
        view: tuple(n for part in parts for n in part.part.heads.get(view, ()))
        for view in (query, key)
    }
    once = _keys_once(numbers[query], numbers[key], parts, query, key)
    if key in found and once is not None:
        found[key] = found[key][:, once]
        numbers[key] = tuple(numbers[key][place] for place in once)
    return found, missing, numbers


def _rows_of_heads(queries: Tensor | None) -> tuple[int, ...] | None:
    """Return the sizes, before and behind the heads, that parts with different heads must share."""
    return None if queries is None else (*queries.shape[:1], *queries.shape[2:-1])


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
    first, *_ = parts
    sources = dict.fromkeys(source_of(view) for part in parts for view in part.captured)
    captured: dict[str, Any] = {}
    missing = {view: why for view, why in first.missing.items() if source_of(view) not in sources}
    for source in sources:
        found, lacking = join_source(parts, source)
        captured |= found
        missing |= lacking
    numbers: dict[str, Any] = {
        SOURCES[source].number: _numbered(parts, source) for source in sources_shared_by("rows")
    }
    part = replace(first.part, **numbers)
    return replace(first, captured=captured, missing=missing, part=part)


def _numbered(parts: Sequence[Layer], source: str) -> Tensor | None:
    """Continue the row indices over several passes; None if some lack indices."""
    numbers = [getattr(part.part, SOURCES[source].number) for part in parts]
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
