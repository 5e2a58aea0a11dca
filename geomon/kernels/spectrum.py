"""The spectrum of the covariance of hidden states, and the metrics computed from it."""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import (
    centre,
    centred_blocks,
    mean_in_parts,
    require_rows,
    sum_of,
)
from geomon.kernels.products import product_with_itself

# Up to this side the full spectrum is as fast as Lanczos (4,096 tokens, isotropic, the worst case).
_SMALL_SIDE = 256

# Shares of the leading eigenvalue: the largest estimate r^2 / g of its error, and the largest
# residual r, which bounds the error where the two leading eigenvalues are so near one another that
# g is not their distance.
_TOLERANCE = 1e-9
_RESIDUAL = 1e-8

# Lanczos vectors for which memory is allocated at first.
_STEPS = 64

# Width up to which a block of rows is multiplied with itself at once; strips of columns in which
# the Gram matrix of wider rows, which is large beside a block, is added up in place.
_NARROW = 1024
_STRIPS = 4

# Steps without convergence after which computing a Gram matrix pays, where rows are many: products
# with it cost less than those with the rows.
_STEPS_TO_GRAM = 12


# Fewest ranks through which a power law is laid.
_FEWEST_RANKS = 5


class PowerLaw(NamedTuple):
    """A power law laid through eigenvalues. Scalars, float64.

    Attributes:
        alpha: Its exponent: lambda_r ~ r^(-alpha).
        r_squared: Share of the variance of the log eigenvalues that it explains.
    """

    alpha: Tensor
    r_squared: Tensor


def scatter(hidden: Tensor) -> Tensor:
    """Sum the products of the centred numbers: the covariance times the tokens.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [width, width], float64; above a width of 1,024 the lower triangle alone is filled.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> scatter(torch.tensor([[2.0, 0.0], [0.0, 0.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    width = require_rows(hidden).shape[1]
    if width <= _NARROW:
        return _scatter_about(hidden, mean_in_parts(hidden))
    gram = hidden.new_zeros(width, width, dtype=torch.float64)
    strip = -(-width // _STRIPS)
    for block in centred_blocks(hidden):
        for start in range(0, width, strip):
            part = slice(start, start + strip)
            gram[start:, part].addmm_(block[:, start:].T, block[:, part])
    return gram


def scatter_with(most: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the scatter of most rows, and that of these and the others, in one product.

    What the others add is their scatter about their own mean, and (n m / (n + m)) d d^T with d the
    distance of the two means: only squares are added, so that nothing cancels.

    Args:
        most: Rows of a width of at most 1,024, [tokens, width].
        others: Further rows, [further tokens, width].

    Returns:
        The scatter of all rows, and that of most, [width, width], float64.

    Raises:
        ValueError: `most` is not a floating-point matrix with at least one row.

    Example:
        >>> most, others = torch.tensor([[2.0], [0.0]]), torch.tensor([[5.0], [5.0]])
        >>> [found.tolist() for found in scatter_with(most, others)]
        [[[18.0]], [[2.0]]]
    """
    mean = mean_in_parts(require_rows(most))
    known = _scatter_about(most, mean)
    if len(others) == 0:
        return known, known
    other = mean_in_parts(others)
    apart = (other[0] - mean[0]) + (other[1] - mean[1])
    share = len(others) * len(most) / (len(others) + len(most))
    whole = (known + _scatter_about(others, other)).addr_(apart, apart, alpha=share)
    return whole, known


def _scatter_about(rows: Tensor, mean: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the scatter of rows about their mean, which is known, [width, width]."""
    return sum_of(map(product_with_itself, centred_blocks(rows, mean)))


def spectrum(hidden: Tensor, scatter: Tensor | None = None) -> Tensor:
    """Compute the eigenvalues of the centred covariance, descending.

    lambda_i = s_i^2 / tokens, with s the singular values of the centred rows; their sum is the
    `variance`. The rows are centred in float64 first, then the eigenvalues are computed from the
    smaller Gram matrix (width x width or tokens x tokens) and clamped at 0: a float32 covariance of
    data far from the origin has negative eigenvalues.

    Args:
        hidden: Rows, [tokens, width].
        scatter: Their scatter, where it is known, [width, width].

    Returns:
        [min(tokens, width)], float64, in squared units of `hidden`.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> spectrum(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])).tolist()
        [2.0, 0.5]
    """
    tokens, width = require_rows(hidden).shape
    if width <= tokens:
        gram = _scatter(hidden) if scatter is None else scatter
    else:
        gram = product_with_itself(centre(hidden).T)
    return torch.linalg.eigvalsh(gram).flip(0).clamp_(min=0).div_(tokens)


def anisotropy(spectrum: Tensor) -> Tensor:
    """Compute the share of the variance along the leading direction: lambda_1 / sum lambda.

    Equal to s_1^2 / sum s_i^2 of the centred rows (Razzhigaev et al., 2311.05928, section 2.3).
    Range (0, 1]; an isotropic Gaussian of n tokens in width d gives about (1 + sqrt(d/n))^2 / d.
    A few rows of massive norm drive it to 1 by themselves.

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> anisotropy(torch.tensor([3.0, 1.0])).item()
        0.75
    """
    return _shares(spectrum).amax()


def effective_rank(spectrum: Tensor) -> Tensor:
    """Count the directions that the variance fills: exp of the entropy of its shares.

    exp(-sum p_i log p_i) with p_i = lambda_i / sum lambda (Roy and Vetterli, 2007, on eigenvalues).
    RankMe as often coded takes the shares of the singular values, sigma_i / sum sigma, which gives
    a larger number. Range [1, rank]; never below `participation_ratio`.

    Args:
        spectrum: Eigenvalues in any order, [rank].

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
    """Count the directions that the variance fills: (sum lambda)^2 / sum lambda^2.

    Range [1, rank]; between 1 / `anisotropy` and `effective_rank`. A sample of n tokens of an
    isotropic Gaussian in width d gives about n d / (n + d).

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        A scalar; NaN where all rows are equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional.

    Example:
        >>> round(participation_ratio(torch.tensor([3.0, 1.0])).item(), 6)
        1.6
    """
    return 1 / _shares(spectrum).square().sum()


def power_law(spectrum: Tensor, first: int = 11, last: int = 100) -> PowerLaw:
    """Lay a power law through the spectrum: its decay, alpha, and how well it fits.

    Minus the slope of log lambda_r on log r, by least squares with weights 1/r over the ranks r =
    11 to 100, counted from 1 (alpha-ReQ of Agrawal et al. 2022, as Li et al., 2509.23024, take it
    from reptrix). In narrow layers, or with few rows, the ranks end at 4/5 of the eigenvalues above
    rounding: the last ones fall off with the edge of the matrix. Range: alpha in [0, inf), R^2 in
    [0, 1]. Above 1 the leading directions hold the variance however wide the layer is; below 1 the
    share of the others grows with the width.

    Args:
        spectrum: Eigenvalues in any order, [rank].
        first: First rank, at least 1.
        last: Last rank.

    Returns:
        Both; NaN with fewer than 5 ranks, R^2 also where the eigenvalues are all equal.

    Raises:
        ValueError: `spectrum` is empty or not one-dimensional, or `first` is below 1.

    Example:
        >>> ranks = torch.arange(1, 129, dtype=torch.float64)
        >>> [round(value.item(), 6) for value in power_law(3 * ranks**-1.5)]
        [1.5, 1.0]
    """
    if first < 1:
        raise ValueError(f"ranks are counted from 1, got first={first}")
    shares = _shares(spectrum).sort(descending=True).values
    rounding = torch.finfo(torch.float64).eps * len(shares)
    above = int((shares > rounding * shares[0]).sum())
    last = min(last, 4 * above // 5)
    if last - first + 1 < _FEWEST_RANKS:
        nan = torch.full_like(shares[0], torch.nan)
        return PowerLaw(nan, nan)
    rank = torch.arange(first, last + 1, dtype=torch.float64, device=shares.device)
    weight = 1 / rank
    weight /= weight.sum()
    x, y = rank.log(), shares[first - 1 : last].log()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    slope = (weight * x * y).sum() / (weight * x.square()).sum()
    total = (weight * y.square()).sum()
    left = (weight * (y - slope * x).square()).sum()
    return PowerLaw(-slope, torch.where(total > 0, 1 - left / total, torch.nan))


def leading_share(hidden: Tensor) -> Tensor:
    """Compute `anisotropy(spectrum(hidden))` without the rest of the spectrum: for wide layers.

    lambda_1 by Lanczos with full reorthogonalisation in float64, from products with the centred
    rows; the trace is their sum of squares. The same rows give the same value: the starting vector
    is fixed. The relative error is at most about 1e-9, or 1e-8 where the two leading eigenvalues
    differ by less than 1e-5 of the value. The full spectrum is computed where the smaller side is
    at most 256, since it is as fast there, and where Lanczos does not converge within a third of
    the smaller side.

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
    trace = torch.linalg.vector_norm(centred).square()  # no second matrix, as squares would be
    if not 0 < trace < torch.inf:
        return torch.full_like(trace, torch.nan)
    if min(rows.shape) <= _SMALL_SIDE:
        return anisotropy(spectrum(rows))
    top = _leading_eigenvalue(centred if rows.shape[1] <= rows.shape[0] else centred.T)
    return anisotropy(spectrum(rows)) if top is None else top / trace


def _leading_eigenvalue(rows: Tensor) -> Tensor | None:
    """Compute the largest eigenvalue of rows^T rows; None where Lanczos does not converge.

    One vector at a time: a product with several costs several times as much. With r the residual of
    the leading Ritz pair and g its distance to the second Ritz value, the error is at most r and
    about r^2 / g.
    """
    width = rows.shape[1]
    steps = width // 3
    basis = rows.new_empty(min(_STEPS, steps), width)  # one vector in each row
    tridiagonal = rows.new_zeros(steps, steps)
    vector = torch.randn(
        width, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(rows)
    vector /= vector.norm()
    gram: Tensor | None = None
    check = 2  # number of steps after which convergence is tested next
    for step in range(steps):
        if step == len(basis):
            basis = torch.cat([basis, basis.new_empty(min(step, steps - step), width)])
        basis[step] = vector
        known = basis[: step + 1]
        if step == _STEPS_TO_GRAM and 2 * width <= len(rows):
            gram = rows.T @ rows
        image = rows.T.mv(rows.mv(vector)) if gram is None else gram.mv(vector)
        tridiagonal[step, step] = image.dot(vector)
        # Done twice: one pass leaves rounding errors along the directions that have converged.
        for _ in range(2):
            image -= known.T.mv(known.mv(image))
        rest = image.norm()
        size = step + 1
        exhausted = rest <= 1e-14 * tridiagonal.diagonal().sum()
        if size >= check or exhausted:
            values, vectors = torch.linalg.eigh(tridiagonal[:size, :size])
            residual = rest * vectors[-1, -1].abs()
            gap = values[-1] - values[-2] if size > 1 else torch.zeros_like(rest)
            close = torch.minimum(residual, residual.square() / gap) <= _TOLERANCE * values[-1]
            if exhausted or (close and residual <= _RESIDUAL * values[-1]):
                return values[-1]
            check = size + max(2, size // 8)  # the small problem stays cheap beside the products
        if size < steps:
            tridiagonal[step, size] = tridiagonal[size, step] = rest
            vector = image / rest
    return None


# The name of a parameter too.
_scatter = scatter


def _shares(spectrum: Tensor) -> Tensor:
    """Divide eigenvalues by their sum, in float64; NaN where the sum is 0.

    Those of a covariance that was computed elsewhere may be below 0 by rounding: they are 0.
    """
    if spectrum.ndim != 1 or len(spectrum) == 0:
        raise ValueError(f"expected eigenvalues [rank], got {list(spectrum.shape)}")
    values = spectrum.double().clamp(min=0)
    return values / values.sum()
