"""Input checks and passes over rows that kernels share.

Rows are read in float64 one block at a time, so a kernel that sums over rows holds only a few
blocks, regardless of the number of rows. On an accelerator blocks are larger, because queuing an
operation takes longer than running it on a block of the host's size.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

# Numbers in one block: 8 MB in float64 or 4 MB in float32 stay in the cache. On an accelerator,
# 128 MB in float64 take about 0.1 ms.
BLOCK = 1_048_576
DEVICE_BLOCK = 16 * BLOCK


def require_rows(hidden: Tensor, *, at_least: int = 1) -> Tensor:
    """Return `hidden` after checking that it is a matrix with enough rows.

    Args:
        hidden: Floating-point rows, [tokens, width].
        at_least: Smallest sensible number of rows. Defaults to 1.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix, or lacks columns, or has too few
            rows.
    """
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"expected a floating-point tensor [tokens, width], got {hidden.dtype} "
            f"{list(hidden.shape)}: flatten the leading dimensions, or convert with .float()"
        )
    if hidden.shape[0] < at_least or hidden.shape[1] < 1:
        raise ValueError(
            f"expected at least {at_least} rows and 1 column, got {list(hidden.shape)}: "
            "use more tokens"
        )
    return hidden


def block_size(device: torch.device) -> int:
    """Return how many numbers one block of a device holds.

    Args:
        device: Device of the block.
    """
    return BLOCK if device.type == "cpu" else DEVICE_BLOCK


def rows_in_block(width: int, device: torch.device) -> int:
    """Return how many rows of a given width one block holds, at least one.

    Args:
        width: Numbers in one row, at least 1.
        device: Device of the block.

    Example:
        >>> [rows_in_block(1024, torch.device(kind)) for kind in ("cpu", "cuda")]
        [1024, 16384]
        >>> rows_in_block(2_000_000, torch.device("cpu"))
        1
    """
    return max(1, block_size(device) // width)


def row_blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Cut a matrix into blocks of whole rows, without conversion.

    Args:
        rows: Matrix with at least one column, [tokens, width].
    """
    return rows.split(rows_in_block(rows.shape[1], rows.device))


def column_blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Cut a matrix into blocks of whole columns, without conversion.

    Args:
        rows: Matrix with at least one row, [tokens, width].
    """
    return rows.split(rows_in_block(len(rows), rows.device), dim=1)


def in_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Convert rows to float64 block by block, in one buffer that every block overwrites.

    The caller may change a block in place, but must not keep it beyond the next one. A new buffer
    for each block would make the allocator leave gaps between the results that the caller keeps
    (glibc: up to twice the memory of the rows).

    Args:
        rows: Floating-point rows, [tokens, width].
    """
    blocks = row_blocks(rows)
    buffer = rows.new_empty(blocks[0].shape, dtype=torch.float64)
    return (buffer[: len(block)].copy_(block) for block in blocks)


def centred_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Subtract the mean row in float64, block by block, in one buffer as in `in_blocks`.

    The first row is subtracted before the mean is taken. Nothing cancels far from the origin, and
    equal rows give exactly 0, whereas their mean could differ from them by rounding.

    Args:
        rows: Floating-point rows, at least one, [tokens, width].
    """
    first, shift = mean_in_parts(rows)
    return (block.sub_(first).sub_(shift) for block in in_blocks(rows))


def mean_in_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean row as the first row and the difference from it, in float64.

    Args:
        rows: Floating-point rows, at least one, [tokens, width].
    """
    first = rows[0].double()
    return first, sum_of(block.sub_(first).sum(dim=0) for block in in_blocks(rows)) / len(rows)


def centre(rows: Tensor) -> Tensor:
    """Subtract the mean row in float64, for callers that need all rows at once.

    Args:
        rows: Floating-point rows, at least one, [tokens, width].
    """
    whole = rows.new_empty(rows.shape, dtype=torch.float64)
    for target, block in zip(row_blocks(whole), centred_blocks(rows), strict=True):
        target.copy_(block)
    return whole


def sum_of_directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum x_i / |x_i| over the rows of each head with nonzero norm, and count these rows.

    Args:
        rows: Floating-point rows by head, [tokens, heads, width].

    Returns:
        The sums, [heads, width], and the counts, [heads], in float64.
    """
    total = rows.new_zeros(rows.shape[1:], dtype=torch.float64)
    count = total.new_zeros(len(total))
    for flat in in_blocks(rows.flatten(1)):
        block = with_squares(flat.view(-1, *rows.shape[1:]), rows.dtype)
        norm = torch.linalg.vector_norm(block, dim=2)
        inverse = torch.where(norm > 0, 1 / norm, 0)
        total += torch.einsum("th,thw->hw", inverse, block)
        count += (norm > 0).sum(dim=0)
    return total, count


def with_squares(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale each row of each head by a power of two, exactly, if its squares might not fit.

    Args:
        block: Rows by head in float64, [tokens, heads, width].
        dtype: Original type of the rows. Only squares of float64 can overflow or vanish.
    """
    if dtype != torch.float64:
        return block
    size = torch.frexp(block.abs().amax(dim=2, keepdim=True)).exponent.clamp(-1000, 1000)
    # A product, because in torch 2.13 the gradient of ldexp is 0 for negative exponents.
    return block * torch.ldexp(torch.ones_like(size, dtype=torch.float64), -size)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """Add up tensors of one shape; the first one is overwritten.

    Args:
        parts: Tensors of one shape, at least one.
    """
    parts = iter(parts)
    total = next(parts)
    for part in parts:
        total += part
    return total


def sort_each(rows: Tensor) -> Tensor:
    """Sort the numbers of each row, on the host by numpy in a tenth of the time.

    Args:
        rows: Any rows, [rows, width].
    """
    if rows.device.type != "cpu":
        return rows.sort(dim=1).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=1))
