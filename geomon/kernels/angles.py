"""Angles and means: among hidden states, and of the queries and keys of each head."""

import torch
from torch import Tensor

from geomon.kernels._blocks import (
    centred_blocks,
    mean_row,
    require_rows,
    sum_of,
    sum_of_directions,
)


def cosine(hidden: Tensor) -> Tensor:
    """Compute the mean cosine similarity over all pairs of different rows.

    (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = x_i / |x_i|: exact over all pairs at the cost of
    one pass, where Godey et al. (2401.12143, section 3) sample pairs. Range [-1/(n-1), 1]; about 0
    for isotropic rows. Rows of norm 0 have no direction and are left out.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        A scalar; NaN where fewer than two rows have a direction.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least two rows.

    Example:
        >>> cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 5.0]])).item()
        0.3333333333333333
    """
    total, n = sum_of_directions(require_rows(hidden, at_least=2)[:, None])
    value = (total.square().sum() - n) / (n * (n - 1))
    return torch.where(n >= 2, value, torch.nan).squeeze()


def mean_rows(rows: Tensor) -> Tensor:
    """Compute the mean query or key of each head, in float64.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads, head width].

    Raises:
        ValueError: `rows` is not a floating-point tensor by head, or one of its sizes is 0.

    Example:
        >>> mean_rows(torch.tensor([[[3.0, 0.0]], [[3.0, 8.0]]])).tolist()
        [[3.0, 4.0]]
    """
    return mean_row(_flat(rows)).view(rows.shape[1:])


def head_cosine(rows: Tensor) -> Tensor:
    """Compute the mean cosine similarity over all pairs of different tokens, per head.

    Exact, as `cosine` for hidden states: (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = x_i / |x_i|,
    without rows of norm 0, which have no direction (Godey et al., 2401.12143, figures 8 and 11).
    Range [-1/(n-1), 1]; about 0 for isotropic rows.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads]; NaN where fewer than two rows have a direction.

    Raises:
        ValueError: `rows` is not a floating-point tensor by head, or one of its sizes is 0.

    Example:
        >>> head_cosine(torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[0.0, 5.0]]])).tolist()
        [0.3333333333333333]
    """
    total, n = sum_of_directions(_flat(rows).view(rows.shape))
    value = (total.square().sum(dim=1) - n) / (n * (n - 1))
    return torch.where(n >= 2, value, torch.nan)


def head_anisotropy(rows: Tensor) -> Tensor:
    """Compute the share of the variance along the leading direction, per head.

    lambda_1 / sum lambda of the covariance of the centred rows of each head, as `anisotropy` for
    hidden states. Range (0, 1].

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].

    Returns:
        [heads]; NaN where all rows of a head are equal.

    Raises:
        ValueError: `rows` is not a floating-point tensor by head, or one of its sizes is 0.

    Example:
        >>> rows = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> head_anisotropy(rows[:, None]).tolist()
        [0.8]
    """
    blocks = (block.view(-1, *rows.shape[1:]) for block in centred_blocks(_flat(rows)))
    gram = sum_of(block.permute(1, 2, 0) @ block.transpose(0, 1) for block in blocks)
    return torch.linalg.eigvalsh(gram)[:, -1] / gram.diagonal(dim1=1, dim2=2).sum(dim=1)


def qk_cosine(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Compute the cosine between the mean query and the mean key, per query head.

    cos(mean Q, mean K) of Godey et al. (2401.12143, figure 13), on Q and K as projected (before any
    rotation by position, which would wash a mean out). Range [-1, 1]. With grouped-query attention
    each query head faces the key head of its group.

    Args:
        mean_query: Mean query of each head, [heads, head width].
        mean_key: Mean key of each key head, [key heads, head width]; key heads divide heads.

    Returns:
        [heads]; NaN where one of the means is 0.

    Raises:
        ValueError: The shapes of the means do not fit one another.

    Example:
        >>> query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> round(qk_cosine(query, key).item(), 6)
        0.707107
    """
    query, key = _facing(mean_query, mean_key)
    return (query * key).sum(dim=-1) / (query.norm(dim=-1) * key.norm(dim=-1))


def qk_dot(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Compute the dot product of the mean query and the mean key, per query head.

    mean Q . mean K of Godey et al. (2401.12143, figure 14): the part of every attention score that
    does not depend on the tokens. In squared units of the projections, before the scale
    1/sqrt(head width).

    Args:
        mean_query: Mean query of each head, [heads, head width].
        mean_key: Mean key of each key head, [key heads, head width]; key heads divide heads.

    Returns:
        [heads].

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
        query.ndim == key.ndim == 2
        and query.shape[1] == key.shape[1]
        and len(key) > 0
        and len(query) % len(key) == 0
    )
    if not fits:
        raise ValueError(
            "expected mean queries [heads, head width] and mean keys [key heads, head width] with "
            f"key heads dividing heads, got {list(query.shape)} and {list(key.shape)}"
        )
    return query.double(), key.double().repeat_interleave(len(query) // len(key), dim=0)


def _flat(rows: Tensor) -> Tensor:
    """Check that rows are by head, and view them as a matrix, [tokens, heads x head width]."""
    if rows.ndim != 3 or not rows.is_floating_point() or min(rows.shape) < 1:
        raise ValueError(
            "expected a floating-point tensor [tokens, heads, head width] with no size of 0, got "
            f"{rows.dtype} {list(rows.shape)}"
        )
    return rows.reshape(len(rows), -1)
