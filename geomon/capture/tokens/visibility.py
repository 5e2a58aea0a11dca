"""Visibility: which keys a query sees, judged by what is added to the attention scores.

One rule covers all ways of writing a mask: a key is hidden by the number added to its score, not by
a small weight. In a single head, weights may be arbitrarily small: biases fall far with distance
(ALiBi), and a head may attend to only one key.
"""

import torch
from torch import Tensor

# Hidden if this far below the row's largest value in every head: the weight is then less than e^-50
# of the largest. Masks add -100 (Swin) or less.
FAR_BELOW = 50.0
# A mask lies at least this far below the lowest visible value, whereas a bias falls smoothly.
_GAP = 20.0
# Hidden below this value in every head, even for a whole row: masks add -10,000 or less.
MASKED = -5_000.0
# Hidden below this value in a single head: ALiBi does not reach it within 60,000 tokens.
_MASKED_IN_ONE_HEAD = -30_000.0

# This far below the row's largest score, a key has no weight in float32. A key with weight in any
# head was not hidden, whatever was added to its score.
_WEIGHTLESS = 16.0


@torch.no_grad()
def hidden_keys(added: Tensor) -> Tensor:
    """Find the keys that a mask hides: True for hidden keys, in the mask's shape."""
    below = (added - added.amax(dim=-1, keepdim=True)).amax(dim=1, keepdim=True)
    masked = ~(added.amax(dim=1, keepdim=True) >= MASKED)
    far = (below < -FAR_BELOW) & ~masked
    lowest_seen = below.masked_fill(far | masked, 0).amin(dim=-1, keepdim=True)
    highest_far = below.masked_fill(~far, -torch.inf).amax(dim=-1, keepdim=True)
    far &= lowest_seen - highest_far > _GAP
    return ~(added >= _MASKED_IN_ONE_HEAD) | masked | far


@torch.no_grad()
def hidden_in_scores(scores: Tensor, added: Tensor | None = None) -> Tensor:
    """Find the keys that a mask hides in scores, [sequences, heads, queries, keys].

    `added` is the difference between scores and query-key products; without it, a very low product
    could be mistaken for a mask. Returns True for hidden keys, in the scores' shape.
    """
    if added is None:
        # One head that attends to one key looks like a mask, so only unreachable scores count.
        return hidden_keys(scores) if scores.shape[1] > 1 else ~(scores >= MASKED)
    if 0 in scores.shape:
        return torch.zeros_like(scores, dtype=torch.bool)
    weightless = ~(scores - scores.amax(dim=-1, keepdim=True) >= -_WEIGHTLESS)
    weightless = weightless.all(dim=1, keepdim=True) | ~(scores >= MASKED)
    return weightless & hidden_keys(added)
