"""Readings as matplotlib figures, for papers, pages and loggers."""

from geomon.show.figures.run import (
    as_image,
    geometry_figure,
    heads_figure,
    profile_figure,
    save,
)

__all__ = ["as_image", "geometry_figure", "heads_figure", "profile_figure", "save"]
