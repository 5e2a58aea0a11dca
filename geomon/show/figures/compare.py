"""The figure of two runs: their dimension over steps, and their differences with intervals."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from geomon.analysis import curve_of
from geomon.analysis.compare import Difference
from geomon.record import Readings
from geomon.show.figures import panels

# Blue and vermillion of Okabe and Ito, and a grey.
_COLOURS, _GREY = ("#0072B2", "#D55E00"), "#767676"
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
    names = panels.literal(names[0]), panels.literal(names[1])
    drawn = [each for each in differences if math.isfinite(each.margin * each.share)]
    drawn = sorted(drawn, key=lambda each: -abs(each.change) / each.margin)[:_MOST][::-1]
    figure = Figure(figsize=(12.5, max(4.2, 1.2 + 0.26 * len(drawn))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_dimension(left, runs, names)
    if drawn:
        _draw_differences(right, drawn)
    else:
        panels.show_message(right, "no difference whose error is known")
    return figure


def _draw_dimension(panel: Any, runs: tuple[Readings, Readings], names: tuple[str, str]) -> None:
    curves = [curve_of(run, "twonn") for run in runs]
    if not any(map(len, curves)):
        panels.show_message(panel, "twonn: not measured")
        return
    labels = f"first: {names[0]}", f"second: {names[1]}"
    for curve, label, colour in zip(curves, labels, _COLOURS, strict=True):
        if not len(curve):
            continue
        panel.plot(curve.steps, curve.values, color=colour, lw=2, label=label)
        pairs = list(zip(curve.values, curve.margins, strict=True))
        low, high = [v - m for v, m in pairs], [v + m for v, m in pairs]
        panel.fill_between(curve.steps, low, high, color=colour, alpha=0.2, lw=0)
    panels.step_axis(panel, [step for curve in curves for step in curve.steps])
    panel.set_ylim(bottom=0)
    panel.set_ylabel(f"{runs[0].text_of('twonn').label} (band: 95 % interval)")
    panel.legend(frameon=False, loc="lower right")


def _draw_differences(panel: Any, drawn: Sequence[Difference]) -> None:
    for row, each in enumerate(drawn):
        share, width = 100 * each.share, 100 * each.margin / each.first
        beyond = each.verdict in ("higher", "lower")
        colour = "black" if beyond else _GREY  # the colours beside are those of the runs
        panel.errorbar(
            share, row, xerr=width, fmt="o", color=colour, ms=5, capsize=2.5, lw=1.4,
            mfc=colour if beyond else "white",
        )  # fmt: skip
    panel.axvline(0, color=_GREY, lw=0.9)
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
    panel.grid(axis="x", color="#E6E6E6", lw=0.7)
    panel.spines[["top", "right"]].set_visible(False)


__all__ = ["compare_figure"]
