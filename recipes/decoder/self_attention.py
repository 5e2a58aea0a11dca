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
        "section 3.1, fig. 2",
        "largest mean cosine over layers, against the 95 % point of an isotropic pair",
        lambda h: over_layers(h.last, "cosine", max),
        above=isotropic_pair,
    )
    yield ask(
        "isotropic_without_the_mean",
        "Without their mean, representations are nearly isotropic.",
        "section 2",
        "anisotropy about the mean over that of noise, mean over layers",
        lambda h: over_layers(h.last, "anisotropy") / h.last.values["anisotropy/null"],
        below=2,
    )


def _drift(ask: Callable[..., Claim]) -> Iterator[Claim]:
    for test in ("spearman", "pearson"):
        yield ask(
            f"drift_goes_with_cosine_{test}",
            "Layers whose mean is longer have a higher mean cosine (all but two character models).",
            "section 3.3, fig. 5, 16",
            "correlation over layers",
            lambda h, test=test: drift_and_cosine(h.last, test).value,
            variant=test.title(),
            above=0,
        )
        yield ask(
            f"drift_goes_with_cosine_{test}_p",
            "The correlation is significant.",
            "section 3.3, fig. 5, 16",
            "exact p",
            lambda h, test=test: drift_and_cosine(h.last, test).p_value,
            variant=test.title(),
            below=0.05,
        )


def _queries_and_keys(ask: Callable[..., Claim], chance: float) -> Iterator[Claim]:
    size = partial(over_heads, metric="qk_cosine", size=True)
    yield ask(
        "queries_and_keys_align",
        "Mean queries and mean keys come to align along training.",
        "section 5, fig. 13",
        "absolute cosine, end minus step 0, mean over heads",
        lambda h: size(h.last) - size(h.first),
        above=0,
    )
    yield ask(
        "queries_and_keys_beyond_chance",
        "Mean queries and mean keys are more alike than random directions.",
        "section 5, fig. 12",
        "absolute cosine minus that of random directions, mean over heads",
        lambda h: size(h.last) - h.last.values["qk_cosine/null_magnitude"],
        above=0,
    )
    yield ask(
        "almost_all_heads_align",
        "Almost all heads align.",
        "section 5, fig. 13",
        f"share of heads with an absolute cosine above {chance:.2f} (95 % point of chance)",
        lambda h: _share_beyond(h, chance, (1, -1)),
        above=0.9,
    )
    yield ask(
        "first_layers_similar",
        "In the first layers the common direction prevails.",
        "section 5, fig. 13",
        "cosine, mean over the heads of layer 1",
        lambda h: over_heads(h.last, "qk_cosine", layers=[1]),
        above=0,
    )
    yield ask(
        "last_layers_opposite",
        "In the last layers the opposite direction prevails.",
        "section 5, fig. 13",
        "cosine, mean over the heads of the last layer",
        lambda h: over_heads(h.last, "qk_cosine", layers=[_last_layer(h)]),
        below=0,
    )
    yield ask(
        "some_heads_opposite",
        "Some heads align in opposite directions.",
        "section 5, fig. 12 b",
        f"share of heads with a cosine below -{chance:.2f}",
        lambda h: _share_beyond(h, chance, (-1,)),
        above=_BY_CHANCE,
    )
    yield ask(
        "similar_heads_align_early",
        "The common direction appears in the first few steps.",
        "section 5, fig. 11 a",
        "share of the steps after which a head that ends similar stays beyond chance",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, 1)],
        below=0.08,
        repeated="head",
    )
    yield ask(
        "opposite_heads_align_late",
        "The opposite direction starts only after 8 % of the steps.",
        "section 5, fig. 11 b",
        "the same of a head that ends opposite",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, -1)],
        above=0.08,
        repeated="head",
    )
    yield ask(
        "dot_product_grows",
        "The scalar product of mean query and mean key grows in size.",
        "section 5, fig. 14",
        "absolute product, end minus step 0, mean over heads",
        lambda h: (
            over_heads(h.last, "qk_dot", size=True) - over_heads(h.first, "qk_dot", size=True)
        ),
        above=0,
    )
    for metric, words in (("query_cosine", "queries"), ("key_cosine", "keys")):
        yield ask(
            f"{words}_become_anisotropic",
            "Queries and keys become anisotropic during training.",
            "section 5, fig. 11",
            "mean cosine, end minus step 0, mean over heads",
            lambda h, m=metric: over_layers(h.last, m) - over_layers(h.first, m),
            variant=words,
            above=0,
        )


def _attention(ask: Callable[..., Claim]) -> Iterator[Claim]:
    yield ask(
        "entropy_decays_at_every_layer",
        "Training decreases the entropy of attention in all layers.",
        "section 5, fig. 15",
        "end minus step 0, largest over layers, in nats",
        lambda h: max(growth(h, "attention_entropy")),
        below=0,
    )
    yield ask(
        "first_layers_sharper",
        "Attention in the first layers remains sharper than in the last.",
        "section 5, fig. 15",
        "entropy, first half of the layers minus second, in nats",
        lambda h: over_layers(h.last, "attention_entropy", _first_minus_second_half),
        below=0,
    )
    # Mean query . mean key itself, the same for all keys, cancels in the softmax.
    yield ask(
        "alignment_makes_attention_sharp",
        "The drift of queries and keys is what makes attention sharp.",
        "section 5, fig. 14, 15",
        "share of the variance of scores that the mean query makes alone",
        lambda h: over_layers(h.last, "mean_query_share"),
        above=0.5,
        ours=True,
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
