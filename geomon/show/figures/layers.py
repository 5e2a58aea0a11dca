"""Metrics over layers: dimension by scale, profiles, maps, heads, spectra, drift against cosine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis import single_source
from geomon.analysis.profile import Correlation, bulge, correlate, peak_depth, profile_of
from geomon.record import Reading, Readings, tags
from geomon.show import collect
from geomon.show.colours import BLUE, GREY, LAYERS, STEPS, VERMILLION, ramp
from geomon.show.figures import axes
from geomon.show.panels import Line, Lines, NotMeasuredError

# What the figures show where no metric is asked for.
_PROFILES = ("twonn", "anisotropy")
_MAPS = ("twonn", "anisotropy", "cosine", "attention_entropy")
_HEADS = ("attention_entropy", "qk_cosine")
# Steps at which heads and spectra are drawn.
_MOST_OF_HEADS, _MOST_SPECTRA = 3, 7
_LEAST_SHARE = 1e-9  # of the variance: smaller eigenvalues are rounding


def dimension_figure(readings: Readings) -> Figure:
    """Draw the intrinsic dimension over training in all variants, and by scale at several steps.

    After figure 2 of Razzhigaev et al. (2311.05928).
    """
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
    """Draw metrics over depth at several steps.

    After figures 1 and 3 of Razzhigaev et al. (2311.05928) and figures 1 to 4 of Godey et al.
    (2401.12143).
    """
    panels = []
    for name in _choose(metric, _PROFILES, readings.layers):
        panel = collect.depth_panel(readings, name)
        last = [r for r in single_source(readings) if r.column(name).by_layer()][-1]
        profile = profile_of(last, name)
        if len(profile) > 1:
            ends = f"{peak_depth(profile):.2f}, bulge {axes.signed(bulge(profile))}"
            remarks = filter(None, (panel.remark, f"last step: peak at depth {ends}"))
            panel = replace(panel, remark="\n".join(remarks))
        panels.append((readings.text_of(name).label, panel))
    figure = axes.draw_grid(panels, columns=len(panels), size=(5.4, 4.2))
    axes.footnote(
        figure,
        "depth 0 is the first layer, 1 the last; bulge: (middle − ends) / ends, above 0 for a bell",
    )
    return figure


def map_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by layer and step as heat maps, with a column for each reading."""
    maps = {name: collect.map_panel(readings, name) for name in ([metric] if metric else _MAPS)}
    names = _choose(metric, _MAPS, maps.get)
    panels = [(readings.text_of(name).title, map_) for name in names if (map_ := maps[name])]
    return axes.draw_grid(panels, columns=min(2, len(panels)), size=(5.6, 3.4))


def heads_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics by head and layer at the first, a middle and the last step, on a fixed scale.

    The entropy of attention runs from 0 to that of uniform attention, cosines from -1 to 1, other
    metrics between their ends over the whole run.
    """
    wanted = [metric] if metric else _HEADS
    found = {name: collect.head_panels(readings, name, _MOST_OF_HEADS) for name in wanted}
    rows = [found[name] for name in _choose(metric, _HEADS, found.get, place=" of single heads")]
    layers, heads = np.max([next(iter(row.values())).values.shape for row in rows], axis=0)
    size = min(max(1.2 + 0.34 * heads, 2.5), 5.0) + 0.6, min(max(1.2 + 0.32 * layers, 2.4), 6.5)
    figure = axes.new_figure(_MOST_OF_HEADS * size[0], len(rows) * size[1])
    grid = figure.subplots(len(rows), _MOST_OF_HEADS, squeeze=False)
    for places, row in zip(grid, rows, strict=True):
        for place, (step, panel) in zip(places, row.items(), strict=False):
            mesh = axes.draw_matrix(place, panel)
            axes.caption(place, "", f"step {step:,}")
        for place in places[len(row) :]:
            place.set_visible(False)
        axes.add_bar(mesh, panel, places)
    return figure


def spectra_figure(readings: Readings) -> Figure:
    """Draw shares of the variance by rank: of each layer at the last step, of two over training."""
    by_step = collect.arrays_by_step(readings, "eigenvalues", _MOST_SPECTRA)
    if not by_step:
        raise NotMeasuredError(
            "no eigenvalues stand beside the record: a Monitor with arrays=True keeps them where "
            "effective_rank or participation_ratio is measured"
        )

    def panel(places: Sequence[tuple[int, int]], names: Sequence[int], by: str) -> Lines:
        colours = ramp(STEPS if by == "step" else LAYERS, len(names))
        shares = [_shares(readings, step, by_step[step], layer) for step, layer in places]
        lines = [
            Line(f"{name:,}", range(1, len(each) + 1), each.tolist(), colour, width=1.6)
            for name, each, colour in zip(names, shares, colours, strict=True)
        ]
        return Lines("share of the variance", lines, "rank", by, is_logarithmic=True)

    last = max(by_step)
    layers = collect.array_layers(by_step[last], "eigenvalues", readings)
    of_layers = panel([(last, layer) for layer in layers], layers, "layer")
    panels = [(f"Every layer at step {last:,}", of_layers)]
    for layer in dict.fromkeys([layers[len(layers) // 2], layers[-1]]):
        over = panel([(step, layer) for step in by_step], [*by_step], "step")
        panels.append((f"Layer {layer} over training", over))
    return axes.draw_grid(panels, columns=len(panels), size=(4.8, 4.2))


def _shares(
    readings: Readings, step: int, arrays: dict[str, NDArray[np.generic]], layer: int
) -> NDArray[np.float64]:
    """Eigenvalues as shares of the whole variance, of which a part may lie beyond those kept."""
    tag = tags.layer_tag("eigenvalues", layer)
    values = np.asarray(arrays.get(tag, []), dtype=np.float64)
    recorded = [
        reading.column("variance").at(layer)
        for reading in single_source(readings)
        if reading.step == step
    ]
    total = max([values.sum(), *recorded])
    return values[values > _LEAST_SHARE * total] / total


def drift_figure(readings: Readings) -> Figure:
    """Draw the norm of the mean row against the mean cosine across layers, with p-values.

    After figures 5 and 16 of Godey et al. (2401.12143).
    """
    for name in ("drift_norm", "cosine"):
        if not readings.layers(name):
            raise NotMeasuredError(f"{name} was not measured in this run")
    found = [
        (reading, correlate(reading.column("drift_norm"), reading.column("cosine")))
        for reading in single_source(readings)
    ]
    known = [
        (reading, each) for reading, each in found if each and math.isfinite(each["pearson"].value)
    ]
    if not known:
        raise NotMeasuredError(
            "the correlation of drift_norm and cosine needs 4 layers that vary or more"
        )
    figure = axes.new_figure(10.8, 4.3)
    across, over = figure.subplots(1, 2)
    _draw_layers(across, readings, *known[-1])
    axes.draw(over, _p_values(known, len(readings.layers("cosine"))))
    axes.caption(over, "b", "Two-sided p-value of the correlation over layers")
    return figure


def _draw_layers(
    place: Axes, readings: Readings, reading: Reading, found: dict[str, Correlation]
) -> None:
    drifts, cosines = (reading.column(name).by_layer() for name in ("drift_norm", "cosine"))
    layers = [layer for layer in cosines if layer in drifts]
    drift, cosine = ([each[layer] for layer in layers] for each in (drifts, cosines))
    place.plot(drift, cosine, color=GREY, lw=0.8, zorder=1)
    place.scatter(drift, cosine, c=ramp(LAYERS, len(layers)), s=46, zorder=2)
    for layer, x, y in zip(layers, drift, cosine, strict=True):
        place.annotate(
            str(layer), (x, y), xytext=(7, -11), textcoords="offset points", fontsize=8.5
        )
    axes.style_axes(place)
    place.margins(0.12)
    place.set_xlabel(readings.text_of("drift_norm").label, fontsize=10)
    place.set_ylabel(readings.text_of("cosine").label, fontsize=10)
    words = [
        f"{name.capitalize()} {axes.signed(each.value)}, p = {each.p_value:.2g}"
        for name, each in found.items()
    ]
    axes.caption(place, "a", f"A dot for each layer at step {reading.step:,}")
    place.text(0.03, 0.97, "\n".join(words), transform=place.transAxes, va="top", fontsize=9.5)


def _p_values(found: Sequence[tuple[Reading, dict[str, Correlation]]], layers: int) -> Lines:
    """Collect p-values over training, with the least that is possible where they are exact."""
    steps = [reading.step for reading, _ in found]
    lines = [
        Line(name.capitalize(), steps, [max(each[name].p_value, 1e-16) for _, each in found],
             colour, dash=dash)
        for name, colour, dash in (("spearman", BLUE, "solid"), ("pearson", VERMILLION, "dash"))
    ]  # fmt: skip
    is_exact = layers <= 9
    if is_exact:
        least = 2 / math.factorial(layers)
        words = f"least possible with {layers} layers: {least:.2g}"
        lines.append(Line(words, steps, [least] * len(steps), GREY, dash="dot", width=1.2))
    how = "exact, by permutations" if is_exact else "of normal series"
    return Lines(f"p-value, {how}", lines, null=(0.05, ".05"), is_logarithmic=True)


def _choose(
    metric: str | None,
    usual: Sequence[str],
    is_measured: Callable[[str], object],
    *,
    place: str = "",
) -> list[str]:
    """Choose the metrics of a figure: the one that is asked for, or the usual ones."""
    wanted = usual if metric is None else (metric,)
    found = [name for name in wanted if is_measured(name)]
    if not found:
        raise NotMeasuredError(f"{', '.join(wanted)}{place}: not measured in this run")
    return found
