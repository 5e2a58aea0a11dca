"""Pictures that are small enough to be kept beside the code."""

import io
import os
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

# Colours of a picture in its file: lines, their mixtures with bands, and the edges of letters.
_COLOURS = 96


def save_small(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as a PNG of few colours, about a third of the usual size.

    Args:
        figure: Figure of matplotlib.
        path: Path of the file, whose folder is made.

    Returns:
        Path of the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    # Median cut gives large areas of one colour their own; dots of other colours look like noise.
    image = Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(path, format="PNG", optimize=True)
    return path
