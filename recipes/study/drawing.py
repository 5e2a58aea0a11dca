"""Panels of figures: labels, and curves of several seeds, thin, with their mean in front."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from PIL import Image

from recipes.study.seeds import estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
GREY = "#767676"
# Colours of layers or steps, first to last; more of them begin anew.
IN_ORDER = (SKY, BLUE, GREEN, "#E69F00", ORANGE, PINK)
# Colours of a picture in its file: lines, their mixtures with bands, and the edges of letters.
_COLOURS = 96


class Line(NamedTuple):
    """Curves of several seeds in a panel, which get their mean and its interval.

    Attributes:
        label: Name of the mean in the legend.
        colour: Colour of all of it.
        places: Places on the horizontal axis, common to all curves.
        curves: Values at these places, one sequence for each seed; there is no mean at a place at
            which one is not finite.
        style: Keyword arguments of matplotlib for the mean.
    """

    label: str
    colour: str
    places: Sequence[float]
    curves: Sequence[Sequence[float]]
    style: Mapping[str, Any] = {}


class Panel(NamedTuple):
    """A panel of a figure.

    Attributes:
        title: Text above the panel.
        x_label: Quantity on the horizontal axis, with its unit.
        y_label: Quantity on the vertical axis, with its unit.
        lines: Lines to draw.
        nulls: Values at which a grey line stands, with their names.
        finish: Function that is called with the axes at the end, for scales and marks.
        options: Keyword arguments of `Axes.set`.
        legend: Keyword arguments of the legend; None for no legend.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    nulls: Sequence[tuple[float, str]] = ()
    finish: Callable[[Axes], object] = lambda axes: None
    options: Mapping[str, Any] = {}
    legend: Mapping[str, Any] | None = {}


def draw_panels(
    panels: Sequence[Panel], columns: int, size: tuple[float, float], note: str = ""
) -> Figure:
    """Draw panels row by row, with letters.

    Args:
        panels: The panels.
        columns: Number of panels in a row.
        size: Width and height in inches.
        note: Text below the panels.
    """
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for letter, axes, panel in zip("abcdefghij", grid, panels, strict=False):
        for line in panel.lines:
            draw_seeds(axes, line)
        for value, words in panel.nulls:
            axes.axhline(value, color=GREY, lw=1.2, ls=":", label=words)
        axes.set(**panel.options)
        label_panel(axes, letter, panel.title, panel.x_label, panel.y_label)
        panel.finish(axes)
        if panel.legend is not None and axes.get_legend_handles_labels()[0]:
            axes.legend(**{"fontsize": 8.5, "framealpha": 0.6, "edgecolor": "none", **panel.legend})
    figure.supxlabel(note, fontsize=9, color=GREY)
    return figure


def draw_seeds(panel: Axes, line: Line) -> None:
    """Draw curves of several seeds, their mean, and the 95 % interval of the mean as a band.

    The curves decide the limits of the axis, and not the band.
    """
    table = np.asarray(line.curves, dtype=float)
    known = np.isfinite(table).all(axis=0)
    if not known.any():
        return
    colour = line.colour
    for curve in table if len(table) > 1 else ():
        panel.plot(line.places, curve, color=colour, lw=0.6, alpha=0.5)
    x, table = np.asarray(line.places)[known].tolist(), table[:, known]
    means = [estimate(column.tolist()) for column in table.T]
    style = {"lw": 2.2, "label": line.label, **line.style}
    panel.plot(x, [each.mean for each in means], color=colour, **style)
    if len(table) > 1:
        limits = panel.dataLim.get_points()
        low, high = [each.low for each in means], [each.high for each in means]
        panel.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)
        panel.dataLim.set_points(limits)


def label_panel(panel: Axes, letter: str, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its letter, title and labels, and take away what is not needed.

    Args:
        panel: Axes of matplotlib.
        letter: Letter by which texts name the panel.
        title: Text above the panel.
        x_label: Quantity on the horizontal axis, with its unit.
        y_label: Quantity on the vertical axis, with its unit.
    """
    panel.set_title(f"$\\bf{{{letter}}}$   {title}", loc="left", fontsize=11, pad=7)
    panel.set_xlabel(x_label, fontsize=9.5)
    panel.set_ylabel(y_label, fontsize=9.5)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9, length=3)
    panel.grid(axis="y", color="#E6E6E6", lw=0.7)
    panel.set_axisbelow(True)


def step_axis(panel: Axes, steps: Sequence[int]) -> None:
    """Make the axis of steps logarithmic, with step 0 to the left of the first step after it.

    Args:
        panel: Axes of matplotlib.
        steps: Steps of the readings, ascending.
    """
    first = next((step for step in steps if step), 1)
    panel.set_xscale("symlog", linthresh=first, linscale=0.4)
    panel.set_xlim(-0.1 * first, max(steps[-1], first) * 1.1)
    inner = [first * 4**n for n in range(9) if 2 * first * 4**n <= steps[-1]]
    panel.set_xticks(sorted({0, *inner, steps[-1]}))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def plain_log_ticks(panel: Axes, ticks: Sequence[float]) -> None:
    """Make the vertical axis logarithmic, with numbers at a few ticks.

    Args:
        panel: Axes of matplotlib.
        ticks: Values at which numbers stand.
    """
    panel.set_yscale("log")
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.yaxis.set_minor_locator(NullLocator())


def explain_seeds(count: int) -> str:
    """Say in words what `draw_seeds` draws.

    Args:
        count: Number of seeds.
    """
    if count == 1:
        return "one seed, so no interval"
    return f"bold: mean of {count} seeds; band: 95 % interval of the mean; thin: each seed"


def save_small(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as a PNG of few colours, small enough to be kept with the code.

    Args:
        figure: Figure of matplotlib.
        path: Path of the file, whose folder is made.

    Returns:
        Path of the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    # Median cut gives large areas of one colour their own; dots of other colours look like noise.
    image = Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(path, format="PNG", optimize=True)
    return path
