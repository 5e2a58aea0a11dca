"""The figure of the recipe: the curves of all trainings."""

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomon.record import training_tag
from recipes.grokking.leads import HELD_OUT_ACCURACY, alarm, curve, generalised
from recipes.study.drawing import BLUE, ORANGE, Line, Panel, draw_panels
from recipes.study.history import History


def draw(
    runs: Sequence[History], controls: Sequence[History], fraction: float, control_fraction: float
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
                value = curve(run, name)[run.steps.index(step)]
                axes.plot(step, value, "v", color="black", ms=7, mec="white", zorder=6)
            if (half := generalised(run)) is not None:
                axes.axvline(half, color=BLUE, lw=0.9, ls=":", zorder=0)

    def panel(name: str, title: str, unit: str, **options: object) -> Panel:
        lines = []
        for histories, colour, words in groups:
            steps = max((history.steps for history in histories), key=len)
            curves = [
                curve(each, name) if name else each.values(training_tag(HELD_OUT_ACCURACY))
                for each in histories
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
