"""The table of metrics, which defines each metric with its words, its null and its margin.

A metric's function names the views that it reads (`geomon.metrics.views`). It returns a scalar, a
vector [heads], or a dict of these by part, where "" is the value itself.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from geomon.capture import CAPTURED
from geomon.kernels import dimension
from geomon.kernels import spectrum as spectral
from geomon.kernels.additions import norm_growth, residual_cosine
from geomon.kernels.angles import (
    cosine_centred,
    leading_share,
    qk_cosine,
    qk_dot,
)
from geomon.kernels.attention import (
    AttentionRows,
    RowMedians,
    SequenceExtremes,
    attention_entropy,
    attention_entropy_normalised,
    attention_sink,
    mean_over,
)
from geomon.kernels.groups import GROUPS, Groups
from geomon.kernels.loads import expert_loads
from geomon.kernels.neighbours import Neighbours, pass_over
from geomon.kernels.scores import mean_query_share, score_mean, score_spread
from geomon.kernels.token_types import TokenTypes
from geomon.metrics import nulls
from geomon.metrics.metric import COUNTS, Metric, as_metric
from geomon.metrics.views import DERIVED, FAR, NEAR, is_view
from geomon.record import MetricText, tags

# Scales of Gride beyond the two nearest rows, by the view that has enough neighbours.
_NEAR_SCALES = [k for k in dimension.SCALES if 1 < k <= NEAR // 2]
_FAR_SCALES = [k for k in dimension.SCALES if k > NEAR // 2]


def _alpha(spectrum: Tensor) -> dict[str, Tensor]:
    law = spectral.power_law(spectrum)
    return {"": law.alpha, "r_squared": law.r_squared}


def _variance_shares(drift: Tensor, total_variance: Tensor, within: Tensor) -> dict[str, Tensor]:
    between, square = total_variance - within, drift.square() + total_variance
    return {
        "": within / total_variance,
        "mean": drift.square() / square,
        "between": between / square,
        "within": within / square,
        "between_variance": between,
    }


def _norm_variance_slope(token_types: TokenTypes) -> dict[str, Tensor]:
    fit = token_types.norm_variance_slope()
    parts = {"": fit.slope, "r_squared": fit.r_squared, "types": fit.types}
    return {**parts, "coverage": fit.coverage, "q_variation": fit.q_variation}


def _norm_variance_slope_of_each_group(token_types: TokenTypes) -> dict[str, Tensor]:
    """Like `_norm_variance_slope`, without the rows of each group."""
    return {"": token_types.without_each().norm_variance_slope().slope}


def _twonn(two_nearest: Tensor, duplicates: float, rounding: float) -> dict[str, Tensor | float]:
    found = dimension.twonn(two_nearest)
    return {
        "": found.value,
        "censored": found.censored,
        "discard_0": found.discard_0,
        "discard_80": found.discard_80,
        "n": len(two_nearest),
        "duplicates": duplicates,
        "rounding": rounding,
    }


def _twonn_distinct(distinct_neighbours: Tensor, repeated: float) -> dict[str, Tensor | float]:
    found = dimension.twonn(distinct_neighbours)
    return {
        "": found.value,
        "censored": found.censored,
        "n": len(distinct_neighbours),
        "repeated": repeated,
    }


def _twonn_of_each_group(
    two_nearest: Tensor, query_rows: Tensor, groups: Groups
) -> dict[str, Tensor]:
    """Like `_twonn`, without the rows of each group."""
    found = dimension.twonn_in_forms(_of_others(two_nearest, groups.of[query_rows]))
    return {"": found.value, "censored": found.censored, "discard_80": found.discard_80}


def _twonn_distinct_of_each_group(
    distinct_neighbours: Tensor, distinct_rows: Tensor, groups: Groups
) -> dict[str, Tensor]:
    """Like `_twonn_distinct`, without the rows of each group."""
    found = dimension.twonn_in_forms(_of_others(distinct_neighbours, groups.of[distinct_rows]))
    return {"": found.value, "censored": found.censored}


def _of_others(distances: Tensor, own: Tensor) -> Tensor:
    """Return distances without each group, [groups, rows, k]; the group's own rows get 0."""
    each = torch.arange(GROUPS, dtype=own.dtype, device=own.device)[:, None]
    return torch.where((own == each)[:, :, None], 0, distances)


def _gride(two_nearest: Tensor, neighbours: Tensor, far_neighbours: Tensor) -> dict[str, Tensor]:
    estimates = [
        *dimension.gride(two_nearest, [1]),
        *dimension.gride(neighbours, _NEAR_SCALES),
        *dimension.gride(far_neighbours, _FAR_SCALES),
    ]
    return {f"k{k}": value for k, value in zip(dimension.SCALES, estimates, strict=True)}


def _gride_of_each_group(
    two_nearest: Tensor, nearest: Neighbours, query_rows: Tensor, far_nearest: Neighbours,
    far_rows: Tensor, groups: Groups,
) -> dict[str, Tensor]:  # fmt: skip
    """Like `_gride`, without each group's rows, also as neighbours (except the two nearest)."""
    own, far_own = groups.of[query_rows], groups.of[far_rows]
    estimates = torch.cat(
        [
            dimension.gride_of_each(_of_others(two_nearest, own), [1]),
            dimension.gride_of_each(_without_each(nearest, own, groups, NEAR), _NEAR_SCALES),
            dimension.gride_of_each(_without_each(far_nearest, far_own, groups, FAR), _FAR_SCALES),
        ],
        dim=1,
    )
    found = {f"k{k}": values for k, values in zip(dimension.SCALES, estimates.T, strict=True)}
    for listed, scales in ((nearest, _NEAR_SCALES), (far_nearest, _FAR_SCALES)):
        for k in scales:
            if dimension.meets_clusters(listed.distances, k):
                found[f"k{k}"] = torch.full_like(found[f"k{k}"], torch.nan)
    return found


def _without_each(listed: Neighbours, own: Tensor, groups: Groups, count: int) -> Tensor:
    """Return distances to nearest rows without each group, [groups, rows, count]; 0 for its own."""
    each = torch.arange(GROUPS, dtype=own.dtype, device=own.device)[:, None, None]
    distances, passed = listed.distances, groups.of[listed.indices] == each
    flat = distances.expand(GROUPS, -1, -1).flatten(0, 1)
    left = pass_over(flat, passed.flatten(0, 1), count).view(GROUPS, len(own), -1)
    return torch.where(own[:, None] == each, 0, left)


def _local_dimension(local_dimensions: Tensor) -> dict[str, Tensor | float]:
    spread = local_dimensions.std() if len(local_dimensions) > 1 else torch.nan
    return {"": local_dimensions.mean(), "spread": spread, "n": len(local_dimensions)}


def _attention_extremes(
    attention: AttentionRows, row_medians: RowMedians, sequence_extremes: SequenceExtremes
) -> dict[str, Tensor]:
    several = attention.visible > 1
    return {
        "max": mean_over(attention.maximum, several),
        "median": mean_over(row_medians.median, row_medians.visible > 1),
        "min": mean_over(attention.minimum, several),
        "sequence_max": sequence_extremes.maximum.nanmean(dim=1),
        "sequence_median": sequence_extremes.median.nanmean(dim=1),
        "sequence_min": sequence_extremes.minimum.nanmean(dim=1),
    }


def _expert_load(expert_counts: Tensor) -> dict[str, Tensor]:
    loads = expert_loads(expert_counts)
    parts = {f"expert_{number}": load for number, load in enumerate(loads)}
    return {"": loads.log().mean().exp(), **parts}


def _update_size(weight_moves: Tensor) -> dict[str, Tensor]:
    size, relative, *_, over_rate = weight_moves
    parts = {"": size, "relative": relative, "over_rate": over_rate}
    return {part: value for part, value in parts.items() if not value.isnan()}


# Why a kernel returns no value.
_EQUAL_ROWS = "all rows are equal"
_NO_TYPE_TWICE = "no token type has two rows"
_FEW_ROWS = "fewer than 3 rows differ from one another"
_FEW_NEIGHBOURS = "fewer than 4 rows differ from one another"
_NO_TWO_KEYS = "no sampled query sees two keys"
_NO_PAIR_OF_A_HEAD = "fewer than two {} of a head have a norm above 0"


def _healthy(range_: str, where: str) -> str:
    """Describe a metric in healthy runs, and say what to check if it differs."""
    runs = "healthy runs of the recipe (width 64 and 128, steps 400 to 800)"
    return f"In {runs}: {range_}; {where}."


# Degrees of freedom for margins of token types, which a few large types decide (measured).
_FEW_ROWS_DECIDE = 3
_ON_ROWS = COUNTS | {"duplicates", "repeated", "rounding"}


# Typed like a user's own functions, so that METRICS | {"name": function} is a dict of functions.
METRICS: dict[str, Callable[..., Any]] = {
    "twonn": Metric(
        _twonn,
        MetricText(
            "Intrinsic dimension (TwoNN)",
            meaning="Number of directions in which rows spread locally, from the ratios of the "
            "distances to the two nearest rows; the largest 10 % of the ratios are left out.",
            null="Gaussian noise of as many rows and columns",
            missing=_FEW_ROWS,
            parts={
                "censored": "by maximum likelihood",
                "discard_0": "all ratios (the paper's text)",
                "discard_80": "the smallest 20 % (the authors' code)",
                "n": "rows",
                "duplicates": "share of exact copies, left out",
                "rounding": "rounding over the median nearest distance",
            },
        ),
        nulls.twonn,
        without_margin=_ON_ROWS | {"discard_0"},  # decided by the few largest ratios
        each_group=_twonn_of_each_group,
    ),
    "twonn_distinct": Metric(
        _twonn_distinct,
        MetricText(
            "Intrinsic dimension, distinct tokens",
            meaning="TwoNN on one row for each pair of token id and position, so that near-copies "
            "of a token do not count as neighbours.",
            missing=_FEW_ROWS,
            parts={
                "censored": "by maximum likelihood",
                "n": "rows",
                "repeated": "share of rows left out",
            },
        ),
        without_margin=_ON_ROWS,
        each_group=_twonn_distinct_of_each_group,
    ),
    "gride": Metric(
        _gride,
        MetricText(
            "Intrinsic dimension (Gride)",
            meaning="Intrinsic dimension from the ratios of the distances to neighbours k and 2k; "
            "a larger k looks at a larger neighbourhood.",
            missing="scale k takes 2k + 1 rows that differ from one another",
            parts={f"k{k}": f"scale {k}" for k in dimension.SCALES},
        ),
        each_group=_gride_of_each_group,
        no_margin="the scale is about the size of clusters of near-copies, so that few rows decide",
    ),
    "anisotropy": Metric(
        spectral.anisotropy,
        MetricText(
            "Anisotropy",
            meaning="Share of the variance along the leading direction.",
            null="an isotropic Gaussian of as many rows and columns",
            missing=_EQUAL_ROWS,
        ),
        nulls.anisotropy,
    ),
    "anisotropy_without_massive": Metric(
        spectral.anisotropy,
        MetricText(
            "Anisotropy without massive rows",
            meaning="Anisotropy without the few rows of massive norm, which alone can drive it "
            "to 1.",
            missing=_EQUAL_ROWS,
        ),
        reads=("ordinary_spectrum",),
    ),
    "massive_share": Metric(
        lambda massive_share: massive_share,
        MetricText(
            "Variance in massive rows",
            meaning="Share of the variance that the few rows of massive norm carry; 0 if there are "
            "none.",
            missing=_EQUAL_ROWS,
        ),
        has_margin=False,  # which rows are massive changes from batch to batch
    ),
    "effective_rank": Metric(
        spectral.effective_rank,
        MetricText(
            "Effective rank",
            unit="directions",
            meaning="Number of directions that the variance fills: exp of the entropy of its "
            "shares.",
            missing=_EQUAL_ROWS,
        ),
    ),
    "cosine": Metric(
        lambda mean_cosine: mean_cosine,
        MetricText(
            "Mean cosine",
            meaning="Mean cosine over all pairs of rows.",
            null="isotropic rows",
            missing="fewer than two rows have a norm above 0",
        ),
        nulls.cosine,
    ),
    "drift_norm": Metric(
        lambda drift: drift,
        MetricText(
            "Norm of the mean row",
            healthy=_healthy(
                "0.6 to 6.1",
                "if it grows without end, look at the biases and the norms of the weights",
            ),
            meaning="Length of the shift that all rows share.",
        ),
    ),
    "variance": Metric(
        lambda total_variance: total_variance,
        MetricText("Variance", meaning="Mean squared distance from the mean row."),
    ),
    "mean_square_norm": Metric(
        lambda mean_square: mean_square,
        MetricText(
            "Mean squared norm",
            meaning="Mean squared norm of the rows: the squared norm "
            "of the mean row plus the variance.",
        ),
    ),
    "within_variance": Metric(
        lambda within: within,
        MetricText(
            "Variance within token types",
            meaning="Variance around the mean of each row's token type, corrected for few rows of "
            "a type.",
            missing=_NO_TYPE_TWICE,
        ),
        degrees=_FEW_ROWS_DECIDE,
    ),
    "variance_shares": Metric(
        _variance_shares,
        MetricText(
            "Share of the variance within token types",
            meaning="Share of the variance that lies within token types, and so comes from "
            "context; the parts are shares of the mean square norm.",
            null="rows whose token types do not differ",
            missing=f"{_EQUAL_ROWS}, or {_NO_TYPE_TWICE}",
            parts={
                "mean": "share of the common mean, M / Q",
                "between": "share between token types, V_B / Q",
                "within": "share within token types, V_W / Q",
                "between_variance": "variance between token types, V_B",
            },
        ),
        nulls.mean_share,
        degrees=_FEW_ROWS_DECIDE,
    ),
    "norm_variance_slope": Metric(
        _norm_variance_slope,
        MetricText(
            "Slope of variance on norm over token types",
            meaning="Slope of the variance of token types on the squared norm of their means; -1 "
            "by identity if all types have the same mean square norm.",
            missing="fewer than 3 token types have between 10 and 100,000 rows, or the norms of "
            "their means, or their variances, are all the same",
            parts={
                "r_squared": "share of the variance explained",
                "types": "token types",
                "coverage": "share of the rows in them",
                "q_variation": "variation of the mean square norm over types",
            },
        ),
        without_margin=COUNTS | {"q_variation", "r_squared"},
        degrees=_FEW_ROWS_DECIDE,
        each_group=_norm_variance_slope_of_each_group,
    ),
    "norm_growth": Metric(
        norm_growth,
        MetricText(
            "Growth of the norm",
            meaning="Root mean square norm of the rows over that of the same rows one layer "
            "before: what a block makes of the size of its input.",
            missing="all rows one layer before are 0",
        ),
    ),
    "residual_cosine": Metric(
        residual_cosine,
        MetricText(
            "Cosine of what a block adds",
            meaning="Mean cosine between what a block adds to a row and the row itself, one layer "
            "before: negative if it takes away from the row, 0 if it writes in other directions.",
            missing="every row is 0 one layer before, or does not change",
        ),
    ),
    "qk_cosine": Metric(
        qk_cosine,
        MetricText(
            "Cosine of mean query and mean key",
            meaning="How a head's mean query and mean key align: 1 the same way, -1 opposite.",
            null="mean absolute cosine of random directions",
            missing="the mean query or the mean key of a head is 0",
        ),
        nulls.head_cosine,
    ),
    "qk_dot": Metric(
        qk_dot,
        MetricText(
            "Product of mean query and mean key",
            meaning="Part of every score of a head that depends on no token, before scaling.",
        ),
    ),
    "attention_entropy": Metric(
        attention_entropy,
        MetricText(
            "Attention entropy",
            healthy=_healthy(
                "lowest head above 0.55 nats of 3.2",
                "if a head comes near 0, look at max_logit and at the learning rate",
            ),
            unit="nats",
            meaning="How widely a query spreads its attention: 0 on one key, the logarithm of the "
            "number of keys if all weigh the same.",
            null="uniform attention",
            missing="no sampled query sees a key",
        ),
        nulls.attention_entropy,
    ),
    "attention_entropy_normalised": Metric(
        attention_entropy_normalised,
        MetricText(
            "Attention entropy, share of uniform",
            meaning="Attention entropy relative to uniform attention on the same keys.",
            missing=_NO_TWO_KEYS,
        ),
    ),
    "attention_sink": Metric(
        attention_sink,
        MetricText(
            "Attention on the sink",
            meaning="Mean weight on the first visible key, the usual attention sink.",
            missing=_NO_TWO_KEYS,
        ),
    ),
    "max_logit": Metric(
        lambda max_logits: max_logits,
        MetricText(
            "Largest attention score",
            meaning="Largest score before the softmax, over all rows and visible keys; growth "
            "without bound is an early sign of instability.",
        ),
        has_margin=False,
    ),
    "head_output_norm": Metric(
        lambda head_outputs: (head_outputs[:, 0] / head_outputs[:, 1]).sqrt(),
        MetricText(
            "Norm of head outputs",
            meaning="Root mean square norm of a head's output, as it enters the output projection; "
            "0 if the block gets nothing from the head.",
            missing="no sampled query is a token",
        ),
        has_margin=False,
    ),
    "weight_norm": Metric(
        lambda weight_norms: {"": math.hypot(*weight_norms.values()), **weight_norms},
        MetricText(
            "Norm of the weights",
            meaning="Frobenius norm of a block's weight matrices, of all together and of each by "
            "name (experts together); any change of the weights shows here, whatever the batch.",
            missing="this rank has only a shard of the weights",
        ),
        has_margin=False,
    ),
    "update_size": Metric(
        _update_size,
        MetricText(
            "Size of the update",
            meaning="Norm of the change of a block's matrices since the look before (a reading or "
            "a check), over their norm and the number of steps; layer 0 are the embeddings. From "
            "256 numbers of each matrix.",
            missing="it takes two looks",
            parts={
                "relative": "over the median of the blocks",
                "over_rate": "over the learning rate, if it is known and steady",
            },
        ),
        has_margin=False,
    ),
    "unmoved": Metric(
        lambda weight_moves: {"": weight_moves[2], "relative": weight_moves[3]},
        MetricText(
            "Share of weights that did not change",
            meaning="Share of the numbers in a block's matrices that are what they were at the "
            "look before; layer 0 are the embeddings. Small steps are lost in rounding.",
            missing="it takes two looks",
            parts={"relative": "less the median of the blocks"},
        ),
        has_margin=False,
    ),
    "expert_load": Metric(
        _expert_load,
        MetricText(
            "Evenness of the experts' loads",
            meaning="How evenly a router assigns tokens to experts: geometric mean of their loads "
            "over the mean load, 1 if all are equal; each expert's load over the mean (at least "
            "0.01) by its number.",
            missing="no token chose an expert",
        ),
        has_margin=False,
    ),
}

# Fewest sequences for a meaningful spectrum of last tokens. With 64 rows of 768 columns whose
# eigenvalues fall as 1 / rank, alpha comes out as 0.8 instead of 1.
_ENOUGH_SEQUENCES = 64

_ALPHA_TEXT = MetricText(
    "Decay of the spectrum (alpha)",
    meaning="Minus the slope of log eigenvalue on log rank, ranks 11 to 100.",
    null="an isotropic Gaussian of as many rows and columns",
    missing="fewer than 19 eigenvalues are above 0: a layer this narrow has no ranks 11 to 15",
    parts={"r_squared": "how well a power law fits"},
)

# Metrics that only some questions need; METRICS | MORE_METRICS has them all.
MORE_METRICS: dict[str, Callable[..., Any]] = {
    "participation_ratio": Metric(
        spectral.participation_ratio,
        MetricText(
            "Participation ratio",
            unit="directions",
            meaning="Number of directions that the variance fills: 1 over the sum of its "
            "squared shares.",
            missing=_EQUAL_ROWS,
        ),
    ),
    "query_mean_norm": Metric(
        lambda mean_query: mean_query.norm(dim=1),
        MetricText("Norm of the mean query", meaning="Length of each head's mean query."),
    ),
    "key_mean_norm": Metric(
        lambda mean_key: mean_key.norm(dim=1),
        MetricText("Norm of the mean key", meaning="Length of each key head's mean key."),
    ),
    "query_cosine": Metric(
        lambda query_sums: query_sums.cosine,
        MetricText(
            "Mean cosine of queries",
            meaning="Mean cosine over all pairs of queries of a head.",
            missing=_NO_PAIR_OF_A_HEAD.format("queries"),
        ),
    ),
    "key_cosine": Metric(
        lambda key_sums: key_sums.cosine,
        MetricText(
            "Mean cosine of keys",
            meaning="Mean cosine over all pairs of keys of a key head.",
            missing=_NO_PAIR_OF_A_HEAD.format("keys"),
        ),
    ),
    "query_anisotropy": Metric(
        leading_share,
        MetricText(
            "Anisotropy of queries",
            meaning="Share of the variance of a head's queries along their leading direction.",
            missing="all queries of a head are equal",
        ),
        reads=("query_spectrum",),
    ),
    "key_anisotropy": Metric(
        leading_share,
        MetricText(
            "Anisotropy of keys",
            meaning="Share of the variance of a head's keys along their leading direction.",
            missing="all keys of a head are equal",
        ),
        reads=("key_spectrum",),
    ),
    "attention_extremes": Metric(
        _attention_extremes,
        MetricText(
            "Extremes of attention",
            meaning="Largest, median and smallest weight of a visible key, in a row and in all "
            "sampled rows of a sequence.",
            missing=_NO_TWO_KEYS,
            parts={
                "max": "largest weight of a row",
                "median": "median weight of a row",
                "min": "smallest weight of a row",
                "sequence_max": "largest weight of a sequence",
                "sequence_median": "median weight of a sequence",
                "sequence_min": "smallest weight of a sequence",
            },
        ),
        without_margin=COUNTS | {"sequence_min"},
    ),
    "alpha": Metric(_alpha, _ALPHA_TEXT, nulls.alpha),
    "alpha_last": Metric(
        _alpha,
        msgspec.structs.replace(
            _ALPHA_TEXT,
            title=f"{_ALPHA_TEXT.title}, last tokens",
            meaning="Alpha of the last token of each sequence.",
        ),
        nulls.alpha_last,
        rows="last",
        at_least=_ENOUGH_SEQUENCES,
    ),
    "effective_rank_last": Metric(
        spectral.effective_rank,
        MetricText(
            "Effective rank, last tokens",
            unit="directions",
            meaning="Effective rank of the last token of each sequence.",
            null="an isotropic Gaussian of as many sequences",
            missing=_EQUAL_ROWS,
        ),
        nulls.effective_rank_last,
        rows="last",
        at_least=_ENOUGH_SEQUENCES,
    ),
    "local_dimension": Metric(
        _local_dimension,
        MetricText(
            "Local intrinsic dimension",
            meaning="Mean over tokens of TwoNN on the 64 nearest rows of each, copies taken out.",
            null="Gaussian noise of as many rows and columns",
            missing=_FEW_NEIGHBOURS,
            parts={"spread": "deviation over tokens", "n": "tokens"},
        ),
        nulls.neighbourhoods("local_dimension"),
    ),
    "local_anisotropy": Metric(
        lambda local_anisotropies: local_anisotropies.mean(),
        MetricText(
            "Local anisotropy",
            meaning="Mean over tokens of the anisotropy of the 64 "
            "nearest rows of each about their mean.",
            null="Gaussian noise of as many rows and columns",
            missing=_FEW_NEIGHBOURS,
        ),
        nulls.neighbourhoods("local_anisotropy"),
    ),
    "cosine_centred": Metric(
        cosine_centred,
        MetricText(
            "Mean cosine about the mean",
            meaning="Mean cosine over all pairs of rows after "
            "the mean row is subtracted: about 0 if a common shift explains the whole cone.",
            null="isotropic rows",
            missing="fewer than two rows differ from their mean",
        ),
        nulls.centred_cosine,
    ),
    "mean_query_share": Metric(
        mean_query_share,
        MetricText(
            "Share of the mean query in the variance of scores",
            meaning="Share of the variance of scores that comes from the mean query: 1 if every "
            "query prefers the same keys.",
            null="queries with mean 0",
            missing="the scores of every query are the same for all keys that it sees",
        ),
        nulls.mean_query_share,
    ),
    "score_mean": Metric(
        score_mean,
        MetricText(
            "Mean score",
            meaning="Mean score of queries and the keys that they see.",
            missing="no sampled query sees a key",
        ),
    ),
    "score_spread": Metric(
        score_spread,
        MetricText(
            "Spread of scores",
            meaning="Spread of a query's scores over the keys that it "
            "sees: what can sharpen attention.",
            missing=_NO_TWO_KEYS,
        ),
    ),
}

_BUNDLED = {name: as_metric(name, one) for name, one in (METRICS | MORE_METRICS).items()}
Metric.bundled = _BUNDLED
_FUNCTIONS = {id(one.function) for one in _BUNDLED.values()}  # user functions may be unhashable


def is_bundled(metric: Metric) -> bool:
    """Whether a metric is geomon's own, and so may be called in several threads at once."""
    return id(metric.function) in _FUNCTIONS


def check_metrics(
    metrics: Mapping[str, Callable[..., Any]] | Sequence[str],
) -> dict[str, Metric]:
    """Return metrics by name, after checking every name and every view that a metric reads.

    Args:
        metrics: Metrics or functions of views by name, or names of metrics as for `select`.

    Raises:
        ValueError: If metrics are missing, if a name cannot be used in a tag or is unknown, or if
            a view is unknown.
        TypeError: If it is neither a mapping from names to functions nor a sequence of names.
    """
    named = isinstance(metrics, Sequence) and not isinstance(metrics, str)
    if named and all(isinstance(name, str) for name in metrics):
        metrics = select(*metrics)
    if not isinstance(metrics, Mapping):
        advice = f" (write [{metrics!r}])" if isinstance(metrics, str) else ""
        raise TypeError(
            "metrics must be a dict from names to functions, or a list of names, got "
            f"{type(metrics).__name__}{advice}: choose by name, "
            '["anisotropy", "twonn"], or add your own with METRICS | {"name": function}'
        )
    if not metrics:
        raise ValueError("metrics is empty: pass at least one, or leave the default, METRICS")
    return {name: _check(name, function) for name, function in metrics.items()}


def select(*names: str) -> dict[str, Callable[..., Any]]:
    """Return the named metrics of `METRICS` and `MORE_METRICS`.

    Args:
        names: Names of metrics.

    Raises:
        ValueError: If a name is not a metric; the message suggests similar names.

    Example:
        >>> list(select("anisotropy", "twonn"))
        ['anisotropy', 'twonn']
    """
    unknown = [name for name in names if name not in _BUNDLED]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), _BUNDLED, n=3, cutoff=0.5)
        advice = f" (did you mean {_quoted(close)}?)" if close else ""
        raise ValueError(
            f"no metric is called {_quoted(unknown)}{advice}: `geomon metrics` lists all of them"
        )
    return {name: _BUNDLED[name] for name in names}


def _check(name: str, function: Callable[..., Any]) -> Metric:
    """Check the name of a metric and the views that it reads."""
    if not isinstance(name, str) or not name or "/" in name or name in tags.OF_RUN:
        raise ValueError(
            f"{name!r} cannot name a metric: expected a word without '/', other than "
            f"{_quoted(list(tags.OF_RUN))} (tags are built from it)"
        )
    if not callable(function):
        raise TypeError(f"metric '{name}' is {function!r}: expected a function of views")
    metric = as_metric(name, function)
    unknown = [view for view in metric.reads if not is_view(view)]
    if unknown or not metric.reads:
        views = ", ".join(filter(is_view, [*CAPTURED, *DERIVED]))
        raise ValueError(
            f"metric '{name}' asks for {_quoted(unknown)}, which is not a view; there are {views}"
            if unknown
            else f"metric '{name}' reads no view: name at least one as a parameter without a "
            f"default: {views}"
        )
    return metric


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
