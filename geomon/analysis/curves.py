"""Curves: how one value of a model changes over training, with its errors."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from geomon.analysis.phase import Phase, Z, exceeds_errors, find_phase, robust_errors
from geomon.record import Reading, tags
from geomon.record.columns import NAN, Column


@dataclass(frozen=True)
class Curve:
    """One value of a model over training.

    Attributes:
        steps: Training steps, ascending.
        values: Finite values, one for each step.
        errors: Standard errors of the values; 0 where unknown.
        sampled: For each error whether it is one over sequences, which makes an interval. False
            for a deviation over splits of the rows: these are of the same sequences, and it may be
            a third of that. Empty where all errors are over sequences.
    """

    steps: list[int]
    values: list[float]
    errors: list[float]
    sampled: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def margins(self) -> list[float]:
        """Half widths of the 95 % intervals of the values; 0 where unknown."""
        if not self.sampled:
            return [Z * error for error in self.errors]
        pairs = zip(self.errors, self.sampled, strict=True)
        return [Z * error if sampled else 0.0 for error, sampled in pairs]

    def phase(self) -> Phase:
        """Find the phase at the end of the curve."""
        return find_phase(self.steps, self.values, self.errors)

    def robust_errors(self) -> list[float]:
        """Estimate errors that do not rely on one deviation over few splits."""
        return robust_errors(self.values, self.errors)

    def differs(self, one: int, other: int) -> bool:
        """Return whether two values of the curve differ by more than their errors.

        Args:
            one: Index of a value.
            other: Index of the value to compare it with.
        """
        errors = self.robust_errors()
        difference = abs(self.values[one] - self.values[other])
        return exceeds_errors(difference, errors[one], errors[other])


def single_source(readings: Iterable[Reading]) -> list[Reading]:
    """Select one reading per step, steps ascending, all from the source that the run used most.

    Readings in the training forward and on a probe see different tokens: a curve that mixes them
    has steps that the model did not take. Of two equally common sources, that of the last reading
    is taken; of several readings at one step, the last.

    Args:
        readings: Readings of a run, in the order in which they were written.
    """
    everything = list(readings)
    if not everything:
        return []
    counts = Counter(reading.source for reading in reversed(everything))
    source = counts.most_common(1)[0][0]
    by_step = {reading.step: reading for reading in everything if reading.source == source}
    return [by_step[step] for step in sorted(by_step)]


class Measured(NamedTuple):
    """A value with its error.

    Attributes:
        value: The value; NaN where it was not measured.
        error: Its standard error; 0 where unknown.
        sampled: Whether the error is one over sequences, which makes an interval.
    """

    value: float
    error: float
    sampled: bool


def measured(
    reading: Reading, metric: str, *, part: str = "", layer: int | None = None
) -> Measured:
    """Return a value of the main stack of a reading, with its error.

    A half width of a 95 % interval (`margin`) is 1.96 errors; where there is none, the deviation
    over splits of the rows (`std`) stands for the error, but makes no interval.

    Args:
        reading: A reading.
        metric: Name of a metric.
        part: Name of a part of it; "" for its value.
        layer: Number of a layer; None for the mean over layers.
    """
    column = reading.column(metric, part)
    value = _entry(column, layer)
    width = column.mean_margin if layer is None else column.margin_at(layer)
    if math.isfinite(width):
        return Measured(value, width / Z, sampled=True)
    deviation = _entry(reading.column(metric, f"{part}/std" if part else "std"), layer)
    return Measured(value, deviation if math.isfinite(deviation) else 0.0, sampled=False)


def _entry(column: Column, layer: int | None) -> float:
    return column.mean if layer is None else column.at(layer)


def curve_of(
    readings: Iterable[Reading], metric: str, *, part: str = "", layer: int | None = None
) -> Curve:
    """Collect the curve of a metric of the main stack, with its errors where there are any.

    Args:
        readings: Readings of a run.
        metric: Name of a metric.
        part: Name of a part of it, "k32" say; "" for its value.
        layer: Number of a layer; None for the mean over layers.
    """
    return _curve(readings, lambda reading: measured(reading, metric, part=part, layer=layer))


def training_curve(readings: Iterable[Reading], name: str = tags.LOSS) -> Curve:
    """Collect the curve of a value that the training logs; errors are unknown (0).

    Args:
        readings: Readings of a run.
        name: Name of the value.
    """
    return plain_curve(readings, lambda reading: reading.training.get(name, NAN))


def plain_curve(readings: Iterable[Reading], value: Callable[[Reading], float]) -> Curve:
    """Collect the curve of a function of readings; errors are unknown (0).

    Args:
        readings: Readings of a run.
        value: Function of a reading; NaN where there is no value.
    """
    return _curve(readings, lambda reading: Measured(value(reading), 0.0, sampled=False))


def _curve(readings: Iterable[Reading], get: Callable[[Reading], Measured]) -> Curve:
    points = [(reading.step, get(reading)) for reading in single_source(readings)]
    points = [(step, found) for step, found in points if math.isfinite(found.value)]
    return Curve(
        [step for step, _ in points],
        [found.value for _, found in points],
        [found.error for _, found in points],
        [found.sampled for _, found in points],
    )


def mean_abs_over_heads(readings: Iterable[Reading], metric: str) -> Curve:
    """Average the absolute value of a metric over all heads of all layers; errors are unknown (0).

    Cosines of both signs cancel in the metric's own mean.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with values of heads.
    """
    return plain_curve(readings, lambda reading: reading.column(metric).mean_size())
