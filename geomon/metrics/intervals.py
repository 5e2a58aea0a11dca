"""Intervals: what a metric differs by between balanced halves of the sequences.

A function here is to a metric what a metric is to its value: its parameters name views, and it
returns the estimate on the first half minus that on the second, [ways] or [ways, heads] (of heads
the mean counts), or a dict of such by part. The halves are the same at every layer, so that the
interval of a mean over layers follows from the mean of their differences.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from geomon.capture.snapshot import CAPTURED, ROW_VIEWS, Layer
from geomon.kernels import (
    angles,
    attention,
    dimension,
    half_samples,
    neighbourhoods,
    scores,
)
from geomon.kernels.angles import SequenceCosines
from geomon.kernels.attention import SequenceExtremes
from geomon.kernels.dimension import HalfRatios
from geomon.kernels.frequency import CLASSES, frequency_differences
from geomon.kernels.half_samples import GroupSums, HalfMoments, HalfSamples, HeadScatter
from geomon.kernels.moments import squares_about_mean
from geomon.kernels.neighbourhoods import LocalIsotropy
from geomon.kernels.scores import QueryVariances, ScoreMoments
from geomon.kernels.type_halves import TypeHalves, within_of_halves
from geomon.metrics import table
from geomon.metrics.last_tokens import AtLast, read_last
from geomon.metrics.table import Metric
from geomon.metrics.views import (
    FAR_SCALES,
    HALF_SCALES,
    LayerViews,
    captured_views,
    parameters,
)

Differences = Callable[..., Any]

# By which cut the rows of a captured view are picked out.
_CUT_BY = dict.fromkeys(ROW_VIEWS, "halves") | {
    "projected_query": "query_halves", "query_sequences": "query_halves",
    "projected_key": "key_halves", "key_sequences": "key_halves",
}  # fmt: skip


def _anisotropy(half_anisotropy: Tensor) -> Tensor:
    return half_anisotropy


def _anisotropy_no_sinks(
    ordinary_hidden: Tensor,
    ordinary_rows: Tensor,
    scatters: tuple[Tensor | None, Tensor | None],
    sums_of_both: tuple[GroupSums, GroupSums],
    half_anisotropy: Tensor,
    halves: HalfSamples,
) -> Tensor:
    if len(ordinary_hidden) == len(ordinary_rows):
        return half_anisotropy
    some = halves._replace(group=halves.group[ordinary_rows])
    squares, sums = squares_about_mean(ordinary_hidden), sums_of_both[1]
    return half_samples.anisotropy_differences(ordinary_hidden, squares, sums, some, scatters[1])


def _effective_rank(half_shares: Tensor) -> Tensor:
    return _between_halves(torch.special.entr(half_shares).sum(dim=1).exp())


def _participation_ratio(half_shares: Tensor) -> Tensor:
    return _between_halves(1 / half_shares.square().sum(dim=1))


def _cosine(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.cosine_differences(row_sums, halves)


def _drift_norm(row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.drift_differences(row_sums, halves)


def _variance(half_moments: HalfMoments) -> Tensor:
    return _between_halves(half_moments.variance)


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
    found: dict[str, Tensor] = {}
    for ranks, ratios in ((HALF_SCALES, half_ratios), (FAR_SCALES, far_half_ratios)):
        of_each = dimension.gride_differences(
            [ratios[k] for k in ranks.values()], [*ranks.values()]
        )
        found |= dict(zip((f"k{scale}" for scale in ranks), of_each, strict=True))
    return found


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


def _qk_cosine_concatenated(
    query_sums: GroupSums, key_sums: GroupSums, query_halves: HalfSamples
) -> Tensor:
    function = angles.qk_cosine_concatenated
    return half_samples.paired_mean_differences(function, query_sums, key_sums, query_halves)


def _cosine_centred(hidden: Tensor, row_sums: GroupSums, halves: HalfSamples) -> Tensor:
    return half_samples.centred_cosine_differences(hidden, row_sums, halves)


def _cosine_within(sequence_cosines: SequenceCosines) -> Tensor:
    return half_samples.within_cosine_differences(sequence_cosines.own, sequence_cosines.rows)


def _cosine_between(sequence_cosines: SequenceCosines, row_sums: GroupSums) -> Tensor:
    own, rows, _ = sequence_cosines
    return half_samples.between_cosine_differences(own, rows, row_sums)


def _within_variance(type_halves: TypeHalves) -> Tensor:
    return _between_halves(within_of_halves(type_halves))


def _between_variance(type_halves: TypeHalves, half_moments: HalfMoments) -> Tensor:
    return _between_halves(half_moments.variance - within_of_halves(type_halves))


def _mean_share(half_moments: HalfMoments) -> Tensor:
    mean, whole = half_moments
    return _between_halves(mean / (mean + whole))


def _within_share(type_halves: TypeHalves, half_moments: HalfMoments) -> dict[str, Tensor]:
    mean, whole = half_moments
    within = within_of_halves(type_halves)
    shares = {"": within / whole, "of_square": within / (mean + whole)}
    return {part: _between_halves(share) for part, share in shares.items()}


def _between_share(type_halves: TypeHalves, half_moments: HalfMoments) -> dict[str, Tensor]:
    mean, whole = half_moments
    between = whole - within_of_halves(type_halves)
    shares = {"": between / whole, "of_square": between / (mean + whole)}
    return {part: _between_halves(share) for part, share in shares.items()}


def _token_frequency(
    hidden: Tensor, token_ids: Tensor, row_sums: GroupSums, halves: HalfSamples
) -> dict[str, Tensor]:
    return {
        f"{name}/{part}": differences
        for name, found in zip(
            CLASSES,
            frequency_differences(hidden, token_ids, row_sums, halves),
            strict=True,
        )
        for part, differences in found.items()
    }


def _mean_query_share(query_variances: QueryVariances, attention_halves: HalfSamples) -> Tensor:
    return scores.share_differences(query_variances, attention_halves)


def _score_mean(score_moments: ScoreMoments, attention_halves: HalfSamples) -> Tensor:
    chosen = score_moments.visible > 0
    return half_samples.row_mean_differences(score_moments.mean, chosen, attention_halves)


def _score_spread(score_moments: ScoreMoments, attention_halves: HalfSamples) -> Tensor:
    chosen = score_moments.visible > 1
    return half_samples.row_mean_differences(
        score_moments.variance, chosen, attention_halves, of=torch.sqrt
    )


def _of_sequences(
    value: Callable[[SequenceExtremes], Tensor],
) -> Callable[[SequenceExtremes], Tensor]:
    """Compare the mean over sequences of an extreme."""

    def compare(sequence_extremes: SequenceExtremes) -> Tensor:
        values = value(sequence_extremes)
        halves = half_samples.halves_of_sequences(values[0])
        return half_samples.row_mean_differences(values, values.isfinite(), halves)

    return compare


def _between_halves(values: Tensor) -> Tensor:
    """Subtract the value of the second half of each way from that of the first, [ways]."""
    one, other = values.chunk(2)
    return one - other


def _query_anisotropy(
    query_scatter: HeadScatter, query_sums: GroupSums, query_halves: HalfSamples
) -> Tensor:
    return half_samples.head_anisotropy_differences(query_scatter, query_sums, query_halves)


def _key_anisotropy(
    key_scatter: HeadScatter, key_sums: GroupSums, key_halves: HalfSamples
) -> Tensor:
    return half_samples.head_anisotropy_differences(key_scatter, key_sums, key_halves)


def _attention_entropy(attention_differences: Mapping[str, Tensor]) -> Tensor:
    return attention_differences["entropy"]


def _attention_entropy_normalised(attention_differences: Mapping[str, Tensor]) -> Tensor:
    return attention_differences["entropy_normalised"]


def _attention_max(attention_differences: Mapping[str, Tensor]) -> Tensor:
    return attention_differences["maximum"]


def _attention_min(attention_differences: Mapping[str, Tensor]) -> Tensor:
    return attention_differences["minimum"]


def _attention_sink(attention_differences: Mapping[str, Tensor]) -> Tensor:
    return attention_differences["first"]


DIFFERENCES: Mapping[Metric, Differences] = {
    table.METRICS["anisotropy"]: _anisotropy,
    table.anisotropy_no_sinks: _anisotropy_no_sinks,
    table.effective_rank: _effective_rank,
    table.participation_ratio: _participation_ratio,
    table.cosine: _cosine,
    table.drift_norm: _drift_norm,
    table.variance: _variance,
    table.mean_square_norm: _mean_square_norm,
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
    table.query_anisotropy: _query_anisotropy,
    table.key_anisotropy: _key_anisotropy,
    attention.attention_entropy: _attention_entropy,
    attention.attention_entropy_normalised: _attention_entropy_normalised,
    attention.attention_max: _attention_max,
    attention.attention_min: _attention_min,
    attention.attention_sink: _attention_sink,
    table.within_variance: _within_variance,
    table.between_variance: _between_variance,
    table.mean_share: _mean_share,
    table.within_share: _within_share,
    table.between_share: _between_share,
    angles.qk_cosine_concatenated: _qk_cosine_concatenated,
    angles.cosine_centred: _cosine_centred,
    table.cosine_within: _cosine_within,
    table.cosine_between: _cosine_between,
    table.token_frequency: _token_frequency,
    scores.mean_query_share: _mean_query_share,
    scores.score_mean: _score_mean,
    scores.score_spread: _score_spread,
    attention.attention_sequence_max: _of_sequences(lambda extremes: extremes.maximum),
    attention.attention_sequence_median: _of_sequences(lambda extremes: extremes.median),
}


def differences_of(metric: Metric) -> Differences | None:
    """Find the function that compares a metric on halves; None where it has no interval.

    A metric of one's own brings it as its attribute `differences`.

    Args:
        metric: A function of views.
    """
    if isinstance(metric, AtLast):
        of_rows = differences_of(metric.metric)
        return None if of_rows is None else read_last(of_rows)
    try:
        known = DIFFERENCES.get(metric)
    except TypeError:  # an object of the user's own that cannot be hashed
        known = None
    return getattr(metric, "differences", None) if known is None else known


def with_interval(metric: Metric) -> Metric:
    """Give a metric of one's own an interval: it is measured on both halves of each way.

    That takes about 15 times as long as the metric itself. Where less work is enough, give the
    metric an attribute `differences` instead: a function whose parameters name views (`halves` says
    how the rows are cut), and which returns the estimate on the first half minus that on the
    second, for each way: [ways], [ways, heads], or a dict of such by part.

    Args:
        metric: A function of views that come from hidden states alone, or from queries and keys as
            projected alone.

    Returns:
        The same metric, with an interval.

    Raises:
        TypeError: The metric reads other views, for which rows of a half cannot be picked out.

    Example:
        >>> from geomon import geometry
        >>> @with_interval
        ... def peak_norm(hidden):
        ...     return hidden.norm(dim=1).max()
        >>> rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
        >>> values = geometry(rows, sequences=torch.arange(400) // 20, metrics={"peak": peak_norm})
        >>> sorted(values)
        ['peak', 'peak/margin']
    """
    leaves = captured_views(parameters(metric))
    sources = {CAPTURED[view] for view in leaves}
    if sources not in ({"hidden"}, {"projection"}):
        raise TypeError(
            f"with_interval takes a metric of hidden states, or one of projected queries and keys, "
            f"got one that reads {', '.join(parameters(metric))}: give it an attribute "
            "'differences' instead, a function of views that compares it on halves"
        )
    captured = sorted(leaves)
    cuts = ["halves"] if sources == {"hidden"} else ["query_halves", "key_halves"]

    def differences(*views: Any) -> dict[str, Tensor] | Tensor:
        given = dict(zip([*captured, *cuts], views, strict=True))

        def half(number: int, *, is_first: bool) -> Any:
            chosen = {
                name: _in_half(name, value, given, number, is_first=is_first)
                for name, value in given.items()
                if name in captured
            }
            return LayerViews(Layer(0, "half", chosen)).apply(metric)

        ways = range(len(given[cuts[0]].first))
        found = [(half(way, is_first=True), half(way, is_first=False)) for way in ways]
        if found and isinstance(found[0][0], Mapping):
            return {
                part: torch.stack([_minus(one[part], other[part]) for one, other in found])
                for part in found[0][0]
            }
        none = torch.empty(0, dtype=torch.float64, device="cpu")
        return torch.stack([_minus(*pair) for pair in found]) if found else none

    @functools.wraps(metric)
    def measured(*views: Any) -> Any:
        return metric(*views)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    asked = [inspect.Parameter(name, kind) for name in (*captured, *cuts)]
    vars(differences)["__signature__"] = inspect.Signature(asked)
    vars(measured)["differences"] = differences
    return measured


def _in_half(name: str, value: Any, given: Mapping[str, Any], way: int, *, is_first: bool) -> Any:
    """Pick the rows of a half out of a captured view; what is not of rows stays whole."""
    cut = _CUT_BY.get(name)
    if cut is None:
        return value
    halves: HalfSamples = given[cut]
    return value[halves.first[way][halves.group] == is_first]


def _minus(one: Any, other: Any) -> Tensor:
    left, right = (
        torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (one, other)
    )
    return left - right


def cut_of(differences: Differences) -> str | None:
    """Name the view that says how the rows which such a function compares are cut into halves.

    None where it reads nothing that knows of sequences: it has halves of its own.

    Args:
        differences: A function of views.
    """
    leaves = captured_views(parameters(differences))
    cuts = {
        "sequences": "halves",
        "last_sequences": "last_halves",
        "query_sequences": "query_halves",
        "key_sequences": "key_halves",
        "query": "attention_halves",
        "scores": "attention_halves",
    }
    return next((cut for leaf, cut in cuts.items() if leaf in leaves), None)


def by_part(result: Any) -> dict[str, list[float]]:
    """List what such a function returned, by part; of heads the mean.

    Args:
        result: Differences [ways] or [ways, heads], or a dict of them by part.
    """
    parts = result if isinstance(result, Mapping) else {"": result}
    return {part: _over_heads(values).tolist() for part, values in parts.items()}


def _over_heads(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else torch.nanmean(values, dim=1)
