"""Intervals: what a metric differs by between balanced halves of the sequences.

A function here is to a metric what a metric is to its value: its parameters name views, and it
returns the estimate on the first half minus that on the second, [ways] or [ways, heads] (of heads
the mean counts), or a dict of such by part. The halves are the same at every layer, so that the
interval of a mean over layers follows from the mean of their differences.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from geomon.kernels import angles, attention, dimension, half_samples, moments, neighbourhoods
from geomon.kernels.attention import AttentionRows
from geomon.kernels.dimension import HalfRatios
from geomon.kernels.half_samples import GroupSums, HalfSamples
from geomon.kernels.neighbourhoods import LocalIsotropy
from geomon.metrics import table
from geomon.metrics.last_tokens import AtLast, read_last
from geomon.metrics.table import Metric
from geomon.metrics.views import FAR_SCALES, HALF_SCALES

Differences = Callable[..., Any]


def _anisotropy(half_anisotropy: Tensor) -> Tensor:
    return half_anisotropy


def _anisotropy_no_sinks(
    hidden: Tensor, ordinary_rows: Tensor, half_anisotropy: Tensor, halves: HalfSamples
) -> Tensor:
    if bool(ordinary_rows.all()):
        return half_anisotropy
    some = HalfSamples(halves.group[ordinary_rows], halves.first)
    sums = half_samples.group_sums(hidden[ordinary_rows][:, None], some)
    return half_samples.anisotropy_differences(hidden[ordinary_rows], sums, some)


def _cosine(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.cosine_differences(row_sums, halves)


def _drift_norm(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.drift_differences(row_sums, halves)


def _variance(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.variance_differences(row_sums, halves)


def _mean_square_norm(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.mean_differences(row_sums.squares, row_sums.counts[:, None], halves)


def _twonn(half_ratios: dict[int, HalfRatios]) -> dict[str, Tensor]:
    fit, censored = dimension.twonn_differences(half_ratios[1])
    return {"": fit, "censored": censored}


def _twonn_distinct(distinct_half_ratios: HalfRatios) -> dict[str, Tensor]:
    fit, censored = dimension.twonn_differences(distinct_half_ratios)
    return {"": fit, "censored": censored}


def _gride(
    half_ratios: dict[int, HalfRatios], far_half_ratios: dict[int, HalfRatios]
) -> dict[str, Tensor]:
    known = [(HALF_SCALES, half_ratios), (FAR_SCALES, far_half_ratios)]
    return {
        f"k{scale}": dimension.gride_differences(ratios[rank], rank)
        for ranks, ratios in known
        for scale, rank in ranks.items()
    }


def _local_dimension(
    hidden: Tensor, members: Tensor, far_rows: Tensor, halves: HalfSamples
) -> Tensor:
    return neighbourhoods.local_dimension_differences(hidden, members, far_rows, halves)


def _local_anisotropy(half_isotropy: LocalIsotropy) -> Tensor:
    return half_isotropy.anisotropy


def _local_cosine(half_isotropy: LocalIsotropy) -> Tensor:
    return half_isotropy.cosine


def _qk_cosine(query_sums: GroupSums, key_sums: GroupSums, query_halves: HalfSamples) -> Tensor:
    function = angles.qk_cosine
    return half_samples.paired_mean_differences(function, query_sums, key_sums, query_halves)


def _qk_dot(query_sums: GroupSums, key_sums: GroupSums, query_halves: HalfSamples) -> Tensor:
    function = angles.qk_dot
    return half_samples.paired_mean_differences(function, query_sums, key_sums, query_halves)


def _query_mean_norm(query_sums: GroupSums, query_halves: HalfSamples) -> Tensor:
    return half_samples.drift_differences(query_sums, query_halves)


def _key_mean_norm(key_sums: GroupSums, key_halves: HalfSamples) -> Tensor:
    return half_samples.drift_differences(key_sums, key_halves)


def _query_cosine(query_sums: GroupSums, query_halves: HalfSamples) -> Tensor:
    return half_samples.cosine_differences(query_sums, query_halves)


def _key_cosine(key_sums: GroupSums, key_halves: HalfSamples) -> Tensor:
    return half_samples.cosine_differences(key_sums, key_halves)


def _mean_of_rows(
    value: Callable[[AttentionRows], Tensor], *, outcomes: int
) -> Callable[[AttentionRows, HalfSamples], Tensor]:
    """Compare the mean of a value of attention rows, over those with at least so many outcomes."""

    def compare(attention: AttentionRows, attention_halves: HalfSamples) -> Tensor:
        chosen = attention.visible >= outcomes
        return half_samples.row_mean_differences(value(attention), chosen, attention_halves)

    return compare


DIFFERENCES: Mapping[Metric, Differences] = {
    table.METRICS["anisotropy"]: _anisotropy,
    table.anisotropy_no_sinks: _anisotropy_no_sinks,
    angles.cosine: _cosine,
    moments.drift_norm: _drift_norm,
    table.variance: _variance,
    moments.mean_square_norm: _mean_square_norm,
    table.twonn: _twonn,
    table.twonn_distinct: _twonn_distinct,
    table.gride: _gride,
    table.local_dimension: _local_dimension,
    table.local_anisotropy: _local_anisotropy,
    table.local_cosine: _local_cosine,
    angles.qk_cosine: _qk_cosine,
    angles.qk_dot: _qk_dot,
    table.query_mean_norm: _query_mean_norm,
    table.key_mean_norm: _key_mean_norm,
    table.query_cosine: _query_cosine,
    table.key_cosine: _key_cosine,
    attention.attention_entropy: _mean_of_rows(lambda rows: rows.entropy, outcomes=1),
    attention.attention_entropy_normalised: _mean_of_rows(
        lambda rows: rows.entropy / rows.visible.log(), outcomes=2
    ),
    attention.attention_max: _mean_of_rows(lambda rows: rows.maximum, outcomes=2),
    attention.attention_min: _mean_of_rows(lambda rows: rows.minimum, outcomes=2),
    attention.attention_sink: _mean_of_rows(lambda rows: rows.first, outcomes=2),
}


def differences_of(metric: Metric) -> Differences | None:
    """Find the function that compares a metric on halves; None where it has no interval.

    Args:
        metric: A function of views.
    """
    if isinstance(metric, AtLast):
        of_rows = differences_of(metric.metric)
        return None if of_rows is None else read_last(of_rows)
    try:
        return DIFFERENCES.get(metric)
    except TypeError:  # an object of the user's own that cannot be hashed
        return None


def by_part(result: Any) -> dict[str, list[float]]:
    """List what such a function returned, by part; of heads the mean.

    Args:
        result: Differences [ways] or [ways, heads], or a dict of them by part.
    """
    parts = result if isinstance(result, Mapping) else {"": result}
    return {part: _over_heads(values).tolist() for part, values in parts.items()}


def _over_heads(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else torch.nanmean(values, dim=1)
