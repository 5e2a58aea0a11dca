"""From layers to values: every metric at every layer, over splits of the rows."""

import contextlib
import functools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geomon.capture.modes import unseen
from geomon.capture.snapshot import CAPTURED, HOST, OF_THE_BATCH, SOURCES, Layer, group_by_layer
from geomon.kernels.groups import GROUPS
from geomon.kernels.products import without_autocast
from geomon.metrics.arrays import arrays_of, join_arrays
from geomon.metrics.at_once import in_pieces, layers_at_once
from geomon.metrics.cautions import cautions, explain_not_finite
from geomon.metrics.jackknife import NoMarginError, ViewsWithout, margin
from geomon.metrics.last_tokens import AtLast
from geomon.metrics.layer_values import LayerValues, Parts
from geomon.metrics.metric import ENDING, Metric, Sizes, said
from geomon.metrics.table import is_bundled
from geomon.metrics.views import (
    DISTANCE_QUERIES,
    SPECTRAL_ROWS,
    SPECTRAL_WIDTH,
    LayerViews,
    MissingViewError,
    can_be_made,
    captured_views,
    parameters,
    split_rows,
)
from geomon.note import Note
from geomon.record import tags
from geomon.record.arrays import ArrayPlace
from geomon.record.columns import Column, Columns, Stacks

# Captured views that a matrix of weights has.
_OF_ROWS = CAPTURED.keys() - OF_THE_BATCH


@dataclass
class Evaluation:
    """Values of a reading, and notes on them.

    Attributes:
        stacks: Column of each metric, by stack and metric; NaN for what could not be measured.
        notes: Remarks for the reader of the values.
        explained: Stack, metric and layer (None for the mean) of values that are missing for a
            reason which a note gives.
        arrays: Arrays for figures.
    """

    stacks: Stacks = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    explained: set[tuple[str, str, int | None]] = field(default_factory=set)
    arrays: dict[ArrayPlace, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """Measures every metric at every layer, and makes the values of a reading.

    A metric of hidden states is measured on each split of the rows; its value is the mean over
    splits and, with two splits or more, `std` their standard deviation. A metric of heads has the
    mean over heads as its value, with `min`, `max` and each head as parts. `mean` is over the
    layers without layer 0. `margin` is the half width of a 95 % interval over other sequences
    (`geomon.metrics.jackknife`). The arithmetic runs without autograd and without autocast.

    Args:
        metrics: Checked metrics by name.
        splits: Largest number of splits.
        queries: Number of rows of a split from which distances are measured; None for all.
        strict: Whether to raise what a metric raises, instead of a missing value.
        has_margins: Whether values have margins.
        keeps_arrays: Whether arrays for figures are taken of each layer.
    """

    metrics: Mapping[str, Metric]
    splits: int
    queries: int | None = DISTANCE_QUERIES
    strict: bool = False
    has_margins: bool = True
    keeps_arrays: bool = False

    @property
    def views(self) -> set[str]:
        """Captured views that the metrics read."""
        return captured_views(
            view for metric in self.metrics.values() for view in parameters(metric)
        )

    def lacking(self, captured: Iterable[str]) -> set[str]:
        """List captured views that the metrics read and that are not there; none where others do.

        Args:
            captured: Names of the captured views that are there.
        """
        there = set(captured)
        asked = {view for metric in self.metrics.values() for view in parameters(metric)}
        return set() if can_be_made(asked, there) else self.views - there

    @property
    def has_own_metrics(self) -> bool:
        """Whether a metric is the user's own."""
        return not all(map(is_bundled, self.metrics.values()))

    @functools.cached_property
    def apart(self) -> list[frozenset[str]]:
        """Groups of sources that no metric reads together, that of the hidden states first."""
        read = [frozenset(sources_of(metric)) for metric in self.metrics.values()]
        unread = SOURCES.difference(*read)
        groups: list[frozenset[str]] = []
        for sources in [unread | {"hidden", "weights", "routing"}, *read]:
            joined = sources.union(*(group for group in groups if group & sources))
            groups = [joined, *(group for group in groups if not group & sources)]
        return sorted(groups, key=lambda group: ("hidden" not in group, min(group)))

    def layers_at_once(self, layers: Sequence[Layer], rows: int) -> int:
        """Count how many of the layers `measure_layers` measures at once on the host.

        A metric of the user's own is called for one layer after another, in the thread that asks
        unless that one is in a mode of torch.

        Args:
            layers: The layers, in order of depth.
            rows: Number of rows of hidden states in one split.
        """
        if not layers or self.has_own_metrics:
            return 1
        return min(len(layers), *(layers_at_once(layer, rows) for layer in layers))

    def measure_layers(self, layers: Sequence[Layer], rows: int) -> Iterator[LayerValues]:
        """Measure layers on the host, several at once where their operations are short.

        Args:
            layers: The layers, in order of depth.
            rows: Number of rows of hidden states in one split.

        Raises:
            Exception: What a metric raised, where it is strict.
        """
        return in_pieces(
            lambda parts: self.measure_layer(parts[0], rows),
            [(layer,) for layer in layers], self.apart, self.layers_at_once(layers, rows),
        )  # fmt: skip

    def measure_layer(self, layer: Layer, rows: int) -> LayerValues:
        """Measure every metric that a layer of its kind has.

        Args:
            layer: The layer. Its derived views are freed when the method returns.
            rows: Number of rows of hidden states in one split.

        Raises:
            OutOfMemoryError: The device of the rows has not memory enough.
            Exception: What a metric raised, where it is strict.
        """
        hidden = layer.captured.get("hidden")
        shape = None if hidden is None else (hidden.shape[0], hidden.shape[1])
        result = LayerValues(layer.stack, layer.index, shape)
        if "sequences" in layer.captured:
            result.sequences = len(layer.captured["sequences"].unique())
        if any(metric.null is not None for metric in self.metrics.values()):
            result.heads, result.queries = _sizes_of_attention(layer)
            result.log_visible = _log_visible(layer)
        splits = split_rows(layer, rows, self.splits, self.queries, has_groups=self.has_margins)
        with _plain_arithmetic(layer):
            for name, metric in self.metrics.items():
                if not sources_of(metric) <= layer.sources:
                    continue
                if layer.of_weights and not can_be_made(parameters(metric), _OF_ROWS):
                    continue
                try:
                    result.parts[name] = _measure(metric, splits)
                except MissingViewError as error:
                    result.unseen[name] = str(error)
                except ENDING:
                    raise
                except BaseException as error:
                    if self.strict:
                        raise
                    result.failed[name] = said(error)
            self._take_arrays(splits[0], result)
            if self.has_margins:
                self._leave_out(splits, result)
        return result

    def _take_arrays(self, views: LayerViews, result: LayerValues) -> None:
        """Take the arrays of a layer; a failure costs them alone, and is noted."""
        try:
            result.arrays = arrays_of(views) if self.keeps_arrays else {}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.strict:
                raise
            result.without_arrays = str(error) or type(error).__name__

    def _leave_out(self, splits: list[LayerViews], result: LayerValues) -> None:
        """Call every metric again without each group of sequences, for the margins.

        A failure costs the margin alone, and is noted with the layer.
        """
        found: dict[str, dict[str, list[float]]] = {}  # by metric and part, of each group
        kept: list[tuple[str, list[Any]]] = []  # what metrics returned for a group, for each split
        asked = {name: self.metrics[name] for name in result.parts}
        reads_rows = {
            name: "hidden" in sources_of(metric)
            for name, metric in asked.items()
            if metric.has_margin and _groups_of(metric, splits[0]) == GROUPS
        }

        def attempt(name: str, measure: Callable[[LayerViews], Any], views: list[Any]) -> list[Any]:
            used = views if reads_rows[name] else views[:1]
            try:
                return [measure(one) for one in used]
            except (MissingViewError, NoMarginError):
                result.without_margin.setdefault(name, "")
            except ENDING:
                raise
            except BaseException as error:
                if self.strict:
                    raise
                result.without_margin[name] = said(error)
            return []

        at_once = {name: asked[name].each_group for name in reads_rows}
        for name, function in at_once.items():
            if function is not None:
                every = attempt(name, functools.partial(_apply_at_once, function), splits)
                for part in every[0] if every else ():
                    means = zip(*(one[part].tolist() for one in every), strict=True)
                    found.setdefault(name, {})[part] = list(map(_mean, means))
        for group in range(GROUPS):
            views = [ViewsWithout(split, group) for split in splits]
            for name in reads_rows:
                if name in result.without_margin or at_once[name] is not None:
                    continue
                kept.append((name, attempt(name, functools.partial(_apply, asked[name]), views)))
        fetched = iter(_fetched([one for _, each in kept for one in each]))
        for name, each in kept:
            split_parts = [_as_parts(next(fetched)) for _ in each]
            parts = found.setdefault(name, defaultdict(list))
            for part in (split_parts[0].keys() - asked[name].without_margin) if each else ():
                values = [_over_heads(one[part]) for one in split_parts if part in one]
                parts[part].append(_mean(values))
        for name, parts in found.items():
            if name not in result.without_margin:
                complete = {part: values for part, values in parts.items() if len(values) == GROUPS}
                result.without[name] = complete
        result.without_margin = {n: why for n, why in result.without_margin.items() if why}

    def combine(self, measured: Sequence[LayerValues], rows: int) -> Evaluation:
        """Make the values of a whole reading from those of its layers.

        Args:
            measured: Values of every layer, in order of depth.
            rows: Number of rows of hidden states in one split.
        """
        with unseen():
            return self._combine(measured, rows)

    def _combine(self, measured: Sequence[LayerValues], rows: int) -> Evaluation:
        """Make the values of a whole reading."""
        result = Evaluation()
        for stack in dict.fromkeys(layer.stack for layer in measured):
            layers = [layer for layer in measured if layer.stack == stack]
            part = _combine_stack(layers, self.metrics, rows)
            result.stacks[stack] = part.columns
            result.explained |= {(stack, *place) for place in part.explained}
            result.notes += [msgspec.structs.replace(note, stack=stack) for note in part.notes]
        result.arrays = join_arrays((one.stack, one.index, one.arrays) for one in measured)
        return result

    def explain_missing(self, result: Evaluation, measured: Sequence[LayerValues]) -> list[Note]:
        """Explain the values that are not finite, of what was measured and has no note yet.

        Args:
            result: Values of a reading.
            measured: Values of its layers.
        """
        notes = []
        for stack, columns in result.stacks.items():
            explained = {(metric, layer) for of, metric, layer in result.explained if of == stack}
            for one in measured:
                if one.stack == stack:  # a layer without attention is no failure of its metrics
                    explained |= {
                        (metric, one.index) for metric in columns.keys() - one.parts.keys()
                    }
            found = explain_not_finite(columns, explained, self.metrics)
            notes += [msgspec.structs.replace(note, stack=stack) for note in found]
        return notes

    def evaluate(self, layers: Iterable[Layer], rows: int) -> Evaluation:
        """Measure all layers, and make the values of a whole reading.

        Args:
            layers: The layers of a snapshot.
            rows: Number of rows of hidden states in one split.
        """
        return self.combine([*self.measure_layers([*layers], rows)], rows)


@contextlib.contextmanager
def _plain_arithmetic(layer: Layer) -> Iterator[None]:
    """Leave autograd, autocast and modes out, on the host too: nulls are computed there."""
    kinds = sorted({"cpu", *(device.type for device in layer.devices)})
    with unseen(), torch.no_grad(), without_autocast(kinds):
        yield


def _sizes_of_attention(layer: Layer) -> tuple[tuple[int, int] | None, int | None]:
    """Count the heads and their width, and the sampled queries that see a key; None if unknown.

    Nulls depend on them.
    """
    projected, query, visible = map(layer.captured.get, ("projected_query", "query", "visible"))
    heads = queries = None
    if projected is not None:
        heads = (projected.shape[1], projected.shape[2])
    if query is not None and visible is not None:
        real = visible.any(dim=3).any(dim=1)
        queries = int(real.expand(query.shape[0], query.shape[2]).sum())
    return heads, queries


def _log_visible(layer: Layer) -> float | None:
    """Average the logarithm of the number of visible keys over queries that see one."""
    visible = layer.captured.get("visible")
    if visible is None:
        return None
    keys = visible.sum(dim=3).double()
    known = keys[keys > 0]
    return float(known.log().mean()) if len(known) else None


class _Stack(NamedTuple):
    columns: Columns
    notes: list[Note]
    explained: set[tuple[str, int | None]]


def _combine_stack(layers: list[LayerValues], metrics: Mapping[str, Metric], rows: int) -> _Stack:
    columns: Columns = {}
    explained: set[tuple[str, int | None]] = set()
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for layer in layers:
        if layer.without_arrays:
            reasons["arrays for figures", layer.without_arrays].append(layer.index)
    for name in metrics:
        for layer in layers:
            why = layer.unseen.get(name) or layer.failed.get(name)
            if why is not None:
                explained |= {(name, layer.index), (name, None)}
                reasons[name, why].append(layer.index)
            if name in layer.without_margin:
                reasons[name, f"no margin: {layer.without_margin[name]}"].append(layer.index)
        if any(name in (layer.parts | layer.unseen | layer.failed) for layer in layers):
            columns[name] = _column(name, layers)
    sizes = _sizes(layers, columns, rows)
    for name, metric in metrics.items():
        numbers = {} if metric.null is None else dict(metric.null(sizes))
        if numbers and name in columns:
            columns[name].whole = numbers
    notes = group_by_layer(_join_metrics(reasons)) + cautions(columns)
    notes += _few_sequences(layers, metrics) + _few_last_tokens(metrics, layers, columns)
    return _Stack(columns, notes + _few_spectral_rows(layers, columns), explained)


def _sizes(layers: list[LayerValues], columns: Columns, rows: int) -> Sizes:
    """Collect the sizes on which nulls depend."""
    count, width = next((one.shape for one in layers if one.shape is not None), (0, 0))
    twonn = columns.get("twonn", Column()).parts
    copies = twonn["duplicates"].mean if "duplicates" in twonn else math.nan
    unique = round(min(rows, count) * (1 - (copies if math.isfinite(copies) else 0.0)))
    heads = {layer.heads for layer in layers if layer.heads is not None}
    last = [
        column.parts["n"].mean
        for name, column in columns.items()
        if name.endswith("_last") and "n" in column.parts
    ]
    return Sizes(
        rows=unique,
        width=width,
        heads=heads.pop() if len(heads) == 1 else None,
        queries=tuple(one.queries for one in layers if one.queries is not None),
        log_visible=tuple(one.log_visible for one in layers if one.log_visible is not None),
        sequences=round(max((n for n in last if math.isfinite(n)), default=0)),
    )


def _column(name: str, layers: list[LayerValues]) -> Column:
    """Make the column of a metric of its values at the layers of a stack."""
    by_layer = {layer.index: layer for layer in layers}
    known = [
        index
        for index, layer in by_layer.items()
        if name in layer.parts or name in layer.unseen or name in layer.failed
    ]
    depths = range(min(known), max(known) + 1)
    splits = {
        index: _with_sequences(layer.parts[name], layer.sequences)
        for index, layer in by_layer.items()
        if name in layer.parts
    }
    # What failed should have been measured: a mean over the other layers would mislead. What was
    # not seen has no part in it.
    failed = any(name in layer.failed for index, layer in by_layer.items() if index > 0)
    measured = [index for index in splits if index > 0]
    names = dict.fromkeys(part for each in splits.values() for part in each[0])
    own = [""] if not splits or "" in names else []  # of some metrics there are parts alone
    parts = {part: Column(first=depths[0]) for part in dict.fromkeys([*own, *names])}
    for part, column in parts.items():
        for index in depths:
            each = [one[part] for one in splits.get(index, []) if part in one]
            column.layers.append(_mean(map(_over_heads, each)))
            if any(isinstance(one, list) for one in each):
                column.heads += [[]] * (len(column.layers) - 1 - len(column.heads))
                heads = zip(*(one for one in each if isinstance(one, list)), strict=True)
                column.heads.append([_mean(head) for head in heads])
        deep = [column.at(index) for index in measured if part in splits[index][0]]
        column.mean = math.nan if failed else _mean(deep)
        _add_margins(column, name, part, layers, measured)
    whole = parts.pop("", Column(first=depths[0]))
    _add_deviation(parts, splits, depths, measured)
    whole.parts = parts
    return whole


def _add_margins(
    column: Column, name: str, part: str, layers: list[LayerValues], measured: list[int]
) -> None:
    """Add the half widths of the intervals, at each layer and of the mean over them.

    The groups of sequences are the same at all layers: the mean over layers without a group is the
    mean of the values without it.
    """
    without = {
        layer.index: layer.without[name][part]
        for layer in layers
        if part in layer.without.get(name, {})
    }
    margins = [margin(without.get(index, [])) for index in column.depths()]
    if any(map(math.isfinite, margins)):
        column.margin = margins
    deep = [without[index] for index in measured if index in without]
    if deep and len(deep) == len(measured) and math.isfinite(column.mean):
        column.mean_margin = margin([_mean(group) for group in zip(*deep, strict=True)])


def _add_deviation(
    parts: dict[str, Column],
    splits: Mapping[int, list[Parts]],
    depths: range,
    measured: list[int],
) -> None:
    """Add the deviation of the value over splits, and of its mean over layers, where there are."""
    values = {
        index: [_over_heads(one[""]) for one in each if "" in one] for index, each in splits.items()
    }
    if max(map(len, values.values()), default=0) < 2:
        return
    column = Column(first=depths[0])
    column.layers = [_deviation(values.get(index, [])) for index in depths]
    deep = [values[index] for index in measured if len(values[index]) > 1]
    if deep:
        column.mean = _deviation([_mean(split) for split in zip(*deep, strict=False)])
    parts["std"] = column


def _few_sequences(layers: list[LayerValues], metrics: Mapping[str, Metric]) -> list[Note]:
    """Make a note if there are too few sequences for margins, of all rows or of queries alone."""
    known = [layer.sequences for layer in layers if layer.sequences is not None]
    if not known:
        return []
    if max(known) >= GROUPS:
        measured = set[str]().union(*(layer.parts for layer in layers))
        found = set[str]().union(*(layer.without | layer.without_margin for layer in layers))
        names = [
            name
            for name, metric in metrics.items()
            if name in measured - found
            and metric.has_margin
            and sources_of(metric) == {"attention"}
        ]
        if not names or not found:
            return []
        text = (
            "no 95 % intervals of {metrics}: they need {needed} sequences, and queries were taken "
            "from fewer; a larger tokens takes them from more"
        )
        numbers: dict[str, Any] = {"metrics": ", ".join(names), "needed": GROUPS}
        return [Note("no intervals of attention", text, numbers=numbers)]
    text = "no 95 % intervals: they need {needed} sequences in a reading, and there are {sequences}"
    numbers = {"needed": GROUPS, "sequences": max(known)}
    return [Note("no intervals", text, numbers=numbers)]


def _few_last_tokens(
    metrics: Mapping[str, Metric], layers: list[LayerValues], columns: Columns
) -> list[Note]:
    """Make a note where a spectrum stands on few sequences for the width of the layers."""
    width = max((layer.shape[1] for layer in layers if layer.shape is not None), default=0)
    spectral = [
        name
        for name, metric in metrics.items()
        if isinstance(metric.function, AtLast) and metric.function.at_least > 2 and name in columns
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
    return [Note("few sequences for a spectrum", text, numbers=numbers)]


def _few_spectral_rows(layers: list[LayerValues], columns: Columns) -> list[Note]:
    """Make a note where spectra stand on fewer rows than other values."""
    wide = [
        layer.index
        for layer in layers
        if layer.shape is not None
        and layer.shape[1] > SPECTRAL_WIDTH
        and layer.shape[0] > SPECTRAL_ROWS
    ]
    if not wide or not columns.keys() & {"anisotropy", "effective_rank", "participation_ratio"}:
        return []
    text = "spectra of layers wider than {width} columns stand on {rows} rows{where}"
    numbers = {"width": SPECTRAL_WIDTH, "rows": SPECTRAL_ROWS}
    return [Note("spectra of fewer rows", text, layers=tuple(wide), numbers=numbers)]


def _join_metrics(reasons: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
    """Name metrics together that lack something for one reason at the same layers."""
    metrics: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (metric, reason), layers in reasons.items():
        metrics[reason, tuple(layers)].append(metric)
    return {(", ".join(names), why): [*layers] for (why, layers), names in metrics.items()}


def _measure(metric: Metric, splits: list[LayerViews]) -> list[Parts]:
    """The parts of one metric, for each split of the rows if it reads rows."""
    used = splits if "hidden" in sources_of(metric) else splits[:1]
    return [_parts_of(metric, views) for views in used]


def _parts_of(metric: Metric, views: LayerViews) -> Parts:
    return _as_parts(*_fetched([_apply(metric, views)]))


def _fetched(results: Sequence[Any]) -> list[Any]:
    """Bring what metrics returned to the host, all with one wait for the device."""
    values = [x for y in results for x in (y.values() if isinstance(y, Mapping) else (y,))]
    there = [x for x in values if isinstance(x, Tensor) and x.device != HOST and x.ndim < 2]
    if not there:
        return [*results]
    joined = torch.cat([x.detach().reshape(-1).double() for x in there]).cpu()
    pieces = joined.split([x.numel() for x in there])
    here = {id(x): part.view(x.shape) for x, part in zip(there, pieces, strict=True)}
    return [
        {name: here.get(id(x), x) for name, x in result.items()}
        if isinstance(result, Mapping)
        else here.get(id(result), result)
        for result in results
    ]


def _apply_at_once(function: Callable[..., Any], views: LayerViews) -> Mapping[str, Tensor]:
    """Call a function that leaves out all groups at once."""
    return views.apply(function)


def _apply(metric: Metric, views: LayerViews) -> Any:
    """Call a metric; the user's are given copies of the views, and draw no random numbers."""
    if is_bundled(metric):
        return views.apply(metric.function)
    with _random_states_kept():
        return views.apply_to_copies(metric.function)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put the random states of torch, numpy and Python back: the training goes on with them."""
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _groups_of(metric: Metric, views: LayerViews) -> int:
    """Count the groups of sequences of the rows that a metric reads; 1 where they are unknown."""
    counts = []
    for source in sources_of(metric):
        for name in _GROUPS_OF[source]:
            try:
                counts.append(views[name].size)
            except MissingViewError:
                counts.append(1)
    return min(counts, default=1)


# By which views the rows of each source are put into groups of sequences.
_GROUPS_OF = {
    "hidden": ("groups",),
    "last": ("last_groups",),
    "attention": ("attention_groups",),
    "projection": ("query_groups", "key_groups"),
}


def sources_of(metric: Callable[..., Any]) -> set[str]:
    """List the sources of the views that a metric reads: "hidden", "attention", "projection"."""
    return {CAPTURED[view] for view in captured_views(parameters(metric))}


def _as_parts(result: Any) -> Parts:
    """What a metric returned, as named parts."""
    if isinstance(result, Mapping):
        return {str(part): _as_value(value) for part, value in result.items()}
    return {"": _as_value(result)}


def _as_value(result: Any) -> float | list[float]:
    """A number, or the numbers of heads."""
    if isinstance(result, Tensor) and result.ndim == 1:
        return [*result.double().tolist()]
    if isinstance(result, Tensor) and result.ndim > 1:
        raise ValueError(
            f"a metric returns a scalar, a vector [heads] or a dict, got {list(result.shape)}"
        )
    return float(result)


def _over_heads(value: float | list[float]) -> float:
    """Average the finite values of heads; a number is its own mean."""
    if isinstance(value, list):
        return _mean(one for one in value if math.isfinite(one))
    return value


def _with_sequences(splits: list[Parts], sequences: int | None) -> list[Parts]:
    """The parts, with the number of sequences beside that of rows: rows of one are alike."""
    if sequences is None:
        return splits
    return [
        parts | {tags.SEQUENCES: float(sequences)} if tags.ROWS in parts else parts
        for parts in splits
    ]


def _mean(values: Iterable[float]) -> float:
    """Mean; NaN if there are no values or one is NaN."""
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; NaN if a value is not finite, or there are fewer than two."""
    enough = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if enough else math.nan
