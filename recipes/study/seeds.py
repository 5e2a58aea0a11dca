"""Means and shares over independent repetitions, with their intervals."""

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


@dataclass(frozen=True)
class Share:
    """Share of independent repetitions in which something is so, with its exact 95 % interval.

    The interval is that of Clopper and Pearson: the probabilities that the number found, or a more
    extreme one, does not contradict at 2.5 % on either side. Three of three leave .29 to 1.

    Attributes:
        so: Number of repetitions in which it is so.
        count: Number of all repetitions.
    """

    so: int
    count: int

    @property
    def mean(self) -> float:
        """The share found."""
        return self.so / self.count

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        if self.so == 0:
            return 0.0
        return float(stats.beta.ppf(0.025, self.so, self.count - self.so + 1))

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        if self.so == self.count:
            return 1.0
        return float(stats.beta.ppf(0.975, self.so + 1, self.count - self.so))


def estimate_share(outcomes: Sequence[float]) -> Share:
    """Estimate a probability from independent repetitions.

    Args:
        outcomes: For each repetition 1 where it is so and 0 where it is not.

    Raises:
        ValueError: There is no outcome, or one that is neither 0 nor 1.

    Example:
        >>> two = estimate_share([1, 0, 1])
        >>> round(two.mean, 2), round(two.low, 2), round(two.high, 2)
        (0.67, 0.09, 0.99)
    """
    if not outcomes or not all(outcome in (0, 1) for outcome in outcomes):
        raise ValueError(f"{list(outcomes)}: give one outcome or more, each 0 or 1")
    return Share(sum(map(bool, outcomes)), len(outcomes))


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
