"""Claims of four papers on decoders, each with the number that decides it.

Not asked, since no training could bring it out otherwise: that the squared norm of the mean and the
variance add up to the mean squared norm; the mean cosine without the mean row; the mean cosine of
64 neighbours about their own mean, which is -1 / 63.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

import numpy as np

from geomon.kernels.baselines import isotropic_cosine_quantile
from recipes.study.claim import Claim, Question
from recipes.study.history import (
    NORMED,
    QUARTER,
    Head,
    History,
    drift_and_cosine,
    gain,
    growth,
    onset,
    over_heads,
    over_layers,
    with_depth,
)

_SHAPE, _GODEY, _NORM, _PHASES = "2311.05928", "2401.12143", "2409.11253", "2509.23024"
# Share of two random directions beyond their 95 % point, on one side.
_BY_CHANCE = 0.025
# The paper's estimator as its text states it comes first; the others are ours.
_DIMENSIONS = [
    ("twonn_discard_0", "twonn/mean/discard_0", ""),
    ("twonn_discard_80", "twonn/mean/discard_80", "80 % dropped, their code"),
    ("twonn", "twonn/mean", "10 % dropped"),
    ("twonn_distinct", "twonn_distinct/mean", "distinct rows"),
    *((f"gride_k{k}", f"gride/mean/k{k}", f"Gride k={k}") for k in (1, 2, 4, 8, 16, 32)),
]  # fmt: skip
_SLOPE = "norm_variance_slope"


def shape_questions() -> list[Question]:
    """List what Razzhigaev et al. assert of anisotropy and intrinsic dimension."""
    source = f"{_SHAPE}, 4.2, fig. 3, 4"
    anisotropy: list[Question] = [
        (Claim("anisotropy_grows", "The anisotropy of decoders grows during training.", source,
               "end less step 0", above=0),
         gain(partial(over_layers, metric="anisotropy"))),
        (Claim("anisotropy_grows_at_every_layer", "It grows at every layer.", source,
               "smallest over layers", above=0, ours=True),
         lambda h: min(growth(h, "anisotropy"))),
        (Claim("anisotropy_stabilises", "The growth is followed by stabilisation.", source,
               "last quarter of the steps less third, over the range",
               above=-0.1, below=0.1, chosen="quarters and limit"),
         lambda h: h.late_drift("anisotropy/mean")),
    ]  # fmt: skip
    dimension: list[Question] = [
        (Claim(f"{name}_{verb}", f"The intrinsic dimension {words}.", f"{_SHAPE}, 4.3, fig. 2",
               f"relative change over the {window}: TwoNN, no ratio dropped",
               variant=variant, ours=bool(variant), above=above, below=below,
               chosen="" if variant else "window"),
         partial(History.change, tag=tag, begin=begin, end=end))
        for verb, words, window, begin, end, above, below in (
            ("expands", "rises at first", "first quarter", 0, QUARTER, 0, None),
            ("compresses", "declines towards the end", "other three", QUARTER, 1, None, 0),
        )
        for name, tag, variant in _DIMENSIONS
    ]  # fmt: skip
    local: list[Question] = [
        (Claim("neighbourhoods_isotropic", "Neighbourhoods are isotropic (3.1 cites it).",
               f"{_SHAPE}, 3.1", "anisotropy of 64 nearest rows over noise",
               below=2, ours=True),
         partial(_over_noise, metric="local_anisotropy")),
    ]  # fmt: skip
    return [*anisotropy, *dimension, *local]


def attention_questions(width: int, head_width: int) -> list[Question]:
    """List what Godey et al. assert of cosines, drift, queries, keys and attention."""
    size = partial(over_heads, metric="qk_cosine", size=True)
    # |cos| of two random directions is below this with a probability of 95 %.
    chance = isotropic_cosine_quantile(head_width, 0.975)

    def ask(name: str, asserts: str, place: str, quantity: str, **fields: object) -> Claim:
        return Claim(name, asserts, f"{_GODEY}, {place}", quantity, **fields)  # type: ignore[arg-type]

    onset_words = "share of the steps before heads that end {} stay beyond chance".format
    return [
        (ask("characters_are_anisotropic",
             "Character models are anisotropic in at least one layer.", "3.1, fig. 2",
             "largest mean cosine over layers; limit: appendix B",
             above=isotropic_cosine_quantile(width)),
         lambda h: over_layers(h.last, "cosine", max)),
        (ask("isotropic_without_the_mean",
             "Without their mean, rows are nearly isotropic (2 cites it).", "2",
             "anisotropy about the mean over noise", below=2, ours=True),
         partial(_over_noise, metric="anisotropy")),
        *(
            question
            for test, place in (("spearman", "3.3, fig. 5"), ("pearson", "appendix A, fig. 16"))
            for question in (
                (ask(f"drift_goes_with_cosine_{test}_p",
                     "In character models drift and cosine correlate (all but two).", place,
                     f"exact p, {test.title()}, over layers", below=0.05),
                 lambda h, test=test: drift_and_cosine(h.last, test).p_value),
                (ask(f"drift_goes_with_cosine_{test}",
                     "Layers whose mean is longer have a higher mean cosine.", place,
                     "correlation over layers", variant=test.title(), above=0, ours=True),
                 lambda h, test=test: drift_and_cosine(h.last, test).value),
            )
        ),
        (ask("queries_and_keys_align",
             "Mean queries and mean keys align along training.", "5, fig. 13",
             "size of their cosine, end less step 0", above=0),
         gain(size)),
        (ask("queries_and_keys_beyond_chance",
             "They are more alike than random directions.", "5",
             "size of their cosine less chance", above=0),
         lambda h: size(h.last) - h.last.values["qk_cosine/null_magnitude"]),
        (ask("almost_all_heads_align", "Almost all heads align.", "fig. 13",
             f"share of heads above the 95 % point of chance, {chance:.2f}",
             above=0.9, chosen="limit"),
         lambda h: _share_beyond(h, chance, 1, -1)),
        (ask("first_layers_similar", "In the first layers they drift along a similar direction.",
             "5, fig. 13", "cosine, layer 1", above=0),
         lambda h: over_heads(h.last, "qk_cosine", layers=[1])),
        (ask("last_layers_opposite", "In the last layers their cosine gets negative.",
             "5, fig. 13", "cosine, last layer", below=0),
         lambda h: over_heads(h.last, "qk_cosine", layers=[max(_heads(h))[0]])),
        (ask("some_heads_opposite", "Some heads drift in opposite directions.",
             "5, fig. 12 b", f"share of heads with a cosine below -{chance:.2f}; limit: chance",
             above=_BY_CHANCE),
         lambda h: _share_beyond(h, chance, -1)),
        (ask("similar_heads_align_early",
             "Common directions appear in the first steps (5: one head).", "5",
             onset_words("similar"), below=0.08, repeated="head", ours=True),
         lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, 1)]),
        (ask("opposite_heads_align_late",
             "Opposite ones start after 8 % (5: one head).", "5",
             onset_words("opposite"), above=0.08, repeated="head", ours=True),
         lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, -1)]),
        (ask("dot_product_grows",
             "The product of mean query and mean key grows in size.", "5, fig. 14",
             "size, end less step 0", above=0),
         gain(partial(over_heads, metric="qk_dot", size=True))),
        *(
            (ask(f"{words}_become_anisotropic",
                 "Queries and keys become anisotropic during training.", "5, fig. 11",
                 "mean cosine, end less step 0", variant=words, above=0),
             gain(partial(over_layers, metric=metric)))
            for metric, words in (("query_cosine", "queries"), ("key_cosine", "keys"))
        ),
        (ask("entropy_decays_at_every_layer",
             "The entropy of attention decays in all layers.", "5, fig. 15",
             "end less step 0, largest over layers", below=0),
         lambda h: max(growth(h, "attention_entropy"))),
        (ask("first_layers_sharper",
             "Attention remains sharper in the first layers.", "5, fig. 15",
             "first half of the layers less second", below=0),
         lambda h: over_layers(h.last, "attention_entropy", _first_minus_second_half)),
        # Mean query . mean key itself, the same for all keys, cancels in the softmax.
        (ask("alignment_makes_attention_sharp",
             "The drift of queries is what makes attention sharp.", "5, fig. 14, 15",
             "share of the variance of scores by the mean query alone",
             above=0.5, ours=True),
         lambda h: over_layers(h.last, "mean_query_share")),
    ]  # fmt: skip


def norm_questions() -> list[Question]:
    """List what Yamagiwa and Shimodaira assert of the norm of the mean and the variance.

    Their script draws shares of Q, so that "farther from the origin" is the share of the mean. That
    the layer norm makes the trade-off is nearly an identity: types whose rows all have one length
    have a slope of -1.
    """
    source = f"{_NORM}, abstract"
    slopes = [
        (Claim("norm_trades_for_variance",
               "Token types with a mean nearer to the origin have more variance.", source,
               "slope of variance on squared norm over types", below=0),
         lambda h: over_layers(h.last, _SLOPE)),
        (Claim("trade_off_is_strong", "The trade-off is strong.", source,
               "its R²", above=0.5, chosen="limit"),
         lambda h: h.last.values[f"{_SLOPE}/mean/r_squared"]),
        (Claim("norm_makes_the_trade_off",
               "The layer norm likely makes it (abstract; nearly an identity).", source,
               "slope after the final norm less before it", below=0, ours=True),
         lambda h: (
             h.last.values[f"{_SLOPE}/{NORMED}"]
             - over_layers(h.last, _SLOPE, lambda profile: profile[-1]))),
        (Claim("trade_off_beyond_arithmetic", "It is more than arithmetic makes.",
               source, "slope less that of types assigned at random", below=0, ours=True),
         lambda h: over_layers(h.last, _SLOPE) - over_layers(h.last, f"{_SLOPE}_shuffled")),
    ]  # fmt: skip
    # Variance is within the types or between them: one share falls as the other grows.
    depths = [
        (Claim(name, asserts, source, f"Spearman's correlation of {words} with depth",
               above=0, ours=metric == "drift_norm"),
         lambda h, metric=metric: with_depth(h.last, *metric.split("/")))
        for name, metric, words, asserts in (
            ("mean_moves_away", "variance_shares/mean", "M / Q",
             "In deeper layers the rows are farther from the origin."),
            ("share_within_grows", "variance_shares", "V_W / V",
             "In deeper layers more of the variance is within token types."),
            ("norm_of_mean_grows", "drift_norm", "the norm itself",
             "In deeper layers the mean is longer."),
        )
    ]  # fmt: skip
    return [*slopes, *depths]


def spectral_questions(warmup: float) -> list[Question]:
    """List what Li et al. assert of three phases of the spectrum.

    The paper's phases end at turning points of the curves; here the first phase ends with the
    warm-up and the second with the first quarter, so that no curve chooses its own limits.
    """
    return [
        (Claim(name, f"The {words}.", f"{_PHASES}, abstract",
               f"change of `{metric}_last`, {begin:.0%} to {end:.0%} of the steps",
               above=above, below=below, chosen="window"),
         partial(History.change, tag=f"{metric}_last/{NORMED}", begin=begin, end=end))
        for name, words, metric, begin, end, above, below in (
            ("rank_falls_in_warm_up", "rank collapses in the warm-up", "effective_rank",
             0, warmup, None, 0),
            ("rank_grows_after_it", "rank grows in the second phase", "effective_rank",
             warmup, QUARTER, 0, None),
            ("rank_falls_at_last", "rank falls in the third phase", "effective_rank",
             QUARTER, 1, None, 0),
            ("alpha_grows_at_last", "spectrum decays faster in the third phase", "alpha",
             QUARTER, 1, 0, None),
        )
    ]  # fmt: skip


def stability_claims(seeds: Sequence[History]) -> Iterator[Claim]:
    """Measure whether seeds agree on mean queries and keys; nothing on a single seed.

    Under the null each seed and layer takes its direction by chance, one sign or the other: curves
    of two seeds have no correlation on average, and all seeds end with one sign in 1 layer of
    2^(seeds - 1).
    """
    if len(seeds) > 1:
        source = f"{_GODEY}, appendix D, fig. 23"
        yield Claim(
            "seeds_align_alike",
            "That cosine, heads joined, follows similar trends across seeds.",
            source, "correlation of two seeds' curves",
            tuple(trend_correlations(seeds)), above=0, repeated="layer",
        )  # fmt: skip
        yield Claim(
            "seeds_end_with_one_sign", "It ends with the same sign for all seeds.",
            source, "share of layers in which it does", tuple(one_sign_at_end(seeds)),
            above=0.5 ** (len(seeds) - 1), repeated="layer", counted=True, ours=True,
        )  # fmt: skip


def trend_correlations(seeds: Sequence[History]) -> list[float]:
    """Correlate the curves of the joined cosine between seeds, mean over pairs, for each layer.

    Layers whose curves are not known for all seeds, or do not vary, are left out.
    """
    pairs, found = list(combinations(range(len(seeds)), 2)), []
    for curves in _curves(seeds):
        if all(np.ptp(curve) > 0 for curve in curves):
            table = np.atleast_2d(np.corrcoef(curves))
            found.append(fmean(float(table[pair]) for pair in pairs))
    return found


def one_sign_at_end(seeds: Sequence[History]) -> list[float]:
    """Say for each layer, by 1 or 0, whether the joined cosine ends with one sign for all seeds."""
    ends = [[curve[-1] for curve in curves] for curves in _curves(seeds)]
    return [float(min(values) > 0 or max(values) < 0) for values in ends]


def _curves(seeds: Sequence[History]) -> Iterator[list[list[float]]]:
    """The curve of each seed, for each layer in which all of them are known."""
    for layer in sorted(set.intersection(*(set(each.joined_heads) for each in seeds))):
        curves = [each.joined_heads[layer].cosines for each in seeds]
        if all(math.isfinite(value) for curve in curves for value in curve):
            yield curves


def _over_noise(history: History, metric: str) -> float:
    return over_layers(history.last, metric) / history.last.values[f"{metric}/null"]


def _first_minus_second_half(profile: Sequence[float]) -> float:
    half = len(profile) // 2
    return fmean(profile[:half]) - fmean(profile[-half:])


def _heads(history: History) -> dict[Head, float]:
    return dict(history.last.column("qk_cosine").by_head())


def _beyond(history: History, limit: float, sign: int) -> list[Head]:
    """Heads whose cosine is beyond a limit at the end, on one side."""
    return [head for head, value in _heads(history).items() if sign * value > limit]


def _share_beyond(history: History, limit: float, *signs: int) -> float:
    return sum(len(_beyond(history, limit, sign)) for sign in signs) / len(_heads(history))
