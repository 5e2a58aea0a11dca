"""Means and shares over independent repetitions, with their intervals."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
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
    found = stats.binomtest(sum(map(bool, outcomes)), len(outcomes))
    low, high = found.proportion_ci(0.95, "exact")
    return Estimate(float(found.statistic), float(low), float(high), float(high - low) / 2)


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
    mean, margin = fmean(values), math.inf
    if len(values) > 1:
        quantile = float(stats.t.ppf(0.975, len(values) - 1))
        margin = quantile * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - margin, mean + margin, margin)
