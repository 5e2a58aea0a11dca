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
def hidden_in_scores(scores: Tensor, added: Tensor | None = None) -> Tensor:
    """Find the keys that a mask hides in masked scores.

    Args:
        scores: The scores, [sequences, heads, queries, keys].
        added: What they have beyond the products of queries and keys, so that keys far below others
            by their products alone are not taken for hidden ones. If it is None, the scores stand
            for it.

    Returns:
        True where a key is hidden, of the same shape.
    """
    if added is None:
        # One head that attends to one key looks like a mask: only what no score reaches is one.
        return hidden_keys(scores) if scores.shape[1] > 1 else ~(scores >= MASKED)
    if 0 in scores.shape:
        return torch.zeros_like(scores, dtype=torch.bool)
    weightless = ~(scores - scores.amax(dim=-1, keepdim=True) >= -_WEIGHTLESS)
    weightless = weightless.all(dim=1, keepdim=True) | ~(scores >= MASKED)
    return weightless & hidden_keys(added)
