"""Curves: how one value of a model changes over training, with its margins."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from geomon.analysis.phase import Phase, Point, phase_of
from geomon.record import Reading


@dataclass(frozen=True)
class Curve:
    """One value of a model over training.

    Attributes:
        points: Its readings with finite values, steps ascending.
    """

    points: list[Point]

    def __len__(self) -> int:
        return len(self.points)

    @property
    def steps(self) -> list[int]:
        """Training steps, ascending."""
        return [point.step for point in self.points]

    @property
    def values(self) -> list[float]:
        """Finite values, one for each step."""
        return [point.value for point in self.points]

    @property
    def margins(self) -> list[float]:
        """Half widths of the 95 % intervals of the values; 0 if unknown."""
        return [point.margin for point in self.points]

    def phase(self) -> Phase:
        """Find the phase at the end of the curve."""
        return phase_of(self.points)


def single_source(readings: Iterable[Reading]) -> list[Reading]:
    """Select one reading per step, steps ascending, all from the source that the run used most.

    Readings in the training forward and on a probe see different tokens, so a curve that mixes them
    has steps that the model did not take. If two sources are equally common, the source of the last
    reading is taken; if a step has several readings, the last one is.

    Args:
        readings: Readings of a run, in the order in which they were written.
    """
    everything = list(readings)
    counts = Counter(reading.source for reading in reversed(everything))
    source = max(counts, key=counts.__getitem__, default="")
    by_step = {reading.step: reading for reading in everything if reading.source == source}
    return [by_step[step] for step in sorted(by_step)]


def measured(reading: Reading, metric: str, *, part: str = "", layer: int | None = None) -> Point:
    """Return a value of the main stack of a reading, with its margin.

    Args:
        reading: A reading.
        metric: Name of a metric.
        part: Name of a part of it. Defaults to "", for its value.
        layer: Index of a layer. Defaults to None, for the mean over layers.
    """
    column = reading.column(metric, part)
    without = column.mean_without if layer is None else []
    margin = column.margin_at(layer)
    known = margin if math.isfinite(margin) else 0.0
    return Point(reading.step, column.at(layer), known, without, reading.fingerprint)


def curve_of(
    readings: Iterable[Reading], metric: str, *, part: str = "", layer: int | None = None
) -> Curve:
    """Collect the curve of a metric of the main stack, with margins if there are any.

    Args:
        readings: Readings of a run.
        metric: Name of a metric.
        part: Name of a part of it, such as "k32". Defaults to "", for its value.
        layer: Index of a layer. Defaults to None, for the mean over layers.
    """
    return _curve(readings, lambda reading: measured(reading, metric, part=part, layer=layer))


def plain_curve(readings: Iterable[Reading], value: Callable[[Reading], float]) -> Curve:
    """Collect the curve of a function of readings; its margins are unknown (0)."""
    return _curve(readings, lambda reading: Point(reading.step, value(reading), 0.0))


def _curve(readings: Iterable[Reading], get: Callable[[Reading], Point]) -> Curve:
    points = map(get, single_source(readings))
    return Curve([point for point in points if math.isfinite(point.value)])
