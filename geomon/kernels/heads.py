"""Geometry of queries or keys, head by head: rows [tokens, heads, head width]."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from geomon.kernels._blocks import centred_blocks, mean_row, sum_of, sum_of_directions


def mean_rows(rows: Tensor) -> Tensor:
    """The mean query or key of each head, in float64.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads, head width].

    Raises:
        ValueError: Not floating-point rows by head, or one of the sizes is 0.

    Example:
        >>> mean_rows(torch.tensor([[[3.0, 0.0]], [[3.0, 8.0]]])).tolist()
        [[3.0, 4.0]]
    """
    return mean_row(_flat(rows)).view(rows.shape[1:])


def mean_norm(rows: Tensor) -> Tensor:
    """Norm of the mean query or key, per head: |mean q|.

    Godey et al. (2401.12143, section 5): how far the queries, or the keys, of a head have drifted.
    Range [0, inf), in units of `rows`.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads].

    Raises:
        ValueError: Not floating-point rows by head, or one of the sizes is 0.

    Example:
        >>> mean_norm(torch.tensor([[[3.0, 0.0]], [[3.0, 8.0]]])).tolist()
        [5.0]
    """
    return mean_rows(rows).norm(dim=1)


def head_cosine(rows: Tensor) -> Tensor:
    """Mean cosine similarity over all pairs of different tokens, per head; exact.

    As `cosine` for hidden states: (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = x_i / |x_i|, without
    rows of norm 0, which have no direction (Godey et al., 2401.12143, figures 8 and 11).
    Range [-1/(n-1), 1]; about 0 for isotropic rows.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads]; NaN where fewer than two rows have a direction.

    Raises:
        ValueError: Not floating-point rows by head, or one of the sizes is 0.

    Example:
        >>> head_cosine(torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[0.0, 5.0]]])).tolist()
        [0.3333333333333333]
    """
    total, n = sum_of_directions(_flat(rows).view(rows.shape))
    value = (total.square().sum(dim=1) - n) / (n * (n - 1))
    return torch.where(n >= 2, value, torch.nan)


def head_anisotropy(rows: Tensor) -> Tensor:
    """Share of the variance along the leading direction, per head: lambda_1 / sum lambda.

    As `anisotropy` for hidden states, of the covariance of the centred rows of each head.
    Range (0, 1].

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads]; NaN where all rows of a head are equal.

    Raises:
        ValueError: Not floating-point rows by head, or one of the sizes is 0.

    Example:
        >>> rows = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> head_anisotropy(rows[:, None]).tolist()
        [0.8]
    """
    blocks = _by_head(centred_blocks(_flat(rows)), rows)
    gram = sum_of(block.permute(1, 2, 0) @ block.transpose(0, 1) for block in blocks)
    return torch.linalg.eigvalsh(gram)[:, -1] / gram.diagonal(dim1=1, dim2=2).sum(dim=1)


def _by_head(blocks: Iterable[Tensor], rows: Tensor) -> Iterator[Tensor]:
    return (block.view(-1, *rows.shape[1:]) for block in blocks)


def _flat(rows: Tensor) -> Tensor:
    """`rows` as a matrix, [tokens, heads x head width], after checking that they are by head."""
    if rows.ndim != 3 or not rows.is_floating_point() or min(rows.shape) < 1:
        raise ValueError(
            "expected a floating-point tensor [tokens, heads, head width] with no size of 0, got "
            f"{rows.dtype} {list(rows.shape)}"
        )
    return rows.reshape(len(rows), -1)
