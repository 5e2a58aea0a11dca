"""Draws metrics over layers: dimension by scale, profiles, maps and heads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from geomon.analysis.profile import bulge, peak_depth
from geomon.record import Readings
from geomon.show import collect
from geomon.show.colours import GREY
from geomon.show.figures import axes
from geomon.show.panels import NotMeasuredError, ends_and_middle

# Metrics that the figures show by default.
_PROFILES = ("twonn", "anisotropy")
_MAPS = ("twonn", "anisotropy", "cosine", "attention_entropy")
_HEADS = ("attention_entropy", "qk_cosine")
# Number of steps at which heads are drawn.
_MOST_OF_HEADS = 3


def dimension_figure(readings: Readings) -> Figure:
    """Draw the intrinsic dimension over training and by scale, after figure 2 of 2311.05928."""
    over, by_scale = collect.dimension_panel(readings), collect.scales_panel(readings)
    if not over.lines and not by_scale.lines:
        raise NotMeasuredError(
            "the intrinsic dimension (twonn, twonn_distinct, gride) was not measured in this run"
        )
    panels = [("Variants over training, mean over layers", over)]
    if by_scale.lines:
        title = readings.text_of("gride").title
        panels.append((f"{title} by scale, mean over layers", by_scale))
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
    names = _choose(metric, _MAPS, maps.get)
    panels = [(readings.text_of(name).title, map_) for name in names if (map_ := maps[name])]
    return axes.draw_grid(panels, columns=min(2, len(panels)), size=(5.6, 3.4))


def heads_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by layer and head at the first, middle and last step, on one colour scale."""
    wanted = [metric] if metric else _HEADS
    found = {name: collect.head_panels(readings, name, len(readings)) for name in wanted}
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
