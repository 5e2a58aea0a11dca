"""Squared distances of hidden states from their mean.

With M = |mean x|^2, V the mean of these squares and Q the mean square norm, M + V = Q (Yamagiwa and
Shimodaira, 2409.11253): at a fixed Q, the variance loses what the mean gains.
"""

import torch
from torch import Tensor

from geomon.kernels._blocks import centred_blocks, require_rows


def squares_about_mean(hidden: Tensor) -> Tensor:
    """Compute the squared distance of each row from the mean, |x_i - mean x|^2.

    Their mean is the variance V, the trace of the covariance with 1/tokens. It is computed on
    centred rows, because Q - M cancels if the mean is large.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [tokens], float64.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> squares_about_mean(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).tolist()
        [1.0, 1.0]
    """
    blocks = centred_blocks(require_rows(hidden))
    return torch.cat([block.square_().sum(dim=1) for block in blocks])
