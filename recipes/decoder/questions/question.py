"""A claim of a paper before anything is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from recipes.study.history import History

# What the papers' models are, where ours is a small decoder on characters.
MODELS = "pretrained models of many kinds"

# Stack of the layer behind the final norm: the last hidden state as the papers take it.
NORMED = "final_norm_mean"

# What a question is asked of: one seed, or all seeds side by side.
Subject = TypeVar("Subject", History, Sequence[History])


@dataclass(frozen=True)
class Question(Generic[Subject]):
    """A claim without its values.

    Attributes:
        name: Name of the claim.
        asserts: What is asserted.
        published: What the paper shows.
        source: Number of the paper, with section or figure.
        quantity: What is measured.
        measure: Function from the history of a seed, or from those of all seeds, to the value, or
            to the values of its heads or layers.
        above: Lower end, as in `Claim`.
        below: Upper end.
        theirs: What the published result is of.
        repeated: What one value is of.
        counted: Whether the values are counted, as in `Claim`.
    """

    name: str
    asserts: str
    published: str
    source: str
    quantity: str
    measure: Callable[[Subject], float | Sequence[float]]
    above: float | None = None
    below: float | None = None
    theirs: str = ""
    repeated: str = "seed"
    counted: bool = False
