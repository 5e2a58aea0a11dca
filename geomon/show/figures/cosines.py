"""Cosine of mean query and mean key over training, one panel for each layer.

After figures 13, 14 and 23 of Godey et al. (2401.12143): a line for each head of a run, or for each
of several runs.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis.queries_keys import (
    LayerAlignment,
    align_layers,
    chance_limit,
    heads_limit,
)
from geomon.record import Readings
from geomon.show.collect import measured_heads
from geomon.show.colours import BLUE, GREY, VERMILLION, look_of
from geomon.show.figures import axes
from geomon.show.loading import name_runs
from geomon.show.panels import Line, Lines, NotMeasuredError, spread_items

# Layers that have a panel of their own: of heads, and of runs.
_MOST_LAYERS, _MOST_OF_RUNS = 12, 4
_ENDS = (-1.05, 1.05)


def cosines_figure(readings: Readings, metric: str = "qk_cosine") -> Figure:
    """Draw a metric of heads over training, one panel for each layer.

    The band of chance is drawn for `qk_cosine`: with random directions, all heads end inside it
    with a probability of 95 %.
    """
    selected, layers, table = measured_heads(readings, metric)
    if not selected:
        raise NotMeasuredError(f"{metric} of single heads was not measured in this run")
    limit = heads_limit(selected[-1]) if metric == "qk_cosine" else math.nan
    label, has_limit = readings.text_of(metric).label, math.isfinite(limit)
    chance = (limit, "chance: all heads within, with a probability of 95 %") if has_limit else None
    steps = [reading.step for reading in selected]
    shown = spread_items(range(len(layers)), _MOST_LAYERS)
    panels = [
        (
            f"layer {layers[row]}",
            Lines(
                label,
                [
                    Line("", steps, line.tolist(), _side_colour(line[-1], limit), width=1.2)
                    for line in table[:, row].T
                ],
                chance=chance,
                ends=_ENDS if metric == "qk_cosine" else None,
            ),
        )
        for row in shown
    ]
    figure = axes.draw_grid(panels, columns=min(4, len(panels)), size=(3.1, 2.7), share=True)
    some = f"; {len(shown)} of {len(layers)} layers are drawn" if len(shown) < len(layers) else ""
    last = table[-1][np.isfinite(table[-1])]
    words = f"{label}: a line for each of {last.size} heads"
    words = _count_of_heads(last, limit) if has_limit else words
    axes.title(figure, words + some)
    return figure


def _side_colour(value: float, limit: float) -> str:
    """Colour of a head that ends above chance, below it or within; without a limit, 0 is that."""
    limit = limit if math.isfinite(limit) else 0.0
    return VERMILLION if value > limit else BLUE if value < -limit else GREY


def _count_of_heads(cosines: NDArray[np.float64], limit: float) -> str:
    similar, opposite = int((cosines > limit).sum()), int((cosines < -limit).sum())
    return (
        f"{cosines.size} heads at the end: {similar} similar (orange), {opposite} opposite "
        f"(blue), {cosines.size - similar - opposite} within chance (±{limit:.2f})"
    )


def stability_figure(runs: Sequence[Readings]) -> Figure:
    """Draw the cosine of mean query and mean key over training, a line for each run.

    The heads of a layer are joined to one vector; up to four layers have a panel, the first and the
    last among them. The band holds 95 % of the cosines of isotropic directions of that width.
    """
    names = name_runs(map(_folder, runs))
    found = [align_layers(run) for run in runs]
    for name, layers in zip(names, found, strict=True):
        if not any(math.isfinite(value) for each in layers.values() for value in each.cosines):
            subject = f"{name}: no" if len(runs) > 1 else "no"
            raise NotMeasuredError(
                f"{subject} mean queries and keys stand beside the record: a Monitor with "
                "arrays=True keeps them where qk_cosine or qk_dot is measured"
            )
    common = sorted(set.intersection(*(set(layers) for layers in found)))
    if not common:
        raise NotMeasuredError("the runs have no layers in common: give runs of one model")
    label = f"{runs[0].text_of('qk_cosine').title}\n(all heads as one vector)"
    shown = {
        layer: [layers[layer] for layers in found] for layer in spread_items(common, _MOST_OF_RUNS)
    }
    panels = []
    for layer, alignments in shown.items():
        lines = []
        for number, (name, each) in enumerate(zip(names, alignments, strict=True)):
            colour, dash = look_of(number)
            lines.append(Line(axes.literal(name), each.steps, each.cosines, colour, dash=dash))
        chance = _limit(alignments), "95 % of random directions"
        panels.append((f"layer {layer}", Lines(label, lines, chance=chance, ends=_ENDS)))
    figure = axes.draw_grid(panels, columns=len(panels), size=(3.3, 3.3), share=True)
    axes.title(figure, _words([*shown.values()], len(common)))
    return figure


def _limit(alignments: Sequence[LayerAlignment]) -> float:
    """The limit of chance, that of the shortest vectors where runs differ in their width."""
    return chance_limit(max(2, min(each.width for each in alignments)))


def _words(by_layer: Sequence[Sequence[LayerAlignment]], layers: int) -> str:
    """Say how many runs there are, and in how many layers they end on one side of chance."""
    some = f" ({len(by_layer)} of {layers} layers)" if len(by_layer) < layers else ""
    count = len(by_layer[0])
    if count == 1:
        return f"Mean query against mean key, heads of a layer together{some}"
    agreeing = 0
    for runs in by_layer:
        ends, limit = np.array([each.cosines[-1] for each in runs]), _limit(runs)
        agreeing += bool((ends > limit).all() or (ends < -limit).all())
    return (
        f"Mean query against mean key in {count} runs{some}: all end on the same side, beyond "
        f"chance, in {agreeing} of {len(by_layer)} layers"
    )


def _folder(run: Readings) -> Path:
    return run.folder.path.parent if run.folder is not None else Path("run")
