"""Scales of curves in a terminal: what is printed of a number, and how far an axis reaches.

Noise is drawn flat: an axis is never so fine that a change too small to be printed, or within the
margin of error, fills it.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

# A curve whose range is below this share of its largest value is drawn flat: it is only noise.
FLAT = 0.02
# Range of an axis at least, in units of the last printed digit and in typical margins.
_DIGITS, _MARGINS = 10, 4
_NICE = (1, 2, 2.5, 5)


def thin(values: Sequence[float], count: int) -> list[float]:
    """Average neighbouring values until a number of them is left; both ends stay as they are.

    Args:
        values: Values from left to right.
        count: Largest number of values that are left, at least 1.

    Example:
        >>> thin([1, 2, 4, 6, 8, 9], 3)
        [1, 5.0, 9]
    """
    if len(values) <= count:
        return list(values)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    return [*values[:1], *means[1:-1], *values[-1:]][-count:]


def typical(margins: Sequence[float]) -> float:
    """Return the median of the margins that are known; 0 where none is."""
    known = [margin for margin in margins if margin > 0 and math.isfinite(margin)]
    return statistics.median(known) if known else 0.0


def axis_range(values: Sequence[float], margins: Sequence[float]) -> tuple[float, float]:
    """Choose the ends of an axis: all values with their margins, and no finer than these.

    Args:
        values: Finite values, at least one.
        margins: Half widths of their 95 % intervals; 0 where they are unknown.

    Returns:
        The lower and the upper end.

    Example:
        >>> axis_range([5.0, 5.0], [0.0, 0.0])
        (4.5, 5.5)
    """
    low = min(value - margin for value, margin in zip(values, margins, strict=True))
    high = max(value + margin for value, margin in zip(values, margins, strict=True))
    size = max(map(abs, values))
    least = max(_DIGITS * last_digit(size), _MARGINS * typical(margins), 2 * FLAT * size)
    if high - low < least:
        middle, is_positive = (low + high) / 2, low >= 0
        low, high = middle - least / 2, middle + least / 2
        if low < 0 and is_positive:
            low, high = 0.0, high - low
    return low, high


def last_digit(size: float) -> float:
    """Return what one step of the last printed digit of a value is worth.

    Args:
        size: Absolute value.
    """
    return 0.01 if size < 1 else 0.1 if size < 100 else 1.0


def axis_marks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Choose round numbers on an axis, with their texts.

    Args:
        low: Lower end.
        high: Upper end, above the lower.
        count: Largest number of marks, at least 2.

    Example:
        >>> axis_marks(1.8, 7.6, 4)
        [(2.0, '2'), (4.0, '4'), (6.0, '6')]
    """
    power = 10.0 ** (math.floor(math.log10((high - low) / count)) - 1)
    steps = (nice * power * ten for ten in (1, 10, 100) for nice in _NICE)
    step = next(step for step in steps if _count(low, high, step) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, decimals) != round(step, decimals + 1):
        decimals += 1  # a step of 2.5, or of 0.25
    return [(index * step, _mark(index * step, decimals)) for index in range(first, last + 1)]


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def _mark(value: float, decimals: int) -> str:
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if not float(text.replace(",", "")) else text


def place(step: float, *, logarithmic: bool) -> float:
    """Place a step on an axis of steps; that of a logarithmic one has room for step 0."""
    return math.log2(step + 1) if logarithmic else float(step)


def step_marks(first: int, last: int, count: int, *, logarithmic: bool) -> list[tuple[float, str]]:
    """Choose steps for the marks of an axis of steps, with their places on it and their texts.

    Args:
        first: First step of the axis.
        last: Last step of the axis.
        count: Largest number of marks, at least 2.
        logarithmic: Whether the axis is logarithmic.

    Example:
        >>> [text for _, text in step_marks(0, 1500, 5, logarithmic=True)]
        ['0', '2', '16', '128', '1,024']
    """
    if first >= last:
        return [(place(first, logarithmic=logarithmic), short(first))]
    if not logarithmic:
        steps = [mark for mark, _ in axis_marks(first, last, count) if mark == int(mark)]
        return [(mark, short(int(mark))) for mark in steps]
    start = [0] if first == 0 else []
    powers = [2**k for k in range(63) if first <= 2**k <= last]
    most = max(count - len(start), 1)
    every = max(math.ceil(len(powers) / most), 1)
    chosen = start + powers[::-1][::every][::-1]
    return [(place(step, logarithmic=True), short(step)) for step in chosen]


def short(step: int) -> str:
    """Format a step in at most six characters, where that is exact or the step is long.

    Example:
        >>> short(1500), short(64_000), short(2_500_000)
        ('1,500', '64k', '2.5M')
    """
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if step >= size:
            return f"{step / (1000 if unit == 'k' else size):.3g}{unit}"
    return f"{step:,}"
