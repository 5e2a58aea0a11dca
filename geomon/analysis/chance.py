"""How large the cosine of a mean query and a mean key is by chance.

By chance, they are two isotropic directions, whose cosine c has c^2 ~ Beta(1/2, (width - 1)/2) for
any number of tokens in the means. This is exactly true for an untrained head, because independent
random matrices make its mean query and mean key (Godey et al., 2401.12143, equation 1).
"""

import math

from geomon.record import Reading

# Probability that at least one head is beyond the limit by chance.
_ALPHA = 0.05
# Range of mean absolute cosines with a known width: from width 640,000 to width 2 (0.64).
_MAGNITUDES = (1e-3, 0.7)


def heads_limit(reading: Reading) -> float:
    """Compute the absolute cosine above which a head is beyond chance, among all heads.

    With random directions, 5 % of readings would have at least one head beyond it (Bonferroni's
    correction).

    Args:
        reading: A reading with `qk_cosine`.

    Returns:
        The limit; NaN without heads, or without a null (which tells the width of a head).
    """
    column = reading.column("qk_cosine")
    magnitude, count = column.whole.get("null_magnitude", math.nan), len(column.by_head())
    if not count or not _MAGNITUDES[0] < magnitude < _MAGNITUDES[1]:
        return math.nan
    # E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)), about sqrt(2 / (pi (width -
    # 1/2))): near enough to tell every width from the next.
    width = round(2 / (math.pi * magnitude**2) + 0.5)
    return chance_limit(width, 1 - _ALPHA / count)


def chance_limit(width: int, probability: float = 0.95) -> float:
    """Compute the absolute value below which cosines of isotropic directions stay by chance.

    Args:
        width: Number of dimensions, at least 2.
        probability: Probability of staying below it, (0, 1). Defaults to 0.95.

    Example:
        >>> round(chance_limit(3), 6)  # on a sphere all cosines are equally likely
        0.95
    """
    from scipy import special  # type: ignore[import-untyped]  # slow to load

    return math.sqrt(float(special.betaincinv(0.5, (width - 1) / 2, probability)))
