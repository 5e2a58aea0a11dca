"""Means and shares over independent repetitions, with their intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats  # type: ignore[import-untyped]


class Estimate(NamedTuple):
    """A mean or share of independent repetitions with its 95 % interval.

    Attributes:
        mean: The mean, or the share.
        low: Lower end of the interval.
        high: Upper end of the interval.
        margin: Half width of the interval; infinity for the mean of a single value.
    """

    mean: float
    low: float
    high: float
    margin: float


def estimate_share(outcomes: Sequence[float]) -> Estimate:
    """Estimate a probability from independent repetitions.

    The interval is exact (Clopper and Pearson): the probabilities that the number found, or a more
    extreme one, does not contradict at 2.5 % on either side. Three of three leave .29 to 1.

    Raises:
        ValueError: There is no outcome, or one that is neither 0 nor 1.

    Example:
        >>> two = estimate_share([1, 0, 1])
        >>> round(two.mean, 2), round(two.low, 2), round(two.high, 2)
        (0.67, 0.09, 0.99)
    """
    if not outcomes or not all(outcome in (0, 1) for outcome in outcomes):
        raise ValueError(f"{list(outcomes)}: give one outcome or more, each 0 or 1")
    so, count = sum(map(bool, outcomes)), len(outcomes)
    low = float(stats.beta.ppf(0.025, so, count - so + 1)) if so else 0.0
    high = float(stats.beta.ppf(0.975, so + 1, count - so)) if so < count else 1.0
    return Estimate(so / count, low, high, (high - low) / 2)


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of a population from independent draws, with Student's t.

    Raises:
        ValueError: There is no value, or one that is not finite.

    Example:
        >>> three = estimate([1.0, 2.0, 3.0])
        >>> three.mean, round(three.margin, 3)
        (2.0, 2.484)
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"{list(values)}: give one finite value or more")
    count, margin = len(values), math.inf
    mean = math.fsum(values) / count
    if count > 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        margin = float(stats.t.ppf(0.975, count - 1)) * math.sqrt(variance / count)
    return Estimate(mean, mean - margin, mean + margin, margin)
