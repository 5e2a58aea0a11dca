"""Builds the panels of a run from its readings."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from geomon.analysis import (
    Curve,
    curve_of,
    is_far_above,
    layers_of,
    logged,
    loss_unit,
    null_of,
    plain_curve,
    single_source,
)
from geomon.record import NAN, Column, Reading, Readings, chart_title, shortened, tags
from geomon.show.colours import BLACK, BLUE, GREEN, LAYERS, STEPS, VERMILLION, ramp
from geomon.show.panels import BREAK, Floats, Line, Lines, Matrix, spread_items, spread_steps

# Metrics in the panel of the intrinsic dimension, with their colours. Gride is drawn at its largest
# scale.
DIMENSIONS = {"twonn": BLUE, "twonn_distinct": VERMILLION, "gride": GREEN}
# Metrics that pages draw by layer and by head.
BY_LAYER = ("twonn", "anisotropy", "attention_entropy")
BY_HEAD = ("qk_cosine", "attention_entropy")

# Largest number of layers whose quartiles are drawn.
_MOST_LAYERS = 5
# The axis is logarithmic if two estimates at one step differ by more than this factor.
_MAX_LINEAR_RATIO = 4.0
# The colours of a map are logarithmic if its values differ by more than this factor.
_MAX_LINEAR_COLOURS = 12.0

# -- over training ---------------------------------------------------------------------------------


def line_of(curve: Curve, name: str, colour: str, *, dash: str = "solid") -> Line:
    """Turn a curve into a line, with its 95 % intervals as a band if they are known."""
    pairs = list(zip(curve.values, curve.margins, strict=True)) if any(curve.margins) else []
    low, high = [v - m for v, m in pairs], [v + m for v, m in pairs]
    return Line(name, curve.steps, curve.values, colour, low, high, dash)


def dimension_panel(readings: Readings) -> Lines:
    """Build the panel of both TwoNN variants and of Gride at its largest scale."""
    label = chart_title("twonn", readings.text_of("twonn"))
    lines = []
    for metric, colour in DIMENSIONS.items():
        part = f"k{max(scales_of(readings), default=0)}" if metric == "gride" else ""
        curve = curve_of(readings, metric, part=part)
        name = shortened(readings.text_of(metric).title_of(part), label)
        if metric == "twonn" and (phase := curve.phase()).has_fallen:
            name = f"{name}: peak {phase.peak.value:.1f} at step {phase.peak.step:,}"
        if curve:
            lines.append(line_of(curve, name, colour))
    null = null_of(readings, "twonn")
    return to_logarithm(Lines(label, lines, null=null, alerts=alerts_of(readings)))


def to_logarithm(panel: Lines) -> Lines:
    """Put a panel on a logarithmic axis if estimates at one step differ by a large factor."""
    by_step: dict[int, list[float]] = {}
    for line in panel.lines:
        for step, value in zip(line.x, line.y, strict=True):
            by_step.setdefault(step, []).append(value)
    ratios = [max(row) / min(row) if min(row) > 0 else NAN for row in by_step.values()]
    if not max(ratios, default=0.0) > _MAX_LINEAR_RATIO or any(map(math.isnan, ratios)):
        return panel
    lines = [  # a logarithmic axis has no 0
        replace(each, low=[max(end, min(v, 0.1)) for end, v in zip(each.low, each.y, strict=False)])
        for each in panel.lines
    ]
    return replace(panel, lines=lines, is_logarithmic=True)


def training_panel(readings: Readings, metric: str) -> Lines:
    """Build the panel of a metric's mean over layers against the training step."""
    curve, text = curve_of(readings, metric), readings.text_of(metric)
    lines = [line_of(curve, text.title, BLUE)] if curve else []
    return Lines(text.label, lines, null=null_of(readings, metric), alerts=alerts_of(readings))


def layers_panel(readings: Readings, metric: str) -> Lines:
    """Build the panel of a metric over training with one line per layer; its axis starts at 0."""
    colours = _layer_colours(readings)
    lines = [
        Line(str(layer), curve.steps, curve.values, colours[layer], width=1.4)
        for layer in readings.layers(metric)
        if (curve := curve_of(readings, metric, layer=layer))
    ]
    null, most = null_of(readings, metric), _largest(readings, metric)
    highest = max(0.0, most if math.isfinite(most) else 0.0, *(v for x in lines for v in x.y))
    return Lines(
        readings.text_of(metric).label, lines, named_by="layer", null=null,
        alerts=alerts_of(readings), ends=(0.0, 1.08 * highest if highest > 0 else 1.0),
    )  # fmt: skip


def cosines_panel(readings: Readings) -> Lines:
    """Build the panel of query-key cosines: median and quartiles over the heads of each layer."""
    measured, layers, tables = measured_heads(readings, "qk_cosine")
    steps, colours = [reading.step for reading in measured], _layer_colours(readings)
    lines = []
    for row in spread_items(range(len(layers)), _MOST_LAYERS):
        low, middle, high = zip(*map(_quartiles, tables[:, row]), strict=True)
        lines.append(Line("", steps, middle, colours[layers[row]], low, high, width=1.6))
    # In the metric's own mean, values of opposite sign cancel.
    if mean := plain_curve(readings, lambda reading: reading.column("qk_cosine").mean_size()):
        lines.append(Line("mean size over all heads", mean.steps, mean.values, BLACK, width=2.4))
    label, alerts = readings.text_of("qk_cosine").label, alerts_of(readings)
    return Lines(
        label, lines, alerts=alerts, ends=(-1.05, 1.05), bands="quartiles over the heads of a layer"
    )


def _quartiles(values: Floats) -> list[float]:
    known = values[np.isfinite(values)]
    return np.percentile(known, (25, 50, 75)).tolist() if len(known) else [NAN] * 3


def furthest_loss(readings: Readings) -> tuple[str, Curve]:
    """Return the name and the curve of the loss that reaches the latest step."""
    unit = loss_unit(readings)
    unit = f" ({unit})" if unit else ""
    names = {f"training loss{unit}": tags.LOSS, f"loss on the probe{unit}": tags.PROBE_LOSS}
    # Readings take the training loss of the next batch, and the last one has no next batch.
    curves = {name: plain_curve(readings, logged(key)) for name, key in names.items()}
    return max(curves.items(), key=lambda named: max(named[1].steps, default=-1))


def alerts_of(readings: Readings) -> list[tuple[int, str]]:
    """List the steps with breaks or alerts, each with what occurs there for the first time."""
    found = {step: [BREAK] for step, _ in readings.breaks}
    known: set[str] = set()
    for alert in readings.alerts:
        kinds = found.setdefault(alert.step, [])
        if alert.kind not in known:
            kinds.append(alert.kind)
            known.add(alert.kind)
    return [(step, ", ".join(kinds)) for step, kinds in found.items()]


# -- over depth ------------------------------------------------------------------------------------


def depth_panel(readings: Readings, metric: str, part: str = "") -> Lines:
    """Build the panel of a metric over depth with one line for each of a few steps."""
    columns, layers, table, remark = _profiles(readings, metric, part)
    rows = dict(zip(columns, table.T.tolist(), strict=True))
    steps = spread_steps(list(rows))
    lines = [
        Line(f"{step:,}", layers, rows[step], colour, width=1.6)
        for step, colour in zip(steps, ramp(STEPS, len(steps)), strict=True)
    ]
    if lines:
        margins = np.array([columns[steps[-1]].margin_at(layer) for layer in layers])
        if np.isfinite(margins).all():
            low, high = ((lines[-1].y + sign * margins).tolist() for sign in (-1, 1))
            lines[-1] = replace(lines[-1], low=low, high=high)
    null = None if part else null_of(readings, metric)
    return Lines(readings.text_of(metric).label, lines, "layer", "step", null, remark=remark)


def scales_panel(readings: Readings) -> Lines:
    """Build the panel of Gride's mean dimension by scale, with one line for each of a few steps."""
    by_step: dict[int, dict[int, float]] = {}
    for reading in single_source(readings):
        means = {k: reading.column("gride", f"k{k}").mean for k in scales_of([reading])}
        known = {scale: mean for scale, mean in means.items() if math.isfinite(mean)}
        if len(known) > 1:
            by_step[reading.step] = known
    steps = spread_steps(list(by_step))
    lines = [
        Line(f"{step:,}", [*by_step[step]], [*by_step[step].values()], colour, width=1.8)
        for step, colour in zip(steps, ramp(STEPS, len(steps)), strict=True)
    ]
    return Lines(readings.text_of("gride").label, lines, "scale", "step")


def map_panel(readings: Readings, metric: str) -> Matrix | None:
    """Build the map of a metric by layer and step; return None if it was not measured."""
    columns, layers, table, remark = _profiles(readings, metric)
    if not columns:
        return None
    lowest = float(np.nanmin(table))
    low, high = _range_of(table, metric, _largest(readings, metric))
    if lowest >= 0:  # cosines of a single sign differ more visibly on this scale
        low, high = 0.0, np.nanmax(table) if low < 0 else high
    wide = lowest > 0 and high > _MAX_LINEAR_COLOURS * lowest
    low, high = (lowest if wide else low), (high if high > low else low + 1.0)
    return Matrix(
        readings.text_of(metric).label, table, layers, [*columns], low, high, "step", remark, wide
    )


def head_panels(readings: Readings, metric: str, most: int = 1) -> dict[int, Matrix]:
    """Build the matrices of a head metric by layer and head for the chosen steps, on one scale."""
    measured, layers, tables = measured_heads(readings, metric)
    if not measured:
        return {}
    steps = [reading.step for reading in measured]
    chosen = spread_steps(steps, most) if most > 1 else steps[-1:]
    low, high = _range_of(tables, metric, _largest(readings, metric))
    label = readings.text_of(metric).label
    return {
        step: Matrix(label, table, layers, [*range(table.shape[1])], low, high)
        for step, table in zip(steps, tables, strict=True)
        if step in chosen
    }


def measured_heads(
    readings: Iterable[Reading], metric: str
) -> tuple[list[Reading], list[int], Floats]:
    """Select the readings of one source where some head has a value of the metric.

    Returns:
        The selected readings, one per step; the layers with values; the values [readings, layers,
        heads], NaN if missing.
    """
    selected = [each for each in single_source(readings) if each.column(metric).by_head()]
    known = [reading.column(metric).by_head() for reading in selected]
    places = {place for heads in known for place in heads}
    layers = sorted({layer for layer, _ in places})
    row_of = {layer: row for row, layer in enumerate(layers)}
    count = max((head + 1 for _, head in places), default=0)
    table = np.full((len(selected), len(layers), count), np.nan)
    for values, heads in zip(table, known, strict=True):
        for (layer, head), value in heads.items():
            values[row_of[layer], head] = value
    return selected, layers, table


# -- what loggers show -----------------------------------------------------------------------------


def cards_of(
    readings: Readings, metrics: Iterable[str] = ()
) -> Iterator[tuple[str, Lines | Matrix]]:
    """Yield the panels that loggers show, each with a numbered name."""
    for number, (words, panel) in enumerate(_cards(readings, metrics), start=1):
        if isinstance(panel, Matrix) or (panel is not None and panel.lines):
            yield f"{number} {words}", panel


def _cards(
    readings: Readings, metrics: Iterable[str]
) -> Iterator[tuple[str, Lines | Matrix | None]]:
    titles = {name: readings.text_of(name).title for name in (*BY_LAYER, *BY_HEAD, *metrics)}
    yield chart_title("twonn", readings.text_of("twonn")), dimension_panel(readings)
    yield f"{titles['anisotropy']} over depth", depth_panel(readings, "anisotropy")
    for name in BY_LAYER:
        yield f"{titles[name]} by layer", map_panel(readings, name)
    for name in BY_HEAD:
        yield f"{titles[name]} by head", next(iter(head_panels(readings, name).values()), None)
    for name in metrics:
        yield titles[name], training_panel(readings, name)
        yield f"{titles[name]} over depth", depth_panel(readings, name)


def scales_of(readings: Iterable[Reading]) -> list[int]:
    """List the scales of Gride in ascending order: its part "k32" has scale 32."""
    parts = {part for reading in readings for part in reading.column("gride").parts}
    return sorted(int(part[1:]) for part in parts if part[1:].isdigit())


# -- scales and colours ----------------------------------------------------------------------------


def _profiles(
    readings: Readings, metric: str, part: str = ""
) -> tuple[dict[int, Column], list[int], Floats, str]:
    """Collect a metric over depth, and leave out layer 0 if its values are far above the others.

    Returns:
        Columns by step; the layers; their values [layers, steps]; a remark on layer 0 if it was
        left
        out.
    """
    columns = {reading.step: reading.column(metric, part) for reading in single_source(readings)}
    columns = {step: column for step, column in columns.items() if column.by_layer()}
    layers = sorted({layer for column in columns.values() for layer in column.depths()})
    table = np.array([[column.at(layer) for layer in layers] for column in columns.values()]).T
    table[~np.isfinite(table)] = np.nan
    if layers[:1] != [0] or not is_far_above(table[0], table[1:].ravel()):
        return columns, layers, table, ""
    ends = [f"{pick(table[0]):.3g}" for pick in (np.nanmin, np.nanmax)]
    words = " to ".join(dict.fromkeys(ends))
    return columns, layers[1:], table[1:], f"layer 0, far above: {words}"


def _layer_colours(readings: Readings) -> dict[int, str]:
    """Assign a colour to each layer of a run."""
    layers = layers_of(readings)[1:]
    return {0: LAYERS[0]} | dict(zip(layers, ramp(LAYERS, len(layers)), strict=True))


def _range_of(values: Floats, metric: str, most: float) -> tuple[float, float]:
    """Choose the ends of a colour scale: symmetric about 0 for cosines and if both signs occur."""
    if math.isfinite(most):
        return 0.0, most
    low, high = np.nanmin(values), np.nanmax(values)
    if metric.endswith("cosine"):
        return -1.0, 1.0
    return (-max(-low, high), max(-low, high)) if low < 0 else (low, high)


def _largest(readings: Readings, metric: str) -> float:
    """Return the largest possible value of a metric, or NaN if it is unbounded or not known."""
    if metric == "attention_entropy":  # reached by uniform attention
        return (null_of(readings, metric) or (NAN, ""))[0]
    return 1.0 if metric == "attention_entropy_normalised" else NAN
