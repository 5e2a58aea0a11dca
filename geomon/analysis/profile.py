"""Profiles: a metric over depth and heads, as numbers that pages can compare.

The depth of layer l of L is l / (L - 1): 0 is the input of the first block, 1 the output of the
last block.
"""

import math
from collections.abc import Iterable, Sequence

from geomon.record import NAN, Reading

# If layer 0 reaches more than this many times as far as the blocks, the axis leaves it out.
_FAR_ABOVE = 2


def layers_of(readings: Iterable[Reading]) -> range:
    """Return all depths of the main stack of a run.

    Args:
        readings: Readings of a run.
    """
    columns = (column for reading in readings for column in reading.columns.values())
    return range(max((column.depths().stop for column in columns), default=0))


def profile_of(reading: Reading, metric: str, *, part: str = "") -> list[float]:
    """Collect the values of a metric by layer, first to last; NaN for a layer without one.

    Args:
        reading: A reading.
        metric: Name of a metric.
        part: Name of a part of it. Defaults to "", for its value.
    """
    column = reading.column(metric, part)
    return [NAN] * column.first * bool(column.layers) + column.layers


def bulge(profile: Sequence[float]) -> float:
    """Compare the middle of a profile with its ends: (middle - ends) / |ends|.

    The middle is the mean over the layers of depth 1/3 to 2/3, and the ends the mean of the first
    and last layer. It is above 0 for a bell, like the anisotropy of decoders (Razzhigaev et al.,
    2311.05928), 0 for a straight line, below 0 for a bowl, and 1 if the middle is twice as high.

    Args:
        profile: Value at each layer, first to last; NaN inside is ignored.

    Returns:
        The bulge, [-1, inf) if no value is negative; NaN with one layer, if an end or the whole
        middle is missing, or if the ends cancel.

    Example:
        >>> round(bulge([0.2, 0.5, 0.8, 0.5, 0.2]), 6), bulge([1.0, 2.0, 3.0, 4.0])
        (3.0, 0.0)
    """
    last = len(profile) - 1
    # In integers, because a depth of 1/3 would be subject to rounding.
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
    """Find the depth where a profile is highest.

    Args:
        profile: Value at each layer, first to last; NaN is ignored.

    Returns:
        Depth of the first of equal peaks, [0, 1]; NaN with one layer or without values.

    Example:
        >>> peak_depth([0.2, 0.5, 0.8, 0.5, 0.2]), peak_depth([0.2])
        (0.5, nan)
    """
    known = [(value, -layer) for layer, value in enumerate(profile) if not math.isnan(value)]
    if len(profile) < 2 or not known:
        return math.nan
    return -max(known)[1] / (len(profile) - 1)


def is_far_above(first: Iterable[float], blocks: Iterable[float]) -> bool:
    """Decide whether layer 0, the embedding, would flatten the blocks on a common axis.

    It does if its distance above the lowest block (or above 0, if that is lower) is more than twice
    the distance of the highest block. A page then fits the axis to the blocks and says how high
    layer 0 is.

    Args:
        first: Values of a metric at layer 0, for all profiles on the axis; NaN is ignored.
        blocks: Values at all other layers of these profiles; NaN is ignored.

    Returns:
        Whether it does; False without values, or if all blocks are 0.

    Example:
        >>> is_far_above([25.0], [1.0, 6.0, 2.0]), is_far_above([5.0], [1.0, 6.0, 2.0])
        (True, False)
    """
    highest = max((value for value in first if not math.isnan(value)), default=-math.inf)
    known = [0.0, *(value for value in blocks if not math.isnan(value))]
    low, high = min(known), max(known)
    return highest - low > _FAR_ABOVE * (high - low) > 0
