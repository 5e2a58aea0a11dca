"""Growth of the hidden states' norm in a block, and direction of the addition.

With x_(l-1) the row of a token one layer before, and x_l its row now, the addition is
x_l - x_(l-1), whether or not the block is residual.
"""

import torch
from torch import Tensor

from geomon.kernels._blocks import require_rows


def row_additions(before: Tensor, hidden: Tensor) -> Tensor:
    """Compare each row with the same token's row one layer before.

    Differences are taken first, so that small additions of large rows keep their digits. Shorter
    types become float32, in which squares overflow at norms above 1.8e19.

    Args:
        before: Rows one layer before, [tokens, width].
        hidden: Rows, [tokens, width].

    Returns:
        [tokens, 3]: norm of the row before, norm of the row, and cosine between the row before and
        the addition; the cosine is NaN if either is 0.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix, or `before` has another shape.

    Example:
        >>> row_additions(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]])).tolist()
        [[5.0, 3.0, -0.800000011920929]]
    """
    if before.shape != require_rows(hidden, at_least=0).shape:
        raise ValueError(
            f"expected the same rows one layer before, {list(hidden.shape)}, got "
            f"{list(before.shape)}"
        )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    before, hidden = before.to(wide), hidden.to(wide)
    addition = hidden - before
    norms = [torch.linalg.vector_norm(rows, dim=1) for rows in (before, hidden, addition)]
    cosine = torch.linalg.vecdot(before, addition) / norms[0] / norms[2]
    return torch.stack([norms[0], norms[1], cosine], dim=1)


def norm_growth(additions: Tensor) -> Tensor:
    """Compute the root mean square norm of rows, relative to the same rows one layer before.

    sqrt(sum_i |x_(l,i)|^2 / sum_i |x_(l-1,i)|^2), in float64. Range [0, inf); sqrt(2) if additions
    are as large as the rows and orthogonal to them.

    Args:
        additions: Norms and cosines of the rows, as `row_additions` returns them, [tokens, 3].

    Returns:
        A scalar; NaN if the rows before are 0.

    Example:
        >>> norm_growth(torch.tensor([[3.0, 0.0, -1.0], [4.0, 10.0, 1.0]])).item()
        2.0
    """
    before, after = (torch.linalg.vector_norm(additions[:, n].double()) for n in (0, 1))
    return after / before


def residual_cosine(additions: Tensor) -> Tensor:
    """Compute the mean cosine between the addition of a row and the row one layer before.

    Range [-1, 1]: positive if the block makes rows longer along their own direction, negative if it
    takes away from them, about 0 if it writes elsewhere. Rows that are 0 or do not change are left
    out.

    Args:
        additions: Norms and cosines of the rows, as `row_additions` returns them, [tokens, 3].

    Returns:
        A scalar; NaN if no row is left.

    Example:
        >>> residual_cosine(torch.tensor([[1.0, 1.5, 0.5], [1.0, 1.0, torch.nan]])).item()
        0.5
    """
    return additions[:, 2].double().nanmean()
