"""The phase of a curve: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two phases: an expansion at first, then compression.
A change counts only where it exceeds the errors of the two estimates that it compares.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Standard errors by which two estimates must differ: a two-sided test at 95 %. An interval of 95 %
# is as many errors wide to each side.
Z = 1.96
# Values from which on the scatter of a curve says something about its errors.
_MIN_FOR_SCATTER = 8
# An expansion that goes on is one over the last half octave of steps: between neighbouring readings
# of a dense schedule the change is always smaller than its errors.
_HALF_OCTAVE = math.sqrt(2)


@dataclass(frozen=True)
class Phase:
    """Phase at the end of a curve.

    Attributes:
        name: "expanding", "peak", "compressing", "falling" (from the first value on), "steady"
            (no change above the errors) or "unknown" (fewer than two values).
        peak_step: Step of the largest value.
        peak: Largest value.
        change: Last value over the peak, minus 1; 0 at the peak, negative after it.
    """

    name: str
    peak_step: int
    peak: float
    change: float

    def words(self) -> str:
        """Describe the phase in a few words.

        Example:
            >>> Phase("compressing", 128, 7.4, -0.3).words()
            'compressing since step 128: 30 % below the peak 7.4'
        """
        since = f"since step {self.peak_step}"
        if self.name == "compressing":
            return f"compressing {since}: {self._below()} the peak {self._top()}"
        if self.name == "falling":
            return f"falling {since}: {self._below()} {self._top()}"
        if self.name == "peak":
            top = f"{self._top()} at step {self.peak_step}"
            if self.change == 0:
                return f"at its peak so far, {top}"
            return f"{self._below()} its peak, {top}, within its scatter"
        if self.name == "steady":
            return "steady within its errors"
        return "too few readings to tell" if self.name == "unknown" else self.name

    def _below(self) -> str:
        return f"{-self.change:.0%} below".replace("%", " %")

    def _top(self) -> str:
        return f"{self.peak:.3g}" if self.peak < 100 else f"{self.peak:.0f}"


def find_phase(
    steps: Sequence[int], values: Sequence[float], errors: Sequence[float] | None = None
) -> Phase:
    """Find the phase at the end of a curve.

    Each comparison is made with robust errors (see `robust_errors`):

    - compressing: the peak is above the first value, and above the last;
    - expanding: the peak is above the first value, not above the last, and the last is above the
      value of half an octave of steps before;
    - peak: the peak is above the first value, and neither of the two holds;
    - falling: the peak is not above the first value, and the first is above the last;
    - steady: the peak is not above the first value, nor the first above the last.

    Args:
        steps: Training steps, ascending.
        values: Value at each step; those that are not finite are left out.
        errors: Standard error of each value; None for exact values.

    Raises:
        ValueError: The lengths differ.
    """
    errors = [0.0] * len(values) if errors is None else errors
    if not len(steps) == len(values) == len(errors):
        raise ValueError(
            f"expected as many values and errors as steps, got {len(steps)}, {len(values)} and "
            f"{len(errors)}"
        )
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return Phase("unknown", -1, math.nan, math.nan)
    kept = [values[index] for index in finite]
    given = [errors[index] if math.isfinite(errors[index]) else 0.0 for index in finite]
    points = list(zip([steps[i] for i in finite], kept, robust_errors(kept, given), strict=True))
    top = max(range(len(points)), key=lambda index: points[index][1])
    peak, last = points[top], points[-1]
    return Phase(_name(points, top), peak[0], peak[1], last[1] / peak[1] - 1 if peak[1] else 0.0)


def robust_errors(values: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Raise each error to at least the share of its value that is typical of the curve.

    A deviation over two splits is often far too small by chance; and from one reading to the next a
    training changes by more than its splits differ. The errors of a curve with values that are not
    positive are returned as they are.

    Args:
        values: Finite values of a curve.
        errors: Standard error of each value.
    """
    if not values or min(values) <= 0:
        return list(errors)
    shares = [error / value for error, value in zip(errors, values, strict=True)]
    if len(values) < _MIN_FOR_SCATTER:
        typical = math.sqrt(statistics.fmean(share**2 for share in shares))
    else:
        typical = max(statistics.median(shares), _scatter(values))
    return [max(error, typical * value) for error, value in zip(errors, values, strict=True)]


def exceeds_errors(difference: float, error: float, other_error: float) -> bool:
    """Return whether a difference of two values exceeds 1.96 of its standard errors.

    Args:
        difference: One value minus the other.
        error: Standard error of the one value.
        other_error: Standard error of the other value.
    """
    return difference > Z * math.hypot(error, other_error)


def _name(points: list[tuple[int, float, float]], top: int) -> str:
    """Name the phase of (step, value, error) points, of which `top` is the index of the peak."""
    first, peak, last = points[0], points[top], points[-1]
    if len(points) < 2:
        return "unknown"
    if not _above(peak, first):
        return "falling" if _above(first, last) else "steady"
    if _above(peak, last):
        return "compressing"
    before = [point for point in points[:-1] if point[0] * _HALF_OCTAVE <= last[0]] or points[:1]
    return "expanding" if _above(last, before[-1]) else "peak"


def _above(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    return exceeds_errors(one[1] - other[1], one[2], other[2])


def _scatter(values: Sequence[float]) -> float:
    """Estimate the scatter of a value about the trend of the curve, as a share of the value.

    From third differences: they vanish on a parabola over four readings, which is trend.
    """
    differences = [
        abs(third - 3 * second + 3 * first - zeroth) / second
        for zeroth, first, second, third in zip(
            values, values[1:], values[2:], values[3:], strict=False
        )
    ]
    # They have 20 times the variance of one value; 0.6745 is the median |z| of a normal z.
    return statistics.median(differences) / math.sqrt(20) / 0.6745
