"""Draws readings as matplotlib figures for papers, pages and loggers."""

try:
    import matplotlib  # noqa: F401  (every file of this folder needs it)
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'geomon[figures]'") from error

from geomon.show.figures.kinds import KINDS, TAKES_METRIC, draw
from geomon.show.figures.run import as_image, card, geometry_figure, save

__all__ = ["KINDS", "TAKES_METRIC", "as_image", "card", "draw", "geometry_figure", "save"]
