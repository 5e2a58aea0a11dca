"""Cosines, drift, queries, keys and attention (Godey et al., 2401.12143)."""

from collections.abc import Iterator, Sequence
from functools import partial

from geomon.kernels.baselines import isotropic_cosine_quantile
from recipes.decoder.questions.question import MODELS, Question
from recipes.study.history import (
    Head,
    History,
    drift_and_cosine,
    growth,
    onset,
    over_heads,
    over_layers,
    since_start,
)

_ENCODERS = "encoders trained on subwords for 2 million steps (MultiBERT)"


def questions(width: int, head_width: int) -> Iterator[Question[History]]:
    """List the questions of this paper.

    Args:
        width: Width of the hidden states.
        head_width: Width of one head.
    """
    yield from _cosine(isotropic_cosine_quantile(width))
    yield from _drift()
    # |cos| of two random directions is below this with a probability of 95 %.
    yield from _queries_and_keys(isotropic_cosine_quantile(head_width, 0.975))
    yield from _attention()


def _cosine(isotropic_pair: float) -> Iterator[Question[History]]:
    yield Question[History](
        "characters_are_anisotropic",
        "Models of characters are anisotropic in at least one layer.",
        "mean cosine far above 0 in at least one layer of each character model",
        "2401.12143, section 3.1 (figure 2; limit of appendix B)",
        "mean cosine at the layer where it is largest (above the 95 % point for one isotropic "
        "pair), at the end",
        lambda h: over_layers(h.last, "cosine", max),
        above=isotropic_pair,
        theirs="pretrained ByT5, CANINE, MANTa-LM and CharacterBERT",
    )
    source = "2401.12143, section 2 (after Biś et al.)"
    yield Question[History](
        "no_cosine_without_the_mean",
        "Without their mean, representations have no mean cosine.",
        "removing the average component leads to a nearly perfect isotropy",
        source,
        "mean cosine of the rows less their mean, the largest size over layers, at the end",
        lambda h: over_layers(h.last, "cosine_centred", _largest_size),
        below=0.05,
        theirs=MODELS,
    )
    yield Question[History](
        "isotropic_without_the_mean",
        "Without their mean, representations are nearly isotropic.",
        "removing the average component leads to a nearly perfect isotropy",
        source,
        "anisotropy (share of the first direction, the mean taken off) over that of noise (below "
        "2: nearer to noise than to twice it), mean over layers, at the end",
        lambda h: over_layers(h.last, "anisotropy") / h.last.values["anisotropy/null"],
        below=2,
        theirs=MODELS,
    )


def _drift_fit(test: str, name: str, history: History) -> float:
    """Return the correlation of drift and cosine over layers at the end, or its p-value."""
    return float(getattr(drift_and_cosine(history.last, test), name))


def _drift() -> Iterator[Question[History]]:
    theirs = "models of 12 layers and more; the smallest p-value of our 5 is .017"
    for test, source in (("spearman", "figure 5"), ("pearson", "figure 16")):
        ask = partial(
            Question[History], source=f"2401.12143, section 3.3 ({source})", theirs=theirs
        )
        yield ask(
            f"drift_goes_with_cosine_{test}",
            "Layers whose mean is longer have a higher mean cosine.",
            "a correlation for all character models but two",
            quantity=f"{test.title()}'s correlation over layers of ||mean|| and cosine, at the end",
            measure=partial(_drift_fit, test, "value"),
            above=0,
        )
        yield ask(
            f"drift_goes_with_cosine_{test}_p",
            "The correlation is significant.",
            "p < .05 for all character models but two",
            quantity=f"exact p-value of {test.title()}'s correlation, at the end",
            measure=partial(_drift_fit, test, "p_value"),
            below=0.05,
        )


def _queries_and_keys(chance: float) -> Iterator[Question[History]]:
    ask = partial(Question[History], theirs=_ENCODERS)
    yield ask(
        "queries_and_keys_align",
        "Mean queries and mean keys come to align along training.",
        "almost all heads align, in common or opposite directions",
        "2401.12143, section 5 (figure 13)",
        "mean size over heads of the cosine of mean query and mean key, at the end minus at step 0",
        lambda h: (
            over_heads(h.last, "qk_cosine", size=True) - over_heads(h.first, "qk_cosine", size=True)
        ),
        above=0,
    )
    yield ask(
        "queries_and_keys_beyond_chance",
        "They are more alike than random directions are.",
        "such an alignment is very unlikely to happen randomly",
        "2401.12143, section 5 (figure 12)",
        "mean size over heads of that cosine minus the mean of random directions, at the end",
        lambda h: (
            over_heads(h.last, "qk_cosine", size=True) - h.last.values["qk_cosine/null_magnitude"]
        ),
        above=0,
    )
    yield ask(
        "almost_all_heads_align",
        "Almost all heads align.",
        "almost all heads see their means align",
        "2401.12143, section 5 (figure 13)",
        f"share of heads whose cosine is beyond the 95 % point of chance, {chance:.2f}, at the end",
        lambda h: _share_beyond(h, chance, (1, -1)),
        above=0.9,
    )
    yield ask(
        "first_layers_similar",
        "In the first layers the common direction prevails.",
        "the cosine tends to increase in the first layers",
        "2401.12143, section 5 (figure 13)",
        "mean over the heads of layer 1 of the cosine of mean query and mean key, at the end",
        lambda h: over_heads(h.last, "qk_cosine", layers=[1]),
        above=0,
    )
    yield ask(
        "last_layers_opposite",
        "In the last layers the opposite direction prevails.",
        "the cosine gets negative in the last layers",
        "2401.12143, section 5 (figure 13)",
        "mean over the heads of the last layer of that cosine, at the end",
        lambda h: over_heads(h.last, "qk_cosine", layers=[_last_layer(h)]),
        below=0,
    )
    yield ask(
        "some_heads_opposite",
        "Some heads align in opposite directions.",
        "an example of a head",
        "2401.12143, section 5 (figure 12 b)",
        f"share of heads whose cosine is below -{chance:.2f}, the 95 % point of chance, at the end",
        lambda h: _share_beyond(h, chance, (-1,)),
        above=0,
    )
    yield ask(
        "similar_heads_align_early",
        "The common direction appears in the first few steps.",
        "common direction dynamics in the first few steps",
        "2401.12143, section 5 (figure 11 a)",
        "share of the steps after which a head that ends similar stays beyond chance (below .08, "
        "where the opposite heads start)",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, 1)],
        below=0.08,
        repeated="head",
    )
    yield ask(
        "opposite_heads_align_late",
        "The opposite direction starts only later.",
        "only starts after 8 % of the total training steps",
        "2401.12143, section 5 (figure 11 b)",
        "share of the steps after which a head that ends opposite stays beyond chance",
        lambda h: [onset(h, "qk_cosine", head, chance) for head in _beyond(h, chance, -1)],
        above=0.08,
        repeated="head",
    )
    yield ask(
        "dot_product_grows",
        "The scalar product of mean query and mean key grows in size.",
        "an increase in magnitude, two heads",
        "2401.12143, section 5 (figure 14)",
        "mean size over heads of mean query . mean key, at the end minus at step 0",
        lambda h: (
            over_heads(h.last, "qk_dot", size=True) - over_heads(h.first, "qk_dot", size=True)
        ),
        above=0,
    )
    for metric, words in (("query_cosine", "queries"), ("key_cosine", "keys")):
        yield ask(
            f"{words}_become_anisotropic",
            f"The {words} become anisotropic during training.",
            "drift anisotropy emerges in the query and key representations",
            "2401.12143, section 5 (figure 11)",
            f"mean cosine over all pairs of {words}, mean over heads, at the end minus at step 0",
            since_start(partial(over_layers, metric=metric)),
            above=0,
        )


def _attention() -> Iterator[Question[History]]:
    ask = partial(Question[History], source="2401.12143, section 5 (figure 15)", theirs=_ENCODERS)
    yield ask(
        "entropy_decays_at_every_layer",
        "Training decreases the entropy of attention in all layers.",
        "an overall decay of the entropy for all layers",
        quantity="attention entropy (nats) at the end minus at step 0, the largest over layers",
        measure=lambda h: max(growth(h, "attention_entropy")),
        below=0,
    )
    yield ask(
        "first_layers_sharper",
        "Attention in the first layers remains sharper than in the last.",
        "sharper distributions in the first layers",
        quantity=(
            "attention entropy (nats), mean over the first half of the layers minus over the "
            "second, at the end"
        ),
        measure=lambda h: over_layers(h.last, "attention_entropy", _first_minus_second_half),
        below=0,
    )
    yield Question[History](
        "alignment_makes_attention_sharp",
        "The drift of queries and keys is what makes attention sharp.",
        "larger scalar products facilitate sharp patterns",
        "2401.12143, section 5 (figures 14, 15)",
        "share of the variance of a query's scores over keys that the mean query makes alone "
        "(above .5: most of it), mean over heads, at the end",
        lambda h: over_layers(h.last, "mean_query_share"),
        above=0.5,
        theirs=(
            f"{_ENCODERS}; mean query . mean key itself, the same for all keys, cancels in the "
            "softmax, so this asks for what does not"
        ),
    )


def _largest_size(profile: Sequence[float]) -> float:
    return max(map(abs, profile))


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
