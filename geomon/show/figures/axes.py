"""Axes of matplotlib: panels drawn into them, their labels, and what stands beside a record."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from geomon.analysis import single_source
from geomon.analysis.queries_keys import layers_of
from geomon.record import Reading, Readings, tags
from geomon.record.printable import printable
from geomon.show.colours import BEYOND, BLACK, GREY, GRID, NOTHING, PURPLE, SIGNED, UNSIGNED, ramp
from geomon.show.panels import (
    LAYERS_LABEL,
    STEPS_LABEL,
    Line,
    Lines,
    Matrix,
    NotMeasuredError,
    StepAxis,
    furthest_loss,
    spread_steps,
)

# Keyword arguments of matplotlib for how something is drawn.
Style = dict[str, Any]

# Largest number of colours that a colour bar names one by one.
_MAX_NAMED = 12
# Largest numbers of layers and heads whose values are written into their fields.
_MAX_WRITTEN = 12
_DASHES = {"solid": "-", "dash": (0, (4, 2)), "dot": ":", "dashdot": "-."}
_DARK_PAPER, _DARK_INK, _DARK_GRID = "#131313", "#EDEDED", "#3A3A3A"
_DARK = {
    "figure.facecolor": _DARK_PAPER, "axes.facecolor": _DARK_PAPER,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _DARK_INK
    ),
}  # fmt: skip


@contextmanager
def page(*, dark: bool = False) -> Iterator[None]:
    """Have figures drawn, and written, for a dark page.

    Args:
        dark: Whether the page is dark; a white one is the default without this function too.
    """
    with matplotlib.rc_context(_DARK if dark else {}):
        yield


def ink(colour: str) -> str:
    """Return the colour of a line on this page: on a dark one, dim colours are lightened.

    Args:
        colour: Colour of the line on a white page.
    """
    if not _is_dark():
        return colour
    if colour == BLACK:
        return _DARK_INK
    red, green, blue = to_rgb(colour)
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    lightened = ramp((colour, "#FFFFFF"), 101)
    return lightened[round(55 * max(0.0, 1 - 2 * luminance))]


def _is_dark() -> bool:
    return to_rgb(matplotlib.rcParams["axes.facecolor"]) == to_rgb(_DARK_PAPER)


def faint_lines(panel: Axes, axis: Literal["x", "y"]) -> None:
    """Draw faint lines across a panel at the ticks of an axis.

    Args:
        panel: Axes of matplotlib.
        axis: Name of the axis.
    """
    panel.grid(axis=axis, lw=0.7, color=_DARK_GRID if _is_dark() else GRID)
    panel.set_axisbelow(True)


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, whose panels are laid out when it is drawn."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)
    return Figure(figsize=(width, height), dpi=160, layout=layout)


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


def literal(text: str) -> str:
    """Make a text of unknown origin one that matplotlib writes as it stands.

    Args:
        text: Text, in which a dollar sign would begin a formula.
    """
    return printable(text).replace("$", r"\$")


def draw_lines(panel: Axes, drawn: Lines, *, missing: str, small: bool = False) -> None:
    """Draw a panel of lines.

    Args:
        panel: Axes of matplotlib.
        drawn: What to draw.
        missing: What to write where there is nothing to draw.
        small: Whether the panel is a small one, with its legend above it.
    """
    if not drawn.lines:
        show_message(panel, missing)
        return
    over_steps = drawn.over == "step"
    axis = StepAxis(step for line in drawn.lines for step in line.x) if over_steps else None
    for line in drawn.lines:
        _draw_line(panel, line, axis)
    if axis is not None:
        step_axis(panel, axis)
        _mark_alerts(panel, drawn, axis)
    else:
        plain(panel)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1))
        panel.set_xlabel(LAYERS_LABEL, fontsize=10)
    said = ["band: 95 % interval"] * drawn.has_bands + ["logarithmic"] * drawn.is_logarithmic
    said = said if over_steps else []
    panel.set_ylabel(
        drawn.label + f"\n({', '.join(said)})" * bool(said), fontsize=9 if small else 10
    )
    _scale(panel, drawn)
    if drawn.null is not None and panel.get_ylim()[0] < drawn.null[0] < panel.get_ylim()[1]:
        panel.axhline(drawn.null[0], color=GREY, lw=0.9, ls=":", zorder=0)
        panel.annotate(
            drawn.null[1], (1, drawn.null[0]), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize=8, color=GREY,
        )  # fmt: skip
    if drawn.remark:
        panel.text(0.02, 0.02, drawn.remark, transform=panel.transAxes, fontsize=8.5, color=GREY)
    named = [line for line in drawn.lines if line.name]
    if over_steps and named:
        legend(panel, above=small)
        if not small:
            _leave_room(panel, panel)
    elif len(named) > 1:
        names = [line.name.removeprefix("step ") for line in named]
        colour_bar(panel, names, [line.colour for line in named], "step")


def _draw_line(panel: Axes, line: Line, axis: StepAxis | None) -> None:
    places = line.x if axis is None else axis.places(line.x)
    colour = ink(line.colour)
    dots = len(line.x) == 1 or (axis is None and len(line.x) <= _MAX_NAMED)
    panel.plot(
        places, line.y, color=colour, lw=line.width, ls=_DASHES[line.dash],
        label=line.name or None, marker="o" if dots else "", ms=3.5,
    )  # fmt: skip
    if len(line.low):
        panel.fill_between(places, line.low, line.high, color=colour, alpha=0.22, lw=0)


def _scale(panel: Axes, drawn: Lines) -> None:
    """Scale the axis of values: from 0 where no value is below it, or logarithmic."""
    if drawn.ends is not None:
        panel.set_ylim(*drawn.ends)
    elif drawn.is_logarithmic:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif not any(value < 0 for line in drawn.lines for value in line.y):
        panel.set_ylim(bottom=0)


def _mark_alerts(panel: Axes, drawn: Lines, axis: StepAxis) -> None:
    """Mark the steps of alerts with vertical lines; the legend names the first one."""
    for place, (step, kind) in enumerate(drawn.alerts):
        label = f"alert at step {step:,}: {kind}"
        label += f" (first of {len(drawn.alerts)})" * (len(drawn.alerts) > 1)
        panel.axvline(
            axis.places([step])[0], color=ink(PURPLE), lw=1.4, ls=(0, (2, 1.5)), zorder=1,
            label=None if place else label,
        )  # fmt: skip


def _leave_room(panel: Axes, named: Axes) -> None:
    """Leave the top of a panel to the legend of this one, or of one in the same place."""
    legend = named.get_legend()
    share = 1.1 + 0.1 * len(legend.texts if legend else ())
    low, high = panel.get_ylim()
    is_logarithmic = panel.get_yscale() == "log"
    panel.set_ylim(
        top=low * (high / low) ** share if is_logarithmic else low + share * (high - low)
    )


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
    places = StepAxis(reading.step for reading in single_source(readings)).places(loss.steps)
    axis.plot(places, loss.values, color=GREY, lw=1.2, ls="-.")
    _leave_room(axis, panel)
    axis.spines[["top", "left"]].set_visible(False)
    axis.spines["right"].set_color(GREY)
    axis.tick_params(labelsize=9, length=3, colors=GREY)
    said = ["dash-dotted"]
    if loss.steps[-1] < single_source(readings)[-1].step:
        said.append(f"known to step {loss.steps[-1]:,}")
    axis.set_ylabel(f"{name} ({', '.join(said)})", fontsize=9.5, color=GREY)


def draw_matrix(panel: Axes, drawn: Matrix, *, bar: bool = True, label: bool = True) -> Any:
    """Draw a panel of colours, the first layer at the bottom; small ones with their values.

    Args:
        panel: Axes of matplotlib.
        drawn: What to draw.
        bar: Whether to add a bar of the colours.
        label: Whether the bar says what the colours stand for.

    Returns:
        The drawn colours, for a bar of several panels.
    """
    rows, columns = drawn.values.shape
    x: Sequence[float] = [column - 0.5 for column in range(columns + 1)]
    if drawn.over == "step":
        axis = StepAxis(drawn.columns)
        x = axis.edges()
        step_axis(panel, axis)
        panel.set_xlim(x[0], x[-1])
    colours = colormaps[SIGNED if drawn.is_signed else UNSIGNED].with_extremes(over=BEYOND)
    norm = (LogNorm if drawn.is_logarithmic else Normalize)(drawn.low, drawn.high)
    mesh = panel.pcolormesh(x, np.arange(rows + 1) - 0.5, drawn.values, norm=norm, cmap=colours)
    panel.grid(visible=False)
    panel.set_facecolor(NOTHING)
    _name_ticks(panel.yaxis, drawn.layers)
    panel.set_ylabel("layer", fontsize=9.5)
    if drawn.over == "head":
        _name_ticks(panel.xaxis, drawn.columns)
        panel.set_xlabel("head", fontsize=9.5)
        panel.tick_params(labelsize=9, length=0)
        panel.spines[:].set_visible(False)
        if max(rows, columns) <= _MAX_WRITTEN:
            _write_values(panel, drawn, mesh)
    if bar:
        extend = "max" if drawn.exceeds else "neither"
        made = panel.figure.colorbar(mesh, ax=panel, pad=0.02, extend=extend)
        words = drawn.label * label, "logarithmic" * drawn.is_logarithmic
        name_bar(made, "\n".join(filter(None, words)))
        if drawn.is_logarithmic:
            made.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            made.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            made.ax.yaxis.set_minor_locator(NullLocator())
    return mesh


def name_bar(bar: Any, label: str) -> None:
    """Name a colour bar.

    Args:
        bar: Colour bar of matplotlib.
        label: What the colours stand for.
    """
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8.5, length=2)
    bar.outline.set_visible(False)


def _name_ticks(axis: Any, names: Sequence[int]) -> None:
    """Name rows or columns by their numbers, sixteen at most."""
    ticks = range(0, len(names), math.ceil(len(names) / 16))
    axis.set_ticks(list(ticks), labels=[str(names[tick]) for tick in ticks])


def _write_values(panel: Axes, drawn: Matrix, mesh: Any) -> None:
    """Write each value into its field, dark on light or light on dark."""
    for (row, column), value in np.ndenumerate(drawn.values):
        if math.isfinite(value):
            red, green, blue, _ = mesh.cmap(mesh.norm(value))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            colour = "white" if is_dark else "black"
            style: Style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": colour}
            panel.text(column, row, f"{value:.2f}".replace("-", "−"), **style)


def plain(panel: Axes) -> None:
    """Style the axes of a panel: two spines, faint horizontal lines."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9.5, length=3)
    faint_lines(panel, "y")


def step_axis(panel: Axes, axis: StepAxis) -> None:
    """Make the axis of steps logarithmic, with step 0 to the left of the first step after it.

    Args:
        panel: Axes of matplotlib.
        axis: Where the steps stand.
    """
    plain(panel)
    panel.set_xscale("log")
    first, last = axis.places([axis.steps[0], axis.steps[-1]])
    panel.set_xlim(first / 1.1, last * 1.1)
    ticks = axis.ticks()
    panel.set_xticks(axis.places(ticks), labels=[f"{step:,}" for step in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel(STEPS_LABEL, fontsize=10)


def show_message(panel: Axes, message: str) -> None:
    """Write a message into a panel that has nothing to draw."""
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_color("#CCCCCC")
    panel.text(0.5, 0.5, message, transform=panel.transAxes, ha="center", va="center", color=GREY)


def legend(panel: Axes, *, above: bool = False, **style: Any) -> None:
    """Add a legend at the upper left of a panel, or above it, where something has a name.

    Args:
        panel: Axes of matplotlib.
        above: Whether it stands above the panel.
        style: Keyword arguments of matplotlib that go before these.
    """
    if not panel.get_legend_handles_labels()[0]:
        return
    place: Style = {"loc": "upper left"}
    if above:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.06, 1.01), "labelcolor": "linecolor"}
    shown: Style = {"fontsize": 9, "handlelength": 1.6, "framealpha": 0.85, "edgecolor": "none"}
    panel.legend(**{**shown, **place, **style})


def colour_bar(panel: Axes, names: Sequence[str], colours: Sequence[str], label: str) -> None:
    """Add a colour bar with one field for each name.

    Args:
        panel: Axes of matplotlib.
        names: Names of the colours, from below.
        colours: The colours.
        label: What the names are of.
    """
    count = len(names)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    mappable = ScalarMappable(norm, ListedColormap([ink(colour) for colour in colours]))
    bar = panel.figure.colorbar(mappable, ax=panel, pad=0.02, aspect=28)
    ticks = range(0, count, math.ceil(count / _MAX_NAMED))
    bar.set_ticks(list(ticks), labels=[names[tick] for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=9, length=0)
    bar.set_label(label, fontsize=9.5)
    bar.outline.set_visible(False)


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
