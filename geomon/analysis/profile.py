"""Profiles: a metric over depth and heads, as numbers that pages can compare.

The depth of layer l of L is l / (L - 1): 0 is the input of the first block, 1 the last block's
output.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.record import Reading
from geomon.record.columns import NAN, Column

# Layers from which a correlation over depth means anything, and up to which its p-value is exact.
_ENOUGH, _EXACT = 4, 9
# How many times as far as the blocks layer 0 may reach before an axis is theirs alone.
_FAR_ABOVE = 2


class Correlation(NamedTuple):
    """Correlation of two metrics over layers.

    Attributes:
        value: Correlation, [-1, 1]; NaN if a metric does not vary.
        p_value: Two-sided probability of one at least as strong between independent series.
    """

    value: float
    p_value: float


def correlate(one: Column, other: Column) -> dict[str, Correlation]:
    """Correlate two metrics over the layers that have both.

    Godey et al. (2401.12143, figures 5 and 16) relate `drift_norm` to `cosine` this way. Up to 9
    layers the p-value is exact, over all permutations; with more it is that of normal series.
    Neighbouring layers are not independent, so the p-values are smaller than they should be.

    Args:
        one: Column of a metric.
        other: Column of another.

    Returns:
        "spearman" and "pearson"; nothing with fewer than 4 layers.
    """
    values, others = one.by_layer(), other.by_layer()
    layers = [layer for layer in values if layer in others]
    if len(layers) < _ENOUGH:
        return {}
    x, y = (np.array([each[layer] for layer in layers]) for each in (values, others))
    if (x == x[0]).all() or (y == y[0]).all():
        nothing = Correlation(NAN, NAN)
        return {"spearman": nothing, "pearson": nothing}
    from scipy import stats  # type: ignore[import-untyped]  # takes a second

    found = {}
    for name, pair in (("spearman", (stats.rankdata(x), stats.rankdata(y))), ("pearson", (x, y))):
        # Squares of the smallest values are 0: in units of the largest deviation none is.
        a, b = ((each - each.mean()) / np.abs(each - each.mean()).max() for each in pair)
        result = stats.pearsonr(a, b)
        p_value = _exact_p(a, b) if len(layers) <= _EXACT else float(result.pvalue)
        found[name] = Correlation(float(result.statistic), p_value)
    return found


def _exact_p(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Compute twice the smaller tail of x . y over all orders of y, as permutation_test does.

    scipy's function takes seven seconds for 9 layers, and this a hundredth of that.
    """
    sums = y[_orders(len(y))] @ x
    rounding = 1e-12 * len(x)  # far above the rounding of equal sums, which must count as equal
    tails = (sums <= x @ y + rounding).mean(), (sums >= x @ y - rounding).mean()
    return min(1.0, 2 * float(min(tails)))


@functools.lru_cache(maxsize=1)
def _orders(count: int) -> NDArray[np.int8]:
    return np.array(list(itertools.permutations(range(count))), dtype=np.int8)


def profile_of(reading: Reading, metric: str, *, part: str = "") -> list[float]:
    """Collect the values of a metric by layer, first to last; NaN if a layer has none.

    Args:
        reading: A reading.
        metric: Name of a metric.
        part: Name of a part of it; "" for its value.
    """
    column = reading.column(metric, part)
    return [NAN] * column.first * bool(column.layers) + column.layers


def bulge(profile: Sequence[float]) -> float:
    """Compare the middle of a profile with its ends: (middle - ends) / |ends|.

    The middle is the mean over the layers of depth 1/3 to 2/3, the ends the mean of the first layer
    and the last. Above 0 for a bell, as the anisotropy of decoders has it (Razzhigaev et al.,
    2311.05928), 0 for a straight line, below 0 for a bowl; 1 where the middle is twice as high.

    Args:
        profile: Value at each layer, first to last; a NaN inside is left out.

    Returns:
        The bulge, [-1, inf) where no value is below 0; NaN with one layer, where an end or the
        whole middle has no value, or where the ends cancel.

    Example:
        >>> round(bulge([0.2, 0.5, 0.8, 0.5, 0.2]), 6), bulge([1.0, 2.0, 3.0, 4.0])
        (3.0, 0.0)
    """
    last = len(profile) - 1
    # In integers: a depth of 1/3 is a rounding error away from 1/3.
    inside = [
        value
        for layer, value in enumerate(profile)
        if last <= 3 * layer <= 2 * last and not math.isnan(value)
    ]
    if last < 1 or not inside:
        return math.nan
    ends = (profile[0] + profile[-1]) / 2
    return (math.fsum(inside) / len(inside) - ends) / abs(ends) if ends else math.nan


def peak_depth(profile: Sequence[float]) -> float:
    """Find the depth at which a profile is highest.

    Args:
        profile: Value at each layer, first to last; a NaN is left out.

    Returns:
        Depth of the first of equal peaks, [0, 1]; NaN with one layer or without a value.

    Example:
        >>> peak_depth([0.2, 0.5, 0.8, 0.5, 0.2])
        0.5
    """
    known = [(value, -layer) for layer, value in enumerate(profile) if not math.isnan(value)]
    if len(profile) < 2 or not known:
        return math.nan
    return -max(known)[1] / (len(profile) - 1)


def is_far_above(first: Iterable[float], blocks: Iterable[float]) -> bool:
    """Decide whether layer 0, the embedding, would flatten the blocks on an axis of both.

    It does where it lies more than twice as far above the lowest block, or 0 where that is lower,
    as the highest does. A page then gives the axis to the blocks and says how high layer 0 is.

    Args:
        first: Values of a metric at layer 0, of all profiles on the axis; a NaN is left out.
        blocks: Values at all other layers of these profiles; a NaN is left out.

    Returns:
        Whether it does; False without values, and where all blocks are 0.

    Example:
        >>> is_far_above([25.0], [1.0, 6.0, 2.0]), is_far_above([5.0], [1.0, 6.0, 2.0])
        (True, False)
    """
    highest = max((value for value in first if not math.isnan(value)), default=-math.inf)
    known = [0.0, *(value for value in blocks if not math.isnan(value))]
    low, high = min(known), max(known)
    return highest - low > _FAR_ABOVE * (high - low) > 0
