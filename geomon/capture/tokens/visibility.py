"""Visibility: which keys a query sees, in what is added to the scores of attention.

There is one rule for all ways to write a mask: a key is hidden by what is added to its score, not
by how small its weight is. In one head alone a weight may be as small as it likes: biases fall far
with the distance (ALiBi), and a head may attend to one key.
"""

import torch
from torch import Tensor

# So far below the largest of the row, in every head: the weight is less than e^-50 of the largest
# one. Masks add -100 (Swin) or less.
FAR_BELOW = 50.0
# By at least this much a mask lies below the lowest of what is not hidden; a bias falls smoothly.
_GAP = 20.0
# Below this in every head, even where the whole row is: masks add -10,000 or less.
MASKED = -5_000.0
# Below this in one head alone: a mask of that head. ALiBi does not come so far in 60,000 tokens.
_MASKED_IN_ONE_HEAD = -30_000.0

# So far below the largest score of the row a key has no weight in float32. One that has some in any
# head was not hidden, whatever was added to it.
_WEIGHTLESS = 16.0

# Share of the pairs of keys whose scores differ in the same direction as the products they are made
# of. Of others half of the pairs do.
_FOLLOWING = 0.6

# Queries of all sequences, and at least of each, from which the scale of the scores is estimated.
_QUERIES_FOR_SCALE, _FEWEST_FOR_SCALE = 64, 8


@torch.no_grad()
def hidden_keys(added: Tensor) -> Tensor:
    """Find the keys that a mask hides.

    Returns:
        True where a key is hidden, of the same shape.
    """
    below = (added - added.amax(dim=-1, keepdim=True)).amax(dim=1, keepdim=True)
    masked = ~(added.amax(dim=1, keepdim=True) >= MASKED)
    far = (below < -FAR_BELOW) & ~masked
    lowest_seen = below.masked_fill(far | masked, 0).amin(dim=-1, keepdim=True)
    highest_far = below.masked_fill(~far, -torch.inf).amax(dim=-1, keepdim=True)
    far &= lowest_seen - highest_far > _GAP
    return ~(added >= _MASKED_IN_ONE_HEAD) | masked | far


@torch.no_grad()
def hidden_in_scores(scores: Tensor, products: Tensor | None) -> Tensor:
    """Find the keys that a mask hides in masked scores.

    What was added to the scores is what they have beyond the products of queries and keys, so that
    keys far below others by their products alone are not taken for hidden ones. Where the products
    are not known, the scores stand for what was added to them.

    Returns:
        True where a key is hidden, of the same shape.
    """
    scale = None if products is None else _scale(scores, products)
    if products is None or scale is None:
        # One head that attends to one key looks like a mask: only what no score reaches is one.
        return hidden_keys(scores) if scores.shape[1] > 1 else ~(scores >= MASKED)
    weightless = ~(scores - scores.amax(dim=-1, keepdim=True) >= -_WEIGHTLESS)
    weightless = weightless.all(dim=1, keepdim=True) | ~(scores >= MASKED)
    return weightless & hidden_keys(scores - scale * products)


@torch.no_grad()
def hidden_for_sure(scores: Tensor, added: Tensor) -> Tensor:
    """Find the keys that a mask of -inf, or of the lowest number of a type, hides in one head.

    `hidden_in_scores` hides the same keys if next to nothing is added to the others.
    """
    return ~((added >= _MASKED_IN_ONE_HEAD) | (scores >= MASKED))


@torch.no_grad()
def are_made_of(scores: Tensor, products: Tensor) -> bool:
    """Whether scores follow products, up to a factor of each head, masks and biases."""
    ratio = _ratios(scores, products)
    known = ~ratio.isnan()
    return bool((ratio > 0).sum() > _FOLLOWING * known.sum())


@torch.no_grad()
def score_scale(scores: Tensor, products: Tensor) -> float | None:
    """Estimate the factor from products to scores, of all heads together; None if it is unknown."""
    scale = _scale(scores, products)
    return None if scale is None else float(scale.median())


def _scale(scores: Tensor, products: Tensor) -> Tensor | None:
    """Estimate the factor of each head from products to scores; None if it is unknown."""
    ratios = _ratios(scores, products)
    if ratios.shape[1] == 0:  # one key, or no query
        return None
    scale = ratios.nanmedian(dim=1).values
    return scale[:, None, None] if scale.isfinite().all() else None


def _ratios(scores: Tensor, products: Tensor) -> Tensor:
    """Divide differences of scores by those of products, [heads, pairs of keys]; NaN for unknown.

    Neighbouring keys are nearly always both hidden or both visible: the mask cancels.
    """
    sequences, queries = scores.shape[0], scores.shape[2]
    count = min(queries, max(_FEWEST_FOR_SCALE, _QUERIES_FOR_SCALE // max(1, sequences)))
    some = torch.arange(count, dtype=torch.int64, device=scores.device)
    rows = some * queries // len(some)
    scores, products = scores[:, :, rows], products[:, :, rows]
    seen = (scores > MASKED)[..., 1:] & (scores > MASKED)[..., :-1]
    ratio = scores.diff(dim=-1) / products.diff(dim=-1)
    ratio = torch.where(seen & ratio.isfinite() & (ratio != 0), ratio, torch.nan)
    return ratio.transpose(0, 1).flatten(1)
