"""Rule that warns of generalisation, compared with runs that never generalise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from geomon.record.tags import layer_tag, training_tag
from recipes.study.history import History

# Names of the logged accuracies, which every reading holds.
TRAINING_ACCURACY, HELD_OUT_ACCURACY = "training_accuracy", "held_out_accuracy"
# Metrics with their names for readers.
CURVES = {
    "local_dimension": "mean local dimension",
    "effective_rank_last": "effective rank at the last token",
}
# Margins: shares by which a value must be below the lowest control.
MARGINS = (0.0, 0.1, 0.2, 0.3)

# Accuracy on training pairs from which they count as memorised, and on held-out pairs below which
# nothing is generalised yet and from which it is.
_MEMORISED, _NOT_YET, _GENERALISED = 0.95, 0.1, 0.5


@dataclass(frozen=True)
class Course:
    """The curves of one training.

    Attributes:
        steps: Steps of the readings.
        training_accuracy: Accuracy on training pairs at each step.
        held_out_accuracy: Accuracy on held-out pairs at each step.
        curves: Values at the last layer on training pairs, for each of `CURVES`.
    """

    steps: Sequence[int]
    training_accuracy: Sequence[float]
    held_out_accuracy: Sequence[float]
    curves: dict[str, Sequence[float]]

    def memorised(self) -> int | None:
        """First step that answers the training pairs; None if none does."""
        return _first(self.steps, self.training_accuracy, _MEMORISED)

    def generalised(self) -> int | None:
        """First step that answers half of the held-out pairs; None if none does."""
        return _first(self.steps, self.held_out_accuracy, _GENERALISED)

    def fall(self, name: str) -> float:
        """Return a curve's value before generalisation, relative to its highest value until then.

        The reading is the last one with less than a tenth of the held-out pairs answered. For a run
        that never generalises, this is its last reading.
        """
        before = [
            number for number, value in enumerate(self.held_out_accuracy) if not value >= _NOT_YET
        ]
        values = self.curves[name][: before[-1] + 1]
        return values[-1] / max(values)


def course_of(history: History) -> Course:
    """Collect the curves of one training."""
    return Course(
        steps=history.steps,
        training_accuracy=history.values(training_tag(TRAINING_ACCURACY)),
        held_out_accuracy=history.values(training_tag(HELD_OUT_ACCURACY)),
        curves={
            name: history.values(layer_tag(name, history.last.layers(name)[-1])) for name in CURVES
        },
    )


def alarm(course: Course, controls: Sequence[Course], name: str, margin: float) -> int | None:
    """Find the step where a curve first falls below everything that the controls have had so far.

    Runs are compared from their memorisation on, because all curves rise before it.

    Returns:
        The step, or None if the curve is never below.
    """
    floor, values = math.inf, dict(zip(course.steps, course.curves[name], strict=True))
    known = [(control.memorised(), control) for control in controls]
    lowest = sorted(
        (step, value)
        for memorised, control in known
        if memorised is not None
        for step, value in zip(control.steps, control.curves[name], strict=True)
        if step >= memorised
    )
    start = course.memorised()
    if start is None or not lowest:
        return None
    for step, value in values.items():
        while lowest and lowest[0][0] <= step:
            floor = min(floor, lowest.pop(0)[1])
        if step >= start and floor < math.inf and value < (1 - margin) * floor:
            return step
    return None


def leads(
    courses: Sequence[Course], controls: Sequence[Course], name: str, margin: float
) -> list[int]:
    """Count the steps from the alarm to generalisation, negative for later alarms.

    A missing alarm counts as one at the last step.
    """
    found = []
    for course in courses:
        generalised = course.generalised()
        if generalised is not None:
            step = alarm(course, controls, name, margin)
            found.append(generalised - (course.steps[-1] if step is None else step))
    return found


def false_alarms(controls: Sequence[Course], name: str, margin: float) -> list[bool]:
    """Apply the rule to each control against the other ones.

    One of n controls is the lowest at the end, so without a margin at least one in n raises an
    alarm.
    """
    return [
        alarm(control, [*controls[:number], *controls[number + 1 :]], name, margin) is not None
        for number, control in enumerate(controls)
    ]


def _first(steps: Sequence[int], values: Sequence[float], least: float) -> int | None:
    reached = zip(steps, values, strict=True)
    return next((step for step, value in reached if value >= least), None)
