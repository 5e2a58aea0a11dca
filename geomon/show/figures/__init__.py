"""Readings as matplotlib figures, for papers, pages and loggers."""

from geomon.show.figures.kinds import KINDS, draw
from geomon.show.figures.run import (
    as_image,
    geometry_figure,
    heads_figure,
    profile_figure,
    save,
)

__all__ = ["KINDS", "as_image", "draw", "geometry_figure", "heads_figure", "profile_figure", "save"]
