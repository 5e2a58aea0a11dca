"""Intrinsic dimension from the distances to the nearest neighbours."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.kernels.half_samples import HalfSamples

# Doublings of the rank of the neighbour: 32 needs the 64 nearest.
SCALES = (1, 2, 4, 8, 16, 32)

# Newton's steps: from the estimate by moments, five reach the last digit of float64.
_NEWTON_STEPS = 6

# Logarithms of the ratio of two distances that are equal: each is the root of a rounded sum of
# differences of rounded coordinates, which may be thousands of times as large as the distance.
_ROUNDING = 1e-12

# What stands for a logarithm of 0: in a sum it is nothing, and x / (1 - e^(-dx)) is 1 / d of it.
_NOTHING = 1e-300

# Bits in a word that says which neighbours are in a half: of int32, and of int64 as far as float64
# counts them.
_SHORT, _LONG = 30, 50

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
    F = i / N (Facco et al. 2017; the protocol of Razzhigaev et al., 2311.05928, section 2.4).
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


def twonn_and_censored(neighbours: Tensor, discard: float = 0.1) -> tuple[Tensor, Estimate]:
    """Compute `twonn` and `twonn_censored` of the same distances, which are sorted once.

    Args:
        neighbours: Distances to the nearest neighbours, ascending, [tokens, k], k >= 2.
        discard: Share of the largest ratios that is dropped, in [0, 1).

    Raises:
        ValueError: There are fewer than two distances for each point, or `discard` is outside
            [0, 1).

    Example:
        >>> distances = torch.tensor([[1.0, 2.0]]).expand(100, 2)
        >>> fit, censored = twonn_and_censored(distances)
        >>> bool(fit == twonn(distances)), bool(censored.value == twonn_censored(distances).value)
        (True, True)
    """
    log_mu = _sorted_ratios(neighbours, discard)
    return _fit(log_mu, discard), _likely(log_mu, discard)


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
    x = _sorted(torch.where(valid, logs, torch.inf))
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


class HalfRatios(NamedTuple):
    """Logarithms of r_2k / r_k among the rows of the half that each row is in.

    Attributes:
        log_mu: [ways, points], float64. Where r_2k lies beyond the neighbours that are known, the
            farthest of these stands for it; NaN where r_k does.
        known: False where r_2k lies beyond the neighbours that are known, [ways, points].
        first: True where the point is in the first half, [ways, points].
    """

    log_mu: Tensor
    known: Tensor
    first: Tensor


def ratios_in_halves(
    distances: Tensor,
    indices: Tensor,
    own: Tensor,
    halves: HalfSamples,
    scales: Sequence[int] = (1,),
) -> list[HalfRatios]:
    """Take the ratios of distances within each half from the neighbours among all rows.

    Nothing is searched again: neighbours in the other half are passed over. Of 16 neighbours about
    8 are in a row's own half.

    Args:
        distances: Distances to the nearest neighbours, ascending, [points, k]; inf for a neighbour
            that does not count.
        indices: Which rows those are, [points, k].
        own: Which row each point is, [points].
        halves: The ways of cutting all rows into halves.
        scales: Ranks k of the nearer neighbour.

    Returns:
        The ratios at each scale.
    """
    counts = distances.isfinite()
    groups, neighbours = halves.first.shape[1], distances.shape[1]
    group = halves.group.index_select(0, indices.flatten()).view(indices.shape)
    # By rows of the transposed table, which are copied as one piece.
    first = halves.first.T.index_select(0, halves.group[own]).T.contiguous()
    ranks = sorted({rank for k in scales for rank in (k, 2 * k)})
    places = _places_of(group.masked_fill(~counts, groups), first, halves.first, ranks)
    farthest = torch.where(counts, distances, 0).amax(dim=1, keepdim=True)
    # What stands for a neighbour that is not known is in the last column.
    logs = distances.log()
    near = torch.nn.functional.pad(logs, (0, 1), value=torch.nan).flatten()
    far = torch.cat([logs, farthest.log()], dim=1).flatten()
    row = torch.arange(len(own), dtype=torch.int64, device=own.device) * (neighbours + 1)
    at = {rank: (place + row).flatten() for rank, place in places.items()}
    return [
        HalfRatios(
            _without_rounding(far.index_select(0, at[2 * k]) - near.index_select(0, at[k])).view(
                first.shape
            ),
            places[2 * k] < neighbours,
            first,
        )
        for k in scales
    ]


def _places_of(
    group: Tensor, own: Tensor, first: Tensor, ranks: Sequence[int]
) -> dict[int, Tensor]:
    """Find the place of the neighbour of each rank among those that are in a point's own half.

    Args:
        group: Group of each neighbour, [points, k]; the number of groups for one that does not
            count.
        own: True where the point is in the first half, [ways, points].
        first: True for the groups in the first half of each way, [ways, groups].
        ranks: Ranks among the neighbours that are in the same half, ascending.

    Returns:
        [ways, points] for each rank, integers; k where fewer are of the same half.
    """
    points, neighbours = group.shape
    groups = first.shape[1]
    if group.device.type != "cpu":  # there few operations count
        none = torch.zeros_like(first[:, :1])
        sides = torch.stack([torch.cat([side, none], dim=1) for side in (first, ~first)])
        same = torch.where(own[:, :, None], sides[0][:, group], sides[1][:, group])
        number = same.cumsum(dim=2)
        return {rank: (number < rank).sum(dim=2) for rank in ranks}
    # A bit for each neighbour: those in the half are a sum over its groups, and the next one is the
    # lowest bit. Float64 holds as many bits as a word has.
    short = neighbours <= _SHORT
    kind, bits = (torch.int32, _SHORT) if short else (torch.int64, _LONG)
    words = []
    sides = first.double()
    for some in group.split(bits, dim=1):
        value = 2.0 ** torch.arange(some.shape[1], dtype=torch.float64, device=own.device)
        by_group = sides.new_zeros(points, groups + 1)
        by_group.scatter_add_(1, some, value.expand(some.shape))
        counted = by_group[:, :groups].T
        one = sides @ counted
        words.append(torch.where(own, one, counted.sum(dim=0) - one).to(kind))
    found = {}
    for rank in range(1, ranks[-1] + 1):
        if rank in ranks:
            found[rank] = _lowest_bit(words, bits, neighbours)
        # The lowest bit of the first word that has one is taken away.
        rest: Tensor | int = 1
        for place, word in enumerate(words):
            words[place] = word & (word - rest)
            if place + 1 < len(words):
                rest = rest * (word == 0).to(kind)
    return found


def _lowest_bit(words: Sequence[Tensor], bits: int, none: int) -> Tensor:
    """Find the place of the lowest bit over several words.

    Args:
        words: Integers of so many bits each, the lowest ones first, of one shape.
        bits: Number of bits in each word.
        none: Place that stands for no bit.

    Returns:
        int64, of the shape of a word.
    """
    lowest = [(word & -word).double() for word in words]
    value = torch.threshold(lowest[-1] * 2.0 ** (bits * (len(words) - 1)), 0, 2.0**none)
    for place in reversed(range(len(words) - 1)):
        value = torch.where(lowest[place] > 0, lowest[place] * 2.0 ** (bits * place), value)
    return (value.view(torch.int64) >> 52) - 1023  # its exponent, as float64 stores it


def twonn_differences(ratios: HalfRatios, discard: float = 0.1) -> tuple[Tensor, Tensor]:
    """Compare TwoNN on the two halves of the rows, for each way.

    Args:
        ratios: Ratios of the two nearest distances in each half.
        discard: Share of the largest ratios that is dropped, in [0, 1).

    Returns:
        Differences of `twonn`, and of `twonn_censored`, [ways] each; NaN where a half has fewer
        than 3 points, or more than `discard` whose second neighbour is unknown.
    """
    exists = ~ratios.log_mu.isnan()
    inside = torch.cat([exists & ratios.first, exists & ~ratios.first])
    n = inside.sum(dim=1, keepdim=True).double()
    # What is unknown is among the largest, which are dropped. One sort for both halves: the ratios
    # of the first one are negative, and come first in descending order.
    x = torch.where(ratios.known, ratios.log_mu, torch.inf).where(exists, torch.nan)
    x = _sorted(torch.where(ratios.first, -x, x))
    points = x.shape[1]
    if x.device.type == "cpu" and n.numel():
        points = max(1, int(n.max()))
    rank = torch.arange(1, points + 1, dtype=torch.float64, device=x.device)
    one, _ = n.chunk(2)
    place = torch.cat([one - rank, one + rank - 1]).long().clamp_(0, x.shape[1] - 1)
    x = torch.cat([x, x]).gather(1, place).abs_()
    kept = (n * (1 - discard)).round(decimals=_DIGITS).floor()
    last = (kept.long() - 1).clamp(min=0)
    fitted = (torch.minimum(kept, n - 1).long() - 1).clamp(min=0)
    y = -torch.log1p(-rank / n)
    # Sums up to a place that differs from way to way: what comes after it may be anything.
    largest = x.gather(1, last)
    whole = x.cumsum(dim=1).gather(1, last)
    slope = (x * y).cumsum(dim=1).gather(1, fitted) / x.square().cumsum(dim=1).gather(1, fitted)
    censored = (kept - 1) / (whole + (n - kept) * largest)
    enough = (n >= 3) & (kept >= 2) & largest.isfinite() & (largest > 0)
    found = (torch.where(enough, value, torch.nan).squeeze(1) for value in (slope, censored))
    fits, other = (one - two for one, two in (value.chunk(2) for value in found))
    return fits, other


def gride_differences(ratios: Sequence[HalfRatios], scales: Sequence[int]) -> Tensor:
    """Compare Gride at several scales on the two halves of the rows, for each way.

    One step of Newton on each half, from the estimate by moments on all of them, which is as good
    as the root for a difference of two halves.

    Args:
        ratios: Ratios r_2k / r_k of the same points in each half, for each scale.
        scales: Ranks k of the nearer neighbour.

    Returns:
        [scales, ways]; NaN where a half has fewer than 3 rows.
    """
    differences = ratios[0].log_mu.new_empty(len(scales), len(ratios[0].first))
    for place, (one, k) in enumerate(zip(ratios, scales, strict=True)):
        if k == 1:  # the root is known
            x = one.log_mu.nan_to_num(0, torch.inf)
            exists = ~one.log_mu.isnan()
            halves = (exists & one.first, exists & ~one.first)
            roots = [(half.sum(dim=1) - 1) / (x * half).sum(dim=1) for half in halves]
            differences[place] = roots[0] - roots[1]
    larger = [place for place, k in enumerate(scales) if k > 1]
    if larger:
        some = [ratios[place] for place in larger]
        differences[larger] = _newton_differences(some, [scales[place] for place in larger])
    return differences


def _newton_differences(ratios: Sequence[HalfRatios], scales: Sequence[int]) -> Tensor:
    """Compare Gride at scales above 1: [scales, ways]."""
    log_mu = torch.stack([one.log_mu for one in ratios])
    exists = ~log_mu.isnan()
    x = log_mu.nan_to_num_(0, torch.inf)
    k = x.new_tensor(scales)[:, None]
    spread = x.new_tensor([sum(1 / i for i in range(scale, 2 * scale)) for scale in scales])
    d = (spread * exists.sum(dim=(1, 2)) / x.sum(dim=(1, 2)))[:, None]
    about = x.clamp(min=_NOTHING)
    rest = (-d[:, :, None] * about).expm1_().neg_()
    part = about.div_(rest)
    curve = part.square().mul_(rest.neg_().add_(1))
    score = part.mul_(k[:, :, None] - 1).sub_(x.mul_(2 * k[:, :, None] - 1))
    # What the second half adds up to is what is left of all rows.
    number, first = exists.double(), ratios[0].first.double()
    sums = []
    for values in (number, score.mul_(number), curve.mul_(number)):
        whole, one = values.sum(dim=2), (values * first).sum(dim=2)
        sums.append(torch.stack([one, whole - one]))
    n, scores, curves = sums
    root = (n - 1) / d + scores
    slope = (n - 1) / d.square() + (k - 1) * curves
    one, other = torch.where(n >= 3, root / slope, torch.nan)
    return one - other


def _sorted(values: Tensor) -> Tensor:
    """Sort each row; on the host by numpy, which is several times as fast."""
    if values.device.type != "cpu":
        return values.sort(dim=1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=1))


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
