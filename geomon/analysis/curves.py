"""Curves: how one value of a model changes over training, with its errors."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from geomon.analysis.phase import Phase, Z, exceeds_errors, find_phase, robust_errors
from geomon.record import Reading, Readings, tags


@dataclass(frozen=True)
class Curve:
    """Values of a tag over training.

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


def curve_of(readings: Iterable[Reading], tag: str) -> Curve:
    """Collect the curve of a tag, with its errors where there are any.

    A half width of a 95 % interval (`margin`) is 1.96 errors; where there is none, the deviation
    over splits of the rows (`std`) stands for the error, but makes no interval.

    Args:
        readings: Readings of a run.
        tag: Name of a value, for instance "twonn/mean".
    """
    selected = Readings([], single_source(readings))
    table = selected.table([tag, f"{tag}/{tags.margin_part()}", f"{tag}/std"])
    rows = np.flatnonzero(np.isfinite(table[:, 0]))
    values, margins, deviations = table[rows].T
    deviations = np.where(np.isfinite(deviations), deviations, 0.0)
    sampled = np.isfinite(margins)
    errors = np.where(sampled, margins / Z, deviations)
    steps = [selected[row].step for row in rows.tolist()]
    return Curve(steps, values.tolist(), errors.tolist(), sampled.tolist())


def standard_error(reading: Reading, tag: str) -> float:
    """Return the standard error of a value; 0 where it is unknown.

    Args:
        reading: A reading.
        tag: Name of a value, for instance "twonn/mean".
    """
    width = reading.values.get(f"{tag}/{tags.margin_part()}", math.nan)
    if math.isfinite(width):
        return width / Z
    deviation = reading.values.get(f"{tag}/std", 0.0)
    return deviation if math.isfinite(deviation) else 0.0


def mean_abs_over_heads(readings: Iterable[Reading], metric: str) -> Curve:
    """Average the absolute value of a metric over all heads of all layers; errors are unknown (0).

    Cosines of both signs cancel in the metric's own mean.

    Args:
        readings: Readings of a run.
        metric: Name of a metric with values of heads.
    """
    selected = Readings([], single_source(readings))
    table = np.abs(selected.table(list(tags.heads_of(selected.tags(), metric).values())))
    steps, means = [], []
    for reading, row, known in zip(selected, table, np.isfinite(table), strict=True):
        if known.any():
            steps.append(reading.step)
            means.append(statistics.fmean(row[known].tolist()))
    return Curve(steps, means, [0.0] * len(steps))
