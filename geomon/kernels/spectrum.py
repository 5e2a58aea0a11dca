"""The spectrum of the covariance of hidden states, and what is read off it."""

import torch
from torch import Tensor

from geomon.kernels.checks import centre, require_rows


def spectrum(hidden: Tensor) -> Tensor:
    """Eigenvalues of the centred covariance, descending.

    lambda_i = s_i^2 / tokens, with s the singular values of the centred rows; their sum is the
    `variance`. Centred in float64 first, then taken from the smaller Gram matrix (width x width or
    tokens x tokens) and clamped at 0: a float32 covariance of data far from the origin has negative
    eigenvalues.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [min(tokens, width)], float64, in squared units of `hidden`.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> spectrum(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])).tolist()
        [2.0, 0.5]
    """
    centred = centre(require_rows(hidden))
    tokens, width = centred.shape
    gram = centred.T @ centred if width <= tokens else centred @ centred.T
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0) / tokens


def anisotropy(spectrum: Tensor) -> Tensor:
    """Share of the variance along the leading direction: lambda_1 / sum lambda.

    Equal to s_1^2 / sum s_i^2 of the centred rows (Razzhigaev et al., 2311.05928, section 2.3).
    Range (0, 1]; an isotropic Gaussian of n tokens in width d gives about (1 + sqrt(d/n))^2 / d.
    A few rows of massive norm drive it to 1 by themselves.

    Args:
        spectrum: Eigenvalues, descending, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> anisotropy(torch.tensor([3.0, 1.0])).item()
        0.75
    """
    if spectrum.ndim != 1 or len(spectrum) == 0:
        raise ValueError(f"expected eigenvalues [rank], got {list(spectrum.shape)}")
    return spectrum[0].double() / spectrum.double().sum()
