"""Heat maps: a metric by layer and step, and by head and layer at several steps."""

import math

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures import panels

# What the figures show where no metric is asked for.
_BY_LAYER = ("twonn", "anisotropy", "cosine", "attention_entropy")
_BY_HEAD = ("attention_entropy", "qk_cosine")
_MOST_STEPS = 3


def map_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by layer and step as heat maps, with a column for each reading.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer; None for four of them.

    Raises:
        NotMeasuredError: No such metric was measured.
    """
    metrics = panels.choose_metrics(metric, _BY_LAYER, readings.layers)
    columns = min(2, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = panels.new_figure(0.4 + 5.4 * columns, 0.5 + 3.2 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for letter, panel, name in zip("abcd", axes.flat, metrics, strict=False):
        panels.draw_layer_map(panel, readings, name, label="")
        panels.caption(panel, letter, readings.text_of(name).label)
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
    of_heads = {
        name: panels.measured_heads(readings, name)
        for name in (_BY_HEAD if metric is None else (metric,))
    }
    metrics = panels.choose_metrics(
        metric, _BY_HEAD, lambda name: of_heads[name][0], place=" of single heads"
    )
    sizes = [of_heads[name][2].shape[1:] for name in metrics]
    tall = [min(max(1.2 + 0.32 * layers, 2.4), 6.5) for layers, _ in sizes]
    width = min(max(1.2 + 0.34 * max(count for _, count in sizes), 2.5), 5.0)
    figure = panels.new_figure(1.6 + _MOST_STEPS * width, 0.6 + sum(tall))
    axes = figure.subplots(len(metrics), _MOST_STEPS, squeeze=False, height_ratios=tall)
    letters = iter("abcdef")
    for row, name, (_, count) in zip(axes, metrics, sizes, strict=True):
        measured, layers, tables = of_heads[name]
        steps = panels.spread_steps([reading.step for reading in measured], _MOST_STEPS)
        most = panels.largest(measured[-1], name)
        colours, low, high = panels.colour_range(tables, name, most)
        chosen = [pair for pair in zip(measured, tables, strict=True) if pair[0].step in steps]
        for panel, (reading, table) in zip(row, chosen, strict=False):
            image = panel.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto")
            panel.set_facecolor("#DDDDDD")  # shows where a head has no value
            panels.matrix_axes(panel, layers, count)
            if max(len(layers), count) <= 6:
                panels.annotate(panel, table, image)
            panels.caption(panel, next(letters), f"step {reading.step:,}")
        for panel in row[len(chosen) :]:
            panel.set_visible(False)
        bar = figure.colorbar(image, ax=list(row), pad=0.015, aspect=18)
        words = readings.text_of(name).label
        full = name == "attention_entropy" and math.isfinite(most)
        bar.set_label(f"{words}\n0 to uniform attention" if full else words, fontsize=9)
        bar.ax.tick_params(labelsize=8.5, length=2)
        bar.outline.set_visible(False)
    return figure
