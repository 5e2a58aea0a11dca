"""Heat maps: a metric by layer and step, and by head and layer at several steps."""

import math

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures import axes
from geomon.show.panels import head_panels, map_panel, null_of

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
    metrics = axes.choose_metrics(metric, _BY_LAYER, readings.layers)
    columns = min(2, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = axes.new_figure(0.4 + 5.4 * columns, 0.5 + 3.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for letter, panel, name in zip("abcd", grid.flat, metrics, strict=False):
        if (drawn := map_panel(readings, name)) is None:
            axes.show_message(panel, f"{name}: not measured")
        else:
            axes.draw_matrix(panel, drawn, label=False)
        axes.caption(panel, letter, readings.text_of(name).label)
    for panel in list(grid.flat)[len(metrics) :]:
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
    of_heads = {name: head_panels(readings, name, _MOST_STEPS) for name in wanted}
    metrics = axes.choose_metrics(metric, _BY_HEAD, of_heads.get, place=" of single heads")
    sizes = [next(iter(of_heads[name].values())).values.shape for name in metrics]
    tall = [min(max(1.2 + 0.32 * layers, 2.4), 6.5) for layers, _ in sizes]
    width = min(max(1.2 + 0.34 * max(count for _, count in sizes), 2.5), 5.0)
    figure = axes.new_figure(1.6 + _MOST_STEPS * width, 0.6 + sum(tall))
    grid = figure.subplots(len(metrics), _MOST_STEPS, squeeze=False, height_ratios=tall)
    letters = iter("abcdef")
    for row, name in zip(grid, metrics, strict=True):
        for panel, (step, drawn) in zip(row, of_heads[name].items(), strict=False):
            mesh = axes.draw_matrix(panel, drawn, bar=False)
            axes.caption(panel, next(letters), f"step {step:,}")
        for panel in row[len(of_heads[name]) :]:
            panel.set_visible(False)
        words = readings.text_of(name).label
        if name == "attention_entropy" and null_of(readings, name):
            words += "\n0 to uniform attention"
        axes.name_bar(figure.colorbar(mesh, ax=list(row), pad=0.015, aspect=18), words)
    return figure
