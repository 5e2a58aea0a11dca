"""Panels of figures: labels, and curves of several seeds, thin, with their mean in front."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from recipes.study.seeds import estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY = "#767676"
# Of layers or steps, first to last; more of them begin anew.
IN_ORDER = ("#56B4E9", BLUE, GREEN, "#E69F00", ORANGE, "#CC79A7")


def draw_seeds(
    panel: Axes,
    places: Sequence[float],
    curves: Sequence[Sequence[float]],
    *,
    colour: str,
    label: str,
    **style: Any,
) -> None:
    """Draw curves of several seeds, their mean, and the 95 % interval of the mean as a band.

    Args:
        panel: Axes of matplotlib.
        places: Places on the horizontal axis, common to all curves.
        curves: Values at these places, one sequence for each seed.
        colour: Colour of all of it.
        label: Name of the mean in the legend.
        style: Keyword arguments of matplotlib for the mean.
    """
    for curve in curves:
        panel.plot(places, curve, color=colour, lw=0.7, alpha=0.5)
    means = [estimate(values) for values in zip(*curves, strict=True)]
    if len(curves) > 1:
        low, high = [each.low for each in means], [each.high for each in means]
        panel.fill_between(places, low, high, color=colour, alpha=0.16, lw=0)
    line = {"lw": 2.2, **style}
    panel.plot(places, [each.mean for each in means], color=colour, label=label, **line)


def label_panel(panel: Axes, letter: str, title: str, unit: str) -> None:
    """Give a panel its letter, title and unit, and take away what is not needed.

    Args:
        panel: Axes of matplotlib.
        letter: Letter by which texts name the panel.
        title: Text above the panel.
        unit: What the vertical axis shows, with its unit.
    """
    panel.set_title(f"$\\bf{{{letter}}}$   {title}", loc="left", fontsize=11)
    panel.set_ylabel(unit)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#E6E6E6", lw=0.7)
    panel.set_axisbelow(True)


def plain_axes(panel: Axes, letter: str, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its letter, title and labels, and take away what is not needed.

    Args:
        panel: Axes of matplotlib.
        letter: Letter by which texts name the panel.
        title: Text above the panel.
        x_label: What the horizontal axis shows, with its unit.
        y_label: What the vertical axis shows, with its unit.
    """
    panel.set_title(f"$\\bf{{{letter}}}$   {title}", loc="left", fontsize=11, pad=7)
    panel.set_xlabel(x_label, fontsize=9.5)
    panel.set_ylabel(y_label, fontsize=9.5)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9, length=3)
    panel.grid(axis="y", color="#E6E6E6", lw=0.7)
    panel.set_axisbelow(True)


def explain_seeds(count: int) -> str:
    """Say in words what `draw_seeds` draws.

    Args:
        count: Number of seeds.
    """
    if count == 1:
        return "one seed, so no interval"
    return f"bold: mean of {count} seeds; band: 95 % interval of the mean; thin: each seed"
