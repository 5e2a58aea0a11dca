"""Colours of the figures: Okabe and Ito's, colour maps for steps and layers, and a dark page."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, VERMILLION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
PURPLE = "#A8488A"  # darker than theirs: it is that of a thin line
# Viridis (for steps) and plasma (for layers) without their pale ends, which vanish on white.
STEPS = LinearSegmentedColormap.from_list(
    "steps", ["#440154", "#404387", "#29788E", "#22A784", "#79D151", "#C2C21D"]
)
LAYERS = LinearSegmentedColormap.from_list(
    "layers", ["#0D0887", "#6A00A8", "#B12A90", "#E16462", "#F3A03A"]
)
GRID = "#E6E6E6"
# What lies beyond the scale of a map, in no colour of the scale.
BEYOND = "#D9CBE8"
# The group of what stands on a coloured field: it keeps its colour on a dark page.
ON_FIELD = "on a coloured field"

# Grey of a dark page and of the ink on it, 0 for black.
_DARK_PAPER, _DARK_INK = 0.075, 0.93
# Luminance below which a colour is mixed with white on a dark page, and how far at most.
_DIM, _MOST_WHITE = 0.5, 0.55


def darken(figure: Figure) -> None:
    """Change the colours of a figure for a dark page: greys are turned, dim colours lightened.

    Colours of continuous heat maps stay, since their scale is read off the bar beside them.

    Args:
        figure: Figure that is drawn in its colours for a white page.
    """
    figure.patch.set_facecolor(_on_dark("white"))
    for artist in figure.findobj():
        if artist is not figure.patch and artist.get_gid() != ON_FIELD:
            _darken_one(artist)
    # Ticks that are made when the figure is drawn get these colours too.
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ink = axis.label.get_color()
            axis.set_tick_params(which="both", colors=ink, grid_color=_on_dark(GRID))


def _darken_one(artist: Artist) -> None:
    if isinstance(artist, Text):
        artist.set_color(_on_dark(artist.get_color()))
        for part in (artist.get_bbox_patch(), getattr(artist, "arrow_patch", None)):
            if part is not None:
                _darken_one(part)
    elif isinstance(artist, Line2D):
        edge, face = artist.get_markeredgecolor(), artist.get_markerfacecolor()
        artist.set_color(_on_dark(artist.get_color()))
        artist.set_markeredgecolor(_on_dark(edge))
        artist.set_markerfacecolor(_on_dark(face))
    elif isinstance(artist, Patch):
        edge, face = artist.get_edgecolor(), artist.get_facecolor()
        artist.set_facecolor(_on_dark(face))
        artist.set_edgecolor(_on_dark(edge))
    elif isinstance(artist, Collection):
        if artist.get_array() is None:
            for get, put in (
                (artist.get_facecolor, artist.set_facecolor),
                (artist.get_edgecolor, artist.set_edgecolor),
            ):
                put([_on_dark(colour) for colour in np.atleast_2d(get())])
        elif isinstance(artist.cmap, ListedColormap) and artist.cmap.N <= 64:
            listed = [_on_dark(colour) for colour in artist.cmap(np.arange(artist.cmap.N))]
            artist.set_cmap(ListedColormap(listed))


def _on_dark(colour: Any) -> tuple[float, float, float, float] | str:
    """Choose the colour on a dark page that stands for one on a white page."""
    if isinstance(colour, str) and colour in ("none", "auto"):
        return colour
    red, green, blue, alpha = to_rgba(colour)
    if alpha == 0:
        return "none"
    if max(red, green, blue) - min(red, green, blue) < 0.02:
        grey = _DARK_INK + (_DARK_PAPER - _DARK_INK) * red
        return grey, grey, grey, alpha
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    white = _MOST_WHITE * max(0.0, 1 - luminance / _DIM)
    lighter = (part + (1 - part) * white for part in (red, green, blue))
    return (*lighter, alpha)  # type: ignore[return-value]
