"""From layers to values: every metric at every layer, over splits of the rows."""

import contextlib
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from geomon.capture.snapshot import (
    CAPTURED,
    OF_THE_BATCH,
    SOURCES,
    Layer,
    Note,
    group_by_layer,
)
from geomon.kernels.half_samples import FEWEST_SEQUENCES, margin
from geomon.kernels.products import without_autocast
from geomon.metrics.across_layers import (
    across_layers,
    entropy_null,
    head_nulls,
    null_values,
    null_values_at_last,
    query_null,
)
from geomon.metrics.arrays import arrays_of, join_arrays
from geomon.metrics.at_once import in_pieces, layers_at_once
from geomon.metrics.between_layers import BetweenLayers, Comparing, compare_layers
from geomon.metrics.between_readings import (
    ALONE,
    BetweenReadings,
    EarlierReading,
    Kept,
    compare_readings,
)
from geomon.metrics.cautions import cautions
from geomon.metrics.intervals import by_part, cut_of, differences_of
from geomon.metrics.last_tokens import AtLast
from geomon.metrics.layer_values import LayerValues, Parts
from geomon.metrics.table import Metric, is_bundled
from geomon.metrics.views import (
    LayerViews,
    MissingViewError,
    can_be_made,
    captured_views,
    parameters,
    split_rows,
)
from geomon.record import tags

# Captured views that a matrix of weights has.
_OF_ROWS = CAPTURED.keys() - OF_THE_BATCH


@dataclass
class Evaluation:
    """Values of a reading, and notes on them.

    Attributes:
        values: Values by tag; NaN for what could not be measured.
        notes: Remarks for the reader of the values.
        explained: Tags of values that are missing for a reason which a note gives.
        arrays: Arrays for figures, by tag.
    """

    values: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """Measures every metric at every layer, and makes the values of a reading.

    A metric of hidden states is measured on each split of the rows; its value is the mean over
    splits and, with two splits or more, `std` their standard deviation. A metric of heads has the
    mean over heads as its value, with `min`, `max` and each head as parts. `mean` is over the
    layers without layer 0. `margin` is the half width of a 95 % interval over other sequences
    (`geomon.metrics.intervals`). The arithmetic runs without autograd and without autocast.

    Args:
        metrics: Checked metrics by name.
        batches: Largest number of splits.
        strict: Whether to raise what a metric raises, instead of a missing value.
        keeps_arrays: Whether arrays for figures are taken of each layer.
    """

    metrics: Mapping[str, Metric]
    batches: int
    strict: bool = False
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
    def compares_layers(self) -> bool:
        """Whether a metric compares each layer with the one before it."""
        return any(isinstance(metric, BetweenLayers) for metric in self.metrics.values())

    @property
    def compares_readings(self) -> bool:
        """Whether a metric compares each layer with itself at the reading before."""
        return any(isinstance(metric, BetweenReadings) for metric in self.metrics.values())

    @functools.cached_property
    def apart(self) -> list[frozenset[str]]:
        """Groups of sources that no metric reads together, that of the hidden states first."""
        read = [frozenset(sources_of(metric)) for metric in self.metrics.values()]
        unread = SOURCES.difference(*read)
        groups: list[frozenset[str]] = []
        for sources in [unread | {"hidden"}, *read]:
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
        if not layers or not all(map(is_bundled, self.metrics.values())):
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
        result.has_token_ids = "token_ids" in layer.captured
        result.heads, result.queries = _sizes_of_attention(layer)
        result.log_visible = _log_visible(layer)
        splits = split_rows(layer, rows, self.batches)
        with _plain_arithmetic(layer):
            for name, metric in self.metrics.items():
                if not sources_of(metric) <= layer.sources:
                    continue
                if layer.of_weights and not can_be_made(parameters(metric), _OF_ROWS):
                    continue
                try:
                    if isinstance(metric, Comparing):
                        result.kept[name] = [_apply(metric, views) for views in splits]
                        continue
                    result.parts[name] = _measure(metric, splits)
                except MissingViewError as error:
                    result.unseen[name] = str(error)
                except torch.OutOfMemoryError:  # no fault of the metric: elsewhere there is memory
                    raise
                except Exception as error:
                    if self.strict:
                        raise
                    result.failed[name] = str(error) or type(error).__name__
                else:
                    result.differences[name] = self._compare(name, splits, result)
            self._take_arrays(splits[0], result)
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

    def _compare(
        self, name: str, splits: list[LayerViews], result: LayerValues
    ) -> dict[str, list[float]]:
        """Compare a metric on halves of the sequences, by part: mean over the splits of the rows.

        A failure costs the interval alone, and is noted with the layer.
        """
        metric = self.metrics[name]
        function = differences_of(metric)
        if function is None:
            return {}
        used = splits if "hidden" in sources_of(metric) else splits[:1]
        try:
            each = [by_part(_apply(metric, views, function)) for views in used]
            wider = [_widening(views, cut_of(function)) for views in used]
        except MissingViewError:  # the sequences are not known
            return {}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.strict:
                raise
            result.without_interval[name] = str(error) or type(error).__name__
            return {}
        if len({len(one[part]) for one in each for part in one}) != 1:
            return {}
        return {
            part: [
                _mean(factor * one for factor, one in zip(wider, way, strict=True))
                for way in zip(*(one[part] for one in each), strict=True)
            ]
            for part in each[0]
        }

    def combine(
        self, measured: Sequence[LayerValues], rows: int, earlier: EarlierReading | None = ALONE
    ) -> Evaluation:
        """Make the values of a whole reading from those of its layers.

        Args:
            measured: Values of every layer, in order of depth.
            rows: Number of rows of hidden states in one split.
            earlier: The reading that this one is compared with; None for the first of a probe,
                which has no values of the metrics that compare readings.
        """
        result = Evaluation()
        metrics = self.metrics
        if earlier is None:
            earlier = ALONE
            metrics = {n: m for n, m in metrics.items() if not isinstance(m, BetweenReadings)}
        for stack in dict.fromkeys(layer.stack for layer in measured):
            layers = [layer for layer in measured if layer.stack == stack]
            part = _combine_stack(layers, metrics, rows, earlier, strict=self.strict)
            result.values |= {tags.in_stack(tag, stack): v for tag, v in part.values.items()}
            result.explained |= {tags.in_stack(tag, stack) for tag in part.explained}
            name = f"{stack}: " if stack else ""
            result.notes += [Note(name + note.kind, name + note.text) for note in part.notes]
        result.arrays = join_arrays((one.stack, one.index, one.arrays) for one in measured)
        return result

    def keep_for_next(self, measured: Sequence[LayerValues]) -> Kept:
        """Choose what the next reading is compared with of the values of a reading's layers.

        Args:
            measured: Values of every layer.
        """
        names = [n for n, metric in self.metrics.items() if isinstance(metric, BetweenReadings)]
        return {
            (layer.stack, layer.index): {n: layer.kept[n] for n in names if n in layer.kept}
            for layer in measured
        }

    def evaluate(self, layers: Iterable[Layer], rows: int) -> Evaluation:
        """Measure all layers, and make the values of a whole reading.

        Args:
            layers: The layers of a snapshot.
            rows: Number of rows of hidden states in one split.
        """
        return self.combine([*self.measure_layers([*layers], rows)], rows)


@contextlib.contextmanager
def _plain_arithmetic(layer: Layer) -> Iterator[None]:
    """Leave autograd and autocast out, on the host too: nulls are computed there for any rows."""
    kinds = sorted({"cpu", *(device.type for device in layer.devices)})
    with torch.no_grad(), without_autocast(kinds):
        yield


def _sizes_of_attention(layer: Layer) -> tuple[tuple[int, int] | None, int | None]:
    """Count the heads and their width, and the sampled queries that see a key; None where unknown.

    Nulls depend on them.
    """
    projected, query, visible = map(layer.captured.get, ("projected_query", "query", "visible"))
    heads = queries = None
    if projected is not None and projected.ndim == 3:
        heads = (projected.shape[1], projected.shape[2])
    if query is not None and visible is not None and query.ndim == visible.ndim == 4:
        real = visible.any(dim=3).any(dim=1)
        queries = int(real.expand(query.shape[0], query.shape[2]).sum())
    return heads, queries


def _log_visible(layer: Layer) -> float | None:
    """Average the logarithm of the number of visible keys over queries that see one."""
    visible = layer.captured.get("visible")
    if not isinstance(visible, Tensor) or visible.ndim != 4:
        return None
    keys = visible.sum(dim=3).double()
    known = keys[keys > 0]
    return float(known.log().mean()) if len(known) else None


def _combine_stack(
    layers: list[LayerValues],
    metrics: Mapping[str, Metric],
    rows: int,
    earlier: EarlierReading,
    *,
    strict: bool,
) -> Evaluation:
    result = Evaluation()
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for layer in layers:
        if layer.without_arrays:
            reasons["arrays for figures", layer.without_arrays].append(layer.index)
    for name, metric in metrics.items():
        if isinstance(metric, BetweenLayers):
            layers = compare_layers(name, metric, layers, strict=strict)
        if isinstance(metric, BetweenReadings):
            layers = compare_readings(name, metric, layers, earlier, strict=strict)
        by_layer: dict[int, list[Parts]] = {}
        for layer in layers:
            if name in layer.unseen or name in layer.failed:
                result.explained |= {tags.layer_tag(name, layer.index), tags.mean_tag(name)}
            if name in layer.unseen:
                # Not seen at this layer, at any step: it has no part in the mean.
                reasons[name, layer.unseen[name]].append(layer.index)
                result.values[tags.layer_tag(name, layer.index)] = math.nan
            elif name in layer.failed:
                # Should have been measured: a mean over the other layers would mislead.
                reasons[name, layer.failed[name]].append(layer.index)
                by_layer[layer.index] = [{"": math.nan}]
            elif name in layer.parts:
                by_layer[layer.index] = _with_sequences(layer.parts[name], layer.sequences)
            if name in layer.without_interval:
                why = f"no interval: {layer.without_interval[name]}"
                reasons[name, why].append(layer.index)
        for index, parts in by_layer.items():
            for part, value in _over_splits(parts).items():
                result.values[tags.layer_tag(name, index, part)] = value
        for part, value in _over_layers(by_layer).items():
            result.values[tags.mean_tag(name, part)] = value
        result.values |= _margins(name, layers, by_layer)
    result.values |= across_layers(result.values)
    if layers[0].shape is not None:
        count, width = layers[0].shape
        used = result.values.get(tags.mean_tag("twonn", "n"), math.nan)  # without copies
        unique = round(used) if used >= 1 else min(rows, count)
        result.values |= null_values(metrics, unique, width)
        result.values |= null_values_at_last(result.values, width)
    heads = {layer.heads for layer in layers if layer.heads is not None}
    if len(heads) == 1:  # one null for all layers
        result.values |= head_nulls(metrics, *heads.pop())
    queries = [layer.queries for layer in layers if layer.queries is not None]
    result.values |= query_null(metrics, queries)
    uniform = [layer.log_visible for layer in layers if layer.log_visible is not None]
    result.values |= entropy_null(metrics, uniform)
    result.notes = group_by_layer(_join_metrics(reasons)) + cautions(result.values)
    result.notes += _few_sequences(layers) + _few_last_tokens(metrics, layers, result.values)
    return result


def _widening(views: LayerViews, cut: str | None) -> float:
    """What differences between halves are multiplied by; 1 where a metric has its own halves."""
    try:
        return 1.0 if cut is None else float(views[cut].widening)
    except MissingViewError:
        return 1.0


def _few_sequences(layers: list[LayerValues]) -> list[Note]:
    """Make a note where there are too few sequences for intervals."""
    known = [layer.sequences for layer in layers if layer.sequences is not None]
    if not known or max(known) >= FEWEST_SEQUENCES:
        return []
    text = (
        f"no 95 % intervals: they need {FEWEST_SEQUENCES} sequences in a reading, and there are "
        f"{max(known)}"
    )
    return [Note("no intervals", text)]


def _few_last_tokens(
    metrics: Mapping[str, Metric], layers: list[LayerValues], values: Mapping[str, float]
) -> list[Note]:
    """Make a note where a spectrum stands on few sequences for the width of the layers."""
    width = max((layer.shape[1] for layer in layers if layer.shape is not None), default=0)
    spectral = [name for name, m in metrics.items() if isinstance(m, AtLast) and m.at_least > 2]
    known = {name: values.get(tags.mean_tag(name, "n"), math.inf) for name in spectral}
    few = [name for name, count in known.items() if count < 2 * width]
    if not few:
        return []
    text = (
        f"{', '.join(few)}: {known[few[0]]:.0f} sequences for a width of {width}: the spectrum is "
        "not that of many sequences; compare with readings of as many"
    )
    return [Note("few sequences for a spectrum", text)]


def _margins(
    name: str, layers: list[LayerValues], by_layer: Mapping[int, list[Parts]]
) -> dict[str, float]:
    """Make the half widths of the intervals of a metric, at each layer and of the mean over them.

    The ways of cutting the sequences are the same at all layers: what the halves differ by in the
    mean over layers is the mean of what they differ by in each.
    """
    found: dict[str, float] = {}
    deep: dict[str, list[list[float]]] = defaultdict(list)
    for layer in layers:
        for part, differences in layer.differences.get(name, {}).items():
            if layer.index > 0:
                deep[part].append(differences)
            width = margin(differences)
            if math.isfinite(width):
                found[tags.layer_tag(name, layer.index, tags.margin_part(part))] = width
    averaged = sum(index > 0 for index in by_layer)
    for part, each in deep.items():
        if len(each) == averaged and len({len(differences) for differences in each}) == 1:
            width = margin(_mean(way) for way in zip(*each, strict=True))
            if math.isfinite(width):
                found[tags.mean_tag(name, tags.margin_part(part))] = width
    return found


def _join_metrics(reasons: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
    """Name metrics together that lack something for one reason at the same layers."""
    metrics: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (metric, reason), layers in reasons.items():
        metrics[reason, tuple(layers)].append(metric)
    return {(", ".join(names), why): [*layers] for (why, layers), names in metrics.items()}


def _measure(metric: Metric, splits: list[LayerViews]) -> list[Parts]:
    """The parts of one metric, for each split of the rows if it reads rows."""
    used = splits if "hidden" in sources_of(metric) else splits[:1]
    return [_as_parts(_apply(metric, views)) for views in used]


def _apply(metric: Metric, views: LayerViews, function: Callable[..., Any] | None = None) -> Any:
    """Call a metric, or a function that is made of it; the user's are given copies of the views."""
    called = metric if function is None else function
    return views.apply(called) if is_bundled(metric) else views.apply_to_copies(called)


def sources_of(metric: Metric) -> set[str]:
    """List the sources of the views that a metric reads: "hidden", "attention", "projection".

    Args:
        metric: A function of views.
    """
    return {CAPTURED[view] for view in captured_views(parameters(metric))}


def _as_parts(result: Any) -> Parts:
    """What a metric returned, as named parts."""
    if isinstance(result, Mapping):
        return {str(part): float(value) for part, value in result.items()}
    if isinstance(result, Tensor) and result.ndim == 1:
        heads = [float(value) for value in result.tolist()]
        finite = [value for value in heads if math.isfinite(value)]
        whole = {
            "": _mean(finite),
            "min": min(finite, default=math.nan),
            "max": max(finite, default=math.nan),
        }
        return whole | {tags.head_part(head): value for head, value in enumerate(heads)}
    if isinstance(result, Tensor) and result.ndim > 1:
        raise ValueError(
            f"a metric returns a scalar, a vector [heads] or a dict, got {list(result.shape)}"
        )
    return {"": float(result)}


def _with_sequences(splits: list[Parts], sequences: int | None) -> list[Parts]:
    """The parts, with the number of sequences beside that of rows: rows of one are alike."""
    if sequences is None:
        return splits
    return [
        parts | {tags.SEQUENCES: float(sequences)} if tags.ROWS in parts else parts
        for parts in splits
    ]


def _over_splits(splits: list[Parts]) -> Parts:
    """Mean of each part over splits, and the standard deviation of the value."""
    if len(splits) == 1:
        return dict(splits[0])
    merged = {part: _mean(s[part] for s in splits if part in s) for part in splits[0]}
    if len(splits) > 1 and "" in merged:
        merged["std"] = _deviation([s[""] for s in splits])
    return merged


def _over_layers(by_layer: Mapping[int, list[Parts]]) -> Parts:
    """Mean of each part over the layers without layer 0; of a head metric the extremes too.

    The standard deviation is that of the mean itself: over splits, of each split's mean over
    layers.
    """
    deep = [parts for index, parts in by_layer.items() if index > 0]
    collected: dict[str, list[float]] = defaultdict(list)
    for parts in map(_over_splits, deep):
        for part, value in parts.items():
            if not part.startswith("head_") and part != "std":
                collected[part].append(value)
    over = {part: _mean(values) for part, values in collected.items()}
    for part, extreme in (("min", min), ("max", max)):
        if part in over:
            over[part] = extreme(collected[part])
    count = min(map(len, deep), default=0)
    if count > 1 and "" in over:
        over["std"] = _deviation([_mean(parts[s][""] for parts in deep) for s in range(count)])
    return over


def _mean(values: Iterable[float]) -> float:
    """Mean; NaN where there are no values or one is NaN."""
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; NaN where a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
