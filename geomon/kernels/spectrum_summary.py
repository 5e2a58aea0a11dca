"""What metrics read of the spectrum, without all eigenvalues where rows are wide.

All eigenvalues of 4,096 rows of width 4,096 take seconds. Shares of the variance need less: the
trace is a sum of squares, the leading eigenvalues converge in a small space, and a sum of f(lambda)
over all others is an average of z^T f(M) z over random vectors z, the *starting vectors*
(stochastic Lanczos quadrature: Ubaru, Chen and Saad 2017). One run of block Lanczos from 32 of them
gives all of it, as *nodes* and, for each starting vector, *weights*: z^T f(M) z is about the
weighted sum of f over the nodes. M is the smaller Gram matrix of the centred rows; it is never
computed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels import spectrum as kernels
from geomon.kernels._blocks import (
    centred_blocks,
    in_blocks,
    require_rows,
    row_blocks,
    sum_of,
)
from geomon.kernels.half_samples import student
from geomon.kernels.products import factor_type, product_with_itself

# Largest smaller side of which all eigenvalues are computed. There they are exact, and cost 2.1
# times as much; at 2,048 columns 5 times, at 4,096 13 times (4,096 rows, one thread).
WHOLE_SIDE = 1024

# Eigenvalues that a summary of wide rows holds.
EIGENVALUES = 256

# Starting vectors, and blocks of the Krylov space. More blocks find more leading eigenvalues, which
# leave less to chance; more starting vectors average over more of it. By trial on some twenty
# spectra: 16 x 20 scatters more, 64 x 5 is biased where the eigenvalues span many decades. With 10
# blocks stated errors are a half to all of these, at 1.4 times the cost.
_VECTORS, _BLOCKS = 32, 7

# Seed of the starting vectors, a number that nobody else takes: rows that were made with the same
# one would begin with these vectors, and the errors would be wrong.
_SEED = 5_170_883_294

# A node is a single eigenvalue where its residual is below this share of it, and there are fewer
# than `_VECTORS` nodes within this share: of more equal eigenvalues a block finds only some.
_CONVERGED = 1e-2

# Nodes that rounding in float32 makes of eigenvalues of 0, as a share of the leading one: for each
# column.
_NOTHING = 2e-14

# Most passes in which vectors are made orthogonal to a basis: random ones need one more, or two.
_PASSES = 4

# Least relative errors that are stated, for what rounding adds: of the leading eigenvalue, of the
# sum of squares, and of exp(entropy), in which shares of 1e-7 are seen.
_LEAST_OF_LEADING, _LEAST_OF_SQUARES, _LEAST_OF_ENTROPY = 1e-5, 1e-5, 1e-4

# The same of the exponent of the power law, absolute: quantiles are no eigenvalues.
_LEAST_OF_ALPHA = 1e-2

# Groups of the starting vectors that are compared for its error.
_GROUPS = 8


class Estimate(NamedTuple):
    """A value of the spectrum, and how near to it an estimate is. Scalars, float64.

    Attributes:
        value: The value.
        error: Half the width of a 95 % interval about it for the value that all eigenvalues give;
            None where it is that value.
    """

    value: Tensor
    error: Tensor | None = None

    def to(self, device: torch.device) -> "Estimate":
        """Copy both to a device."""
        error = None if self.error is None else self.error.to(device)
        return Estimate(self.value.to(device), error)


class SpectrumSummary(NamedTuple):
    """What metrics read of the spectrum of the centred covariance.

    Attributes:
        eigenvalues: All of them, or of wide rows the 256 largest: those that have converged, and
            then quantiles of the others. Descending, float64, in squared units of the rows.
        is_whole: Whether these are all eigenvalues, and the values below have no error.
        anisotropy: Share of the variance along the leading direction.
        effective_rank: exp of the entropy of the shares of the variance.
        participation_ratio: 1 over the sum of the squared shares.
        alpha: Exponent of the power law laid through the eigenvalues.
        r_squared: Share of the variance of the log eigenvalues that the law explains, a scalar.
    """

    eigenvalues: Tensor
    is_whole: bool
    anisotropy: Estimate
    effective_rank: Estimate
    participation_ratio: Estimate
    alpha: Estimate
    r_squared: Tensor


class _Quadrature(NamedTuple):
    """Nodes and weights of the starting vectors, float64, on the host.

    Attributes:
        nodes: In units of `trace`, descending, [nodes].
        weights: Of each starting vector; they sum to `side`, [starting vectors, nodes].
        single: True for nodes that are single eigenvalues, [nodes].
        side: Number of eigenvalues.
        trace: Sum of all eigenvalues.
    """

    nodes: Tensor
    weights: Tensor
    single: Tensor
    side: int
    trace: float


def summarise_spectrum(hidden: Tensor, scatter: Tensor | None = None) -> SpectrumSummary:
    """Summarise the eigenvalues of the centred covariance, from all of them or by quadrature.

    All where the smaller side of the rows is at most 1,024. Otherwise products with 224 vectors
    take their place, 32 at a time; the vectors that they start from are random, and the same at
    every call.

    The sums over eigenvalues are exact for those that have converged. What the others add is
    f(lambda) = a + b lambda + g(lambda) with the straight line that leaves least to g: the sums of
    1 and of lambda are known, and only that of g is averaged over starting vectors. The entropy is
    the middle of Gauss quadrature, which is too high since -x log x is operator concave, and of
    Gauss-Radau quadrature with a node at 0, which is too low; half their difference is part of its
    error.

    Args:
        hidden: Rows, [tokens, width].
        scatter: Their scatter, where it is known (`geomon.kernels.spectrum`), [width, width].

    Returns:
        The summary, on the device of the rows; its values are NaN where all rows are equal.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> summary = summarise_spectrum(rows)
        >>> summary.is_whole, summary.anisotropy.value.item()
        (True, 0.8)
    """
    if min(require_rows(hidden).shape) <= WHOLE_SIDE:
        return _of_all(kernels.spectrum(hidden, scatter))
    rows, scale, trace = _centred(hidden)
    if not 0 < trace < math.inf:  # rows that are all equal, or not finite
        return _of_all(kernels.spectrum(hidden))
    gauss, radau, residual = _quadratures(rows, trace)
    largest = _largest(gauss)
    law = kernels.power_law(largest)
    device = hidden.device
    return SpectrumSummary(
        eigenvalues=largest.to(device) * scale / len(hidden) * scale,
        is_whole=False,
        anisotropy=_anisotropy(gauss, residual).to(device),
        effective_rank=_effective_rank(gauss, radau).to(device),
        participation_ratio=_participation_ratio(gauss).to(device),
        alpha=Estimate(law.alpha, _error_of_alpha(gauss)).to(device),
        r_squared=law.r_squared.to(device),
    )


def _of_all(spectrum: Tensor) -> SpectrumSummary:
    law = kernels.power_law(spectrum)
    return SpectrumSummary(
        eigenvalues=spectrum,
        is_whole=True,
        anisotropy=Estimate(kernels.anisotropy(spectrum)),
        effective_rank=Estimate(kernels.effective_rank(spectrum)),
        participation_ratio=Estimate(kernels.participation_ratio(spectrum)),
        alpha=Estimate(law.alpha),
        r_squared=law.r_squared,
    )


def _anisotropy(gauss: _Quadrature, residual: Tensor) -> Estimate:
    """Estimate the leading share; its error is at most the residual r, and about r^2 / gap."""
    one, two = gauss.nodes[0], gauss.nodes[1]
    beyond = torch.minimum(residual, residual.square() / (one - two).clamp(min=1e-300))
    return Estimate(one / gauss.trace, (beyond + _LEAST_OF_LEADING * one) / gauss.trace)


def _effective_rank(gauss: _Quadrature, radau: _Quadrature) -> Estimate:
    """Estimate exp of the entropy, from what is too high and what is too low by the quadrature."""
    upper, spread = _sum_over(torch.special.entr, gauss)
    lower, _ = _sum_over(torch.special.entr, radau)
    value = ((upper + lower) / 2).exp().clamp(1, gauss.side)
    off = student(_VECTORS - 1) * spread + (upper - lower).abs() / 2
    return Estimate(value, value * (torch.expm1(off) + _LEAST_OF_ENTROPY))


def _participation_ratio(gauss: _Quadrature) -> Estimate:
    squares, spread = _sum_over(torch.square, gauss)
    value = (1 / squares).clamp(1, gauss.side)
    return Estimate(value, value * (student(_VECTORS - 1) * spread / squares + _LEAST_OF_SQUARES))


def _error_of_alpha(gauss: _Quadrature) -> Tensor:
    """Compare the exponents of groups of starting vectors: half the width of a 95 % interval."""
    found = torch.stack(
        [
            kernels.power_law(_largest(gauss._replace(weights=weights))).alpha
            for weights in gauss.weights.tensor_split(_GROUPS)
        ]
    )
    return student(_GROUPS - 1) * found.std() / math.sqrt(_GROUPS) + _LEAST_OF_ALPHA


def _centred(hidden: Tensor) -> tuple[Tensor, float, float]:
    """Centre rows in float64, and divide them by a power of two near the farthest coordinate.

    In float32 the error of a product is far below what is stated; float64 serves where products of
    float32 are not exact.

    Returns:
        Rows, [any, smaller side], what they were divided by, and the sum of their squares.
    """
    dtype = factor_type(hidden.device)
    first, total = hidden[0].double(), hidden.new_zeros(hidden.shape[1], dtype=torch.float64)
    reach = hidden.new_zeros((), dtype=torch.float64)
    for block in in_blocks(hidden):
        low, high = torch.aminmax(block.sub_(first))
        reach = torch.maximum(reach, torch.maximum(high, -low))
        total += block.sum(dim=0)
    farthest = float(reach)
    scale = math.ldexp(0.5, math.frexp(farthest)[1]) if math.isfinite(farthest) else 1.0
    centred = hidden.new_empty(hidden.shape, dtype=dtype)
    trace = hidden.new_zeros((), dtype=torch.float64)
    mean = first, total / len(hidden)
    for target, block in zip(row_blocks(centred), centred_blocks(hidden, mean), strict=True):
        target.copy_(block.div_(scale))
        trace += torch.linalg.vector_norm(block).square()
    tall = hidden.shape[1] <= hidden.shape[0]
    return centred if tall else centred.T, scale, float(trace)


def _quadratures(rows: Tensor, trace: float) -> tuple[_Quadrature, _Quadrature, Tensor]:
    """Compute the nodes and weights of Gauss and of Gauss-Radau quadrature.

    Returns:
        Both, and the residual of the first node.
    """
    images, first, last = _block_lanczos(rows)
    # Positive semidefinite as it stands, and in float64: small eigenvalues are as exact as large.
    projected = sum_of(map(product_with_itself, in_blocks(images))).cpu()
    nodes, vectors = torch.linalg.eigh(projected)
    nodes, vectors = nodes.flip(0).clamp(min=0), vectors.flip(1)
    residuals = (last @ vectors[-_VECTORS:]).norm(dim=0)
    single = _single(nodes, residuals)
    side = rows.shape[1]

    def quadrature(nodes: Tensor, vectors: Tensor) -> _Quadrature:
        weights = (first.T @ vectors[:_VECTORS]).square()
        return _Quadrature(nodes, weights, single, side, trace)

    with_zero, turned = torch.linalg.eigh(_with_node_at_zero(projected))
    radau = quadrature(with_zero.flip(0).clamp(min=0), turned.flip(1))
    return quadrature(nodes, vectors), radau, residuals[0]


def _block_lanczos(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Build an orthonormal basis of the Krylov space of rows^T rows from random starting vectors.

    Returns:
        Product of the rows with each basis vector, [rows, vectors]; coefficients of the starting
        vectors in the first block of the basis, square; and those of what the last block's image
        has beyond the basis. The last two in float64, on the host.
    """
    side = rows.shape[1]
    generator = torch.Generator("cpu").manual_seed(_SEED)
    basis = rows.new_empty(_BLOCKS * _VECTORS, side)  # one vector in each row
    images = rows.new_empty(len(rows), len(basis))  # in each column: a fifth faster on two threads

    def random() -> Tensor:
        normal = torch.randn(
            _VECTORS, side, generator=generator, dtype=torch.float32, device="cpu"
        ).to(rows)
        return normal / normal.norm(dim=1, keepdim=True)

    block, first = _orthonormal(math.sqrt(side) * random())
    last = first
    for step in range(_BLOCKS):
        own = slice(step * _VECTORS, (step + 1) * _VECTORS)
        basis[own] = block
        torch.mm(rows, block.T, out=images[:, own])
        # In this order: on two threads twice as fast as images^T rows.
        block, last = _orthonormal_to(basis[: own.stop], (rows.T @ images[:, own]).T, random)
    return images, first.double().cpu(), last.double().cpu()


def _orthonormal_to(
    basis: Tensor, block: Tensor, random: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Orthonormalise what vectors have beyond a basis.

    Twice: what one pass leaves along the basis is as large as rounding in the vectors, and so can
    be all that is left. Directions that are nothing else give way to random ones.

    Returns:
        The directions, [starting vectors, side], and the coefficients of the vectors in them.
    """
    directions, coefficients = _orthonormal(block - (block @ basis.T) @ basis)
    for _ in range(_PASSES):
        directions, correction = _orthonormal(directions - (directions @ basis.T) @ basis)
        coefficients = correction @ coefficients
        lost = correction.diagonal().abs() < 0.5
        if not bool(lost.any()):
            break
        directions[lost] = random()[lost]
    return directions, coefficients


def _orthonormal(block: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalise rows: block = coefficients^T directions; returns directions, coefficients."""
    directions, coefficients = torch.linalg.qr(block.T)
    return directions.T.contiguous(), coefficients


def _with_node_at_zero(projected: Tensor) -> Tensor:
    """Change the last block of a block tridiagonal matrix so that 0 is an eigenvalue: Gauss-Radau.

    The last diagonal block becomes B A^-1 B^T, with A the matrix without its last block and B what
    joins the two: its Schur complement is then 0.
    """
    values, vectors = torch.linalg.eigh(projected[:-_VECTORS, :-_VECTORS])
    joined = projected[-_VECTORS:, :-_VECTORS] @ vectors
    joined = joined[:, values > 1e-9 * values[-1]]
    changed = projected.clone()
    changed[-_VECTORS:, -_VECTORS:] = (joined / values[-joined.shape[1] :]) @ joined.T
    return changed


def _single(nodes: Tensor, residuals: Tensor) -> Tensor:
    """Mark the leading nodes that are single eigenvalues; the first that is not ends them."""
    converged = residuals < _CONVERGED * nodes
    single = converged.cumprod(0).bool()
    close = nodes[: 1 - _VECTORS] - nodes[_VECTORS - 1 :] <= _CONVERGED * nodes[: 1 - _VECTORS]
    for start in (close & single[: 1 - _VECTORS]).nonzero().squeeze(1).tolist():
        single[start : start + _VECTORS] = False
    return single


def _sum_over(
    function: Callable[[Tensor], Tensor], quadrature: _Quadrature
) -> tuple[Tensor, Tensor]:
    """Sum a function of the shares of the variance over all eigenvalues.

    Returns:
        The sum, and its standard error by what the starting vectors differ by.
    """
    shares = quadrature.nodes / quadrature.trace
    single = quadrature.single
    values = function(shares)
    known = values[single].sum()
    shares_left, values_left = shares[~single], values[~single]
    weights = quadrature.weights[:, ~single]
    mean = weights.mean(dim=0)
    if not mean.sum() > 0:
        return known, torch.zeros_like(known)
    part = mean / mean.sum()
    x, y = shares_left - part @ shares_left, values_left - part @ values_left
    across = part @ x.square()
    slope = torch.where(across > 0, part @ (x * y) / across.clamp(min=1e-300), 0)
    offset = part @ values_left - slope * (part @ shares_left)
    remaining = 1 - shares[single].sum()
    line = offset * (quadrature.side - int(single.sum())) + slope * remaining
    beyond = weights @ (y - slope * x)
    return known + line + beyond.mean(), beyond.std() / math.sqrt(len(beyond))


def _largest(quadrature: _Quadrature) -> Tensor:
    """Estimate the largest eigenvalues: single nodes, and beyond them quantiles of the others."""
    nodes, weights, single, side, _ = quadrature
    found = nodes[single]
    kept = ~single & (nodes > _NOTHING * side * nodes[0])
    mean = weights.mean(dim=0)
    mean = mean * ((side - len(found)) / mean[~single].sum().clamp(min=1e-300))
    values, mass = nodes[kept].log(), mean[kept]
    upto = mass.cumsum(0)
    count = min(EIGENVALUES - len(found), round(float(upto[-1]))) if len(upto) else 0
    if count <= 0:
        return torch.nn.functional.pad(found[:EIGENVALUES], (0, max(0, EIGENVALUES - len(found))))
    wanted = torch.arange(count, dtype=torch.float64, device="cpu") + 0.5
    middle = upto - mass / 2
    place = torch.searchsorted(middle, wanted).clamp(max=len(middle) - 1)
    before = (place - 1).clamp(min=0)
    width = (middle[place] - middle[before]).clamp(min=1e-300)
    along = ((wanted - middle[before]) / width).clamp(0, 1)
    others = torch.lerp(values[before], values[place], along).exp()
    whole = torch.cat([found, others]).sort(descending=True).values
    return torch.nn.functional.pad(whole, (0, EIGENVALUES - len(whole)))
