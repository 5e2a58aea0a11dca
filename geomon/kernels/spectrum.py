"""Spectrum of the covariance of hidden states, and metrics computed from it."""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import centre, centred_blocks, require_rows, sum_of
from geomon.kernels.groups import add_by_group
from geomon.kernels.products import factor_type, product_with_itself

# Eigenvectors are computed in float64 up to this width. Above it, float32 halves the time, and its
# rounding, 1e-6 of the largest eigenvalue, is far below the statistical error.
_NARROW = 1024

# Fewest ranks for fitting a power law.
_FEWEST_RANKS = 5
_FIRST_RANK, _LAST_RANK = 11, 100


class PowerLaw(NamedTuple):
    """A power law fitted to eigenvalues; scalars, float64.

    Attributes:
        alpha: Its exponent: lambda_r ~ r^(-alpha).
        r_squared: Share of the variance of the log eigenvalues that it explains.
    """

    alpha: Tensor
    r_squared: Tensor


class PrincipalAxes(NamedTuple):
    """Variance along the eigenvectors of the covariance, as a whole and by group of sequences.

    Attributes:
        eigenvalues: Eigenvalues of the covariance of all rows, descending, [..., rank], float64.
        counts: Number of rows of each group, [groups].
        squares: Sum over each group's rows of the squared coordinates along each eigenvector, about
            the mean of all rows, [groups, ..., rank]; float64.
    """

    eigenvalues: Tensor
    counts: Tensor
    squares: Tensor

    def without(self, group: int) -> Tensor:
        """Return the variance of the rows of all other groups along the eigenvectors of all rows.

        To first order in the rows left out, these are the eigenvalues without the group, perhaps in
        another order.

        Args:
            group: Index of a group.
        """
        rows = self.counts.sum()
        left = self.eigenvalues * rows - self.squares[group]
        return left.clamp(min=0) / (rows - self.counts[group])


def spectrum(hidden: Tensor) -> Tensor:
    """Compute the eigenvalues of the centred covariance, descending.

    lambda_i = s_i^2 / tokens, where s are the singular values of the centred rows; their sum is the
    `variance`. Rows are centred in float64, and eigenvalues are computed from the smaller Gram
    matrix (width x width or tokens x tokens) and clamped at 0, because a float32 covariance of data
    far from the origin has negative eigenvalues.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [min(tokens, width)], float64, in squared units of `hidden`.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> spectrum(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])).tolist()
        [2.0, 0.5]
    """
    return _eigenvalues(_gram(require_rows(hidden)), len(hidden))


def principal_axes(hidden: Tensor, group: Tensor, groups: int) -> PrincipalAxes:
    """Compute the eigenvalues of `spectrum`, and each group's variance along the eigenvectors.

    Above a width of 1,024, the eigenvectors are computed in float32.

    Args:
        hidden: Rows, [tokens, width].
        group: Group of each row, int64, [tokens].
        groups: Number of groups.

    Returns:
        Eigenvalues, and squared coordinates by group.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> axes = principal_axes(rows, torch.tensor([0, 0, 1, 1]), groups=2)
        >>> axes.eigenvalues.tolist(), axes.without(1).tolist()
        ([2.0, 0.5], [0.0, 1.0])
    """
    tokens, width = require_rows(hidden).shape
    gram = _gram(hidden)
    exact = min(tokens, width) <= _NARROW
    values, vectors = _decompose(gram if exact else gram.float())
    squares = values.new_zeros(groups, len(values))
    if width > tokens:  # these are eigenvectors of the matrix of the rows' dot products
        add_by_group(squares, group, vectors.double().square() * values)
    else:
        start = 0
        kind = factor_type(hidden.device)
        axes = vectors.to(kind)
        for block in centred_blocks(hidden):
            own = group[start : start + len(block)]
            start += len(block)
            add_by_group(squares, own, (block.to(kind) @ axes).square_().double())
    counts = torch.bincount(group, minlength=groups).double()
    return PrincipalAxes(values / tokens, counts, squares)


def _gram(rows: Tensor) -> Tensor:
    """Multiply the centred rows by themselves in float64, along the shorter side."""
    if rows.shape[1] > len(rows):
        return product_with_itself(centre(rows).T)
    return sum_of(map(product_with_itself, centred_blocks(rows)))


def _eigenvalues(gram: Tensor, tokens: int) -> Tensor:
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_(min=0).div_(tokens)


def _decompose(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues, descending in float64, and eigenvectors, [..., side, rank]."""
    # Numpy's threads would wait by spinning, and take cores from torch's.
    values, vectors = torch.linalg.eigh(gram)
    return values.double().flip(-1).clamp(min=0), vectors.flip(-1)


def anisotropy(spectrum: Tensor) -> Tensor:
    """Compute the share of the variance along the leading direction: lambda_1 / sum lambda.

    This equals s_1^2 / sum s_i^2 of the centred rows (Razzhigaev et al., 2311.05928, section 2.3).
    Range (0, 1]; an isotropic Gaussian of n tokens in width d gives about (1 + sqrt(d/n))^2 / d. A
    few rows of massive norm alone can drive it to 1.

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        A scalar; NaN if all rows are equal.

    Raises:
        ValueError: If `spectrum` is empty or not one-dimensional.

    Example:
        >>> anisotropy(torch.tensor([3.0, 1.0])).item()
        0.75
    """
    return _shares(spectrum).amax()


def effective_rank(spectrum: Tensor) -> Tensor:
    """Count the directions that the variance fills: exp of the entropy of its shares.

    exp(-sum p_i log p_i) with p_i = lambda_i / sum lambda (Roy and Vetterli, 2007, on eigenvalues).
    RankMe is often coded with shares of the singular values, sigma_i / sum sigma, which gives a
    larger number. Range [1, rank]; never below `participation_ratio`.

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        A scalar; NaN if all rows are equal.

    Raises:
        ValueError: If `spectrum` is empty or not one-dimensional.

    Example:
        >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])).item(), 6)
        3.0
    """
    return torch.special.entr(_shares(spectrum)).sum().exp()


def participation_ratio(spectrum: Tensor) -> Tensor:
    """Count the directions that the variance fills: (sum lambda)^2 / sum lambda^2.

    Range [1, rank]; between 1 / `anisotropy` and `effective_rank`. A sample of n tokens from an
    isotropic Gaussian in width d gives about n d / (n + d).

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        A scalar; NaN if all rows are equal.

    Raises:
        ValueError: If `spectrum` is empty or not one-dimensional.

    Example:
        >>> round(participation_ratio(torch.tensor([3.0, 1.0])).item(), 6)
        1.6
    """
    return 1 / _shares(spectrum).square().sum()


def power_law(spectrum: Tensor) -> PowerLaw:
    """Fit a power law to the spectrum: its decay, alpha, and how well it fits.

    Alpha is minus the slope of log lambda_r on log r, by least squares with weights 1/r over ranks
    r = 11 to 100, counted from 1 (alpha-ReQ of Agrawal et al. 2022, as Li et al., 2509.23024, take
    it from reptrix). In narrow layers, or with few rows, the ranks end at 4/5 of the eigenvalues
    above rounding, because the last ones fall off at the edge of the matrix. Range: alpha in [0,
    inf), R^2 in [0, 1]. Above 1, the leading directions hold the variance however wide the layer
    is; below 1, the share of the others grows with the width.

    Args:
        spectrum: Eigenvalues in any order, [rank].

    Returns:
        Both; NaN with fewer than 5 ranks, R^2 also if the eigenvalues are all equal.

    Raises:
        ValueError: If `spectrum` is empty or not one-dimensional.

    Example:
        >>> ranks = torch.arange(1, 129, dtype=torch.float64)
        >>> [round(value.item(), 6) for value in power_law(3 * ranks**-1.5)]
        [1.5, 1.0]
    """
    shares = _shares(spectrum).sort(descending=True).values
    rounding = torch.finfo(torch.float64).eps * len(shares)
    above = int((shares > rounding * shares[0]).sum())
    last = min(_LAST_RANK, 4 * above // 5)
    if last - _FIRST_RANK + 1 < _FEWEST_RANKS:
        nan = torch.full_like(shares[0], torch.nan)
        return PowerLaw(nan, nan)
    rank = torch.arange(_FIRST_RANK, last + 1, dtype=torch.float64, device=shares.device)
    weight = 1 / rank
    weight /= weight.sum()
    x, y = rank.log(), shares[_FIRST_RANK - 1 : last].log()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    slope = (weight * x * y).sum() / (weight * x.square()).sum()
    total = (weight * y.square()).sum()
    left = (weight * (y - slope * x).square()).sum()
    return PowerLaw(-slope, torch.where(total > 0, 1 - left / total, torch.nan))


def head_axes(rows: Tensor, group: Tensor, groups: int) -> PrincipalAxes:
    """Compute `principal_axes` for the queries or keys of each head.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].
        group: Group of each row, int64, [tokens].
        groups: Number of groups.

    Returns:
        Axes with eigenvalues [heads, head width].

    Raises:
        ValueError: If `rows` is not a floating-point tensor by head, or one of its sizes is 0.
    """
    if rows.ndim != 3 or not rows.is_floating_point() or min(rows.shape) < 1:
        raise ValueError(
            "expected a floating-point tensor [tokens, heads, head width] without a size of 0, got "
            f"{rows.dtype} {list(rows.shape)}"
        )
    sums = rows.new_zeros(groups, *rows.shape[1:], rows.shape[2], dtype=torch.float64)
    start = 0
    for flat in centred_blocks(rows.flatten(1)):
        block = flat.view(-1, *rows.shape[1:])
        own = group[start : start + len(flat)]
        start += len(flat)
        for number in own.unique().tolist():
            by_head = block[own == number].transpose(0, 1)
            sums[number] += product_with_itself(by_head)
    values, vectors = _decompose(sums.sum(dim=0))
    squares = ((sums @ vectors.double()) * vectors.double()).sum(dim=-2)
    counts = torch.bincount(group, minlength=groups).double()
    return PrincipalAxes(values / len(rows), counts, squares)


def _shares(spectrum: Tensor) -> Tensor:
    """Divide eigenvalues by their sum in float64; NaN if the sum is 0.

    Eigenvalues computed elsewhere may be negative by rounding, and are set to 0.
    """
    if spectrum.ndim != 1 or len(spectrum) == 0:
        raise ValueError(f"expected eigenvalues [rank], got {list(spectrum.shape)}")
    values = spectrum.double().clamp(min=0)
    return values / values.sum()
