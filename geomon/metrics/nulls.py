"""Nulls: the values that data without structure gives, at the sizes of a reading.

Nulls measured on noise are measured once per size. The number of distinct rows changes a little
between readings; rounding it to an eighth of an octave changes such a null by less than 1 %.
"""

import functools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from geomon.kernels import dimension
from geomon.kernels.baselines import (
    isotropic_anisotropy,
    isotropic_cosine_magnitude,
    isotropic_cosine_quantile,
    isotropic_spectrum,
)
from geomon.kernels.neighbourhoods import local_anisotropy, local_dimension
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import effective_rank, power_law
from geomon.metrics.metric import Null, Sizes
from geomon.metrics.views import FAR, FAR_ROWS

# Rows of noise whose neighbours are searched, among as many rows as were measured.
_ROWS = 4096
# Most rows of noise: a reading of more rows gets this null, which is a few per cent too low.
_MOST_ROWS = 32_768
# Samples of noise over which a null is averaged; small samples scatter most and are more.
_FEWEST_SAMPLES, _MOST_SAMPLES = 4, 64
_FEWEST_ROWS, _NARROWEST = 3, 2


def of_rows(null: Null) -> Null:
    """Make a null return {} if there are too few rows or columns for a value.

    Args:
        null: A null that depends on rows and width.
    """

    def checked(sizes: Sizes) -> Mapping[str, float]:
        enough = sizes.rows >= _FEWEST_ROWS and sizes.width >= _NARROWEST
        return null(sizes) if enough else {}

    return checked


@of_rows
def anisotropy(sizes: Sizes) -> Mapping[str, float]:
    """Return the anisotropy of an isotropic Gaussian."""
    return {"null": isotropic_anisotropy(sizes.rows, sizes.width)}


@of_rows
def cosine(sizes: Sizes) -> Mapping[str, float]:
    """Return the mean cosine of isotropic rows, and the 95th percentile for a single pair.

    The percentile (`isotropic_pair`; Godey et al., 2401.12143, appendix B) says what is large for a
    single pair; it does not apply to a mean over all pairs.
    """
    return {"null": 0.0, "isotropic_pair": isotropic_cosine_quantile(sizes.width)}


@of_rows
def centred_cosine(sizes: Sizes) -> Mapping[str, float]:
    """Return the mean cosine of isotropic rows about their mean."""
    return {"null": -1 / (sizes.rows - 1)}


@of_rows
def mean_share(sizes: Sizes) -> Mapping[str, float]:
    """Return the variance shares of rows with mean 0 whose token types do not differ."""
    return {"null": 1.0, "null_mean": 1 / sizes.rows, "null_between": 0.0}


@of_rows
def alpha(sizes: Sizes) -> Mapping[str, float]:
    """Return the decay of the expected spectrum of an isotropic Gaussian."""
    return {"null": float(power_law(isotropic_spectrum(sizes.rows, sizes.width)).alpha)}


def alpha_last(sizes: Sizes) -> Mapping[str, float]:
    """Return the decay of the expected spectrum of an isotropic Gaussian, one row per sequence."""
    return _at_last(sizes, lambda eigenvalues: power_law(eigenvalues).alpha)


def effective_rank_last(sizes: Sizes) -> Mapping[str, float]:
    """Return the effective rank of an isotropic Gaussian with a row per sequence."""
    return _at_last(sizes, effective_rank)


def _at_last(sizes: Sizes, function: Any) -> Mapping[str, float]:
    if sizes.sequences < 2:
        return {}
    return {"null": float(function(isotropic_spectrum(sizes.sequences, sizes.width)))}


@of_rows
def twonn(sizes: Sizes) -> Mapping[str, float]:
    """Return TwoNN of an isotropic Gaussian: mean over samples, and their standard deviation."""
    mean, deviation = _gaussian_dimension(
        _to_eighth_of_octave(min(sizes.rows, _MOST_ROWS)), sizes.width
    )
    return {"null": mean, "null_std": deviation}


def neighbourhoods(name: str) -> Null:
    """Make the null of a metric of neighbourhoods, measured on an isotropic Gaussian.

    Args:
        name: Name of the metric.
    """

    def null(sizes: Sizes) -> Mapping[str, float]:
        # With few rows, a neighbourhood is all of them, so their exact number matters.
        rows = sizes.rows
        near = rows if rows <= FAR else min(_to_eighth_of_octave(rows), _ROWS)
        return {"null": _gaussian_neighbourhoods(near, sizes.width)[name]}

    return of_rows(null)


def mean_query_share(sizes: Sizes) -> Mapping[str, float]:
    """Return the share of the mean query by chance, for queries with expectation 0.

    It is 1 / queries, the mean's share of the variance of that many independent queries. Queries of
    one sequence are alike, so this is a lower bound.
    """
    if not sizes.queries or min(sizes.queries) == 0:
        return {}
    return {"null": statistics.fmean(1 / count for count in sizes.queries)}


def attention_entropy(sizes: Sizes) -> Mapping[str, float]:
    """Return the entropy of uniform attention over the visible keys, which is the maximum."""
    return {"null": statistics.fmean(sizes.log_visible)} if sizes.log_visible else {}


def head_cosine(sizes: Sizes) -> Mapping[str, float]:
    """Return the mean absolute cosine of two isotropic directions of a head's width."""
    if sizes.heads is None:
        return {}
    return {"null_magnitude": isotropic_cosine_magnitude(sizes.heads[1])}


def _to_eighth_of_octave(rows: int) -> int:
    return round(2 ** (round(8 * math.log2(rows)) / 8))


def _noise(rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")


@functools.lru_cache(maxsize=64)
def _gaussian_dimension(rows: int, width: int) -> tuple[float, float]:
    """Measure TwoNN of Gaussian noise: far below the width, because distances concentrate."""
    generator = torch.Generator("cpu").manual_seed(0)
    samples = max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, 4 * _ROWS // rows))
    # With many rows, neighbours are searched for only some of them.
    some = torch.arange(min(rows, _ROWS), dtype=torch.int64, device="cpu")
    found = [
        float(
            dimension.twonn(nearest(_noise(rows, width, generator), k=2, of=some).distances).value
        )
        for _ in range(samples)
    ]
    return statistics.fmean(found), statistics.stdev(found) * (len(some) / rows) ** 0.5


@functools.lru_cache(maxsize=64)
def _gaussian_neighbourhoods(rows: int, width: int) -> dict[str, float]:
    """Measure neighbourhoods in Gaussian noise: mean over samples, by metric.

    It uses 256 neighbourhoods in each of two samples, or more samples of fewer rows; the mean
    scatters by about 1 %.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    samples = max(2, min(_MOST_SAMPLES, 2 * FAR_ROWS // rows))
    found: list[tuple[float, ...]] = []
    for _ in range(samples):
        noise = _noise(rows, width, generator)
        some = torch.arange(min(rows, FAR_ROWS), dtype=torch.int64, device="cpu")
        members = nearest(noise, FAR, of=some).indices
        parts = local_dimension(noise, members), local_anisotropy(noise, members)
        found.append(tuple(float(part.mean()) for part in parts))
    names = ("local_dimension", "local_anisotropy")
    return dict(zip(names, map(statistics.fmean, zip(*found, strict=True)), strict=True))
