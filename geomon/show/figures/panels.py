"""Panels of the figures: functions that draw readings into given matplotlib axes."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from geomon.analysis import Curve, curve_of, mean_abs_over_heads, single_source
from geomon.analysis.alerts import alert_notes
from geomon.analysis.curves import training_curve
from geomon.analysis.profile import is_far_above
from geomon.analysis.queries_keys import layers_of
from geomon.record import Reading, Readings, tags
from geomon.record.printable import printable
from geomon.show.figures.colours import (
    BEYOND,
    BLUE,
    GREEN,
    GREY,
    GRID,
    ON_FIELD,
    PURPLE,
    STEPS,
    VERMILLION,
)

# Keyword arguments of matplotlib for how something is drawn.
Style = dict[str, Any]

# Largest number of steps at which profiles are drawn.
_MAX_PROFILES = 7
# Largest number of heads with a line of their own.
_MOST_LINES = 64
# Largest number of colours that a colour bar names one by one.
MAX_NAMED = 12
# Ratio of the estimates at one step above which their axis is logarithmic.
_MAX_LINEAR_RATIO = 4.0
# Ratio of the largest value of a map to the smallest above which its colours are logarithmic.
_MAX_LINEAR_COLOURS = 12.0


class NotMeasuredError(ValueError):
    """A run cannot give a figure; the message says in one line what was not measured."""


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, whose panels are laid out when it is drawn."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)
    return Figure(figsize=(width, height), dpi=160, layout=layout)


def capitalised(readings: Readings, metric: str) -> str:
    """Return the title of a metric as the beginning of a sentence."""
    title = readings.text_of(metric).title
    return title[:1].upper() + title[1:]


def caption(panel: Axes, letter: str, words: str) -> None:
    """Write the letter of a panel and what it shows above it."""
    panel.set_title(f"$\\bf{{{letter}}}$   {words}", loc="left", fontsize=11.5, pad=8)


def last_with(readings: Readings, metric: str) -> Reading:
    """Return the last reading that has values of a metric.

    Raises:
        NotMeasuredError: None has.
    """
    for reading in reversed(single_source(readings)):
        if reading.column(metric).by_layer() or reading.column(metric).by_head():
            return reading
    raise NotMeasuredError(f"{metric} was not measured in this run")


def arrays_by_step(readings: Readings, name: str, most: int) -> dict[int, dict[str, NDArray[Any]]]:
    """Read the arrays that stand beside a record at a few steps, evenly spaced in logarithm.

    Args:
        readings: Readings of a run.
        name: Name of an array; steps without it are left out.
        most: Largest number of steps.
    """
    if readings.folder is None:
        return {}
    selected = single_source(readings)
    kept = set(readings.folder.steps(selected[0].source)) if selected else set()
    known = [reading.step for reading in selected if reading.step in kept]
    found = {step: readings.arrays(step, selected[0].source) for step in spread_steps(known, most)}
    return {step: arrays for step, arrays in found.items() if array_layers(arrays, name, readings)}


def array_layers(arrays: Mapping[str, object], name: str, readings: Iterable[Reading]) -> list[int]:
    """List the layers that an array stands beside the record for.

    Args:
        arrays: Arrays of a step by tag.
        name: Name of the array.
        readings: Readings of the run.
    """
    return [layer for layer in layers_of(readings) if tags.layer_tag(name, layer) in arrays]


def draw_layer_map(
    panel: Axes, readings: Readings, metric: str, *, label: str | None = None
) -> None:
    """Draw a metric at every layer (rows) and step (columns) as colours, from 0 where it can be.

    The scale is that of the layers without layer 0, whose dimension is often many times as high:
    what lies beyond has a colour of its own. It is logarithmic where their values lie far apart,
    and the entropy of attention reaches up to that of uniform attention.

    Args:
        panel: Axes of matplotlib.
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
        label: Label of the colour bar; None for that of the metric.
    """
    layers = readings.layers(metric)
    measured = [
        reading
        for reading in single_source(readings)
        if any(math.isfinite(value) for value in by_layer(reading, metric, layers))
    ]
    if not measured:
        show_message(panel, f"{metric}: not measured")
        return
    steps = [reading.step for reading in measured]
    table = np.array([by_layer(reading, metric, layers) for reading in measured]).T
    step_axis(panel, steps)
    panel.grid(visible=False)
    blocks = table[1:] if layers[0] == 0 and np.isfinite(table[1:]).any() else table
    lowest = float(np.nanmin(blocks))
    colours, low, high = colour_range(blocks, metric, largest(measured[-1], metric))
    if lowest >= 0:  # a cosine of one sign shows more this way
        colours, low, high = "cividis", 0.0, float(np.nanmax(blocks)) if low < 0 else high
    wide = lowest > 0 and high > _MAX_LINEAR_COLOURS * lowest
    norm = LogNorm(lowest, high) if wide else Normalize(low, max(high, low + 1e-9))
    mesh = panel.pcolormesh(
        _edges(steps), np.arange(len(layers) + 1) - 0.5, table, norm=norm,
        cmap=colormaps[colours].with_extremes(over=BEYOND),
    )  # fmt: skip
    exceeded = bool(np.nanmax(table) > high)
    panel.set_facecolor("#DDDDDD")  # shows where a layer has no value
    panel.set_xlim(*_edges(steps)[[0, -1]])
    ticks = range(0, len(layers), math.ceil(len(layers) / MAX_NAMED))
    panel.set_yticks(list(ticks), labels=[str(layers[tick]) for tick in ticks])
    panel.set_ylabel("layer", fontsize=10)
    bar = panel.figure.colorbar(mesh, ax=panel, pad=0.02, extend="max" if exceeded else "neither")
    words = [readings.text_of(metric).label if label is None else label, "logarithmic" * wide]
    bar.set_label("\n".join(filter(None, words)), fontsize=9)
    if wide:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5, length=2)
    bar.outline.set_visible(False)


def _edges(steps: Sequence[int]) -> NDArray[np.float64]:
    """Return the ends of the columns of steps on a logarithmic axis, one more than steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    inner = [
        math.sqrt(one * other) if one > 0 else other / 2 for one, other in itertools.pairwise(steps)
    ]
    first = steps[0] ** 2 / inner[0] if steps[0] > 0 else -inner[0] / 2
    return np.array([first, *inner, steps[-1] ** 2 / inner[-1]])


def spread_steps(steps: Sequence[int], most: int = _MAX_PROFILES) -> list[int]:
    """Choose the first and the last step and, between them, steps evenly spaced in logarithm.

    Args:
        steps: Steps to choose from.
        most: Largest number of steps chosen.

    Returns:
        Chosen steps, ascending.

    Example:
        >>> spread_steps([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32], 4)
        [0, 2, 8, 32]
    """
    if len(steps) <= most:
        return sorted(steps)
    logarithms = np.log1p(np.sort(steps))
    targets = np.linspace(logarithms[0], logarithms[-1], most)
    nearest = {int(np.abs(logarithms - target).argmin()) for target in targets}
    return [sorted(steps)[index] for index in sorted(nearest)]


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


def literal(text: str) -> str:
    """Make a text of unknown origin one that matplotlib writes as it stands.

    Args:
        text: Text, in which a dollar sign would begin a formula.
    """
    return printable(text).replace("$", r"\$")


def draw_dimension(panel: Axes, readings: Readings, *, legend_above: bool = False) -> None:
    """Draw both variants of TwoNN with their intervals, and the largest scale of Gride.

    Args:
        panel: Axes of matplotlib.
        readings: Readings of a run.
        legend_above: Whether the legend stands above the panel, instead of in its top quarter.
    """
    scale = max(scales_of(readings), default=0)
    paper = curve_of(readings, "twonn")
    largest = curve_of(readings, "gride", part=f"k{scale}")
    candidates = [
        (readings.text_of("twonn").title, paper, BLUE),
        (
            readings.text_of("twonn_distinct").title,
            curve_of(readings, "twonn_distinct"),
            VERMILLION,
        ),
        (readings.text_of("gride").title_of(f"k{scale}"), largest, GREEN),
    ]
    drawn = [candidate for candidate in candidates if len(candidate[1])]
    if not drawn:
        show_message(panel, "twonn, twonn_distinct and gride: not measured")
        return
    for name, curve, colour in drawn:
        label = name
        style: Style = {"lw": 2.0} if colour != GREEN else {"lw": 1.2, "ls": (0, (4, 2))}
        style |= {"marker": "o", "ms": 4} if len(curve) == 1 else {}
        peak = curve.phase() if curve is paper else None
        if peak and peak.earliest is not None:
            label = f"{name}: peak {peak.peak:.1f} at step {peak.peak_step:,}"
            dot: Style = {"ms": 7, "mec": "white", "mew": 1.2, "zorder": 5}
            panel.plot([peak.peak_step], [peak.peak], "o", color=colour, **dot)
        panel.plot(curve.steps, curve.values, color=colour, label=label, **style)
        if any(curve.margins):
            panel.fill_between(curve.steps, *_band(curve), color=colour, alpha=0.22, lw=0)
    step_axis(panel, [step for _, curve, _ in drawn for step in curve.steps])
    mark_alerts(panel, readings, named=True)
    curves = [curve for _, curve, _ in drawn]
    lines = len(panel.get_legend_handles_labels()[1]) + 1
    lines = 0 if legend_above else max(lines, 4)
    _dimension_axis(panel, curves, lines=lines)
    null = null_of(readings, "twonn")
    low, high = panel.get_ylim()
    if low < null < high:  # or the line would lie behind the legend
        _dimension_axis(panel, curves, lines=lines, reach=null)
    _draw_null(panel, readings, "twonn", in_legend=True)
    banded = any(margin for _, curve, _ in drawn for margin in curve.margins)
    said = ["band: 95 % interval"] * banded
    said += ["logarithmic"] * (panel.get_yscale() == "log")
    words = readings.text_of("twonn").label + f"\n({', '.join(said)})" * bool(said)
    panel.set_ylabel(words, fontsize=10)
    place: Style = {"loc": "lower left", "bbox_to_anchor": (-0.06, 1.01)} if legend_above else {}
    legend(panel, labelcolor="linecolor", **place)


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


def draw_loss(panel: Axes, readings: Readings) -> None:
    """Draw the loss behind a panel over steps, with an axis of its own.

    Args:
        panel: Axes with steps, which are drawn already.
        readings: Readings of a run; nothing is drawn where they have no loss.
    """
    name, loss = furthest_loss(readings)
    if len(loss) < 2:
        return
    axis = panel.twinx()
    axis.set_zorder(panel.get_zorder() - 1)
    panel.patch.set_visible(False)
    axis.plot(loss.steps, loss.values, color=GREY, lw=1.2, ls="-.")
    low, high = min(loss.values), max(loss.values)
    bottom = max(0, low - 0.15 * (high - low))
    legend = panel.get_legend()
    lines = 0 if legend is None else max(len(legend.texts), 4)
    axis.set_ylim(bottom, bottom + (high - bottom) / _share_below_legend(lines))
    axis.spines[["top", "left"]].set_visible(False)
    axis.spines["right"].set_color(GREY)
    axis.tick_params(labelsize=9, length=3, colors=GREY)
    said = ["dash-dotted"]
    if loss.steps[-1] < single_source(readings)[-1].step:
        said.append(f"known to step {loss.steps[-1]:,}")
    axis.set_ylabel(f"{name} ({', '.join(said)})", fontsize=9.5, color=GREY)


def draw_profile(panel: Axes, readings: Readings, metric: str) -> None:
    """Draw a metric over depth, one line for each of a few steps."""
    layers = readings.layers(metric)
    measured = [
        reading
        for reading in single_source(readings)
        if any(math.isfinite(v) for v in by_layer(reading, metric, layers))
    ]
    if not layers or not measured:
        show_message(panel, f"{metric}: not measured")
        return
    steps = spread_steps([reading.step for reading in measured])
    drawn = [reading for reading in measured if reading.step in set(steps)]
    colours = colours_of(len(drawn), STEPS)
    for colour, reading in zip(colours, drawn, strict=True):
        width = 2.4 if reading is drawn[-1] else 1.6
        dots = 3.5 if len(layers) <= MAX_NAMED else 0
        values = by_layer(reading, metric, layers)
        panel.plot(layers, values, color=colour, lw=width, marker="o", ms=dots)
    plain(panel)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1))
    panel.set_xlabel("layer (0 = what enters the first block)", fontsize=10)
    panel.set_ylabel(readings.text_of(metric).label, fontsize=10)
    if all(v >= 0 for r in drawn for v in by_layer(r, metric, layers) if math.isfinite(v)):
        panel.set_ylim(bottom=0)
    _leave_out_layer_0(panel, layers, [by_layer(r, metric, layers) for r in drawn])
    _draw_null(panel, readings, metric)
    colour_bar(panel, [f"{reading.step}" for reading in drawn], STEPS, "step")


def _leave_out_layer_0(
    panel: Axes, layers: Sequence[int], profiles: Sequence[Sequence[float]]
) -> None:
    """Give the axis of values to the blocks where layer 0, the embedding, would flatten them."""
    first = [values[0] for values in profiles if layers[0] == 0 and math.isfinite(values[0])]
    blocks = [value for values in profiles for value in values[1:] if math.isfinite(value)]
    if not is_far_above(first, blocks):
        return
    low, high = min(0.0, *blocks), max(0.0, *blocks)
    space = 0.15 * (high - low)
    panel.set_ylim(low - space if low < 0 else 0, high + space)
    ends = sorted({f"{value:.3g}" for value in (min(first), max(first))}, key=float)
    panel.text(
        0.02, 0.02, f"↑ layer 0: {' to '.join(ends)}", transform=panel.transAxes, fontsize=8.5,
        color=GREY,
    )  # fmt: skip


def draw_heads_over_training(
    panel: Axes, readings: Readings, metric: str, colours: dict[int, Any]
) -> None:
    """Draw one thin line per head, coloured by layer, and the mean absolute value in bold.

    Of more heads than lines can be told apart, the share of them between values is drawn instead.

    Args:
        panel: Axes of matplotlib.
        readings: Readings of a run.
        metric: Name of the metric.
        colours: Colour of each layer.
    """
    mean = mean_abs_over_heads(readings, metric)
    if not len(mean):
        show_message(panel, f"{metric} of heads: not measured")
        return
    selected = single_source(readings)
    steps = [reading.step for reading in selected]
    layers, values = head_tables(selected, metric)
    style: Style = {"lw": 1.0, "alpha": 0.75}
    style |= {"marker": "o", "ms": 3} if len(steps) == 1 else {}
    if are_many_heads(readings, metric):
        _draw_shares_of_heads(panel, steps, values.reshape(len(steps), -1))
    else:
        for row, layer in enumerate(layers):
            panel.plot(steps, values[:, row], color=colours[layer], **style)
    panel.axhline(0, color=GREY, lw=0.8, zorder=0)
    dot: Style = {"marker": "o", "ms": 5} if len(mean) == 1 else {}
    panel.plot(mean.steps, mean.values, color="white", lw=4.5, **dot)
    mark_alerts(panel, readings)
    label = "mean size over all heads"
    panel.plot(mean.steps, mean.values, color="black", lw=2.4, label=label, **dot)
    step_axis(panel, steps)
    panel.set_ylim(-1.05, 1.8 if are_many_heads(readings, metric) else 1.3)
    panel.set_yticks([-1, -0.5, 0, 0.5, 1])
    panel.set_ylabel(readings.text_of(metric).label, fontsize=10)
    legend(panel)


def are_many_heads(readings: Readings, metric: str) -> bool:
    """Return whether a run has more heads than lines can be told apart.

    Args:
        readings: Readings of a run.
        metric: Name of a metric of heads.
    """
    return max((len(r.column(metric).by_head()) for r in readings), default=0) > _MOST_LINES


def _draw_shares_of_heads(panel: Axes, steps: list[int], values: NDArray[np.float64]) -> None:
    """Draw between which values 90 % and half of the heads lie; values are [steps, heads]."""
    known = np.isfinite(values).any(axis=1)
    at = np.array(steps)[known]
    for shares, words, alpha in (
        ((5, 95), "90 % of the heads", 0.2),
        ((25, 75), "half of them", 0.3),
    ):
        low, high = np.nanpercentile(values[known], shares, axis=1)
        panel.fill_between(at, low, high, color=BLUE, alpha=alpha, lw=0, label=words)


def draw_layers_over_training(
    panel: Axes, readings: Readings, metric: str, colours: dict[int, Any]
) -> None:
    """Draw one line per layer, coloured by layer.

    Args:
        panel: Axes of matplotlib.
        readings: Readings of a run.
        metric: Name of the metric.
        colours: Colour of each layer.
    """
    curves = {n: curve_of(readings, metric, layer=n) for n in readings.layers(metric)}
    if not any(map(len, curves.values())):
        show_message(panel, f"{metric}: not measured")
        return
    for layer, curve in curves.items():
        style: Style = {"marker": "o", "ms": 3.5} if len(curve) == 1 else {}
        style["lw"] = 1.8 if len(curves) <= 8 else 1.1
        panel.plot(curve.steps, curve.values, color=colours[layer], **style)
    step_axis(panel, [step for curve in curves.values() for step in curve.steps])
    highest = max(max(curve.values) for curve in curves.values() if len(curve))
    if metric == "attention_entropy":
        null = null_of(readings, metric)
        highest = highest if math.isnan(null) else max(highest, null)
    panel.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    mark_alerts(panel, readings)
    panel.set_ylabel(readings.text_of(metric).label, fontsize=10)
    _draw_null(panel, readings, metric)


def plain(panel: Axes) -> None:
    """Style the axes of a panel: two spines, faint horizontal lines."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9.5, length=3)
    panel.grid(axis="y", color=GRID, lw=0.7)
    panel.set_axisbelow(True)
    for axis in (panel.xaxis, panel.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter):
            axis.set_major_formatter(_Powers())


class _Powers(ScalarFormatter):
    """Numbers of ticks with their power of ten: beside an axis it would lie over its name."""

    def __init__(self) -> None:
        super().__init__(useOffset=False)
        self.set_scientific(False)

    def __call__(self, value: float, place: int | None = None) -> str:
        largest = max(map(abs, self.axis.get_view_interval())) if self.axis else 1
        if not value or 1e-4 <= largest < 1e5:
            return super().__call__(value, place)
        size, _, power = f"{value:.3e}".partition("e")
        return f"{float(size):g}×10$^{{{int(power)}}}$".replace("-", "−")


def show_message(panel: Axes, message: str) -> None:
    """Write a message into a panel that has nothing to draw."""
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_color("#CCCCCC")
    panel.text(0.5, 0.5, message, transform=panel.transAxes, ha="center", va="center", color=GREY)


def null_of(readings: Readings, metric: str) -> float:
    """Return the last null of a metric, the value of rows without structure; NaN without any.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.
    """
    nulls = (reading.column(metric).whole.get("null", math.nan) for reading in reversed(readings))
    return next((null for null in nulls if math.isfinite(null)), math.nan)


def _draw_null(panel: Axes, readings: Readings, metric: str, *, in_legend: bool = False) -> None:
    """Draw a faint line at the null of a metric, if it lies within the panel, with its words."""
    null = null_of(readings, metric)
    low, high = panel.get_ylim()
    if not low < null < high:
        return
    words = f"{readings.text_of(metric).null_label}: {null:.2g}"
    label = words if in_legend else None
    panel.axhline(null, color=GREY, lw=0.9, ls=":", zorder=0, label=label)
    if in_legend:
        return
    panel.annotate(
        words, (1, null), xycoords=("axes fraction", "data"), xytext=(-2, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=8, color=GREY,
    )  # fmt: skip


def mark_alerts(panel: Axes, readings: Readings, *, named: bool = False) -> None:
    """Mark the steps of alerts with vertical lines, on an axis of steps.

    Args:
        panel: Axes of matplotlib.
        readings: Readings of a run.
        named: Whether the legend says how many there are, and what the first one is.
    """
    alerts = [(reading.step, note.kind) for reading in readings for note in alert_notes(reading)]
    label = None
    if named and alerts:
        step, kind = min(alerts)
        label = f"alert at step {step:,}: {kind.replace('_', ' ')}"
        label += f" (first of {len(alerts)})" * (len(alerts) > 1)
    for step in sorted({step for step, _ in alerts}):
        panel.axvline(step, color=PURPLE, lw=1.4, ls=(0, (2, 1.5)), zorder=1, label=label)
        label = None


def legend(panel: Axes, **style: Any) -> None:
    """Add a legend, at the upper left where no other place is asked for."""
    style = {
        "fontsize": 9,
        "handlelength": 1.6,
        "borderaxespad": 0,  # or lines behind it show above it
        "bbox_to_anchor": (0.004, 0, 0.992, 1),  # beside the axis, which it would cover
        "framealpha": 1,
        "loc": "upper left",
    } | style
    panel.legend(edgecolor="none", facecolor="white", **style)


def step_axis(panel: Axes, steps: Sequence[int]) -> None:
    """Make the step axis logarithmic, with step 0 to the left of the first step after it."""
    plain(panel)
    first, last = min(steps), max(steps)
    powers = [10**power for power in range(len(str(last)) + 1)]
    after = min((step for step in steps if step > 0), default=1)
    if first > 0:
        panel.set_xscale("log")
        panel.set_xlim(first / 1.1, last * 1.1)
    else:
        panel.set_xscale("symlog", linthresh=after, linscale=0.45)
        panel.set_xlim(-0.25 * after, max(last * 1.15, 1.5 * after))
    inside = [power for power in powers if max(first, after) <= power <= last]
    if first == 0 and last > after and after * 2 <= min(inside, default=last):
        inside.insert(0, after)
    panel.set_xticks([0] * (first == 0) + (inside or [last] * (last > 0)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    panel.set_xlabel("training step (logarithmic)", fontsize=10)


def _dimension_axis(
    panel: Axes, curves: Sequence[Curve], *, lines: int, reach: float = -math.inf
) -> None:
    """Scale the axis of dimensions: from zero, or logarithmic where the curves lie far apart.

    Args:
        panel: Axes of matplotlib.
        curves: What is drawn.
        lines: Number of lines of a legend, for which the top is left free.
        reach: A further value that stays below the legend.
    """
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault(step, []).append(value)
    low, high = (pick(v for row in by_step.values() for v in row) for pick in (min, max))
    high = max(high, reach)
    ratio = max(max(row) / min(row) for row in by_step.values()) if low > 0 else 1.0
    if ratio <= _MAX_LINEAR_RATIO:
        panel.set_ylim(min(0, low), max(high, 1e-9) / _share_below_legend(lines))
        return
    panel.set_yscale("log")
    bottom = low / 1.25
    panel.set_ylim(bottom, bottom * (high / bottom) ** (1 / _share_below_legend(lines)))
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _share_below_legend(lines: int) -> float:
    """Return the share of a panel's height that a legend of so many lines at its top leaves."""
    return 0.95 - 0.065 * lines


def _band(curve: Curve) -> tuple[list[float], list[float]]:
    """Return the ends of the 95 % intervals of a curve; not below 0.1, for a logarithmic axis."""
    pairs = list(zip(curve.values, curve.margins, strict=True))
    return [max(v - m, min(v, 0.1)) for v, m in pairs], [v + m for v, m in pairs]


def colours_of(count: int, colours: Colormap) -> list[Any]:
    """Choose a number of colours, evenly spaced in a colour map."""
    return [colours(index / max(count - 1, 1)) for index in range(count)]


def colour_bar(panel: Axes, names: Sequence[str], colours: Colormap, label: str) -> None:
    """Add a colour bar with one field for each name."""
    count = len(names)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    mappable = ScalarMappable(norm, ListedColormap(colours_of(count, colours)))
    bar = panel.figure.colorbar(mappable, ax=panel, pad=0.02, aspect=28)
    every = math.ceil(count / MAX_NAMED)
    ticks = range(0, count, every)
    bar.set_ticks(list(ticks), labels=[names[tick] for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=9, length=0)
    bar.set_label(label, fontsize=9.5)
    bar.outline.set_visible(False)


def head_tables(readings: Sequence[Reading], metric: str) -> tuple[list[int], NDArray[np.float64]]:
    """Arrange the values of heads in tables.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.

    Returns:
        The layers that have heads in any reading; the values, [readings, layers, heads], NaN where
        there is none.
    """
    columns = [reading.column(metric) for reading in readings]
    rows = [
        {layer: heads for layer, heads in enumerate(each.heads, each.first) if heads}
        for each in columns
    ]
    layers = sorted({layer for row in rows for layer in row})
    count = max((len(heads) for row in rows for heads in row.values()), default=0)
    table = np.full((len(readings), len(layers), count), np.nan)
    for index, row in enumerate(rows):
        for layer, heads in row.items():
            table[index, layers.index(layer), : len(heads)] = heads
    return layers, table


def measured_heads(
    readings: Readings, metric: str
) -> tuple[list[Reading], list[int], NDArray[np.float64]]:
    """Select the readings of one source in which a head has a value of a metric.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.

    Returns:
        The readings, one for each step; the layers in which heads have a value in any; the values,
        [readings, layers, heads], NaN where there is none.
    """
    selected = single_source(readings)
    layers, tables = head_tables(selected, metric)
    rows = np.flatnonzero(np.isfinite(tables).any(axis=(1, 2)))
    return [selected[row] for row in rows.tolist()], layers, tables[rows]


def choose_metrics(
    metric: str | None,
    usual: Sequence[str],
    is_measured: Callable[[str], object],
    *,
    place: str = "",
) -> list[str]:
    """Choose the metrics of a figure: the one that is asked for, or the usual ones.

    Args:
        metric: Name of the metric that is asked for; None for the usual ones.
        usual: Names of these.
        is_measured: Function that returns whether the run has values of a metric.
        place: Words of the message on where values are missing, for instance " of single heads".

    Raises:
        NotMeasuredError: The run has values of none of them.
    """
    wanted = usual if metric is None else (metric,)
    found = [name for name in wanted if is_measured(name)]
    if not found:
        raise NotMeasuredError(f"{', '.join(wanted)}{place}: not measured in this run")
    return found


def colour_range(
    table: NDArray[np.float64], metric: str, most: float = math.nan
) -> tuple[str, float, float]:
    """Choose a colour map and its limits: around zero for cosines and where signs differ.

    Args:
        table: Values.
        metric: Name of the metric.
        most: Largest value that the metric can have; then the scale runs from 0 to it. NaN where
            there is none.
    """
    if math.isfinite(most):
        return "cividis", 0.0, most
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    if metric.endswith("cosine") or low < 0:
        limit = 1.0 if metric.endswith("cosine") else max(-low, high)
        return "RdBu_r", -limit, limit
    return "cividis", low, high


def largest(reading: Reading, metric: str) -> float:
    """Return the largest value that a metric can have; NaN where there is none, or not known."""
    if metric == "attention_entropy":  # that of uniform attention
        return reading.column(metric).whole.get("null", math.nan)
    return 1.0 if metric == "attention_entropy_normalised" else math.nan


def matrix_axes(panel: Axes, layers: Sequence[int], heads: int) -> None:
    """Label the axes of a matrix of layers and heads, with at most sixteen ticks each."""
    for axis, names in ((panel.yaxis, layers), (panel.xaxis, range(heads))):
        ticks = range(0, len(names), math.ceil(len(names) / 16))
        axis.set_ticks(list(ticks), labels=[str(names[tick]) for tick in ticks])
    panel.set_xlabel("head", fontsize=9.5)
    panel.set_ylabel("layer", fontsize=9.5)
    panel.tick_params(labelsize=9, length=0)
    panel.spines[:].set_visible(False)


def annotate(panel: Axes, table: NDArray[np.float64], image: Any) -> None:
    """Write each value into its field, dark on light or light on dark."""
    for (row, column), value in np.ndenumerate(table):
        if not math.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if dark else "black"
        style: Style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": colour}
        style["gid"] = ON_FIELD
        panel.text(column, row, f"{value:.2f}".replace("-", "−"), **style)


def by_layer(reading: Reading, metric: str, layers: Sequence[int]) -> list[float]:
    """Collect the values of a metric at layers; NaN where there is none."""
    column = reading.column(metric)
    return [column.at(layer) for layer in layers]


def scales_of(readings: Iterable[Reading]) -> list[int]:
    """List the scales of gride, ascending: 32 for its part "k32"."""
    parts = {part for reading in readings for part in reading.column("gride").parts}
    return sorted(int(part[1:]) for part in parts if part[1:].isdigit())
