"""The picture: densities of the isotropic cosine, and its 95th percentile with models beside it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from geomon.kernels.baselines import isotropic_cosine_quantile
from recipes.isotropic_cosine.levels import Level
from recipes.isotropic_cosine.simulate import density

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_BLACK, _BLUE, _ORANGE, _GREEN, _GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#767676"
_SHOWN = {16: _BLUE, 64: _GREEN, 256: _ORANGE, 768: "#CC79A7"}
# Mean cosines below this are drawn at it: the axis is logarithmic.
_FLOOR = 0.01


def draw(found: Sequence[Mapping[int, float]], runs: Sequence[Sequence[Level]]) -> Figure:
    """Draw both panels.

    Args:
        found: Simulated 95th percentiles by width, of each seed.
        runs: Levels of each watched run, steps ascending.
    """
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(0.8, 1))
    _draw_densities(left)
    _draw_quantiles(right, found)
    _draw_levels(right, runs)
    right.legend(loc="upper right", fontsize=8.5, framealpha=1, edgecolor="none")
    for letter, panel, caption in (
        ("a", left, "Cosine between two isotropic rows"),
        ("b", right, "95 % of isotropic pairs lie below the curve"),
    ):
        panel.set_title(f"$\\bf{{{letter}}}$   {caption}", loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure


def _draw_densities(panel: Any) -> None:
    cosines = np.linspace(-0.999, 0.999, 1601)
    for width, colour in _SHOWN.items():
        panel.plot(cosines, density(cosines, width), color=colour, lw=1.8, label=f"width {width}")
        panel.axvline(isotropic_cosine_quantile(width), color=colour, lw=1, ls=":")
    panel.plot([], [], color=_GREY, lw=1, ls=":", label="95th percentile")
    panel.set(xlim=(-0.8, 0.8), ylim=(0, None), xlabel="cosine", ylabel="density (closed form)")
    panel.legend(loc="upper left", fontsize=8.5, edgecolor="none")


def _draw_quantiles(panel: Any, found: Sequence[Mapping[int, float]]) -> None:
    widths = sorted(found[0])
    line = np.unique(np.geomspace(min(widths), max(widths), 120).round().astype(int))
    panel.plot(
        line, [isotropic_cosine_quantile(int(width)) for width in line], color=_BLACK, lw=1.5,
        label="95th percentile, closed form",
    )  # fmt: skip
    simulated = [statistics.fmean(each[width] for each in found) for width in widths]
    label = f"95th percentile, simulated (mean of {len(found)})"
    panel.plot(widths, simulated, "o", ms=5, mfc="white", color=_BLACK, label=label)
    panel.set(xscale="log", yscale="log", xlim=(12, 12_000), ylim=(0.9 * _FLOOR, 1.15))
    panel.set_xticks([16, 64, 256, 768, 2048, 8192])
    panel.set_yticks([0.01, 0.03, 0.1, 0.3, 1])
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.set(xlabel="width of the hidden states (logarithmic)", ylabel="cosine (logarithmic)")
    panel.grid(color="#E6E6E6", lw=0.7)


def _draw_levels(panel: Any, runs: Sequence[Sequence[Level]]) -> None:
    """Draw the way of each run: before the first step, on the way, and at the end."""
    labels = {
        "first": f"decoders, untrained (below {_FLOOR:g}: at the edge)",
        "between": "decoders, on the way",
        "last": "decoders, at the end",
    }
    steps = {run[-1].step for run in runs}
    if len(steps) == 1:
        labels["last"] = f"decoders, after {max(steps):,} steps"
    for number, run in enumerate(runs):
        # Seeds of one width side by side, by two per cent.
        same = [index for index, other in enumerate(runs) if other[0].width == run[0].width]
        place = run[0].width * 1.05 ** (same.index(number) - (len(same) - 1) / 2)
        values = [max(level.mean, _FLOOR) for level in run]
        panel.plot([place] * len(values), values, color=_ORANGE, lw=0.6, alpha=0.5)
        for key, part, style in (
            ("between", values[1:-1], {"marker": ".", "ms": 4, "color": _ORANGE, "alpha": 0.6}),
            ("first", values[:1], {"marker": "v", "ms": 6, "mfc": "white", "color": _ORANGE}),
            ("last", values[-1:], {"marker": "^", "ms": 7, "color": _ORANGE}),
        ):
            label = labels.pop(key, "")
            panel.plot([place] * len(part), part, ls="none", label=label or None, **style)
