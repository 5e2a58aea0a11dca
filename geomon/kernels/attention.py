"""Sharpness of attention, from sampled queries and all of their visible keys."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels import _blocks
from geomon.kernels.products import as_factor

_Shape = tuple[int, int, int, int]  # sequences, heads, queries, keys
_Slices = tuple[slice, slice, slice]  # sequences, heads and queries
_Block = tuple[_Slices, Tensor, Tensor]  # place in the whole, scores, visibility
ScoreBlocks = Iterable[_Block]

# Queries of long sequences are cut into this many parts, of at least this many queries: under a
# causal mask, keys after a part can be skipped, but every block costs some thirty calls.
_PARTS, _FEWEST_QUERIES = 8, 32
# A score this far below the largest of its row has weight 0 in float32.
_NO_WEIGHT = -1e4


class ScoreSource(NamedTuple):
    """A source of attention scores: computed from queries and keys, or given.

    A learned sink is an additional logit in the softmax. It belongs to no key, and the model drops
    its weight: it is an outcome of the row, but not a key.

    Attributes:
        shape: Number of sequences, heads, queries and keys.
        blocks: Function that returns all scores anew, block by block. A block is its place in the
            whole (slices of sequences, heads and queries), its scores, which the caller may
            overwrite, and the visibility of its keys, which broadcasts to them.
        sink: Logit of a learned sink for each head, [heads] (GPT-OSS). Defaults to None.
    """

    shape: _Shape
    blocks: Callable[[], ScoreBlocks]
    sink: Tensor | None = None


def scores_of(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> ScoreSource:
    """Make a source of scores from queries and keys: s_ij = cap(scale q_i . k_j) + bias_ij.

    Here cap(s) = softcap tanh(s / softcap). Memory is bounded for any length, because only one
    block of scores exists at a time.

    Args:
        query: Queries as attended, [sequences, heads, queries, head width].
        key: Keys as attended, [sequences, key heads, keys, head width]; heads must be a multiple of
            key heads.
        visible: True if a query may attend to a key, broadcastable to [sequences, heads, queries,
            keys].
        scale: Factor on the dot products.
        bias: Term added to the scores, broadcastable like `visible`. Defaults to None.
        softcap: Bound on the scores before the bias (Gemma 2). Defaults to None.
        sink: Logit of a learned sink for each head, [heads]. Defaults to None.

    Returns:
        The source of scores.

    Raises:
        ValueError: If the shapes do not match.
    """
    shape = score_shape(query, key)
    if sink is not None and sink.shape != shape[1:2]:
        raise ValueError(f"expected sink logits [heads] = [{shape[1]}], got {list(sink.shape)}")
    seen = expand_visible(visible, shape)
    added = None if bias is None else _expand("bias", bias, shape)
    blocks = functools.partial(_score_blocks, query, key, seen, scale, added, softcap)
    return ScoreSource(shape, blocks, sink)


def given_scores(scores: Tensor, visible: Tensor) -> ScoreSource:
    """Make a source from given scores, for attention whose queries and keys were not captured.

    Args:
        scores: Scores before the softmax, [sequences, heads, queries, keys].
        visible: True if a query may attend to a key, broadcastable to the shape of `scores`.

    Returns:
        The source of scores.

    Raises:
        ValueError: If the scores do not have four dimensions, or `visible` does not broadcast to
            them.
    """
    if scores.ndim != 4 or scores.numel() == 0:
        raise ValueError(
            f"expected scores [sequences, heads, queries, keys], got {list(scores.shape)}"
        )
    shape = (scores.shape[0], scores.shape[1], scores.shape[2], scores.shape[3])
    seen = expand_visible(visible, shape)
    return ScoreSource(shape, functools.partial(_given_blocks, scores, seen))


class AttentionRows(NamedTuple):
    """Reductions of softmax rows for the metrics; every field is [heads, rows], float64.

    Attributes:
        entropy: Entropy over all outcomes, -sum_j A_ij log A_ij, in nats.
        maximum: Largest weight of a visible key, max_j A_ij.
        first: Weight of the first visible key, the usual attention sink, plus the weight of a
            learned sink.
        visible: Number of outcomes: visible keys and a learned sink; 0 if the row sees no key.
        minimum: Smallest weight of a visible key, min_j A_ij.
    """

    entropy: Tensor
    maximum: Tensor
    first: Tensor
    visible: Tensor
    minimum: Tensor


def attention_rows(score_source: ScoreSource) -> AttentionRows:
    """Reduce the softmax rows of queries over all their visible keys, block by block.

    A_i = softmax_j(s_ij) over the visible keys j and a learned sink. The entropy is H = log Z -
    sum_j A_j s_j on scores shifted by their maximum, so that large scores do not cancel. A row
    without visible keys is 0 instead of NaN, and marked by its count.

    Args:
        score_source: Scores and visibility.

    Returns:
        Reductions with rows = sequences x queries, sequence-major.

    Example:
        >>> query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4)
        >>> scores = scores_of(query, key, torch.ones(1, 1, 1, 8, dtype=torch.bool), 0.5)
        >>> rows = attention_rows(scores)
        >>> bool((rows.entropy - math.log(8)).abs().max() < 1e-6)  # no preference: log(keys)
        True
    """
    # Weights are never divided by Z one by one, because every pass over the scores costs time.
    kept: dict[str, Tensor] = {}
    sink = score_source.sink
    buffer = torch.empty(0, dtype=torch.float32, device="cpu")
    masks: dict[tuple[int, ...], _Mask] = {}
    for at, scores, visible in score_source.blocks():
        kept = kept or {
            name: scores.new_zeros(score_source.shape[:3]) for name in AttentionRows._fields
        }
        place = _place_of(visible, at)
        if place not in masks:
            masks = {place: _mask_of(visible)} | {
                other: mask for other, mask in masks.items() if other[0] == place[0]
            }
        mask = masks[place]
        count, seen = mask.number, mask.number > 0
        if not scores.sum().isfinite():  # scores of hidden keys may be anything
            scores.masked_fill_(~visible, -math.inf)
        scores.add_(mask.hidden)
        top_score = scores.amax(dim=-1, keepdim=True).masked_fill_(~seen[..., None], 0)
        logit = None if sink is None else sink.float()[at[1], None, None].expand_as(top_score)
        top = top_score if logit is None else top_score.maximum(logit)
        scores.sub_(top)
        if buffer.numel() < scores.numel():
            buffer = scores.new_empty(scores.numel())
        weights = torch.exp(scores, out=buffer[: scores.numel()].view(scores.shape))
        normaliser = weights.sum(dim=-1)
        taken = normaliser.new_zeros(()) if logit is None else (logit - top).exp_().squeeze(-1)
        normaliser = normaliser.add_(taken).clamp_(min=torch.finfo(weights.dtype).tiny)
        first = mask.first.expand(*weights.shape[:-1], 1)
        at_first = weights.gather(-1, first).squeeze(-1)
        kept["first"][at] = (at_first + taken) / normaliser
        kept["maximum"][at] = ((top_score - top).exp_().squeeze(-1) / normaliser).where(seen, 0)
        # Scores are at most 0, so `lift` keeps hidden keys from being the minimum. 0 log 0 = 0.
        scores.clamp_(min=_NO_WEIGHT).add_(mask.lift)
        kept["minimum"][at] = (scores.amin(dim=-1).exp_() / normaliser).where(seen, 0)
        weighted = scores.mul_(weights).sum(dim=-1)
        if logit is not None:
            weighted += taken * (logit - top).clamp_(min=_NO_WEIGHT).squeeze(-1)
            count = torch.where(seen, count + 1, 0)
        kept["visible"][at] = count.float()
        entropy = normaliser.log() - weighted / normaliser
        kept["entropy"][at] = entropy.clamp_(min=0).where(seen, 0)
    return AttentionRows(**{name: by_head(rows) for name, rows in kept.items()})


class RowMedians(NamedTuple):
    """Median weight of a visible key in each softmax row; every field is [heads, rows], float64.

    Attributes:
        median: The median; for an even number of keys, the lower of the two middle weights.
        visible: Number of visible keys.
    """

    median: Tensor
    visible: Tensor


def row_medians(score_source: ScoreSource) -> RowMedians:
    """Compute the median weight of a visible key in each row.

    Godey et al. (2401.12143, figure 9). Every row is sorted, which costs several times as much as
    the other reductions.

    Args:
        score_source: Scores and visibility.

    Returns:
        Medians with rows = sequences x queries, sequence-major.
    """
    kept: dict[str, Tensor] = {}
    for at, scores, seen in score_source.blocks():
        kept = kept or {
            name: scores.new_empty(score_source.shape[:3]) for name in RowMedians._fields
        }
        weights = _weights(score_source, at, scores, seen)
        kept["median"][at] = weights.masked_fill(~seen, math.nan).nanmedian(dim=-1).values
        kept["visible"][at] = seen.sum(dim=-1).float()
    return RowMedians(**{name: by_head(rows) for name, rows in kept.items()})


def _weights(source: ScoreSource, at: _Slices, scores: Tensor, seen: Tensor) -> Tensor:
    """Compute the softmax of a block in place; hidden keys get weight 0."""
    total = scores.masked_fill_(~seen, -math.inf).logsumexp(dim=-1, keepdim=True)
    if source.sink is not None:
        total = torch.logaddexp(total, source.sink.float()[at[1], None, None])
    return scores.sub_(total).exp_()


class SequenceExtremes(NamedTuple):
    """Extremes of the softmax over the sampled queries of each sequence, [heads, sequences].

    Attributes:
        maximum: Largest weight of a visible key.
        median: Median weight of a visible key; for an even number, the lower of the middle two.
        minimum: Smallest weight of a visible key.
    """

    maximum: Tensor
    median: Tensor
    minimum: Tensor


def sequence_extremes(score_source: ScoreSource) -> SequenceExtremes:
    """Compute the largest, median and smallest weight over each sequence's sampled queries.

    Godey et al. (2401.12143, figure 10), over all pairs (i, j) of a sequence; their figure 9 is
    over the keys of one row. An extreme grows with the number of sampled queries, and equals that
    of the whole sequence only if all are sampled. Queries that see fewer than two keys are left
    out.

    Args:
        score_source: Scores and visibility.

    Returns:
        The extremes, float64; NaN for a sequence if none of its queries sees two keys.

    Example:
        >>> query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4)
        >>> visible = torch.ones(3, 8, dtype=torch.bool).tril(diagonal=3)
        >>> found = sequence_extremes(scores_of(query, key, visible[None, None], 0.5))
        >>> [round(part[0].item(), 3) for part in found]  # 4, 5 and 6 keys
        [0.25, 0.2, 0.167]
    """
    sequences, heads, queries, keys = score_source.shape
    kept: dict[str, Tensor] = {}
    parts: list[Tensor] = []
    for at, scores, visible in score_source.blocks():
        counts = visible & (visible.sum(dim=-1, keepdim=True) > 1)
        width = scores.shape[-1]
        weights = _weights(score_source, at, scores, visible).masked_fill(~counts, math.nan)
        kept = kept or {
            name: scores.new_empty(sequences, heads, dtype=torch.float64)
            for name in SequenceExtremes._fields
        }
        parts.append(torch.nn.functional.pad(weights, (0, keys - width), value=math.nan))
        if at[2].stop < queries:  # further queries of this sequence follow
            continue
        every = torch.cat(parts, dim=2).flatten(2)
        parts.clear()
        kept["median"][at[:2]] = every.nanmedian(dim=-1).values.double()
        lost = every.isnan()
        none = lost.all(dim=-1)
        for name, extreme, fill in (("maximum", torch.amax, -1.0), ("minimum", torch.amin, 2.0)):
            found = extreme(every.masked_fill(lost, fill), dim=-1)
            kept[name][at[:2]] = found.masked_fill(none, math.nan).double()
    return SequenceExtremes(**{name: values.T for name, values in kept.items()})


def attention_entropy(attention: AttentionRows) -> Tensor:
    """Compute the mean entropy of the attention rows, per head, in nats.

    Godey et al. (2401.12143, figure 15). Range [0, log keys]; uniform causal attention over length
    T has mean_i log(i + 1). Rows without visible keys are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN if no row sees a key.
    """
    return mean_over(attention.entropy, attention.visible > 0)


def attention_entropy_normalised(attention: AttentionRows) -> Tensor:
    """Compute the mean of entropy / log(number of visible keys), per head.

    This makes rows of a causal mask comparable: 1 is uniform and 0 is one-hot, at any length. Range
    [0, 1]. Rows that see fewer than two keys are left out, because they leave no choice.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN if no row sees two keys.
    """
    return mean_over(attention.entropy / attention.visible.log(), attention.visible > 1)


def attention_sink(attention: AttentionRows) -> Tensor:
    """Compute the mean weight on the first visible key, the usual attention sink, per head.

    Range [0, 1]. Rows that see fewer than two keys are left out.

    Args:
        attention: Reduced softmax rows.

    Returns:
        [heads]; NaN if no row sees two keys.
    """
    return mean_over(attention.first, attention.visible > 1)


def mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """Average over the selected rows of each head, [heads]; NaN if there are none.

    Args:
        values: One number for each row, [heads, rows].
        rows: True for the rows that count, [heads, rows].
    """
    return torch.where(rows, values, 0).sum(dim=1) / rows.sum(dim=1)


def score_shape(query: Tensor, key: Tensor) -> _Shape:
    """Return the shape of the scores after checking that queries and keys match.

    Args:
        query: Queries as attended, [sequences, heads, queries, head width].
        key: Keys as attended, [sequences, key heads, keys, head width]; heads must be a multiple of
            key heads.

    Raises:
        ValueError: If they do not match.
    """
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


def expand_visible(visible: Tensor, shape: _Shape) -> Tensor:
    """Broadcast the visibility of keys to the shape of the scores.

    Args:
        visible: True if a query may attend to a key, broadcastable to the shape.
        shape: Shape of the scores.

    Raises:
        ValueError: If it is not boolean, or does not broadcast.
    """
    if visible.dtype != torch.bool:
        raise ValueError(
            f"expected visible as booleans, True if a query may attend, got {visible.dtype}: for a "
            "mask that is added to scores, pass mask == 0"
        )
    return _expand("visible", visible, shape)


def _expand(name: str, values: Tensor, shape: _Shape) -> Tensor:
    """Broadcast `values` to the shape of the scores; `name` appears in the error message."""
    try:
        return values.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"expected {name} that broadcasts to [sequences, heads, queries, keys] = "
            f"{list(shape)}, got {list(values.shape)}"
        ) from error


def _cuts(shape: _Shape, device: torch.device, *, group: int) -> Iterator[_Slices]:
    """Cut scores into blocks: several sequences, or some queries of some heads of one sequence.

    `group` is the number of heads that share keys, which stay together.
    """
    sequences, heads, queries, keys = shape
    size = heads * queries * keys
    if size <= _blocks.block_size(device) // _PARTS:
        step = _blocks.rows_in_block(size, device)
        for first in range(0, sequences, step):
            yield slice(first, min(first + step, sequences)), slice(0, heads), slice(0, queries)
        return
    fits = _blocks.rows_in_block(group * keys, device)
    rows = min(fits, max(_FEWEST_QUERIES, -(-queries // _PARTS)))
    together = group * max(1, _blocks.rows_in_block(rows * keys, device) // group)
    for sequence in range(sequences):
        for head in range(0, heads, together):
            for start in range(0, queries, rows):
                yield (
                    slice(sequence, sequence + 1),
                    slice(head, min(head + together, heads)),
                    slice(start, min(start + rows, queries)),
                )


def _score_blocks(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    scale: float,
    bias: Tensor | None,
    softcap: float | None,
) -> Iterator[_Block]:
    """Compute scores a few rows at a time; query head h uses key head h // group.

    Keys after the last one that a block's queries see are skipped, nearly half of all under a
    causal mask. All blocks share one buffer, because with a buffer for each the allocator keeps
    hundreds of megabytes in some processes. The arguments are as for `scores_of`, with visibility
    and bias expanded to the shape of the scores.
    """
    shape = score_shape(query, key)
    keys, width = key.shape[2:]
    group = shape[1] // key.shape[1]
    cuts = list(_cuts(shape, query.device, group=group))
    ends = _ends(visible)
    buffer = query.new_empty(max(map(_rows_of, cuts)) * keys, dtype=torch.float32)
    faced, facing = None, key[:0]
    for at in cuts:
        sequences, heads, _ = at
        if faced != (sequences, heads):  # keys in half precision are converted once
            faced = (sequences, heads)
            some = key[sequences, heads.start // group : heads.stop // group]
            facing = as_factor(some).reshape(-1, keys, width).transpose(1, 2)
        seen = _seen(visible, ends, at)
        reach = seen.shape[-1]
        scores = buffer[: _rows_of(at) * reach].view(len(facing), -1, reach)
        asking = as_factor(query[at]).reshape(len(facing), -1, width)
        if asking.dtype == scores.dtype:
            torch.bmm(asking, facing[:, :, :reach], out=scores)
        else:
            scores.copy_(torch.bmm(asking, facing[:, :, :reach]))
        scores = scores.mul_(scale).view(*(part.stop - part.start for part in at), reach)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores += bias[at][..., :reach]
        yield at, scores, seen


def _given_blocks(scores: Tensor, visible: Tensor) -> ScoreBlocks:
    """Cut given scores into blocks, each a copy; `visible` has been expanded to their shape."""
    sequences, heads, queries, keys = scores.shape
    ends = _ends(visible)
    cuts = _cuts((sequences, heads, queries, keys), scores.device, group=1)
    blocks = ((at, _seen(visible, ends, at)) for at in cuts)
    return (
        (at, scores[at][..., : seen.shape[-1]].to(torch.float32, copy=True), seen)
        for at, seen in blocks
    )


def _ends(visible: Tensor) -> Tensor:
    """Return the place after each row's last visible key, [sequences, heads, queries].

    It is int16, or int64 for many keys. Repetitions in memory are read only once.
    """
    keys = visible.shape[-1]
    kind = torch.int16 if keys < torch.iinfo(torch.int16).max else torch.int64
    places = torch.arange(1, keys + 1, dtype=kind, device=visible.device)
    one = _without_repetitions(visible)
    return (one * places).amax(dim=-1).expand(visible.shape[:3])


def _seen(visible: Tensor, ends: Tensor, at: _Slices) -> Tensor:
    """Slice the visibility of a block, without repetitions, up to the last visible key."""
    reach = int(ends[at].max())
    return _without_repetitions(visible[at])[..., : max(1, reach)]


def _without_repetitions(values: Tensor) -> Tensor:
    """Remove repetitions over sequences, heads and queries; keep all keys."""
    for axis in range(3):
        if values.stride(axis) == 0:
            values = values.narrow(axis, 0, 1)
    return values


def _rows_of(at: _Slices) -> int:
    """Return the number of rows of scores in one block."""
    return math.prod(part.stop - part.start for part in at)


def by_head(rows: Tensor) -> Tensor:
    """Reshape [sequences, heads, queries] to [heads, rows], sequence-major, float64.

    Args:
        rows: One number for each query, [sequences, heads, queries].
    """
    return rows.transpose(0, 1).flatten(1).double()


class _Mask(NamedTuple):
    """Visibility of a block's keys, in the forms that are needed; heads may share it.

    Adding numbers takes a tenth of the time of filling by a mask.

    Attributes:
        number: Number of visible keys of each row.
        first: Place of the first visible key.
        hidden: Added to scores: -inf for hidden keys, else 0.
        lift: Added to the lowest possible scores of hidden keys to make them 0.
    """

    number: Tensor
    first: Tensor
    hidden: Tensor
    lift: Tensor


def _mask_of(visible: Tensor) -> _Mask:
    plain = visible.to(torch.float32)
    hidden = torch.where(visible, plain.new_zeros(()), -math.inf)
    lift = (1 - plain).mul_(-_NO_WEIGHT)
    first = visible.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return _Mask(visible.sum(dim=-1), first, hidden, lift)


def _place_of(visible: Tensor, at: _Slices) -> tuple[int, ...]:
    """Return a key for the place of a block, without its heads if all share one visibility."""
    sequences, heads, queries = at
    # With one head per block, the visibility may differ from the next block's.
    whose = () if visible.stride(1) == 0 else (heads.start, heads.stop)
    return (sequences.start, sequences.stop, queries.start, queries.stop, *whose)
