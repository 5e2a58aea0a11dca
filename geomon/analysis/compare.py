"""Compare two runs: which of their values differ by more than their errors."""

import bisect
import math
from dataclasses import dataclass

from geomon.analysis.curves import Curve
from geomon.analysis.quantities import quantities_of
from geomon.record import Readings, tags

# Largest relative difference from rounding: with different threads, the same run adds its sums in a
# different order.
_ROUNDING = 1e-9
# Largest relative difference between the steps of two readings that are compared.
_APART = 0.1


@dataclass(frozen=True)
class Difference:
    """A value of two runs at one step.

    Attributes:
        tag: Name of the value.
        step: Step of the reading of the first run.
        first: Value of the first run.
        second: Value of the second run.
        margin: Half width of the 95 % interval of second minus first; NaN if an error is unknown.
        second_step: Step of the reading of the second run. Defaults to None, for the same step.
    """

    tag: str
    step: int
    first: float
    second: float
    margin: float
    second_step: int | None = None

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.second - self.first

    @property
    def share(self) -> float:
        """The change as a share of the first value; NaN if a sign makes that meaningless."""
        return self.change / self.first if self.first > 0 and self.second >= 0 else math.nan

    @property
    def verdict(self) -> str:
        """The verdict: "higher", "lower", "within the errors", "equal" or "error unknown"."""
        if math.isclose(self.first, self.second, rel_tol=_ROUNDING):
            return "equal"
        if not math.isfinite(self.margin):
            return "error unknown"
        if abs(self.change) <= self.margin:
            return "within the errors"
        return "higher" if self.change > 0 else "lower"


def compare(first: Readings, second: Readings) -> list[Difference]:
    """Compare the means over layers of two runs at the last step that both have read.

    If they have read different steps, the last two that are at most 10 % apart are used.

    An interval covers what other sequences would change in the two readings. It does not cover what
    another seed of the training would change; for that, compare several runs of each kind.

    Args:
        first: Readings of one run.
        second: Readings of the other run.

    Returns:
        A difference for each metric that both have at such steps, in the order of the first.

    Raises:
        ValueError: If the runs lack values at near steps, or have them only at step 0.
    """
    others = _curves(second)
    found = (
        _at_last_common(name, curve, others[name])
        for name, curve in _curves(first).items()
        if name in others
    )
    compared = [each for each in found if each is not None]
    trained = min(max((reading.step for reading in each), default=0) for each in (first, second))
    if not compared or (trained and not any(each.step for each in compared)):
        raise ValueError(
            "the runs have no values at steps near one another (10 %) once they train: compare "
            "runs of the same schedule, which reads the same steps"
        )
    return compared


def _curves(readings: Readings) -> dict[str, Curve]:
    """Collect the means over layers (also of scales), and the values that the training logs."""
    curves = {
        tag: each.curve(readings)
        for tag, each in quantities_of(readings).items()
        if (each.value is None and (not each.part or each.part[1:].isdigit()))
        or not (each.metric or tag == tags.OVERHEAD)
    }
    return {name: curve for name, curve in curves.items() if len(curve)}


def _at_last_common(name: str, first: Curve, second: Curve) -> Difference | None:
    near = _last_near(first.steps, second.steps)
    if near is None:
        return None
    step, second_step = near
    one, other = first.steps.index(step), second.steps.index(second_step)
    # An unknown margin, 0, makes the margin of the difference unknown. The deviation over splits of
    # the rows cannot replace it: with it, two readings of one model differed in 38 % of 200 pairs.
    margins = first.margins[one], second.margins[other]
    margin = math.hypot(*margins) if all(margins) else math.nan
    shown = None if second_step == step else second_step
    return Difference(name, step, first.values[one], second.values[other], margin, shown)


def _last_near(first: list[int], second: list[int]) -> tuple[int, int] | None:
    """Find the last steps of two runs that are near one another, preferring equal ones."""
    pairs = [(step, _nearest(step, second)) for step in first]
    near = [pair for pair in pairs if abs(pair[0] - pair[1]) <= _APART * max(pair)]
    if not near:
        return None
    last = max(min(pair) for pair in near)
    reached = [pair for pair in near if min(pair) >= (1 - _APART) * last]
    return max(reached, key=lambda pair: (-abs(pair[0] - pair[1]), pair))


def _nearest(step: int, steps: list[int]) -> int:
    """Return the step of a sorted list that is nearest to a step."""
    place = bisect.bisect_left(steps, step)
    return min(steps[max(place - 1, 0) : place + 1], key=lambda other: abs(other - step))


__all__ = ["Difference", "compare"]
