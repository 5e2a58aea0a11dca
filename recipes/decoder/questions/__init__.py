"""What is asked of the records: one question for each assertion, in a module for each paper."""

from collections.abc import Iterator, Sequence

from recipes.decoder.questions import (
    norm_of_mean,
    self_attention,
    shape_of_learning,
    spectral_phases,
    stability,
)
from recipes.decoder.questions.question import Question
from recipes.enwik8.presets import Preset
from recipes.study.history import History

__all__ = ["Question", "comparisons_of", "questions_of"]


def comparisons_of(seeds: int) -> Iterator[Question[Sequence[History]]]:
    """List the questions that are asked of all seeds side by side.

    Args:
        seeds: Number of seeds, on which some limits depend.
    """
    yield from stability.questions(seeds)


def questions_of(sizes: Preset) -> Iterator[Question[History]]:
    """List the questions that are asked of each seed.

    Args:
        sizes: Sizes of model and run, on which some limits depend.
    """
    yield from shape_of_learning.questions()
    yield from self_attention.questions(sizes.width, sizes.width // sizes.heads)
    yield from norm_of_mean.questions()
    yield from spectral_phases.questions(sizes.warmup / sizes.steps)
