"""Draws two runs: their dimension over training, and their differences with intervals."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from geomon.analysis import curve_of
from geomon.analysis.compare import Difference
from geomon.analysis.quantities import quantities_of
from geomon.record import Readings
from geomon.show.collect import line_of
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Lines

_FAR = 10  # the axis is logarithmic if a relative change exceeds this
_MOST = 24  # number of differences drawn, largest relative to their errors first


def compare_figure(
    runs: tuple[Readings, Readings], names: Sequence[str], differences: Sequence[Difference]
) -> Figure:
    """Draw the dimension of two runs over training, and the differences that have an interval."""
    drawn = [each for each in differences if math.isfinite(each.margin * each.share)]
    drawn = sorted(drawn, key=lambda each: -abs(each.change) / each.margin)[:_MOST][::-1]
    figure = axes.new_figure(12.5, max(4.2, 1.2 + 0.26 * len(drawn)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    lines = [
        line_of(curve, f"{place}: {name}", colour)
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
