"""The figure of the recipe: the findings on images."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from geomon.analysis.profile import profile_of
from geomon.kernels.baselines import isotropic_cosine_magnitude
from recipes.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    IN_ORDER,
    ORANGE,
    PINK,
    draw_seeds,
    label_panel,
    step_axis,
)
from recipes.study.history import History, drift_and_cosine, over_heads

# Marker of each network, in addition to its colour.
_STYLES = {
    "transformer": (BLUE, "o", "transformer"),
    "mixer": (GREEN, "s", "MLP-mixer"),
    "convolutional": (ORANGE, "^", "convolutional, a row for each place"),
    "per_image": (PINK, "D", "convolutional, a row for each image"),
}
_STEPS = "training step (logarithmic)"


def draw(networks: Mapping[str, Sequence[History]], head_width: int) -> Figure:
    """Draw anisotropy over depth, drift against cosine, alignment and entropy over training.

    Args:
        networks: Records of each seed, by the name of the network.
        head_width: Head width of the transformer.
    """
    figure = Figure(figsize=(11.4, 8.6), dpi=85, layout="constrained")
    (depth, drift), (alignment, entropy) = figure.subplots(2, 2)
    _draw_depth(depth, networks)
    _draw_drift(drift, networks)
    _draw_alignment(alignment, networks["transformer"], head_width)
    _draw_entropy(entropy, networks["transformer"])
    return figure


def _draw_depth(panel: Axes, networks: Mapping[str, Sequence[History]]) -> None:
    for kind, (colour, mark, words) in _STYLES.items():
        last, first = (
            [profile_of(r, "cosine") for r in readings]
            for readings in ([s.last for s in networks[kind]], [s.first for s in networks[kind]])
        )
        depths = range(len(last[0]))
        draw_seeds(panel, depths, last, colour=colour, label=words, marker=mark, ms=5)
        panel.plot(depths, np.mean(first, axis=0), color=colour, lw=1.3, ls=(0, (4, 2)))
    panel.plot([], [], color=GREY, lw=1.3, ls=(0, (4, 2)), label="untrained, same colours")
    panel.set_ylim(0, 1.5)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.legend(loc="upper left", fontsize=9, edgecolor="none")
    title = f"Mean cosine over depth ({len(networks['transformer'])} seeds)"
    label_panel(
        panel, "a", title, "layer (0 = what enters the first block)",
        "mean cosine between rows of held-out images",
    )  # fmt: skip


def _draw_drift(panel: Axes, networks: Mapping[str, Sequence[History]]) -> None:
    for kind, (colour, mark, words) in _STYLES.items():
        found = [drift_and_cosine(seed.last, "spearman") for seed in networks[kind]]
        label = f"{words}: mean $\\rho$ = {fmean(fit.value for fit in found):.2f}"
        for number, seed in enumerate(networks[kind]):
            drift, cosine = (profile_of(seed.last, metric) for metric in ("drift_norm", "cosine"))
            panel.plot(
                drift, cosine, mark, color=colour, ms=6, mec="white", mew=0.6, alpha=0.85,
                label=None if number else label,
            )  # fmt: skip
    panel.set_xscale("log")
    panel.set_ylim(0, 1.45)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.legend(loc="upper left", fontsize=8.5, edgecolor="none")
    title = "Drift against mean cosine, by layer and seed"
    x_label = "drift: norm of the mean row (logarithmic)"
    label_panel(panel, "b", title, x_label, "mean cosine between rows")


def _draw_alignment(panel: Axes, seeds: Sequence[History], head_width: int) -> None:
    steps = seeds[0].steps
    by_reading = [reading.column("qk_cosine").by_head() for reading in seeds[0].readings]
    for head in by_reading[-1]:
        colour = IN_ORDER[(head[0] - 1) % len(IN_ORDER)]
        panel.plot(steps, [values[head] for values in by_reading], color=colour, lw=1.0)
    sizes = [[over_heads(r, "qk_cosine", size=True) for r in seed.readings] for seed in seeds]
    draw_seeds(panel, steps, sizes, colour="black", label="mean |cosine| over heads and seeds")
    chance = isotropic_cosine_magnitude(head_width)
    panel.axhline(chance, color=GREY, lw=1.2, ls=":", label="the same by chance")
    panel.axhline(0, color=GREY, lw=0.7)
    step_axis(panel, steps)
    panel.set_ylim(-1.05, 1.5)
    panel.set_yticks([-1, -0.5, 0, 0.5, 1])
    panel.legend(loc="upper left", fontsize=9, edgecolor="none")
    words = "cosine of mean query and mean key\n(thin: heads of the first seed, coloured as in d)"
    label_panel(panel, "c", "Transformer: mean query against mean key", _STEPS, words)


def _draw_entropy(panel: Axes, seeds: Sequence[History]) -> None:
    steps = seeds[0].steps
    profiles = [[profile_of(r, "attention_entropy") for r in seed.readings] for seed in seeds]
    for layer in range(1, len(profiles[0][0])):
        curves = [[profile[layer] for profile in seed] for seed in profiles]
        colour = IN_ORDER[(layer - 1) % len(IN_ORDER)]
        draw_seeds(panel, steps, curves, colour=colour, label=f"layer {layer}")
    panel.axhline(math.log(16), color=GREY, lw=1.2, ls=":", label="uniform over 16 patches")
    step_axis(panel, steps)
    low, high = panel.get_ylim()
    panel.set_ylim(low - 0.55 * (high - low), high)  # the legend stands below the curves
    panel.legend(loc="lower left", fontsize=9, ncols=2, edgecolor="none")
    title = f"Transformer: attention entropy ({len(seeds)} seeds)"
    label_panel(panel, "d", title, _STEPS, "attention entropy (nats)")
