"""Intrinsic dimension from the distances to the nearest neighbours."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import sort_each

# Doublings of the rank of the neighbour: 32 needs the 64 nearest.
SCALES = (1, 2, 4, 8, 16, 32)

# Newton's steps: from the estimate by moments, four reach the last digits of float64.
_NEWTON_STEPS = 4

# Logarithms of the ratio of two distances that are equal: each is the root of a rounded sum of
# differences of rounded coordinates, which may be thousands of times as large as the distance.
_ROUNDING = 1e-12

# What stands for a logarithm of 0: in a sum it is nothing, and x / (1 - e^(-dx)) is 1 / d of it.
_NOTHING = 1e-300

# Digits after the point to which n (1 - discard) is exact: 500 (1 - 0.8) is 99.99999999999997.
_DIGITS = 6


class Estimate(NamedTuple):
    """An estimate with its standard error, scalars in float64.

    Attributes:
        value: The estimate.
        standard_error: Standard error of the estimate if the points are independent.
    """

    value: Tensor
    standard_error: Tensor


def twonn(neighbours: Tensor, discard: float = 0.1) -> Tensor:
    """Estimate the intrinsic dimension by TwoNN, from the ratios of the two nearest distances.

    mu = r2 / r1 has the distribution F(mu) = 1 - mu^(-d). The ratios are sorted, the largest
    `discard` of them dropped, and d is the slope through the origin of -log(1 - F) on log mu, with
    F = i / N (Facco et al. 2017, who drop 10 %). Razzhigaev et al. (2311.05928, section 2.4) drop
    none in their text, `discard=0`, and all but the smallest 20 % in their published code,
    `discard=0.8`: on rows with near-duplicates even the sign of a change can differ.
    Range [0, inf); at most about what a Gaussian of the same n and width gives (153 for n = 2,048
    in width 768). On exact-model data of N points the standard deviation is about 1.1 d / sqrt(N).
    Points with r1 = 0 are left out: take exact duplicates out first.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, k], k >= 2.
        discard: Share of the largest ratios that is dropped, in [0, 1).

    Returns:
        A scalar; NaN with fewer than 3 points left, inf where r1 = r2 everywhere.

    Raises:
        ValueError: There are fewer than two distances for each point, or `discard` is outside
            [0, 1).

    Example:
        >>> uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        >>> mu = uniform ** (-1 / 5)  # the exact model with d = 5
        >>> distances = torch.stack([torch.ones_like(mu), mu], dim=1)
        >>> round(twonn(distances).item(), 2)
        5.0
    """
    return _fit(_sorted_ratios(neighbours, discard), discard)


class TwoNN(NamedTuple):
    """TwoNN of the same distances by several protocols, scalars in float64.

    Attributes:
        value: `twonn` without the largest 10 % of the ratios.
        censored: `twonn_censored` of the same ratios.
        discard_0: `twonn` of all ratios, as the text of Razzhigaev et al. (2311.05928) has it.
        discard_80: `twonn` of the smallest 20 % alone, as their published code has it.
    """

    value: Tensor
    censored: Tensor
    discard_0: Tensor
    discard_80: Tensor


def twonn_protocols(neighbours: Tensor) -> TwoNN:
    """Compute TwoNN by each protocol from distances that are sorted once.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, k], k >= 2.

    Raises:
        ValueError: There are fewer than two distances for each point.

    Example:
        >>> distances = torch.tensor([[1.0, 2.0]]).expand(100, 2)
        >>> found = twonn_protocols(distances)
        >>> bool(found.value == twonn(distances)), bool(found.discard_0 == twonn(distances, 0))
        (True, True)
    """
    log_mu = _sorted_ratios(neighbours, 0)
    censored = _likely(log_mu, 0.1).value
    return TwoNN(_fit(log_mu, 0.1), censored, _fit(log_mu, 0), _fit(log_mu, 0.8))


def _sorted_ratios(neighbours: Tensor, discard: float) -> Tensor:
    """Check the arguments of TwoNN, and take log(r2 / r1) in ascending order."""
    _require_distances(neighbours)
    if not 0 <= discard < 1:
        raise ValueError(f"discard is a share in [0, 1), got {discard}")
    return _log_ratios(neighbours[:, 0], neighbours[:, 1]).sort().values


def _fit(log_mu: Tensor, discard: float) -> Tensor:
    """Compute `twonn` from sorted ratios."""
    n = len(log_mu)
    kept = min(_kept(n, discard), n - 1)  # at F = 1 the logarithm ends
    if n < 3 or kept < 1:
        return log_mu.new_tensor(torch.nan)
    rank = torch.arange(1, kept + 1, dtype=torch.float64, device=log_mu.device)
    x, y = log_mu[:kept], -torch.log1p(-rank / n)
    square = x.square().sum()
    return torch.where(square > 0, (x * y).sum() / square, torch.inf)


def twonn_of_each(
    neighbours: Tensor, discard: float = 0.1, *, rounding: float = _ROUNDING
) -> Tensor:
    """Estimate the intrinsic dimension of each of several sets of points by TwoNN, all at once.

    As `twonn` on each set: points with r1 = 0 are left out of their set, then the largest `discard`
    of its ratios are dropped. Range [0, inf).

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [sets, points, k], k >= 2.
        discard: Share of the largest ratios that is dropped, in [0, 1).
        rounding: Logarithm of the ratio of two distances up to which they count as equal.

    Returns:
        [sets], float64; NaN with fewer than 3 points left, inf where r1 = r2 everywhere.

    Raises:
        ValueError: There are fewer than two distances for each point, or `discard` is outside
            [0, 1).

    Example:
        >>> uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        >>> mu = uniform ** (-1 / torch.tensor([[2.0], [5.0]]))  # the exact model with d = 2, 5
        >>> distances = torch.stack([torch.ones_like(mu), mu], dim=2)
        >>> [round(value, 2) for value in twonn_of_each(distances).tolist()]
        [2.0, 5.0]
    """
    if neighbours.ndim != 3 or neighbours.shape[2] < 2:
        raise ValueError(
            "expected distances [sets, points, k] with k of at least 2, ascending, got "
            f"{list(neighbours.shape)}"
        )
    if not 0 <= discard < 1:
        raise ValueError(f"discard is a share in [0, 1), got {discard}")
    near, far = neighbours[:, :, 0].double(), neighbours[:, :, 1].double()
    valid = (near > 0) & torch.isfinite(far)
    logs = _without_rounding((far / near).log(), rounding)
    x = sort_each(torch.where(valid, logs, torch.inf))
    n = valid.sum(dim=1, keepdim=True).double()
    kept = (n * (1 - discard)).round(decimals=_DIGITS).floor()
    kept = torch.minimum(kept, n - 1)  # at F = 1 the logarithm ends
    rank = torch.arange(1, x.shape[1] + 1, dtype=torch.float64, device=x.device)
    counts = rank <= kept
    x = torch.where(counts, x, 0)
    y = -torch.log1p(-torch.where(counts, rank / n, 0))
    square = x.square().sum(dim=1)
    slope = torch.where(square > 0, (x * y).sum(dim=1) / square, torch.inf)
    enough = (n >= 3) & (kept >= 1)
    return torch.where(enough.squeeze(1), slope, torch.nan)


def twonn_censored(neighbours: Tensor, discard: float = 0.1) -> Estimate:
    """Estimate the intrinsic dimension by TwoNN, by maximum likelihood with censoring.

    (k - 1) / (sum_(i<=k) log mu_(i) + (N - k) log mu_(k)), mu = r2 / r1 in ascending order, k = the
    number kept of N: the likelihood uses of the N - k largest only that they are no smaller. On
    exact-model data the denominator is Gamma(k, 1/d), whatever N and d: the estimate is unbiased,
    with standard deviation d / sqrt(k - 2), and estimate +- 1.96 estimate / sqrt(k) contains d in
    95 % of samples. That assumes independent ratios. Points of one cloud share distances; there the
    standard deviation is 1.15 times the standard error, and the interval contains the mean of the
    estimate in 89 % (measured, 1,000 points: flat tori of 2 and 5 dimensions, a Gaussian of 10).
    Range [0, inf). Points with r1 = 0 are left out: take exact duplicates out first.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, k], k >= 2.
        discard: Share of the largest ratios that is dropped, in [0, 1).

    Returns:
        The estimate and its standard error; NaN with fewer than 3 points, or fewer than 2 of them
        kept; inf where r1 = r2 everywhere.

    Raises:
        ValueError: There are fewer than two distances for each point, or `discard` is outside
            [0, 1).

    Example:
        >>> uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        >>> mu = uniform ** (-1 / 5)  # the exact model with d = 5
        >>> distances = torch.stack([torch.ones_like(mu), mu], dim=1)
        >>> value, error = twonn_censored(distances)
        >>> round(value.item(), 2), round(error.item(), 2)
        (5.0, 0.12)
    """
    return _likely(_sorted_ratios(neighbours, discard), discard)


def _likely(log_mu: Tensor, discard: float) -> Estimate:
    """Compute `twonn_censored` from sorted ratios."""
    n = len(log_mu)
    kept = _kept(n, discard)
    if n < 3 or kept < 2:
        nan = log_mu.new_tensor(torch.nan)
        return Estimate(nan, nan)
    value = (kept - 1) / (log_mu[:kept].sum() + (n - kept) * log_mu[kept - 1])
    return Estimate(value, value / kept**0.5)


def gride(neighbours: Tensor, scales: Sequence[int] = SCALES) -> Tensor:
    """Estimate the intrinsic dimension at several scales, from the generalised ratios r_2k / r_k.

    Maximum likelihood of Denti et al. (2022, Gride): mu = r_2k / r_k has the density
    d (mu^d - 1)^(k-1) / (B(k, k) mu^(d(2k-1)+1)); k = 1 is TwoNN without discarding. N - 1 stands
    for N in front of log d, which takes the bias away at k = 1. A curve that is flat over k belongs
    to a manifold; one that bends says at which scale the estimate holds.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, neighbours].
        scales: Ranks k of the nearer neighbour, one for each estimate; 2k neighbours are needed.

    Returns:
        [len(scales)], each in [0, inf); NaN where there are fewer than 2k neighbours or 3 points.

    Raises:
        ValueError: There are fewer than two distances for each point, or a scale is below 1.

    Example:
        >>> grid = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]  # a line
        >>> distances = torch.cdist(grid, grid).sort(dim=1).values[:, 1:]
        >>> bool(abs(gride(distances, scales=[8])[0] - 1) < 0.2)
        True
    """
    _require_distances(neighbours)
    if any(k < 1 for k in scales):
        raise ValueError(f"scales are ranks of neighbours, 1 or more, got {list(scales)}")
    estimates = torch.full((len(scales),), torch.nan, dtype=torch.float64, device=neighbours.device)
    able = [place for place, k in enumerate(scales) if 2 * k <= neighbours.shape[1]]
    if able:
        estimates[able] = _gride_at(neighbours, [scales[place] for place in able])
    return estimates


def _gride_at(neighbours: Tensor, scales: Sequence[int]) -> Tensor:
    """Find by Newton the roots in d of (N-1)/d + (k-1) sum x/(1 - e^(-dx)) - (2k-1) sum x.

    With x = log mu. The function is convex and falls, so the steps stay below the root after the
    first. They start at the estimate by moments, E x = (H_(2k-1) - H_(k-1)) / d with H the harmonic
    numbers, and never go below a quarter of N / sum x, where by Jensen the function is positive.
    """
    rank = torch.tensor(scales, dtype=torch.int64, device=neighbours.device)
    near, far = neighbours[:, rank - 1].double(), neighbours[:, 2 * rank - 1].double()
    valid = (near > 0) & torch.isfinite(far)
    logs = torch.where(valid, far / near, 1).log()
    x = _without_rounding(logs).T.contiguous()  # [scales, points]; 0 adds nothing
    n, total, k = valid.sum(dim=0).double(), x.sum(dim=1), rank.double()
    spread = [sum(1 / i for i in range(scale, 2 * scale)) for scale in scales]
    d = n * n.new_tensor(spread) / total
    known = (n - 1) / total  # the root with k = 1
    some = [place for place, scale in enumerate(scales) if scale > 1]
    if some:
        d[some] = _newton(x[some], d[some], n[some], k[some])
    # With k = 1, or where all are ties, the root is known; from infinity no step is possible.
    d = torch.where((k == 1) | (total == 0), known, d)
    return torch.where(n >= 3, d, torch.nan)


def _newton(x: Tensor, d: Tensor, n: Tensor, k: Tensor) -> Tensor:
    """Take the steps of Newton from d at scales k, of n of the points each; x is 0 for others."""
    total = x.sum(dim=1)
    left_out = x.shape[1] - n
    about = x.clamp(min=_NOTHING)
    lowest = n / total / 4
    for _ in range(_NEWTON_STEPS):
        rest = (-d[:, None] * about).expm1_().neg_()
        part = about / rest
        score = (n - 1) / d + (k - 1) * (part.sum(dim=1) - left_out / d) - (2 * k - 1) * total
        curve = part.square_().mul_(rest.neg_().add_(1)).sum(dim=1) - left_out / d.square()
        slope = -(n - 1) / d.square() - (k - 1) * curve
        d = torch.maximum(d - score / slope, lowest)
    return d


def _without_rounding(log_ratios: Tensor, rounding: float = _ROUNDING) -> Tensor:
    """Return 0 for a ratio that is 1 but for rounding: equal spacings have no dimension."""
    return torch.threshold(log_ratios, rounding, 0)  # NaN stays


def _log_ratios(near: Tensor, far: Tensor) -> Tensor:
    """Compute log(far / near) in float64, without points at distance 0 or not finite."""
    near, far = near.double(), far.double()
    valid = (near > 0) & torch.isfinite(far)
    return _without_rounding((far[valid] / near[valid]).log())


def _kept(n: int, discard: float) -> int:
    """Count the ratios that are kept of n."""
    return math.floor(round(n * (1 - discard), _DIGITS))


def _require_distances(neighbours: Tensor) -> None:
    """Check that `neighbours` holds at least two distances for each point."""
    if neighbours.ndim != 2 or neighbours.shape[1] < 2:
        raise ValueError(
            "expected distances [tokens, k] with k of at least 2, ascending, got "
            f"{list(neighbours.shape)}: ask for more neighbours, or give more tokens"
        )
