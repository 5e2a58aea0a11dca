"""The figure of two runs: their dimension over steps, and their differences with intervals."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from geomon.analysis import curve_of
from geomon.analysis.compare import Difference
from geomon.record import Readings
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Lines, line_of

_COLOURS = (BLUE, VERMILLION)
_FAR = 10  # share above which the axis of differences is logarithmic
_MOST = 24  # differences that are drawn: the largest against their errors


def compare_figure(
    runs: tuple[Readings, Readings], names: tuple[str, str], differences: Sequence[Difference]
) -> Figure:
    """Draw two runs: the dimension over training, and the differences that have an interval.

    Args:
        runs: Readings of the two runs.
        names: Names of the runs.
        differences: What `geomon.analysis.compare.compare` found.
    """
    names = axes.literal(names[0]), axes.literal(names[1])
    drawn = [each for each in differences if math.isfinite(each.margin * each.share)]
    drawn = sorted(drawn, key=lambda each: -abs(each.change) / each.margin)[:_MOST][::-1]
    figure = axes.new_figure(12.5, max(4.2, 1.2 + 0.26 * len(drawn)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_dimension(left, runs, names)
    if drawn:
        _draw_differences(right, drawn)
    else:
        axes.show_message(right, "no difference whose error is known")
    return figure


def _draw_dimension(panel: Any, runs: tuple[Readings, Readings], names: tuple[str, str]) -> None:
    curves = [curve_of(run, "twonn") for run in runs]
    lines = [
        line_of(curve, f"{place}: {name}", colour)
        for place, curve, name, colour in zip(
            ("first", "second"), curves, names, _COLOURS, strict=True
        )
        if len(curve)
    ]
    label = runs[0].text_of("twonn").label
    axes.draw_lines(panel, Lines(label, lines), missing="twonn: not measured")


def _draw_differences(panel: Any, drawn: Sequence[Difference]) -> None:
    for row, each in enumerate(drawn):
        share, width = 100 * each.share, 100 * each.margin / each.first
        beyond = each.verdict in ("higher", "lower")
        colour = "black" if beyond else GREY  # the colours beside are those of the runs
        panel.errorbar(
            share, row, xerr=width, fmt="o", color=colour, ms=5, capsize=2.5, lw=1.4,
            mfc=colour if beyond else "white",
        )  # fmt: skip
    panel.axvline(0, color=GREY, lw=0.9)
    if max(abs(each.share) for each in drawn) > _FAR:  # a run that diverged hides all the others
        panel.set_xscale("symlog", linthresh=100)
        panel.set_xlim(left=-200)  # nothing falls by more than 100 %
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.tick_params(axis="x", labelrotation=30)
    panel.set_yticks(range(len(drawn)), labels=[each.tag for each in drawn], fontsize=8.5)
    panel.set_ylim(-0.7, len(drawn) - 0.3)
    steps = sorted({each.step for each in drawn})
    at = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    panel.set_xlabel(
        f"change from the first run to the second, %, at {at}\n"
        "bars: 95 % interval over other sequences; filled: 0 is outside"
    )
    axes.faint_lines(panel, "x")
    panel.spines[["top", "right"]].set_visible(False)


__all__ = ["compare_figure"]
