"""The phase of a curve: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two phases: an expansion at first, then compression.
A change is called one where the margins of the readings hardly allow it by chance at any reading of
a whole run: the means of blocks of 1, 2, 4, 8, ... readings are compared with those of all earlier
blocks, and the bound on the difference grows with the number of readings (`benchmarks/detectors.py`
measures how often curves without a change pass it).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.analysis.numbers import number

_Array = NDArray[np.float64]

# A 95 % interval is as many standard errors wide to each side.
Z = 1.96
# Values from which on the scatter of a curve says something about its errors, with margins and
# without.
_MIN_FOR_SCATTER, _MIN_WITHOUT_MARGINS = 8, 20
# A curve is level that has not moved beyond its errors while the step grew by this factor.
_LEVEL = 4
# Without margins, a scatter from which on a curve without a trend is erratic, as a share.
_ERRATIC = 0.1

# The bound on the difference of two block means, in standard errors, is
# _BOUND + _GROWTH * log2(readings / sqrt(block) * (1 - correlation of blocks) ** _INDEPENDENCE).
# A bound that did not grow would be passed by chance sooner or later, larger blocks are fewer, and
# blocks that are alike are fewer still. The three numbers were fitted to simulated curves without a
# change, of correlation 0 to 0.9 and 2 to 400 readings, so that one in twenty passes.
_BOUND, _GROWTH, _INDEPENDENCE = 2.3, 0.55, 0.9
# Of few readings the correlation is not known: as many more are supposed, of this correlation.
_SUPPOSED, _SUPPOSED_CORRELATION = 16, 0.4
# Largest correlation that is taken for noise: above it noise looks like a trend. Without margins
# the two cannot be told apart at all, and the largest is supposed.
_MOST_CORRELATED = 0.9
_MEDIAN_SQUARE = 0.4549  # of a standard normal


@dataclass(frozen=True)
class Phase:
    """Phase at the end of a curve.

    Attributes:
        name: "expanding", "compressing", "falling" (without an expansion before), "level" (it rose
            or fell, and has not moved beyond its errors while the step quadrupled), "steady" (it
            never moved), "erratic" (its readings scatter beyond their margins, without a trend) or
            "unknown" (too few values).
        peak_step: Step of the largest value since the expansion began; where there was none, since
            the fall began, or of all.
        peak: Value at that step.
        change: Last value over the peak, minus 1; 0 at the peak, negative after it.
        earliest: First step at which the peak may have been, within the errors; None if the
            curve did not fall from one.
        latest: Last step at which the peak may have been; None likewise.
        since: Step since which the curve rises, falls or is level; None for the other phases.
        start: Value at that step.
        end: Last value.
    """

    name: str
    peak_step: int
    peak: float
    change: float
    earliest: int | None = None
    latest: int | None = None
    since: int | None = None
    start: float = math.nan
    end: float = math.nan

    def words(self) -> str:
        """Describe the phase in a few words.

        Example:
            >>> Phase("compressing", 128, 7.4, -0.3, 64, 256, 128, 7.4, 5.2).words()
            'compressing since step 128, 30 % below its peak 7.4'
        """
        if self.name == "steady":
            return "steady: no change beyond its errors"
        if self.name == "erratic":
            return "erratic: it jumps from reading to reading, without a trend"
        if self.since is None:
            return "too few readings to tell"
        words = f"{self.name} since step {self.since:,}"
        if self.name == "expanding":
            return f"{words}, from {number(self.start)} to {number(self.end)}"
        if self.change == 0:
            return f"{words}, after a rise to {number(self.peak)}"
        top = number(self.peak) if self.earliest is None else f"its peak {number(self.peak)}"
        at = "" if self.peak_step == self.since else f" at step {self.peak_step:,}"
        return f"{words}, {f'{-self.change:.0%}'.replace('%', ' %')} below {top}{at}"

    def _repr_html_(self) -> str:
        """Show the phase in words in a notebook."""
        return f"<p><b>{escape(self.name)}</b>: {escape(self.words() + self.span())}</p>"

    def span(self) -> str:
        """Format the steps between which the peak lies; "" where the words name none, or one step.

        Example:
            >>> Phase("compressing", 128, 7.4, -0.3, 64, 256).span()
            ' (between steps 64 and 256)'
        """
        if self.name == "expanding" or self.earliest in (None, self.latest):
            return ""
        return f" (between steps {self.earliest:,} and {self.latest:,})"


def find_phase(
    steps: Sequence[int], values: Sequence[float], margins: Sequence[float] | None = None
) -> Phase:
    """Find the phase at the end of a curve.

    A curve has turned up where the mean of its last 1, 2, 4, ... readings is above that of as many
    readings before, by more than chance gives at any reading of a run; down likewise. Its name is
    that of the last turn, or "level" where the values since two octaves of steps cannot be told
    from the highest (after a fall, lowest) one. Of 100 curves without a change, about 5 are
    called something else than steady at one of their readings; of 100 that only rise or only fall,
    at most 4 are called the opposite (benchmarks/README.md), whether the errors of neighbouring
    readings are independent or correlated.

    Errors are those that the margins say. From 8 readings on, those of an erratic curve are raised
    to its scatter. Where there are no margins, the scatter alone gives them: chance is then called
    a change less often, and a real change later.

    Args:
        steps: Training steps, ascending.
        values: Value at each step; those that are not finite are left out.
        margins: Half width of the 95 % interval of each value, 0 or not finite where it is unknown;
            None for a curve without any.

    Raises:
        ValueError: The lengths differ.

    Example:
        >>> steps, values = [0, 64, 128, 256, 512, 1024], [2.5, 5.0, 7.3, 7.4, 6.4, 5.5]
        >>> phase = find_phase(steps, values, [0.3] * 6)
        >>> phase.words(), phase.span()
        ('compressing since step 256, 26 % below its peak 7.4', ' (between steps 128 and 256)')
    """
    margins = [0.0] * len(values) if margins is None else margins
    if not len(steps) == len(values) == len(margins):
        raise ValueError(
            f"expected as many values and margins as steps, got {len(steps)}, {len(values)} and "
            f"{len(margins)}"
        )
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return Phase("unknown", -1, math.nan, math.nan)
    at, array = (np.array([numbers[index] for index in finite]) for numbers in (steps, values))
    noise = find_noise(at, array, [margins[index] for index in finite])
    if noise is None or len(finite) < 2:
        return _phase("unknown", at, array, int(array.argmax()))
    return _name(at, _Curve(array, noise))


@dataclass(frozen=True)
class Noise:
    """What is known of the noise of a curve.

    Attributes:
        errors: Standard error of each value, [readings].
        correlation: Correlation of the errors of neighbouring readings, that of an AR(1) process.
        is_erratic: Whether the readings scatter beyond their margins; without margins, by more than
            a tenth of their values.
        caution: Factor of the bound on a change: above 1 without margins, since correlated noise
            scatters less between neighbours than over a run.
    """

    errors: _Array
    correlation: float
    is_erratic: bool = False
    caution: float = 1.0


def find_noise(
    steps: Sequence[int] | NDArray[Any], values: Sequence[float] | _Array, margins: Sequence[float]
) -> Noise | None:
    """Find the errors of a curve: those of its margins, raised where its readings scatter by more.

    No margin counts as smaller than the median one: over a few groups of sequences some are, by
    chance.
    """
    array = np.asarray(values, dtype=np.float64)
    widths = np.array([margin if math.isfinite(margin) else 0.0 for margin in margins])
    enough = len(array) >= (_MIN_FOR_SCATTER if widths.any() else _MIN_WITHOUT_MARGINS)
    if widths.any():
        errors = np.maximum(widths, np.median(widths[widths > 0])) / Z
        ratio = _scatter(steps, array, errors) if enough else 1.0
        if ratio > 1 + 6 / math.sqrt(len(array)) and _alternates(array, errors):
            return Noise(errors * ratio, 0.0, is_erratic=True)
        return Noise(errors, _correlation(ratio, len(array) - 2 if enough else 0))
    if not enough:
        return None
    positive = bool(array.min() > 0)
    units = array if positive else np.ones_like(array)
    share = _scatter(steps, array, units)
    caution = (1 + 16 / len(array)) / math.sqrt(_expected(_MOST_CORRELATED))
    is_erratic = positive and share > _ERRATIC and _alternates(array, np.zeros_like(array))
    return Noise(share * units, _MOST_CORRELATED, is_erratic, caution)


def _scatter(steps: Sequence[int] | NDArray[Any], values: _Array, errors: _Array) -> float:
    """Estimate how many errors a value lies from where its neighbours let it be expected.

    On a logarithmic axis of steps, a line through two neighbours or a parabola through three:
    whichever scatters less, for a line follows a jump, and a parabola a bend.
    """
    x = np.log1p(np.asarray(steps, dtype=np.float64))
    found = []
    for others in ((-1, 1), (-2, -1, 1)):
        place = np.arange(-min(others), len(values) - 1)
        weights = [
            np.prod([(x[place] - x[place + b]) / (x[place + a] - x[place + b])
                     for b in others if b != a], axis=0)
            for a in others
        ]  # fmt: skip
        pairs = list(zip(weights, others, strict=True))
        residual = values[place] - sum(weight * values[place + a] for weight, a in pairs)
        variance = errors[place] ** 2 + sum(
            (weight * errors[place + a]) ** 2 for weight, a in pairs
        )
        found.append(float(np.median(residual**2 / variance)) / _MEDIAN_SQUARE)
    return math.sqrt(min(found))


def _alternates(values: _Array, errors: _Array) -> bool:
    """Whether a third of the readings lie above or below both neighbours: a bend has one such."""
    middle, sides = values[1:-1], np.stack([values[:-2], values[2:]])
    beyond = np.maximum(middle - sides.max(axis=0), sides.min(axis=0) - middle)
    return bool(np.mean(beyond > errors[1:-1]) >= 1 / 3)


def _expected(correlation: float | _Array) -> Any:
    """Expected square of the scatter, in errors, where neighbouring errors are correlated."""
    return (1 - correlation) * (3 - correlation) / 3


def _correlation(ratio: float, count: int) -> float:
    """Estimate the correlation of neighbouring readings from their scatter, in errors."""
    grid = np.linspace(0, _MOST_CORRELATED, 91)
    supposed = _SUPPOSED * _expected(_SUPPOSED_CORRELATION)
    square = (count * ratio**2 + supposed) / (count + _SUPPOSED)
    return float(np.interp(-square, -_expected(grid), grid))


class _Curve:
    """A curve with its noise, and the means of its blocks.

    Attributes:
        values: Finite values, [readings].
        noise: Their noise.
    """

    def __init__(self, values: _Array, noise: Noise) -> None:
        self.values = values
        self.noise = noise
        self._blocks: dict[int, tuple[_Array, _Array, float]] = {}

    def blocks(self, block: int) -> tuple[_Array, _Array, float]:
        """Means of all blocks of a size, their errors, and the correlation of two side by side.

        The first mean is that of the first `block` readings.
        """
        if block not in self._blocks:
            share, alike = _block_of_correlated(block, round(self.noise.correlation, 2))
            squares = _block_means(self.noise.errors**2, block)
            found = _block_means(self.values, block), np.sqrt(squares * share), alike
            self._blocks[block] = found
        return self._blocks[block]


@functools.lru_cache(maxsize=4096)
def _block_of_correlated(block: int, correlation: float) -> tuple[float, float]:
    """Compute, for an AR(1) process, the variance of a block's mean over that of a value.

    The second number is the correlation of two blocks side by side.
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


def _turns(curve: _Curve) -> list[_Turn]:
    """Find all changes of direction, in the order in which they are seen."""
    turns: list[_Turn] = []
    start, seen = 0, 0
    signs: tuple[int, ...] = (1, -1)
    while found := [turn for sign in signs for turn in _turns_by_block(curve, start, seen, sign)]:
        turns.append(min(found, key=lambda turn: turn.seen))
        start, seen, signs = turns[-1].start, turns[-1].seen + 1, (-turns[-1].sign,)
    return turns


def _turns_by_block(curve: _Curve, start: int, after: int, sign: int) -> list[_Turn]:
    """Find the first turn since `start`, seen from `after` on, that blocks of each size show."""
    turns, end = [], len(curve.values)
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
        bound = curve.noise.caution * np.maximum(bound, Z)
        passed = rise > bound * np.hypot(errors[block:], errors[lowest])
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


def _name(steps: NDArray[Any], curve: _Curve) -> Phase:
    """Name the phase of a curve by its changes of direction."""
    values, turns = curve.values, _turns(curve)
    # Three turns among so few readings that no scatter can be told are scatter.
    if not turns or (len(values) < _MIN_FOR_SCATTER and len(turns) > 2):
        name = "erratic" if turns or curve.noise.is_erratic else "steady"
        return _phase(name, steps, values, int(values.argmax()))
    risen, last = next((turn.start for turn in turns if turn.sign > 0), None), turns[-1]
    before = turns[-2].start if len(turns) > 1 else 0
    begin = before + int((last.sign * values[before:]).argmin())
    top = (risen or 0) + int(values[risen or 0 :].argmax())
    fell = risen is not None and (last.sign < 0 or top < begin)
    span = _near(curve, risen or 0, top, last.block, 1) if fell else None
    if not fell:  # since the last reading that cannot be told from the start of the change
        begin = _near(curve, before, begin, last.block, -last.sign)[1]
    extreme = begin + int((last.sign * values[begin:]).argmax())
    level, until = _near(curve, begin, extreme, last.block, last.sign)
    name = "expanding" if last.sign > 0 else "falling" if risen is None else "compressing"
    if _LEVEL * steps[level] <= steps[-1]:
        name, begin = "level", level
    if curve.noise.is_erratic and (name == "level" or until < len(values) - 1):
        return _phase("erratic", steps, values, int(values.argmax()))
    return _phase(name, steps, values, top, span, begin)


def _phase(
    name: str,
    steps: NDArray[Any],
    values: _Array,
    top: int,
    span: tuple[int, int] | None = None,
    begin: int | None = None,
) -> Phase:
    at, course = steps.tolist(), values.tolist()
    peak, end = course[top], course[-1]
    change = end / peak - 1 if peak else 0.0
    first, last = (None, None) if span is None else (at[span[0]], at[span[1]])
    since, start = (None, math.nan) if begin is None else (at[begin], course[begin])
    return Phase(name, at[top], peak, change, first, last, since, start, end)


def _near(curve: _Curve, start: int, top: int, block: int, sign: int) -> tuple[int, int]:
    """Indices of the first and last reading, next to one another, that are not below a peak.

    Means over `block` readings around each are compared, by 1.96 of their errors. With a sign of -1
    it is readings that are not above a lowest value.
    """
    values = sign * curve.values[start:]
    block = min(block, len(values))
    means, errors = (numbers[start:] for numbers in curve.blocks(block)[:2])
    means = sign * means
    middle = (block - 1) // 2  # of a block, counted from its first reading
    peak = min(max(top - start - middle, 0), len(means) - 1)
    near = slice(max(0, peak - block + 1), peak + block)
    peak = near.start + int(means[near].argmax())
    below = means[peak] - means > Z * np.hypot(errors, errors[peak])
    left = np.flatnonzero(below[:peak])
    right = np.flatnonzero(below[peak:])
    first = 0 if not len(left) else int(left[-1]) + 1 + middle
    last = len(values) - 1 if not len(right) else peak + int(right[0]) - 1 + middle
    return start + min(first, top - start), start + max(last, top - start)
