"""Means over independent repetitions, with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Estimate:
    """Mean of independent repetitions with its 95 % interval, by Student's t.

    Attributes:
        mean: Mean of the values.
        margin: Half width of the interval; infinity for a single value.
        count: Number of values.
    """

    mean: float
    margin: float
    count: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.margin


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of a population from independent draws.

    Args:
        values: One finite value for each repetition, for instance for each seed.

    Raises:
        ValueError: There is no value, or one that is not finite.

    Example:
        >>> three = estimate([1.0, 2.0, 3.0])
        >>> three.mean, round(three.margin, 3)
        (2.0, 2.484)
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"{list(values)}: give one finite value or more")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(stats.t.ppf(0.975, count - 1))
    return Estimate(mean, quantile * math.sqrt(variance / count), count)
