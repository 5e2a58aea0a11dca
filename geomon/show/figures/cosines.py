"""Cosine of mean query and mean key over training, one panel for each layer.

After figures 13 and 14 of Godey et al. (2401.12143).
"""

import math

import numpy as np
from matplotlib.figure import Figure

from geomon.analysis.queries_keys import QueriesKeys, queries_and_keys
from geomon.record import Readings
from geomon.show.collect import measured_heads
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Line, Lines, NotMeasuredError, spread_items

# Layers that have a panel of their own.
_MOST_LAYERS = 12


def cosines_figure(readings: Readings, metric: str = "qk_cosine") -> Figure:
    """Draw a metric of heads over training, one panel for each layer.

    Of `qk_cosine` the band of chance is drawn. Of directions that have nothing to do with one
    another none of all heads ends outside it, with a probability of 95 % (Holm's correction): the
    heads that a summary of the run counts.
    """
    selected, layers, table = measured_heads(readings, metric)
    if not selected:
        raise NotMeasuredError(f"{metric} of single heads was not measured in this run")
    found = queries_and_keys(selected) if metric == "qk_cosine" else None
    limit, label = (found.limit if found else math.nan), readings.text_of(metric).label
    chance = (limit, "chance: all heads within, with a probability of 95 %") if found else None
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
                ends=(-1.05, 1.05) if metric == "qk_cosine" else None,
            ),
        )
        for row in shown
    ]
    figure = axes.draw_grid(panels, columns=min(4, len(panels)), size=(3.1, 2.7), share=True)
    some = f"; {len(shown)} of {len(layers)} layers are drawn" if len(shown) < len(layers) else ""
    known = int(np.isfinite(table[-1]).sum())
    words = _count_of_heads(found) if found else f"{label}: a line for each of {known} heads"
    axes.title(figure, words + some)
    return figure


def _side_colour(value: float, limit: float) -> str:
    """Colour of a head that ends above chance, below it or within; without a limit, 0 is that."""
    limit = limit if math.isfinite(limit) else 0.0
    return VERMILLION if value > limit else BLUE if value < -limit else GREY


def _count_of_heads(found: QueriesKeys) -> str:
    similar, opposite, chance = (
        len(found.of(direction)) for direction in ("similar", "opposite", "chance")
    )
    return (
        f"{len(found.heads)} heads at the end: {similar} similar (orange), {opposite} opposite "
        f"(blue), {chance} within chance (±{found.limit:.2f})"
    )
