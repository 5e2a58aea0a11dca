"""The phase of a curve: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two phases: an expansion at first, then compression.
A change is called one only where chance would hardly give it at any reading of a whole run: the
means of blocks of 1, 2, 4, 8, ... readings are compared with those of all earlier blocks, and the
bound on the difference grows with the number of readings (`benchmarks/detectors.py` measures how
often curves without a change pass it).
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

# Standard errors by which two estimates must differ: a two-sided test at 95 %. An interval of 95 %
# is as many errors wide to each side.
Z = 1.96
# Values from which on the scatter of a curve says something about its errors.
_MIN_FOR_SCATTER = 8
# An expansion that goes on is one over the last half octave of steps: between neighbouring readings
# of a dense schedule the change is always smaller than its errors.
_HALF_OCTAVE = math.sqrt(2)

# Share of the runs without any change of which a change is said at some reading, and share of those
# that only rise or only fall of which the opposite is said. Measured: benchmarks/README.md.
FALSE_ALARMS = 0.05
FALSE_TURNS = 0.025

# The bound on the difference of two block means, in standard errors, is
# _BOUND + _GROWTH * log2(readings / sqrt(block) * (1 - correlation of blocks) ** _INDEPENDENCE).
# A bound that did not grow would be passed by chance sooner or later, larger blocks are fewer, and
# blocks that are alike are fewer still. The three numbers were fitted to simulated curves without a
# change, of correlation 0 to 0.9 and 2 to 400 readings, so that one in twenty passes.
_BOUND, _GROWTH, _INDEPENDENCE = 2.3, 0.55, 0.9
# Of few readings the correlation is not known: as many more are supposed, of this correlation.
_SUPPOSED, _SUPPOSED_CORRELATION = 16, 0.4
# Largest correlation that is taken for noise: above it noise looks like a trend. Where the errors
# are unknown too, the two cannot be told apart at all, and the largest is supposed.
_MOST_CORRELATED = 0.9
# An error that is estimated from the scatter of n readings is raised by the factor 1 + 8 / n.
_RAISED = 8
_MEDIAN_SQUARE = 0.4549  # of a standard normal
_CHUNK = 64  # readings that are searched for a turn at first


@dataclass(frozen=True)
class Phase:
    """Phase at the end of a curve.

    Attributes:
        name: "expanding", "peak", "compressing", "falling" (without an expansion before), "steady"
            (no change above the errors) or "unknown" (too few values).
        peak_step: Step of the peak, which is the largest value since the expansion began; the
            largest of all values where there was none.
        peak: Value of the peak.
        change: Last value over the peak, minus 1; 0 at the peak, negative after it.
        earliest: First step at which the peak may have been, within the errors; None where the
            curve has no peak.
        latest: Last step at which the peak may have been; None where the curve has no peak.
    """

    name: str
    peak_step: int
    peak: float
    change: float
    earliest: int | None = None
    latest: int | None = None

    def words(self) -> str:
        """Describe the phase in a few words.

        Example:
            >>> Phase("compressing", 128, 7.4, -0.3).words()
            'compressing since step 128: 30 % below the peak 7.4'
        """
        since = f"since step {self.peak_step:,}"
        if self.name == "compressing":
            return f"compressing {since}: {self._below()} the peak {self._top()}"
        if self.name == "falling":
            return f"falling {since}: {self._below()} {self._top()}"
        if self.name == "peak":
            top = f"{self._top()} at step {self.peak_step:,}"
            if self.change == 0:
                return f"at its peak so far, {top}"
            return f"{self._below()} its peak, {top}, within its scatter"
        if self.name == "steady":
            return "steady within its errors"
        return "too few readings to tell" if self.name == "unknown" else self.name

    def _repr_html_(self) -> str:
        """Show the phase in words in a notebook."""
        return f"<p><b>{escape(self.name)}</b>: {escape(self.words() + self.span())}</p>"

    def span(self) -> str:
        """Format the steps between which the peak lies; "" where that is one step or unknown.

        Example:
            >>> Phase("peak", 128, 7.4, 0.0, 64, 256).span()
            ' (between steps 64 and 256)'
        """
        if self.earliest is None or self.earliest == self.latest:
            return ""
        return f" (between steps {self.earliest:,} and {self.latest:,})"

    def _below(self) -> str:
        return f"{-self.change:.0%} below".replace("%", " %")

    def _top(self) -> str:
        return f"{self.peak:.3g}" if self.peak < 100 else f"{self.peak:.0f}"


def find_phase(
    steps: Sequence[int], values: Sequence[float], errors: Sequence[float] | None = None
) -> Phase:
    """Find the phase at the end of a curve.

    A curve has turned up where the mean of its last 1, 2, 4, ... readings is above that of as many
    readings before, by more than chance gives at any reading of a run; down likewise. It is

    - expanding: it turned up last, and the mean over the last half octave of steps is above that
      over the half octave before;
    - peak: it turned up last, and rises no more;
    - compressing: it turned up, and down after it;
    - falling: it turned down, and never up before;
    - steady: it never turned.

    Of 100 curves without a change, about 5 are called something else than steady at one of their
    readings; of 100 that only rise or only fall, at most 2 or 3 are called the opposite
    (`FALSE_ALARMS`, `FALSE_TURNS`), whether the errors of neighbouring readings are independent or
    correlated. Where the errors are unknown, they are estimated from the scatter of the curve, from
    8 readings on; chance is then called a change less often, and a real change later.

    Args:
        steps: Training steps, ascending.
        values: Value at each step; those that are not finite are left out.
        errors: Standard error of each value, 0 or not finite where it is unknown; None for a curve
            whose errors are all unknown.

    Raises:
        ValueError: The lengths differ.

    Example:
        >>> steps, values = [0, 64, 128, 256, 512, 1024], [2.5, 5.0, 7.3, 7.4, 6.4, 5.5]
        >>> phase = find_phase(steps, values, [0.15] * 6)
        >>> phase.words(), phase.span()
        ('compressing since step 256: 26 % below the peak 7.4', ' (between steps 128 and 256)')
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
    at = np.array([steps[index] for index in finite])
    given = [errors[index] if math.isfinite(errors[index]) else 0.0 for index in finite]
    curve = _Noisy.of([values[index] for index in finite], given)
    if curve is None or len(finite) < 2:
        top = int(np.argmax([values[index] for index in finite]))
        return _phase("unknown", at, np.array([values[index] for index in finite]), top)
    return _name(at, curve, _turns(curve))


def robust_errors(values: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Raise each error to at least what is typical of the curve.

    A deviation over two splits is often far too small by chance; and from one reading to the next a
    training changes by more than its splits differ. Errors are compared as shares of their values;
    where not all values are positive, as they are.

    Args:
        values: Finite values of a curve.
        errors: Standard error of each value.
    """
    if not values:
        return []
    units = list(values) if min(values) > 0 else [1.0] * len(values)
    shares = [error / unit for error, unit in zip(errors, units, strict=True)]
    if len(values) < _MIN_FOR_SCATTER:
        typical = math.sqrt(statistics.fmean(share**2 for share in shares))
    else:
        typical = max(statistics.median(shares), _scatter(values, units))
    return [max(error, typical * unit) for error, unit in zip(errors, units, strict=True)]


def exceeds_errors(difference: float, error: float, other_error: float) -> bool:
    """Return whether a difference of two values exceeds 1.96 of its standard errors.

    Args:
        difference: One value minus the other.
        error: Standard error of the one value.
        other_error: Standard error of the other value.
    """
    return difference > Z * math.hypot(error, other_error)


@dataclass(frozen=True)
class _Noisy:
    """A curve with what is known of its noise.

    Attributes:
        values: Finite values, [readings].
        errors: Standard error of each value, [readings].
        correlation: Correlation of the errors of neighbouring readings, that of an AR(1) process.
    """

    values: _Array
    errors: _Array
    correlation: float
    _blocks: dict[int, tuple[_Array, _Array, float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, values: list[float], errors: list[float]) -> "_Noisy | None":
        """Estimate the noise of a curve; None where nothing is known of it."""
        array = np.asarray(values, dtype=np.float64)
        if any(errors):
            robust = np.array(robust_errors(values, errors))
            return cls(array, robust, _correlation_of_known(array, robust))
        if len(values) < _MIN_FOR_SCATTER:
            return None
        return cls._from_scatter(array)

    @classmethod
    def _from_scatter(cls, values: _Array) -> "_Noisy":
        units = values if values.min() > 0 else np.ones_like(values)
        # A straight line has no second differences; of noise, this many times its variance.
        share = 2 * (1 - _MOST_CORRELATED) * (3 - _MOST_CORRELATED)
        bent = (values[2:] - 2 * values[1:-1] + values[:-2]) / units[1:-1]
        error = math.sqrt(_median_square(bent) / share) * (1 + _RAISED / len(values))
        return cls(values, error * units, _MOST_CORRELATED)

    def blocks(self, block: int) -> tuple[_Array, _Array, float]:
        """Means of all blocks of a size, their errors, and the correlation of two side by side.

        The first mean is that of the first `block` readings.
        """
        if block not in self._blocks:
            share, alike = _block_of_correlated(block, round(self.correlation, 2))
            squares = _block_means(self.errors**2, block)
            found = _block_means(self.values, block), np.sqrt(squares * share), alike
            self._blocks[block] = found
        return self._blocks[block]


def _correlation_of_known(values: _Array, errors: _Array) -> float:
    """Estimate the correlation of neighbouring readings whose errors are known."""
    grid = np.linspace(0, _MOST_CORRELATED, 91)
    expected = 2 * (1 - grid) * (3 - grid)  # of the square of a second difference
    count, found = len(values) - 2, 0.0
    supposed = 2 * (1 - _SUPPOSED_CORRELATION) * (3 - _SUPPOSED_CORRELATION)
    if count > 0:
        scale = np.sqrt((errors[2:] ** 2 + errors[1:-1] ** 2 + errors[:-2] ** 2) / 3)
        bent = values[2:] - 2 * values[1:-1] + values[:-2]
        # An error of 0 among others that are not.
        found = _median_square(np.divide(bent, scale, out=np.zeros_like(bent), where=scale > 0))
    square = (count * found + _SUPPOSED * supposed) / (count + _SUPPOSED)
    return float(np.interp(-square, -expected, grid))


def _median_square(numbers: _Array) -> float:
    """Estimate the mean square of normal numbers, whatever a few of them are."""
    return float(np.median(numbers**2)) / _MEDIAN_SQUARE if len(numbers) else 0.0


@functools.lru_cache(maxsize=4096)
def _block_of_correlated(block: int, correlation: float) -> tuple[float, float]:
    """Variance of a block's mean over that of a value, and correlation of two blocks side by side.

    Of an AR(1) process.
    """
    share, double = (_share(size, correlation) for size in (block, 2 * block))
    return share, 2 * double / share - 1


def _share(size: int, correlation: float) -> float:
    lags = np.arange(1, size)
    return float(1 + 2 * np.sum((1 - lags / size) * correlation**lags)) / size


def _block_means(numbers: _Array, block: int) -> _Array:
    """Average each run of so many neighbours; the first mean ends at index `block` - 1."""
    if block == 1:
        return numbers
    sums = np.concatenate([[0.0], np.cumsum(numbers - numbers[0])])
    return (sums[block:] - sums[:-block]) / block + numbers[0]


@dataclass(frozen=True)
class _Turn:
    """A change of direction.

    Attributes:
        sign: 1 for upwards, -1 for downwards.
        start: Index of the extreme value from which the curve goes in the new direction.
        seen: Index of the reading at which it is seen.
        block: Number of readings of the blocks by which it is seen.
    """

    sign: int
    start: int
    seen: int
    block: int


def _turns(curve: _Noisy) -> list[_Turn]:
    """Find all changes of direction, in the order in which they are seen."""
    turns: list[_Turn] = []
    start, seen = 0, 0
    signs: tuple[int, ...] = (1, -1)
    while (turn := _next_turn(curve, start, seen, signs)) is not None:
        turns.append(turn)
        start, seen, signs = turn.start, turn.seen + 1, (-turn.sign,)
    return turns


def _next_turn(curve: _Noisy, start: int, after: int, signs: tuple[int, ...]) -> _Turn | None:
    """Find the first reading, from `after` on, at which the curve since `start` has turned."""
    total, size = len(curve.values), max(_CHUNK, 2 * (after - start))
    while True:  # what is searched doubles, so that many turns are found in the time of few
        end = min(total, start + size)
        found = [
            turn
            for sign in signs
            for turn in _turns_by_block(curve, start, end, after, sign)
        ]  # fmt: skip
        if found:
            return min(found, key=lambda turn: turn.seen)
        if end == total:
            return None
        size *= 2


def _turns_by_block(curve: _Noisy, start: int, end: int, after: int, sign: int) -> list[_Turn]:
    """Find the first turn that blocks of each size show, among the readings `start` to `end`."""
    turns = []
    block = 1
    while 2 * block <= end - start:
        all_means, all_errors, alike = curve.blocks(block)
        part = slice(start, end - block + 1)
        means, errors = sign * all_means[part], all_errors[part]
        lowest = _last_lowest(means[:-block])
        rise = means[block:] - means[lowest]
        readings = np.arange(start + 2 * block, end + 1)  # so far, at the end of each block
        fewer = (1 - alike) ** _INDEPENDENCE / math.sqrt(block)
        bound = _BOUND + _GROWTH * np.log2(readings * fewer)
        passed = rise > np.maximum(bound, Z) * np.hypot(errors[block:], errors[lowest])
        passed[: max(0, after - start - 2 * block + 1)] = False
        if passed.any():
            first = int(passed.argmax())
            foot = start + int(lowest[first])
            extreme = foot + int((sign * curve.values[foot : foot + block]).argmin())
            turns.append(_Turn(sign, extreme, start + first + 2 * block - 1, block))
        block *= 2
    return turns


def _last_lowest(numbers: _Array) -> NDArray[np.intp]:
    """Index, for each number, the lowest of those up to it; of equal ones the last."""
    lowest = np.minimum.accumulate(numbers)
    index = np.where(numbers == lowest, np.arange(len(numbers)), 0)
    return np.maximum.accumulate(index)


def _name(steps: NDArray[Any], curve: _Noisy, turns: list[_Turn]) -> Phase:
    """Name the phase of a curve, given its changes of direction."""
    values = curve.values
    top = int(values.argmax())
    if not turns:
        return _phase("steady", steps, values, top)
    risen = next((turn for turn in turns if turn.sign > 0), None)
    if risen is None:
        return _phase("falling", steps, values, turns[0].start)
    last = turns[-1]
    peak = risen.start + int(values[risen.start :].argmax())
    span = _span(curve, risen.start, peak, last.block)
    if last.sign > 0:
        since = last.start + int(values[last.start :].argmax())
        if _is_rising(steps, curve):
            return _phase("expanding", steps, values, since)
        if since == peak:
            return _phase("peak", steps, values, peak, span)
    return _phase("compressing", steps, values, peak, span)


def _phase(
    name: str,
    steps: NDArray[Any],
    values: _Array,
    top: int,
    span: tuple[int, int] | None = None,
) -> Phase:
    peak = float(values[top])
    change = float(values[-1]) / peak - 1 if peak else 0.0
    ends = (None, None) if span is None else (int(steps[span[0]]), int(steps[span[1]]))
    return Phase(name, int(steps[top]), peak, change, *ends)


def _is_rising(steps: NDArray[Any], curve: _Noisy) -> bool:
    """Whether the mean over the last half octave of steps is above that over the one before."""
    late = int(np.searchsorted(steps * _HALF_OCTAVE, steps[-1], side="right"))
    early = int(np.searchsorted(2 * steps, steps[-1], side="right"))
    late = max(1, min(late, len(steps) - 1))
    early = min(early, late - 1)
    groups = (slice(early, late), slice(late, None))
    means = [float(curve.values[group].mean()) for group in groups]
    errors = [
        math.sqrt(
            float((curve.errors[group] ** 2).mean())
            * _block_of_correlated(len(curve.values[group]), round(curve.correlation, 2))[0]
        )
        for group in groups
    ]
    return exceeds_errors(means[1] - means[0], *errors)


def _span(curve: _Noisy, start: int, peak: int, block: int) -> tuple[int, int]:
    """Indices of the first and last reading, next to one another, that are not below the peak.

    Means over `block` readings around each are compared, by 1.96 of their errors.
    """
    values = curve.values[start:]
    block = min(block, len(values))
    means, errors = (numbers[start:] for numbers in curve.blocks(block)[:2])
    middle = (block - 1) // 2  # of a block, counted from its first reading
    top = min(max(peak - start - middle, 0), len(means) - 1)
    near = slice(max(0, top - block + 1), top + block)
    top = near.start + int(means[near].argmax())
    below = means[top] - means > Z * np.hypot(errors, errors[top])
    left = np.flatnonzero(below[:top])
    right = np.flatnonzero(below[top:])
    first = 0 if not len(left) else int(left[-1]) + 1 + middle
    last = len(values) - 1 if not len(right) else top + int(right[0]) - 1 + middle
    return start + min(first, peak - start), start + max(last, peak - start)


def _scatter(values: Sequence[float], units: Sequence[float]) -> float:
    """Estimate the scatter of a value about the trend of the curve, in its units.

    From third differences: they vanish on a parabola over four readings, which is trend.
    """
    differences = [
        abs(third - 3 * second + 3 * first - zeroth) / unit
        for zeroth, first, second, third, unit in zip(
            values, values[1:], values[2:], values[3:], units[2:], strict=False
        )
    ]
    # They have 20 times the variance of one value; 0.6745 is the median |z| of a normal z.
    return statistics.median(differences) / math.sqrt(20) / 0.6745
