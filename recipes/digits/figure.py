"""The figure of the recipe: the findings on images."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from geomon.analysis import profile_of
from geomon.kernels.baselines import isotropic_cosine_magnitude
from recipes.study.drawing import (
    BLUE,
    GREEN,
    IN_ORDER,
    ORANGE,
    PINK,
    Line,
    Panel,
    draw_panels,
    explain_seeds,
    step_axis,
)
from recipes.study.history import History, at_layer, drift_and_cosine, over_heads, over_training

# Marker of each network, in addition to its colour.
_STYLES = {
    "transformer": (BLUE, "o", "transformer"),
    "mixer": (GREEN, "s", "MLP-mixer"),
    "convolutional": (ORANGE, "^", "convolutional, a row for each place"),
    "per_image": (PINK, "D", "convolutional, a row for each image"),
}


def draw(networks: Mapping[str, Sequence[History]], head_width: int) -> Figure:
    """Draw anisotropy over depth, drift against cosine, alignment and entropy over training.

    Args:
        networks: Records of each seed, by the name of the network.
        head_width: Head width of the transformer.
    """
    attention = networks["transformer"]
    steps, depth, drift = attention[0].steps, [], []
    for kind, (colour, mark, words) in _STYLES.items():
        seeds = networks[kind]
        last, first = (
            [profile_of(getattr(s, at), "cosine") for s in seeds] for at in ("last", "first")
        )
        layers = range(len(last[0]))
        depth += [
            Line(words, colour, layers, last, {"marker": mark, "ms": 5}),
            Line("", colour, layers, first[:1], {"lw": 1.3, "ls": (0, (4, 2))}),
        ]
        mean = fmean(drift_and_cosine(seed.last, "spearman").value for seed in seeds)
        for number, seed in enumerate(seeds):
            norms = profile_of(seed.last, "drift_norm")
            label = "" if number else f"{words}: mean $\\rho$ = {mean:.2f}"
            drift.append(Line(label, colour, norms, [last[number]], {"marker": mark, "lw": 0}))
    heads = [
        Line("", IN_ORDER[(head[0] - 1) % len(IN_ORDER)], steps,
             [[reading.column("qk_cosine").by_head()[head] for reading in attention[0].readings]],
             {"lw": 1.0})
        for head in attention[0].last.column("qk_cosine").by_head()
    ]  # fmt: skip
    sizes = over_training(attention, partial(over_heads, metric="qk_cosine", size=True))
    entropies = [
        Line(f"layer {layer}", IN_ORDER[(layer - 1) % len(IN_ORDER)], steps,
             over_training(attention, partial(at_layer, metric="attention_entropy", layer=layer)))
        for layer in range(1, len(profile_of(attention[0].last, "attention_entropy")))
    ]  # fmt: skip
    over_steps = partial(step_axis, steps=steps)
    step, cosine = "training step (logarithmic)", "mean cosine between rows of held-out images"
    return draw_panels([
        Panel("Mean cosine over depth (dashed: untrained, first seed)",
              "layer (0 = what enters the first block)", cosine, depth,
              options={"ylim": (0, 1.5)}),
        Panel("Drift against mean cosine, by layer and seed",
              "drift: norm of the mean row (logarithmic)", cosine, drift,
              finish=lambda axes: axes.xaxis.set_minor_formatter(NullFormatter()),
              options={"xscale": "log", "ylim": (0, 1.45)}),
        Panel("Transformer: mean query against mean key", step,
              "cosine of mean query and mean key\n(thin: heads of the first seed)",
              [*heads, Line("mean |cosine| over heads and seeds", "black", steps, sizes)],
              [(isotropic_cosine_magnitude(head_width), "the same by chance")], over_steps,
              {"ylim": (-1.05, 1.5)}),
        Panel("Transformer: attention entropy", step, "attention entropy (nats)", entropies,
              [(math.log(16), "uniform over 16 patches")], over_steps),
    ], 2, (11.4, 8.6), explain_seeds(len(attention)))  # fmt: skip
