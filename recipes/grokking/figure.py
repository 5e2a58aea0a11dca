"""The figure of the recipe: the curves of all trainings."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from recipes.grokking.leads import Course, alarm
from recipes.study.drawing import BLUE, ORANGE, draw_seeds, label_panel

_Values = Callable[[Course], Sequence[float]]


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
    figure = Figure(figsize=(8.2, 8.6), dpi=85, layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    groups = (
        (runs, BLUE, f"{fraction:.0%} of the pairs: generalises ({len(runs)} seeds)"),
        (controls, ORANGE, f"{control_fraction:.0%} of the pairs: control ({len(controls)})"),
    )
    rows: tuple[tuple[str, str, str, _Values], ...] = (
        ("", "Accuracy on held-out pairs", "accuracy", lambda course: course.held_out_accuracy),
        ("effective_rank_last", "Effective rank at the last token", "training pairs, last layer",
         lambda course: course.curves["effective_rank_last"]),
        ("local_dimension", "Mean local dimension", "training pairs, last layer",
         lambda course: course.curves["local_dimension"]),
    )  # fmt: skip
    for panel, letter, (name, title, label, values) in zip(panels, "abc", rows, strict=True):
        for courses, colour, words in groups:
            _draw_group(panel, courses, values, colour, words)
        for run in runs:
            if name and (step := alarm(run, controls, name, margin=0.0)) is not None:
                value = values(run)[list(run.steps).index(step)]
                panel.plot([step], [value], "v", color="black", ms=7, mec="white", zorder=6)
            if (step := run.generalised()) is not None:
                panel.axvline(step, color=BLUE, lw=0.9, ls=":", zorder=0)
        panel.set_ylim(0, None if name else 1.05)
        label_panel(panel, letter, title, "training step" * (letter == "c"), label)
    panels[0].plot([], [], color=BLUE, lw=0.9, ls=":", label="a run answers half of them")
    below = "below all that the controls\nhave had until then"
    panels[0].plot([], [], "v", color="black", ms=7, mec="white", ls="", label=below)
    panels[0].legend(loc="upper left", fontsize=9, framealpha=1, edgecolor="none")
    panels[2].xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    return figure


def _draw_group(
    panel: Axes, courses: Sequence[Course], values: _Values, colour: str, label: str
) -> None:
    """Draw each training as a thin line, and their mean with its interval over common steps."""
    for course in courses:
        panel.plot(course.steps, values(course), color=colour, lw=0.6, alpha=0.5)
    shortest = min((course.steps for course in courses), key=len)
    curves = [values(course)[: len(shortest) - 1] for course in courses]
    draw_seeds(panel, shortest[:-1], curves, colour=colour, label=label)
