"""From a snapshot to values: every metric at every layer, over batches of rows."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from geomon.capture.snapshot import (
    CAPTURED,
    Layer,
    MissingViewError,
    Snapshot,
    captured_views,
    parameters,
)
from geomon.metrics.across_layers import across_layers, nulls
from geomon.metrics.cautions import Note, cautions, grouped
from geomon.metrics.table import Metric
from geomon.record import tags

# The parts of one metric at one layer in one batch: "" is the value itself.
Parts = dict[str, float]


@dataclass
class Evaluation:
    """Values by tag (NaN = could not be measured), and what to know of them."""

    values: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


@dataclass
class MeasuredLayer:
    """What was measured of one layer, in plain values: ranks can exchange it.

    Attributes:
        stack: As of the layer.
        index: As of the layer.
        shape: Rows and width of its hidden states; None where it has none.
        parts: By metric, of each batch of rows.
        unseen: By metric, why what it reads was not seen.
        failed: By metric, what it raised.
    """

    stack: str
    index: int
    shape: tuple[int, int] | None
    parts: dict[str, list[Parts]] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def evaluate(
    snapshot: Snapshot,
    metrics: Mapping[str, Metric],
    *,
    rows: int,
    batches: int,
    strict: bool = False,
) -> Evaluation:
    """Measure every metric at every layer.

    A metric of hidden states is measured on each batch of rows; its value is the mean over batches
    and, with two batches or more, `std` their standard deviation. A metric of heads has the mean
    over heads as its value, with `min`, `max` and each head as parts. `mean` is over the layers
    without layer 0. The arithmetic runs without autograd and without autocast.

    Args:
        snapshot: What the window kept.
        metrics: Checked metrics by name.
        rows: Rows of hidden states in one batch.
        batches: Largest number of batches.
        strict: Raise what a metric raises, instead of recording the value as missing.
    """
    measured = [
        measure_layer(layer, metrics, rows=rows, batches=batches, strict=strict)
        for layer in snapshot.layers  # the views of one are let go before the next
    ]
    return combined(measured, metrics, rows=rows)


def measure_layer(
    layer: Layer,
    metrics: Mapping[str, Metric],
    *,
    rows: int,
    batches: int,
    strict: bool = False,
) -> MeasuredLayer:
    """Measure every metric that a layer of its kind has; arguments as of `evaluate`."""
    hidden = layer.captured.get("hidden")
    shape = None if hidden is None else (hidden.shape[0], hidden.shape[1])
    found = MeasuredLayer(layer.stack, layer.index, shape)
    device = "cpu" if hidden is None else hidden.device.type
    cut = layer.batches(rows, batches)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        for name, metric in metrics.items():
            if not sources_of(metric) <= layer.sources:
                continue
            try:
                found.parts[name] = _measure(metric, cut)
            except MissingViewError as error:
                found.unseen[name] = str(error)
            except Exception as error:
                if strict:
                    raise
                found.failed[name] = str(error) or type(error).__name__
    return found


def combined(
    measured: Sequence[MeasuredLayer], metrics: Mapping[str, Metric], *, rows: int
) -> Evaluation:
    """The values of a whole reading from those of its layers.

    Args:
        measured: Every layer, in order of depth.
        metrics: Checked metrics by name.
        rows: Rows of hidden states in one batch.
    """
    result = Evaluation()
    for stack in dict.fromkeys(layer.stack for layer in measured):
        part = _combined_stack([m for m in measured if m.stack == stack], metrics, rows)
        result.values |= {tags.in_stack(tag, stack): v for tag, v in part.values.items()}
        name = f"{stack}: " if stack else ""
        result.notes += [Note(name + note.kind, name + note.text) for note in part.notes]
    return result


def _combined_stack(
    layers: list[MeasuredLayer], metrics: Mapping[str, Metric], rows: int
) -> Evaluation:
    result = Evaluation()
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in metrics:
        by_layer: dict[int, list[Parts]] = {}
        for layer in layers:
            if name in layer.unseen:
                # Not seen at this layer, at any step: it has no part in the mean.
                reasons[name, layer.unseen[name]].append(layer.index)
                result.values[tags.layer_tag(name, layer.index)] = math.nan
            elif name in layer.failed:
                # Should have been measured: a mean over the other layers would mislead.
                reasons[name, layer.failed[name]].append(layer.index)
                by_layer[layer.index] = [{"": math.nan}]
            elif name in layer.parts:
                by_layer[layer.index] = layer.parts[name]
        for index, parts in by_layer.items():
            for part, value in _over_batches(parts).items():
                result.values[tags.layer_tag(name, index, part)] = value
        for part, value in _over_layers(by_layer).items():
            result.values[tags.mean_tag(name, part)] = value
    result.values |= across_layers(result.values)
    if layers[0].shape is not None:
        count, width = layers[0].shape
        result.values |= nulls(metrics, min(rows, count), width)
    result.notes = grouped(_joined(reasons)) + cautions(result.values)
    return result


def _joined(reasons: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
    """Metrics that lack something for one reason at the same layers, named together."""
    metrics: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (metric, reason), layers in reasons.items():
        metrics[reason, tuple(layers)].append(metric)
    return {(", ".join(names), why): [*layers] for (why, layers), names in metrics.items()}


def _measure(metric: Metric, batches: list[Layer]) -> list[Parts]:
    """The parts of one metric, for each batch of rows if it reads rows."""
    used = batches if "hidden" in sources_of(metric) else batches[:1]
    return [_as_parts(metric(*(layer.view(v) for v in parameters(metric)))) for layer in used]


def sources_of(metric: Metric) -> set[str]:
    """What a metric's views come down to: of "hidden", "attention", "projection"."""
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


def _over_batches(batches: list[Parts]) -> Parts:
    """Mean of each part over batches, and the standard deviation of the value."""
    merged = {part: _mean(b[part] for b in batches if part in b) for part in batches[0]}
    if len(batches) > 1 and "" in merged:
        merged["std"] = _deviation([b[""] for b in batches])
    return merged


def _over_layers(by_layer: Mapping[int, list[Parts]]) -> Parts:
    """Mean of each part over the layers without layer 0; of a head metric the extremes too.

    The standard deviation is that of the mean itself: over batches, of each batch's mean over
    layers.
    """
    deep = [parts for index, parts in by_layer.items() if index > 0]
    collected: dict[str, list[float]] = defaultdict(list)
    for parts in map(_over_batches, deep):
        for part, value in parts.items():
            if not part.startswith("head_") and part != "std":
                collected[part].append(value)
    over = {part: _mean(values) for part, values in collected.items()}
    for part, extreme in (("min", min), ("max", max)):
        if part in over:
            over[part] = extreme(collected[part])
    count = min(map(len, deep), default=0)
    if count > 1 and "" in over:
        over["std"] = _deviation([_mean(parts[b][""] for parts in deep) for b in range(count)])
    return over


def _mean(values: Iterable[float]) -> float:
    """Mean; NaN where there are no values or one is NaN."""
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; NaN where a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
