"""From a snapshot to values: every metric at every layer, over batches of rows."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from geomon import tags
from geomon.across import across_layers, nulls
from geomon.layer import CAPTURED, Layer, MissingViewError, Snapshot, captured_views, parameters
from geomon.metrics import Metric
from geomon.notes import Note, cautions, grouped

# The parts of one metric at one layer in one batch: "" is the value itself.
Parts = dict[str, float]


@dataclass
class Evaluation:
    """Values by tag (NaN = could not be measured), and what to know of them."""

    values: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


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
    result = Evaluation()
    device = snapshot.layers[0].captured["hidden"].device.type if _has_hidden(snapshot) else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        measured: dict[str, dict[int, list[Parts]]] = {name: {} for name in metrics}
        failures: dict[tuple[str, str], list[int]] = defaultdict(list)
        for layer in snapshot.layers:  # layer by layer: the views of one are let go before the next
            cut = layer.batches(rows, batches)
            for name, metric in metrics.items():
                if layer.index == 0 and not _of_hidden(metric):
                    continue
                try:
                    measured[name][layer.index] = _measure(metric, cut)
                except MissingViewError as error:
                    # Not seen at this layer, at any step: it has no part in the mean.
                    failures[name, str(error)].append(layer.index)
                    result.values[tags.layer_tag(name, layer.index)] = math.nan
                except Exception as error:
                    if strict:
                        raise
                    # Should have been measured: a mean over the other layers would mislead.
                    failures[name, str(error) or type(error).__name__].append(layer.index)
                    measured[name][layer.index] = [{"": math.nan}]
    for name, by_layer in measured.items():
        for index, parts in by_layer.items():
            for part, value in _over_batches(parts).items():
                result.values[tags.layer_tag(name, index, part)] = value
        for part, value in _over_layers(by_layer).items():
            result.values[tags.mean_tag(name, part)] = value
    result.values |= across_layers(result.values)
    if _has_hidden(snapshot):
        hidden = snapshot.layers[0].captured["hidden"]
        result.values |= nulls(metrics, min(rows, len(hidden)), hidden.shape[1])
    result.notes = grouped(failures) + cautions(result.values)
    return result


def _measure(metric: Metric, batches: list[Layer]) -> list[Parts]:
    """The parts of one metric, for each batch of rows if it reads rows."""
    used = batches if _of_hidden(metric) else batches[:1]
    return [_as_parts(metric(*(layer.view(v) for v in parameters(metric)))) for layer in used]


def _of_hidden(metric: Metric) -> bool:
    """Whether the metric reads rows of hidden states."""
    return any(CAPTURED[view] == "hidden" for view in captured_views(parameters(metric)))


def _has_hidden(snapshot: Snapshot) -> bool:
    return bool(snapshot.layers) and "hidden" in snapshot.layers[0].captured


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
