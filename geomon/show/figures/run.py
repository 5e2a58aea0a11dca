"""Readings as matplotlib figures: the figure of a run, and small ones for loggers.

They are made of matplotlib's objects only: pyplot is not imported, no backend or setting changed.
"""

import os
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.record import Readings
from geomon.show import panels
from geomon.show.colours import LAYERS, ramp
from geomon.show.figures import axes


def geometry_figure(readings: Readings, *, title: str | None = None) -> Figure:
    """Draw a run in four panels.

    Intrinsic dimension over training and anisotropy over depth, after figures 2 to 4 of Razzhigaev
    et al. (2311.05928); cosine of mean query and mean key, and attention entropy, after figures 13
    and 15 of Godey et al. (2401.12143). The panel of a metric that was not measured says so.

    Args:
        readings: Readings of a run.
        title: Text above the panels; None for no title.
    """
    figure = axes.new_figure(10.4, 7.4)
    (first, second), (third, fourth) = figure.subplots(2, 2)
    missing = "twonn, twonn_distinct and gride: not measured"
    axes.draw_lines(first, panels.dimension_panel(readings), missing=missing)
    axes.draw_loss(first, readings)
    depth = panels.depth_panel(readings, "anisotropy")
    axes.draw_lines(second, depth, missing="anisotropy: not measured")
    layers = sorted({*readings.layers("qk_cosine"), *readings.layers("attention_entropy")})
    colours = ramp(LAYERS, len(layers))
    of_layer = dict(zip(layers, colours, strict=True))
    heads = panels.heads_panel(readings, "qk_cosine", of_layer)
    axes.draw_lines(third, heads, missing="qk_cosine of heads: not measured")
    entropy = panels.layers_panel(readings, "attention_entropy", of_layer)
    axes.draw_lines(fourth, entropy, missing="attention_entropy: not measured")
    many = panels.are_many_heads(readings, "qk_cosine")
    if layers:
        words = "layer" if many else "layer (c and d)"
        axes.colour_bar(fourth, [str(layer) for layer in layers], colours, words)
    captions = (
        f"{readings.text_of('twonn').title}, mean over layers",
        f"{readings.text_of('anisotropy').title} over depth",
        f"{readings.text_of('qk_cosine').title}{', all heads' if many else ' by head'}",
        f"{readings.text_of('attention_entropy').title} by layer",
    )
    for letter, words, panel in zip("abcd", captions, figure.axes, strict=False):
        axes.caption(panel, letter, words)
    if title is None and readings.mixed_at is not None:
        title = "Two runs wrote into this record at once: its curves mix both"
    if title:
        figure.suptitle(title, fontsize=13, x=0.012, ha="left")
    return figure


def title_of(readings: Readings) -> str | None:
    """Say in one line what was trained, how far, and what its loss was; None if nothing is known.

    Args:
        readings: Readings of a run.
    """
    if readings.mixed_at is not None or not len(readings):
        return None
    run = readings.runs[-1] if readings.runs else {}
    name = axes.literal(str(run.get("model", "")))
    parts = [name] if name else []
    if isinstance(run.get("parameters"), int):
        parts.append(f"{_rounded(run['parameters'])} parameters")
    if isinstance(run.get("layers"), list):
        parts.append(f"{len(run['layers'])} blocks")
    steps = sorted(reading.step for reading in readings)
    parts.append(f"steps {steps[0]:,} to {steps[-1]:,}")
    name, loss = panels.furthest_loss(readings)
    if len(loss):
        known = f" (step {loss.steps[-1]:,})" if loss.steps[-1] < steps[-1] else ""
        parts.append(f"{name} {loss.values[0]:.2f} → {loss.values[-1]:.2f}{known}")
    return ", ".join(parts)


def _rounded(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def card(panel: panels.Lines | panels.Matrix) -> Figure:
    """Draw a small figure of one panel, which reads at the size of a card in a logger.

    TensorBoard shows pictures in about 370 by 215 pixels: text of 9 points is then 10 pixels high.

    Args:
        panel: What to draw.
    """
    figure = Figure(figsize=(4.5, 2.75), dpi=160, layout="constrained")
    if isinstance(panel, panels.Matrix):
        axes.draw_matrix(figure.subplots(), panel)
    else:
        axes.draw_lines(figure.subplots(), panel, missing="", small=True)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file, whose folder is made and whose format follows its ending.

    Args:
        figure: Figure of matplotlib.
        path: Path of the file, for instance "geometry.png".

    Returns:
        Path of the file.

    Raises:
        ValueError: matplotlib cannot write files with that ending.
        OSError: The file cannot be written.
    """
    path = Path(path)
    if not path.suffix:  # matplotlib would choose one, and write another file
        raise ValueError("figures are written to a file that ends in .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=figure.get_facecolor())
    return path


def as_image(figure: Figure) -> NDArray[np.uint8]:
    """Render a figure as pixels, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
