"""The longer training in four panels."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from geomon import Readings
from geomon.analysis import Curve, curve_of
from geomon.analysis.curves import training_curve
from recipes.long_run.changes import DEMO_STEPS, DIMENSIONS, nearest, value_curve
from recipes.study.drawing import BLUE, GREEN, GREY, IN_ORDER, ORANGE, label_panel

_SCALES = (1, 2, 4, 8, 16, 32)
# Steps at which the dimension is drawn over scales; the nearest readings are taken.
_PROFILES = (0, 128, DEMO_STEPS)


def long_run_figure(readings: Readings) -> Figure:
    """Draw dimension, its scales, validation and anisotropy over a long training.

    Args:
        readings: Readings of a run.
    """
    figure = Figure(figsize=(11.0, 7.6), dpi=90, layout="constrained")
    axes = figure.subplots(2, 2)
    names = list(DIMENSIONS)
    _draw(
        axes[0, 0],
        [
            (names[0], BLUE, value_curve(readings, names[0])),
            (names[1], ORANGE, value_curve(readings, names[1])),
            ("Gride, scale 32", GREEN, curve_of(readings, "gride", part="k32")),
        ],
    )
    _log_dimension(axes[0, 0])
    label_panel(axes[0, 0], "a", "Intrinsic dimension", "dimension, mean over layers (log)")
    _draw_scales(axes[0, 1], readings)
    _draw(axes[1, 0], [("", BLUE, training_curve(readings))])
    label_panel(axes[1, 0], "c", "Loss of the batch at each reading", "nats per character")
    layers = [layer for layer in readings.layers("anisotropy") if layer > 0]
    _draw(
        axes[1, 1],
        [
            (
                f"layer {layer}", IN_ORDER[index % len(IN_ORDER)],
                curve_of(readings, "anisotropy", layer=layer),
            )
            for index, layer in enumerate(layers)
        ],
    )  # fmt: skip
    label_panel(axes[1, 1], "d", "Anisotropy", "share of variance in the first direction")
    return figure


def _draw(panel: Axes, lines: Sequence[tuple[str, str, Curve]]) -> None:
    """Draw curves over training with their intervals, and mark the end of the demo."""
    drawn = [line for line in lines if len(line[2])]
    for label, colour, curve in drawn:
        panel.plot(curve.steps, curve.values, color=colour, lw=2, label=label)
        low, high = (
            [
                value + sign * margin
                for value, margin in zip(curve.values, curve.margins, strict=True)
            ]
            for sign in (-1, 1)
        )
        panel.fill_between(curve.steps, low, high, color=colour, alpha=0.18, lw=0)
    steps = sorted({step for _, _, curve in drawn for step in curve.steps})
    after = next((step for step in steps if step > 0), 1)
    panel.set_xscale("symlog", linthresh=after, linscale=0.4)
    last = steps[-1] if steps else 1
    panel.set_xlim(0, last * 1.15)
    panel.set_xticks([0, *(10**power for power in range(1, 8) if after <= 10**power <= last)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    panel.set_xlabel("training step (logarithmic)")
    if last > DEMO_STEPS:
        panel.axvline(DEMO_STEPS, color=GREY, lw=1, ls=":")
        panel.annotate(
            "end of the demo", (DEMO_STEPS, 0.02), xycoords=("data", "axes fraction"),
            xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right", va="bottom",
            fontsize=8, color=GREY,
        )  # fmt: skip
    if len(drawn) > 1:
        panel.legend(fontsize=9, frameon=False)


def _draw_scales(panel: Axes, readings: Readings) -> None:
    """Draw the dimension over the scale, one line for each of a few steps."""
    curves = {k: curve_of(readings, "gride", part=f"k{k}") for k in _SCALES}
    curves = {k: curve for k, curve in curves.items() if len(curve)}
    steps = next((curve.steps for curve in curves.values()), [])
    chosen = {steps[nearest(steps, step)] for step in _PROFILES if steps} | set(steps[-1:])
    for colour, step in zip(IN_ORDER, sorted(chosen), strict=False):
        found = [
            (k, curve, curve.steps.index(step))
            for k, curve in curves.items()
            if step in curve.steps
        ]
        panel.errorbar(
            [k for k, _, _ in found],
            [curve.values[index] for _, curve, index in found],
            [curve.margins[index] for _, curve, index in found],
            color=colour, lw=2, marker="o", ms=4, capsize=2, elinewidth=1,
            label=f"step {step:,}",
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(_SCALES, [str(k) for k in _SCALES])
    panel.set_xlabel("scale k (Gride: distances to the k-th and 2k-th neighbours)")
    _log_dimension(panel)
    if chosen:
        panel.legend(fontsize=9, frameon=False)
    label_panel(
        panel, "b", "Dimension by scale, with 95 % intervals", "dimension, mean over layers (log)"
    )


def _log_dimension(panel: Axes) -> None:
    panel.set_yscale("log")
    ticks = [2, 3, 5, 7, 10, 20, 30]
    panel.set_yticks(ticks, [str(tick) for tick in ticks])
    panel.yaxis.set_minor_locator(NullLocator())
