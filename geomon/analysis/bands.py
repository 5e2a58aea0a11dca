"""Bands: the expected range of a curve's next value, from the line through earlier values.

A fault that the loss absorbs moves one head or one block and leaves the others alone. So each value
at each layer and head has a band of its own, and the first value that leaves its band shows where
something happened.
"""

import bisect
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.record import EMPTY, Columns, Course, Place, Reading

_Array = NDArray[np.float64]

# Most and fewest earlier readings that make a band. Because curves bend, they are no further back
# than the first share of the training so far; the fewest may be as far back as the second share.
MOST_READINGS, FEWEST_READINGS, SHARE, SPARSE_SHARE = 48, 8, 0.25, 0.75
# First step with bands, because in the first steps of a training everything changes.
FIRST = 200
# Every fifth reading is also compared with such readings only, because a creeping change would
# become part of the line through the last 48 readings before it leaves the band.
SLOW_STRIDE = 5
# A value has left its band if two readings in a row, on the same side, are `OUTSIDE` times as far
# from the line as normal errors get once in three million readings. One reading is not enough,
# because a single strange batch moves values as far as a fault does.
OUTSIDE = 1.15
_BEYOND = 3e-7
# Scatter is measured in units of at least this share of the smallest half width.
_LEAST_SCATTER = 0.3
# Number of readings in a course, which shows a value before it left its band.
COURSE = 32
# After this many readings with all values inside, a departure is a new event.
QUIET_READINGS = 12
# Number of readings over which the scatter of all values is averaged, and the largest mean of its
# logarithm without an alert: 2.2 times the variance that the bands expect. In a training that
# learns to copy it is 2.1 times as large in good health.
SCATTER_READINGS, SCATTER = 20, 0.8
# Limits of the scatter of one reading, because a single jump is not growing scatter.
_CALM, _RESTLESS = 0.1, math.e
# Smallest value for a logarithm, so that weights set to 0 leave their band.
_TINY = 1e-9
_TENFOLD, _THREEFOLD = math.log(10.0), math.log(3.0)
# Smallest error, as a share of the value, to allow for rounding.
_ROUNDING = 1e-5


class WatchedMetric(NamedTuple):
    """How a metric is watched.

    Attributes:
        least: Smallest half width of its bands. If values hardly scatter, as in a new model,
            smaller changes mean nothing.
        by_logarithm: Whether bands use the value's logarithm, because a value that grows by factors
            scatters by factors. Defaults to False.
        by_part: Whether each part of the metric has a band instead of its value. Defaults to False.
        largest: Largest half width of its bands, which then lie around the median of earlier
            readings. Readings with a bend in them would open a band until it holds anything.
            Defaults to infinity.
        least_of: Smallest half widths of parts that scatter more. Defaults to {}.
    """

    least: float
    by_logarithm: bool = False
    by_part: bool = False
    largest: float = math.inf
    least_of: Mapping[str, float] = {}

    def least_at(self, part: str) -> float:
        """Return the smallest half width of the bands of a part."""
        return self.least_of.get(part, self.least)

    def scaled(self, value: float) -> float:
        """Return what its bands compare: the value, or its logarithm."""
        return math.log(max(value, _TINY)) if self.by_logarithm else value


WATCHED = {
    "attention_entropy_normalised": WatchedMetric(0.01),
    "max_logit": WatchedMetric(0.5),
    "qk_dot": WatchedMetric(0.25),
    "variance": WatchedMetric(0.05, by_logarithm=True, largest=_TENFOLD),
    "within_variance": WatchedMetric(0.05, by_logarithm=True, largest=_TENFOLD),
    "norm_growth": WatchedMetric(0.05, by_logarithm=True, largest=_TENFOLD),
    "residual_cosine": WatchedMetric(0.05),
    "head_output_norm": WatchedMetric(0.1, by_logarithm=True, largest=_TENFOLD),
    "weight_norm": WatchedMetric(0.02, by_logarithm=True, by_part=True, largest=_TENFOLD),
    "update_size": WatchedMetric(
        0.15,
        by_logarithm=True,
        by_part=True,
        largest=_THREEFOLD,
        least_of={"over_rate": _THREEFOLD},
    ),
    "unmoved": WatchedMetric(0.03, by_part=True),
    "expert_load": WatchedMetric(0.2, by_logarithm=True, by_part=True),
}


# Metric of the places of logged losses, which are compared only at a resume.
LOSS = "loss"
_LOGGED_LOSS = WatchedMetric(0.05)


def rule_of(place: Place) -> WatchedMetric:
    """Return how the value at a place is watched, or a logged loss is."""
    return _LOGGED_LOSS if place.metric == LOSS else WATCHED[place.metric]


class Departure(NamedTuple):
    """A value outside its band.

    Attributes:
        step: Step of its reading.
        place: Place of the value.
        value: The value.
        low: Lower end of the band.
        high: Upper end of the band.
        size: Distance from the line, relative to the half width of the band; above 1.
    """

    step: int
    place: Place
    value: float
    low: float
    high: float
    size: float


class Forecast(NamedTuple):
    """Expected next values of several curves.

    Attributes:
        expected: Value of the line at the next reading, [curves]; NaN if too few values are known.
        unit: Distance from it that normal errors exceed once in three million readings, [curves].
        norm: Number of standard errors in a unit, corrected for the variance of Student's
            distribution, [curves]; [1] if all values are known.
    """

    expected: _Array
    unit: _Array
    norm: _Array


def continue_line(history: _Array, ahead: int = 1) -> Forecast:
    """Extrapolate a least-squares line through the last values of each curve.

    `history` is [readings, curves], last reading at the end, NaN if missing, and at most the last
    48 readings are used. `ahead` says which later reading is expected (1 for the next). A curve
    with fewer than 8 known values gets NaN.

    Example:
        >>> found = continue_line(np.arange(20.0)[:, None] + np.array([0.1, -0.1] * 10)[:, None])
        >>> f"{found.expected[0]:.2f} {found.unit[0]:.2f}"
        '19.98 0.91'
    """
    found = _continue_lines(history, [ahead])
    return Forecast(found.expected[0], found.unit[0], found.norm)


def _continue_lines(history: _Array, ahead: Sequence[int]) -> Forecast:
    """Continue each line to several readings: values and units are [ahead, curves]."""
    values = history[-MOST_READINGS:]
    known, parts = np.isfinite(values), len(ahead)
    if known.all():  # the curves share everything but their values, and all forecasts one line
        known, parts = known[:, :1], 1
    else:
        values = np.where(known, values, 0.0)
    count = known.sum(axis=0)
    quantile, norm = (each[count] for each in _quantiles())
    x = np.arange(1.0 - len(values), 1.0)[:, None] - np.array(ahead)[:, None, None]  # until 0
    with np.errstate(invalid="ignore", divide="ignore"):
        middle, mean = (known * x).sum(axis=1) / count, values.sum(axis=0) / count
        centred = (known * (x - middle[:, None]))[:parts]
        square = (centred**2).sum(axis=1)
        slope = (centred * values).sum(axis=1) / square
        residual = known * (values - mean - slope[:, None] * centred)
        expected = mean - slope * middle
        error = np.sqrt((residual**2).sum(axis=1) / (count - 2))
        error = error * np.sqrt(1 + 1 / count + middle**2 / square)
    unit = quantile * np.maximum(error, _ROUNDING * np.abs(expected))
    expected, unit = (np.where(count < FEWEST_READINGS, np.nan, each) for each in (expected, unit))
    return Forecast(expected, unit, norm)


@functools.cache
def _quantiles() -> tuple[_Array, _Array]:
    """Return standard errors in a unit, and `norm` of a forecast, by the number of values."""
    from scipy import special  # type: ignore[import-untyped]  # slow to load

    freedom = np.maximum(np.arange(MOST_READINGS + 1) - 2.0, 1.0)
    quantile = special.stdtrit(freedom, 1 - _BEYOND / 2)
    with np.errstate(invalid="ignore"):
        return quantile, quantile * np.sqrt(1 - 2 / freedom)


class Distance(NamedTuple):
    """How far values are from the expected ones.

    Attributes:
        expected: Value of the line through the readings before the last one, [curves].
        width: Half width of the band, [curves].
        size: Distance in half widths, [curves]: the smaller of this reading's and the previous
            one's; 0 if they are on different sides, NaN if too few values are known.
        alone: Distance of this reading from the line through all earlier ones, in half widths.
        normed: Signed distances in standard errors, with mean square 1 for normal errors, [curves].
    """

    expected: _Array
    width: _Array
    size: _Array
    alone: _Array
    normed: _Array


def measure_distance(
    history: _Array,
    values: _Array,
    least: _Array | float = 0.0,
    largest: _Array | float = math.inf,
) -> Distance:
    """Compare the values of a reading with the lines through earlier readings.

    Args:
        history: Values of earlier readings, last one at the end, [readings, curves].
        values: Values of the reading, [curves].
        least: Smallest half widths of the bands, [curves] or a single one. Defaults to 0.
        largest: Largest half widths, of bands around the median. Defaults to infinity.
    """
    if len(history) < FEWEST_READINGS:
        return Distance(*np.full((5, len(values)), np.nan))
    line = continue_line(history)
    # The last two readings are both compared with the line before them.
    before = _continue_lines(history[:-1], [2, 1])
    middle, width = before.expected, np.maximum(OUTSIDE * before.unit, least)
    is_open = (width > largest).any(axis=0)
    if is_open.any():
        median = np.nanmedian(history[:-1, is_open], axis=0)
        middle[:, is_open], width = median, np.minimum(width, largest)
    with np.errstate(invalid="ignore", divide="ignore"):
        now, last = (np.array([values, history[-1]]) - middle) / width
        size = np.minimum(np.abs(now), np.abs(last)) * (now * last > 0)
        alone = np.abs(values - line.expected) / np.maximum(OUTSIDE * line.unit, least)
        normed = (values - line.expected) / np.maximum(line.unit, _LEAST_SCATTER * least)
        normed *= line.norm
    return Distance(middle[0], width[0], size, alone, normed)


def scatter(normed: _Array) -> float:
    """Compute the log of the mean square of distances in standard errors; NaN without any.

    The mean square is limited to the range from 0.1 to e.

    Args:
        normed: Distances of one reading, [curves].
    """
    known = normed[np.isfinite(normed)]
    if not len(known):
        return math.nan
    return math.log(min(max(float(np.mean(known**2)), _CALM), _RESTLESS))


def start_of_window(steps: Sequence[int] | NDArray[np.int64], step: int) -> int:
    """Find the first earlier reading that the bands at a step use.

    Args:
        steps: Steps of all earlier readings, ascending.
        step: The step.

    Returns:
        Index of the reading, or the number of readings if there is no band yet.

    Example:
        >>> start_of_window(range(0, 400, 4), 400), start_of_window(range(100), 100)
        (75, 100)
    """
    if step < FIRST:
        return len(steps)
    first, sparse = (bisect.bisect_left(steps, (1 - x) * step) for x in (SHARE, SPARSE_SHARE))
    first = min(first, max(sparse, len(steps) - FEWEST_READINGS - 1))
    return max(first, len(steps) - MOST_READINGS - 1)


class BandFindings(NamedTuple):
    """Result of comparing a reading with the bands of its run; by default, nothing was found.

    Attributes:
        departures: Values outside their bands, largest departure first.
        left: Values that have left their bands since all were last inside for 12 readings, in order
            of leaving, and largest departure first within a step.
        scatter: Log of the mean square of all values' distances from their lines, in standard
            errors, over the last 20 readings; NaN if fewer are known.
        is_strange: Whether some value of this reading will have left its band if the next reading
            is as far off on the same side.
    """

    departures: Sequence[Departure] = ()
    left: Sequence[Departure] = ()
    scatter: float = math.nan
    is_strange: bool = False


# Metric, part and kind of watched values, and the depth of the first of them.
_Start = tuple[str, str, str, int]


class _Lane:
    """The last readings (all, or every few) with which the next one is compared."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.history = np.empty((0, 0))

    def add(self, step: int, values: _Array, least: _Array, largest: _Array) -> Distance:
        """Compare the values of a reading with earlier ones, and keep them."""
        if missing := len(values) - self.history.shape[1]:
            self.history = np.pad(self.history, ((0, 0), (0, missing)), constant_values=np.nan)
        start = start_of_window(self.steps, step)
        distance = measure_distance(self.history[start:], values, least, largest)
        self.steps = [*self.steps, step][-MOST_READINGS - 1 :]
        self.history = np.vstack([self.history, values])[-MOST_READINGS - 1 :]
        return distance


class _WatchedColumns:
    """Columns of the watched values of a stack: each place has one from its first value on.

    Attributes:
        least: Smallest half widths of their bands, [columns].
        largest: Largest half widths, [columns].
        in_scatter: Whether values count in the scatter of all, [columns].
    """

    def __init__(self, stack: str) -> None:
        self._stack = stack
        self._columns: dict[Place, int] = {}
        self._layout: object = None  # what the last reading held, and where it was finite

    def values(self, columns: Columns) -> _Array:
        """Return the values of a reading by column, as logarithms if their band is of them."""
        found = [*watched_rows(columns)]
        flat = np.array([value for _, rows in found for row in rows for value in row])
        finite = np.isfinite(flat)
        layout = [(start, [*map(len, rows)]) for start, rows in found], finite.tobytes()
        if layout != self._layout:
            self._find_columns(*layout)
            self._layout = layout
        values = np.full(len(self._columns), np.nan)
        values[self._filled] = flat[finite]
        logarithms = values[self._by_logarithm].tolist()
        values[self._by_logarithm] = [math.log(max(value, _TINY)) for value in logarithms]
        return values

    def departures(
        self, step: int, values: _Array, expected: _Array, width: _Array, size: _Array
    ) -> list[Departure]:
        """List the values outside their bands, largest departure first; arrays are [columns]."""
        out = np.flatnonzero(size > 1)
        places = [*self._columns]
        with np.errstate(over="ignore"):
            ends = np.array([values, expected - width, expected + width])[:, out]
            ends = np.where(self._by_logarithm[out], np.exp(ends), ends)
        rows = np.array([*ends, size[out]]).T.tolist()
        found = [
            Departure(step, places[column], *row)
            for column, row in zip(out.tolist(), rows, strict=True)
        ]
        return sorted(found, key=lambda departure: -departure.size)

    def course(self, place: Place, history: _Array) -> list[float]:
        """Return the values of a place in the last readings, [readings, columns]."""
        values = history[:, self._columns[place]]
        return (np.exp(values) if rule_of(place).by_logarithm else values).tolist()

    def _find_columns(self, blocks: Sequence[tuple[_Start, list[int]]], finite: bytes) -> None:
        """Find the columns of the finite values of a reading; new places get new ones."""
        places = (
            Place(self._stack, metric, part, layer, kind, head)
            for (metric, part, kind, first), widths in blocks
            for layer, width in enumerate(widths, first)
            for head in range(width)
        )
        filled = [
            self._columns.setdefault(place, len(self._columns))
            for place in itertools.compress(places, finite)
        ]
        self._filled = np.array(filled, dtype=np.intp)
        rules = [(rule_of(place), place.part) for place in self._columns]
        self.least = np.array([rule.least_at(part) for rule, part in rules])
        self.largest = np.array([rule.largest for rule, _ in rules])
        self.in_scatter = np.array([not rule.by_part for rule, _ in rules], dtype=bool)
        self._by_logarithm = np.array([rule.by_logarithm for rule, _ in rules], dtype=bool)


class Bands:
    """The bands of a run for one stack of blocks, reading by reading."""

    def __init__(self, stack: str = "") -> None:
        self._stack, self._columns = stack, _WatchedColumns(stack)
        self._count = 0
        self._lane, self._slow_lane = _Lane(), _Lane()
        self._scatters: deque[float] = deque(maxlen=SCATTER_READINGS)
        self._left: dict[Place, Departure] = {}
        self._quiet = 0  # readings since a value was outside its band

    def add(self, reading: Reading) -> BandFindings:
        """Compare the values of a later reading of the same source with their bands."""
        columns = self._columns
        values = columns.values(reading.stacks.get(self._stack, {}))
        distance = self._lane.add(reading.step, values, columns.least, columns.largest)
        expected, width, size = distance[:3]
        if self._count % SLOW_STRIDE == 0:
            slow = self._slow_lane.add(reading.step, values, columns.least, columns.largest)
            expected, width, size = np.where(
                slow.size > np.nan_to_num(size), slow[:3], distance[:3]
            )
        self._count += 1
        self._scatters.append(scatter(distance.normed[columns.in_scatter]))
        departures = columns.departures(reading.step, values, expected, width, size)
        self._quiet = 0 if departures else self._quiet + 1
        if self._quiet >= QUIET_READINGS:
            self._left.clear()
        for departure in departures:
            self._left.setdefault(departure.place, departure)
        is_full = len(self._scatters) == SCATTER_READINGS
        return BandFindings(
            departures,
            list(self._left.values()),
            float(np.mean(self._scatters)) if is_full else math.nan,
            bool((distance.alone > 1).any()),
        )

    def course(self, place: Place) -> Course:
        """Return a value at the last 32 readings, including this one."""
        values = self._columns.course(place, self._lane.history[-COURSE:])
        return Course(place.tag, tuple(self._lane.steps[-COURSE:]), tuple(values))


def watched_rows(columns: Columns) -> Iterator[tuple[_Start, list[list[float]]]]:
    """Yield the watched values by depth and head, or by depth if no value of a head is known."""
    for metric, watched in WATCHED.items():
        column = columns.get(metric, EMPTY)
        if any(map(math.isfinite, itertools.chain.from_iterable(column.heads))):
            yield (metric, "", "head", column.first), column.heads
            continue
        for part, own in (column.parts if watched.by_part else {"": column}).items():
            yield (metric, part, "value", own.first), [[value] for value in own.layers]
