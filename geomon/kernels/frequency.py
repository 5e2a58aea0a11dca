"""Classes of token frequency: the moments of rare, middle and frequent tokens.

Rare and unused tokens are the rival explanation of drift (Godey et al., 2401.12143, section 2;
Razzhigaev et al., 2311.05928): if rare tokens alone are pushed aside, their moments say so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import require_rows
from geomon.kernels.moments import drift_norm, mean_square_norm, variance
from geomon.kernels.token_types import require_token_ids

CLASSES = ("rare", "middle", "frequent")


class ClassMoments(NamedTuple):
    """Moments of the rows of one class of token frequency. Scalars, float64; NaN without rows.

    Attributes:
        norm: Mean norm, mean |x|.
        square_of_mean: Squared norm of the mean row, M.
        variance: Variance about the mean row, V.
        mean_square_norm: Mean squared norm, Q = M + V.
        rows: Number of rows.
        types: Number of token types.
    """

    norm: Tensor
    square_of_mean: Tensor
    variance: Tensor
    mean_square_norm: Tensor
    rows: Tensor
    types: Tensor


def frequency_classes(token_ids: Tensor) -> Tensor:
    """Sort rows by the frequency of their token into rare (0), middle (1) and frequent (2).

    Types are ordered by their number of rows; the third of all rows whose types come least often is
    rare, the third whose types come most often is frequent. Types with the same number of rows are
    in one class, that of the row in their middle: so a class can be larger than a third, or empty.

    Args:
        token_ids: Type of each row, integers, [tokens].

    Returns:
        Class of each row, int64, [tokens].

    Raises:
        ValueError: There is no row, or the types are no integers.

    Example:
        >>> frequency_classes(torch.tensor([8, 8, 8, 5, 5, 3])).tolist()
        [2, 2, 2, 1, 1, 0]
    """
    require_token_ids(token_ids, len(token_ids) if token_ids.ndim else 0)
    _, kind, count = torch.unique(token_ids, return_inverse=True, return_counts=True)
    _, level, rows = torch.unique(count[kind], return_inverse=True, return_counts=True)
    # Twice the number of rows up to the middle of each level, in integers: nothing is rounded.
    middle = 2 * rows.cumsum(0) - rows
    return (3 * middle // (2 * len(token_ids)))[level]


def moments_by_frequency(hidden: Tensor, token_ids: Tensor) -> list[ClassMoments]:
    """Compute the moments of the rows of each class of token frequency: rare, middle, frequent.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.

    Example:
        >>> hidden = torch.tensor([[1.0], [1.0], [1.0], [3.0], [5.0], [9.0]])
        >>> found = moments_by_frequency(hidden, torch.tensor([8, 8, 8, 5, 5, 3]))
        >>> [(part.norm.item(), part.variance.item()) for part in found]
        [(9.0, 0.0), (4.0, 1.0), (1.0, 0.0)]
    """
    rows = require_rows(hidden)
    require_token_ids(token_ids, len(rows))
    classes = frequency_classes(token_ids)
    return [_moments(rows[classes == number], token_ids[classes == number]) for number in range(3)]


def _moments(rows: Tensor, token_ids: Tensor) -> ClassMoments:
    number, types = (
        torch.tensor(float(count), dtype=torch.float64, device=rows.device)
        for count in (len(rows), len(token_ids.unique()))
    )
    if len(rows) == 0:
        nan = torch.full_like(number, torch.nan)
        return ClassMoments(nan, nan, nan, nan, number, types)
    norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).mean()
    square = drift_norm(rows).square()
    return ClassMoments(norm, square, variance(rows), mean_square_norm(rows), number, types)
