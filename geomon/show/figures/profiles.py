"""Metrics over depth at several steps, the dimension by variant and scale, drift against cosine."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from geomon.analysis import single_source
from geomon.analysis.profile import Correlation, bulge, correlate, peak_depth, profile_of
from geomon.record import Reading, Readings
from geomon.show import panels
from geomon.show.colours import BLUE, GREY, LAYERS, STEPS, VERMILLION, ramp
from geomon.show.figures import axes

# What the profiles figure shows where no metric is asked for.
_PROFILES = ("twonn", "anisotropy")


def dimension_figure(readings: Readings) -> Figure:
    """Draw the intrinsic dimension over training in all variants, and by scale at several steps.

    After figure 2 of Razzhigaev et al. (2311.05928).

    Args:
        readings: Readings of a run.

    Raises:
        NotMeasuredError: No variant was measured.
    """
    if not any(reading.columns.keys() & panels.DIMENSIONS.keys() for reading in readings):
        raise panels.NotMeasuredError(
            "the intrinsic dimension (twonn, twonn_distinct, gride) was not measured in this run"
        )
    by_scale = _dimension_by_scale(readings)
    figure = axes.new_figure(11.0 if by_scale else 6.4, 4.3)
    first, *rest = figure.subplots(1, 2 if by_scale else 1, squeeze=False)[0]
    axes.draw_lines(first, panels.dimension_panel(readings), missing="not measured")
    axes.draw_loss(first, readings)
    axes.caption(first, "a", "Variants over training, mean over layers")
    for second in rest:
        _draw_scales(second, by_scale, readings.text_of("gride").label)
        title = readings.text_of("gride").title
        axes.caption(second, "b", f"{title} by scale, mean over layers")
    return figure


def profiles_figure(readings: Readings, metric: str | None = None) -> Figure:
    """Draw metrics over depth at several steps.

    After figures 1 and 3 of Razzhigaev et al. (2311.05928) and figures 1 to 4 of Godey et al.
    (2401.12143).

    Args:
        readings: Readings of a run.
        metric: Name of a metric with a value at each layer; None for the dimension and the
            anisotropy.

    Raises:
        NotMeasuredError: No such metric was measured.
    """
    metrics = axes.choose_metrics(metric, _PROFILES, readings.layers)
    figure = axes.new_figure(0.6 + 5.2 * len(metrics), 4.2)
    row = figure.subplots(1, len(metrics), squeeze=False)[0]
    for letter, panel, name in zip("ab", row, metrics, strict=False):
        missing = f"{name}: not measured"
        axes.draw_lines(panel, panels.depth_panel(readings, name), missing=missing)
        if len(readings.layers(name)) > 1:
            profile = profile_of(axes.last_with(readings, name), name)
            words = f"peak at depth {peak_depth(profile):.2f}, bulge {bulge(profile):+.2f}"
            axes.caption(panel, letter, f"At the last step: {words.replace('-', '−')}")
    figure.supxlabel(
        "depth 0 is the first layer, 1 the last; bulge: (middle − ends) / ends, above 0 for a bell",
        fontsize=8.5, color=GREY,
    )  # fmt: skip
    return figure


def drift_figure(readings: Readings) -> Figure:
    """Draw the norm of the mean row against the mean cosine across layers, with p-values.

    After figures 5 and 16 of Godey et al. (2401.12143).

    Args:
        readings: Readings of a run.

    Raises:
        NotMeasuredError: `drift_norm` or `cosine` was not measured, or at fewer than 4 layers.
    """
    for name in ("drift_norm", "cosine"):
        if not readings.layers(name):
            raise panels.NotMeasuredError(f"{name} was not measured in this run")
    found = [
        (reading, correlate(reading.column("drift_norm"), reading.column("cosine")))
        for reading in single_source(readings)
    ]
    known = [
        (reading, each) for reading, each in found if each and math.isfinite(each["pearson"].value)
    ]
    if not known:
        raise panels.NotMeasuredError(
            "the correlation of drift_norm and cosine needs 4 layers that vary or more"
        )
    figure = axes.new_figure(10.8, 4.3)
    across, over = figure.subplots(1, 2)
    _draw_layers(across, readings, *known[-1])
    _draw_p_values(over, known, len(readings.layers("cosine")))
    axes.caption(over, "b", "Two-sided p-value of the correlation over layers")
    return figure


def _draw_layers(
    panel: Axes, readings: Readings, reading: Reading, found: Mapping[str, Correlation]
) -> None:
    drifts = reading.column("drift_norm").by_layer()
    layers = [layer for layer in reading.column("cosine").by_layer() if layer in drifts]
    columns = (reading.column(name) for name in ("drift_norm", "cosine"))
    drift, cosine = ([column.at(layer) for layer in layers] for column in columns)
    panel.plot(drift, cosine, color=GREY, lw=0.8, zorder=1)
    colours = [axes.ink(colour) for colour in ramp(LAYERS, len(layers))]
    panel.scatter(drift, cosine, c=colours, s=46, zorder=2)
    for layer, x, y in zip(layers, drift, cosine, strict=True):
        panel.annotate(
            str(layer), (x, y), xytext=(7, -11), textcoords="offset points", fontsize=8.5
        )
    axes.plain(panel)
    panel.margins(0.12)
    panel.set_xlabel(readings.text_of("drift_norm").label, fontsize=10)
    panel.set_ylabel(readings.text_of("cosine").label, fontsize=10)
    words = [
        f"{name.capitalize()} {each.value:+.2f}, p = {each.p_value:.2g}"
        for name, each in found.items()
    ]
    axes.caption(panel, "a", f"A dot for each layer at step {reading.step:,}")
    panel.text(
        0.03, 0.97, "\n".join(words).replace("-0", "−0"), transform=panel.transAxes, va="top",
        fontsize=9.5,
    )  # fmt: skip


def _draw_p_values(
    panel: Axes, found: Sequence[tuple[Reading, Mapping[str, Correlation]]], layers: int
) -> None:
    smallest = 2 / math.factorial(layers) if layers <= 9 else 0.0
    lowest, steps = 0.05, [reading.step for reading, _ in found]
    axis = panels.StepAxis(steps)
    for name, colour in (("spearman", BLUE), ("pearson", VERMILLION)):
        values = [max(each[name].p_value, 1e-16) for _, each in found]
        lowest = min([lowest, *values])
        style: axes.Style = {"marker": "o", "ms": 3.5, "ls": "-" if colour == BLUE else "--"}
        panel.plot(axis.places(steps), values, color=colour, label=name.capitalize(), **style)
    axes.step_axis(panel, axis)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.axhline(0.05, color=GREY, lw=1, ls=":")
    panel.text(
        0.99, 0.05, ".05 ", transform=panel.get_yaxis_transform(), ha="right", va="bottom",
        fontsize=8.5, color=GREY,
    )  # fmt: skip
    if smallest > 0:
        lowest = min(lowest, smallest)
        panel.axhline(smallest, color=GREY, lw=1, ls="--")
        panel.text(
            0.01, 0.9 * smallest, f" least possible with {layers} layers: {smallest:.2g}", va="top",
            transform=panel.get_yaxis_transform(), fontsize=8.5, color=GREY,
        )  # fmt: skip
    panel.set_ylim(lowest / 2.5, 2.5)
    how = "exact, by permutations" if smallest else "of normal series"
    panel.set_ylabel(f"p-value ({how}; logarithmic)", fontsize=10)
    axes.legend(panel)


def _dimension_by_scale(readings: Readings) -> dict[int, dict[int, float]]:
    """Mean dimension by scale, for a few steps."""
    found = {}
    for reading in single_source(readings):
        gride = reading.column("gride")
        by_scale = {
            scale: value
            for scale in panels.scales_of([reading])
            if math.isfinite(value := gride.parts[f"k{scale}"].mean)
        }
        if len(by_scale) > 1:
            found[reading.step] = by_scale
    return {step: found[step] for step in panels.spread_steps(list(found))}


def _draw_scales(panel: Axes, by_step: dict[int, dict[int, float]], label: str) -> None:
    colours = ramp(STEPS, len(by_step))
    for colour, by_scale in zip(colours, by_step.values(), strict=True):
        panel.plot(
            [*by_scale], [*by_scale.values()], color=axes.ink(colour), marker="o", ms=3.5, lw=1.8
        )
    axes.plain(panel)
    scales = sorted({scale for by_scale in by_step.values() for scale in by_scale})
    panel.set_xscale("log", base=2)
    panel.set_xticks(scales)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:.0f}"))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("scale k: distances to neighbours k and 2k (logarithmic)", fontsize=10)
    panel.set_ylabel(label, fontsize=10)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=7))
    axes.colour_bar(panel, [f"{step:,}" for step in by_step], colours, "step")


__all__ = ["dimension_figure", "drift_figure", "profiles_figure"]
