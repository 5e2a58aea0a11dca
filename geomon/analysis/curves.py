"""Curves over training and their phase: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two: a first expansion, then compression. A change
counts only where it stands above the errors of the two estimates that it compares.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geomon.record import tags
from geomon.record.reading import Reading

# Standard errors by which two estimates must differ to be told apart: 95 %.
_SURE = 1.96
# Readings below which the scatter of a curve says nothing about its errors.
_ENOUGH = 8
# "Still expanding" compares with half an octave of steps ago: neighbouring readings of a dense
# schedule are never told apart.
_BACK = math.sqrt(2)


@dataclass(frozen=True)
class Phase:
    """Where a curve is.

    Attributes:
        name: "expanding", "peak", "compressing", "falling" (from the first value on), "steady"
            (nothing told apart) or "unknown" (fewer than two values).
        peak_step: Step of the largest value.
        peak: The largest value.
        change: Last value over the peak, minus 1; 0 at the peak, negative past it.
    """

    name: str
    peak_step: int
    peak: float
    change: float

    def words(self) -> str:
        """The phase as a reader is told it.

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


@dataclass(frozen=True)
class Curve:
    """A tag over training: steps ascending, finite values, and their errors (0 where unknown)."""

    steps: list[int]
    values: list[float]
    errors: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    def phase(self) -> Phase:
        """The phase at the end of the curve."""
        return find_phase(self.steps, self.values, self.errors)

    def sure_errors(self) -> list[float]:
        """Errors that do not trust a lucky pair of batches, nor a curve that jumps about."""
        return _errors(self.values, self.errors)

    def differs(self, one: int, other: int) -> bool:
        """Whether two values of the curve, by index, differ by more than their errors."""
        errors = self.sure_errors()
        difference = abs(self.values[one] - self.values[other])
        return difference > _SURE * math.hypot(errors[one], errors[other])


def of_one_source(readings: Iterable[Reading]) -> list[Reading]:
    """One reading per step, ascending, all from the run's commoner source (the later one if equal).

    Readings in the training forward and on a probe see other tokens: mixed, they make steps in a
    curve that the model did not take.
    """
    everything = list(readings)
    if not everything:
        return []
    counts = Counter(reading.source for reading in reversed(everything))
    source = counts.most_common(1)[0][0]
    by_step = {reading.step: reading for reading in everything if reading.source == source}
    return [by_step[step] for step in sorted(by_step)]


def curve_of(readings: Iterable[Reading], tag: str) -> Curve:
    """The curve of a tag, with the errors of its `std` part where there is one."""
    points = [
        (reading.step, reading.values[tag], reading.values.get(f"{tag}/std", 0.0))
        for reading in of_one_source(readings)
        if math.isfinite(reading.values.get(tag, math.nan))
    ]
    errors = [error if math.isfinite(error) else 0.0 for _, _, error in points]
    return Curve([step for step, _, _ in points], [value for _, value, _ in points], errors)


def size_over_heads(readings: Iterable[Reading], metric: str) -> Curve:
    """The mean absolute value of a metric over all heads of all layers; no errors are known.

    Cosines of both signs cancel in the metric's own mean.
    """
    steps, means = [], []
    for reading in of_one_source(readings):
        sizes = [
            abs(value)
            for tag, value in reading.values.items()
            if tag.startswith(f"{metric}/layer_")
            and math.isfinite(value)
            and (parsed := tags.parse(tag)) is not None
            and parsed.head is not None
        ]
        if sizes:
            steps.append(reading.step)
            means.append(statistics.fmean(sizes))
    return Curve(steps, means, [0.0] * len(steps))


def find_phase(
    steps: Sequence[int], values: Sequence[float], errors: Sequence[float] | None = None
) -> Phase:
    """The phase at the end of a curve.

    Compressing: the last value is below the peak, and the first was too, by more than the errors
    allow. Falling: the last is below a first that the peak is not told apart from. Expanding: above
    the first, and above the value of half an octave of steps ago. Peak: the peak is above the
    first, and neither. An error counts at least as much as is usual along the curve, and as the
    curve scatters.

    Args:
        steps: Ascending.
        values: One for each step; those that are not finite are passed over.
        errors: Standard error of each value, or None for exact ones.

    Raises:
        ValueError: The lengths differ.
    """
    errors = [0.0] * len(values) if errors is None else errors
    if not len(steps) == len(values) == len(errors):
        raise ValueError(
            f"expected as many values and errors as steps, got {len(steps)}, {len(values)} and "
            f"{len(errors)}"
        )
    known = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return Phase("unknown", -1, math.nan, math.nan)
    kept = [values[index] for index in known]
    own = [errors[index] if math.isfinite(errors[index]) else 0.0 for index in known]
    curve = list(zip([steps[i] for i in known], kept, _errors(kept, own), strict=True))
    top = max(range(len(curve)), key=lambda index: curve[index][1])
    peak, last = curve[top], curve[-1]
    return Phase(_name(curve, top), peak[0], peak[1], last[1] / peak[1] - 1 if peak[1] else 0.0)


def _name(curve: list[tuple[int, float, float]], top: int) -> str:
    first, peak, last = curve[0], curve[top], curve[-1]
    if len(curve) < 2:
        return "unknown"
    if not _above(peak, first):
        return "falling" if _above(first, last) else "steady"
    if _above(peak, last):
        return "compressing"
    before = [point for point in curve[:-1] if point[0] * _BACK <= last[0]] or curve[:1]
    return "expanding" if _above(last, before[-1]) else "peak"


def _above(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    return one[1] - other[1] > _SURE * math.hypot(one[2], other[2])


def _errors(values: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Errors, each at least the share of its value that is usual along the curve.

    A deviation over two batches is often far too small by luck; and from one reading to the next a
    training moves by more than its batches differ.
    """
    if not values or min(values) <= 0:
        return list(errors)
    shares = [error / value for error, value in zip(errors, values, strict=True)]
    if len(values) < _ENOUGH:
        usual = math.sqrt(statistics.fmean(share**2 for share in shares))
    else:
        usual = max(statistics.median(shares), _scatter(values))
    return [max(error, usual * value) for error, value in zip(errors, values, strict=True)]


def _scatter(values: Sequence[float]) -> float:
    """Typical scatter of a value about the curve's own course, as a share of the value.

    From third differences: what runs along a parabola over four readings is course, not scatter.
    """
    away = [
        abs(third - 3 * second + 3 * first - zeroth) / second
        for zeroth, first, second, third in zip(
            values, values[1:], values[2:], values[3:], strict=False
        )
    ]
    # They have 20 times the variance of one value; 0.6745 is the median |z| of a normal z.
    return statistics.median(away) / math.sqrt(20) / 0.6745
