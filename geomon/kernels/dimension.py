"""Intrinsic dimension from the distances to the nearest neighbours."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import sort_each

# Doublings of the rank of the neighbour: 32 needs the 64 nearest.
SCALES = (1, 2, 4, 8, 16, 32)

# Growth of a distance at the edge of a cluster, in medians, and the share of points that matters.
# At the edge of a cluster of near-copies it is far larger than any of Gride's own distribution,
# which exceeds 20 medians once in a million points.
# Newton's steps: three steps from the estimate by moments come within 3e-8 of the root, even on
# clusters and heavy tails.
_EDGE, _EDGE_OF_COPIES, _SOME = 5, 20, 0.05
_NEWTON_STEPS = 3

# Log-ratios up to this are equal distances: each distance is the root of a rounded sum of
# differences of rounded coordinates, which may be thousands of times as large.
_ROUNDING = 1e-12

# Replaces a logarithm of 0: it adds nothing to a sum, and x / (1 - e^(-dx)) becomes 1 / d.
_NOTHING = 1e-300

# Decimals to which n (1 - discard) is rounded: 500 (1 - 0.8) is 99.99999999999997.
_DIGITS = 6


class TwoNN(NamedTuple):
    """TwoNN of the same distances by several protocols; scalars, float64.

    Attributes:
        value: Slope without the largest 10 % of the ratios (Facco et al. 2017).
        censored: Maximum-likelihood estimate from the same ratios.
        discard_0: Slope of all ratios, as in the text of Razzhigaev et al. (2311.05928, section
            2.4).
        discard_80: Slope of only the smallest 20 %, as in their published code. On rows with
            near-duplicates, even the sign of a change can differ.
    """

    value: Tensor
    censored: Tensor
    discard_0: Tensor
    discard_80: Tensor


def twonn(neighbours: Tensor) -> TwoNN:
    """Estimate the intrinsic dimension by TwoNN, from the ratios of the two nearest distances.

    mu = r2 / r1 has the distribution F(mu) = 1 - mu^(-d). The ratios are sorted, a share of the
    largest is dropped, and d is the slope through the origin of -log(1 - F) over log mu, with F = i
    / N. Range [0, inf); at most about the value of a Gaussian with the same n and width (153 for n
    = 2,048 in width 768). On N points of the exact model, the standard deviation is about 1.1 d /
    sqrt(N). Points with r1 = 0 are left out, so remove exact duplicates first.

    The censored estimate is (k - 1) / (sum_(i<=k) log mu_(i) + (N - k) log mu_(k)), where k of N
    ratios are kept: about the others, the likelihood uses only that they are no smaller. On data of
    the exact model the denominator is Gamma(k, 1/d) for any N and d, so the estimate is unbiased,
    with standard deviation d / sqrt(k - 2). Points of one cloud share distances, which makes it
    1.15 times as large (measured on 1,000 points: flat tori of 2 and 5 dimensions, a Gaussian of
    10).

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, k], k >= 2.

    Returns:
        The estimates; NaN with fewer than 3 points left, inf if r1 = r2 everywhere.

    Raises:
        ValueError: If there are fewer than two distances for each point.

    Example:
        >>> uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        >>> mu = uniform ** (-1 / 5)  # the exact model with d = 5
        >>> distances = torch.stack([torch.ones_like(mu), mu], dim=1)
        >>> [round(value.item(), 1) for value in twonn(distances)]
        [5.0, 5.0, 5.0, 5.0]
    """
    _require_distances(neighbours)
    return TwoNN(*(values.squeeze(0) for values in twonn_in_forms(neighbours[None])))


def twonn_in_forms(neighbours: Tensor) -> TwoNN:
    """Estimate the intrinsic dimension of several sets of points by TwoNN, by all protocols.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [sets, points, k], k >= 2. A
            point with nearest distance 0 is not part of its set.

    Returns:
        The estimates of `twonn`, [sets] each.
    """
    log_mu, n = _sorted_ratios(neighbours, _ROUNDING)
    discards = n.new_tensor([0.1, 0.0, 0.8])[:, None, None]
    fit, all_ratios, smallest = _slope(log_mu, n, discards)
    return TwoNN(fit, _likely(log_mu, n, 0.1), all_ratios, smallest)


def twonn_of_each(neighbours: Tensor, *, rounding: float) -> Tensor:
    """Estimate the intrinsic dimension of each of several sets of points by TwoNN, all at once.

    This is the `value` of `twonn` for each set.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [sets, points, k], k >= 2.
        rounding: Log-ratio up to which two distances count as equal.

    Returns:
        [sets], float64; NaN with fewer than 3 points left, inf if r1 = r2 everywhere.

    Example:
        >>> uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        >>> mu = uniform ** (-1 / torch.tensor([[2.0], [5.0]]))  # the exact model with d = 2, 5
        >>> distances = torch.stack([torch.ones_like(mu), mu], dim=2)
        >>> [round(value, 2) for value in twonn_of_each(distances, rounding=0).tolist()]
        [2.0, 5.0]
    """
    return _slope(*_sorted_ratios(neighbours, rounding), 0.1)


def _sorted_ratios(neighbours: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Return sorted log(r2 / r1), [sets, points], and the number of valid points, [sets, 1].

    Points at distance 0, or at a distance that is not finite, come last as infinity.
    """
    near, far = neighbours[:, :, 0].double(), neighbours[:, :, 1].double()
    valid = (near > 0) & torch.isfinite(far)
    logs = _without_rounding((far / near).log(), rounding)
    x = sort_each(torch.where(valid, logs, torch.inf))
    return x, valid.sum(dim=1, keepdim=True).double()


def _kept(log_mu: Tensor, n: Tensor, discard: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of kept ratios, [sets, 1], and the rank of every ratio from 1, [points]."""
    rank = torch.arange(1, log_mu.shape[1] + 1, dtype=torch.float64, device=log_mu.device)
    return (n * (1 - discard)).round(decimals=_DIGITS).floor(), rank


def _slope(log_mu: Tensor, n: Tensor, discard: float | Tensor) -> Tensor:
    """Fit the line through the origin to the smallest ratios of each set, for each discard."""
    kept, rank = _kept(log_mu, n, discard)
    kept = torch.minimum(kept, n - 1)  # the logarithm diverges at F = 1
    counts = rank <= kept
    x = torch.where(counts, log_mu, 0)
    y = -torch.log1p(-torch.where(counts, rank / n, 0))
    square = x.square().sum(dim=-1)
    slope = torch.where(square > 0, (x * y).sum(dim=-1) / square, torch.inf)
    enough = (n >= 3) & (kept >= 1)
    return torch.where(enough.squeeze(-1), slope, torch.nan)


def _likely(log_mu: Tensor, n: Tensor, discard: float) -> Tensor:
    """Maximise the likelihood of the smallest ratios of each set, with the others no smaller."""
    kept, rank = _kept(log_mu, n, discard)
    total = torch.where(rank <= kept, log_mu, 0).sum(dim=1, keepdim=True)
    largest = torch.where(rank == kept, log_mu, 0).sum(dim=1, keepdim=True)
    value = (kept - 1) / (total + (n - kept) * largest)
    return torch.where((n >= 3) & (kept >= 2), value, torch.nan).squeeze(1)


def gride(neighbours: Tensor, scales: Sequence[int] = SCALES) -> Tensor:
    """Estimate the intrinsic dimension at several scales, from the generalised ratios r_2k / r_k.

    Maximum likelihood of Denti et al. (2022, Gride): mu = r_2k / r_k has the density d (mu^d -
    1)^(k-1) / (B(k, k) mu^(d(2k-1)+1)); k = 1 is TwoNN without discarding. N - 1 replaces N in
    front of log d, which removes the bias at k = 1. A curve that is flat over k indicates a
    manifold; one that bends shows the scale where an estimate holds.

    Points at which a cluster of near-copies ends between neighbours k and 2k are left out if they
    are fewer than 5 %: their log mu is more than 20 times its median, so that 12 such points among
    1,536 would lower the estimate by a fifth. DADApy leaves out mu > 20 (q95 - q50) + q50.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, neighbours].
        scales: Ranks k of the nearer neighbour, one for each estimate; 2k neighbours are needed.
            Defaults to (1, 2, 4, 8, 16, 32).

    Returns:
        [len(scales)], each in [0, inf); NaN if there are fewer than 2k neighbours or 3 points.

    Raises:
        ValueError: If there are fewer than two distances for each point, or a scale is below 1.

    Example:
        >>> grid = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]  # a line
        >>> distances = torch.cdist(grid, grid).sort(dim=1).values[:, 1:]
        >>> bool(abs(gride(distances, scales=[8])[0] - 1) < 0.2)
        True
    """
    _require_distances(neighbours)
    if any(k < 1 for k in scales):
        raise ValueError(f"scales must be ranks of neighbours, 1 or more, got {list(scales)}")
    ascending = sorted({*scales})
    found = gride_of_each(neighbours[None], ascending).squeeze(0)
    places = [ascending.index(k) for k in scales]
    return found if places == [*range(len(found))] else found[places]


def gride_of_each(neighbours: Tensor, scales: Sequence[int]) -> Tensor:
    """Estimate the intrinsic dimension of several sets of points by Gride, all at once.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [sets, points, neighbours]. A
            point with distances 0 is not part of its set.
        scales: Ranks k of the nearer neighbour, ascending.

    Returns:
        [sets, len(scales)], float64; NaN with fewer than 2k neighbours or 3 points.
    """
    sets = len(neighbours)
    estimates = neighbours.new_full((sets, len(scales)), torch.nan, dtype=torch.float64)
    able = [k for k in scales if 2 * k <= neighbours.shape[2]]
    if able:
        estimates[:, : len(able)] = _gride_at(neighbours, able)
    return estimates


def meets_clusters(neighbours: Tensor, k: int) -> bool:
    """Whether scale k of Gride is about the size of clusters of near-copies.

    This is so if more than 5 % of the points have their cluster's edge between neighbours k/2 and
    2k, but fewer than 5 % between k and 2k. At an edge, the log-ratio of distances is 5 times its
    median. The estimate then depends on a few points: it jumps from sample to sample (3.5 to 14.3),
    and no interval from one sample covers that.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, neighbours].
        k: Rank of the nearer neighbour.

    Example:
        >>> circle = torch.linspace(0, 1, 401, dtype=torch.float64)[:400, None]
        >>> meets_clusters(torch.cdist(circle, circle).sort(dim=1).values[:, 1:], 8)
        False
    """
    if k < 2 or neighbours.shape[1] < 2 * k:
        return False
    inner, near, far = (neighbours[:, rank - 1].double() for rank in (k // 2, k, 2 * k))
    within, around = (far / near).log(), (far / inner).log()
    leaving = (within > _EDGE * within.median()).double().mean() < _SOME
    return bool(leaving & ((around > _EDGE * around.median()).double().mean() > _SOME))


def _gride_at(neighbours: Tensor, scales: Sequence[int]) -> Tensor:
    """Solve (N-1)/d + (k-1) sum x/(1 - e^(-dx)) - (2k-1) sum x = 0 for d by Newton, x = log mu.

    The function is convex and decreasing, so steps after the first stay below the root. They start
    at the estimate by moments, E x = (H_(2k-1) - H_(k-1)) / d with harmonic numbers H, and never go
    below a quarter of N / sum x, where the function is positive by Jensen's inequality.
    """
    near, far = (
        torch.stack([neighbours[:, :, times * k - 1] for k in scales], dim=2).double()
        for times in (1, 2)
    )
    valid = (near > 0) & torch.isfinite(far)
    logs = torch.where(valid, far / near, 1).log()
    edges = _edges_of_copies(logs, valid)
    valid, logs = valid & ~edges, torch.where(edges, 0, logs)
    x = _without_rounding(logs, _ROUNDING).mT.contiguous()  # [sets, scales, points]; 0 adds nothing
    n, total = valid.sum(dim=1).double(), x.sum(dim=2)
    d = (n - 1) / total  # the root with k = 1
    larger = [k for k in scales if k > 1]
    if larger:
        some = slice(len(scales) - len(larger), None)
        harmonic, k = n.new_tensor([[sum(1 / i for i in range(k, 2 * k)) for k in larger], larger])
        moments = n[:, some] * harmonic / total[:, some]
        parts = (x[:, some], moments, n[:, some], k.expand(len(n), -1))
        found = _newton(*(part.flatten(0, 1) for part in parts)).view_as(moments)
        # If all points are ties, the estimate is infinite and no step is possible.
        d[:, some] = torch.where(total[:, some] == 0, d[:, some], found)
    return torch.where(n >= 3, d, torch.nan)


def _edges_of_copies(logs: Tensor, valid: Tensor) -> Tensor:
    """Find the points where few clusters of near-copies end, as [sets, points, scales]."""
    medians = torch.where(valid, logs, torch.nan).nanmedian(dim=1, keepdim=True).values
    edges = valid & (logs > _EDGE_OF_COPIES * medians) & (medians > _ROUNDING)
    return edges & (edges.sum(dim=1, keepdim=True) < _SOME * valid.sum(dim=1, keepdim=True))


def _newton(x: Tensor, d: Tensor, n: Tensor, k: Tensor) -> Tensor:
    """Take Newton's steps from d at scales k, with n points each; x is 0 for points left out."""
    lower, total = k - 1, x.sum(dim=1)
    about = x.clamp(min=_NOTHING)
    lowest = n / total / 4
    own = n - 1 - lower * (x.shape[1] - n)  # points left out add 1 / d to the sums
    constant = (2 * k - 1) * total
    for _ in range(_NEWTON_STEPS):
        rest = (-d[:, None] * about).expm1_().neg_()
        part = about / rest
        score = own / d + lower * part.sum(dim=1) - constant
        curve = part.square_().mul_(rest.neg_().add_(1)).sum(dim=1)
        d = torch.maximum(d + score / (own / d.square() + lower * curve), lowest)
    return d


def _without_rounding(log_ratios: Tensor, rounding: float) -> Tensor:
    """Set log-ratios that differ from 0 only by rounding to 0."""
    return torch.threshold(log_ratios, rounding, 0)  # NaN stays


def _require_distances(neighbours: Tensor) -> None:
    """Raise unless there are at least two distances for each point."""
    if neighbours.ndim != 2 or neighbours.shape[1] < 2:
        raise ValueError(
            "expected distances [tokens, k] with k of at least 2, ascending, got "
            f"{list(neighbours.shape)}: ask for more neighbours, or use more tokens"
        )
