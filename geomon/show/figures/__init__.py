"""Draws readings as matplotlib figures for papers, pages and loggers."""

from geomon.advice import to_install

try:
    import matplotlib  # noqa: F401  (every file of this folder needs it)
except ImportError as error:
    raise ImportError(f"figures need matplotlib: {to_install('figures')}") from error

from geomon.show.figures.kinds import KINDS, TAKES_METRIC, draw
from geomon.show.figures.run import as_image, card, compare_figure, geometry_figure, save

__all__ = [
    "KINDS",
    "TAKES_METRIC",
    "as_image",
    "card",
    "compare_figure",
    "draw",
    "geometry_figure",
    "save",
]
