"""Token types on halves of the sequences: for the intervals of what is measured by type.

Of every type the rows are counted, and their scatter is computed, in each half. All rows and the
halves of all ways follow from one pass: with S_g the sum over the rows of group g about the
mean of their type, the squared norm of a sum of groups is the sum of the products S_g . S_h.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import in_blocks, require_rows, rows_in_block
from geomon.kernels.half_samples import HalfSamples
from geomon.kernels.products import product_with_itself
from geomon.kernels.token_types import TokenTypes, require_token_ids


class TypeHalves(NamedTuple):
    """Moments of the rows of each token type in each half, float64.

    The first halves of all ways come first, then the second ones. Types of one row are left out.

    Attributes:
        rows: Number of rows, n_t, [2 ways, types].
        scatter: Sum of the squared distances from the mean, [2 ways, types].
    """

    rows: Tensor
    scatter: Tensor


class TypeMoments(NamedTuple):
    """Moments of the rows of each token type, of all rows and in halves, from one pass.

    Attributes:
        types: Of all rows.
        halves: In each half of each way.
    """

    types: TokenTypes
    halves: TypeHalves


def type_moments(hidden: Tensor, token_ids: Tensor, halves: HalfSamples) -> TypeMoments:
    """Compute the moments of every token type, of all rows and in each half of each way.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].
        halves: The groups of the rows, and the ways.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.
    """
    require_token_ids(token_ids, len(require_rows(hidden)))
    _, kind, count = torch.unique(token_ids, return_inverse=True, return_counts=True)
    order = torch.arange(len(kind), dtype=torch.int64, device=hidden.device)
    origin = torch.zeros_like(count).scatter_reduce(0, kind, order, "amin", include_self=False)
    several = count > 1
    m, scatter = (hidden.new_zeros(len(count), dtype=torch.float64) for _ in range(2))
    m[~several] = _squared_norms(hidden[origin[~several]])
    kept = None if bool(several.all()) else several[kind].nonzero().squeeze(1)
    number = several.cumsum(0) - 1
    cells = _sum_cells(
        hidden,
        kept,
        number[kind if kept is None else kind[kept]],
        halves.group if kept is None else halves.group[kept],
        origin[several],
        halves.first.shape[1],
    )
    m[several] = cells.norm
    # About the mean of the type nothing is lost that counts: the origin is a row of the type.
    scatter[several] = cells.squares.sum(dim=1).clamp_(min=0)
    return TypeMoments(TokenTypes(count.double(), m, scatter), _in_halves(cells, halves))


class _Cells(NamedTuple):
    """Sums over the rows of each type in each group, about the mean of the type; float64.

    Attributes:
        rows: Number of rows, [types, groups].
        squares: Sum of the squared distances, [types, groups].
        inner: Products of the sums of two groups, [types, groups, groups].
        norm: Squared norm of the mean of the type, [types].
    """

    rows: Tensor
    squares: Tensor
    inner: Tensor
    norm: Tensor


def _sum_cells(
    hidden: Tensor, kept: Tensor | None, kind: Tensor, group: Tensor, origin: Tensor, groups: int
) -> _Cells:
    """Sum over the rows of each type in each group.

    Args:
        hidden: Rows, [tokens, width].
        kept: Rows that count, [kept]; None for all.
        kind: Number of the type of each row that counts, [kept].
        group: Group of each, [kept].
        origin: A row of each type, which is subtracted from the others first, [types].
        groups: Number of groups.
    """
    types = len(origin)
    cell = kind * groups + group
    rows = torch.bincount(cell, minlength=types * groups).view(types, groups).double()
    squares = rows.new_zeros(types * groups)
    inner, norm = rows.new_zeros(types, groups, groups), rows.new_zeros(types)
    # A quarter of a block stays in the cache. Three buffers serve all of them: the pages of new
    # ones would have to be mapped each time.
    step = min(rows_in_block(4 * max(len(hidden), types * groups), hidden.device), hidden.shape[1])
    picked = hidden.new_empty(len(kind), step)
    buffers = [rows.new_empty(len(kind), step) for _ in range(2)]
    for every in hidden.split(step, dim=1) if types else ():
        start = every[origin].double()
        columns = every
        if kept is not None:
            columns = torch.index_select(every, 0, kept, out=_part(picked, every))
        about, starts = (_part(buffer, columns) for buffer in buffers)
        about.copy_(columns).sub_(torch.index_select(start, 0, kind, out=starts))
        squares.index_add_(0, cell, torch.linalg.vector_norm(about, dim=1).square_())
        sums = about.new_zeros(types * groups, about.shape[1]).index_add_(0, cell, about)
        sums = sums.view(types, groups, -1)
        shift = sums.sum(dim=1) / rows.sum(dim=1, keepdim=True)
        norm += (start + shift).square().sum(dim=1)
        # About the mean of the type: |x - s|^2 summed is |x|^2 - 2 s . sum + n |s|^2.
        along = (sums @ shift[:, :, None])[:, :, 0]
        squares += (rows * shift.square().sum(dim=1)[:, None] - 2 * along).flatten()
        sums -= rows[:, :, None] * shift[:, None]
        inner += product_with_itself(sums.mT)
    return _Cells(rows, squares.view(types, groups), inner, norm)


def _in_halves(cells: _Cells, halves: HalfSamples) -> TypeHalves:
    """Put the groups of each half together."""
    first = halves.first.double()
    sides = torch.cat([first, 1 - first])
    rows = sides @ cells.rows.T
    shift = ((sides @ cells.inner) * sides).sum(dim=2).T
    scatter = sides @ cells.squares.T - shift / rows.clamp(min=1)
    return TypeHalves(rows, scatter.clamp_(min=0))


def _part(buffer: Tensor, columns: Tensor) -> Tensor:
    """Take as much of a buffer, in one piece, as some columns of its rows need."""
    width = columns.shape[1]
    return buffer.view(-1)[: len(buffer) * width].view(-1, width)


def _squared_norms(rows: Tensor) -> Tensor:
    """Compute the squared norm of each row, [rows], float64."""
    if len(rows) == 0:
        return rows.new_empty(0, dtype=torch.float64)
    return torch.cat([block.square_().sum(dim=1) for block in in_blocks(rows)])


def within_of_halves(types: TypeHalves) -> Tensor:
    """Compute the variance within token types of each half, with 1 / (n - K), [2 ways].

    Args:
        types: Moments of the token types in each half.
    """
    return types.scatter.sum(dim=1) / (types.rows - 1).clamp(min=0).sum(dim=1)
