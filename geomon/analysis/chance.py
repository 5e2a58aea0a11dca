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
    width, count = _width_of(column.whole.get("null_magnitude", math.nan)), len(column.by_head())
    return chance_limit(width, 1 - _ALPHA / count) if width and count else math.nan


def chance_limit(width: int, probability: float = 0.95) -> float:
    """Compute the absolute value below which cosines of isotropic directions stay by chance.

    Args:
        width: Number of dimensions, at least 2.
        probability: Probability of staying below it, (0, 1). Defaults to 0.95.

    Example:
        >>> round(chance_limit(3), 6)  # on a sphere all cosines are equally likely
        0.95
    """
    from scipy import special  # type: ignore[import-untyped]  # imported only when needed

    return math.sqrt(float(special.betaincinv(0.5, (width - 1) / 2, probability)))


def _width_of(magnitude: float) -> int | None:
    """Find the width at which isotropic directions have this mean absolute cosine, or None.

    E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)) decreases with the width: about
    sqrt(2 / (pi (width - 1/2))).
    """
    if not _MAGNITUDES[0] < magnitude < _MAGNITUDES[1]:
        return None
    guess = round(2 / (math.pi * magnitude**2) + 0.5)
    near = range(max(2, guess - 2), guess + 3)
    return min(near, key=lambda width: abs(_magnitude(width) - magnitude))


def _magnitude(width: int) -> float:
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
