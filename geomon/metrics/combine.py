"""Combine the values of layers into a reading: columns of each stack, and notes."""

import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from geomon.kernels.groups import GROUPS
from geomon.metrics.arrays import join_arrays
from geomon.metrics.cautions import cautions, explain_not_finite, notes_on_metrics
from geomon.metrics.layer_values import LayerValues, Parts
from geomon.metrics.metric import Metric, Sizes
from geomon.metrics.oddities import oddities
from geomon.metrics.views import SPECTRAL_ROWS, SPECTRAL_WIDTH
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import ArrayPlace, Column, Columns, Stacks, margin, tags


@dataclass
class Evaluation:
    """Values of a reading, and notes on them.

    Attributes:
        stacks: Column of each metric, by stack and metric; NaN for values that could not be
            measured.
        notes: Remarks for the reader of the values.
        arrays: Arrays for figures.
        fingerprint: Checksum of the rows of all layers; "" if their tokens are unknown.
    """

    stacks: Stacks = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    arrays: dict[ArrayPlace, NDArray[Any]] = field(default_factory=dict)
    fingerprint: str = ""


def combine(
    measured: Sequence[LayerValues], metrics: Mapping[str, Metric], rows: int, *, explains: bool
) -> Evaluation:
    """Combine the values of layers into the values of a whole reading.

    Args:
        measured: Values of every layer, in order of depth.
        metrics: The metrics by name.
        rows: Number of rows of hidden states in one split.
        explains: Whether to make a note on every value that is not finite.

    Returns:
        The values, notes and arrays of the reading.
    """
    result = Evaluation()
    for stack in dict.fromkeys(layer.stack for layer in measured):
        layers = [layer for layer in measured if layer.stack == stack]
        columns = _columns(layers, metrics, rows)
        notes = _notes(layers, columns, metrics, explains=explains)
        result.stacks[stack] = columns
        result.notes += [msgspec.structs.replace(note, stack=stack) for note in notes]
    prints = [layer.fingerprint for layer in measured if layer.shape is not None]
    if prints and all(prints):
        result.fingerprint = f"{zlib.crc32(' '.join(prints).encode()):08x}"
    result.arrays = join_arrays((one.stack, one.index, one.arrays) for one in measured)
    return result


def _columns(layers: list[LayerValues], metrics: Mapping[str, Metric], rows: int) -> Columns:
    """Make the columns of a stack by metric, with their nulls."""
    columns = {
        name: _column(name, layers, metric.degrees)
        for name, metric in metrics.items()
        if any(layer.has_tried(name) for layer in layers)
    }
    sizes = _sizes(layers, columns, metrics, rows)
    for name, column in columns.items():
        null = metrics[name].null
        column.whole = {} if null is None else dict(null(sizes))
    return columns


def _notes(
    layers: list[LayerValues], columns: Columns, metrics: Mapping[str, Metric], *, explains: bool
) -> list[Note]:
    """Make the notes on the values of a stack."""
    notes = [
        *_lacking(layers, metrics),
        *cautions(columns),
        *_few_sequences(layers, metrics),
        *_few_last_tokens(metrics, layers, columns),
        *_few_spectral_rows(layers, columns),
        *oddities({layer.index: layer.traits for layer in layers}, columns),
    ]
    return notes + (_not_finite(layers, columns, metrics) if explains else [])


def _lacking(layers: list[LayerValues], metrics: Mapping[str, Metric]) -> list[Note]:
    """Say what layers lack: arrays, values or margins."""
    reasons: dict[NoteKind, dict[tuple[str, str], list[int]]] = {
        kind: defaultdict(list)
        for kind in (NoteKind.NO_ARRAYS, NoteKind.NO_VALUE, NoteKind.NO_MARGIN, NoteKind.FAILED)
    }
    for layer in layers:
        if layer.without_arrays:
            found = reasons[NoteKind.NO_ARRAYS]["arrays for figures", layer.without_arrays]
            found.append(layer.index)
    for name, metric in metrics.items():
        for layer in layers:
            for kind, missing in (
                (NoteKind.NO_VALUE, layer.unseen),
                (NoteKind.FAILED, layer.failed),
            ):
                if why := missing.get(name):
                    reasons[kind][name, why].append(layer.index)
            for tag, why in _without_margin(layer, name, metric):
                reasons[NoteKind.NO_MARGIN][tag, f"no margin: {why}"].append(layer.index)
    return [
        msgspec.structs.replace(note, is_error=kind is NoteKind.FAILED)
        for kind, found in reasons.items()
        for note in notes_on_metrics(kind, found)
    ]


def _without_margin(layer: LayerValues, name: str, metric: Metric) -> Iterator[tuple[str, str]]:
    """Yield the values of a metric at a layer that have no margin, each with the reason."""
    if why := layer.without_margin.get(name):
        yield name, why
    for part, values in layer.parts.get(name, {}).items():
        value, *without = _over_heads(values).mean(axis=0)
        if math.isfinite(value) and not np.isfinite(without).all():
            yield f"{name}/{part}".rstrip("/"), metric.no_margin


def _not_finite(
    layers: list[LayerValues], columns: Columns, metrics: Mapping[str, Metric]
) -> list[Note]:
    """Say why values are not finite, except for those that `_lacking` explains."""
    explained: set[tuple[str, int | None]] = set()  # by metric and layer; None for the mean
    lost: dict[tuple[str, int | None], str] = {}
    for layer in layers:
        missing = layer.unseen.keys() | layer.failed.keys()
        explained |= {(name, place) for name in missing for place in (layer.index, None)}
        # A layer without attention is not a failure of its metrics.
        explained |= {(name, layer.index) for name in columns.keys() - layer.parts.keys()}
        lost |= {(name, layer.index): views for name, views in layer.not_finite.items() if views}
    explained |= {(name, None) for name, _ in lost}
    return explain_not_finite(columns, explained, metrics, lost)


def _sizes(
    layers: list[LayerValues], columns: Columns, metrics: Mapping[str, Metric], rows: int
) -> Sizes:
    """Collect the sizes on which nulls depend."""
    count, width = next((one.shape for one in layers if one.shape is not None), (0, 0))
    heads = {layer.heads for layer in layers if layer.heads is not None}
    return Sizes(
        rows=round(min(rows, count) * (1 - _share_of_copies(columns))),
        width=width,
        heads=heads.pop() if len(heads) == 1 else None,
        queries=tuple(one.queries for one in layers if one.queries is not None),
        log_visible=tuple(one.log_visible for one in layers if one.log_visible is not None),
        sequences=_count_last_tokens(columns, metrics),
    )


def _share_of_copies(columns: Columns) -> float:
    """Return the mean share of rows that copy another, 0 if it is unknown."""
    copies = _mean_of(columns, "twonn", "duplicates")
    return copies if math.isfinite(copies) else 0.0


def _count_last_tokens(columns: Columns, metrics: Mapping[str, Metric]) -> int:
    """Return the largest number of sequences whose last tokens a metric was measured on."""
    last = [_mean_of(columns, name, "n") for name in columns if metrics[name].rows == "last"]
    return round(max((count for count in last if math.isfinite(count)), default=0))


def _mean_of(columns: Columns, name: str, part: str) -> float:
    """Return the mean of a part of a metric over layers, or NaN if there is none."""
    return columns.get(name, Column()).parts.get(part, Column()).mean


def _column(name: str, layers: list[LayerValues], degrees: int) -> Column:
    """Make the column of a metric from its values at the layers of a stack."""
    known = [layer.index for layer in layers if layer.has_tried(name)]
    depths = range(min(known), max(known) + 1)
    measured = {
        layer.index: _with_sequences(layer.parts[name], layer.sequences)
        for layer in layers
        if name in layer.parts
    }
    # A mean over the layers that did not fail would mislead, because the others should have been
    # measured too. Layers that were not seen do not belong to the mean.
    failed = any(name in layer.failed for layer in layers if layer.index > 0)
    names = dict.fromkeys(part for parts in measured.values() for part in parts)
    own = [""] if not measured or "" in names else []  # some metrics have only parts
    found = {
        part: _column_of(
            {index: parts.get(part) for index, parts in measured.items()},
            depths,
            degrees,
            failed=failed,
        )
        for part in dict.fromkeys([*own, *names])
    }
    whole = found.pop("", Column(first=depths[0]))
    whole.parts = found | _deviation_of_splits(measured, depths)
    return whole


def _deviation_of_splits(measured: Mapping[int, Parts], depths: range) -> dict[str, Column]:
    """Make the part with the standard deviation over splits; {} if rows were not split."""
    splits = {
        index: _over_heads(parts[""])[:, 0] for index, parts in measured.items() if "" in parts
    }
    if max(map(len, splits.values()), default=0) < 2:
        return {}
    column = Column(first=depths[0])
    column.layers = [_deviation(splits.get(index)) for index in depths]
    deep = [each for index, each in splits.items() if index > 0]
    column.mean = _deviation(np.mean(deep, axis=0)) if deep else math.nan
    return {"std": column}


def _with_sequences(parts: Parts, sequences: int | None) -> Parts:
    """Add the number of sequences to the number of rows, because rows of one sequence are alike."""
    if tags.ROWS not in parts or sequences is None:
        return parts
    return {**parts, tags.SEQUENCES: np.full_like(parts[tags.ROWS], sequences)}


def _column_of(
    layers: Mapping[int, NDArray[np.float64] | None], depths: range, degrees: int, *, failed: bool
) -> Column:
    """Make the column of one part: mean over splits, each head, and margins.

    Groups of sequences are the same at all layers, so a mean over layers without a group is the
    mean of the layers' values without it.
    """
    column = Column(first=depths[0])
    whole: dict[int, NDArray[np.float64]] = {}  # mean over splits and heads, [columns]
    for index in depths:
        values = layers.get(index)
        if values is None:
            column.layers.append(math.nan)
            continue
        whole[index] = _over_heads(values).mean(axis=0)
        column.layers.append(float(whole[index][0]))
        if values.ndim == 3:
            column.heads += [[]] * (len(column.layers) - 1 - len(column.heads))
            column.heads.append(values[:, 0].mean(axis=0).tolist())
    deep = [whole[index] for index in whole if index > 0]
    if deep and not failed:
        column.mean = float(np.mean([each[0] for each in deep]))
    margins = [
        margin(whole[index][1:], degrees) if index in whole else math.nan for index in depths
    ]
    if any(map(math.isfinite, margins)):
        column.margin = margins
    if math.isfinite(column.mean) and all(len(each) > 1 for each in deep):
        column.mean_without = np.mean(deep, axis=0)[1:].tolist()
        column.mean_margin = margin(column.mean_without, degrees)
    return column


def _over_heads(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average the finite values of heads; a number stays as it is."""
    if values.ndim < 3:
        return values
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # NaN if none is finite
        return np.where(finite, values, 0).sum(axis=2) / finite.sum(axis=2)


def _deviation(values: NDArray[np.float64] | None) -> float:
    """Sample standard deviation; NaN if a value is not finite, or there are fewer than two."""
    if values is None or len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return statistics.stdev(values.tolist())


def _few_sequences(layers: list[LayerValues], metrics: Mapping[str, Metric]) -> list[Note]:
    """Make the note that there are too few sequences for margins, at all or for queries."""
    known = [layer.sequences for layer in layers if layer.sequences is not None]
    if not known:
        return []
    if max(known) >= GROUPS:
        return _few_sequences_of_attention(layers, metrics)
    text = "no 95 % intervals: they need {needed} sequences in a reading, but it has {sequences}"
    numbers = {"needed": GROUPS, "sequences": max(known)}
    return [Note(NoteKind.NO_INTERVALS, text, numbers=numbers)]


def _few_sequences_of_attention(
    layers: list[LayerValues], metrics: Mapping[str, Metric]
) -> list[Note]:
    """Make the note on metrics of attention that lack margins although others have some."""
    measured = set[str]().union(*(layer.parts for layer in layers))
    found = {name for name in measured for layer in layers if layer.has_margin(name)}
    found |= set[str]().union(*(layer.without_margin for layer in layers))
    names = [
        name
        for name, metric in metrics.items()
        if name in measured - found and metric.has_margin and metric.sources == {"attention"}
    ]
    if not names or not found:
        return []
    text = (
        "no 95 % intervals for {metrics}: they need {needed} sequences, but queries came from "
        "fewer; a larger tokens takes them from more"
    )
    numbers: dict[str, Any] = {"metrics": ", ".join(names), "needed": GROUPS}
    return [Note(NoteKind.NO_INTERVALS_OF_ATTENTION, text, numbers=numbers)]


def _few_last_tokens(
    metrics: Mapping[str, Metric], layers: list[LayerValues], columns: Columns
) -> list[Note]:
    """Make the note that a spectrum rests on few sequences, given the width of the layers."""
    width = max((layer.shape[1] for layer in layers if layer.shape is not None), default=0)
    spectral = [
        name
        for name, metric in metrics.items()
        if metric.rows == "last" and metric.at_least > 2 and name in columns
    ]
    known = {name: columns[name].parts["n"].mean for name in spectral if "n" in columns[name].parts}
    few = [name for name, count in known.items() if count < 2 * width]
    if not few:
        return []
    text = (
        "{metrics}: {sequences} sequences for a width of {width} are few: compare only with "
        "readings of as many sequences"
    )
    numbers: dict[str, int | float | str] = {
        "metrics": ", ".join(few), "sequences": round(known[few[0]]), "width": width
    }  # fmt: skip
    return [Note(NoteKind.FEW_SEQUENCES, text, numbers=numbers)]


def _few_spectral_rows(layers: list[LayerValues], columns: Columns) -> list[Note]:
    """Make the note that spectra use fewer rows than other values."""
    wide = [
        layer.index
        for layer in layers
        if layer.shape is not None
        and layer.shape[1] > SPECTRAL_WIDTH
        and layer.shape[0] > SPECTRAL_ROWS
    ]
    if not wide or not columns.keys() & {"anisotropy", "effective_rank", "participation_ratio"}:
        return []
    text = "spectra of layers wider than {width} columns use only {rows} rows{where}"
    numbers = {"width": SPECTRAL_WIDTH, "rows": SPECTRAL_ROWS}
    return [Note(NoteKind.SPECTRAL_ROWS, text, layers=tuple(wide), numbers=numbers)]
