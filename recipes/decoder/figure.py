"""The curves behind the claims: means over seeds with their bands, single seeds thin."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geomon import Reading
from geomon.analysis.profile import profile_of
from recipes.papers.queries_keys import stability_figure
from recipes.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    IN_ORDER,
    ORANGE,
    PINK,
    SKY,
    draw_seeds,
    label_panel,
    plain_log_ticks,
    step_axis,
)
from recipes.study.history import NORMED, History, drift_and_cosine, over_heads, over_layers

_Line = tuple[str, str, Callable[[Reading], float]]
_STEPS = "training step (logarithmic)"


def decoder_figure(seeds: Sequence[History]) -> Figure:
    """Draw the curves on which the claims stand, in nine panels.

    Args:
        seeds: What was recorded of each seed.
    """
    last = seeds[0].last
    depth = len(profile_of(last, "anisotropy")) - 1
    figure = Figure(figsize=(13.2, 11.0), dpi=80, layout="constrained")
    axes = figure.subplots(3, 3)
    _over_training(axes[0, 0], seeds, _by_layer("anisotropy", depth))
    label_panel(axes[0, 0], "a", "Anisotropy", _STEPS, "share of variance in the first direction")
    _over_training(axes[0, 1], seeds, [
        ("TwoNN, no ratio dropped", BLUE, _tag("twonn/mean/discard_0")),
        ("TwoNN, smallest 20 % kept", SKY, _tag("twonn/mean/discard_80")),
        ("TwoNN, one per (character, position)", ORANGE, _tag("twonn_distinct/mean")),
        ("Gride at scale 8", GREEN, _tag("gride/mean/k8")),
        ("Gride at scale 32", PINK, _tag("gride/mean/k32")),
    ])  # fmt: skip
    plain_log_ticks(axes[0, 1], [2, 3, 5, 10, 20, 30])
    label_panel(axes[0, 1], "b", "Intrinsic dimension", _STEPS, "dimension, mean over layers (log)")
    _over_training(axes[0, 2], seeds, [
        ("64 nearest rows", ORANGE, _tag("local_anisotropy/mean")),
        ("all rows", BLUE, _tag("anisotropy/mean")),
    ])  # fmt: skip
    _null(axes[0, 2], last.values["local_anisotropy/null"], "64 rows of noise")
    _null(axes[0, 2], last.values["anisotropy/null"], "all rows of noise", "--")
    label_panel(
        axes[0, 2], "c", "Local and global anisotropy", _STEPS, "anisotropy, mean over layers"
    )

    _over_training(axes[1, 0], seeds, [
        ("cosine, last layer", BLUE, partial(_at_layer, metric="cosine", layer=depth)),
        ("cosine, mean over layers", SKY, _tag("cosine/mean")),
        ("without the mean row", ORANGE, _tag("cosine_centred/mean")),
    ])  # fmt: skip
    _null(axes[1, 0], last.values["cosine/isotropic_pair"], "95 % point, one isotropic pair")
    label_panel(axes[1, 0], "d", "Mean cosine between tokens", _STEPS, "mean cosine")
    _draw_drift(axes[1, 1], seeds)
    _over_training(axes[1, 2], seeds, [
        ("size, mean over all heads", "black",
         partial(over_heads, metric="qk_cosine", size=True)),
        ("layer 1, mean with sign", SKY, partial(over_heads, metric="qk_cosine", layers=[1])),
        (f"layer {depth}, mean with sign", ORANGE,
         partial(over_heads, metric="qk_cosine", layers=[depth])),
    ])  # fmt: skip
    _null(axes[1, 2], last.values["qk_cosine/null_magnitude"], "size by chance")
    axes[1, 2].axhline(0, color=GREY, lw=0.8)
    label_panel(axes[1, 2], "f", "Mean query against mean key", _STEPS, "cosine")

    _over_training(axes[2, 0], seeds, _by_layer("attention_entropy", depth))
    label_panel(axes[2, 0], "g", "Attention entropy", _STEPS, "nats")
    alpha = _tag(f"alpha_last/{NORMED}")
    _over_training(axes[2, 1], seeds, [
        ("effective rank", BLUE, _tag(f"effective_rank_last/{NORMED}")),
        ("10 x alpha (decay of the spectrum)", ORANGE, lambda reading: 10 * alpha(reading)),
    ])  # fmt: skip
    label_panel(axes[2, 1], "h", "Spectrum of the last tokens", _STEPS, "after the final norm")
    _draw_shares(axes[2, 2], seeds)
    return figure


def seeds_figure(seeds: Sequence[History]) -> Figure:
    """Draw mean query against mean key over training, a line for each seed.

    Args:
        seeds: What was recorded of each seed.
    """
    runs = {f"seed {number}": seed.record for number, seed in enumerate(seeds)}
    figure = stability_figure(runs)
    figure.set_dpi(80)
    return figure


def _tag(tag: str) -> Callable[[Reading], float]:
    return lambda reading: reading.values[tag]


def _by_layer(metric: str, depth: int) -> list[_Line]:
    return [
        (f"layer {layer}", IN_ORDER[(layer - 1) % len(IN_ORDER)],
         partial(_at_layer, metric=metric, layer=layer))
        for layer in range(1, depth + 1)
    ]  # fmt: skip


def _at_layer(reading: Reading, metric: str, layer: int) -> float:
    return over_layers(reading, metric, lambda profile: profile[layer - 1])


def _over_training(panel: Axes, seeds: Sequence[History], lines: Sequence[_Line]) -> None:
    """Draw lines over training steps, on a logarithmic axis with step 0 at its left."""
    steps = seeds[0].steps
    for label, colour, value in lines:
        curves = [[value(reading) for reading in seed.readings] for seed in seeds]
        draw_seeds(panel, steps, curves, colour=colour, label=label)
    step_axis(panel, steps)
    panel.legend(fontsize=8.5, frameon=False)


def _draw_drift(panel: Axes, seeds: Sequence[History]) -> None:
    """Draw cosine against the norm of the mean, one line over depth for each seed, at the end."""
    for number, seed in enumerate(seeds):
        drift, cosine = (profile_of(seed.last, metric) for metric in ("drift_norm", "cosine"))
        fit = drift_and_cosine(seed.last, "spearman")
        panel.plot(
            drift, cosine, "o-", color=IN_ORDER[number % len(IN_ORDER)], ms=5, lw=1.2,
            label=f"seed {number}: Spearman {fit.value:.1f}, p = {fit.p_value:.3f}",
        )  # fmt: skip
        for layer, place in enumerate(zip(drift, cosine, strict=True) if number == 0 else ()):
            panel.annotate(f"{layer}", place, xytext=(5, -9), textcoords="offset points")
    panel.legend(fontsize=8.5, frameon=False)
    title = "Drift and cosine over layers 0 to the last"
    label_panel(panel, "e", title, "norm of the mean row", "mean cosine")


def _draw_shares(panel: Axes, seeds: Sequence[History]) -> None:
    """Draw how the mean squared norm is shared over depth, at the end."""
    for label, colour, part in (
        ("mean row", BLUE, "mean"),
        ("between characters", ORANGE, "between"),
        ("within a character", GREEN, "within"),
    ):
        table = np.array([profile_of(s.last, "variance_shares", part=part) for s in seeds])
        draw_seeds(panel, range(table.shape[1]), table.tolist(), colour=colour, label=label)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(0, 1)
    panel.legend(fontsize=8.5, frameon=False)
    title = "Shares of the mean squared norm"
    label_panel(panel, "i", title, "layer (0 = what enters the first block)", "share, at the end")


def _null(panel: Axes, value: float, label: str, style: str = ":") -> None:
    """Draw a grey line at what rows without structure give, and name it in the legend."""
    panel.axhline(value, color=GREY, lw=1.2, ls=style, label=f"{label}: {value:.2g}")
    panel.legend(fontsize=8.5, frameon=False)
