"""Cosines, drift, queries, keys and attention (Godey et al., 2401.12143)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from geomon.kernels.baselines import isotropic_cosine_quantile
from recipes.study.claim import Claim, over_seeds
from recipes.study.history import (
    Head,
    History,
    drift_and_cosine,
    growth,
    onset,
    over_heads,
    over_layers,
)

_PAPER = "2401.12143"
# Share of two random directions beyond their 95 % point, on one side.
_BY_CHANCE = 0.025


def attention_claims(seeds: Sequence[History], width: int, head_width: int) -> Iterator[Claim]:
    """Measure the claims of this paper.

    Args:
        seeds: What was recorded of each seed.
        width: Width of the hidden states.
        head_width: Width of one head.
    """

    def ask(
        name: str, asserts: str, place: str, quantity: str,
        measure: Callable[[History], float | Sequence[float]], **fields: Any,
    ) -> Claim:  # fmt: skip
        values = over_seeds(seeds, measure)
        return Claim(name, asserts, f"{_PAPER}, {place}", quantity, values, **fields)

    yield from _cosine(ask, isotropic_cosine_quantile(width))
    yield from _drift(ask)
    # |cos| of two random directions is below this with a probability of 95 %.
    yield from _queries_and_keys(ask, isotropic_cosine_quantile(head_width, 0.975))
    yield from _attention(ask)


def _cosine(ask: Callable[..., Claim], isotropic_pair: float) -> Iterator[Claim]:
    """Their mean cosine without the mean row is not asked for: near 0 in whatever directions."""
    yield ask(
        "characters_are_anisotropic",
        "Models of characters are anisotropic in at least one layer.",
        "section 3.1 (figure 2; limit of appendix B)",
        "mean cosine at the layer where it is largest (above the 95 % point for one isotropic "
        "pair), at the end",
        lambda h: over_layers(h.last, "cosine", max),
        published="mean cosine far above 0 in at least one layer of each character model",
        above=isotropic_pair,
    )
    yield ask(
        "isotropic_without_the_mean",
        "Without their mean, representations are nearly isotropic.",
        "section 2 (after Biś et al.)",
        "anisotropy (share of the first direction, the mean taken off) over that of noise (below "
        "2: nearer to noise than to twice it), mean over layers, at the end",
        lambda h: over_layers(h.last, "anisotropy") / h.last.values["anisotropy/null"],
        published="removing the average component leads to a nearly perfect isotropy",
        below=2,
    )


def _drift(ask: Callable[..., Claim]) -> Iterator[Claim]:
    for test, place in (("spearman", "figure 5"), ("pearson", "figure 16")):
        yield ask(
            f"drift_goes_with_cosine_{test}",
            "Layers whose mean is longer have a higher mean cosine.",
            f"section 3.3 ({place})",
            f"{test.title()}'s correlation over layers of ||mean|| and cosine, at the end",
            lambda h, test=test: drift_and_cosine(h.last, test).value,
            published="a correlation for all character models but two",
            above=0,
        )
        yield ask(
            f"drift_goes_with_cosine_{test}_p",
            "The correlation is significant.",
            f"section 3.3 ({place})",
            f"exact p-value of {test.title()}'s correlation, at the end",
            lambda h, test=test: drift_and_cosine(h.last, test).p_value,
            published="p < .05 for all character models but two",
            below=0.05,
        )


def _queries_and_keys(ask: Callable[..., Claim], chance: float) -> Iterator[Claim]:
    size = partial(over_heads, metric="qk_cosine", size=True)
    yield ask(
        "queries_and_keys_align",
        "Mean queries and mean keys come to align along training.",
        "section 5 (figure 13)",
        "mean size over heads of the cosine of mean query and mean key, at the end minus at step 0",
        lambda h: size(h.last) - size(h.first),
        published="almost all heads align, in common or opposite directions",
        above=0,
    )
    yield ask(
        "queries_and_keys_beyond_chance",
        "They are more alike than random directions are.",
        "section 5 (figure 12)",
        "mean size over heads of that cosine minus the mean of random directions, at the end",
        lambda h: size(h.last) - h.last.values["qk_cosine/null_magnitude"],
        published="such an alignment is very unlikely to happen randomly",
        above=0,
    )
    yield ask(
        "almost_all_heads_align",
        "Almost all heads align.",
        "section 5 (figure 13)",
        f"share of heads whose cosine is beyond the 95 % point of chance, {chance:.2f}, at the end",
        lambda h: _share_beyond(h, chance, (1, -1)),
        published="almost all heads see their means align",
        above=0.9,
    )
    yield ask(
        "first_layers_similar",
        "In the first layers the common direction prevails.",
        "section 5 (figure 13)",
        "mean over the heads of layer 1 of the cosine of mean query and mean key, at the end",
        lambda h: over_heads(h.last, "qk_cosine", layers=[1]),
        published="the cosine tends to increase in the first layers",
        above=0,
    )
    yield ask(
        "last_layers_opposite",
        "In the last layers the opposite direction prevails.",
        "section 5 (figure 13)",
        "mean over the heads of the last layer of that cosine, at the end",
        lambda h: over_heads(h.last, "qk_cosine", layers=[_last_layer(h)]),
        published="the cosine gets negative in the last layers",
        below=0,
    )
    yield ask(
        "some_heads_opposite",
        "Some heads align in opposite directions.",
        "section 5 (figure 12 b)",
        f"share of heads whose cosine is below -{chance:.2f} ({_BY_CHANCE} by chance), at the end",
        lambda h: _share_beyond(h, chance, (-1,)),
        published="an example of a head",
        above=_BY_CHANCE,
    )
    yield ask(
        "similar_heads_align_early",
        "The common direction appears in the first few steps.",
        "section 5 (figure 11 a)",
        "share of the steps after which a head that ends similar stays beyond chance (below .08, "
        "where the opposite heads start)",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, 1)],
        published="common direction dynamics in the first few steps",
        below=0.08,
        repeated="head",
    )
    yield ask(
        "opposite_heads_align_late",
        "The opposite direction starts only later.",
        "section 5 (figure 11 b)",
        "share of the steps after which a head that ends opposite stays beyond chance",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, -1)],
        published="only starts after 8 % of the total training steps",
        above=0.08,
        repeated="head",
    )
    yield ask(
        "dot_product_grows",
        "The scalar product of mean query and mean key grows in size.",
        "section 5 (figure 14)",
        "mean size over heads of mean query . mean key, at the end minus at step 0",
        lambda h: (
            over_heads(h.last, "qk_dot", size=True) - over_heads(h.first, "qk_dot", size=True)
        ),
        published="an increase in magnitude, two heads",
        above=0,
    )
    for metric, words in (("query_cosine", "queries"), ("key_cosine", "keys")):
        yield ask(
            f"{words}_become_anisotropic",
            f"The {words} become anisotropic during training.",
            "section 5 (figure 11)",
            f"mean cosine over all pairs of {words}, mean over heads, at the end minus at step 0",
            lambda h, m=metric: over_layers(h.last, m) - over_layers(h.first, m),
            published="drift anisotropy emerges in the query and key representations",
            above=0,
        )


def _attention(ask: Callable[..., Claim]) -> Iterator[Claim]:
    yield ask(
        "entropy_decays_at_every_layer",
        "Training decreases the entropy of attention in all layers.",
        "section 5 (figure 15)",
        "attention entropy (nats) at the end minus at step 0, the largest over layers",
        lambda h: max(growth(h, "attention_entropy")),
        published="an overall decay of the entropy for all layers",
        below=0,
    )
    yield ask(
        "first_layers_sharper",
        "Attention in the first layers remains sharper than in the last.",
        "section 5 (figure 15)",
        "attention entropy (nats), mean over the first half of the layers minus over the second, "
        "at the end",
        lambda h: over_layers(h.last, "attention_entropy", _first_minus_second_half),
        published="sharper distributions in the first layers",
        below=0,
    )
    # Mean query . mean key itself, the same for all keys, cancels in the softmax.
    yield ask(
        "alignment_makes_attention_sharp",
        "The drift of queries and keys is what makes attention sharp.",
        "section 5 (figures 14, 15)",
        "share of the variance of a query's scores over keys that the mean query makes alone "
        "(above .5: most of it), mean over heads, at the end",
        lambda h: over_layers(h.last, "mean_query_share"),
        above=0.5,
    )


def _first_minus_second_half(profile: Sequence[float]) -> float:
    half = len(profile) // 2
    first, second = profile[:half], profile[len(profile) - half :]
    return sum(first) / half - sum(second) / half


def _last_layer(history: History) -> int:
    return max(layer for layer, _ in history.last.column("qk_cosine").by_head())


def _beyond(history: History, limit: float, sign: int) -> list[Head]:
    """Heads whose cosine is beyond a limit at the end, on one side."""
    heads = history.last.column("qk_cosine").by_head()
    return [head for head, value in heads.items() if sign * value > limit]


def _share_beyond(history: History, limit: float, signs: Sequence[int]) -> float:
    found = sum(len(_beyond(history, limit, sign)) for sign in signs)
    return found / len(history.last.column("qk_cosine").by_head())
