"""Phases of the spectrum (Li et al., 2509.23024)."""

from collections.abc import Iterator, Sequence
from functools import partial

from recipes.study.claim import Claim, over_seeds
from recipes.study.history import NORMED, QUARTER, History


def spectral_claims(seeds: Sequence[History], warmup: float) -> Iterator[Claim]:
    """Measure the claims of this paper.

    The paper's phases end where the curves turn; here the first ends with the warm-up and the
    second with the first quarter, so that no curve chooses its own limits.

    Args:
        seeds: What was recorded of each seed.
        warmup: Share of the steps in which the learning rate rises.
    """
    for name, metric, words, begin, end, sign in (
        ("rank_falls_in_warm_up", "effective_rank", "rank collapses in the warm-up", 0, warmup, -1),
        ("rank_grows_after_it", "effective_rank", "rank grows in the second phase", warmup, QUARTER,
         1),
        ("alpha_falls_after_it", "alpha", "spectrum decays more slowly in the second phase",
         warmup, QUARTER, -1),
        ("rank_falls_at_last", "effective_rank", "rank falls in the third phase", QUARTER, 1, -1),
        ("alpha_grows_at_last", "alpha", "spectrum decays faster in the third phase", QUARTER, 1,
         1),
    ):  # fmt: skip
        tag = f"{metric}_last/{NORMED}"
        yield Claim(
            name,
            f"The {words}.",
            "2509.23024, abstract",
            f"relative change of `{metric}_last`, {begin:.0%} to {end:.0%} of the steps",
            over_seeds(seeds, partial(History.change, tag=tag, begin=begin, end=end)),
            above=0 if sign > 0 else None,
            below=0 if sign < 0 else None,
        )
