"""Draws panels with matplotlib."""

import io
import math
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from geomon.analysis import single_source
from geomon.record import Readings, printable
from geomon.show.collect import furthest_loss
from geomon.show.colours import GREY, GRID, NOTHING, PURPLE, SIGNED, UNSIGNED
from geomon.show.panels import AXES, Line, Lines, Matrix, StepAxis

# A colour bar names at most this many colours.
_MAX_NAMED = 12
# Values are written into the cells of a matrix with at most this many layers and heads.
_MAX_WRITTEN = 12
# A logarithmic axis that spans more than this factor names only powers of ten.
_MANY_POWERS = 1e3
_DASHES = {"solid": "-", "dash": (0, (4, 2)), "dot": ":", "dashdot": "-."}
_HALO = [patheffects.withStroke(linewidth=2, foreground="white")]


class ShownFigure(Figure):
    """Figure with a PNG representation, because notebooks display only pyplot's figures."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, with a constrained layout."""
    return ShownFigure(
        figsize=(width, height),
        dpi=160,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04),
    )


def draw_grid(
    panels: Sequence[tuple[str, Lines | Matrix]],
    *,
    columns: int,
    size: tuple[float, float],
    share: bool = False,
) -> Figure:
    """Draw titled panels in a grid; with `share`, they share their axes, labels and legend."""
    rows = math.ceil(len(panels) / columns)
    # With shared axes, the figure is wide enough for its title.
    figure = new_figure(size[0] * max(columns, 2 * share), size[1] * rows + share)
    places = list(figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flat)
    for letter, place, (words, panel) in zip(ascii_lowercase, places, panels, strict=False):
        draw(place, panel, legend="none" if share else "inside")
        caption(place, "" if share else letter, words)
    for place in places[len(panels) :]:
        place.set_visible(False)
    if share:
        _name_once(figure, places)
    return figure


def _name_once(figure: Figure, places: Sequence[Axes]) -> None:
    """Label the axes only at the edge of the figure, with the meaning of grey bands."""
    named = (f"grey: {label}" for label in places[0].get_legend_handles_labels()[1])
    figure.supylabel(places[0].get_ylabel(), fontsize=10)
    figure.supxlabel("\n".join([places[0].get_xlabel(), *named]), fontsize=10)
    for place in places:
        place.label_outer()
        place.set(xlabel="", ylabel="")


def caption(place: Axes, letter: str, words: str) -> None:
    """Write the letter and the title of a panel above it."""
    start = f"$\\bf{{{letter}}}$   " if letter else ""
    place.set_title(
        f"{start}{literal(words)}", loc="left", fontsize=11.5 if letter else 10.5, pad=8
    )


def title(figure: Figure, words: str) -> None:
    """Write a title above all panels of a figure."""
    figure.suptitle(literal(words), fontsize=12, x=0.012, ha="left", wrap=True)


def literal(text: str) -> str:
    """Escape a text of unknown origin so that matplotlib draws it literally, with dollar signs."""
    return printable(text).replace("$", r"\$")


def draw(
    place: Axes, panel: Lines | Matrix, *, legend: Literal["inside", "above", "none"] = "inside"
) -> None:
    """Draw a panel, with a legend for its lines or a colour bar for its matrix."""
    if isinstance(panel, Matrix):
        add_bar(draw_matrix(place, panel), panel, [place])
    elif panel.lines:
        _draw_lines(place, panel, legend)
    else:
        show_message(place, f"{panel.label}: not measured")
    if panel.remark:
        place.set_xlabel(f"{place.get_xlabel()}\n{panel.remark}")


def _draw_lines(place: Axes, panel: Lines, legend: str) -> None:
    axis = panel.axis
    for line in panel.lines:
        draw_line(place, line, axis)
    if axis is not None:
        step_axis(place, axis, "dashed")
        _mark_alerts(place, panel, axis)
    else:
        _number_axis(place, panel)
    known = {f"band: {panel.bands}": panel.has_bands, "logarithmic": panel.is_logarithmic}
    said = ", ".join(words for words, is_so in known.items() if is_so)
    place.set_ylabel(literal(panel.label) + (f"\n({said})" if said else ""), fontsize=10)
    _scale(place, panel)
    if panel.null_inside is not None:
        null, words = panel.null_inside
        place.axhline(null, color=GREY, lw=0.9, ls=":", zorder=0)
        place.annotate(
            literal(words), (1, null), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize=8, color=GREY,
            path_effects=_HALO,
        )  # fmt: skip
    if panel.usual is not None:
        low, high, words = panel.usual
        place.axhspan(low, high, color=GREY, alpha=0.18, lw=0, zorder=0, label=words)
    if panel.named_by:
        colour_bar(place, panel.lines, panel.named_by)
    elif legend == "above":
        show_legend(
            place, loc="lower left", bbox_to_anchor=(-0.06, 1.01), ncols=2, columnspacing=1.0,
            labelcolor="linecolor",
        )  # fmt: skip
    elif legend == "inside" and show_legend(place):
        leave_room(place, place)


def draw_line(place: Axes, line: Line, axis: StepAxis | None) -> None:
    """Draw a line with its band; over steps, dashed across gaps."""
    label = literal(line.name) or None
    for piece in axis.pieces(line) if axis is not None else [line]:
        at = piece.x if axis is None else axis.places(piece.x)
        place.plot(
            at, piece.y, color=line.colour, lw=line.width, ls=_DASHES[piece.dash], label=label,
            marker="o" if piece.dot else "", ms=piece.dot,
        )  # fmt: skip
        label = None
        if piece.low:
            alpha = 0.08 if piece.dash == "dash" else 0.22
            place.fill_between(at, piece.low, piece.high, lw=0, color=line.colour, alpha=alpha)


def _number_axis(place: Axes, panel: Lines) -> None:
    """Label and scale the x axis of a panel over layers, scales or ranks."""
    style_axes(place)
    words, is_logarithmic = AXES[panel.over]
    place.set_xlabel(words, fontsize=10)
    if is_logarithmic:
        place.set_xscale("log", base=2 if panel.over == "scale" else 10)
        place.xaxis.set_major_formatter("{x:g}")
        place.xaxis.set_minor_locator(NullLocator())
    else:
        place.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _scale(place: Axes, panel: Lines) -> None:
    """Scale the y axis: logarithmically, between given ends, or from 0 if no value is negative."""
    if panel.ends is not None:
        place.set_ylim(*panel.ends)
    elif panel.is_logarithmic:
        place.set_yscale("log")
        _name_numbers(place.yaxis, *place.get_ylim())
    elif not any(value < 0 for line in panel.lines for value in line.y):
        place.set_ylim(bottom=0)


def _name_numbers(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers; a long axis gets only powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1,) if high > _MANY_POWERS * low else (1, 2, 3, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _mark_alerts(place: Axes, panel: Lines, axis: StepAxis) -> None:
    """Mark each alert's step with a vertical line and its kind, at alternating heights."""
    for number, (step, words) in enumerate(panel.alerts):
        (at,) = axis.places([step])
        place.axvline(at, color=PURPLE, lw=1.2, ls=(0, (2, 1.5)), zorder=1)
        is_first = step == axis.steps[0]  # the y axis is to its left
        place.annotate(
            words, (at, 0.5 if number % 2 else 0.02), xycoords=("data", "axes fraction"),
            rotation=90, va="bottom", xytext=(1 if is_first else -1, 0), textcoords="offset points",
            ha="left" if is_first else "right", fontsize=8, color=PURPLE, path_effects=_HALO,
        )  # fmt: skip


def leave_room(place: Axes, named: Axes) -> None:
    """Extend the y axis upwards, without ticks, to make room for a legend."""
    legend = named.get_legend()
    share = 1.1 + 0.1 * len(legend.texts if legend else ())
    low, high = place.get_ylim()
    is_logarithmic = place.get_yscale() == "log"
    top = low * (high / low) ** share if is_logarithmic else low + share * (high - low)
    place.set_ylim(top=top)
    place.set_yticks([tick for tick in place.get_yticks() if low <= tick <= high])


def draw_loss(place: Axes, readings: Readings) -> None:
    """Draw the loss with its own y axis behind a panel over training."""
    name, loss = furthest_loss(readings)
    if len(loss) < 2:
        return
    axis = place.twinx()
    axis.set_zorder(place.get_zorder() - 1)
    place.patch.set_visible(False)
    steps = [reading.step for reading in single_source(readings)]
    draw_line(
        axis,
        Line("", loss.steps, loss.values, GREY, width=1.0),
        StepAxis([*steps, *(alert.step for alert in readings.alerts)]),
    )
    leave_room(axis, place)
    axis.spines[["top", "left"]].set_visible(False)
    axis.spines["right"].set_color(GREY)
    axis.tick_params(labelsize=9, length=3, colors=GREY)
    known = f" (known to step {loss.steps[-1]:,})" if loss.steps[-1] < steps[-1] else ""
    axis.set_ylabel(f"{name}{known}", fontsize=9.5, color=GREY)


def draw_matrix(place: Axes, panel: Matrix) -> Any:
    """Draw a matrix with its first layer at the bottom, and return the mesh for `add_bar`."""
    rows, columns = panel.values.shape
    x: Sequence[float] = [column - 0.5 for column in range(columns + 1)]
    if panel.over == "step":
        axis = StepAxis(panel.columns)
        x = axis.edges()
        step_axis(place, axis, "white")
        place.set_xlim(x[0], x[-1])
        for blank in axis.blanks():
            place.axvspan(*blank, color="white", lw=0, zorder=1.5)
    mesh = place.pcolormesh(
        x, np.arange(rows + 1) - 0.5, panel.values,
        norm=(LogNorm if panel.is_logarithmic else Normalize)(panel.low, panel.high),
        cmap=colormaps[SIGNED if panel.is_signed else UNSIGNED],
    )  # fmt: skip
    place.grid(visible=False)
    place.set_facecolor(NOTHING)
    _name_ticks(place.yaxis, panel.layers)
    place.set_ylabel("layer", fontsize=9.5)
    if panel.over == "head":
        _name_ticks(place.xaxis, panel.columns)
        place.set_xlabel("head", fontsize=9.5)
        place.tick_params(labelsize=9, length=0)
        place.spines[:].set_visible(False)
        if max(rows, columns) <= _MAX_WRITTEN:
            _write_values(place, panel, mesh)
    return mesh


def add_bar(mesh: Any, panel: Matrix, places: Sequence[Axes]) -> None:
    """Add a colour bar for the matrices of one row of panels."""
    bar = places[0].figure.colorbar(mesh, ax=places, pad=0.02)
    scale = "\nlogarithmic" if panel.is_logarithmic else ""
    bar.set_label(literal(panel.label) + scale, fontsize=9)
    bar.ax.tick_params(labelsize=8.5, length=2)
    bar.outline.set_visible(False)
    if panel.is_logarithmic:
        _name_numbers(bar.ax.yaxis, panel.low, panel.high)


def _name_ticks(axis: Any, names: Sequence[int]) -> None:
    """Label rows or columns with their numbers, at most sixteen of them."""
    ticks = range(0, len(names), math.ceil(len(names) / 16))
    axis.set_ticks(ticks, labels=[names[tick] for tick in ticks])


def _write_values(place: Axes, panel: Matrix, mesh: Any) -> None:
    """Write each value into its cell, in white or black depending on the cell's colour."""
    for (row, column), value in np.ndenumerate(panel.values):
        if math.isfinite(value):
            light = np.dot(mesh.cmap(mesh.norm(value))[:3], (0.299, 0.587, 0.114))
            place.text(
                column, row, f"{value:.2f}".replace("-", "−"), ha="center", va="center",
                fontsize=8.5, color="white" if light < 0.5 else "black",
            )  # fmt: skip


def style_axes(place: Axes, lines: Literal["x", "y"] = "y") -> None:
    """Hide the top and right spines, and draw faint grid lines along one axis."""
    place.spines[["top", "right"]].set_visible(False)
    place.tick_params(labelsize=9.5, length=3)
    place.grid(axis=lines, lw=0.7, color=GRID)
    place.set_axisbelow(True)


def step_axis(place: Axes, axis: StepAxis, gaps: str) -> None:
    """Make the step axis logarithmic, and say how gaps look; step 0 is left of all others."""
    style_axes(place)
    first, last = axis.places([axis.steps[0], axis.steps[-1]])
    place.set(xscale="log", xlim=(first / 1.1, last * 1.1))
    ticks = axis.ticks()
    place.set_xticks(axis.places(ticks), labels=[f"{step:,}" for step in ticks])
    place.xaxis.set_minor_locator(NullLocator())
    place.set_xlabel(axis.label(gaps), fontsize=10)


def show_message(place: Axes, message: str) -> None:
    """Write a message into a panel without data."""
    place.set(xticks=[], yticks=[])
    place.spines[:].set_color("#CCCCCC")
    place.text(
        0.5, 0.5, literal(message), transform=place.transAxes, ha="center", va="center", color=GREY
    )


def show_legend(place: Axes, **style: Any) -> bool:
    """Add a legend, by default at the upper left, and return whether any artist has a label."""
    if not place.get_legend_handles_labels()[0]:
        return False
    usual = {"loc": "upper left", "fontsize": 9, "handlelength": 1.6, "framealpha": 0.85}
    place.legend(**{**usual, "edgecolor": "none", **style})
    return True


def colour_bar(place: Axes, lines: Sequence[Line], label: str) -> None:
    """Add a labelled colour bar with one field per line, from bottom to top."""
    count = len(lines)
    mappable = ScalarMappable(
        BoundaryNorm(np.arange(count + 1) - 0.5, count),
        ListedColormap([line.colour for line in lines]),
    )
    bar = place.figure.colorbar(mappable, ax=place, pad=0.02, aspect=28)
    ticks = range(0, count, math.ceil(count / _MAX_NAMED))
    bar.set_ticks(ticks, labels=[lines[tick].name for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=9, length=0)
    bar.set_label(literal(label), fontsize=9.5)
    bar.outline.set_visible(False)
