"""The phase of a curve: is the intrinsic dimension expanding, or compressing?

Razzhigaev et al. (2311.05928, section 4.3) see two phases: first expansion, then compression.

The rule can be checked by eye, in a figure of the curve. The curve is divided into stretches that
straight lines explain, each from one reading to a later one, on a linear or a logarithmic axis of
steps. The word names the slope of the newest stretch. It must change by more than its margin, more
than the scatter of the readings about lines, and by a tenth of the range of the whole curve.
Otherwise the curve is level, if the interval of the change stays within a quarter of the largest
value of the stretch, or its phase is unclear.

A margin is about the sampled sequences. If readings saw the same rows, their errors have much in
common, so that the margin of their difference comes from 8 differences, each without one group of
sequences (the grouped jackknife); it is .1 to .7 times as wide as for rows that differ.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.analysis.numbers import with_margin
from geomon.record import NAN, margin

_Array = NDArray[np.float64]
# Probability that a curve without a change gets a wrong word at one of its readings, before the
# freedom to choose the stretch, which doubles it; and that a reading differs from the peak.
_CHANCE, _CHANCE_OF_SCATTER, _CHANCE_OF_A_TURN = 0.15, 0.03, 0.05
# A further stretch must explain this much of the chi square: a turn of 4 standard errors.
_PENALTY = 16.0
# Departures from a line that are smaller than this share of the curve's span are not seen in a
# figure, and a smaller change of a stretch does not matter.
_UNSEEN, _MATTERS = 0.01, 0.1
# Nor does a change below this share of the largest value.
_SLIGHT = 0.02
# A curve is level if the interval of the change stays within this share of the largest value of
# the newest stretch.
_LEVEL_SHARE = 0.25
# Margins count as much as this many readings in the estimate of the scatter; 1.48 makes the median
# deviation of a normal distribution its standard deviation.
_WORTH, _NORMAL = 2, 1.48
_T = 2.365  # standard errors in half the width of a 95 % interval from 8 groups


@functools.cache
def _quantile(chance: float) -> float:
    """Return the standard errors that a normal error exceeds, on either side, by this chance."""
    return NormalDist().inv_cdf(1 - chance / 2)


_Z = _quantile(0.05)


class Point(NamedTuple):
    """One reading of a curve.

    Attributes:
        step: Training step.
        value: Value at that step.
        margin: Half width of its 95 % interval; 0 if unknown.
        without: Value without each of 8 groups of sequences. Defaults to (), if unknown.
        fingerprint: Checksum of the rows that the reading saw. Defaults to "", if unknown.
    """

    step: int
    value: float
    margin: float
    without: Sequence[float] = ()
    fingerprint: str = ""

    def words(self) -> str:
        """Format the value with its margin."""
        return with_margin(self.value, self.margin)


_NOWHERE = Point(-1, NAN, 0.0)


def sum_of(points: Sequence[Point], weights: Sequence[float], chance: float = 0.05) -> Point:
    """Compute a weighted sum of readings, such as a difference, with its margin.

    Readings of the same rows are paired: their part of the margin follows from the 8 sums without
    a group. All other readings are independent.

    Args:
        points: Readings.
        weights: Weight of each.
        chance: Probability that the interval misses the sum. Defaults to 0.05, for 95 %.

    Returns:
        The sum at the step of the last reading; its margin is 0 if a margin is unknown.
    """
    value = math.fsum(w * point.value for w, point in zip(weights, points, strict=True))
    if not all(point.margin > 0 for point in points):
        return Point(points[-1].step, value, 0.0)
    alike = defaultdict(list)
    for number, point in enumerate(points):
        rows = point.fingerprint if len(point.without) else ""
        alike[rows or number].append((weights[number], point))
    margins = []
    for some in alike.values():
        if len(some) == 1:
            margins += [weight * point.margin * _quantile(chance) / _Z for weight, point in some]
        else:
            sums = np.dot([weight for weight, _ in some], [point.without for _, point in some])
            # Some metrics have fewer degrees of freedom than groups: their margins are wider.
            wider = [p.margin / own for _, p in some if (own := margin(p.without))]
            margins.append(margin(sums, chance=chance) * max([1.0, *wider]))
    return Point(points[-1].step, value, math.hypot(*margins))


def change_between(one: Point, other: Point, chance: float = 0.05) -> Point:
    """Compute the change from one reading to another, with its margin.

    Args:
        one: A reading.
        other: Another reading.
        chance: Probability that the interval misses the change. Defaults to 0.05, for 95 %.
    """
    return sum_of((one, other), (-1.0, 1.0), chance)


def _moved(one: Point, other: Point, count: int) -> Point:
    """Compute a change whose margin allows for choosing a reading among so many."""
    return change_between(one, other, _CHANCE_OF_A_TURN / max(count, 1))


def _differs(change: Point) -> bool:
    return abs(change.value) > change.margin > 0


class Turn(NamedTuple):
    """The largest or smallest value of a curve.

    Attributes:
        kind: "peak" or "low".
        point: Its reading.
        steps: Steps between which it may lie: its neighbours that agree with it.
    """

    kind: str
    point: Point
    steps: tuple[int, int]

    def words(self) -> str:
        """Name the value and its step."""
        return f"{self.kind} {self.point.words()} at step {self.point.step:,}"

    def span(self) -> str:
        """Say between which steps it may lie; "" if no neighbour agrees with it."""
        first, last = self.steps
        return f" (between steps {first:,} and {last:,})" if first < last else ""


@dataclass(frozen=True)
class Phase:
    """The phase at the end of a curve, and the readings that it follows from.

    Attributes:
        name: "expanding"; "compressing" (falling after an expansion); "falling"; "level"; "unclear"
            (margins or scatter do not allow to call it level); "unknown" (fewer than two readings,
            or no margins).
        start: First reading.
        highest: Largest value, and where it may lie.
        lowest: Smallest value, and where it may lie.
        last: Last reading.
        since: First reading of the newest stretch; None if the phase is unclear or unknown.
        change: Change along the line through that stretch, with its margin.
        count: Number of readings.
    """

    name: str
    start: Point
    highest: Turn
    lowest: Turn
    last: Point
    since: Point | None
    change: Point
    count: int

    @property
    def peak(self) -> Point:
        """The reading with the largest value."""
        return self.highest.point

    @property
    def has_fallen(self) -> bool:
        """Whether the last value is below the peak by more than the margin of the difference."""
        return _differs(_moved(self.peak, self.last, self.count))

    @property
    def turns(self) -> list[Turn]:
        """Peak and low, in order of steps, if they differ from the first and the last reading."""
        found = [
            turn
            for turn in (self.highest, self.lowest)
            if self._differ(turn.point, self.start) and self._differ(turn.point, self.last)
        ]
        return sorted(found, key=lambda turn: turn.point.step)

    def words(self) -> str:
        """Return the phase in words, with the change that it follows from.

        Example:
            >>> steps, values = range(0, 700, 100), [2.0, 4.0, 6.0, 8.0, 7.0, 6.0, 5.0]
            >>> find_phase(steps, values, [0.3] * 7).words()
            'compressing, -3.0 ± 2.3 since step 300'
        """
        if self.since is None:
            return self.name
        sign = "+" if self.change.value > 0 else ""
        change = "" if self.name == "level" else f", {sign}{self.change.words()}"
        return f"{self.name}{change} since step {self.since.step:,}"

    def course(self) -> str:
        """Return what came before the phase in words; "" if nothing is worth saying.

        Example:
            >>> steps, values = range(0, 700, 100), [2.0, 4.0, 6.0, 8.0, 7.0, 6.0, 5.0]
            >>> find_phase(steps, values, [0.3] * 7).course()
            'start 2.0 ± 0.3 at step 0; peak 8.0 ± 0.3 at step 300'
        """
        told = [turn.words() + turn.span() for turn in self.turns]
        since = self.since or self.start
        is_told = any(turn.steps[0] <= since.step <= turn.steps[1] for turn in self.turns)
        if not is_told and self._differ(self.start, since):
            verb = "rose" if since.value > self.start.value else "fell"
            told.append(f"{verb} to {since.words()} at step {since.step:,}")
        if told or self._differ(self.start, self.last):
            told.insert(0, f"start {self.start.words()} at step {self.start.step:,}")
        return "; ".join(told)

    def _differ(self, one: Point, other: Point) -> bool:
        """Whether a change is worth telling; more must change if a margin is unknown."""
        change = _moved(one, other, self.count)
        slight = (_SLIGHT if change.margin else _MATTERS) * max(abs(one.value), abs(other.value))
        return abs(change.value) > max(change.margin, slight)

    def _repr_html_(self) -> str:
        """Show the phase in words in a notebook."""
        return f"<p><b>{escape(self.words())}</b>; {escape(self.course())}</p>"


def find_phase(
    steps: Sequence[int],
    values: Sequence[float],
    margins: Sequence[float] | None = None,
) -> Phase:
    """Find the phase at the end of a curve.

    Of 100 curves without a change, about 5 get a wrong word at one of their readings
    (`benchmarks/detectors.py`).

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
        >>> find_phase([0, 10, 20, 30], [3.0, 4.0, 5.0, 6.0], [0.3] * 4).name
        'expanding'
    """
    margins = [0.0] * len(values) if margins is None else margins
    if not len(steps) == len(values) == len(margins):
        raise ValueError(
            f"expected as many values and margins as steps, got {len(steps)}, {len(values)} and "
            f"{len(margins)}"
        )
    return phase_of([
        Point(step, value, margin if math.isfinite(margin) else 0.0)
        for step, value, margin in zip(steps, values, margins, strict=True)
        if math.isfinite(value)
    ])  # fmt: skip


def phase_of(points: Sequence[Point]) -> Phase:
    """Find the phase at the end of a curve; readings of the same rows are paired.

    Args:
        points: Readings with finite values, steps ascending.
    """
    name, since, change = _name(points)
    found = points or [_NOWHERE]
    highest, lowest = (_turn(found, kind) for kind in ("peak", "low"))
    return Phase(name, found[0], highest, lowest, found[-1], since, change, len(points))


def _turn(points: Sequence[Point], kind: str) -> Turn:
    """Find the largest or smallest value, and its neighbours that agree with it."""
    sign = 1 if kind == "peak" else -1
    top = max(range(len(points)), key=lambda index: sign * points[index].value)

    def agrees(point: Point) -> bool:
        change = _moved(points[top], point, len(points))
        return change.margin > 0 and not _differs(change)

    before = [points[top], *itertools.takewhile(agrees, reversed(points[:top]))]
    after = [points[top], *itertools.takewhile(agrees, points[top + 1 :])]
    return Turn(kind, points[top], (before[-1].step, after[-1].step))


def _name(points: Sequence[Point]) -> tuple[str, Point | None, Point]:
    """Name the newest stretch; return its first reading and its change too."""
    known = [point for point in points if point.margin]
    if len(known) < 2 or not points[-1].margin > 0:
        return "unknown", None, _NOWHERE
    stretch, change = _newest_stretch(known)
    values = [point.value for point in known]
    largest = max(abs(point.value) for point in stretch)
    slight = max(_MATTERS * min(np.ptp(values), largest), _SLIGHT * largest)
    if not (_differs(change) and abs(change.value) >= slight):
        if abs(change.value) + change.margin <= _LEVEL_SHARE * largest:
            return "level", stretch[0], change
        return "unclear", None, change
    peak = known[int(np.argmax(values))]
    falling = "compressing" if _differs(_moved(known[0], peak, len(known))) else "falling"
    return "expanding" if change.value > 0 else falling, stretch[0], change


def _newest_stretch(points: Sequence[Point]) -> tuple[Sequence[Point], Point]:
    """Divide a curve into stretches that lines explain; return the newest one, and its change.

    The division has the least sum of squares about its lines, in standard errors, plus a penalty
    for each stretch. Neighbouring stretches share a reading.
    """
    steps, values = np.array([(point.step, point.value) for point in points], float).T
    axes = np.stack([steps, np.log1p(steps)])
    errors = _errors(points, axes[1], values)
    least = np.zeros(len(values))
    for last, squares in enumerate(_squares(axes, values, errors), 1):
        total = least[:last] + squares.min(axis=0) + _PENALTY
        first = int(np.argmin(total))
        least[last] = total[first]
    axis, weights = axes[int(np.argmin(squares[:, first])), first:], errors[first:] ** -2
    # The change along the line is a sum of the readings with these weights.
    off = axis - np.average(axis, weights=weights)
    weights *= off / (weights * off**2).sum() * (axis[-1] - axis[0])
    change = sum_of(points[first:], weights.tolist(), _CHANCE / len(points))
    # Neighbours may err alike: at a correlation of 1/3, long lines scatter by the root of 2 more.
    scatter = math.sqrt(2 - 2 / len(weights)) * float(np.linalg.norm(weights * errors[first:]))
    scatter *= _quantile(_CHANCE_OF_SCATTER / len(points))
    return points[first:], change._replace(margin=max(change.margin, scatter))


def _errors(points: Sequence[Point], axis: _Array, values: _Array) -> _Array:
    """Estimate the standard error of each reading about a line.

    It is the largest of three: what sampling leaves in differences of neighbours, the scatter of
    readings about the line through both neighbours (training itself is not smooth), and what nobody
    would see in a figure. Few readings say little of the scatter, so that margins count as much as
    some of them.
    """
    pairs = [change_between(one, other).margin for one, other in itertools.pairwise(points)]
    beside = np.array([pairs[0], *pairs, pairs[-1]]) / (_T * math.sqrt(2))
    sampling = (beside[1:] + beside[:-1]) / 2
    share = (axis[2:] - axis[1:-1]) / (axis[2:] - axis[:-2])
    off = values[1:-1] - share * values[:-2] - (1 - share) * values[2:]
    off /= np.sqrt(1 + share**2 + (1 - share) ** 2)
    usual = float(np.median([point.margin for point in points])) / _T
    square = (_NORMAL * float(np.median(np.abs(off)))) ** 2 if len(off) else 0.0
    known = max(len(off) - 2, 0)  # the turn of a curve of three or four readings is no scatter
    scatter = math.sqrt((_WORTH * usual**2 + known * square) / (_WORTH + known))
    sizes = float(np.ptp(values)), float(np.median(np.abs(values))), 1e-300
    return np.maximum(sampling, max(scatter, _UNSEEN * max(sizes)))


def _squares(axes: _Array, values: _Array, errors: _Array) -> Iterator[_Array]:
    """Yield, for each reading but the first, the squares about the lines that end at it.

    There is a line from each earlier reading, [axes, readings]. Each reading updates the sums of
    all lines, which are about the means of their stretches (Welford 1962).
    """
    points, weights = np.vstack([axes, values]), errors**-2
    means, totals = points.copy(), weights.copy()
    squares, products = np.zeros_like(points), np.zeros_like(axes)
    for last in range(1, len(values)):
        mean, total, square = means[:, :last], totals[:last], squares[:, :last]
        product = products[:, :last]
        off, share = points[:, last, None] - mean, weights[last] / (total + weights[last])
        moved = off * share
        mean += moved
        moved *= total
        square += moved * off
        product += moved[:-1] * off[-1]
        total += weights[last]
        yield np.maximum(square[-1] - product**2 / np.maximum(square[:-1], 1e-300), 0)
