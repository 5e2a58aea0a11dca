"""The table of metrics: a plain dict from a name to a kernel.

A metric is a function whose required parameter names say which views it reads
(`geomon.metrics.views`). It returns a scalar, a vector [heads], or a dict of named parts in which
"" is the value itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from geomon.capture.snapshot import CAPTURED
from geomon.kernels import dimension
from geomon.kernels.angles import (
    SequenceCosines,
    cosine_centred,
    leading_share,
    qk_cosine,
    qk_cosine_concatenated,
    qk_dot,
)
from geomon.kernels.attention import (
    attention_entropy,
    attention_entropy_normalised,
    attention_max,
    attention_median,
    attention_min,
    attention_sequence_max,
    attention_sequence_median,
    attention_sequence_min,
    attention_sink,
)
from geomon.kernels.baselines import gaussian_like
from geomon.kernels.frequency import CLASSES, moments_by_frequency
from geomon.kernels.half_samples import HeadScatter
from geomon.kernels.neighbourhoods import LocalIsotropy
from geomon.kernels.neighbours import nearest
from geomon.kernels.scores import mean_query_share, score_mean, score_spread
from geomon.kernels.spectrum_summary import Estimate, SpectrumSummary
from geomon.kernels.token_types import TokenTypes
from geomon.metrics.between_layers import neighbour_overlap
from geomon.metrics.between_readings import neighbour_overlap_in_time
from geomon.metrics.last_tokens import at_last
from geomon.metrics.views import DERIVED, NEAR, is_view, parameters
from geomon.record import tags

Metric = Callable[..., Any]


def anisotropy(spectrum_summary: SpectrumSummary) -> dict[str, Tensor]:
    """Share of the variance along the leading direction.

    Part `error`, in wide layers alone: half the width of a 95 % interval of the estimate, for the
    value that all eigenvalues give.
    """
    return _with_error(spectrum_summary.anisotropy)


def anisotropy_no_sinks(ordinary_summary: SpectrumSummary) -> dict[str, Tensor]:
    """Anisotropy without the few rows of massive norm, which alone can drive it to 1."""
    return _with_error(ordinary_summary.anisotropy)


def effective_rank(spectrum_summary: SpectrumSummary) -> dict[str, Tensor]:
    """Number of directions that the variance fills: exp of the entropy of its shares.

    Part `error`: as in `anisotropy`.
    """
    return _with_error(spectrum_summary.effective_rank)


def participation_ratio(spectrum_summary: SpectrumSummary) -> dict[str, Tensor]:
    """Number of directions that the variance fills: 1 over the sum of its squared shares.

    Part `error`: as in `anisotropy`.
    """
    return _with_error(spectrum_summary.participation_ratio)


def _with_error(estimate: Estimate) -> dict[str, Tensor]:
    parts = {"": estimate.value}
    return parts if estimate.error is None else parts | {"error": estimate.error}


def cosine(angle: Tensor) -> Tensor:
    """Mean cosine over all pairs of rows."""
    return angle


def mean_square_norm(mean_square: Tensor) -> Tensor:
    """Mean squared norm of the rows."""
    return mean_square


def sink_share(sink_variance: float) -> float:
    """Share of the variance that the few rows of massive norm carry; 0 where there are none."""
    return sink_variance


def drift_norm(drift: Tensor) -> Tensor:
    """Norm of the mean row."""
    return drift


def within_variance(within: Tensor) -> Tensor:
    """Variance around the mean of each row's token type, corrected for few tokens of a type."""
    return within


def variance(total_variance: Tensor) -> Tensor:
    """Mean squared distance from the mean row."""
    return total_variance


def between_variance(total_variance: Tensor, within: Tensor) -> Tensor:
    """Variance of the means of token types: what `variance` has beyond `within_variance`."""
    return total_variance - within


def norm_variance_slope(token_types: TokenTypes) -> dict[str, Tensor]:
    """Trade-off of norm and variance: slope of V_t on M_t over token types.

    Parts: `r_squared`, `types` (how many), `coverage` (share of the tokens that are of them),
    `q_variation` (coefficient of variation of Q_t: where it is small, the slope is -1 by identity).
    """
    fit = token_types.norm_variance_slope()
    parts = {"": fit.slope, "r_squared": fit.r_squared, "types": fit.types}
    return {**parts, "coverage": fit.coverage, "q_variation": fit.q_variation}


def mean_share(drift: Tensor, total_variance: Tensor) -> Tensor:
    """Share of the mean square norm that the common mean has, M / Q with Q = M + V."""
    return drift.square() / (drift.square() + total_variance)


def within_share(drift: Tensor, total_variance: Tensor, within: Tensor) -> dict[str, Tensor]:
    """Share of the variance that is within token types, V_W / V: what context does to tokens.

    Part `of_square`: V_W / Q. M / Q, V_W / Q and V_B / Q sum to 1.
    """
    square = drift.square() + total_variance
    return {"": within / total_variance, "of_square": within / square}


def between_share(drift: Tensor, total_variance: Tensor, within: Tensor) -> dict[str, Tensor]:
    """Share of the variance that is between token types, V_B / V = 1 - V_W / V.

    Part `of_square`: V_B / Q.
    """
    between, square = total_variance - within, drift.square() + total_variance
    return {"": between / total_variance, "of_square": between / square}


def cosine_within(sequence_cosines: SequenceCosines) -> dict[str, Tensor | float]:
    """Mean cosine over all pairs of rows of one sequence, with the number of sequences."""
    return {"": sequence_cosines.within, "sequences": len(sequence_cosines.own)}


def cosine_between(sequence_cosines: SequenceCosines) -> dict[str, Tensor | float]:
    """Mean cosine over all pairs of rows of two sequences, with the number of sequences."""
    return {"": sequence_cosines.between, "sequences": len(sequence_cosines.own)}


def max_logit(max_logits: Tensor) -> Tensor:
    """Largest score before the softmax over all rows and visible keys, per head.

    Scaled, capped and biased as in the softmax. Scores that grow without bound announce an
    instability.
    """
    return max_logits


def query_mean_norm(mean_query: Tensor) -> Tensor:
    """Norm of the mean query, per head."""
    return mean_query.norm(dim=1)


def key_mean_norm(mean_key: Tensor) -> Tensor:
    """Norm of the mean key, per key head."""
    return mean_key.norm(dim=1)


def query_cosine(query_angles: Tensor) -> Tensor:
    """Mean cosine over all pairs of queries, per head."""
    return query_angles


def key_cosine(key_angles: Tensor) -> Tensor:
    """Mean cosine over all pairs of keys, per key head."""
    return key_angles


def query_anisotropy(query_scatter: HeadScatter) -> Tensor:
    """Share of the variance of queries along their first direction, per head."""
    return leading_share(query_scatter.total)


def key_anisotropy(key_scatter: HeadScatter) -> Tensor:
    """Share of the variance of keys along their first direction, per key head."""
    return leading_share(key_scatter.total)


def twonn(neighbours: Tensor, duplicates: float, rounding: float) -> dict[str, Tensor | float]:
    """TwoNN on all rows (the paper's), with what it stands on.

    Parts: `censored`, the estimate by maximum likelihood; `n` rows, the share of `duplicates` left
    out, `rounding` over the nearest distance.
    """
    fit, censored = dimension.twonn_and_censored(neighbours)
    return {
        "": fit,
        "censored": censored.value,
        "n": len(neighbours),
        "duplicates": duplicates,
        "rounding": rounding,
    }


def twonn_gaussian(spectrum: Tensor, unique_rows: Tensor) -> Tensor:
    """TwoNN of a Gaussian sample with the layer's covariance and number of rows: its null.

    What `twonn` has below it is structure beyond the second moments.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    sample = gaussian_like(spectrum, len(unique_rows), generator)
    return dimension.twonn(nearest(sample, k=2).distances)


def twonn_distinct(distinct_neighbours: Tensor, repeated: float) -> dict[str, Tensor | float]:
    """TwoNN on one row per (token id, position), with the rows left and the share left out."""
    fit, censored = dimension.twonn_and_censored(distinct_neighbours)
    return {
        "": fit,
        "censored": censored.value,
        "n": len(distinct_neighbours),
        "repeated": repeated,
    }


def gride(neighbours: Tensor, far_neighbours: Tensor) -> dict[str, Tensor]:
    """Intrinsic dimension at each scale: parts k1, k2, k4, ...; large scales on fewer rows."""
    near = [k for k in dimension.SCALES if 2 * k <= NEAR]
    far = [k for k in dimension.SCALES if 2 * k > NEAR]
    estimates = [*dimension.gride(neighbours, near), *dimension.gride(far_neighbours, far)]
    return {f"k{k}": value for k, value in zip([*near, *far], estimates, strict=True)}


def alpha(spectrum_summary: SpectrumSummary) -> dict[str, Tensor]:
    """Decay of the spectrum: minus the slope of log eigenvalue on log rank, ranks 11 to 100.

    Part `r_squared`: how well a power law fits; part `error`: as in `anisotropy`.
    """
    parts = _with_error(spectrum_summary.alpha)
    return parts | {"r_squared": spectrum_summary.r_squared}


def local_dimension(local_dimensions: Tensor) -> dict[str, Tensor | float]:
    """Mean over tokens of TwoNN on the 64 nearest rows of each, copies taken out.

    Parts: `spread`, the standard deviation over tokens; `n`, how many tokens were looked around.
    """
    spread = local_dimensions.std() if len(local_dimensions) > 1 else torch.nan
    return {"": local_dimensions.mean(), "spread": spread, "n": len(local_dimensions)}


def local_anisotropy(local_shapes: LocalIsotropy) -> Tensor:
    """Mean over tokens of the anisotropy of the 64 nearest rows of each about their mean."""
    return local_shapes.anisotropy.mean()


def local_cosine(local_shapes: LocalIsotropy) -> Tensor:
    """Mean over tokens of the mean cosine of the 64 nearest rows of each about their mean."""
    return local_shapes.cosine.mean()


def token_frequency(hidden: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """Norm, M, V and Q of rare, middle and frequent tokens, each about a third of the rows.

    Parts for each class, `rare/norm` say: `norm` (mean |x|), `square_of_mean` (M), `variance` (V),
    `mean_square_norm` (Q = M + V), `rows` and `types` (how many).
    """
    found = zip(CLASSES, moments_by_frequency(hidden, token_ids), strict=True)
    return {
        f"{name}/{part}": value
        for name, moments in found
        for part, value in moments._asdict().items()
    }


METRICS: dict[str, Metric] = {
    "anisotropy": anisotropy,
    "anisotropy_no_sinks": anisotropy_no_sinks,
    "sink_share": sink_share,
    "effective_rank": effective_rank,
    "participation_ratio": participation_ratio,
    "cosine": cosine,
    "drift_norm": drift_norm,
    "variance": variance,
    "mean_square_norm": mean_square_norm,
    "within_variance": within_variance,
    "between_variance": between_variance,
    "norm_variance_slope": norm_variance_slope,
    "twonn": twonn,
    "twonn_distinct": twonn_distinct,
    "gride": gride,
    "qk_cosine": qk_cosine,
    "qk_dot": qk_dot,
    "query_mean_norm": query_mean_norm,
    "key_mean_norm": key_mean_norm,
    "query_cosine": query_cosine,
    "key_cosine": key_cosine,
    "query_anisotropy": query_anisotropy,
    "key_anisotropy": key_anisotropy,
    "attention_entropy": attention_entropy,
    "attention_entropy_normalised": attention_entropy_normalised,
    "attention_max": attention_max,
    "attention_min": attention_min,
    "attention_sink": attention_sink,
    "max_logit": max_logit,
    "mean_share": mean_share,
    "within_share": within_share,
    "between_share": between_share,
    "qk_cosine_concatenated": qk_cosine_concatenated,
}

# Sequences from which the spectrum of their last tokens means anything. With 64 rows of 768 columns
# whose eigenvalues fall as 1 / rank, alpha comes out as 0.8 in place of 1.
_ENOUGH_SEQUENCES = 64

# Metrics that cost as much as several others: METRICS | MORE_METRICS has them all.
MORE_METRICS: dict[str, Metric] = {
    "attention_median": attention_median,
    "twonn_gaussian": twonn_gaussian,
    "alpha": alpha,
    "alpha_last": at_last(alpha, at_least=_ENOUGH_SEQUENCES),
    "effective_rank_last": at_last(effective_rank, at_least=_ENOUGH_SEQUENCES),
    "local_dimension": local_dimension,
    "local_anisotropy": local_anisotropy,
    "local_cosine": local_cosine,
    "neighbour_overlap": neighbour_overlap,
    "neighbour_overlap_in_time": neighbour_overlap_in_time,
    "cosine_centred": cosine_centred,
    "cosine_within": cosine_within,
    "cosine_between": cosine_between,
    "token_frequency": token_frequency,
    "mean_query_share": mean_query_share,
    "score_mean": score_mean,
    "score_spread": score_spread,
    "attention_sequence_max": attention_sequence_max,
    "attention_sequence_median": attention_sequence_median,
    "attention_sequence_min": attention_sequence_min,
}


def is_bundled(metric: Metric) -> bool:
    """Whether a metric is one that geomon brings, and so may be called in several threads at once.

    Args:
        metric: A function of views.
    """
    return any(metric is known for known in (METRICS | MORE_METRICS).values())


def check_metrics(metrics: Mapping[str, Metric] | Sequence[str]) -> dict[str, Metric]:
    """A dict of `metrics` after checking every name and every view that it asks for.

    Args:
        metrics: Functions by name, or names of metrics as `select` takes them.

    Raises:
        ValueError: No metric at all, a name that cannot be a tag or is none of a metric, or an
            unknown view.
        TypeError: Neither a mapping from names to functions nor a sequence of names.
    """
    named = isinstance(metrics, Sequence) and not isinstance(metrics, str)
    if named and all(isinstance(name, str) for name in metrics):
        metrics = select(*metrics)
    if not isinstance(metrics, Mapping):
        advice = f" (write [{metrics!r}])" if isinstance(metrics, str) else ""
        raise TypeError(
            "metrics is a dict from names to functions, or a list of names, got "
            f"{type(metrics).__name__}{advice}: choose by name, "
            '["anisotropy", "twonn"], or add your own with METRICS | {"name": function}'
        )
    if not metrics:
        raise ValueError("metrics is empty: give at least one, or leave the default, METRICS")
    for name, function in metrics.items():
        _check(name, function)
    return dict(metrics)


def select(*names: str) -> dict[str, Metric]:
    """The named metrics of `METRICS` and `MORE_METRICS`.

    Raises:
        ValueError: A name that is not a metric; the message lists those that are.

    Example:
        >>> list(select("anisotropy", "twonn"))
        ['anisotropy', 'twonn']
    """
    known = METRICS | MORE_METRICS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no metric is called {_quoted(unknown)}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def _check(name: str, function: Metric) -> None:
    if not isinstance(name, str) or not name or "/" in name or name in tags.OF_RUN:
        raise ValueError(
            f"{name!r} cannot name a metric: expected a word without '/', other than "
            f"{_quoted(list(tags.OF_RUN))} (tags are built from it)"
        )
    if not callable(function):
        raise TypeError(f"metric '{name}' is {function!r}: expected a function of views")
    _check_views(f"metric '{name}'", function)
    differences = getattr(function, "differences", None)
    if differences is not None:
        if not callable(differences):
            raise TypeError(
                f"the attribute 'differences' of metric '{name}' is {differences!r}: expected a "
                "function of views that compares the metric on halves"
            )
        _check_views(f"the interval of metric '{name}'", differences)


def _check_views(subject: str, function: Metric) -> None:
    asked = parameters(function)
    unknown = [view for view in asked if not is_view(view)]
    if unknown:
        raise ValueError(
            f"{subject} asks for {_quoted(unknown)}, which is no view; there are "
            f"{', '.join([*CAPTURED, *DERIVED])}, and last_... of those that are made of rows"
        )
    if not asked:
        raise ValueError(
            f"{subject} reads no view: name at least one as a parameter without a default, "
            f"of {', '.join([*CAPTURED, *DERIVED])}"
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
