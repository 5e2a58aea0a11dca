"""Bands: where the next value of a curve is expected, after the line through those before it.

A fault that the loss absorbs moves one head or one block and leaves the others as they were. So
each value at each layer and head has a band of its own, and the first that leaves it says where
something happened.
"""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

from geomon.record import Reading

_Array = NDArray[np.float64]

# Readings before a value by which its band is made, at most and at least.
WINDOW, LEAST = 48, 8
# A value leaves its band where it is `ONCE` times as far from the line as normal errors bring it
# once in three million readings; or `TWICE` times as far at two readings in a row, on one side.
ONCE, TWICE = 1.6, 0.9
_BEYOND = 3e-7
# Smallest error, as a share of the value: what rounding alone may do.
_ROUNDING = 1e-5

# Metrics that are watched, and whether the band is one of the value's logarithm: what grows and
# falls by factors scatters by factors.
WATCHED = {
    "attention_entropy_normalised": False,
    "max_logit": False,
    "qk_cosine": False,
    "within_variance": True,
    "variance": True,
    "anisotropy": False,
    "effective_rank": True,
}


# Those that cost little, and are looked at between readings too.
CHECKED = ("attention_entropy_normalised", "max_logit", "within_variance", "variance")


class Place(NamedTuple):
    """A value of a reading that is watched.

    Attributes:
        stack: Name of the stack of blocks; "" in a model with one stack.
        metric: Name of the metric.
        layer: Number of the layer.
        head: Number of the head; None for a value of the whole layer.
    """

    stack: str
    metric: str
    layer: int
    head: int | None


class Departure(NamedTuple):
    """A value outside its band.

    Attributes:
        place: What the value is of.
        value: The value.
        low: Lower end of the band.
        high: Upper end of the band.
        size: Distance from the middle of the band, in half widths.
    """

    place: Place
    value: float
    low: float
    high: float
    size: float


class Line(NamedTuple):
    """Where the next value of each of several curves is expected.

    Attributes:
        expected: Value of the line at the next reading, [curves]; NaN where too few are known.
        unit: Distance that normal errors exceed once in three million readings, [curves].
    """

    expected: _Array
    unit: _Array


def continue_line(history: _Array, ahead: int = 1) -> Line:
    """Lay a line through the last values of each curve by least squares, and go on with it.

    The unit is a quantile of Student's distribution, so that a short history makes a wide band.

    Args:
        history: Values of the readings before, the last one at the end, [readings, curves]; NaN
            where one is missing. At most 48 readings are used.
        ahead: Which reading after the last one is expected: 1 for the next.

    Returns:
        The line; NaN for a curve of which fewer than 8 values are known.

    Example:
        >>> found = continue_line(np.arange(20.0)[:, None] + np.array([0.1, -0.1] * 10)[:, None])
        >>> f"{found.expected[0]:.2f} {found.unit[0]:.2f}"
        '19.98 0.91'
    """
    history = history[-WINDOW:]
    known = np.isfinite(history)
    count = known.sum(axis=0)
    values = np.where(known, history, 0.0)
    x = np.arange(1 - len(history) - ahead, 1 - ahead, dtype=np.float64)[:, None]  # until 0
    with np.errstate(invalid="ignore", divide="ignore"):
        middle, mean = (known * x).sum(axis=0) / count, values.sum(axis=0) / count
        centred = known * (x - middle)
        square = (centred**2).sum(axis=0)
        slope = (centred * values).sum(axis=0) / square
        residual = known * (values - mean - slope * centred)
        error = np.sqrt((residual**2).sum(axis=0) / (count - 2))
        error *= np.sqrt(1 + 1 / count + middle**2 / square)
        expected = mean - slope * middle
        unit = special.stdtrit(np.maximum(count - 2, 1), 1 - _BEYOND / 2) * error
    unit = np.maximum(unit, _ROUNDING * np.abs(expected))
    enough = count >= LEAST
    return Line(np.where(enough, expected, np.nan), np.where(enough, unit, np.nan))


class Bands:
    """The bands of a run, reading by reading.

    Args:
        metrics: Metrics that are watched: whether each is watched by its logarithm.
    """

    def __init__(self, metrics: Collection[str] = tuple(WATCHED)) -> None:
        self._metrics = metrics
        self._columns: dict[Place, int] = {}
        self._history = np.empty((0, 0))
        self._before = np.empty(0)  # distances at the reading before, in units

    def add(self, reading: Reading) -> list[Departure]:
        """Take the next reading, and find the values that are outside of their bands.

        Args:
            reading: A reading of a later step than those before, of the same source.

        Returns:
            The departures, the largest first.
        """
        found = dict(_watched(reading, self._metrics))
        for place in found.keys() - self._columns.keys():
            self._columns[place] = len(self._columns)
        count = len(self._columns)
        missing = count - self._history.shape[1]
        self._history = np.pad(self._history, ((0, 0), (0, missing)), constant_values=np.nan)
        before = np.pad(self._before, (0, missing), constant_values=0.0)
        values = np.full(count, np.nan)
        for place, value in found.items():
            values[self._columns[place]] = value
        expected, unit = continue_line(self._history)
        distance = _distance(values, expected, unit)
        # The reading before is no part of the line that both are compared with.
        again = _distance(values, *continue_line(self._history[:-1], ahead=2))
        repeated = np.minimum(np.abs(again), np.abs(before)) * (again * before > 0)
        sizes = np.maximum(np.abs(distance) / ONCE, repeated / TWICE)
        self._history = np.vstack([self._history, values])[-WINDOW - 1 :]
        self._before = distance
        departures = [
            _departure(place, values[column], expected[column], unit[column], sizes[column])
            for place, column in self._columns.items()
            if sizes[column] > 1
        ]
        return sorted(departures, key=lambda departure: -departure.size)


def _distance(values: _Array, expected: _Array, unit: _Array) -> _Array:
    with np.errstate(invalid="ignore"):
        return np.nan_to_num((values - expected) / unit, posinf=0.0, neginf=0.0)


def _watched(reading: Reading, metrics: Collection[str]) -> Iterator[tuple[Place, float]]:
    """Iterate over the values that are watched, logarithms where the band is one of these."""
    for stack, columns in reading.stacks.items():
        for metric in metrics:
            if metric not in columns:
                continue
            found: dict[tuple[int, int | None], float] = dict(columns[metric].by_head().items())
            found = found or {(n, None): value for n, value in columns[metric].by_layer().items()}
            for (layer, head), value in found.items():
                known = math.log(value) if WATCHED.get(metric) and value > 0 else value
                yield Place(stack, metric, layer, head), known


def _departure(place: Place, value: float, expected: float, unit: float, size: float) -> Departure:
    ends = np.array([value, expected - ONCE * unit, expected + ONCE * unit])
    if WATCHED.get(place.metric):
        with np.errstate(over="ignore"):
            ends = np.exp(ends)
    found, low, high = map(float, ends)
    return Departure(place, found, low, high, float(size))
