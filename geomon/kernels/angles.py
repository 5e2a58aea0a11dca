"""Angles: among hidden states, and between the mean query and the mean key of a head."""

import torch
from torch import Tensor

from geomon.kernels._blocks import require_rows, sum_of_directions


def cosine(hidden: Tensor) -> Tensor:
    """Mean cosine similarity over all pairs of different rows.

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


def qk_cosine(projected_query: Tensor, projected_key: Tensor) -> Tensor:
    """Cosine between the mean query and the mean key, per query head: cos(mean Q, mean K).

    Godey et al. (2401.12143, figure 13), on Q and K as projected (before any rotation by position,
    which would wash a mean out). Range [-1, 1]. With grouped-query attention each query head faces
    the key head of its group.

    Args:
        projected_query: [tokens, heads, head width].
        projected_key: [tokens, key heads, head width]; key heads divide heads.

    Returns:
        [heads]; NaN where one of the means is 0.

    Raises:
        ValueError: The shapes do not fit one another.

    Example:
        >>> query = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
        >>> key = torch.tensor([[[2.0, 2.0]], [[0.0, 0.0]]])
        >>> round(qk_cosine(query, key).item(), 6)
        0.707107
    """
    query, key = _head_means(projected_query, projected_key)
    return (query * key).sum(dim=-1) / (query.norm(dim=-1) * key.norm(dim=-1))


def qk_dot(projected_query: Tensor, projected_key: Tensor) -> Tensor:
    """Dot product of the mean query and the mean key, per query head: mean Q . mean K.

    Godey et al. (2401.12143, figure 14): the part of every attention score that does not depend on
    the tokens. In squared units of the projections, before the scale 1/sqrt(head width).

    Args:
        projected_query: [tokens, heads, head width].
        projected_key: [tokens, key heads, head width]; key heads divide heads.

    Returns:
        [heads].

    Raises:
        ValueError: The shapes do not fit one another.

    Example:
        >>> qk_dot(torch.ones(3, 1, 4), 2 * torch.ones(5, 1, 4)).tolist()
        [8.0]
    """
    query, key = _head_means(projected_query, projected_key)
    return (query * key).sum(dim=-1)


def _head_means(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Mean query and mean key of every query head, [heads, head width] each, in float64."""
    fits = (
        query.ndim == key.ndim == 3
        and query.shape[2] == key.shape[2]
        and min(query.shape[0], key.shape[0], key.shape[1]) > 0
        and query.shape[1] % key.shape[1] == 0
    )
    if not fits:
        raise ValueError(
            "expected queries [tokens, heads, head width] and keys [tokens, key heads, head width] "
            f"with key heads dividing heads, got {list(query.shape)} and {list(key.shape)}"
        )
    group = query.shape[1] // key.shape[1]
    key_means = key.double().mean(dim=0)
    return query.double().mean(dim=0), key_means.repeat_interleave(group, dim=0)
