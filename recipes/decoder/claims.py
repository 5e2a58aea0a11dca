"""The assertions that the experiment decides, each by one number for each seed.

Quantities and ends were written down from the papers' words before any run had ended. Where a paper
gives no number, the end is the null, or a choice of ours that the quantity states.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from geomon import read
from recipes.decoder.questions import Question, comparisons_of, questions_of
from recipes.decoder.train import complete_seeds, load_study, seconds_taken
from recipes.enwik8.presets import Preset
from recipes.study import Claim
from recipes.study.history import History

COMMAND = "make decoder"
PICTURE = "docs/pictures/decoder.png"
# Of the claims on several seeds side by side.
PICTURE_OF_SEEDS = "docs/pictures/decoder_seeds.png"


def decoder_claims(folder: Path) -> tuple[list[Claim], list[str]]:
    """Measure all claims on the complete records of a folder.

    Args:
        folder: Folder of the experiment.

    Returns:
        Claims, and the names of those that no seed could answer.

    Raises:
        RunError: The folder holds no experiment, or no seed is complete.
    """
    seeds = complete_seeds(folder)
    histories = [History(read(seed)) for seed in seeds]
    seconds, sizes = seconds_taken(seeds), load_study(folder).sizes
    ours = f"characters, {sizes.layers} layers of width {sizes.width}, {sizes.steps:,} steps"
    claims, unanswered = [], []
    for question, values, picture in _answers(histories, sizes):
        if not values:
            unanswered.append(question.name)
            continue
        words = {
            name: value
            for name, value in vars(question).items()
            if name not in ("measure", "theirs")
        }
        claims.append(
            Claim(
                **words,
                values=values,
                command=COMMAND,
                picture=picture,
                differs=f"here {ours}; there {question.theirs}",
                seconds=seconds,
            )
        )
    return claims, unanswered


def _answers(
    histories: Sequence[History], sizes: Preset
) -> Iterator[tuple[Question[Any], tuple[float, ...], str]]:
    """Every question, its values, and the picture that shows them."""
    for question in questions_of(sizes):
        values = chain.from_iterable(_values(question.measure(h)) for h in histories)
        yield question, tuple(values), PICTURE
    for comparison in comparisons_of(len(histories)):
        yield comparison, tuple(_values(comparison.measure(histories))), PICTURE_OF_SEEDS


def _values(measured: float | Sequence[float]) -> Iterable[float]:
    """Values of one answer; none where what is asked for could not be measured."""
    values = (measured,) if isinstance(measured, float | int) else measured
    return filter(math.isfinite, values)
