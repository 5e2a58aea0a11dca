"""What section 4 of the paper says of a block under a common bias, and what was measured.

Each assertion is decided for the block of the paper (norms after the sublayers) and for the
pre-norm block, and the main ones for trained blocks too.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from geomon.kernels.baselines import isotropic_anisotropy
from recipes.bias_drift.block import Kind
from recipes.bias_drift.series import INPUT, OUTPUT, Series
from recipes.study import Claim

_PAPER = "2401.12143"
_COMMAND = "make bias_drift"
_PICTURE = "docs/pictures/bias_drift.png"
_NAMES = {"post_norm": "post-norm block", "pre_norm": "pre-norm block"}
# A bias up to which "the effect is not very important": twice the norm of an embedding.
_LOW = 1.0


class Assertion(NamedTuple):
    """One assertion of the paper, and the number that decides it.

    Attributes:
        name: Name of the claim, without that of the block.
        asserts: What is asserted.
        published: What the paper shows.
        source: Section or figure.
        quantity: What is measured.
        measure: Computes it from a series.
        above: Number that it must exceed; None for none.
        below: Number that it must stay under; None for none.
        after_training: Whether it is asked of trained blocks too.
    """

    name: str
    asserts: str
    published: str
    source: str
    quantity: str
    measure: Callable[[Series], float]
    above: float | None = None
    below: float | None = None
    after_training: bool = False


def _least_gap(series: Series) -> float:
    """Compute the smallest amount over levels by which the output's mean cosine is higher."""
    pairs = zip(series.values("cosine", OUTPUT), series.values("cosine", INPUT), strict=True)
    return min(output - entering for output, entering in pairs)


def _least_rise(series: Series) -> float:
    """Compute the smallest change of the norm of the mean output from a level to the next."""
    return min(b - a for a, b in itertools.pairwise(series.values("drift_norm", OUTPUT)))


def _meeting(series: Series) -> float:
    """Compute the least of |E T(x + b)| - E|x + b| over levels: below 0 once they have met."""
    pairs = zip(series.values("drift_norm", OUTPUT), series.values("mean_norm", INPUT), strict=True)
    return min(output - entering for output, entering in pairs)


def _away_from_zero(series: Series) -> float:
    """Compute by how much the mean score of a head moves away from 0, mean over heads."""
    by_level = [statistics.fmean(map(abs, heads)) for heads in series.heads("score_mean")]
    return by_level[-1] - by_level[0]


def _positive_share(series: Series) -> float:
    """Compute the share of heads whose mean score is above 0 at the largest bias."""
    return statistics.fmean(value > 0 for value in series.heads("score_mean")[-1])


def _ratio(metric: str, part: str = "") -> Callable[[Series], float]:
    """Return a function that compares a metric at the largest bias with no bias, as a ratio."""

    def ratio(series: Series) -> float:
        values = series.values(metric, part=part)
        return values[-1] / values[0]

    return ratio


def _change(metric: str) -> Callable[[Series], float]:
    """Return a function that subtracts a metric without bias from that at the largest bias."""

    def change(series: Series) -> float:
        values = series.values(metric)
        return values[-1] - values[0]

    return change


def _low_effect(series: Series) -> float:
    """Compute the largest weight of a row at a low bias over that without bias."""
    values = series.values("attention_extremes", part="max")
    return values[series.levels.index(_LOW)] / values[0]


def _at_no_bias(metrics: Sequence[str]) -> Callable[[Series], float]:
    """Return a function that averages metrics without bias."""
    return lambda series: statistics.fmean(series.values(metric)[0] for metric in metrics)


def assertions(tokens: int, head_width: int) -> list[Assertion]:
    """List the assertions of section 4.

    Args:
        tokens: Number of tokens that a reading stands on.
        head_width: Width of one head.
    """
    # Mean over the pairs of n isotropic rows: its deviation is sqrt(2 / width) / n.
    chance = 3 * math.sqrt(2 / head_width) / tokens
    null = isotropic_anisotropy(tokens, head_width)
    over = "at the largest bias over that without bias"
    return [
        Assertion(
            "output_cosine_above_input",
            "The outputs' mean cosine is higher than the inputs', no matter the bias.",
            "slightly higher at every bias", "figure 6, section 4.2",
            "smallest difference of both mean cosines over all levels of bias",
            _least_gap, above=0.0, after_training=True,
        ),
        Assertion(
            "norm_of_mean_output_rises",
            "The norm of the average output rises with the norm of the bias.",
            "rises", "figure 6, section 4.2",
            "smallest change of |E T(x + b)| from one level of bias to the next",
            _least_rise, above=0.0,
        ),
        Assertion(
            "norm_has_a_fixed_point",
            "The norm of the average output meets the norm of the inputs at some bias.",
            "they meet at a norm like that of trained hidden states", "figure 6, section 4.2",
            "least |E T(x + b)| - E|x + b| over levels of bias, below 0 once they have met",
            _meeting, below=0.0,
        ),
        Assertion(
            "scores_leave_zero",
            "Scores before the softmax move away from zero as the bias grows.",
            "histograms move away from 0", "figure 7, section 4.3",
            "mean over heads of |mean score|, at the largest bias minus that without bias",
            _away_from_zero, above=0.0,
        ),
        Assertion(
            "sign_of_scores_depends_on_the_draw",
            "Some initialisations and directions of the bias raise the scores, others lower them.",
            "other draws led to a general increase instead", "caption of figure 7",
            "share of heads whose mean score is above 0 at the largest bias",
            _positive_share, above=0.0, below=1.0,
        ),
        Assertion(
            "score_spread_grows",
            "The variance of a query's scores over the keys grows with the bias.",
            "biased inputs increase the variance of the scores", "section 6",
            f"spread of scores over keys (`score_spread`) {over}",
            _ratio("score_spread"), above=1.0, after_training=True,
        ),
        Assertion(
            "queries_and_keys_lengthen",
            "The norms of queries and keys grow with the bias.",
            "grow", "figure 8, section 4.3",
            f"mean norm of a query {over}",
            _ratio("query_norm"), above=1.0,
        ),
        Assertion(
            "queries_and_keys_cosine_without_bias",
            "Queries and keys are anisotropic without any bias: mean cosine.",
            "above 0 at no bias", "figure 8, section 4.3",
            f"mean cosine of queries and of keys by head, against 3 deviations of it by chance, "
            f"{chance:.1e}",
            _at_no_bias(("query_cosine", "key_cosine")), above=chance,
        ),
        Assertion(
            "queries_and_keys_variance_without_bias",
            "Queries and keys are anisotropic without any bias: share of variance.",
            "said of their distribution; drawn as a mean cosine", "figure 8, section 4.3",
            f"share of variance along the first direction by head, against that of isotropic rows, "
            f"{null:.4f}",
            _at_no_bias(("query_anisotropy", "key_anisotropy")), above=null,
        ),
        Assertion(
            "row_maximum_rises",
            "The largest weight of a row rises with the bias.",
            "rises", "figure 9, section 4.4",
            f"mean largest weight of a row {over}",
            _ratio("attention_extremes", "max"), above=1.0,
        ),
        Assertion(
            "row_minimum_falls",
            "The smallest weight of a row falls with the bias.",
            "falls", "figure 9, section 4.4",
            f"mean smallest weight of a row {over}",
            _ratio("attention_extremes", "min"), below=1.0,
        ),
        Assertion(
            "sequence_maximum_rises",
            "The largest weight of a whole sequence rises with the bias.",
            "rises, clearer than by row", "figure 10, section 4.4",
            f"mean largest weight of a sequence {over}",
            _ratio("attention_extremes", "sequence_max"), above=1.0,
        ),
        Assertion(
            "sequence_minimum_falls",
            "The smallest weight of a whole sequence falls with the bias.",
            "falls, clearer than by row", "figure 10, section 4.4",
            f"mean smallest weight of a sequence {over}",
            _ratio("attention_extremes", "sequence_min"), below=1.0,
        ),
        Assertion(
            "weak_at_low_bias",
            "At a low bias the effect on the weights is not very important.",
            "not very important", "section 4.4",
            f"mean largest weight of a row at a bias of {_LOW:g} over that without bias",
            _low_effect, above=0.95, below=1.05,
        ),
        Assertion(
            "entropy_falls",
            "Attention becomes less entropic as the bias grows.",
            "less entropic", "section 4.4",
            "entropy over log(keys) at the largest bias minus that without bias",
            _change("attention_entropy_normalised"), below=0.0, after_training=True,
        ),
    ]  # fmt: skip


def block_claims(
    kind: Kind,
    seeds: Sequence[Sequence[Series]],
    *,
    tokens: int,
    head_width: int,
    trained: bool,
    seconds: float,
    differs: str,
) -> list[Claim]:
    """Decide the assertions for one kind of block.

    Args:
        kind: Kind of the block.
        seeds: Series of all directions, of each seed: one value is the mean over directions.
        tokens: Number of tokens that a reading stands on.
        head_width: Width of one head.
        trained: Whether the blocks are trained ones.
        seconds: Time of the command.
        differs: In which way the run differs from the published one.
    """
    state = "_trained" * trained
    largest = max(seeds[0][0].levels)
    return [
        Claim(
            name=f"{one.name}{state}_{kind}",
            asserts=f"{one.asserts} ({'Trained ' * trained}{_NAMES[kind]})",
            published=one.published if kind == "post_norm" and not trained else "not shown",
            source=f"{_PAPER}, {one.source}",
            command=_COMMAND,
            quantity=f"{one.quantity}; bias up to {largest:g}",
            values=tuple(statistics.fmean(map(one.measure, directions)) for directions in seeds),
            above=one.above,
            below=one.below,
            picture=_PICTURE,
            differs=differs,
            seconds=seconds,
        )
        for one in assertions(tokens, head_width)
        if one.after_training or not trained
    ]
