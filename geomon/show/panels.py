"""What panels show of a run, as data: figures of matplotlib and charts of plotly draw the same.

A panel is `Lines` over steps or layers, or a `Matrix` of colours whose rows are layers, the first
at the bottom.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from geomon.analysis import Curve, curve_of, mean_abs_over_heads, single_source
from geomon.analysis.alerts import alert_notes
from geomon.analysis.curves import training_curve
from geomon.analysis.profile import is_far_above
from geomon.record import Reading, Readings, tags
from geomon.record.columns import NAN
from geomon.show.colours import BLACK, BLUE, GREEN, STEPS, VERMILLION, ramp

# Metrics of which the panel of the intrinsic dimension is drawn, and their colours: of gride the
# largest scale.
DIMENSIONS = {"twonn": BLUE, "twonn_distinct": VERMILLION, "gride": GREEN}
# What pages draw by layer and by head.
BY_LAYER = ("twonn", "anisotropy", "attention_entropy")
BY_HEAD = ("qk_cosine", "attention_entropy")
STEPS_LABEL = "training step (logarithmic)"
LAYERS_LABEL = "layer (0 = what enters the first block)"

# Largest number of steps at which profiles are drawn.
_MAX_PROFILES = 7
# Largest number of heads with a line of their own.
_MOST_LINES = 64
# Ratio of the estimates at one step above which their axis is logarithmic.
_MAX_LINEAR_RATIO = 4.0
# Ratio of the largest value of a map to the smallest above which its colours are logarithmic.
_MAX_LINEAR_COLOURS = 12.0
# How far to the left of the first step step 0 stands, in powers of ten.
_ZERO = 0.45

Floats = NDArray[np.float64]


class NotMeasuredError(ValueError):
    """A run cannot give a figure; the message says in one line what was not measured."""


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
        name: What it is, in the legend; "" to leave it out.
        x: Steps or layers, ascending.
        y: Values; NaN where there is none.
        colour: Its colour, as "#RRGGBB".
        low: Lower ends of a band about it; empty for none.
        high: Upper ends.
        dash: "solid", "dash", "dot" or "dashdot".
        width: Width in points.
    """

    name: str
    x: Sequence[int]
    y: Sequence[float]
    colour: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dash: str = "solid"
    width: float = 2.0


@dataclass(frozen=True)
class Lines:
    """A panel of lines.

    Attributes:
        label: Label of the axis of values.
        lines: The lines; none where nothing was measured.
        over: "step" or "layer".
        null: Value of rows without structure and its words; None where it is not known.
        alerts: Steps of alerts and their kinds.
        ends: Lowest and highest value of the axis; None where its ends follow the lines.
        remark: What lies beyond the axis.
        is_logarithmic: Whether the axis of values is.
    """

    label: str
    lines: Sequence[Line]
    over: str = "step"
    null: tuple[float, str] | None = None
    alerts: Sequence[tuple[int, str]] = ()
    ends: tuple[float, float] | None = None
    remark: str = ""
    is_logarithmic: bool = False

    @property
    def has_bands(self) -> bool:
        """Whether a line has a band."""
        return any(len(line.low) for line in self.lines)


@dataclass(frozen=True)
class Matrix:
    """A panel of colours.

    Attributes:
        label: What the colours stand for.
        values: Values, [layers, columns]; NaN where there is none.
        layers: Number of the layer of each row.
        columns: Step or number of the head of each column.
        low: Lowest value of the scale.
        high: Highest value of the scale.
        over: "step" or "head".
        is_signed: Whether the scale is one of both signs about 0.
        is_logarithmic: Whether the scale is logarithmic.
    """

    label: str
    values: Floats
    layers: Sequence[int]
    columns: Sequence[int]
    low: float
    high: float
    over: str = "head"
    is_signed: bool = False
    is_logarithmic: bool = False

    @property
    def exceeds(self) -> bool:
        """Whether a value lies beyond the scale."""
        return bool(np.nanmax(self.values) > self.high)


class StepAxis:
    """Logarithmic axis of steps, with step 0 to the left of the first step after it.

    Args:
        steps: Steps that are shown, one at least.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = sorted(set(steps))
        self._after = min((step for step in self.steps if step > 0), default=1)

    def places(self, steps: Iterable[int]) -> list[float]:
        """Return where steps stand: a step above 0 at its own number.

        Args:
            steps: Steps.
        """
        return [float(step) if step > 0 else self._after * 10**-_ZERO for step in steps]

    def edges(self) -> list[float]:
        """Return the ends of the columns of the steps, one more than there are steps."""
        at = self.places(self.steps)
        if len(at) == 1:
            return [at[0] / 1.5, at[0] * 1.5]
        inner = [math.sqrt(one * other) for one, other in itertools.pairwise(at)]
        return [at[0] ** 2 / inner[0], *inner, at[-1] ** 2 / inner[-1]]

    def ticks(self) -> list[int]:
        """Return the steps that the axis names: 0, the first after it, and powers of ten."""
        first, last = self.steps[0], self.steps[-1]
        powers = [10**power for power in range(len(str(last)) + 1)]
        named = [power for power in powers if max(first, self._after) <= power <= last]
        if self._after * 2 <= min(named, default=last):
            named.insert(0, self._after)
        return [0] * (first == 0) + (named or [last] * (last > 0))


def spread_steps(steps: Sequence[int], most: int = _MAX_PROFILES) -> list[int]:
    """Choose the first and the last step and some between, denser after the first.

    Args:
        steps: Steps to choose from.
        most: Largest number of steps chosen.

    Returns:
        Chosen steps, ascending.

    Example:
        >>> spread_steps([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32], 4)
        [0, 2, 8, 32]
    """
    steps = sorted(steps)
    if len(steps) <= most:
        return steps
    logarithms = np.log1p(np.array(steps) - steps[0])
    targets = np.linspace(0, logarithms[-1], most)
    nearest = {int(np.abs(logarithms - target).argmin()) for target in targets}
    return [steps[index] for index in sorted(nearest)]


def spread_items(items: Sequence[int], most: int) -> list[int]:
    """Choose at most so many of the items, evenly spaced, the first and the last among them.

    Args:
        items: Items to choose from.
        most: Largest number of items chosen, at least 2.

    Example:
        >>> spread_items([1, 2, 3, 4, 5, 6, 7], 3)
        [1, 4, 7]
    """
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def line_of(curve: Curve, name: str, colour: str, *, dash: str = "solid") -> Line:
    """Make the line of a curve, with its 95 % intervals as a band where they are known.

    Args:
        curve: The curve.
        name: What it is, in the legend.
        colour: Its colour, as "#RRGGBB".
        dash: How it is drawn.
    """
    low: list[float] = []
    high: list[float] = []
    if any(curve.margins):
        pairs = list(zip(curve.values, curve.margins, strict=True))
        low = [v - m for v, m in pairs]
        high = [v + m for v, m in pairs]
    return Line(name, curve.steps, curve.values, colour, low, high, dash)


def dimension_panel(readings: Readings) -> Lines:
    """Collect both variants of TwoNN with their intervals, and the largest scale of Gride.

    The axis of values is logarithmic where they lie far apart at one step.

    Args:
        readings: Readings of a run.
    """
    lines = []
    for metric, colour in DIMENSIONS.items():
        part = f"k{max(scales_of(readings), default=0)}" if metric == "gride" else ""
        curve = curve_of(readings, metric, part=part)
        name = readings.text_of(metric).title_of(part)
        if metric == "twonn" and len(curve) and (phase := curve.phase()).earliest is not None:
            name = f"{name}: peak {phase.peak:.1f} at step {phase.peak_step:,}"
        if len(curve):
            lines.append(line_of(curve, name, colour, dash="dash" if part else "solid"))
    by_step: dict[int, list[float]] = {}
    for line in lines:
        for step, value in zip(line.x, line.y, strict=True):
            by_step.setdefault(step, []).append(value)
    rows = by_step.values()
    is_logarithmic = (
        min((v for row in rows for v in row), default=0.0) > 0
        and max(max(row) / min(row) for row in rows) > _MAX_LINEAR_RATIO
    )
    if is_logarithmic:  # whose axis has no 0
        lines = [
            replace(
                each, low=[max(end, min(v, 0.1)) for end, v in zip(each.low, each.y, strict=False)]
            )
            for each in lines
        ]
    label, null = readings.text_of("twonn").label, null_of(readings, "twonn")
    alerts = alerts_of(readings)
    return Lines(label, lines, null=null, alerts=alerts, is_logarithmic=is_logarithmic)


def training_panel(readings: Readings, metric: str) -> Lines:
    """Collect the mean of a metric over layers, over training.

    Args:
        readings: Readings of a run.
        metric: Name of a metric.
    """
    curve, text = curve_of(readings, metric), readings.text_of(metric)
    lines = [line_of(curve, text.title, BLUE)] if len(curve) else []
    return Lines(text.label, lines, null=null_of(readings, metric), alerts=alerts_of(readings))


def depth_panel(readings: Readings, metric: str) -> Lines:
    """Collect a metric over depth, a line for each of a few steps.

    Where layer 0, the embedding, would flatten the blocks, the axis is theirs and a remark says how
    high layer 0 is.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
    """
    layers = readings.layers(metric)
    measured = _profiles(readings, metric, layers)
    steps = spread_steps(list(measured))
    colours = ramp(STEPS, len(steps))
    lines = [
        Line(f"step {step:,}", layers, measured[step], colour, width=1.6)
        for step, colour in zip(steps, colours, strict=True)
    ]
    label, null = readings.text_of(metric).label, null_of(readings, metric)
    first = [line.y[0] for line in lines if layers[0] == 0 and math.isfinite(line.y[0])]
    blocks = [value for line in lines for value in line.y[1:] if math.isfinite(value)]
    if not is_far_above(first, blocks):
        return Lines(label, lines, "layer", null)
    low, high = min(0.0, *blocks), max(0.0, *blocks)
    space = 0.15 * (high - low)
    ends = sorted({f"{value:.3g}" for value in (min(first), max(first))}, key=float)
    return Lines(
        label, lines, "layer", null, ends=(low - space if low < 0 else 0, high + space),
        remark=f"↑ layer 0: {' to '.join(ends)}",
    )  # fmt: skip


def layers_panel(readings: Readings, metric: str, colours: Mapping[int, str]) -> Lines:
    """Collect a metric over training, a line for each layer; the axis begins at 0.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
        colours: Colour of each layer.
    """
    curves = {layer: curve_of(readings, metric, layer=layer) for layer in readings.layers(metric)}
    width = 1.8 if len(curves) <= 8 else 1.1
    lines = [
        Line("", curve.steps, curve.values, colours[layer], width=width)
        for layer, curve in curves.items()
        if len(curve)
    ]
    null, most = null_of(readings, metric), _largest(readings, metric)
    highest = max([v for line in lines for v in line.y] + [most] * math.isfinite(most), default=1.0)
    ends = (0.0, 1.08 * highest if highest > 0 else 1.0)
    label = readings.text_of(metric).label
    return Lines(label, lines, null=null, alerts=alerts_of(readings), ends=ends)


def heads_panel(readings: Readings, metric: str, colours: Mapping[int, str]) -> Lines:
    """Collect a metric of heads over training, a line for each, and their mean size.

    Of more heads than lines can be told apart, the shares of them between values are shown instead.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value for each head.
        colours: Colour of each layer.
    """
    measured, layers, tables = measured_heads(readings, metric)
    steps = [reading.step for reading in measured]
    lines = []
    if are_many_heads(readings, metric):
        flat = tables.reshape(len(steps), -1)
        middle = np.nanmedian(flat, axis=1).tolist()
        for shares, words in (((5, 95), "90 % of the heads"), ((25, 75), "half of them")):
            low, high = np.nanpercentile(flat, shares, axis=1).tolist()
            lines.append(Line(words, steps, middle, BLUE, low, high, width=1.0))
    else:
        lines = [
            Line("", steps, values.tolist(), colours[layer], width=1.0)
            for row, layer in enumerate(layers)
            for values in tables[:, row].T
        ]
    mean = mean_abs_over_heads(readings, metric)
    if len(mean):
        lines.append(Line("mean size over all heads", mean.steps, mean.values, BLACK, width=2.4))
    ends = (-1.05, 1.05) if metric.endswith("cosine") else None
    return Lines(readings.text_of(metric).label, lines, alerts=alerts_of(readings), ends=ends)


def are_many_heads(readings: Readings, metric: str) -> bool:
    """Return whether a run has more heads than lines can be told apart.

    Args:
        readings: Readings of a run.
        metric: Name of a metric of heads.
    """
    return max((len(r.column(metric).by_head()) for r in readings), default=0) > _MOST_LINES


def cards_of(
    readings: Readings, metrics: Iterable[str] = ()
) -> Iterator[tuple[str, Lines | Matrix]]:
    """List the panels that loggers show of a run, with their names, which are numbered.

    Args:
        readings: Readings of the main stack of a run.
        metrics: Names of metrics that are shown over training and over depth besides.
    """
    asked: list[tuple[str, str, Callable[[], Lines | Matrix | None]]] = [
        ("twonn", "", lambda: dimension_panel(readings)),
        ("anisotropy", "over depth", lambda: depth_panel(readings, "anisotropy")),
        *((name, "by layer", partial(map_panel, readings, name)) for name in BY_LAYER),
        *((name, "by head", partial(_last_heads, readings, name)) for name in BY_HEAD),
    ]
    for name in metrics:
        asked.append((name, "", partial(training_panel, readings, name)))
        asked.append((name, "over depth", partial(depth_panel, readings, name)))
    for number, (name, how, make) in enumerate(asked, start=1):
        panel = make()
        if isinstance(panel, Matrix) or (panel is not None and panel.lines):
            yield f"{number} {readings.text_of(name).title} {how}".rstrip(), panel


def _last_heads(readings: Readings, metric: str) -> Matrix | None:
    return next(iter(head_panels(readings, metric).values()), None)


def map_panel(readings: Readings, metric: str) -> Matrix | None:
    """Collect a metric at every layer and step; None where it was not measured.

    The scale begins at 0 where it can, and is that of the layers without layer 0, whose dimension
    is often many times as high. It is logarithmic where their values lie far apart, and the entropy
    of attention reaches up to that of uniform attention.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
    """
    layers = readings.layers(metric)
    columns = _profiles(readings, metric, layers)
    if not columns:
        return None
    table = np.array([*columns.values()]).T
    blocks = table[1:] if layers[0] == 0 and np.isfinite(table[1:]).any() else table
    lowest = float(np.nanmin(blocks))
    low, high = _range_of(blocks, metric, _largest(readings, metric))
    if lowest >= 0:  # a cosine of one sign shows more this way
        low, high = 0.0, float(np.nanmax(blocks)) if low < 0 else high
    wide = lowest > 0 and high > _MAX_LINEAR_COLOURS * lowest
    return Matrix(
        readings.text_of(metric).label, table, layers, list(columns), lowest if wide else low,
        max(high, low + 1e-9), "step", is_signed=low < 0, is_logarithmic=wide,
    )  # fmt: skip


def head_panels(readings: Readings, metric: str, most: int = 1) -> dict[int, Matrix]:
    """Collect a metric of heads by step, at the last step or at a few, on one scale.

    The scale of cosines is -1 to 1, that of the attention entropy 0 to that of uniform attention,
    where it is known; others have that of the whole run.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value for each head.
        most: Largest number of steps; with 1, the last alone.
    """
    measured, layers, tables = measured_heads(readings, metric)
    if not measured:
        return {}
    steps = [reading.step for reading in measured]
    chosen = spread_steps(steps, most) if most > 1 else steps[-1:]
    low, high = _range_of(tables, metric, _largest(readings, metric))
    return {
        step: Matrix(
            readings.text_of(metric).label, table, layers, range(table.shape[1]), low, high,
            is_signed=low < 0,
        )
        for step, table in zip(steps, tables, strict=True)
        if step in chosen
    }  # fmt: skip


def measured_heads(readings: Readings, metric: str) -> tuple[list[Reading], list[int], Floats]:
    """Select the readings of one source in which a head has a value of a metric.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.

    Returns:
        The readings, one for each step; the layers in which heads have a value in any; the values,
        [readings, layers, heads], NaN where there is none.
    """
    selected = single_source(readings)
    known = [reading.column(metric).by_head() for reading in selected]
    places = {place for heads in known for place in heads}
    layers = sorted({layer for layer, _ in places})
    row_of = {layer: row for row, layer in enumerate(layers)}
    count = max((head + 1 for _, head in places), default=0)
    table = np.full((len(selected), len(layers), count), np.nan)
    for values, heads in zip(table, known, strict=True):
        for (layer, head), value in heads.items():
            values[row_of[layer], head] = value
    rows = [row for row, heads in enumerate(known) if heads]
    return [selected[row] for row in rows], layers, table[rows]


def furthest_loss(readings: Readings) -> tuple[str, Curve]:
    """Choose the loss that is known up to the latest step, and its name.

    The loss of the training is that of the batch after a reading, and after the last update there
    is no batch: a loss on the probe reaches the end of the run. If both end at the same step, it is
    the training loss.

    Args:
        readings: Readings of a run.

    Returns:
        "training loss" or "loss on the probe", and its curve, which is empty where neither is
        known.
    """
    names = {"training loss": tags.LOSS, "loss on the probe": tags.PROBE_LOSS}
    curves = {name: training_curve(readings, key) for name, key in names.items()}
    return max(curves.items(), key=lambda named: max(named[1].steps, default=-1))


def null_of(readings: Readings, metric: str) -> tuple[float, str] | None:
    """Return the last null of a metric, the value of rows without structure, and its words.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.
    """
    for reading in reversed(readings):
        null = reading.column(metric).whole.get("null", NAN)
        if math.isfinite(null):
            return null, f"{readings.text_of(metric).null_label}: {null:.2g}"
    return None


def alerts_of(readings: Readings) -> list[tuple[int, str]]:
    """List the steps of the alerts of a run and their kinds in words.

    Args:
        readings: Readings of a run.
    """
    notes = [(reading.step, note) for reading in readings for note in alert_notes(reading)]
    return sorted((step, note.kind.replace("_", " ")) for step, note in notes)


def scales_of(readings: Iterable[Reading]) -> list[int]:
    """List the scales of gride, ascending: 32 for its part "k32"."""
    parts = {part for reading in readings for part in reading.column("gride").parts}
    return sorted(int(part[1:]) for part in parts if part[1:].isdigit())


def _profiles(readings: Readings, metric: str, layers: Sequence[int]) -> dict[int, list[float]]:
    """Values at layers by step, of the readings that have one."""
    columns = {reading.step: reading.column(metric) for reading in single_source(readings)}
    profiles = {step: [column.at(layer) for layer in layers] for step, column in columns.items()}
    return {step: values for step, values in profiles.items() if np.isfinite(values).any()}


def _range_of(values: Floats, metric: str, most: float) -> tuple[float, float]:
    """Choose the ends of a scale: about zero for cosines and where signs differ."""
    if math.isfinite(most):
        return 0.0, most
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if metric.endswith("cosine"):
        return -1.0, 1.0
    return (-max(-low, high), max(-low, high)) if low < 0 else (low, high)


def _largest(readings: Readings, metric: str) -> float:
    """Return the largest value that a metric can have; NaN where there is none, or not known."""
    if metric == "attention_entropy":  # that of uniform attention
        return (null_of(readings, metric) or (NAN, ""))[0]
    return 1.0 if metric == "attention_entropy_normalised" else NAN
