"""The picture of the odds: for each fault the share that was noticed, over the steps since it."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.faults.kinds import FAULTS, Fault
from recipes.faults.results import Result
from recipes.study.drawing import BLUE, ORANGE

# Detectors that are drawn, with their names, colours and widths: where lines lie over one another,
# the wide ones below are still seen.
_DRAWN = (
    ("loss", "loss", "#B8B8B8", 6.0),
    ("gradient_norm", "gradient norm", ORANGE, 3.2),
    ("geometry", "geomon's alerts", BLUE, 1.8),
)
_COLUMNS = 5
_TITLE = 33  # characters in a line
_KINDS = {
    "loud": "Loud: the loss was\nexpected to jump.",
    "silent": "Silent: the loss was\nexpected to absorb it.",
    "creeping": "Creeping: the fault\ngrows.",
}


def odds_figure(results: Mapping[str, Result]) -> Figure:
    """Draw for each fault how many trainings each detector had noticed by a step.

    Args:
        results: Results at one rate of false alarms, by detector.
    """
    places: list[Fault | str] = []  # each kind has rows of its own, and its words stand first
    for kind, words in _KINDS.items():
        faults = [fault for fault in FAULTS.values() if fault.kind == kind]
        places += [words, *(each for each in faults if results["geometry"].of([each.name]))]
        places += [""] * (-len(places) % _COLUMNS)
    rows = len(places) // _COLUMNS
    figure = Figure(figsize=(13.2, 2.35 * rows + 0.5), dpi=80, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for panel, place in zip(panels, places, strict=True):
        if isinstance(place, Fault):
            _draw(panel, place, results)
        else:
            panel.axis("off")
            panel.text(0, 0.5, place, fontsize=11.5, va="center")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  frameon=False, fontsize=11)  # fmt: skip
    figure.supxlabel("steps since the fault", fontsize=11)
    figure.supylabel("share of the trainings in which it was noticed", fontsize=11)
    return figure


def _draw(panel: Axes, fault: Fault, results: Mapping[str, Result]) -> None:
    for name, label, colour, width in _DRAWN:
        outcomes = results[name].of([fault.name])
        delays = sorted(outcome.delay for outcome in outcomes if outcome.delay is not None)
        steps, shares = course(delays, len(outcomes), fault.steps)
        panel.step(steps, shares, where="post", color=colour, lw=width, label=label)
    held_out = " (held out)" if fault.held_out else ""
    title = textwrap.fill(f"{fault.words}{held_out}", _TITLE)
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_ylim(-0.04, 1.04)
    panel.set_yticks([0, 0.5, 1])
    panel.set_xlim(0, fault.steps)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8.5, length=3)
    panel.grid(axis="y", color="#E6E6E6", lw=0.7)


def course(delays: Sequence[int], count: int, steps: int) -> tuple[list[int], list[float]]:
    """Compute the share of the trainings with an alarm by each step.

    Args:
        delays: Steps from the fault to the alarm, ascending; trainings without one are left out.
        count: Number of trainings.
        steps: Number of steps that are watched.

    Returns:
        Steps at which the share changes, and the share from there on; both begin at 0 and end at
        the last step.

    Example:
        >>> course([0, 3, 3], 4, 10)
        ([0, 3, 10], [0.25, 0.75, 0.75])
    """
    found: dict[int, float] = {0: 0.0}
    for number, delay in enumerate(delays, 1):
        found[delay] = number / count
    last = max(found)
    found.setdefault(steps, found[last])
    return list(found), list(found.values())
