"""Rule that warns of generalisation, compared with runs that never generalise."""

import math
from collections.abc import Sequence

from geomon.record import layer_tag, training_tag
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


def curve(history: History, name: str) -> list[float]:
    """List the values of one of `CURVES` at the last layer, on training pairs."""
    return history.values(layer_tag(name, history.last.layers(name)[-1]))


def memorised(history: History) -> int | None:
    """Return the first step that answers the training pairs; None if none does."""
    return _first(history, TRAINING_ACCURACY, _MEMORISED)


def generalised(history: History) -> int | None:
    """Return the first step that answers half of the held-out pairs; None if none does."""
    return _first(history, HELD_OUT_ACCURACY, _GENERALISED)


def fall(history: History, name: str) -> float:
    """Return a curve's value before generalisation, relative to its highest value until then.

    The reading is the last one with less than a tenth of the held-out pairs answered. For a run
    that never generalises, this is its last reading.
    """
    answered = history.values(training_tag(HELD_OUT_ACCURACY))
    before = [number for number, value in enumerate(answered) if not value >= _NOT_YET]
    values = curve(history, name)[: before[-1] + 1]
    return values[-1] / max(values)


def alarm(run: History, controls: Sequence[History], name: str, margin: float) -> int | None:
    """Find the first step at which a curve falls below all values of the controls so far.

    Runs are compared from their memorisation on, because all curves rise before it.

    Returns:
        The step, or None if the curve is never below.
    """
    floor, values = math.inf, dict(zip(run.steps, curve(run, name), strict=True))
    known = [(memorised(control), control) for control in controls]
    lowest = sorted(
        (step, value)
        for first, control in known
        if first is not None
        for step, value in zip(control.steps, curve(control, name), strict=True)
        if step >= first
    )
    start = memorised(run)
    if start is None or not lowest:
        return None
    for step, value in values.items():
        while lowest and lowest[0][0] <= step:
            floor = min(floor, lowest.pop(0)[1])
        if step >= start and floor < math.inf and value < (1 - margin) * floor:
            return step
    return None


def leads(
    runs: Sequence[History], controls: Sequence[History], name: str, margin: float
) -> list[int]:
    """Count the steps from the alarm to generalisation, negative for later alarms.

    A missing alarm counts as one at the last step.
    """
    found = []
    for run in runs:
        half = generalised(run)
        if half is not None:
            step = alarm(run, controls, name, margin)
            found.append(half - (run.steps[-1] if step is None else step))
    return found


def false_alarms(controls: Sequence[History], name: str, margin: float) -> list[bool]:
    """Apply the rule to each control against the other ones.

    One of n controls is the lowest at the end, so without a margin at least one in n raises an
    alarm.
    """
    return [
        alarm(control, [*controls[:number], *controls[number + 1 :]], name, margin) is not None
        for number, control in enumerate(controls)
    ]


def _first(history: History, accuracy: str, least: float) -> int | None:
    reached = zip(history.steps, history.values(training_tag(accuracy)), strict=True)
    return next((step for step, value in reached if value >= least), None)
