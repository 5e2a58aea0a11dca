"""Claims in section 4 of the paper on a block with a common input bias, and their measures."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from geomon import Reading
from geomon.kernels.baselines import isotropic_anisotropy
from recipes.study.claim import Claim

# The layers before and after the block.
INPUT, OUTPUT = 0, 1
# Blocks that are not in the paper.
_NAMES = {
    "pre_norm": "pre-norm",
    "post_norm_trained": "post-norm, trained",
    "pre_norm_trained": "pre-norm, trained",
}
# A bias up to which "the effect is not very important": twice the norm of an embedding.
_LOW = 1.0


@dataclass(frozen=True)
class Series:
    """Readings of a block for one direction of the bias.

    Attributes:
        levels: Norms of the bias, ascending from 0.
        readings: One reading per level.
    """

    levels: Sequence[float]
    readings: Sequence[Reading]

    def values(self, metric: str, layer: int = OUTPUT, part: str = "") -> list[float]:
        """List the values of a metric by level."""
        return [reading.column(metric, part).at(layer) for reading in self.readings]

    def heads(self, metric: str) -> list[list[float]]:
        """List the values of all heads by level."""
        return [list(reading.column(metric).by_head().values()) for reading in self.readings]


def least_gain(series: Series) -> float:
    """Return the smallest gain of mean cosine from input to output over levels.

    The cosines of input and output both end at 1 as the bias grows: their plain difference is then
    near 0 whatever the block does, and has the same sign.

    Returns:
        The smallest gain over levels.
    """
    pairs = zip(series.values("cosine", OUTPUT), series.values("cosine", INPUT), strict=True)
    return min((output - entering) / (1 - entering) for output, entering in pairs)


def _least_rise(series: Series) -> float:
    """Return the smallest change in the norm of the mean output between adjacent levels."""
    return min(b - a for a, b in itertools.pairwise(series.values("drift_norm")))


def _away_from_zero(series: Series) -> float:
    """Return how far the mean score of a head moves away from 0, on average over heads."""
    by_level = [statistics.fmean(map(abs, heads)) for heads in series.heads("score_mean")]
    return by_level[-1] - by_level[0]


def _ratio(metric: str, part: str = "") -> Callable[[Series], float]:
    """Return a function that divides a metric at the largest bias by its value without bias."""
    return lambda series: series.values(metric, part=part)[-1] / series.values(metric, part=part)[0]


def _low_effect(series: Series) -> float:
    """Return the largest weight of a row at a low bias, relative to no bias."""
    values = series.values("attention_extremes", part="max")
    return values[list(series.levels).index(_LOW)] / values[0]


def _entropy_change(series: Series) -> float:
    values = series.values("attention_entropy_normalised")
    return values[-1] - values[0]


def _without_bias(*metrics: str) -> Callable[[Series], float]:
    """Return a function that averages metrics without bias."""
    return lambda series: statistics.fmean(series.values(metric)[0] for metric in metrics)


def questions(tokens: int, head_width: int) -> list[tuple[bool, Claim, Callable[[Series], float]]]:
    """List the claims of section 4 on a block, each with its measure for one direction of the bias.

    One claim is left out: that the norm of the average output meets the norm of the inputs. The
    output of a post-norm block has a mean norm of sqrt(width), and a biased input exceeds it.

    Returns:
        Tuples of whether the claim is also tested on blocks that are not in the paper, the claim,
        and its measure.
    """
    # Mean over the pairs of n isotropic rows: its deviation is sqrt(2 / width) / n.
    chance = 3 * math.sqrt(2 / head_width) / tokens
    null = isotropic_anisotropy(tokens, head_width)
    over = "largest bias over none"

    def ask(name: str, asserts: str, place: str, quantity: str, **fields: object) -> Claim:
        return Claim(name, asserts, f"2401.12143, {place}", quantity, **fields)  # type: ignore[arg-type]

    extremes = [
        (False, ask(f"{part}_{verb}", f"The {words} {verb} with the bias.",
                                 f"4.4, {place}", over, **{limit: 1.0}),
         _ratio("attention_extremes", part))
        for part, words, verb, limit, place in (
            ("max", "largest weight of a row", "rises", "above", "fig. 9"),
            ("min", "smallest weight of a row", "falls", "below", "fig. 9"),
            ("sequence_max", "largest weight of a whole sequence", "rises", "above", "fig. 10"),
            ("sequence_min", "smallest weight of a whole sequence", "falls", "below", "fig. 10"),
        )
    ]  # fmt: skip
    return [
        (True, ask("output_cosine_above_input",
                   "The outputs' mean cosine is higher than the inputs' at any bias.",
                   "4.2, fig. 6",
                   "smallest difference, as a share of what is left to 1", above=0),
         least_gain),
        (False, ask("norm_of_mean_output_rises",
                    "The norm of the average output rises with the bias.",
                    "4.2, fig. 6", "smallest change between levels", above=0),
         _least_rise),
        (False, ask("scores_leave_zero", "Scores move away from zero as the bias grows.",
                   "4.3, fig. 7", "size of a head's mean score, largest bias less none", above=0),
         _away_from_zero),
        (True, ask("score_spread_grows", "The variance of the scores grows with the bias.", "6",
                   f"spread over the keys of a query, {over}", above=1), _ratio("score_spread")),
        (False, ask("queries_and_keys_lengthen", "Queries grow in norm with the bias.",
                   "4.3, fig. 8 b", f"mean norm, {over}", above=1), _ratio("query_norm")),
        (False, ask("queries_and_keys_cosine_without_bias",
                    "Queries and keys are anisotropic without bias.", "4.3, fig. 8 a",
                    "mean cosine; 3 deviations of chance", above=chance,
                    chosen="limit"),
         _without_bias("query_cosine", "key_cosine")),
        (False, ask("queries_and_keys_variance_without_bias",
                    "They are, by share of variance.", "4.3",
                    "anisotropy; limit: isotropic rows", above=null, ours=True),
         _without_bias("query_anisotropy", "key_anisotropy")),
        *extremes,
        (False, ask("weak_at_low_bias",
                    "At a low bias the effect is not very important.", "4.4",
                    f"largest weight of a row, bias of {_LOW:g} over none", above=0.95, below=1.05,
                    chosen="limits"), _low_effect),
        (True, ask("entropy_falls", "Attention becomes less entropic as the bias grows.", "4.4",
                   "entropy over log(keys), largest bias less none", below=0), _entropy_change),
    ]  # fmt: skip


def bias_claims(
    kind: str, seeds: Sequence[Sequence[Series]], tokens: int, head_width: int
) -> Iterable[Claim]:
    """Measure the claims for one kind of block; claims on blocks outside the paper are ours."""
    is_theirs = kind == "post_norm"
    for elsewhere, claim, measure in questions(tokens, head_width):
        if is_theirs or elsewhere:
            yield replace(
                claim, name=f"{claim.name}_{kind}", ours=claim.ours or not is_theirs,
                variant=_NAMES.get(kind, ""),
                values=tuple(statistics.fmean(map(measure, directions)) for directions in seeds),
            )  # fmt: skip
    if is_theirs:
        signs = [
            float(series.values("score_mean")[-1] > series.values("score_mean")[0])
            for directions in seeds for series in directions
        ]  # fmt: skip
        yield Claim(
            f"sign_of_scores_depends_on_the_draw_{kind}",
            "Some draws of weights and bias raise the scores, others lower them.",
            "2401.12143, fig. 7",
            "share of draws whose mean score rises",
            tuple(signs), above=0.1, below=0.9, chosen="limits", repeated="draw", counted=True,
        )  # fmt: skip
