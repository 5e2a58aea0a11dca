"""The norm of the mean, the variance and the mean square norm of hidden states.

With M = |mean x|^2, V the variance and Q the mean square norm, M + V = Q (Yamagiwa and Shimodaira,
2409.11253): at a fixed Q, the variance loses as much as the mean gains.
"""

import torch
from torch import Tensor

from geomon.kernels._blocks import centred_blocks, in_blocks, mean_row, require_rows, sum_of


def drift_norm(hidden: Tensor) -> Tensor:
    """Compute the norm of the mean hidden state: |mean x|.

    The drift of Godey et al. (2401.12143, section 3); its square is the M of M + V = Q.
    Range [0, inf), in units of `hidden`.

    Args:
        hidden: Rows, [tokens, width].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> drift_norm(torch.tensor([[3.0, 4.0], [3.0, 4.0]])).item()
        5.0
    """
    return mean_row(require_rows(hidden)).norm()


def variance(hidden: Tensor) -> Tensor:
    """Compute the mean squared distance from the mean: V = mean |x - mean x|^2.

    The trace of the covariance (with 1/tokens, so that M + V = Q holds exactly). Range [0, inf),
    in squared units of `hidden`. Computed on centred rows: Q - M cancels where the mean is large.

    Args:
        hidden: Rows, [tokens, width].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> variance(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item()
        1.0
    """
    return squares_about_mean(hidden).mean()


def squares_about_mean(hidden: Tensor) -> Tensor:
    """Compute the squared distance of each row from the mean, |x_i - mean x|^2.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [tokens], float64.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> squares_about_mean(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).tolist()
        [1.0, 1.0]
    """
    blocks = centred_blocks(require_rows(hidden))
    return torch.cat([block.square_().sum(dim=1) for block in blocks])


def mean_square_norm(hidden: Tensor) -> Tensor:
    """Compute the mean squared norm of the hidden states: Q = mean |x|^2.

    Range [0, inf), in squared units of `hidden`.

    Args:
        hidden: Rows, [tokens, width].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> mean_square_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).item()
        12.5
    """
    return sum_of(block.square_().sum() for block in in_blocks(require_rows(hidden))) / len(hidden)
