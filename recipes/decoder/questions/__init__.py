"""What is asked of the records: one question for each assertion, in a module for each paper."""

from collections.abc import Iterator

from recipes.decoder.questions import (
    norm_of_mean,
    self_attention,
    shape_of_learning,
    spectral_phases,
)
from recipes.decoder.questions.question import Question
from recipes.enwik8.presets import Preset

__all__ = ["Question", "questions_of"]


def questions_of(sizes: Preset) -> Iterator[Question]:
    """List all questions.

    Args:
        sizes: Sizes of model and run, on which some limits depend.
    """
    yield from shape_of_learning.questions()
    yield from self_attention.questions(sizes.width, sizes.width // sizes.heads)
    yield from norm_of_mean.questions()
    yield from spectral_phases.questions(sizes.warmup / sizes.steps)
