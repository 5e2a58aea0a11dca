"""The curves behind the claims: means over seeds with their bands, single seeds thin."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomon import Reading
from geomon.analysis import profile_of
from recipes.papers.queries_keys import stability_figure
from recipes.study.drawing import (
    BLUE,
    GREEN,
    IN_ORDER,
    ORANGE,
    PINK,
    SKY,
    Line,
    Panel,
    draw_panels,
    explain_seeds,
    plain_log_ticks,
    step_axis,
)
from recipes.study.history import (
    NORMED,
    History,
    at_layer,
    drift_and_cosine,
    over_heads,
    over_training,
)

_Lines = Sequence[tuple[str, str, Callable[[Reading], float]]]


def decoder_figure(seeds: Sequence[History]) -> Figure:
    """Draw the curves on which the claims stand, in nine panels.

    Args:
        seeds: Records of each seed.
    """
    last, steps = seeds[0].last, seeds[0].steps
    depth = len(profile_of(last, "anisotropy")) - 1
    alpha = _tag(f"alpha_last/{NORMED}")

    def by_layer(metric: str) -> _Lines:
        return [
            (f"layer {layer}", IN_ORDER[(layer - 1) % len(IN_ORDER)],
             partial(at_layer, metric=metric, layer=layer))
            for layer in range(1, depth + 1)
        ]  # fmt: skip

    def finish(axes: Axes, *, logarithmic: bool) -> None:
        step_axis(axes, steps)
        if logarithmic:
            plain_log_ticks(axes, [2, 3, 5, 10, 20, 30])

    def panel(title: str, unit: str, lines: _Lines, nulls: Sequence[tuple[str, str]] = ()) -> Panel:
        return Panel(
            title, "training step (logarithmic)", unit,
            [Line(words, colour, steps, over_training(seeds, value))
             for words, colour, value in lines],
            [(last.values[tag], f"{words}: {last.values[tag]:.2g}") for tag, words in nulls],
            partial(finish, logarithmic="dimension" in unit),
        )  # fmt: skip

    depths = range(len(profile_of(last, "variance_shares", part="mean")))
    return draw_panels([
        panel("Anisotropy", "share of variance in the first direction", by_layer("anisotropy")),
        panel("Intrinsic dimension", "dimension, mean over layers (log)", [
            ("TwoNN, no ratio dropped", BLUE, _tag("twonn/mean/discard_0")),
            ("TwoNN, smallest 20 % kept", SKY, _tag("twonn/mean/discard_80")),
            ("TwoNN, one per (character, position)", ORANGE, _tag("twonn_distinct/mean")),
            ("Gride at scale 8", GREEN, _tag("gride/mean/k8")),
            ("Gride at scale 32", PINK, _tag("gride/mean/k32")),
        ]),
        panel("Local and global anisotropy", "anisotropy, mean over layers", [
            ("64 nearest rows", ORANGE, _tag("local_anisotropy/mean")),
            ("all rows", BLUE, _tag("anisotropy/mean")),
        ], [("local_anisotropy/null", "64 rows of noise"), ("anisotropy/null", "rows of noise")]),
        panel("Mean cosine between tokens", "mean cosine", [
            ("cosine, last layer", BLUE, partial(at_layer, metric="cosine", layer=depth)),
            ("cosine, mean over layers", SKY, _tag("cosine/mean")),
            ("without the mean row", ORANGE, _tag("cosine_centred/mean")),
        ], [("cosine/isotropic_pair", "95 % point, one isotropic pair")]),
        Panel("Drift and cosine over layers 0 to the last", "norm of the mean row", "mean cosine",
              [_drift(number, seed) for number, seed in enumerate(seeds)]),
        panel("Mean query against mean key", "cosine", [
            ("size, mean over all heads", "black",
             partial(over_heads, metric="qk_cosine", size=True)),
            ("layer 1, mean with sign", SKY, partial(over_heads, metric="qk_cosine", layers=[1])),
            (f"layer {depth}, mean with sign", ORANGE,
             partial(over_heads, metric="qk_cosine", layers=[depth])),
        ], [("qk_cosine/null_magnitude", "size by chance")]),
        panel("Attention entropy", "nats", by_layer("attention_entropy")),
        panel("Spectrum of the last tokens", "after the final norm", [
            ("effective rank", BLUE, _tag(f"effective_rank_last/{NORMED}")),
            ("10 x alpha (decay of the spectrum)", ORANGE, lambda reading: 10 * alpha(reading)),
        ]),
        Panel("Shares of the mean squared norm", "layer (0 = what enters the first block)",
              "share, at the end", [
                  Line(label, colour, depths,
                       [profile_of(s.last, "variance_shares", part=part) for s in seeds])
                  for label, colour, part in (
                      ("mean row", BLUE, "mean"), ("between characters", ORANGE, "between"),
                      ("within a character", GREEN, "within"),
                  )
              ], options={"ylim": (0, 1), "xticks": depths}),
    ], 3, (13.2, 11.0), explain_seeds(len(seeds)))  # fmt: skip


def seeds_figure(seeds: Sequence[History]) -> Figure:
    """Draw mean query against mean key over training, a line for each seed.

    Args:
        seeds: Records of each seed.
    """
    figure = stability_figure({f"seed {n}": seed.record for n, seed in enumerate(seeds)})
    figure.set_dpi(80)
    return figure


def _tag(tag: str) -> Callable[[Reading], float]:
    return lambda reading: reading.values[tag]


def _drift(number: int, seed: History) -> Line:
    """Cosine against the norm of the mean, over depth, at the end."""
    drift, cosine = (profile_of(seed.last, metric) for metric in ("drift_norm", "cosine"))
    fit = drift_and_cosine(seed.last, "spearman")
    words = f"seed {number}: Spearman {fit.value:.1f}, p = {fit.p_value:.3f}"
    return Line(
        words, IN_ORDER[number % len(IN_ORDER)], drift, [cosine], {"marker": "o", "lw": 1.2}
    )
