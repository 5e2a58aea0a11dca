"""Angles and means: among hidden states, and of the queries and keys of each head."""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import (
    centred_blocks,
    column_blocks,
    in_blocks,
    require_rows,
    sum_of,
    sum_of_directions,
)


class SequenceCosines(NamedTuple):
    """Sums of directions, u_i = x_i / |x_i|, that tell pairs of one sequence from other pairs.

    Attributes:
        own: Squared norm of the sum of the directions of each sequence, float64, [sequences].
        rows: Number of rows that have a direction in each sequence, float64, [sequences].
        total: Squared norm of the sum of all directions, a scalar, float64.
    """

    own: Tensor
    rows: Tensor
    total: Tensor

    @property
    def within(self) -> Tensor:
        """Mean cosine over the pairs of rows of one sequence; NaN if there is no such pair."""
        pairs = (self.rows * (self.rows - 1)).sum()
        return torch.where(pairs > 0, (self.own - self.rows).sum() / pairs, torch.nan)

    @property
    def between(self) -> Tensor:
        """Mean cosine over the pairs of rows of two sequences; NaN if there is no such pair."""
        pairs = self.rows.sum().square() - self.rows.square().sum()
        return torch.where(pairs > 0, (self.total - self.own.sum()) / pairs, torch.nan)


def cosine_centred(hidden: Tensor) -> Tensor:
    """Compute the mean cosine similarity over all pairs of different rows about their mean.

    (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = (x_i - mean x) / |x_i - mean x|. Where it is about
    0 and the cosine about the origin (`GroupSums`) is not, a common shift makes the whole cone
    (Godey et al., 2401.12143, section 2). Range [-1/(n-1), 1]; about -1/(n-1) for isotropic rows.
    It rises above 0 where short deviations from the mean point the same way and few long ones the
    other. Rows that are equal to the mean are left out.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        A scalar; NaN if fewer than two rows differ from the mean.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least two rows.

    Example:
        >>> round(cosine_centred(torch.tensor([[6.0], [7.0], [8.0], [23.0]])).item(), 6)
        0.0
    """
    blocks = centred_blocks(require_rows(hidden, at_least=2))
    parts = [sum_of_directions(block[:, None]) for block in blocks]
    total, n = sum_of(total for total, _ in parts), sum_of(n for _, n in parts)
    value = (total.square().sum() - n) / (n * (n - 1))
    return torch.where(n >= 2, value, torch.nan).squeeze()


def sequence_cosines(hidden: Tensor, sequences: Tensor) -> SequenceCosines:
    """Sum directions by sequence: the mean cosine within and between sequences, over all pairs.

    With s_k the sum of the directions of sequence k, of n_k rows, and s the sum of all: within
    (sum_k |s_k|^2 - n) / sum_k n_k (n_k - 1), between (|s|^2 - sum_k |s_k|^2) / (n^2 - sum_k
    n_k^2). Exact at the cost of one pass. Range [-1, 1] each; about 0 for isotropic rows. Of B
    sequences the share of pairs within one is about 1/B: the mean over all pairs that Godey et al.
    (2401.12143, section 3) draw depends on B where they are more alike.

    Args:
        hidden: Rows, [tokens, width].
        sequences: Number of the sequence of each row, integers, [tokens].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least two rows, or `sequences`
            does not name a sequence for each.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
        >>> found = sequence_cosines(hidden, torch.tensor([7, 7, 9, 9]))
        >>> found.within.item(), found.between.item()
        (1.0, 0.0)
    """
    rows = require_rows(hidden, at_least=2)
    if sequences.shape != rows.shape[:1] or sequences.is_floating_point():
        raise ValueError(
            f"expected the number of a sequence for each of {len(rows)} rows, integers [tokens], "
            f"got {sequences.dtype} {list(sequences.shape)}"
        )
    numbers, place = torch.unique(sequences, return_inverse=True)
    # Divided by the largest number first: the square of 1e-200 is 0.
    largest = torch.cat([block.abs().amax(dim=1) for block in in_blocks(rows)])
    scale = torch.where(largest > 0, 1 / largest, 0)
    square = torch.zeros_like(scale)
    for columns in column_blocks(rows):
        square += (columns.double() * scale[:, None]).square_().sum(dim=1)
    scale *= torch.where(square > 0, square.rsqrt(), 0)
    count = scale.new_zeros(len(numbers)).index_add_(0, place, (square > 0).double())
    own, total = torch.zeros_like(count), count.new_zeros(())
    # By columns: with as many sequences as rows, a sum of each would be larger than the rows.
    for columns in column_blocks(rows):
        sums = own.new_zeros(len(numbers), columns.shape[1])
        sums.index_add_(0, place, columns.double() * scale[:, None])
        own += sums.square().sum(dim=1)
        total += sums.sum(dim=0).square().sum()
    return SequenceCosines(own, count, total)


def leading_share(eigenvalues: Tensor) -> Tensor:
    """Compute the share of the variance along the leading direction, per head.

    lambda_1 / sum lambda of the covariance of the centred rows of each head, as `anisotropy` for
    hidden states (Godey et al., 2401.12143, figure 11). Range (0, 1].

    Args:
        eigenvalues: Eigenvalues of the covariance of each head, [heads, head width].

    Returns:
        [heads]; NaN if all rows of a head are equal.

    Example:
        >>> leading_share(torch.tensor([[3.0, 1.0]])).tolist()
        [0.75]
    """
    return eigenvalues.amax(dim=-1) / eigenvalues.sum(dim=-1)


def qk_cosine(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Compute the cosine between the mean query and the mean key, per query head.

    cos(mean Q, mean K) of Godey et al. (2401.12143, figure 13), on Q and K as projected (before any
    rotation by position, which would wash a mean out). Range [-1, 1]. With grouped-query attention
    each query head faces the key head of its group.

    Args:
        mean_query: Mean query of each head, [..., heads, head width].
        mean_key: Mean key of each key head, [..., key heads, head width]; key heads divide heads.

    Returns:
        [..., heads]; NaN if one of the means is 0.

    Raises:
        ValueError: The shapes of the means do not fit one another.

    Example:
        >>> query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> round(qk_cosine(query, key).item(), 6)
        0.707107
    """
    query, key = _facing(mean_query, mean_key)
    return (query * key).sum(dim=-1) / (query.norm(dim=-1) * key.norm(dim=-1))


def qk_cosine_concatenated(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Compute the cosine between the mean query and the mean key with all heads side by side.

    One value for a layer (Godey et al., 2401.12143, figure 23): q . k / (|q| |k|) with q the mean
    queries of all heads and k the mean keys that they face. Heads count by the lengths of their
    means, where the mean of `qk_cosine` over heads counts all alike. Range [-1, 1]; with
    grouped-query attention a mean key stands there once for each head of its group.

    Args:
        mean_query: Mean query of each head, [..., heads, head width].
        mean_key: Mean key of each key head, [..., key heads, head width]; key heads divide heads.

    Returns:
        [...], of plain means a scalar; NaN if all means of queries, or all of keys, are 0.

    Raises:
        ValueError: The shapes of the means do not fit one another.

    Example:
        >>> query, key = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
        >>> round(qk_cosine_concatenated(query, key).item(), 6)
        0.67082
    """
    query, key = _facing(mean_query, mean_key)
    both = (-2, -1)
    return (query * key).sum(dim=both) / (query.norm(dim=both) * key.norm(dim=both))


def qk_dot(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Compute the dot product of the mean query and the mean key, per query head.

    mean Q . mean K of Godey et al. (2401.12143, figure 14): the part of every attention score that
    does not depend on the tokens. In squared units of the projections, before the scale
    1/sqrt(head width).

    Args:
        mean_query: Mean query of each head, [..., heads, head width].
        mean_key: Mean key of each key head, [..., key heads, head width]; key heads divide heads.

    Returns:
        [..., heads].

    Raises:
        ValueError: The shapes of the means do not fit one another.

    Example:
        >>> qk_dot(torch.ones(2, 4), 2 * torch.ones(1, 4)).tolist()
        [8.0, 8.0]
    """
    query, key = _facing(mean_query, mean_key)
    return (query * key).sum(dim=-1)


def _facing(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the mean query of each head with the mean key of its group, in float64."""
    fits = (
        query.ndim == key.ndim >= 2
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] > 0
        and query.shape[-2] % key.shape[-2] == 0
    )
    if not fits:
        raise ValueError(
            "expected mean queries [..., heads, head width] and mean keys [..., key heads, head "
            f"width] with key heads dividing heads, got {list(query.shape)} and {list(key.shape)}"
        )
    group = query.shape[-2] // key.shape[-2]
    return query.double(), key.double().repeat_interleave(group, dim=-2)
