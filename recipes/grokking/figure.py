"""The curves of all trainings in one figure."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from recipes.grokking.leads import Course, alarm
from recipes.study import estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_BLUE, _ORANGE = "#0072B2", "#D55E00"
_GREY = "#767676"


def draw(
    runs: Sequence[Course], controls: Sequence[Course], *, fraction: float, control_fraction: float
) -> Figure:
    """Draw accuracy, effective rank and local dimension over training, one panel each.

    Args:
        runs: Trainings on enough pairs to generalise.
        controls: Trainings on too few.
        fraction: Share of the pairs that `runs` train on.
        control_fraction: Share of the pairs that `controls` train on.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, hspace=0.05)
    figure = Figure(figsize=(8.2, 8.6), dpi=110, layout=layout)
    panels = figure.subplots(3, 1, sharex=True)
    groups = (
        (runs, _BLUE, f"{fraction:.0%} of the pairs: generalises"),
        (controls, _ORANGE, f"{control_fraction:.0%} of the pairs: control"),
    )
    rows: tuple[tuple[str, str, Callable[[Course], Sequence[float]]], ...] = (
        ("", "accuracy on\nheld-out pairs", lambda course: course.held_out_accuracy),
        (
            "effective_rank_last", "effective rank at the last token\n(training pairs, last layer)",
            lambda course: course.curves["effective_rank_last"],
        ),
        (
            "local_dimension", "mean local dimension\n(training pairs, last layer)",
            lambda course: course.curves["local_dimension"],
        ),
    )  # fmt: skip
    for panel, (name, label, values) in zip(panels, rows, strict=True):
        for courses, colour, words in groups:
            _draw_group(panel, courses, values, colour, words)
        for run in runs:
            if name and (step := alarm(run, controls, name, margin=0.0)) is not None:
                value = values(run)[list(run.steps).index(step)]
                panel.plot([step], [value], "v", color="black", ms=7, mec="white", zorder=6)
            if (step := run.generalised()) is not None:
                panel.axvline(step, color=_BLUE, lw=0.9, ls=":", zorder=0)
        panel.set_ylabel(label, fontsize=10)
        panel.set_ylim(0, None if name else 1.05)
        _plain(panel)
    _legend(panels[0], len(runs), len(controls))
    panels[2].set_xlabel("training step", fontsize=10)
    panels[2].xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    return figure


def _draw_group(
    panel: Axes,
    courses: Sequence[Course],
    values: Callable[[Course], Sequence[float]],
    colour: str,
    label: str,
) -> None:
    """Draw each training thin, and their mean with its interval where all of them go on."""
    for course in courses:
        panel.plot(course.steps, values(course), color=colour, lw=0.7, alpha=0.65)
    common = sorted(set.intersection(*(set(course.steps) for course in courses)))
    table = np.array(
        [[dict(zip(c.steps, values(c), strict=True))[s] for s in common] for c in courses]
    )
    known = [number for number in range(len(common)) if np.isfinite(table[:, number]).all()]
    means = [estimate(table[:, number].tolist()) for number in known]
    steps = [common[number] for number in known]
    panel.plot(steps, [mean.mean for mean in means], color=colour, lw=2.4, label=label)
    if all(math.isfinite(mean.margin) for mean in means):
        low, high = [mean.low for mean in means], [mean.high for mean in means]
        panel.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9.5, length=3)
    panel.grid(axis="y", color="#E6E6E6", lw=0.7)
    panel.set_axisbelow(True)


def _legend(panel: Axes, runs: int, controls: int) -> None:
    panel.plot([], [], color=_BLUE, lw=0.9, ls=":", label="a run answers half of them")
    below = "below all that the controls\nhave had until then"
    panel.plot([], [], "v", color="black", ms=7, mec="white", ls="", label=below)
    if runs == controls:
        counts = f"{runs} seeds of each kind" if runs > 1 else "one seed of each kind"
    else:
        of_runs = f"{runs} runs" if runs > 1 else "one run"
        counts = f"{of_runs} and " + (f"{controls} controls" if controls > 1 else "one control")
    several = " (thin), means with 95 % intervals" if max(runs, controls) > 1 else ""
    panel.legend(
        loc="upper left", fontsize=9, framealpha=1, edgecolor="none", handlelength=1.6,
        title=f"{counts}{several}", title_fontsize=9, alignment="left",
    )  # fmt: skip
