"""Nulls: values of data without structure, with which measured values are compared."""

import math

import torch
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor


def isotropic_anisotropy(tokens: int, width: int) -> float:
    """Predict the anisotropy of an isotropic Gaussian sample.

    About (1 + sqrt(width / tokens))^2 / width, the Marchenko-Pastur edge over the trace, and never
    above 1. With n the smaller of `tokens` and `width`, and at least 50 tokens, the mean over
    samples is below this value by at most a share n^(-2/3), usually half of that: simulated, by 0.6
    % at 2,048 x 768, 1.2 % at 2,048 x 64, 3 % at 256 x 64 and 9 % at 64 x 16, where samples scatter
    by 0.7, 1.2, 3 and 6 %. With a handful of tokens the value is too low (by 35 % at 2 x 100).

    Args:
        tokens: Number of rows, at least 2.
        width: Number of columns, at least 1.

    Raises:
        ValueError: If there are fewer than two rows, or no columns.

    Example:
        >>> round(isotropic_anisotropy(2048, 768), 4)
        0.0034
    """
    if tokens < 2 or width < 1:
        raise ValueError(f"expected at least 2 tokens and width 1, got {tokens} and {width}")
    return min(1.0, (1 + (width / tokens) ** 0.5) ** 2 / width)


def isotropic_spectrum(tokens: int, width: int) -> Tensor:
    """Predict the eigenvalues of the covariance of an isotropic Gaussian sample of variance 1.

    They are quantiles of the Marchenko-Pastur law at (i - 1/2) / rank. Eigenvalues repel one
    another, so a sample's eigenvalues are close to the quantiles: within 2 % at 500 x 100
    (simulated), with the largest errors at the ends.

    Args:
        tokens: Number of rows, at least 2.
        width: Number of columns, at least 1.

    Returns:
        [min(tokens - 1, width)], float64, descending.

    Raises:
        ValueError: If there are fewer than two rows, or no columns.

    Example:
        >>> found = isotropic_spectrum(400, 100)
        >>> len(found), round(found[0].item(), 1), round(found[-1].item(), 2)
        (100, 2.2, 0.27)
    """
    if tokens < 2 or width < 1:
        raise ValueError(f"expected at least 2 tokens and width 1, got {tokens} and {width}")
    rank, longer = min(tokens - 1, width), max(tokens - 1, width)
    ratio = rank / longer
    # lambda = 1 + y - 2 sqrt(y) cos t has the density 2 sin(t)^2 / (pi lambda) over t in [0, pi].
    count = 64 * max(rank, 256)
    t = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * (torch.pi / count)
    values = 1 + ratio - 2 * ratio**0.5 * t.cos()
    share = (t.sin().square() / values).cumsum(0)
    wanted = (torch.arange(rank, dtype=torch.float64, device="cpu") + 0.5) / rank
    place = torch.searchsorted(share, wanted * share[-1]).clamp(max=count - 1)
    return values[place].flip(0) * (longer / tokens)


def isotropic_cosine_quantile(width: int, probability: float = 0.95) -> float:
    """Compute a quantile of the cosine between two isotropic random directions.

    (cos + 1) / 2 ~ Beta((width - 1) / 2, (width - 1) / 2), the curve of Godey et al. (2401.12143,
    figure 18) in closed form; about 1.645 / sqrt(width) at 0.95. Range [-1, 1].

    Args:
        width: Number of columns, at least 2, because width 1 has only two directions.
        probability: Probability of a cosine no larger than the quantile, in [0, 1]. Defaults to
            0.95.

    Raises:
        ValueError: If `width` is below 2, or `probability` is outside [0, 1].

    Example:
        >>> round(isotropic_cosine_quantile(768), 4)
        0.0594
    """
    if width < 2:
        raise ValueError(f"expected a width of at least 2, got {width}")
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability}")
    half = (width - 1) / 2
    return float(2 * special.betaincinv(half, half, probability) - 1)


def isotropic_cosine_magnitude(width: int) -> float:
    """Compute the mean absolute cosine between two isotropic random directions.

    E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)), about sqrt(2 / (pi width)): 0.100
    at width 64, 0.142 at 32. This is the absolute `qk_cosine` expected by chance if mean query and
    mean key are unrelated. Range (0, 1].

    Args:
        width: Number of columns, at least 1.

    Raises:
        ValueError: If `width` is below 1.

    Example:
        >>> round(isotropic_cosine_magnitude(64), 4), round(isotropic_cosine_magnitude(32), 4)
        (0.1001, 0.1422)
    """
    if width < 1:
        raise ValueError(f"expected a width of at least 1, got {width}")
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
