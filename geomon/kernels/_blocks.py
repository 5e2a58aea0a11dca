"""What every kernel asks of its input, and the passes over rows that they share.

Rows are read in float64 a block at a time: a kernel that sums over rows holds a few blocks,
whatever the number of rows.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Numbers in one block: 8 MB in float64, which stays in the cache.
_BLOCK = 1_048_576


def require_rows(hidden: Tensor, *, at_least: int = 1) -> Tensor:
    """Give `hidden` back after checking that it is a matrix with enough rows.

    Args:
        hidden: Floating-point rows, [tokens, width].
        at_least: The smallest number of rows that makes sense for the caller.

    Raises:
        ValueError: Not a floating-point matrix, no columns, or too few rows.
    """
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"expected a floating-point tensor [tokens, width], got {hidden.dtype} "
            f"{list(hidden.shape)}: flatten the leading dimensions, or convert with .float()"
        )
    if hidden.shape[0] < at_least or hidden.shape[1] < 1:
        raise ValueError(
            f"expected at least {at_least} rows and 1 column, got {list(hidden.shape)}: "
            "give more tokens"
        )
    return hidden


def row_blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """A matrix cut into blocks of whole rows, in its own precision.

    Args:
        rows: [tokens, width], at least one column.
    """
    return rows.split(max(1, _BLOCK // rows.shape[1]))


def column_blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """A matrix cut into blocks of whole columns, in its own precision.

    Args:
        rows: [tokens, width], at least one row.
    """
    return rows.split(max(1, _BLOCK // len(rows)), dim=1)


def in_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Rows in float64, block by block; a block may be overwritten, and holds until the next one.

    All are one room in turn: blocks of their own, freed one after another between what is kept of
    each, are holes that the allocator does not use again (glibc: up to twice the rows).

    Args:
        rows: [tokens, width], floating-point.
    """
    blocks = row_blocks(rows)
    room = rows.new_empty(blocks[0].shape, dtype=torch.float64)
    return (room[: len(block)].copy_(block) for block in blocks)


def centred_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Rows without their mean in float64, block by block; the blocks may be overwritten.

    A row is taken off first: far from the origin nothing cancels, and the mean of equal rows does
    not round to the row itself.

    Args:
        rows: [tokens, width], floating-point, at least one row.
    """
    first = rows[0].double()
    shift = sum_of(block.sub_(first).sum(dim=0) for block in in_blocks(rows)) / len(rows)
    return (block.sub_(first).sub_(shift) for block in in_blocks(rows))


def centre(rows: Tensor) -> Tensor:
    """Rows without their mean, in float64: all at once, for what needs them whole.

    Args:
        rows: [tokens, width], floating-point, at least one row.
    """
    whole = rows.new_empty(rows.shape, dtype=torch.float64)
    for room, block in zip(row_blocks(whole), centred_blocks(rows), strict=True):
        room.copy_(block)
    return whole


def mean_row(rows: Tensor) -> Tensor:
    """The mean of the rows in float64, [width].

    Args:
        rows: [tokens, width], floating-point, at least one row.
    """
    return sum_of(block.sum(dim=0) for block in in_blocks(rows)) / len(rows)


def sum_of_directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of x_i / |x_i| over the rows that have a direction, and how many those are, per head.

    Args:
        rows: [tokens, heads, width], floating-point.

    Returns:
        [heads, width] and [heads], float64.
    """
    total = rows.new_zeros(rows.shape[1:], dtype=torch.float64)
    count = total.new_zeros(len(total))
    for flat in in_blocks(rows.flatten(1)):
        block = flat.view(-1, *rows.shape[1:])
        if rows.dtype == torch.float64:
            # Only its squares can leave its range. A power of two rounds nothing.
            size = torch.frexp(block.abs().amax(dim=2, keepdim=True)).exponent.clamp(-1000, 1000)
            block = torch.ldexp(block, -size)
        norm = torch.linalg.vector_norm(block, dim=2)
        inverse = torch.where(norm > 0, 1 / norm, 0)
        total += torch.einsum("th,thw->hw", inverse, block)
        count += (norm > 0).sum(dim=0)
    return total, count


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape; the first one is overwritten.

    Args:
        parts: At least one.
    """
    parts = iter(parts)
    total = next(parts)
    for part in parts:
        total += part
    return total
