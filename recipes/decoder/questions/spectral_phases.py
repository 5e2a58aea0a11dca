"""Phases of the spectrum (Li et al., 2509.23024)."""

from collections.abc import Iterator

from recipes.decoder.questions.question import NORMED, Question
from recipes.study.history import QUARTER, History, changed

# Where the phases end is no number of the paper: here with the warm-up, and with the first quarter.
_THEIRS = "OLMo and Pythia, whose phases end where the curves turn"


def questions(warmup: float) -> Iterator[Question[History]]:
    """List the questions of this paper.

    Args:
        warmup: Share of the steps in which the learning rate rises.
    """
    rank, alpha = f"effective_rank_last/{NORMED}", f"alpha_last/{NORMED}"
    for name, tag, words, begin, end, sign in (
        ("rank_falls_in_warm_up", rank, "rank collapses in the warm-up", 0, warmup, -1),
        ("rank_grows_after_it", rank, "rank grows in the second phase", warmup, QUARTER, 1),
        ("alpha_falls_after_it", alpha, "spectrum decays more slowly in the second phase", warmup,
         QUARTER, -1),
        ("rank_falls_at_last", rank, "rank falls in the third phase", QUARTER, 1, -1),
        ("alpha_grows_at_last", alpha, "spectrum decays faster in the third phase", QUARTER, 1, 1),
    ):  # fmt: skip
        yield Question[History](
            name,
            f"The {words}.",
            "three phases, by the signs of both slopes",
            "2509.23024, abstract",
            f"relative change of the last tokens' {'effective rank' if tag == rank else 'alpha'} "
            f"from {begin:.0%} to {end:.0%} of the steps",
            changed(tag, begin, end),
            above=0 if sign > 0 else None,
            below=0 if sign < 0 else None,
            theirs=_THEIRS,
        )
