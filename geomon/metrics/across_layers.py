"""Values of a whole reading: comparisons of its layers, and the values that chance alone gives."""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor

from geomon.kernels.baselines import (
    isotropic_anisotropy,
    isotropic_cosine_magnitude,
    isotropic_cosine_quantile,
    isotropic_spectrum,
)
from geomon.kernels.dimension import twonn
from geomon.kernels.neighbourhoods import local_dimension, local_isotropy
from geomon.kernels.neighbours import nearest
from geomon.kernels.products import as_factor
from geomon.kernels.spectrum import effective_rank, power_law
from geomon.metrics.between_layers import SHARED
from geomon.metrics.views import FAR, FAR_ROWS
from geomon.record import tags

# Layers from which a correlation over depth, or the shape of a profile, means anything.
_ENOUGH = 4

# Layers up to which a p-value is exact, from all permutations; above, the approximation is close.
_EXACT = 9

# Rows of noise whose neighbours, among as many rows as were measured, are searched.
_NULL_ROWS = 4096

# Metrics of the neighbourhoods of rows.
_LOCAL = ("local_dimension", "local_anisotropy", "local_cosine")

# Samples of noise over which the null is averaged: many of few rows, whose nulls scatter most.
_FEWEST_SAMPLES, _MOST_SAMPLES = 4, 64


# Metrics of the spectrum of the last tokens, as functions of eigenvalues.
_SPECTRAL: Mapping[str, Callable[[Tensor], float]] = {
    "alpha_last": lambda eigenvalues: float(power_law(eigenvalues).alpha),
    "effective_rank_last": lambda eigenvalues: float(effective_rank(eigenvalues)),
}


class Correlation(NamedTuple):
    """Correlation of two metrics over layers.

    Attributes:
        value: Correlation, [-1, 1].
        p_value: Two-sided probability of one at least as strong between independent series.
    """

    value: float
    p_value: float


class ProfileShape(NamedTuple):
    """Shape of a metric over depth. Scalars, float64.

    Attributes:
        peak_depth: Depth of the largest value: 0 is the first layer, 1 the last.
        bulge: (mean of the middle third - mean of both ends) / |mean of both ends|: above 0 for a
            bell, below for a bowl, 0 for a straight line.
    """

    peak_depth: Tensor
    bulge: Tensor


def across_layers(values: Mapping[str, float]) -> dict[str, float]:
    """Compute the values that compare the layers of one reading.

    `drift_cosine/pearson`, `/pearson_p`, `/spearman`, `/spearman_p`: correlation over layers of
    `drift_norm` and `cosine` (Godey et al., 2401.12143, figures 5 and 16).
    `anisotropy_profile/peak_depth` and `/bulge`: depth at which the profile peaks, and height of
    its middle above its ends (Razzhigaev et al., 2311.05928, figure 1).

    Args:
        values: Values of one reading, by tag.
    """
    drift, cosine, anisotropy = (
        _profile(values, metric) for metric in ("drift_norm", "cosine", "anisotropy")
    )
    found: dict[str, float] = {}
    both = [layer for layer in sorted(_known(drift)) if layer in _known(cosine)]
    if len(both) >= _ENOUGH:
        x, y = (_float64([series[layer] for layer in both]) for series in (drift, cosine))
        pearson, spearman = correlation(x, y), correlation(ranks(x), ranks(y))
        found |= {
            "drift_cosine/pearson": pearson.value,
            "drift_cosine/pearson_p": pearson.p_value,
            "drift_cosine/spearman": spearman.value,
            "drift_cosine/spearman_p": spearman.p_value,
        }
    known = _known(anisotropy)
    if len(known) >= _ENOUGH:
        depths = range(max(anisotropy) + 1)
        shape = profile_shape(_float64([known.get(layer, math.nan) for layer in depths]))
        found |= {
            "anisotropy_profile/peak_depth": float(shape.peak_depth),
            "anisotropy_profile/bulge": float(shape.bulge),
        }
    return found


def null_values(metrics: Mapping[str, object], rows: int, width: int) -> dict[str, float]:
    """Compute the values that unstructured rows of the same number and width would give.

    `anisotropy/null`, `cosine/null` and `twonn/null`: those of an isotropic Gaussian, the last as a
    mean over samples, with their deviation as `twonn/null_std`. `cosine/isotropic_pair`: the 95th
    percentile of the cosine of one pair of isotropic rows (Godey et al., 2401.12143, appendix B),
    which says what is large for a pair, and nothing about a mean over all pairs.
    `local_dimension/null`, `local_anisotropy/null` and `local_cosine/null`: those of the
    neighbourhoods in an isotropic Gaussian, of at most 4,096 rows. `alpha/null`: that of the
    expected spectrum of one. `neighbour_overlap/null` and `neighbour_overlap_in_time/null`: that of
    lists at random, k / (n - 1).
    The nulls of shares and of the cosine about the mean are expectations: of isotropic rows about
    0, and where token types do not differ.

    Args:
        metrics: Metrics that are measured; only their nulls are returned.
        rows: Number of rows in one split, without copies.
        width: Width of the hidden states.
    """
    found: dict[str, float] = {}
    if rows < 3 or width < 2:
        return found
    if "anisotropy" in metrics:
        found["anisotropy/null"] = isotropic_anisotropy(rows, width)
    if "cosine" in metrics:
        found["cosine/null"] = 0.0  # in expectation: opposite directions are equally likely
        found["cosine/isotropic_pair"] = isotropic_cosine_quantile(width)
    expected = {
        "cosine_centred": -1 / (rows - 1), "cosine_within": 0.0, "cosine_between": 0.0,
        "mean_share": 1 / rows, "within_share": 1.0, "between_share": 0.0,
    }  # fmt: skip
    found |= {f"{name}/null": value for name, value in expected.items() if name in metrics}
    if "twonn" in metrics:
        # The number of rows without copies changes a little from reading to reading: an eighth of
        # an octave changes the null by less than 1 %, and it is measured once for each.
        near = _to_eighth_of_octave(rows)
        found["twonn/null"], found["twonn/null_std"] = _gaussian_dimension(near, width)
    for name in ("neighbour_overlap", "neighbour_overlap_in_time"):
        if name in metrics and rows > SHARED:
            found[f"{name}/null"] = SHARED / (rows - 1)
    if "alpha" in metrics:
        found["alpha/null"] = float(power_law(isotropic_spectrum(rows, width)).alpha)
    local = [name for name in _LOCAL if name in metrics]
    if local:
        # Of few rows a neighbourhood is all of them: their exact number counts.
        near = rows if rows <= FAR else min(_to_eighth_of_octave(rows), _NULL_ROWS)
        nulls = _gaussian_neighbourhoods(near, width)
        found |= {f"{name}/null": nulls[name] for name in local}
    return found


def null_values_at_last(values: Mapping[str, float], width: int) -> dict[str, float]:
    """Compute what the last tokens of as many unstructured sequences would give.

    Args:
        values: Values of one reading, by tag; the number of sequences is read off them.
        width: Width of the hidden states.
    """
    found: dict[str, float] = {}
    for name, function in _SPECTRAL.items():
        sequences = values.get(tags.mean_tag(name, "n"), math.nan)
        if sequences >= 2:
            found[f"{name}/null"] = function(isotropic_spectrum(round(sequences), width))
    return found


def _to_eighth_of_octave(rows: int) -> int:
    return round(2 ** (round(8 * math.log2(rows)) / 8))


def query_null(metrics: Mapping[str, object], queries: Sequence[int]) -> dict[str, float]:
    """Compute the share that the mean query makes by chance, where queries are 0 in the mean.

    `mean_query_share/null`: 1 / queries, since the mean of so many independent queries has that
    share of their variance. Queries of one sequence are alike, so that it is a lower bound.

    Args:
        metrics: Metrics that are measured; only their nulls are returned.
        queries: Number of sampled queries that see a key, at each layer.
    """
    if "mean_query_share" not in metrics or not queries or min(queries) == 0:
        return {}
    return {"mean_query_share/null": statistics.fmean(1 / count for count in queries)}


def entropy_null(metrics: Mapping[str, object], log_visible: Sequence[float]) -> dict[str, float]:
    """Compute the entropy of attention that weighs all visible keys alike.

    `attention_entropy/null`: mean over layers of the mean logarithm of the number of visible keys,
    in nats; the most that the entropy can be.

    Args:
        metrics: Metrics that are measured; only their nulls are returned.
        log_visible: Mean logarithm of the number of keys that a sampled query sees, at each layer.
    """
    if "attention_entropy" not in metrics or not log_visible:
        return {}
    return {"attention_entropy/null": statistics.fmean(log_visible)}


def head_nulls(metrics: Mapping[str, object], heads: int, width: int) -> dict[str, float]:
    """Compute what the absolute cosine of mean query and mean key has by chance.

    `qk_cosine/null_magnitude` and `qk_cosine_concatenated/null_magnitude`: E|cos| of two isotropic
    directions, in the width of one head and of all heads side by side. The cosines themselves are 0
    in the mean.

    Args:
        metrics: Metrics that are measured; only their nulls are returned.
        heads: Number of query heads.
        width: Width of one head.
    """
    widths = {"qk_cosine": width, "qk_cosine_concatenated": heads * width}
    return {
        f"{name}/null_magnitude": isotropic_cosine_magnitude(size)
        for name, size in widths.items()
        if name in metrics
    }


def correlation(x: Tensor, y: Tensor) -> Correlation:
    """Correlate two metrics over layers: Pearson's r with its p-value, of ranks Spearman's.

    Godey et al. (2401.12143, figures 5 and 16) relate `drift_norm` to `cosine` this way. Up to 9
    layers the p-value is exact: twice the share of the permutations of one series whose correlation
    is at least as far out on the same side, which is .083 or more with 4 layers and .017 with 5.
    With more layers it is that of normal series, 1 - R^2 ~ Beta((n - 2) / 2, 1 / 2); of ranks that
    is Student's t with n - 2 degrees of freedom. Neighbouring layers are not independent, so the
    p-values are smaller than they should be.

    Args:
        x: Finite value of one metric at each layer, float64, [layers].
        y: Finite value of the other metric, float64, [layers].

    Returns:
        The correlation and its p-value; NaN with fewer than 3 layers, or where a series does not
        vary.

    Example:
        >>> drift = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        >>> fit = correlation(drift, drift.square())
        >>> round(fit.value, 3), round(fit.p_value, 3)
        (0.984, 0.083)
    """
    n = len(x)
    if n < 3 or (x == x[0]).all() or (y == y[0]).all():
        return Correlation(math.nan, math.nan)
    # In units of the largest deviation: the square of 1e-200 is 0.
    x, y = x - x.mean(), y - y.mean()
    x, y = x / x.abs().max(), y / y.abs().max()
    # One root of the product and not the product of two roots: equal series then give exactly 1.
    norm = (x.square().sum() * y.square().sum()).sqrt()
    r = ((x * y).sum() / norm).clamp(-1, 1).item()
    if n <= _EXACT:
        return Correlation(r, _p_by_permutation(x, y / norm, r))
    # (1 - r)(1 + r) keeps the digits that 1 - r^2 loses next to 1.
    return Correlation(r, float(special.betainc((n - 2) / 2, 0.5, (1 - r) * (1 + r))))


def ranks(values: Tensor) -> Tensor:
    """Rank values from 1 in ascending order, equal values sharing the mean of their ranks.

    Args:
        values: Value of a metric at each layer, [layers].

    Returns:
        Ranks, float64, [layers].

    Example:
        >>> ranks(torch.tensor([0.5, 0.1, 0.5])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[group]


def profile_shape(values: Tensor) -> ProfileShape:
    """Find where a metric peaks over depth, and how far its middle stands above its ends.

    The anisotropy of decoders follows a bell with its peak in the middle layers (Razzhigaev et al.,
    2311.05928). The depth of layer l of L is l / (L - 1); the middle third are the layers of depth
    1/3 to 2/3, the ends the first layer and the last. Layers whose value is NaN are left out.

    Args:
        values: Value of the metric at each layer, first to last, [layers].

    Returns:
        `peak_depth`: depth of the first of equal peaks; NaN with one layer or without a value.
        `bulge`: NaN where an end or the whole middle has no value, or the ends cancel.

    Raises:
        ValueError: `values` is not one-dimensional, or empty.

    Example:
        >>> shape = profile_shape(torch.tensor([0.2, 0.5, 0.8, 0.5, 0.2]))
        >>> shape.peak_depth.item(), round(shape.bulge.item(), 6)
        (0.5, 3.0)
    """
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"expected values [layers], got {list(values.shape)}")
    values = values.double()
    last = len(values) - 1
    layer = torch.arange(last + 1, dtype=torch.int64, device=values.device)
    nan = torch.full_like(values[0], torch.nan)
    known = layer[~values.isnan()]
    if last == 0 or len(known) == 0:
        return ProfileShape(nan, nan)
    peak = known[values[known] == values[known].max()][0]
    # In integers: a depth of 1/3 is a rounding error away from 1/3.
    middle = values[(3 * layer >= last) & (3 * layer <= 2 * last)].nanmean()
    ends = (values[0] + values[-1]) / 2
    bulge = torch.where(ends != 0, (middle - ends) / ends.abs(), nan)
    return ProfileShape(peak.double() / last, bulge)


def _p_by_permutation(x: Tensor, y: Tensor, r: float) -> float:
    """Compute the exact two-sided p-value of r = x . y over all permutations of y.

    Twice the smaller tail, as in scipy.stats.permutation_test. x . y is a sum over the first half
    of the layers plus a sum over the others. For each choice of the values in the first half both
    sums are computed in all orders, and the pairs in a tail are counted in a sorted list: 126 x (24
    + 120) sums in place of 9! = 362,880.
    """
    first, second = _orders(len(x))
    half = first.shape[-1]
    a, b = y.take(first) @ x[:half], y.take(second) @ x[half:]
    b = torch.from_numpy(np.sort(b.numpy()))  # ten times as fast as torch's sort
    rounding = 1e-12  # far above the rounding of equal sums, which must count as equal
    count = math.factorial(len(x))
    below = int(torch.searchsorted(b, r + rounding - a, right=True).sum())
    above = count - int(torch.searchsorted(b, r - rounding - a).sum())
    return min(1.0, 2 * min(below, above) / count)


@functools.lru_cache
def _orders(n: int) -> tuple[Tensor, Tensor]:
    """Index n values by all choices for the first n // 2 places, in all orders of each half.

    Returns:
        [choices, orders, n // 2] for the first places, and [choices, orders, n - n // 2] for the
        others, int64.
    """
    half = n // 2
    choices = list(itertools.combinations(range(n), half))
    others = [[value for value in range(n) if value not in choice] for choice in choices]
    orders = (list(itertools.permutations(range(size))) for size in (half, n - half))
    first, second = (
        _integers(values)[:, _integers(order)]
        for values, order in zip((choices, others), orders, strict=True)
    )
    return first, second


def _integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _profile(values: Mapping[str, float], metric: str) -> dict[int, float]:
    """Collect the values of a metric by layer."""
    return {
        tag.layer: value
        for name, value in values.items()
        if (tag := tags.parse(name)) is not None
        and tag.metric == metric
        and tag.layer is not None
        and not tag.part
        and tag.head is None
    }


def _known(profile: Mapping[int, float]) -> dict[int, float]:
    return {layer: value for layer, value in profile.items() if math.isfinite(value)}


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=64)
def _gaussian_dimension(rows: int, width: int) -> tuple[float, float]:
    """Measure TwoNN of Gaussian noise: far below the width, since distances concentrate.

    Returns:
        Mean over samples, and their standard deviation. Of many rows few samples are drawn: they
        scatter by little more than 1 / sqrt(rows).
    """
    generator = torch.Generator("cpu").manual_seed(0)
    samples = max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, 4 * _NULL_ROWS // rows))
    found = [_sample_dimension(rows, width, generator) for _ in range(samples)]
    # Only some of many rows have their neighbours searched.
    share = min(1.0, _NULL_ROWS / rows)
    return statistics.fmean(found), statistics.stdev(found) * share**0.5


@functools.lru_cache(maxsize=64)
def _gaussian_neighbourhoods(rows: int, width: int) -> dict[str, float]:
    """Measure the neighbourhoods in Gaussian noise: mean over samples, by metric.

    256 neighbourhoods in each of two samples, or more samples where there are fewer rows: the mean
    scatters by about 1 %.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    samples = max(2, min(_MOST_SAMPLES, 2 * FAR_ROWS // rows))
    found: list[tuple[float, ...]] = []
    for _ in range(samples):
        noise = torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")
        some = torch.arange(min(rows, FAR_ROWS), dtype=torch.int64, device="cpu")
        members = nearest(noise, FAR, of=some).indices
        parts = local_dimension(noise, members), *local_isotropy(noise, members)
        found.append(tuple(float(part.mean()) for part in parts))
    return dict(zip(_LOCAL, map(statistics.fmean, zip(*found, strict=True)), strict=True))


def _sample_dimension(rows: int, width: int, generator: torch.Generator) -> float:
    kind: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    noise = torch.randn(min(rows, _NULL_ROWS), width, **kind)
    near = nearest(noise, k=2).distances
    # The other rows are made and dropped block by block: a null is not worth holding millions.
    for start in range(_NULL_ROWS, rows, _NULL_ROWS // 16):
        others = torch.randn(min(rows - start, _NULL_ROWS // 16), width, **kind)
        near = _nearer(near, noise, others)
    return float(twonn(near))


def _nearer(near: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Compare the distances of rows to their nearest with those to other rows.

    An expansion in float32 excludes nearly all pairs; the others are compared by differences.

    Args:
        near: Distances to the k nearest so far, [rows, k], float64.
        rows: The rows, [rows, width], float32.
        others: Other rows, [others, width], float32.

    Returns:
        The smallest of both, ascending, [rows, k], float64.
    """
    one, other = as_factor(rows), as_factor(others)
    norms, lengths = one.square().sum(dim=1), other.square().sum(dim=1)
    rounding = 4 * (4 + rows.shape[1] ** 0.5) * torch.finfo(rows.dtype).eps
    reach = near[:, -1].square() + rounding * (norms + lengths.max())
    squared = torch.addmm(lengths, one, other.T, alpha=-2)
    row, column = (squared <= (reach - norms)[:, None]).nonzero(as_tuple=True)
    apart = torch.linalg.vector_norm(rows[row].double() - others[column].double(), dim=1)
    counts = torch.bincount(row, minlength=len(rows))
    position = torch.arange(len(row), dtype=torch.int64, device=row.device)
    position -= (counts.cumsum(0) - counts)[row]
    found = torch.full_like(near[:, :1], torch.inf).repeat(1, max(1, int(counts.max())))
    found[row, position] = apart
    return torch.cat([near, found], dim=1).topk(near.shape[1], dim=1, largest=False).values
