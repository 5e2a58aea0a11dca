"""The phase of a curve: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two phases: first expansion, then compression.

The rule can be checked by eye. Two values differ if they are farther apart than the margin of their
difference. If every reading since a quarter of the last step agrees with the last one, and the
interval of that change stays within a quarter of the largest value so far, the curve is level.
Otherwise we look back from the last reading to the most recent one that differs from it: if that
value is lower, the curve has been expanding since then, and if it is higher, falling or
compressing. If a reading in between lies beyond the last one, by a margin that allows for choosing
it among these only, the curve may have turned, and its phase is unclear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import NormalDist
from typing import NamedTuple

from geomon.analysis.numbers import with_margin
from geomon.record.columns import NAN

# A curve is level if its readings agree with the last one while the step grows by this factor, and
# if the interval of the change stays within this share of the largest value.
_QUIET_FACTOR, _LEVEL_SHARE = 4, 0.25
# Probability that any two of the readings so far differ by chance. The test is repeated at each
# reading, so over a whole run one in twenty unchanging curves gets a wrong word
# (`benchmarks/detectors.py`).
_CHANCE = 0.01
# Probability that, by chance, a reading since the change lies beyond the last one.
_CHANCE_OF_A_TURN = 0.05
_Z = 1.96  # standard errors in half the width of a 95 % interval


class Point(NamedTuple):
    """One reading of a curve.

    Attributes:
        step: Training step.
        value: Value at that step.
        margin: Half width of its 95 % interval; 0 if unknown.
    """

    step: int
    value: float
    margin: float

    def words(self) -> str:
        """Format the value with its margin."""
        return with_margin(self.value, self.margin)


_NOWHERE = Point(-1, NAN, 0.0)


@dataclass(frozen=True)
class Phase:
    """The phase at the end of a curve, and the readings that it follows from.

    Attributes:
        name: "expanding"; "compressing" (falling after an expansion); "falling"; "level"; "unclear"
            (it may have turned, or margins or the run's length do not allow to call it level);
            "unknown" (fewer than two readings, or no margins).
        start: First reading.
        peak: Reading with the largest value.
        last: Last reading.
        since: Reading from which the last one differs; if the curve is level, the first reading
            that agrees with the last; None if the phase is unclear or unknown.
        peak_steps: Steps between which the peak may lie: its neighbours that agree with it.
        widening: Factor on the margin of a difference, which grows with the number of readings,
            because the peak and `since` are chosen among all of them. Defaults to 1.0.
    """

    name: str
    start: Point = _NOWHERE
    peak: Point = _NOWHERE
    last: Point = _NOWHERE
    since: Point | None = None
    peak_steps: tuple[int, int] = (-1, -1)
    widening: float = field(default=1.0, repr=False)

    def change(self, point: Point) -> Point:
        """Compute the change from a reading to the last one, with the margin of the difference.

        The margin is `widening` times the root of the sum of both squared margins, because the
        reading is chosen among all of them.

        Args:
            point: A reading of the curve.
        """
        return _difference(point, self.last, self.widening)

    @property
    def has_fallen(self) -> bool:
        """Whether the last value is below the peak by more than the margin of the difference."""
        change = self.change(self.peak)
        return -change.value > change.margin > 0

    def words(self) -> str:
        """Return the phase in words, with the change that it follows from.

        Example:
            >>> steps, values = [0, 64, 128, 256, 512, 1024], [2.5, 5.0, 7.3, 7.4, 6.4, 5.5]
            >>> phase = find_phase(steps, values, [0.3] * 6)
            >>> phase.words()
            'compressing, -0.9 ± 0.7 since step 512'
        """
        if self.since is None:
            return self.name
        change = _signed(self.change(self.since))
        return f"{self.name}, {change} since step {self.since.step:,}"

    def course(self) -> str:
        """Return peak and start in words, with the change since each; "" for a single reading.

        Example:
            >>> steps, values = [0, 64, 128, 256, 512, 1024], [2.5, 5.0, 7.3, 7.4, 6.4, 5.5]
            >>> find_phase(steps, values, [0.3] * 6).course().split("; ")[1]
            'start 2.5 ± 0.3 at step 0, +3.0 ± 0.7 since'
        """
        parts = []
        if self.peak not in (self.start, self.last):
            first, last = self.peak_steps
            span = f" (between steps {first:,} and {last:,})" if first < last else ""
            parts.append(f"peak {self.peak.words()} at step {self.peak.step:,}{span}")
            parts[-1] += self._since(self.peak)
        if self.start != self.last:
            start = f"start {self.start.words()} at step {self.start.step:,}"
            parts.append(start + self._since(self.start))
        return "; ".join(parts)

    def _since(self, point: Point) -> str:
        """Say the change since a reading, unless the phase says it or its margin is unknown."""
        change = self.change(point)
        return f", {_signed(change)} since" if change.margin and point != self.since else ""

    def _repr_html_(self) -> str:
        """Show the phase in words in a notebook."""
        return f"<p><b>{escape(self.words())}</b>; {escape(self.course())}</p>"


def find_phase(
    steps: Sequence[int], values: Sequence[float], margins: Sequence[float] | None = None
) -> Phase:
    """Find the phase at the end of a curve.

    The margin of a difference of two readings is w sqrt(m1^2 + m2^2), where m1 and m2 are their
    margins and w grows with the number of readings (1.4 for 4, 2 for 20, 2.5 for 150), so that
    about 5 of 100 unchanging curves get a wrong word at one of their readings.

    Args:
        steps: Training steps, ascending.
        values: Value at each step; values that are not finite are left out.
        margins: Half width of the 95 % interval of each value, 0 or not finite if unknown. Defaults
            to None, for a curve without margins.

    Returns:
        The phase.

    Raises:
        ValueError: If the lengths differ.

    Example:
        >>> find_phase([0, 64, 128, 256], [3.0, 5.0, 7.3, 7.4], [0.3] * 4).name
        'expanding'
    """
    margins = [0.0] * len(values) if margins is None else margins
    if not len(steps) == len(values) == len(margins):
        raise ValueError(
            f"expected as many values and margins as steps, got {len(steps)}, {len(values)} and "
            f"{len(margins)}"
        )
    points = [
        Point(step, value, margin if math.isfinite(margin) else 0.0)
        for step, value, margin in zip(steps, values, margins, strict=True)
        if math.isfinite(value)
    ]
    if not points:
        return Phase("unknown")
    widening = _widening(len(points) * (len(points) - 1) // 2)
    top = max(range(len(points)), key=lambda index: points[index].value)
    before = _agreeing(points[:top][::-1], points[top], widening)
    after = _agreeing(points[top + 1 :], points[top], widening)
    around = points[top - before].step, points[top + after].step
    if not points[top].margin:  # without a margin, its neighbours cannot be judged
        around = points[top].step, points[top].step
    name, since = _name(points, points[top], widening)
    return Phase(name, points[0], points[top], points[-1], since, around, widening)


def _name(points: Sequence[Point], peak: Point, widening: float) -> tuple[str, Point | None]:
    last = points[-1]
    if len(points) < 2 or not last.margin:
        return "unknown", None
    agreeing = _agreeing(points[-2::-1], last, widening)
    first = points[-1 - agreeing]
    if _QUIET_FACTOR * first.step <= last.step and agreeing:
        _, change, margin = _difference(first, last, widening)
        largest = max(abs(point.value) for point in points)
        if abs(change) + margin <= _LEVEL_SHARE * largest:
            return "level", first
    if agreeing == len(points) - 1:
        return "unclear", None
    since = points[-2 - agreeing]
    sign = 1 if since.value < last.value else -1
    # It may have turned since then; weaker evidence is enough to say nothing.
    closer = _widening(agreeing, _CHANCE_OF_A_TURN)
    back = (point for point in points[-1 - agreeing : -1] if sign * (point.value - last.value) > 0)
    if any(_differ(point, last, closer) for point in back):
        return "unclear", None
    if sign > 0:
        return "expanding", since
    return ("compressing" if _differ(points[0], peak, widening) else "falling"), since


def _agreeing(points: Sequence[Point], one: Point, widening: float) -> int:
    """Count the readings before the first one that differs from a given reading."""
    apart = (index for index, point in enumerate(points) if _differ(point, one, widening))
    return next(apart, len(points))


def _signed(change: Point) -> str:
    return "+" * (change.value > 0) + change.words()


def _difference(one: Point, other: Point, widening: float) -> Point:
    known = one.margin > 0 and other.margin > 0
    margin = widening * math.hypot(one.margin, other.margin) if known else 0.0
    return Point(other.step, other.value - one.value, margin)


def _differ(one: Point, other: Point, widening: float) -> bool:
    difference = _difference(one, other, widening)
    return abs(difference.value) > difference.margin > 0


def _widening(pairs: int, chance: float = _CHANCE) -> float:
    """Compute the factor for this many pairs, with Bonferroni's correction."""
    return max(1.0, NormalDist().inv_cdf(1 - chance / (2 * max(1, pairs))) / _Z)


__all__ = ["Phase", "Point", "find_phase"]
