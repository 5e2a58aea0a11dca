"""Small figures of one panel, which read at the size of a card in a logger."""

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures import panels

# Metrics of which the card of the intrinsic dimension is drawn.
DIMENSIONS = ("twonn", "twonn_distinct", "gride")


def card() -> Figure:
    """Make an empty figure of the size of a card.

    TensorBoard shows pictures in about 370 by 215 pixels: text of 9 points is then 10 pixels high.
    """
    return Figure(figsize=(4.5, 2.75), dpi=160, layout="constrained")


def dimension_figure(readings: Readings) -> Figure:
    """Draw the intrinsic dimension over training with its 95 % intervals, as a card.

    Args:
        readings: Readings of a run.
    """
    figure = card()
    panels.draw_dimension(figure.subplots(), readings, legend_above=True)
    return figure


def layers_figure(readings: Readings, metric: str) -> Figure:
    """Draw a metric at every layer and step as a map of colours from 0, as a card.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
    """
    figure = card()
    panels.draw_layer_map(figure.subplots(), readings, metric)
    return figure


__all__ = ["DIMENSIONS", "card", "dimension_figure", "layers_figure"]
