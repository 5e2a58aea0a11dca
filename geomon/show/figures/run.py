"""Draws the figure of a run and small figures for loggers, and writes figures to files.

Figures are built without pyplot, so no backend and no setting of matplotlib changes.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.record import Readings
from geomon.show import collect
from geomon.show.figures import axes
from geomon.show.panels import Lines, Matrix


def geometry_figure(readings: Readings, *, title: str | None = None) -> Figure:
    """Draw a run in four panels.

    The panels show the intrinsic dimension over training and anisotropy over depth, after figures 2
    to 4 of Razzhigaev et al. (2311.05928), and the cosine of mean query and mean key and the
    attention entropy, after figures 13 and 15 of Godey et al. (2401.12143). The panel of a metric
    that was not measured says so.

    Args:
        readings: Readings of a run.
        title: Text above the panels. Defaults to None, for no title.

    Returns:
        The figure.
    """
    dimension = collect.dimension_panel(readings)
    entropy = collect.layers_panel(readings, "attention_entropy")
    names = {name: readings.text_of(name).title for name in ("anisotropy", "qk_cosine")}
    figure = axes.draw_grid(
        [
            (f"{dimension.label}, mean over layers", dimension),
            (f"{names['anisotropy']} over depth", collect.depth_panel(readings, "anisotropy")),
            (f"{names['qk_cosine']} by layer", collect.cosines_panel(readings)),
            (
                f"{readings.text_of('attention_entropy').title} by layer",
                replace(entropy, named_by="layer (c and d)"),
            ),
        ],
        columns=2,
        size=(5.2, 3.7),
    )
    if dimension.lines:
        axes.draw_loss(figure.axes[0], readings)
    if title is None and readings.mixed_at is not None:
        title = "Two runs wrote into this record at once: its curves mix both"
    if title:
        axes.title(figure, title)
    return figure


def title_of(readings: Readings) -> str | None:
    """Describe in one line the model, the steps and the loss of a run.

    Args:
        readings: Readings of a run.

    Returns:
        The line, or None if the readings are empty or come from two runs.
    """
    if readings.mixed_at is not None or not readings:
        return None
    run = readings.runs[-1] if readings.runs else {}
    count, layers = run.get("parameters"), run.get("layers")
    steps = sorted(reading.step for reading in readings)
    parts = [
        str(run.get("model", "")),
        f"{_rounded(count)} parameters" if isinstance(count, int) else "",
        f"{len(layers)} blocks" if isinstance(layers, list) else "",
        f"steps {steps[0]:,} to {steps[-1]:,}",
    ]
    name, loss = collect.furthest_loss(readings)
    if loss:
        known = f" (step {loss.steps[-1]:,})" if loss.steps[-1] < steps[-1] else ""
        parts.append(f"{name} {loss.values[0]:.2f} → {loss.values[-1]:.2f}{known}")
    return ", ".join(filter(None, parts))


def _rounded(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def card(panel: Lines | Matrix) -> Figure:
    """Draw one panel as a small figure that stays readable on a logger's page.

    TensorBoard shows pictures at about 370 by 215 pixels, where 9-point text is 10 pixels high.

    Args:
        panel: The panel to draw.
    """
    figure = Figure(figsize=(4.5, 2.75), dpi=160, layout="constrained")
    axes.draw(figure.subplots(), panel, legend="above")
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file in the format of its suffix, and create its folder if necessary.

    Args:
        figure: Matplotlib figure.
        path: Path of the file, for instance "geometry.png".

    Returns:
        Path of the file.

    Raises:
        ValueError: If matplotlib cannot write files with this suffix.
        OSError: If the file cannot be written.
    """
    path = Path(path)
    if not path.suffix:  # matplotlib would add a suffix and write another file
        raise ValueError("figures are written to a file that ends in .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def as_image(figure: Figure) -> NDArray[np.uint8]:
    """Render a figure as pixels, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
