"""Cosines and means of hidden states, and of the queries and keys of each head."""

import torch
from torch import Tensor

from geomon.kernels._blocks import (
    centred_blocks,
    require_rows,
    sum_of,
    sum_of_directions,
)


def cosine_centred(hidden: Tensor) -> Tensor:
    """Compute the mean cosine similarity over all pairs of different rows about their mean.

    (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = (x_i - mean x) / |x_i - mean x|. If it is about 0
    but the cosine about the origin (`GroupSums`) is not, the whole cone comes from a common shift
    (Godey et al., 2401.12143, section 2). Range [-1/(n-1), 1]; about -1/(n-1) for isotropic rows.
    It exceeds 0 if short deviations from the mean point one way and a few long ones the other. Rows
    equal to the mean are left out.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        A scalar; NaN if fewer than two rows differ from the mean.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least two rows.

    Example:
        >>> round(cosine_centred(torch.tensor([[6.0], [7.0], [8.0], [23.0]])).item(), 6)
        0.0
    """
    blocks = centred_blocks(require_rows(hidden, at_least=2))
    parts = [sum_of_directions(block[:, None]) for block in blocks]
    total, n = sum_of(total for total, _ in parts), sum_of(n for _, n in parts)
    value = (total.square().sum() - n) / (n * (n - 1))
    return torch.where(n >= 2, value, torch.nan).squeeze()


def leading_share(eigenvalues: Tensor) -> Tensor:
    """Compute the share of the variance along the leading direction, per head.

    lambda_1 / sum lambda of the covariance of each head's rows, like `anisotropy` for hidden states
    (Godey et al., 2401.12143, figure 11). Range (0, 1].

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

    cos(mean Q, mean K) of Godey et al. (2401.12143, figure 13), for Q and K as projected, because a
    rotation by position would wash out their means. Range [-1, 1]. With grouped-query attention,
    each query head is compared with the key head of its group.

    Args:
        mean_query: Mean query of each head, [..., heads, head width].
        mean_key: Mean key of each key head, [..., key heads, head width]; heads must be a multiple
            of key heads.

    Returns:
        [..., heads]; NaN if one of the means is 0.

    Raises:
        ValueError: If the shapes do not match.

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
    does not depend on the tokens. Its unit is the squared unit of the projections, before the scale
    1/sqrt(head width).

    Args:
        mean_query: Mean query of each head, [..., heads, head width].
        mean_key: Mean key of each key head, [..., key heads, head width]; heads must be a multiple
            of key heads.

    Returns:
        [..., heads].

    Raises:
        ValueError: If the shapes do not match.

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
