"""Readings as matplotlib figures: the figure of a run, and small ones for loggers.

They are made of matplotlib's objects only: pyplot is not imported, no backend or setting changed.
"""

import os
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.record import Reading, Readings
from geomon.record.columns import MetricText
from geomon.show.figures import cards, panels
from geomon.show.figures.colours import LAYERS, darken


def geometry_figure(readings: Readings, *, title: str | None = None) -> Figure:
    """Draw a run in four panels.

    Intrinsic dimension over training and anisotropy over depth, after figures 2 to 4 of Razzhigaev
    et al. (2311.05928); cosine of mean query and mean key, and attention entropy, after figures 13
    and 15 of Godey et al. (2401.12143). The panel of a metric that was not measured says so.

    Args:
        readings: Readings of a run.
        title: Text above the panels; None for no title.
    """
    figure = panels.new_figure(10.4, 7.4)
    axes = figure.subplots(2, 2)
    panels.draw_dimension(axes[0, 0], readings)
    panels.draw_loss(axes[0, 0], readings)
    panels.draw_profile(axes[0, 1], readings, "anisotropy")
    layers = sorted({*readings.layers("qk_cosine"), *readings.layers("attention_entropy")})
    colours = dict(zip(layers, panels.colours_of(len(layers), LAYERS), strict=True))
    panels.draw_heads_over_training(axes[1, 0], readings, "qk_cosine", colours)
    panels.draw_layers_over_training(axes[1, 1], readings, "attention_entropy", colours)
    many = panels.are_many_heads(readings, "qk_cosine")
    if layers:
        words = "layer" if many else "layer (c and d)"
        panels.colour_bar(axes[1, 1], [str(layer) for layer in layers], LAYERS, words)
    captions = (
        f"{panels.capitalised(readings, 'twonn')}, mean over layers",
        f"{panels.capitalised(readings, 'anisotropy')} over depth",
        f"{panels.capitalised(readings, 'qk_cosine')}{', all heads' if many else ' by head'}",
        f"{panels.capitalised(readings, 'attention_entropy')} by layer",
    )
    for letter, words, panel in zip("abcd", captions, axes.flat, strict=True):
        panels.caption(panel, letter, words)
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
    name = panels.literal(str(run.get("model", "")))
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


def profile_figure(readings: Readings, metric: str = "anisotropy") -> Figure:
    """Draw a metric over depth at up to seven steps, as a small figure for loggers.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer.
    """
    figure = cards.card()
    panel = figure.subplots()
    panels.draw_profile(panel, readings, metric)
    panel.yaxis.label.set_fontsize(9)
    return figure


def heads_figure(reading: Reading, metric: str, *, text: MetricText | None = None) -> Figure:
    """Draw a metric of heads at one step as a matrix of layers and heads, for loggers.

    The scale of cosines is -1 to 1, that of the attention entropy 0 to that of uniform attention,
    where the two are known: pictures of several steps compare.

    Args:
        reading: Reading with the values.
        metric: Name of a metric with a value for each head.
        text: How its scale is named; None for the name of the metric.
    """
    layers, (table,) = panels.head_tables([reading], metric)
    rows, columns = table.shape
    width = min(max(2.6 + 0.55 * columns, 4.4), 8.5)
    height = min(max(1.3 + 0.32 * rows, 2.6), 8.5)
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    panel = figure.subplots()
    panel.set_title(f"step {reading.step}", loc="left", fontsize=10)
    if not np.isfinite(table).any():
        panels.show_message(panel, f"{metric} of heads: not measured")
        return figure
    colours, low, high = panels.colour_range(table, metric, panels.largest(reading, metric))
    image = panel.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto")
    panel.set_facecolor("#DDDDDD")  # shows where a head has no value
    panels.matrix_axes(panel, layers, columns)
    if rows <= panels.MAX_NAMED and columns <= panels.MAX_NAMED:
        panels.annotate(panel, table, image)
    bar = figure.colorbar(image, ax=panel, pad=0.02)
    bar.set_label((text or MetricText(metric)).label, fontsize=9)
    bar.ax.tick_params(labelsize=8.5, length=2)
    bar.outline.set_visible(False)
    return figure


def save(figure: Figure, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Write a figure to a file, whose folder is made and whose format follows its ending.

    Args:
        figure: Figure of matplotlib.
        path: Path of the file, for instance "geometry.png".
        dark: Whether the figure is changed into one for a dark page.

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
    if dark:
        darken(figure)
    figure.savefig(path, facecolor=figure.get_facecolor() if dark else "white")
    return path


def as_image(figure: Figure) -> NDArray[np.uint8]:
    """Render a figure as pixels, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
