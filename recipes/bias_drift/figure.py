"""The figure of the recipe: blocks under growing bias, one column per kind of block."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from recipes.bias_drift.assertions import INPUT, OUTPUT, Series
from recipes.study.drawing import BLUE, GREEN, IN_ORDER, ORANGE, PINK, draw_seeds, label_panel

_TITLES = {"post_norm": "post-norm block (BERT, the paper's)", "pre_norm": "pre-norm block (GPT-2)"}
# Smaller distances from uniform attention are only float32 rounding.
_LEAST = 1e-8
_TICKS = (0, 0.25, 0.5, 1, 2, 4, 8, 32, 128)

Seeds = Sequence[Sequence[Series]]


def draw(blocks: Mapping[str, Seeds], length: int) -> Figure:
    """Draw five rows of panels against the norm of the bias.

    Args:
        blocks: For each kind of block, the series of all directions of each seed.
        length: Number of tokens of a sequence.
    """
    figure = Figure(figsize=(11, 15), dpi=75, layout="constrained")
    axes = figure.subplots(5, len(_TITLES), squeeze=False)
    for column, (kind, title) in enumerate(_TITLES.items()):
        panels, seeds = axes[:, column], blocks[kind]
        _draw_lines(panels[0], seeds, [
            ("input of the block", "black", "-", "cosine", INPUT),
            ("output of the block", ORANGE, "-", "cosine", OUTPUT),
            ("queries", BLUE, "--", "query_cosine", OUTPUT),
            ("keys", GREEN, ":", "key_cosine", OUTPUT),
        ])  # fmt: skip
        panels[0].set_ylim(-0.05, 1.05)
        panels[0].annotate(
            title, (0.5, 1.16), xycoords="axes fraction", ha="center", fontsize=13,
            fontweight="bold",
        )  # fmt: skip
        _draw_lines(panels[1], seeds, [
            ("inputs: mean norm", "black", "-", "mean_norm", INPUT),
            ("outputs: mean norm", PINK, "-", "mean_norm", OUTPUT),
            ("outputs: norm of the mean", ORANGE, "-", "drift_norm", OUTPUT),
            ("queries: mean norm", BLUE, "--", "query_norm", OUTPUT),
            ("keys: mean norm", GREEN, ":", "key_norm", OUTPUT),
        ])  # fmt: skip
        panels[1].set_yscale("log")
        _draw_scores(panels[2], seeds)
        _draw_weights(panels[3], seeds, length)
        _draw_entropy(panels[4], {"untrained": seeds, "trained": blocks[f"{kind}_trained"]})
    rows = (
        ("Mean cosine of pairs of rows (figures 6, 8)", "mean cosine"),
        ("Norms (figures 6, 8)", "norm (logarithmic)"),
        ("Mean score of each head before the softmax (figure 7)", "score (symmetric log)"),
        ("Attention weights (figures 9, 10)", "weight × number of keys (logarithmic)"),
        ("Distance from uniform attention", "1 − entropy / log(keys) (logarithmic)"),
    )
    for row, (caption, unit) in enumerate(rows):
        for column, panel in enumerate(axes[row]):
            x_label = "norm of the common bias (logarithmic, with 0)" if row == 4 else ""
            label_panel(panel, "abcdefghij"[2 * row + column], caption, x_label, unit)
            _bias_axis(panel, max(blocks["post_norm"][0][0].levels))
    for row in (1, 3, 4):
        limits = [panel.get_ylim() for panel in axes[row]]
        for panel in axes[row]:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure


def _draw_lines(panel: Axes, seeds: Seeds, lines: Sequence[tuple[str, str, str, str, int]]) -> None:
    """Draw metrics against the bias: the mean over directions for each seed, and over seeds."""
    for label, colour, style, metric, layer in lines:
        curves = [
            np.mean([series.values(metric, layer) for series in directions], axis=0).tolist()
            for directions in seeds
        ]
        draw_seeds(panel, seeds[0][0].levels, curves, colour=colour, label=label, ls=style)
    panel.legend(fontsize=9, edgecolor="none", loc="lower right")


def _draw_scores(panel: Axes, seeds: Seeds) -> None:
    """Draw the mean score of each head, with one colour per draw."""
    draws = [series for directions in seeds for series in directions]
    for number, series in enumerate(draws):
        colour = IN_ORDER[number % len(IN_ORDER)]
        panel.plot(series.levels, series.heads("score_mean"), color=colour, lw=0.8)
    panel.axhline(0, color="black", lw=0.8, zorder=0)
    panel.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    panel.yaxis.set_minor_locator(NullLocator())


def _draw_weights(panel: Axes, seeds: Seeds, length: int) -> None:
    for label, part, colour, style in (
        ("largest of a sequence", "sequence_max", ORANGE, "-"),
        ("largest of a row", "max", ORANGE, "--"),
        ("median of a row", "median", "black", ":"),
        ("smallest of a row", "min", BLUE, "--"),
        ("smallest of a sequence", "sequence_min", BLUE, "-"),
    ):
        curves = [
            [length * value for value in series.values("attention_extremes", part=part)]
            for directions in seeds
            for series in directions[:1]
        ]
        draw_seeds(panel, seeds[0][0].levels, curves, colour=colour, label=label, ls=style)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.6, 2.5, 4, 6)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.legend(fontsize=9, edgecolor="none", loc="upper right")


def _draw_entropy(panel: Axes, states: Mapping[str, Seeds]) -> None:
    for (label, seeds), colour in zip(states.items(), ("black", ORANGE), strict=True):
        curves = [
            [max(1 - value, _LEAST) for value in series.values("attention_entropy_normalised")]
            for directions in seeds
            for series in directions[:1]
        ]
        draw_seeds(panel, seeds[0][0].levels, curves, colour=colour, label=label)
    panel.set_yscale("log")
    panel.legend(fontsize=9, edgecolor="none", loc="best")


def _bias_axis(panel: Axes, largest: float) -> None:
    panel.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    panel.set_xlim(0, largest)
    panel.set_xticks([tick for tick in _TICKS if tick <= largest])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
