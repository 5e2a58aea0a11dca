"""The picture: a block under growing bias, one column for each kind of block."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from recipes.bias_drift.block import Kind
from recipes.bias_drift.series import INPUT, OUTPUT, Series
from recipes.study import estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_BLACK, _BLUE, _ORANGE, _GREEN, _PINK = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_TITLES = {"post_norm": "post-norm block (BERT, the paper's)", "pre_norm": "pre-norm block (GPT-2)"}
# Below this distance from uniform attention there is float32's rounding alone.
_LEAST = 1e-8

Seeds = Sequence[Sequence[Series]]


def draw(
    untrained: Mapping[Kind, Seeds], trained: Mapping[Kind, tuple[Seeds, Seeds]], length: int
) -> Figure:
    """Draw five rows of panels over the norm of the bias.

    Args:
        untrained: Series of all directions of each seed, by kind of block.
        trained: The same of the trained blocks, before the first step and after the last.
        length: Number of tokens of a sequence.
    """
    figure = Figure(figsize=(11, 15), dpi=80, layout="constrained")
    axes = figure.subplots(5, len(untrained), squeeze=False)
    for column, (kind, seeds) in enumerate(untrained.items()):
        panels = axes[:, column]
        _draw_cosines(panels[0], seeds)
        _draw_norms(panels[1], seeds)
        _draw_scores(panels[2], seeds)
        _draw_weights(panels[3], seeds, length)
        _draw_entropy(panels[4], seeds, trained.get(kind))
        panels[0].annotate(
            _TITLES[kind], (0.5, 1.16), xycoords="axes fraction", ha="center", fontsize=13,
            fontweight="bold",
        )  # fmt: skip
    captions = (
        "Mean cosine of pairs of rows (figures 6, 8)",
        "Norms (figures 6, 8)",
        "Scores of one head before the softmax (figure 7)",
        "Attention weights over uniform weights (figures 9, 10)",
        "Distance from uniform attention",
    )
    for row, caption in enumerate(captions):
        for column, panel in enumerate(axes[row]):
            letter = "abcdefghij"[row * axes.shape[1] + column]
            panel.set_title(f"$\\bf{{{letter}}}$   {caption}", loc="left", fontsize=11)
            _style(panel, max(level for s in untrained.values() for level in s[0][0].levels))
    for row in (1, 3, 4):
        _share_limits(axes[row])
    for panel in axes[-1]:
        panel.set_xlabel("norm of the common bias (logarithmic, with 0)", fontsize=10)
    return figure


def _draw_cosines(panel: Axes, seeds: Seeds) -> None:
    for label, metric, layer, colour, style in (
        ("input of the block", "cosine", INPUT, _BLACK, "-"),
        ("output of the block", "cosine", OUTPUT, _ORANGE, "-"),
        ("queries", "query_cosine", OUTPUT, _BLUE, "--"),
        ("keys", "key_cosine", OUTPUT, _GREEN, ":"),
    ):
        _draw(panel, seeds, label, colour, style, metric, layer)
    panel.set(ylim=(-0.05, 1.05), ylabel="mean cosine")
    panel.legend(fontsize=9, edgecolor="none", loc="lower right", ncols=2)
    inset = panel.inset_axes((0.5, 0.38, 0.47, 0.42))
    for directions in seeds:
        for series in directions:
            entering, leaving = (series.values("cosine", layer) for layer in (INPUT, OUTPUT))
            inset.plot(series.levels, np.subtract(leaving, entering), color=_ORANGE, lw=0.8)
    inset.axhline(0, color=_BLACK, lw=0.8)
    _style(inset, max(seeds[0][0].levels))
    inset.set_xticks([tick for tick in (0, 0.5, 2, 8, 128) if tick <= max(seeds[0][0].levels)])
    inset.set_title("output − input, each draw", fontsize=9)
    inset.tick_params(labelsize=7)


def _draw_norms(panel: Axes, seeds: Seeds) -> None:
    for label, metric, layer, colour, style in (
        ("inputs: mean norm", "mean_norm", INPUT, _BLACK, "-"),
        ("outputs: mean norm", "mean_norm", OUTPUT, _PINK, "-"),
        ("outputs: norm of the mean", "drift_norm", OUTPUT, _ORANGE, "-"),
        ("queries: mean norm", "query_norm", OUTPUT, _BLUE, "--"),
        ("keys: mean norm", "key_norm", OUTPUT, _GREEN, ":"),
    ):
        _draw(panel, seeds, label, colour, style, metric, layer)
    panel.set(yscale="log", ylabel="norm (logarithmic)")
    panel.legend(fontsize=9, edgecolor="none", loc="lower right")


def _draw_scores(panel: Axes, seeds: Seeds) -> None:
    """Draw the median and the middle 90 % of the scores, one line for each draw."""
    colours = (_BLACK, _BLUE, _ORANGE, _GREEN, _PINK)
    number = 0
    for seed, directions in enumerate(seeds):
        for series in directions:
            low, middle, high = np.array(series.scores).T
            colour, style = colours[number % len(colours)], "-" if seed % 2 == 0 else "--"
            panel.plot(series.levels, middle, color=colour, lw=1.5, ls=style)
            panel.fill_between(series.levels, low, high, color=colour, alpha=0.25, lw=0)
            number += 1
    panel.axhline(0, color="#767676", lw=0.8, zorder=0)
    panel.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("score: median and middle 90 %\n(logarithmic beyond ±0.01)")


def _draw_weights(panel: Axes, seeds: Seeds, length: int) -> None:
    for label, part, colour, style in (
        ("largest of a sequence", "sequence_max", _ORANGE, "-"),
        ("largest of a row", "max", _ORANGE, "--"),
        ("median of a row", "median", _BLACK, ":"),
        ("smallest of a row", "min", _BLUE, "--"),
        ("smallest of a sequence", "sequence_min", _BLUE, "-"),
    ):
        _draw(
            panel, seeds, label, colour, style, "attention_extremes", OUTPUT, part=part,
            scale=length,
        )  # fmt: skip
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.25, 1.6, 2.5, 4, 6, 8)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_ylabel("weight × number of keys (logarithmic)")
    panel.legend(fontsize=9, edgecolor="none", loc="upper right")


def _draw_entropy(panel: Axes, seeds: Seeds, trained: tuple[Seeds, Seeds] | None) -> None:
    drawn = [("untrained", seeds, _BLACK, "-")]
    if trained is not None:
        drawn += [
            ("characters, before training", trained[0], _BLUE, "--"),
            ("characters, after training", trained[1], _ORANGE, "-"),
        ]
    for label, some, colour, style in drawn:
        _draw(
            panel, some, label, colour, style, "attention_entropy_normalised", OUTPUT,
            transform=lambda values: np.maximum(1 - values, _LEAST),
        )  # fmt: skip
    panel.set_yscale("log")
    panel.set_ylabel(f"1 − entropy / log(keys)\n(logarithmic, from {_LEAST:g})")
    panel.legend(fontsize=9, edgecolor="none", loc="best")


def _draw(
    panel: Axes,
    seeds: Seeds,
    label: str,
    colour: str,
    style: str,
    metric: str,
    layer: int,
    *,
    part: str = "",
    scale: float = 1,
    transform: Any = None,
) -> None:
    """Draw each direction of each seed thin, and the mean over seeds with its 95 % interval."""
    means: list[NDArray[np.float64]] = []
    levels = seeds[0][0].levels
    for directions in seeds:
        rows = np.array([series.values(metric, layer, part) for series in directions]) * scale
        rows = rows if transform is None else transform(rows)
        for row in rows:
            panel.plot(levels, row, color=colour, lw=0.5, alpha=0.35)
        means.append(rows.mean(axis=0))
    found = [estimate(list(values)) for values in np.array(means).T]
    middle = np.array([each.mean for each in found])
    panel.plot(levels, middle, color=colour, lw=2, ls=style, label=label)
    if len(seeds) > 1:
        low, high = [each.low for each in found], [each.high for each in found]
        # A logarithmic axis has no place for an interval that goes below 0.
        floor = middle / 10 if panel.get_yscale() == "log" or scale != 1 or transform else None
        low = low if floor is None else list(np.maximum(low, floor))
        panel.fill_between(levels, low, high, color=colour, alpha=0.15, lw=0)


def _style(panel: Axes, largest: float) -> None:
    panel.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    panel.set_xlim(0, largest)
    ticks = [tick for tick in (0, 0.25, 0.5, 1, 2, 4, 8, 32, 128, 512) if tick <= largest]
    panel.set_xticks(ticks)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#E6E6E6", lw=0.7)
    panel.set_axisbelow(True)


def _share_limits(panels: Sequence[Axes]) -> None:
    """Give the panels of a row the same vertical limits, so that the blocks compare."""
    low = min(panel.get_ylim()[0] for panel in panels)
    high = max(panel.get_ylim()[1] for panel in panels)
    for panel in panels:
        panel.set_ylim(low, high)
