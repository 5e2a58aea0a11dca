"""Draws the cosine of mean query and mean key over training, with one panel per layer.

After figures 13 and 14 of Godey et al. (2401.12143).
"""

import math

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis.chance import heads_limit
from geomon.record import Readings
from geomon.show.collect import measured_heads
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Line, Lines, NotMeasuredError, spread_items

# Largest number of layers drawn, each in its own panel.
_MOST_LAYERS = 12


def cosines_figure(readings: Readings, metric: str = "qk_cosine") -> Figure:
    """Draw a metric of heads over training; `qk_cosine` gets a 95 % band of random directions."""
    selected, layers, table = measured_heads(readings, metric)
    if not selected:
        raise NotMeasuredError(f"{metric} of single heads was not measured in this run")
    limit = heads_limit(selected[-1]) if metric == "qk_cosine" else math.nan
    label, has_limit = readings.text_of(metric).label, math.isfinite(limit)
    chance = (-limit, limit, "chance: all heads within, with a probability of 95 %")
    steps = [reading.step for reading in selected]
    low, high = min(0.0, float(np.nanmin(table))), max(0.0, float(np.nanmax(table)))
    ends = (1.05 * low, 1.05 * high) if high > low else (0.0, 1.0)  # all panels share their axis
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
                usual=chance if has_limit else None,
                ends=(-1.05, 1.05) if metric == "qk_cosine" else ends,
            ),
        )
        for row in shown
    ]
    figure = axes.draw_grid(panels, columns=min(4, len(panels)), size=(3.1, 2.7), share=True)
    some = f"; {len(shown)} of {len(layers)} layers are drawn" if len(shown) < len(layers) else ""
    last = table[-1][np.isfinite(table[-1])]
    said = (
        _count_of_heads(last, limit)
        if has_limit
        else f"{label}: a line for each of {last.size} heads"
    )
    axes.title(figure, said + some)
    return figure


def _side_colour(value: float, limit: float) -> str:
    """Colour a head by whether it ends above, below or within the chance limit (0 if unknown)."""
    limit = limit if math.isfinite(limit) else 0.0
    return VERMILLION if value > limit else BLUE if value < -limit else GREY


def _count_of_heads(cosines: NDArray[np.float64], limit: float) -> str:
    similar, opposite = int((cosines > limit).sum()), int((cosines < -limit).sum())
    return (
        f"{cosines.size} heads at the end: {similar} similar (orange), {opposite} opposite "
        f"(blue), {cosines.size - similar - opposite} within chance (±{limit:.2f})"
    )
