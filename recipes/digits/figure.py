"""The findings on images in one figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from geomon.kernels.baselines import isotropic_cosine_magnitude
from recipes.digits.claims import PER_IMAGE
from recipes.digits.findings import Training
from recipes.digits.model import CONVOLUTIONAL, MIXER, TRANSFORMER
from recipes.study import estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish; a mark for each besides.
_STYLES = {
    TRANSFORMER: ("#0072B2", "o", "transformer"),
    MIXER: ("#009E73", "s", "MLP-mixer"),
    CONVOLUTIONAL: ("#D55E00", "^", "convolutional, a row for each place"),
    PER_IMAGE: ("#CC79A7", "D", "convolutional, a row for each image"),
}
_GREY = "#767676"


def draw(trainings: Mapping[str, Sequence[Training]], *, head_width: int) -> Figure:
    """Draw anisotropy over depth, drift against cosine, alignment and entropy over training.

    Args:
        trainings: Trainings by the name of their network.
        head_width: Width of a head of the transformer.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(11.4, 8.6), dpi=100, layout=layout)
    panels = figure.subplots(2, 2)
    _draw_depth(panels[0, 0], trainings)
    _draw_drift(panels[0, 1], trainings)
    _draw_alignment(panels[1, 0], trainings[TRANSFORMER], head_width)
    _draw_entropy(panels[1, 1], trainings[TRANSFORMER])
    seeds = len(trainings[TRANSFORMER])
    captions = (
        f"Mean cosine over depth ({seeds} seeds)",
        "Drift against mean cosine, by layer and seed",
        "Transformer: mean query against mean key",
        f"Transformer: attention entropy ({seeds} seeds)",
    )
    for letter, caption, panel in zip("abcd", captions, panels.flat, strict=True):
        panel.set_title(f"$\\bf{{{letter}}}$   {caption}", loc="left", fontsize=11.5, pad=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9.5, length=3)
        panel.grid(axis="y", color="#E6E6E6", lw=0.7)
        panel.set_axisbelow(True)
    return figure


def _draw_depth(panel: Axes, trainings: Mapping[str, Sequence[Training]]) -> None:
    for kind, (colour, mark, words) in _STYLES.items():
        last = [each.profile("cosine") for each in trainings[kind]]
        depths = list(range(len(last[0])))
        for profile in last:
            panel.plot(depths, profile, color=colour, lw=0.6, alpha=0.6)
        _draw_mean(panel, depths, last, colour, label=words, marker=mark, ms=5)
        first = [each.profile("cosine", 0) for each in trainings[kind]]
        panel.plot(depths, np.mean(first, axis=0), color=colour, lw=1.3, ls=(0, (4, 2)))
    panel.plot([], [], color=_GREY, lw=1.3, ls=(0, (4, 2)), label="untrained, same colours")
    panel.set_ylim(0, 1.5)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("layer (0 = what enters the first block)", fontsize=10)
    panel.set_ylabel("mean cosine between rows of held-out images", fontsize=10)
    panel.legend(loc="upper left", fontsize=9, edgecolor="none", handlelength=1.8)


def _draw_drift(panel: Axes, trainings: Mapping[str, Sequence[Training]]) -> None:
    for kind, (colour, mark, words) in _STYLES.items():
        found = [each.drift_correlation() for each in trainings[kind]]
        p_values = ", ".join(f"{p_value:.2g}" for _, p_value in found)
        correlation = estimate([value for value, _ in found]).mean
        label = f"{words}: $\\rho$ = {correlation:.2f}, p = {p_values}"
        for number, each in enumerate(trainings[kind]):
            panel.plot(
                each.profile("drift_norm"), each.profile("cosine"), mark, color=colour, ms=6,
                mec="white", mew=0.6, alpha=0.85, label=None if number else label,
            )  # fmt: skip
    panel.set_xscale("log")
    panel.set_ylim(0, 1.45)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("drift: norm of the mean row (logarithmic)", fontsize=10)
    panel.set_ylabel("mean cosine between rows", fontsize=10)
    panel.legend(
        loc="upper left", fontsize=8.5, edgecolor="none", handlelength=1.0, handletextpad=0.3,
        title="Spearman correlation over layers, exact p by seed", title_fontsize=8.5,
        alignment="left",
    )  # fmt: skip


def _draw_alignment(panel: Axes, trainings: Sequence[Training], head_width: int) -> None:
    steps = [reading.step for reading in trainings[0].readings]
    layers = list(trainings[0].layers("qk_cosine"))
    colours = _colours(len(layers))
    for (layer, _), values in trainings[0].heads("qk_cosine").items():
        panel.plot(steps, values, color=colours[layers.index(layer)], lw=1.0)
    alignments = [each.alignment() for each in trainings]
    _draw_mean(
        panel,
        steps,
        alignments,
        "black",
        label="mean |cosine| over heads and seeds, with its 95 % interval",
    )
    chance = isotropic_cosine_magnitude(head_width)
    panel.axhline(chance, color=_GREY, lw=1.2, ls=":", label="the same by chance")
    panel.axhline(0, color=_GREY, lw=0.7)
    _step_axis(panel, steps)
    panel.set_ylim(-1.05, 1.5)
    panel.set_yticks([-1, -0.5, 0, 0.5, 1])
    words = "cosine of mean query and mean key\n(thin: heads of the first seed, coloured as in d)"
    panel.set_ylabel(words, fontsize=10)
    panel.legend(loc="upper left", fontsize=9, edgecolor="none", handlelength=1.6)


def _draw_entropy(panel: Axes, trainings: Sequence[Training]) -> None:
    steps = [reading.step for reading in trainings[0].readings]
    curves = [each.layers("attention_entropy") for each in trainings]
    layers = list(curves[0])
    for colour, layer in zip(_colours(len(layers)), layers, strict=True):
        of_seeds = [each[layer] for each in curves]
        for values in of_seeds:
            panel.plot(steps, values, color=colour, lw=0.5, alpha=0.6)
        panel.plot(steps, np.mean(of_seeds, axis=0), color=colour, lw=2, label=f"layer {layer}")
    panel.axhline(math.log(16), color=_GREY, lw=1.2, ls=":", label="uniform over 16 patches")
    _step_axis(panel, steps)
    low, high = panel.get_ylim()
    panel.set_ylim(low - 0.55 * (high - low), high)  # the legend stands below the curves
    panel.set_ylabel("attention entropy (nats)", fontsize=10)
    panel.legend(loc="lower left", fontsize=9, ncols=2, edgecolor="none", handlelength=1.6)


def _draw_mean(
    panel: Axes,
    places: Sequence[int],
    curves: Sequence[Sequence[float]],
    colour: str,
    **style: Any,
) -> None:
    """Draw the mean of several curves with its interval."""
    means = [estimate(values) for values in zip(*curves, strict=True)]
    panel.plot(places, [mean.mean for mean in means], color=colour, lw=2.2, **style)
    if all(math.isfinite(mean.margin) for mean in means):
        low, high = [mean.low for mean in means], [mean.high for mean in means]
        panel.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)


def _step_axis(panel: Axes, steps: Sequence[int]) -> None:
    """Make the step axis logarithmic, with step 0 to the left of the first one after it."""
    after = steps[1]
    panel.set_xscale("symlog", linthresh=after, linscale=0.4)
    panel.set_xlim(-0.25 * after, 1.1 * steps[-1])
    panel.set_xticks([*steps[:-2], steps[-1]] if len(steps) > 3 else steps)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    panel.set_xlabel("training step (logarithmic)", fontsize=10)


def _colours(count: int) -> list[tuple[float, ...]]:
    """Colours of layers, first to last, without the pale end of the map."""
    return [matplotlib.colormaps["plasma"](0.85 * n / max(count - 1, 1)) for n in range(count)]
