"""Norm of the mean and variance (Yamagiwa and Shimodaira, 2409.11253).

That the squared norm of the mean and the variance add up to the mean squared norm is an identity,
and no claim here: a test of the kernels holds it.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from recipes.study.claim import Claim, over_seeds
from recipes.study.history import NORMED, History, over_layers, with_depth


def norm_claims(seeds: Sequence[History]) -> Iterator[Claim]:
    """Measure the claims of this paper.

    Args:
        seeds: What was recorded of each seed.
    """
    ask = partial(Claim, source="2409.11253, abstract")
    slope = "norm_variance_slope"
    yield ask(
        "norm_trades_for_variance",
        "Token types whose mean is nearer to the origin have more variance.",
        quantity="slope of variance on squared norm over types, mean over layers",
        values=over_seeds(seeds, lambda h: over_layers(h.last, slope)),
        below=0,
    )
    yield ask(
        "trade_off_is_strong",
        "The trade-off is strong.",
        quantity="its R², mean over layers",
        values=over_seeds(seeds, lambda h: h.last.values[f"{slope}/mean/r_squared"]),
        above=0.5,
    )
    yield ask(
        "norm_makes_the_trade_off",
        "Layer normalisation likely makes the trade-off.",
        quantity="slope after the final norm minus before it",
        values=over_seeds(
            seeds,
            lambda h: (
                h.last.values[f"{slope}/{NORMED}"]
                - over_layers(h.last, slope, lambda profile: profile[-1])
            ),
        ),
        below=0,
    )
    yield ask(
        "trade_off_beyond_arithmetic",
        "The trade-off is more than arithmetic makes.",
        quantity="slope minus that of types assigned at random",
        values=over_seeds(
            seeds,
            lambda h: over_layers(h.last, slope) - over_layers(h.last, f"{slope}_shuffled"),
        ),
        below=0,
        ours=True,
    )
    yield from _shares(seeds)


def _shares(seeds: Sequence[History]) -> Iterator[Claim]:
    """What is not within the types is between them: one share falls as the other grows."""
    for name, metric, part, asserts in (
        ("mean_moves_away", "drift_norm", "",
         "In deeper layers the mean is farther from the origin."),
        ("share_of_mean_grows", "variance_shares", "mean",
         "In deeper layers the mean is farther relative to the norms, too."),
        ("share_within_grows", "variance_shares", "",
         "In deeper layers the share of the variance within token types is larger."),
    ):  # fmt: skip
        words = f"{metric}/{part}" if part else metric
        yield Claim(
            name,
            asserts,
            "2409.11253, abstract",
            f"Spearman's correlation of `{words}` with depth",
            over_seeds([h.last for h in seeds], partial(with_depth, metric=metric, part=part)),
            above=0,
            ours=name == "share_of_mean_grows",
        )
