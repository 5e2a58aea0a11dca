"""Moments of a stream: count, mean and scatter of its parts, merged in pairs (Chan et al., 1983).

Batches, steps and ranks merge alike, in any order, and the whole is never held.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from geomon.kernels._blocks import centred_blocks, mean_row, require_rows, sum_of


@dataclass(frozen=True, slots=True)
class Moments:
    """What a part of a stream leaves behind: enough for M, V and Q of the rows seen so far.

    Attributes:
        count: Number of rows; 0 is the neutral element of `merge`.
        mean: Mean row, [width], float64; 0 where there are no rows.
        scatter: Sum of squared distances from the mean, a scalar, float64.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @property
    def m(self) -> Tensor:
        """Squared norm of the mean: M = |mean x|^2; NaN without rows."""
        return self.mean.square().sum() if self.count else torch.full_like(self.scatter, torch.nan)

    @property
    def variance(self) -> Tensor:
        """Mean squared distance from the mean: V = scatter / count; NaN without rows."""
        return self.scatter / self.count

    @property
    def mean_square(self) -> Tensor:
        """Mean squared norm: Q = M + V; NaN without rows."""
        return self.m + self.variance


def moments_of(rows: Tensor) -> Moments:
    """Count, mean and scatter of one part.

    Args:
        rows: [tokens, width]; no rows give the neutral element.

    Raises:
        ValueError: `rows` is not a floating-point matrix with at least one column.

    Example:
        >>> part = moments_of(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> part.count, part.m.item(), part.variance.item(), part.mean_square.item()
        (2, 4.0, 1.0, 5.0)
    """
    require_rows(rows, at_least=0)
    if len(rows) == 0:
        nothing = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        return Moments(0, nothing, nothing.sum())
    scatter = sum_of(block.square_().sum() for block in centred_blocks(rows))
    return Moments(len(rows), mean_row(rows), scatter)


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the rows of both parts together.

    With delta = mean_b - mean_a: mean = mean_a + delta n_b/n and scatter = scatter_a + scatter_b +
    |delta|^2 n_a n_b/n. Only differences of means enter, so nothing cancels far from the origin.
    Associative and commutative up to rounding; a part without rows changes nothing.

    Args:
        a: One part.
        b: Another of the same width.

    Raises:
        ValueError: The parts have different widths.

    Example:
        >>> rows = torch.tensor([[1.0], [3.0], [8.0]])
        >>> whole = merge(moments_of(rows[:2]), moments_of(rows[2:]))
        >>> whole.count, whole.mean.tolist(), whole.scatter.item()
        (3, [4.0], 26.0)
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"expected parts of one width, got {list(a.mean.shape)} and {list(b.mean.shape)}"
        )
    if a.count == 0 or b.count == 0:
        return a if b.count == 0 else b
    count = a.count + b.count
    delta = b.mean - a.mean
    return Moments(
        count=count,
        mean=a.mean + delta * (b.count / count),
        scatter=a.scatter + b.scatter + delta.square().sum() * (a.count * (b.count / count)),
    )
