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
    later = torch.ones(each, each, dtype=torch.bool, device=top.device).triu(1)
    change = None if given.rule is None else given.rule.changed
    with without_autocast([kind]):
        for some in _pieces(sequences, max(1, block // (heads * keys * each))):
            facing = as_factor(given.key[some]).flatten(0, 1).transpose(1, 2)
            asking = as_factor(given.query[some]).reshape(len(facing), -1, queries, width)
            for rows in _pieces(queries, each):
                at = _indices(some, rows)
                if given.rule is None:
                    mask = _part(given.mask, some, rows)
                    seen = slice(0, min(rows.stop, keys) if given.causal else keys)
                else:
                    mask = given.rule.visible(*at)
                    # Functions of places are evaluated at all keys.
                    seen = slice(*given.rule.reach(rows)) if change is None else slice(0, keys)
                hidden, bias = split_mask(mask, keys)
                scores = torch.bmm(asking[:, :, rows].flatten(1, 2), facing[..., seen]).float()
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
                    late.masked_fill_(later[: late.shape[2], : late.shape[3]], -torch.inf)
                top[some, :, rows] = scores.amax(dim=-1)
    unseen = top == -torch.inf
    top = _scaled(top, given) if ordered else top
    return top.masked_fill_(unseen, -torch.inf)  # a cap makes it finite


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


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
