"""Scores before the softmax: mean and spread over keys, and the contribution of the mean query.

A term that is equal for all keys of a query cancels in the softmax. The variance of a query's
scores over its visible keys therefore limits how sharp its row can be. The part that comes from the
mean query is equal for all queries: attention that does not depend on content.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import rows_in_block
from geomon.kernels.attention import (
    ScoreSource,
    by_head,
    expand_visible,
    mean_over,
    score_shape,
)

# A variance below this share of the mean square of scores (about the mean key) is rounding, because
# it is computed as a difference of squares from float32 keys.
_ROUNDING = 1e-13


class ScoreMoments(NamedTuple):
    """Moments of each query's scores over its visible keys; [heads, rows], float64.

    Attributes:
        mean: Mean over the visible keys; 0 if there are none.
        variance: Variance about that mean, with 1/keys.
        visible: Number of visible keys.
    """

    mean: Tensor
    variance: Tensor
    visible: Tensor


class QueryVariances(NamedTuple):
    """Variances of scores over visible keys, summed over the queries of a group; float64.

    Both are 0 for a head whose scores vary only by rounding.

    Attributes:
        common: Variances of the scores of a mean query, [1 + groups, heads, groups]: the mean of
            all queries first, then without each group. With a single group only the first, [1,
            heads, 1].
        own: Variances of each query's own scores, [heads, groups].
    """

    common: Tensor
    own: Tensor

    def without(self, group: int) -> "QueryVariances":
        """Return the variances for the queries of all other groups, under their own mean query.

        Args:
            group: Index of a group.
        """
        stay = [number for number in range(self.own.shape[1]) if number != group]
        return QueryVariances(self.common[1 + group][None, :, stay], self.own[:, stay])


def score_moments(score_source: ScoreSource) -> ScoreMoments:
    """Compute the mean and the variance of each query's scores over its visible keys.

    The scores are those that enter the softmax. Godey et al. (2401.12143, figure 7) draw their
    histograms.

    Args:
        score_source: Scores and visibility.

    Returns:
        Moments with rows = sequences x queries, sequence-major.

    Example:
        >>> from geomon.kernels.attention import scores_of
        >>> query, key = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> scores = scores_of(query, key, torch.ones(1, 1, 1, 2, dtype=torch.bool), 2.0)
        >>> found = score_moments(scores)
        >>> found.mean.item(), found.variance.item()
        (4.0, 4.0)
    """
    kept: dict[str, Tensor] = {}
    for at, scores, visible in score_source.blocks():
        kept = kept or {
            name: scores.new_zeros(score_source.shape[:3]) for name in ScoreMoments._fields
        }
        number = visible.sum(dim=-1, keepdim=True)
        size = number.clamp(min=1)
        middle = scores.masked_fill_(~visible, 0).sum(dim=-1, keepdim=True) / size
        about = scores.sub_(middle).masked_fill_(~visible, 0)
        kept["mean"][at], kept["visible"][at] = middle.squeeze(-1), number.squeeze(-1).float()
        kept["variance"][at] = about.square_().sum(dim=-1) / size.squeeze(-1)
    return ScoreMoments(**{name: by_head(rows) for name, rows in kept.items()})


def score_mean(score_moments: ScoreMoments) -> Tensor:
    """Compute the mean score of queries and their visible keys, per head.

    It is the mean over queries of mean_j s_ij. It cancels in the softmax, and is unbounded.

    Args:
        score_moments: Moments of the scores of each query.

    Returns:
        [heads]; NaN if no query sees a key.
    """
    return mean_over(score_moments.mean, score_moments.visible > 0)


def score_spread(score_moments: ScoreMoments) -> Tensor:
    """Compute the spread of a query's scores over its visible keys, per head.

    sqrt(mean over queries of Var_j s_ij), which limits how sharp attention can be. Range [0, inf).
    Queries that see fewer than two keys are left out.

    Args:
        score_moments: Moments of the scores of each query.

    Returns:
        [heads]; NaN if no query sees two keys.
    """
    return mean_over(score_moments.variance, score_moments.visible > 1).sqrt()


def query_variances(
    query: Tensor, key: Tensor, visible: Tensor, group: Tensor, groups: int
) -> QueryVariances:
    """Compute the variance over visible keys of the scores of mean queries, and of all queries.

    For a query i with visible keys V_i, these are Var over j in V_i of (mean q) . k_j, and of q_i .
    k_j. The mean query is over all queries that see a key, or over those outside a group. Every
    variance is over the visible keys of query i, which under a causal mask are those up to its
    place.

    Args:
        query: Queries as attended, [sequences, heads, queries, head width].
        key: Keys as attended, [sequences, key heads, keys, head width]; heads must be a multiple of
            key heads.
        visible: True if a query may attend to a key, broadcastable to [sequences, heads, queries,
            keys].
        group: Group of each sequence, int64, [sequences].
        groups: Number of groups.

    Returns:
        The variances, summed by group.

    Raises:
        ValueError: If the shapes do not match.
    """
    sequences, heads, queries, keys = shape = score_shape(query, key)
    seen = expand_visible(visible, shape)
    of_sequence = group.tolist()  # read once, because an index on a device causes a wait
    means = _mean_queries(query, seen.any(dim=3), group, groups)
    common = means.new_zeros(len(means), heads, groups)
    own, level = common[0].clone(), common[0].clone()
    # A visibility shared by all heads is converted once.
    alike = seen[:, :1] if seen.stride(1) == 0 else seen
    # Subtracting what all keys of a head share does not change variances.
    key, origin = _about_mean_key(key, alike.any(dim=(1, 2)))
    step = rows_in_block(keys, query.device)
    for sequence, start in itertools.product(range(sequences), range(0, queries, step)):
        some = slice(start, start + step)
        weights = alike[sequence, :, some].double()
        weights /= weights.sum(dim=2, keepdim=True).clamp_(min=1)
        at = of_sequence[sequence]
        for number, face in enumerate(key[sequence]):
            heads_of = slice(number * heads // len(origin), (number + 1) * heads // len(origin))
            weight = weights if len(weights) == 1 else weights[heads_of]
            # In float64, because half precision would round the differences.
            facing = face.double() - origin[number].double()
            variances = _variances(weight, torch.einsum("mhw,kw->hkm", means[:, heads_of], facing))
            common[:, heads_of, at] += variances.sum(dim=1).T
            scores = query[sequence, heads_of, some].double() @ facing.T
            mean = (weight * scores).sum(dim=2, keepdim=True)
            about = scores - mean
            own[heads_of, at] += (weight * about.square_()).sum(dim=(1, 2))
            level[heads_of, at] += mean.square_().sum(dim=(1, 2))
    flat = (own.sum(dim=1) <= _ROUNDING * level.sum(dim=1))[:, None]
    return QueryVariances(common.masked_fill_(flat, 0), own.masked_fill_(flat, 0))


def mean_query_share(query_variances: QueryVariances) -> Tensor:
    """Compute the share of the variance of scores over keys that the mean query makes, per head.

    mean_i Var_j(mean q . k_j) / mean_i Var_j(q_i . k_j), over the visible keys j of query i, for
    queries and keys as attended, before any cap or bias. If it is 1, every query prefers the same
    keys whatever its content, so sharp attention of such a head does not depend on content. If it
    is about 0 (1/queries for independent queries with mean 0), the mean query sharpens nothing,
    however long it is. Range [0, inf): it may exceed 1 if queries differ in their visible keys.

    Args:
        query_variances: Variances of the scores of the mean query, and of each query itself.

    Returns:
        [heads]; NaN if scores do not vary.
    """
    return query_variances.common[0].sum(dim=1) / query_variances.own.sum(dim=1)


def _mean_queries(query: Tensor, real: Tensor, group: Tensor, groups: int) -> Tensor:
    """Average the queries that see a key, over all and without each group, [.., heads, width]."""
    chosen = real[:, :, :, None]
    by_sequence = torch.where(chosen, query.double(), 0).sum(dim=2)
    counts = real.sum(dim=2).double()
    sums = by_sequence.new_zeros(groups, *by_sequence.shape[1:]).index_add_(0, group, by_sequence)
    sizes = counts.new_zeros(groups, counts.shape[1]).index_add_(0, group, counts)
    sides = torch.ones_like(sizes[:, :1].T)
    if groups > 1:
        every = torch.ones(groups, groups, dtype=sizes.dtype, device=sizes.device)
        sides = torch.cat([sides, every.fill_diagonal_(0)])
    return torch.tensordot(sides, sums, dims=1) / (sides @ sizes)[:, :, None]


def _about_mean_key(key: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Replace keys that no query sees by the mean of the visible keys; also return that mean."""
    if seen.all():
        return key, key.mean(dim=(0, 2))
    chosen = seen[:, None, :, None]
    count = seen.sum().clamp(min=1)
    origin = (torch.where(chosen, key, 0).sum(dim=(0, 2), dtype=torch.float64) / count).to(key)
    return torch.where(chosen, key, origin[:, None]), origin


def _variances(weights: Tensor, values: Tensor) -> Tensor:
    """Compute the variance of keys' values under each query's weights, [heads, queries, values].

    `weights` sum to 1 or are all 0, [heads (or 1), queries, keys]; `values` are [heads, keys,
    values].
    """
    mean = weights @ values
    return (weights @ values.square() - mean.square()).clamp_(min=0)
