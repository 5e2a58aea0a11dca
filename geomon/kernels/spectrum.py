"""The spectrum of the covariance of hidden states, and what is read off it."""

import torch
from torch import Tensor

from geomon.kernels.checks import centre, require_rows

# Up to this side the full spectrum is as fast as Lanczos (4,096 tokens, isotropic, the worst case).
_SMALL_SIDE = 768

# Four vectors at once: a product costs little more than with one, since reading the rows is what
# takes the time; and up to four eigenvalues closer than the tolerance cannot be taken for one.
_BLOCK = 4

_TOLERANCE = 1e-9


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


def effective_rank(spectrum: Tensor) -> Tensor:
    """Number of directions that the variance fills: exp of the entropy of its shares.

    exp(-sum p_i log p_i) with p_i = lambda_i / sum lambda (Roy and Vetterli, 2007, on eigenvalues).
    RankMe as often coded takes the shares of the singular values, sigma_i / sum sigma, which gives
    a larger number. Range [1, rank]; never below `participation_ratio`.

    Args:
        spectrum: Eigenvalues, descending, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])).item(), 6)
        3.0
    """
    return torch.special.entr(_shares(spectrum)).sum().exp()


def participation_ratio(spectrum: Tensor) -> Tensor:
    """Number of directions that the variance fills: (sum lambda)^2 / sum lambda^2.

    Range [1, rank]; between `stable_rank` and `effective_rank`. A sample of n tokens of an
    isotropic Gaussian in width d gives about n d / (n + d).

    Args:
        spectrum: Eigenvalues, descending, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> round(participation_ratio(torch.tensor([3.0, 1.0])).item(), 6)
        1.6
    """
    return 1 / _shares(spectrum).square().sum()


def stable_rank(spectrum: Tensor) -> Tensor:
    """Variance in units of the leading eigenvalue: sum lambda / lambda_1 = 1 / anisotropy.

    Equal to |X|_F^2 / |X|_2^2 of the centred rows. Range [1, rank].

    Args:
        spectrum: Eigenvalues, descending, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> stable_rank(torch.tensor([3.0, 1.0, 2.0])).item()
        2.0
    """
    return 1 / anisotropy(spectrum)


def leading_share(hidden: Tensor) -> Tensor:
    """`anisotropy(spectrum(hidden))` without the rest of the spectrum: for wide layers.

    lambda_1 by block Lanczos with full reorthogonalisation in float64, from products with the
    centred rows; the trace is their sum of squares. The same rows give the same value: the starting
    block is fixed. Sides of at most 768, where it is as fast, and rows that do not converge to 1e-9
    within a third of the smaller side go through the full spectrum.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        A scalar in (0, 1]; NaN where all rows are equal.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> leading_share(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).item()
        0.5
    """
    rows = require_rows(hidden)
    centred = centre(rows)
    trace = centred.square().sum()
    if not 0 < trace < torch.inf:
        return torch.full_like(trace, torch.nan)
    if min(rows.shape) <= _SMALL_SIDE:
        return anisotropy(spectrum(rows))
    top = _leading_eigenvalue(centred if rows.shape[1] <= rows.shape[0] else centred.T)
    return anisotropy(spectrum(rows)) if top is None else top / trace


def _leading_eigenvalue(rows: Tensor) -> Tensor | None:
    """Largest eigenvalue of rows' rows, [width, width]; None where it does not converge.

    With r the residual of the leading Ritz pair and g its distance to the second Ritz value, the
    error is at most r and about r^2 / g.
    """
    width = rows.shape[1]
    start = torch.randn(width, _BLOCK, generator=torch.Generator().manual_seed(0)).to(rows)
    basis = torch.linalg.qr(start).Q
    block, projected = basis, basis.new_zeros(0, 0)
    check = 0  # size of the basis from which the Ritz pair is looked at again
    while basis.shape[1] <= width // 3:
        image = ((rows @ block).T @ rows).T  # rows.T @ (...) is six times slower at 4,096 x 4,096
        column = basis.T @ image
        image = image - basis @ column
        size, fresh = basis.shape[1], block.shape[1]
        grown = basis.new_zeros(size, size)
        grown[: size - fresh, : size - fresh] = projected
        grown[:, size - fresh :] = column
        grown[size - fresh :] = column.T
        projected = grown
        # Once more: one pass leaves rounding errors along the directions that have converged.
        image = image - basis @ (basis.T @ image)
        left, scale, right = torch.linalg.svd(image, full_matrices=False)
        new = scale > 1e-14 * projected.diagonal().sum()
        if size >= check or not new.any():
            values, vectors = torch.linalg.eigh(projected)
            residual = (scale[:, None] * (right @ vectors[size - fresh :, -1:])).norm()
            gap = values[-1] - values[-2]
            if torch.minimum(residual, residual.square() / gap) <= _TOLERANCE * values[-1]:
                return values[-1]
            check = size + max(_BLOCK, size // 8)  # the small problem stays a small part of it all
        if not new.any():
            return None
        block = left[:, new]
        block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
        basis = torch.cat([basis, block], dim=1)
    return None


def _shares(spectrum: Tensor) -> Tensor:
    """Eigenvalues as shares of their sum, in float64; NaN where the sum is 0."""
    if spectrum.ndim != 1 or len(spectrum) == 0:
        raise ValueError(f"expected eigenvalues [rank], got {list(spectrum.shape)}")
    return spectrum.double() / spectrum.double().sum()
