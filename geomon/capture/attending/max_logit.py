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

# Scores in a block: 16 MB; on the host 4 MB, which takes three quarters of the time.
_BLOCK, _BLOCK_ON_HOST = 1 << 22, 1 << 20

# Causal attention is cut into parts of queries, so that later keys can be skipped. Parts with fewer
# queries make products so small that they cost more time than the skipped keys save.
_CAUSAL_PARTS, _FEWEST_QUERIES = 8, 64


@torch.no_grad()
def max_logits_of_call(given: Arguments) -> Tensor:
    """Find the largest score of each row over its visible keys, before the softmax.

    Returns float32, [sequences, heads, queries], on the queries' device; -inf for rows without
    visible keys.
    """
    query, key = given.query, given.key
    sequences, heads, queries, width = query.shape
    keys = key.shape[2]
    top = query.new_full((sequences, heads, queries), -torch.inf, dtype=torch.float32)
    if 0 in (*query.shape, *key.shape):
        return top
    kind = query.device.type
    with without_autocast([kind]):
        block = _BLOCK_ON_HOST if kind == "cpu" else _BLOCK
        for some, rows in _cuts((sequences, heads, queries, keys), block, causal=given.causal):
            at = _indices(some, rows)
            if given.rule is None:
                change, mask = None, _part(given.mask, some, rows)
                seen = slice(0, min(rows.stop, keys) if given.causal else keys)
            else:
                change, mask = given.rule.changed, given.rule.visible(*at)
                # Functions of places are evaluated at all keys.
                seen = slice(*given.rule.reach(rows)) if change is None else slice(0, keys)
            hidden, bias = split_mask(mask, keys)
            facing = as_factor(key[some, :, seen]).flatten(0, 1).transpose(1, 2)
            asking = as_factor(query[some, :, rows]).reshape(len(facing), -1, width)
            scores = torch.bmm(asking, facing).float()
            scores = scores.view(_size(some), heads, _size(rows), -1)
            # Scale and cap keep the order, so only the largest score of a row needs them.
            ordered = bias is None and given.scale > 0 and change is None
            if not ordered:
                scores = _scaled(scores, given)
            if change is not None:
                scores = change(scores, *at)
            if bias is not None:
                scores += bias[..., seen]
            if hidden is not None:
                scores.masked_fill_(hidden[..., seen], -torch.inf)
            if given.causal:  # no key before the first of the rows is later than any of them
                late = scores[..., rows.start :]
                late.masked_fill_(torch.ones_like(late[0, 0], dtype=torch.bool).triu(1), -torch.inf)
            largest = scores.amax(dim=-1)
            unseen = largest == -torch.inf
            largest = _scaled(largest, given) if ordered else largest
            top[some, :, rows] = largest.masked_fill(unseen, -torch.inf)  # a cap makes it finite
    return top


@torch.no_grad()
def max_logits_of_scores(scores: Tensor) -> Tensor:
    """Find the largest score of each row of hand-written attention; -inf if all keys are hidden."""
    largest = scores.detach().amax(dim=-1).float()
    return largest.masked_fill_(largest < MASKED, -torch.inf)


@torch.no_grad()
def over_rows(largest: Tensor, valid: Tensor | None) -> Tensor:
    """Find the largest score of each head over rows that are not padding; -inf without any."""
    if valid is not None:
        padding = ~valid.to(largest.device, non_blocking=True)
        largest = largest.masked_fill(padding[:, None], -torch.inf)
    lowest = largest.new_full((largest.shape[1],), -torch.inf)
    return lowest if largest.numel() == 0 else largest.amax(dim=(0, 2))


def _cuts(
    shape: tuple[int, int, int, int], block: int, *, causal: bool
) -> Iterator[tuple[slice, slice]]:
    """Cut all scores into blocks of at most `block` scores: slices of sequences and queries."""
    sequences, heads, queries, keys = shape
    each = max(-(-queries // _CAUSAL_PARTS), _FEWEST_QUERIES) if causal else queries
    each = max(1, min(each, queries, block // (heads * keys)))
    some = max(1, block // (heads * keys * each))
    for first in range(0, queries, each):
        for sequence in range(0, sequences, some):
            yield (
                slice(sequence, min(sequence + some, sequences)),
                slice(first, min(first + each, queries)),
            )


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


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
