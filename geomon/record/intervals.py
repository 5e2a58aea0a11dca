"""The interval of a value, from its values without each group of sequences."""

import functools
import math
from collections.abc import Iterable

from scipy import special  # type: ignore[import-untyped]


@functools.cache
def student(degrees: int, chance: float = 0.05) -> float:
    """Return the two-sided quantile of Student's distribution.

    Args:
        degrees: Degrees of freedom.
        chance: Probability of a value beyond it, on either side. Defaults to 0.05.
    """
    return float(special.stdtrit(degrees, 1 - chance / 2))


def margin(values: Iterable[float], degrees: int = 7, chance: float = 0.05) -> float:
    """Compute the half width of an interval from the values without each group.

    It is t sqrt((G - 1) / G sum (value_g - mean)^2), where t is the quantile of Student's
    distribution with G - 1 degrees of freedom (the grouped jackknife; Quenouille 1956, Tukey 1958).
    The values may be those of a difference, or of any other sum, of readings that leave out the
    same groups.

    Args:
        values: Value without each of the G = 8 groups.
        degrees: Degrees of freedom. Defaults to 7.
        chance: Probability that the interval misses the value. Defaults to 0.05, for 95 %.

    Returns:
        At least 0; NaN if there are no values or any is not finite.

    Example:
        >>> round(margin([1.0, 3.0] * 4), 3) # 2.365 sqrt(7/8 x 8)
        6.256
    """
    found = [*map(float, values)]
    if not found or not all(map(math.isfinite, found)):
        return math.nan
    mean = [math.fsum(found) / len(found)] * len(found)
    return student(degrees, chance) * math.sqrt(1 - 1 / len(found)) * math.dist(found, mean)
