"""Draws a run, two runs, and small figures for loggers, and writes figures to files.

Figures are built without pyplot, so no backend and no setting of matplotlib changes.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis import Difference, curve_of, quantities_of
from geomon.record import Readings, with_noun
from geomon.show import collect
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Lines, Matrix

_FAR = 10  # the axis is logarithmic if a relative change exceeds this
_MOST = 24  # number of differences drawn, largest relative to their errors first


def geometry_figure(readings: Readings, *, title: str | None = None) -> Figure:
    """Draw a run in four panels.

    The panels show the intrinsic dimension over training and anisotropy over depth, after figures 2
    to 4 of Razzhigaev et al. (2311.05928), and the cosine of mean query and mean key and the
    attention entropy, after figures 13 and 15 of Godey et al. (2401.12143). The panel of a metric
    that was not measured says so.

    Args:
        readings: Readings of a run.
        title: Text above the panels. Defaults to None, for no title.

    Returns:
        The figure.
    """
    dimension = collect.dimension_panel(readings)
    names = {name: readings.text_of(name).title for name in ("anisotropy", "qk_cosine")}
    figure = axes.draw_grid(
        [
            (f"{dimension.label}, mean over layers", dimension),
            (f"{names['anisotropy']} over depth", collect.depth_panel(readings, "anisotropy")),
            (f"{names['qk_cosine']} by layer", collect.cosines_panel(readings)),
            (
                f"{readings.text_of('attention_entropy').title} by layer",
                replace(
                    collect.layers_panel(readings, "attention_entropy"), named_by="layer (c and d)"
                ),
            ),
        ],
        columns=2,
        size=(5.2, 3.7),
    )
    if dimension.lines:
        axes.draw_loss(figure.axes[0], readings)
    if title is None and readings.mixed_at is not None:
        title = "Two runs wrote into this record at once: its curves mix both"
    if title:
        axes.title(figure, title)
    return figure


def compare_figure(
    runs: tuple[Readings, Readings], names: Sequence[str], differences: Sequence[Difference]
) -> Figure:
    """Draw the dimension of two runs over training, and the differences that have an interval."""
    drawn = [each for each in differences if math.isfinite(each.margin * each.share)]
    drawn = sorted(drawn, key=lambda each: -abs(each.change) / each.margin)[:_MOST][::-1]
    figure = axes.new_figure(12.5, max(4.2, 1.2 + 0.26 * len(drawn)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    lines = [
        collect.line_of(curve, f"{place}: {name}", colour)
        for place, run, name, colour in zip(
            ("first", "second"), runs, names, (BLUE, VERMILLION), strict=True
        )
        if (curve := curve_of(run, "twonn"))
    ]
    axes.draw(left, Lines(runs[0].text_of("twonn").label, lines))
    if drawn:
        titles = {tag: each.title for tag, each in quantities_of(runs[0]).items()}
        _draw_differences(
            right, drawn, [axes.literal(titles[each.tag] + each.where) for each in drawn]
        )
    else:
        axes.show_message(right, "no difference has a known error")
    return figure


def _draw_differences(panel: Any, drawn: Sequence[Difference], titles: Sequence[str]) -> None:
    for row, each in enumerate(drawn):
        share, width = 100 * each.share, 100 * each.margin / each.first
        colour = "black" if each.differs else GREY  # colours stand for the runs on the left
        panel.errorbar(
            share, row, xerr=width, fmt="o", color=colour, ms=5, capsize=2.5, lw=1.4,
            mfc=colour if each.differs else "white",
        )  # fmt: skip
    panel.axvline(0, color=GREY, lw=0.9)
    axes.style_axes(panel, "x")
    if max(abs(each.share) for each in drawn) > _FAR:  # a diverged run would flatten all others
        panel.set_xscale("symlog", linthresh=100)
        panel.set_xlim(left=-200)  # nothing falls by more than 100 %
        panel.xaxis.get_major_locator().set_params(numticks=7)
        panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yticks(range(len(drawn)), labels=titles, fontsize=8.5)
    panel.set_ylim(-0.7, len(drawn) - 0.3)
    both = ({each.step for each in drawn}, {each.second_step or each.step for each in drawn})
    first, second = (" to ".join(f"{at:,}" for at in sorted({min(x), max(x)})) for x in both)
    panel.set_xlabel(
        f"change from the first run (step {first}) to the second (step {second}), %\n"
        "bars: 95 % interval over other sequences; filled: 0 is outside"
    )


def title_of(readings: Readings) -> str | None:
    """Describe in one line the model, the steps and the loss of a run.

    Args:
        readings: Readings of a run.

    Returns:
        The line, or None if the readings are empty or come from two runs.
    """
    if readings.mixed_at is not None or not readings:
        return None
    run = readings.runs[-1] if readings.runs else {}
    count, layers = run.get("parameters"), run.get("layers")
    steps = sorted(reading.step for reading in readings)
    parts = [
        str(run.get("model", "")),
        f"{_rounded(count)} parameters" if isinstance(count, int) else "",
        with_noun(len(layers), "block") if isinstance(layers, list) else "",
        f"steps {steps[0]:,} to {steps[-1]:,}",
    ]
    name, loss = collect.furthest_loss(readings)
    if loss:
        known = f" (step {loss.steps[-1]:,})" if loss.steps[-1] < steps[-1] else ""
        parts.append(f"{name} {loss.values[0]:.2f} → {loss.values[-1]:.2f}{known}")
    return ", ".join(filter(None, parts))


def _rounded(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def card(panel: Lines | Matrix) -> Figure:
    """Draw one panel as a small figure that stays readable on a logger's page.

    TensorBoard shows pictures at about 370 by 215 pixels, where 9-point text is 10 pixels high.

    Args:
        panel: The panel to draw.
    """
    figure = Figure(figsize=(4.5, 2.75), dpi=160, layout="constrained")
    axes.draw(figure.subplots(), panel, legend="above")
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file in the format of its suffix, and create its folder if necessary.

    Args:
        figure: Matplotlib figure.
        path: Path of the file, for instance "geometry.png".

    Returns:
        Path of the file.

    Raises:
        ValueError: If matplotlib cannot write files with this suffix.
        OSError: If the file cannot be written.
    """
    path = Path(path)
    if not path.suffix:  # matplotlib would add a suffix and write another file
        raise ValueError("figures are written to a file that ends in .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def as_image(figure: Figure) -> NDArray[np.uint8]:
    """Render a figure as pixels, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
