"""Heat maps: a metric by layer and step, and by head and layer at several steps."""

import math

import numpy as np
from matplotlib.figure import Figure

from geomon.analysis import single_source
from geomon.record import Reading, Readings
from geomon.show.figures import panels

# What the figures show where no metric is asked for.
_BY_LAYER = ("twonn", "anisotropy", "cosine", "attention_entropy")
_BY_HEAD = ("attention_entropy", "qk_cosine")
_SHORT = {"attention_entropy": "Entropy", "qk_cosine": "Cosine"}
_MOST_STEPS = 3


def map_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by layer and step as heat maps, with a column for each reading.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer; None for four of them.

    Raises:
        NotMeasuredError: No such metric was measured.
    """
    wanted = _BY_LAYER if metric is None else (metric,)
    metrics = [name for name in wanted if readings.layers(name)]
    if not metrics:
        raise panels.NotMeasuredError(f"{', '.join(wanted)}: not measured in this run")
    columns = min(2, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = panels.new_figure(0.4 + 5.4 * columns, 0.5 + 3.2 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for letter, panel, name in zip("abcd", axes.flat, metrics, strict=False):
        panels.draw_layer_map(panel, readings, name, label="")
        panels.caption(panel, letter, panels.AXIS_LABELS.get(name, name).replace("\n", " "))
    for panel in list(axes.flat)[len(metrics) :]:
        panel.set_visible(False)
    return figure


def heads_over_training_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by head and layer at the first, a middle and the last step, on a fixed scale.

    The entropy of attention runs from 0 to that of uniform attention, cosines from -1 to 1, other
    metrics between their ends over the whole run.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value for each head; None for the entropy of attention and
            the cosine of mean query and mean key.

    Raises:
        NotMeasuredError: The heads have no value of such a metric.
    """
    wanted = _BY_HEAD if metric is None else (metric,)
    metrics = [name for name in wanted if panels.layers_and_heads(readings.tags(), name)[0]]
    if not metrics:
        raise panels.NotMeasuredError(f"{' and '.join(wanted)} of single heads: not measured")
    sizes = [panels.layers_and_heads(readings.tags(), name) for name in metrics]
    tall = [min(max(1.2 + 0.32 * len(layers), 2.4), 6.5) for layers, _ in sizes]
    width = min(max(1.2 + 0.34 * max(count for _, count in sizes), 2.5), 5.0)
    figure = panels.new_figure(1.6 + _MOST_STEPS * width, 0.6 + sum(tall))
    axes = figure.subplots(len(metrics), _MOST_STEPS, squeeze=False, height_ratios=tall)
    letters = iter("abcdef")
    for row, name, (layers, count) in zip(axes, metrics, sizes, strict=True):
        measured = [
            reading
            for reading in single_source(readings)
            if np.isfinite(panels.head_table(reading, name, layers, count)).any()
        ]
        chosen = _first_middle_last(measured)
        tables = [panels.head_table(reading, name, layers, count) for reading in measured]
        most = panels.largest(chosen[-1], name) if chosen else math.nan
        image = None
        for panel, reading in zip(row, chosen, strict=False):
            table = panels.head_table(reading, name, layers, count)
            colours, low, high = panels.colour_range(np.stack(tables), name, most)
            image = panel.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto")
            panel.set_facecolor("#DDDDDD")  # shows where a head has no value
            panels.matrix_axes(panel, layers, count)
            if max(len(layers), count) <= 6:
                panels.annotate(panel, table, image)
            panels.caption(panel, next(letters), f"{_SHORT.get(name, name)}, step {reading.step:,}")
        for panel in row[len(chosen) :]:
            panel.set_visible(False)
        if image is not None:
            bar = figure.colorbar(image, ax=list(row), pad=0.015, aspect=18)
            words = panels.AXIS_LABELS.get(name, name).replace("\n", " ")
            full = name == "attention_entropy" and math.isfinite(most)
            bar.set_label(f"{words}\n0 to uniform attention" if full else words, fontsize=9)
            bar.ax.tick_params(labelsize=8.5, length=2)
            bar.outline.set_visible(False)
    return figure


def _first_middle_last(measured: list[Reading]) -> list[Reading]:
    steps = panels.spread_steps([reading.step for reading in measured], _MOST_STEPS)
    return [reading for reading in measured if reading.step in steps]
