"""Across layers: how two metrics go together, and where a metric peaks."""

from typing import NamedTuple

import torch
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor


class Correlation(NamedTuple):
    """How two series go together. Scalars, float64.

    Attributes:
        pearson: Linear correlation, [-1, 1].
        pearson_p: Probability of one at least as far from 0 if the series were independent and
            normal.
        spearman: Correlation of the ranks, [-1, 1].
        spearman_p: The same for ranks, by Student's t with n - 2 degrees of freedom.
        n: Layers in which both series have a finite value.
    """

    pearson: Tensor
    pearson_p: Tensor
    spearman: Tensor
    spearman_p: Tensor
    n: Tensor


class ProfileShape(NamedTuple):
    """The shape of a metric over depth. Scalars, float64.

    Attributes:
        peak_depth: Depth of the largest value: 0 is the first layer, 1 the last.
        bulge: (mean of the middle third - mean of both ends) / |mean of both ends|: above 0 for a
            bell, below for a bowl, 0 for a straight line.
    """

    peak_depth: Tensor
    bulge: Tensor


def correlation(x: Tensor, y: Tensor) -> Correlation:
    """Pearson's and Spearman's correlation of two metrics over layers, with two-sided p-values.

    Godey et al. (2401.12143, figures 5 and 16) relate `drift_norm` to `cosine` this way. Layers
    where either is not finite are left out; equal values share their mean rank. Neighbouring layers
    are not independent, so the p-values are smaller than they should be.

    Args:
        x: A value for each layer, [layers].
        y: The other metric, [layers].

    Returns:
        The correlations and their p-values; NaN with fewer than 3 layers, or where a series does
        not vary.

    Raises:
        ValueError: The series are not one-dimensional and of one length.

    Example:
        >>> norms, cosines = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 0.4, 0.9, 0.8])
        >>> fit = correlation(norms, cosines)
        >>> round(fit.pearson.item(), 3), round(fit.spearman.item(), 3)
        (0.908, 0.8)
    """
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            f"expected two series [layers] of one length, got {list(x.shape)} and {list(y.shape)}"
        )
    x, y = x.double(), y.double()
    both = torch.isfinite(x) & torch.isfinite(y)
    x, y = x[both], y[both]
    pearson = _pearson(x, y)
    spearman = _pearson(_ranks(x), _ranks(y))
    n = len(x)
    return Correlation(
        pearson=pearson,
        pearson_p=_two_sided(pearson, n),
        spearman=spearman,
        spearman_p=_two_sided(spearman, n),
        n=both.sum().double(),
    )


def profile_shape(values: Tensor) -> ProfileShape:
    """Where a metric peaks over depth, and how far its middle stands above its ends.

    The anisotropy of decoders follows a bell with its peak in the middle layers (Razzhigaev et al.,
    2311.05928). The depth of layer l of L is l / (L - 1); the middle third are the layers of depth
    1/3 to 2/3, the ends the first layer and the last. Layers whose value is NaN are left out.

    Args:
        values: A value for each layer, first to last, [layers].

    Returns:
        `peak_depth`: that of the first of equal peaks; NaN with one layer or without a value.
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
    layer = torch.arange(last + 1, device=values.device)
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


def _pearson(x: Tensor, y: Tensor) -> Tensor:
    """Correlation of two finite series; NaN with fewer than 3 values or without variation."""
    nan = torch.tensor(torch.nan, dtype=torch.float64, device=x.device)
    if len(x) < 3 or (x == x[0]).all() or (y == y[0]).all():
        return nan
    # In units of the largest deviation: the square of 1e-200 is 0.
    x, y = x - x.mean(), y - y.mean()
    x, y = x / x.abs().max(), y / y.abs().max()
    # One root of the product and not the product of two roots: equal series then give exactly 1.
    return ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).clamp(-1, 1)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[group]


def _two_sided(r: Tensor, n: int) -> Tensor:
    """P(|R| >= |r|) of n independent pairs: 1 - R^2 ~ Beta((n - 2) / 2, 1 / 2)."""
    if r.isnan():
        return r
    # (1 - r)(1 + r) keeps the digits that 1 - r^2 loses next to 1.
    rest = ((1 - r) * (1 + r)).item()
    return torch.full_like(r, float(special.betainc((n - 2) / 2, 0.5, rest)))
