"""Dimension and anisotropy of small neighbourhoods, each a separate set of rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from geomon.kernels._blocks import require_rows, rows_in_block
from geomon.kernels.dimension import twonn_of_each

# Squared distances with a larger relative error are recomputed from differences.
_TOLERANCE = 1e-10


def local_dimension(rows: Tensor, members: Tensor) -> Tensor:
    """Estimate the intrinsic dimension of each neighbourhood by TwoNN.

    Each neighbourhood is a separate data set: the two nearest neighbours of a row are searched
    among the members only (Ruppik et al., 2506.01034, with the 64 or 128 nearest rows of a token,
    without the token itself). Distances come from one Gram matrix of the centred members in
    float64; distances of near-duplicates, which rounding may have changed by more than 1e-10, are
    recomputed from differences of rows. Range [0, inf); on the exact model, a neighbourhood of L
    rows scatters by about 1.1 d / sqrt(L). Copies do not count; remove them before searching
    neighbours.

    Args:
        rows: Finite rows, [tokens, width].
        members: Indices of the rows of each neighbourhood, int64, [neighbourhoods, size].

    Returns:
        [neighbourhoods], float64; NaN with fewer than 3 different rows, inf if the two distances
        are equal at every row.

    Raises:
        ValueError: If `rows` is not a floating-point matrix, or `members` not a matrix of integers.

    Example:
        >>> plane = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
        >>> bool(1.5 < local_dimension(plane, torch.arange(400)[None])[0] < 2.5)
        True
    """
    found = [rows.new_empty(0, dtype=torch.float64)]
    for part, centred, scale in _neighbourhoods(rows, members):
        if part.shape[1] < 3:
            found.append(found[0].new_full((len(part),), torch.nan))
            continue
        squared = _squared_distances(rows, part, centred, scale)
        found.append(twonn_of_each(_two_nearest(squared), rounding=_TOLERANCE))
    return torch.cat(found)


def local_anisotropy(rows: Tensor, members: Tensor) -> Tensor:
    """Compute the anisotropy of each neighbourhood about its own mean.

    It is `anisotropy` of the neighbourhood's rows. Hidden states that are anisotropic as a whole
    can be isotropic near every token (Razzhigaev et al., 2311.05928, section 3.1). Range [1 / (size
    - 1), 1]; an isotropic Gaussian in width d gives about (1 + sqrt(d / size))^2 / d.

    Args:
        rows: Finite rows, [tokens, width].
        members: Indices of the rows of each neighbourhood, int64, [neighbourhoods, size].

    Returns:
        [neighbourhoods], float64; NaN if all rows of a neighbourhood are equal.

    Raises:
        ValueError: If `rows` is not a floating-point matrix, or `members` not a matrix of integers.

    Example:
        >>> cross = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) + 10
        >>> round(local_anisotropy(cross, torch.arange(4)[None]).item(), 6)
        0.8
    """
    found = [rows.new_empty(0, dtype=torch.float64)]
    for part, centred, _ in _neighbourhoods(rows, members):
        wide = rows.shape[1] > part.shape[1]
        other = centred.transpose(1, 2)
        gram = centred @ other if wide else other @ centred
        if gram.shape[1] == 0:  # a neighbourhood without rows
            found.append(found[0].new_full((len(part),), torch.nan))
            continue
        trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        found.append(torch.linalg.eigvalsh(gram)[:, -1] / trace)
    return torch.cat(found)


def _neighbourhoods(rows: Tensor, members: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield centred neighbourhoods in float64, several at a time, [neighbourhoods, size, width].

    The first row is subtracted before the mean is taken, so nothing cancels far from the origin.
    Each neighbourhood is scaled to about 1 by a power of two, yielded with it as [neighbourhoods,
    1, 1], so that no square exceeds float64.
    """
    width = require_rows(rows).shape[1]
    if members.ndim != 2 or members.is_floating_point():
        raise ValueError(
            "expected indices of rows, integers [neighbourhoods, size], got "
            f"{members.dtype} {list(members.shape)}"
        )
    size = members.shape[1]
    for part in members.split(rows_in_block(max(1, size * max(size, width)), rows.device)):
        centred = rows[part].double()
        scale = centred.new_ones(len(part), 1, 1)
        if part.numel() > 0:
            centred -= centred[:, :1].clone()
            exponent = torch.frexp(centred.abs().amax(dim=(1, 2))).exponent.clamp(-1000, 1000)
            scale = torch.ldexp(scale, -exponent[:, None, None])
            centred *= scale
            centred -= centred.mean(dim=1, keepdim=True)
        yield part, centred, scale


def _squared_distances(rows: Tensor, part: Tensor, centred: Tensor, scale: Tensor) -> Tensor:
    """Return scaled squared distances, [neighbourhoods, size, size], with infinite diagonals."""
    gram = centred @ centred.transpose(1, 2)
    norms = gram.diagonal(dim1=1, dim2=2)
    both = norms[:, :, None] + norms[:, None, :]
    squared = gram.mul_(-2).add_(both)
    error = (4 + rows.shape[1] ** 0.5) * torch.finfo(torch.float64).eps
    close = (squared <= both.mul_(error / _TOLERANCE)).triu(diagonal=1)
    near, one, other = close.nonzero(as_tuple=True)
    exact = _squared_differences(rows, part[near, one], part[near, other], scale[near])
    squared[near, one, other] = squared[near, other, one] = exact
    squared.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return squared


def _two_nearest(squared: Tensor) -> Tensor:
    """Find the two smallest distances of each row by two searches, ten times as fast as `topk`."""
    first, place = squared.min(dim=2, keepdim=True)
    second = squared.scatter(2, place, torch.inf).amin(dim=2, keepdim=True)
    return torch.cat([first, second], dim=2).sqrt()


def _squared_differences(rows: Tensor, one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """Compute scaled squared distances of pairs of rows from differences of the original rows."""
    found = scale.new_empty(len(one))
    step = rows_in_block(rows.shape[1], rows.device)
    for start in range(0, len(one), step):
        part = slice(start, start + step)
        difference = rows[one[part]].double() - rows[other[part]].double()
        difference *= scale[part].squeeze(2)
        torch.sum(difference.square_(), dim=1, out=found[part])
    return found
