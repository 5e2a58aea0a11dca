"""Find the largest attention logit over all rows and all keys that they see.

Sampling could miss the maximum, an early sign of instability, so it is computed on all rows during
the forward pass. It never waits for the device, and holds one block of scores at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from geomon.capture.attending.attention import Arguments, split_mask
from geomon.capture.tokens.visibility import MASKED
from geomon.kernels.products import as_factor, without_autocast

# Scores in a block: 64 MB, so that a device gets few launches; on the host 4 MB, which caches hold.
_BLOCK, _BLOCK_ON_HOST = 1 << 24, 1 << 20

# Causal attention is cut into parts of queries, so that later keys can be skipped. Parts with fewer
# queries make products so small that they cost more time than the skipped keys save.
_CAUSAL_PARTS, _FEWEST_QUERIES = 8, 64


@torch.no_grad()
def max_logits_of_call(given: Arguments) -> Tensor:
    """Find the largest score of each row over its visible keys, before the softmax.

    Returns float32, [sequences, heads, queries], on the queries' device; -inf for rows without
    visible keys.
    """
    sequences, heads, queries, width = given.query.shape
    keys = given.key.shape[2]
    top = given.query.new_full((sequences, heads, queries), -torch.inf, dtype=torch.float32)
    if 0 in (*given.query.shape, *given.key.shape):
        return top
    kind = given.query.device.type
    block = _BLOCK_ON_HOST if kind == "cpu" else _BLOCK
    each = max(-(-queries // _CAUSAL_PARTS), _FEWEST_QUERIES) if given.causal else queries
    each = max(1, min(each, queries, block // (heads * keys)))
    ordered = _keeps_order(given)
    with without_autocast([kind]):
        for some in _pieces(sequences, max(1, block // (heads * keys * each))):
            facing = as_factor(given.key[some]).flatten(0, 1).transpose(1, 2)
            asking = as_factor(given.query[some]).reshape(len(facing), -1, queries, width)
            for rows in _pieces(queries, each):
                mask, seen = _visible(given, some, rows)
                products = torch.bmm(asking[:, :, rows].flatten(1, 2), facing[..., seen]).float()
                scores = products.view(-1, heads, rows.stop - rows.start, products.shape[2])
                if not ordered:
                    scores = _changed(_scaled(scores, given), given, some, rows)
                _mask(scores, mask, keys, seen)
                if given.causal:
                    _hide_later(scores, rows)
                top[some, :, rows] = scores.amax(dim=-1)
    unseen = top == -torch.inf
    top = _scaled(top, given) if ordered else top
    return top.masked_fill_(unseen, -torch.inf)  # a cap makes it finite


def _keeps_order(given: Arguments) -> bool:
    """Whether only scale and cap follow the products: the largest of a row alone needs them."""
    changed = given.rule is not None and given.rule.changed is not None
    adds = given.mask is not None and given.mask.dtype != torch.bool
    return given.scale > 0 and not changed and not adds


def _visible(given: Arguments, some: slice, rows: slice) -> tuple[Tensor | None, slice]:
    """Return the mask of some queries over all keys, and the range of keys that they may see."""
    keys = given.key.shape[2]
    if given.rule is None:
        return _part(given.mask, some, rows), slice(min(rows.stop, keys) if given.causal else keys)
    # Functions of places are evaluated at all keys.
    reach = given.rule.reach(rows) if given.rule.changed is None else (0, keys)
    return given.rule.visible(*_indices(some, rows)), slice(*reach)


def _changed(scores: Tensor, given: Arguments, some: slice, rows: slice) -> Tensor:
    """Change scaled scores as the rule of a call does, if it has one that does."""
    change = None if given.rule is None else given.rule.changed
    return scores if change is None else change(scores, *_indices(some, rows))


def _mask(scores: Tensor, mask: Tensor | None, keys: int, seen: slice) -> None:
    """Add a mask over all keys to the scores of the seen ones, in place."""
    hidden, bias = split_mask(mask, keys)
    if bias is not None:
        scores += bias[..., seen]
    if hidden is not None:
        scores.masked_fill_(hidden[..., seen], -torch.inf)


def _hide_later(scores: Tensor, rows: slice) -> None:
    """Hide keys after each query, in place; none before the first query is later than another."""
    late = scores[..., rows.start :]
    later = torch.ones(late.shape[2:], dtype=torch.bool, device=late.device).triu(1)
    late.masked_fill_(later, -torch.inf)


@torch.no_grad()
def max_logits_of_scores(scores: Tensor) -> Tensor:
    """Find the largest score of each row of hand-written attention; -inf if all keys are hidden."""
    largest = scores.detach().amax(dim=-1).float()
    return largest.masked_fill_(largest < MASKED, -torch.inf)


@torch.no_grad()
def over_rows(largest: Tensor, valid: Tensor | None) -> Tensor:
    """Find the largest score of each head over rows that are not padding; -inf without any."""
    if valid is not None:
        padding = ~valid.to(largest.device)
        largest = largest.masked_fill(padding[:, None], -torch.inf)
    lowest = largest.new_full((largest.shape[1],), -torch.inf)
    return lowest if largest.numel() == 0 else largest.amax(dim=(0, 2))


def _pieces(count: int, most: int) -> Iterator[slice]:
    """Cut a count into slices of at most `most`."""
    return (slice(first, min(first + most, count)) for first in range(0, count, most))


def _part(mask: Tensor | None, some: slice, rows: slice) -> Tensor | None:
    """Slice the sequences and rows of a mask, if it has dimensions for them."""
    if mask is None:
        return None
    mask = mask[some] if mask.shape[0] > 1 else mask
    return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _indices(some: slice, rows: slice) -> tuple[Tensor, Tensor]:
    """Return sequence indices, and the positions of the queries in each sequence."""
    sequences, places = (
        torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")
        for part in (some, rows)
    )
    return sequences, places.expand(len(sequences), -1)


def _scaled(scores: Tensor, given: Arguments) -> Tensor:
    """Scale and cap products of queries and keys, in place."""
    scores = scores.mul_(given.scale)
    cap = given.softcap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
