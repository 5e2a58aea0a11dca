"""How far the cosine of a mean query and a mean key goes by chance.

Chance is two isotropic directions: their cosine c has c^2 ~ Beta(1/2, (width - 1)/2), whatever the
number of tokens that the means were taken over. An untrained head is exactly that, since its mean
query and its mean key are made by independent random matrices (Godey et al., 2401.12143, equation
1).
"""

import math

from geomon.record import Reading

# Probability of one head among all of them beyond the null by chance.
_ALPHA = 0.05
# Mean absolute cosines that have a width: 0.64 is that of 2, the lower end that of 640,000.
_MAGNITUDES = (1e-3, 0.7)


def heads_limit(reading: Reading) -> float:
    """Compute the size of a cosine above which a head is beyond chance, among all heads.

    With random directions, 5 % of readings would have at least one head beyond it (Bonferroni's
    correction).

    Args:
        reading: A reading with `qk_cosine`.

    Returns:
        The limit; NaN without a null, off which the width of a head is read, or without heads.
    """
    column = reading.column("qk_cosine")
    width, count = _width_of(column.whole.get("null_magnitude", math.nan)), len(column.by_head())
    return chance_limit(width, 1 - _ALPHA / count) if width and count else math.nan


def chance_limit(width: int, probability: float = 0.95) -> float:
    """Compute the size below which cosines of isotropic directions lie with a probability.

    Args:
        width: Number of dimensions, at least 2.
        probability: Probability, (0, 1).

    Example:
        >>> round(chance_limit(3), 6)  # on a sphere all cosines are equally likely
        0.95
    """
    from scipy import special  # type: ignore[import-untyped]  # only where it is needed

    return math.sqrt(float(special.betaincinv(0.5, (width - 1) / 2, probability)))


def _width_of(magnitude: float) -> int | None:
    """Find the width at which two isotropic directions have a mean absolute cosine; None if none.

    E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)), which falls with the width: about
    sqrt(2 / (pi (width - 1/2))).
    """
    if not _MAGNITUDES[0] < magnitude < _MAGNITUDES[1]:
        return None
    guess = round(2 / (math.pi * magnitude**2) + 0.5)
    near = range(max(2, guess - 2), guess + 3)
    return min(near, key=lambda width: abs(_magnitude(width) - magnitude))


def _magnitude(width: int) -> float:
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
