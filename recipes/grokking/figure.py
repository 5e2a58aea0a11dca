"""The figure of the recipe: the curves of all trainings."""

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.grokking.leads import Course, alarm
from recipes.study.drawing import BLUE, ORANGE, Line, Panel, draw_panels


def draw(
    runs: Sequence[Course], controls: Sequence[Course], fraction: float, control_fraction: float
) -> Figure:
    """Draw accuracy, effective rank and local dimension over training, one panel each.

    Args:
        runs: Trainings with enough pairs to generalise.
        controls: Trainings with too few.
        fraction: Share of the pairs in the training of `runs`.
        control_fraction: Share of the pairs in the training of `controls`.
    """
    groups = (
        (runs, BLUE, f"{fraction:.0%} of the pairs: generalises ({len(runs)} seeds)"),
        (controls, ORANGE, f"{control_fraction:.0%} of the pairs: control ({len(controls)})"),
    )

    def mark(axes: Axes, name: str) -> None:
        for run in runs:
            if name and (step := alarm(run, controls, name, margin=0.0)) is not None:
                value = run.curves[name][list(run.steps).index(step)]
                axes.plot(step, value, "v", color="black", ms=7, mec="white", zorder=6)
            if (half := run.generalised()) is not None:
                axes.axvline(half, color=BLUE, lw=0.9, ls=":", zorder=0)

    def panel(name: str, title: str, unit: str, **options: object) -> Panel:
        lines = []
        for courses, colour, words in groups:
            steps = max((course.steps for course in courses), key=len)
            curves = [
                course.curves[name] if name else course.held_out_accuracy for course in courses
            ]
            # A training that has ended has no values; the mean ends with the first one.
            rest = [[*each, *[math.nan] * (len(steps) - len(each))] for each in curves]
            lines.append(Line(words, colour, steps, rest))
        return Panel(
            title, "training step", unit, lines, finish=partial(mark, name=name), options=options
        )

    below, unit = "(triangle: below all of the controls until then)", "training pairs, last layer"
    return draw_panels([
        panel("", "Accuracy on held-out pairs (dotted: half of them in a run)", "accuracy",
              ylim=(-0.05, 1.05)),
        panel("effective_rank_last", f"Effective rank at the last token {below}", unit),
        panel("local_dimension", f"Mean local dimension {below}", unit),
    ], 1, (8.2, 8.6))  # fmt: skip
