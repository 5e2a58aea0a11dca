"""Draws metrics over layers: dimension by scale, profiles, maps, heads and cosines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis import bulge, heads_limit, peak_depth
from geomon.record import Readings
from geomon.show import collect
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Line, Lines, NotMeasuredError, ends_and_middle, spread_items

# Metrics that the figures show by default.
_PROFILES = ("twonn", "anisotropy")
_MAPS = ("twonn", "anisotropy", "cosine", "attention_entropy")
_HEADS = ("attention_entropy", "qk_cosine")
# Number of steps at which heads are drawn.
_MOST_OF_HEADS = 3
# Largest number of layers whose cosines are drawn, each in its own panel.
_MOST_LAYERS = 12


def dimension_figure(readings: Readings) -> Figure:
    """Draw the intrinsic dimension over training and by scale, after figure 2 of 2311.05928."""
    over, by_scale = collect.dimension_panel(readings), collect.scales_panel(readings)
    if not over.lines and not by_scale.lines:
        raise NotMeasuredError(
            "the intrinsic dimension (twonn, twonn_distinct, gride) was not measured in this run"
        )
    panels = [("Variants over training, mean over layers", over)]
    if by_scale.lines:
        panels.append((f"{readings.text_of('gride').title} by scale, mean over layers", by_scale))
    figure = axes.draw_grid(panels, columns=len(panels), size=(5.6, 4.3))
    if over.lines:
        axes.draw_loss(figure.axes[0], readings)
    return figure


def profiles_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics over depth at several steps, after figures of 2311.05928 and 2401.12143."""
    panels = []
    for name in _choose(metric, _PROFILES, readings.layers):
        panel = collect.depth_panel(readings, name)
        profile = panel.lines[-1].y
        if len(profile) > 1:
            bent = bulge(profile)
            said = f", bulge {bent:+.2f}".replace("-", "−") * math.isfinite(bent)
            peak = f"last step: peak at depth {peak_depth(profile):.2f}{said}"
            panel = replace(panel, remark="\n".join(filter(None, (panel.remark, peak))))
        panels.append((readings.text_of(name).label, panel))
    figure = axes.draw_grid(panels, columns=len(panels), size=(5.4, 4.2))
    figure.supxlabel(
        "depth 0 is the first layer that is drawn, 1 the last;\n"
        "bulge: (middle − ends) / ends, above 0 for a bell",
        fontsize=8.5,
        color=GREY,
    )
    return figure


def map_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics as heat maps with a row per layer and a column per reading."""
    maps = {name: collect.map_panel(readings, name) for name in ([metric] if metric else _MAPS)}
    panels = [
        (readings.text_of(name).title, panel)
        for name in _choose(metric, _MAPS, maps.get)
        if (panel := maps[name])
    ]
    return axes.draw_grid(panels, columns=min(2, len(panels)), size=(5.6, 3.4))


def heads_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by layer and head at the first, middle and last step, on one colour scale."""
    found = {
        name: collect.head_panels(readings, name, len(readings))
        for name in ([metric] if metric else _HEADS)
    }
    rows = [found[name] for name in _choose(metric, _HEADS, found.get, place=" of single heads")]
    layers, heads = np.max([next(iter(row.values())).values.shape for row in rows], axis=0)
    size = min(max(1.2 + 0.4 * heads, 2.5), 6.0) + 0.6, min(max(1.2 + 0.32 * layers, 2.4), 6.5)
    figure = axes.new_figure(_MOST_OF_HEADS * size[0], len(rows) * size[1])
    grid = figure.subplots(len(rows), _MOST_OF_HEADS, squeeze=False)
    for places, row in zip(grid, rows, strict=True):
        steps = ends_and_middle([*row])
        for place, step in zip(places, steps, strict=False):
            mesh = axes.draw_matrix(place, row[step])
            axes.caption(place, "", f"step {step:,}")
        for place in places[len(steps) :]:
            place.set_visible(False)
        axes.add_bar(mesh, row[steps[-1]], places)
    return figure


def cosines_figure(readings: Readings, metric: str = "qk_cosine") -> Figure:
    """Draw a metric of heads over training, with one panel per layer.

    `qk_cosine` gets a 95 % band of random directions, after figures 13 and 14 of Godey et al.
    (2401.12143).
    """
    selected, layers, table = collect.measured_heads(readings, metric)
    if not selected:
        raise NotMeasuredError(f"{metric} of single heads was not measured in this run")
    limit = heads_limit(selected[-1]) if metric == "qk_cosine" else math.nan
    label, has_limit = readings.text_of(metric).label, math.isfinite(limit)
    chance = (-limit, limit, "chance: all heads within, with a probability of 95 %")
    steps = [reading.step for reading in selected]
    low, high = min(0.0, np.nanmin(table)), max(0.0, np.nanmax(table))
    ends = (1.05 * low, 1.05 * high) if high > low else (0.0, 1.0)  # all panels share their axis
    shown = spread_items(range(len(layers)), _MOST_LAYERS)
    panels = [
        (
            f"layer {layers[row]}",
            Lines(
                label,
                [
                    Line("", steps, line.tolist(), _side_colour(line[-1], limit), width=1.2)
                    for line in table[:, row].T
                ],
                usual=chance if has_limit else None,
                ends=(-1.05, 1.05) if metric == "qk_cosine" else ends,
            ),
        )
        for row in shown
    ]
    figure = axes.draw_grid(panels, columns=min(4, len(panels)), size=(3.1, 2.7), share=True)
    some = f"; {len(shown)} of {len(layers)} layers are drawn" if len(shown) < len(layers) else ""
    last = table[-1][np.isfinite(table[-1])]
    said = (
        _count_of_heads(last, limit)
        if has_limit
        else f"{label}: a line for each of {last.size} heads"
    )
    axes.title(figure, said + some)
    return figure


def _side_colour(value: float, limit: float) -> str:
    """Colour a head by whether it ends above, below or within the chance limit (0 if unknown)."""
    limit = limit if math.isfinite(limit) else 0.0
    return VERMILLION if value > limit else BLUE if value < -limit else GREY


def _count_of_heads(cosines: NDArray[np.float64], limit: float) -> str:
    similar, opposite = (cosines > limit).sum(), (cosines < -limit).sum()
    return (
        f"{cosines.size} heads at the end: {similar} similar (orange), {opposite} opposite "
        f"(blue), {cosines.size - similar - opposite} within chance (±{limit:.2f})"
    )


def _choose(
    metric: str | None,
    usual: Sequence[str],
    is_measured: Callable[[str], object],
    *,
    place: str = "",
) -> list[str]:
    """Choose the metrics of a figure: the requested one, or the default ones that were measured."""
    wanted = usual if metric is None else (metric,)
    found = [name for name in wanted if is_measured(name)]
    if not found:
        raise NotMeasuredError(f"{', '.join(wanted)}{place}: not measured in this run")
    return found
