"""How sharp attention is: from sampled query rows against all their visible keys."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Scores held at once, float32: 4 MB, which stays in the cache with its temporaries.
_BLOCK = 1_048_576


class AttentionRows(NamedTuple):
    """One softmax row reduced to what the metrics need: every field [heads, rows], float64.

    Attributes:
        entropy: -sum_j A_ij log A_ij, in nats.
        maximum: max_j A_ij.
        first: A_ij of the first visible key j, which sinks occupy.
        visible: Number of keys that the row may see; 0 marks a row that sees none.
        minimum: min_j A_ij over the visible keys j.
        top_score: The largest score before the softmax.
    """

    entropy: Tensor
    maximum: Tensor
    first: Tensor
    visible: Tensor
    minimum: Tensor
    top_score: Tensor


def attention_rows(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None = None
) -> AttentionRows:
    """Softmax rows of the given queries against all visible keys, reduced block by block.

    A_i = softmax_j(scale q_i . k_j + bias_ij) over the visible keys j. Memory stays bounded however
    long the sequences are: no more than a block of scores exists at a time.

    Args:
        query: As attended, [sequences, heads, queries, head width].
        key: As attended, [sequences, key heads, keys, head width]; key heads divide heads.
        visible: True where a query may attend, broadcastable to [sequences, heads, queries, keys].
        scale: Factor on the dot products.
        bias: Added to the scores, broadcastable like `visible`.

    Returns:
        Reductions with rows = sequences x queries, sequence-major.

    Raises:
        ValueError: The shapes do not fit one another.
    """
    reduced = [_reduce(*block) for block in _blocks(query, key, visible, scale, bias)]
    return AttentionRows(*(torch.cat(field, dim=1) for field in zip(*reduced, strict=True)))


def attention_median(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None
) -> Tensor:
    """Mean of the median weight of a row over its visible keys, per head.

    Godey et al. (2401.12143, figures 9 and 10). Range [0, 1/2]; of an even number of keys the lower
    of the two in the middle. Rows that see fewer than two keys are left out. It sorts every row,
    which costs several times the other reductions.

    Args:
        query: As of `attention_rows`, and so are the rest.
        key: [sequences, key heads, keys, head width].
        visible: True where a query may attend.
        scale: Factor on the dot products.
        bias: Added to the scores, or None.

    Returns:
        [heads]; NaN where no row sees two keys.

    Raises:
        ValueError: The shapes do not fit one another.
    """
    medians, counts = [], []
    for scores, seen in _blocks(query, key, visible, scale, bias):
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        medians.append(_by_head(weights.masked_fill(~seen, math.nan).nanmedian(dim=-1).values))
        counts.append(_by_head(seen.sum(dim=-1)))
    return _mean_over(torch.cat(medians, dim=1), torch.cat(counts, dim=1) > 1)


def attention_entropy(attention: AttentionRows) -> Tensor:
    """Mean entropy of the attention rows, per head, in nats.

    Godey et al. (2401.12143, figure 15). Range [0, log keys]; uniform causal attention over length
    T has mean_i log(i + 1). Rows that see no key are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees a key.
    """
    return _mean_over(attention.entropy, attention.visible > 0)


def attention_entropy_normalised(attention: AttentionRows) -> Tensor:
    """Mean of entropy / log(number of visible keys), per head.

    Makes rows of a causal mask comparable: 1 is uniform, 0 is one-hot, at any length. Range [0, 1].
    Rows that see fewer than two keys have no choice and are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees two keys.
    """
    return _mean_over(attention.entropy / attention.visible.log(), attention.visible > 1)


def attention_max(attention: AttentionRows) -> Tensor:
    """Mean of the largest weight of a row, per head: mean_i max_j A_ij.

    Godey et al. (2401.12143, figures 9 and 10). Range (0, 1]. Rows that see fewer than two keys
    have a maximum of 1 whatever the model does and are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees two keys.
    """
    return _mean_over(attention.maximum, attention.visible > 1)


def attention_min(attention: AttentionRows) -> Tensor:
    """Mean of the smallest weight of a row over its visible keys, per head: mean_i min_j A_ij.

    Godey et al. (2401.12143, figures 9 and 10). Range [0, 1/2]. Rows that see fewer than two keys
    are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees two keys.
    """
    return _mean_over(attention.minimum, attention.visible > 1)


def max_logit(attention: AttentionRows) -> Tensor:
    """The largest score before the softmax over all rows, per head.

    Scores that grow without bound announce an instability. Scaled and biased as the softmax sees
    them; unbounded.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees a key.
    """
    seen = attention.visible > 0
    top = torch.where(seen, attention.top_score, -torch.inf).amax(dim=1)
    return torch.where(seen.any(dim=1), top, torch.nan)


def attention_sink(attention: AttentionRows) -> Tensor:
    """Mean weight on the first visible key, per head: the share of attention that a sink takes.

    Range [0, 1]. Rows that see fewer than two keys are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN where no row sees two keys.
    """
    return _mean_over(attention.first, attention.visible > 1)


def _mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over the given rows of each head; 0/0 says NaN where there are none."""
    return torch.where(rows, values, 0).sum(dim=1) / rows.sum(dim=1)


def _score_shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    fits = (
        query.ndim == key.ndim == 4
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and min(*query.shape, *key.shape) > 0
        and query.shape[1] % key.shape[1] == 0
    )
    if not fits:
        raise ValueError(
            "expected queries [sequences, heads, queries, head width] and keys [sequences, key "
            "heads, keys, head width] with key heads dividing heads, got "
            f"{list(query.shape)} and {list(key.shape)}"
        )
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2]


def _expand(name: str, values: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    try:
        return values.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"expected {name} that broadcasts to [sequences, heads, queries, keys] = "
            f"{list(shape)}, got {list(values.shape)}"
        ) from error


def _blocks(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and visibility, [sequences, heads, queries, keys], of a few rows at a time."""
    sequences, heads, queries, keys = shape = _score_shape(query, key)
    visible = _expand("visible", visible, shape)
    bias = None if bias is None else _expand("bias", bias, shape)
    together = max(1, _BLOCK // (heads * queries * keys))
    step = queries if together > 1 else max(1, _BLOCK // (heads * keys))
    for first in range(0, sequences, together):
        for start in range(0, queries, step):
            rows = (slice(first, first + together), slice(None), slice(start, start + step))
            scores = _scores(query[rows], key[rows[0]]) * scale
            yield scores if bias is None else scores + bias[rows], visible[rows]


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Dot products [sequences, heads, queries, keys] in float32.

    Query head h faces key head h // group.
    """
    key_heads, keys, head_width = key.shape[1:]
    grouped = query.float().reshape(len(query), key_heads, -1, head_width)
    products = grouped @ key.float().transpose(2, 3)
    return products.reshape(*query.shape[:3], keys)


def _by_head(rows: Tensor) -> Tensor:
    """[sequences, heads, queries] as [heads, rows], sequence-major, float64."""
    return rows.transpose(0, 1).flatten(1).double()


def _reduce(scores: Tensor, visible: Tensor) -> AttentionRows:
    """What is kept of each row of `scores`, [sequences, heads, queries, keys].

    H = log Z - sum_j A_j s_j on scores shifted by their maximum, so that large scores do not
    cancel; a row that sees nothing comes out as 0 instead of NaN and is marked by its count.
    """
    scores = scores.masked_fill(~visible, -math.inf)
    top = scores.amax(dim=-1, keepdim=True)
    scores = scores - torch.where(torch.isfinite(top), top, 0)
    weights = scores.exp()
    normaliser = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    weights = weights / normaliser
    mean_score = (weights * scores.masked_fill(weights == 0, 0)).sum(dim=-1)
    entropy = normaliser.log().squeeze(-1) - mean_score
    count = visible.sum(dim=-1)
    first = visible.to(torch.uint8).argmax(dim=-1, keepdim=True)
    seen = count > 0
    return AttentionRows(
        entropy=_by_head(torch.where(seen, entropy, 0)).clamp(min=0),
        maximum=_by_head(weights.amax(dim=-1)),
        first=_by_head(weights.gather(-1, first).squeeze(-1)),
        visible=_by_head(count),
        minimum=_by_head(torch.where(seen, weights.masked_fill(~visible, 1).amin(dim=-1), 0)),
        top_score=_by_head(torch.where(seen, top.squeeze(-1), 0)),
    )


__all__ = [
    "AttentionRows",
    "attention_entropy",
    "attention_entropy_normalised",
    "attention_max",
    "attention_median",
    "attention_min",
    "attention_rows",
    "attention_sink",
    "max_logit",
]
