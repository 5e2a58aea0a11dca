"""The figure of the recipe: blocks under growing bias, one column per kind of block."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from recipes.bias_drift.assertions import INPUT, OUTPUT, Series
from recipes.study.drawing import BLUE, GREEN, IN_ORDER, ORANGE, PINK, Line, Panel, draw_panels

_TITLES = {"post_norm": "post-norm block (BERT, the paper's)", "pre_norm": "pre-norm block (GPT-2)"}
# Smaller distances from uniform attention are only float32 rounding.
_LEAST = 1e-8
_TICKS = (0, 0.25, 0.5, 1, 2, 4, 8, 32, 128)
_COSINES = [
    ("input of the block", "black", "-", "cosine", INPUT),
    ("output of the block", ORANGE, "-", "cosine", OUTPUT),
    ("queries", BLUE, "--", "query_cosine", OUTPUT),
    ("keys", GREEN, ":", "key_cosine", OUTPUT),
]
_NORMS = [
    ("inputs: mean norm", "black", "-", "mean_norm", INPUT),
    ("outputs: mean norm", PINK, "-", "mean_norm", OUTPUT),
    ("outputs: norm of the mean", ORANGE, "-", "drift_norm", OUTPUT),
    ("queries: mean norm", BLUE, "--", "query_norm", OUTPUT),
    ("keys: mean norm", GREEN, ":", "key_norm", OUTPUT),
]
_WEIGHTS = (
    ("largest of a sequence", "sequence_max", ORANGE, "-"),
    ("largest of a row", "max", ORANGE, "--"),
    ("median of a row", "median", "black", ":"),
    ("smallest of a row", "min", BLUE, "--"),
    ("smallest of a sequence", "sequence_min", BLUE, "-"),
)

Seeds = Sequence[Sequence[Series]]


def draw(blocks: Mapping[str, Seeds], length: int) -> Figure:
    """Draw five rows of panels against the norm of the bias.

    Args:
        blocks: For each kind of block, the series of all directions of each seed.
        length: Number of tokens of a sequence.
    """
    columns = [_panels(kind, blocks, length) for kind in _TITLES]
    panels = [panel for row in zip(*columns, strict=True) for panel in row]
    return draw_panels(panels, len(_TITLES), (11, 15))


def _panels(kind: str, blocks: Mapping[str, Seeds], length: int) -> list[Panel]:
    seeds, trained = blocks[kind], blocks[f"{kind}_trained"]
    levels = seeds[0][0].levels

    def panel(title: str, unit: str, lines: Sequence[Line], **options: object) -> Panel:
        finish = partial(_bias_axis, largest=levels[-1])
        x_label = "norm of the common bias (logarithmic, with 0)"
        return Panel(title, x_label, unit, lines, finish=finish, options=options)

    scores = [
        Line("", IN_ORDER[number % len(IN_ORDER)], levels, [head], {"lw": 0.8})
        for number, series in enumerate(each for directions in seeds for each in directions)
        for head in zip(*series.heads("score_mean"), strict=True)
    ]
    weights = [
        Line(words, colour, levels,
             [[length * value for value in directions[0].values("attention_extremes", part=part)]
              for directions in seeds], {"ls": style})
        for words, part, colour, style in _WEIGHTS
    ]  # fmt: skip
    entropies = [
        Line(words, colour, own[0][0].levels,
             [[max(1 - value, _LEAST) for value in
               directions[0].values("attention_entropy_normalised")] for directions in own])
        for words, colour, own in (("untrained", "black", seeds), ("trained", ORANGE, trained))
    ]  # fmt: skip
    log = {"yscale": "log"}
    return [
        panel(f"{_TITLES[kind]}: mean cosine (fig. 6, 8)", "mean cosine", _lines(seeds, _COSINES),
              ylim=(-0.05, 1.05)),
        panel("Norms (fig. 6, 8)", "norm (logarithmic)", _lines(seeds, _NORMS), **log),
        panel("Mean score of each head (fig. 7)", "score before the softmax", scores,
              yscale="symlog" if kind == "post_norm" else "linear"),  # up to 10, and below 1
        panel("Attention weights (fig. 9, 10)", "weight × number of keys", weights),
        panel("Distance from uniform attention", "1 − entropy / log(keys) (log)", entropies, **log),
    ]  # fmt: skip


def _lines(seeds: Seeds, lines: Sequence[tuple[str, str, str, str, int]]) -> list[Line]:
    """Metrics over the bias: the mean over directions for each seed."""
    return [
        Line(label, colour, seeds[0][0].levels,
             [np.mean([series.values(metric, layer) for series in directions], axis=0).tolist()
              for directions in seeds], {"ls": style})
        for label, colour, style, metric, layer in lines
    ]  # fmt: skip


def _bias_axis(panel: Axes, largest: float) -> None:
    panel.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    panel.set_xlim(0, largest)
    panel.set_xticks([tick for tick in _TICKS if tick <= largest])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
