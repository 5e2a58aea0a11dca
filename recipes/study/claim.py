"""A published claim, its measurement here, and a verdict that follows from the numbers."""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recipes.enwik8.text import InputError
from recipes.study.files import write_json
from recipes.study.seeds import Estimate, estimate, estimate_share

FILE_NAME = "claims.json"

Verdict = Literal["agrees", "disagrees", "undecided"]


@dataclass(frozen=True)
class Claim:
    """One assertion, and a number that decides it.

    A sentence of a paper that asserts several things ("grows and stabilises at every layer") is
    several claims. An assertion that no number could refute, such as an identity, is not a claim.

    Attributes:
        name: Name of the claim, unique in its experiment, in words joined by underscores.
        asserts: The assertion, in one sentence.
        source: Number of the paper at arXiv with the section or figure.
        quantity: The measured quantity, with its unit.
        values: One value for each independent repetition, if any has one.
        above: Number that the mean must exceed for the claim to hold; None for no such end.
        below: Number that the mean must stay under for the claim to hold; None for no such end.
        ours: Whether the paper does not assert it, or measures it in another way.
        chosen: Part of the measure that we chose because the paper gives none: "limit", "windows".
        variant: Estimator or model that it is measured on, if one question is asked of several.
        repeated: Unit that gives one value: "seed", "head".
        counted: Whether each value is 1 or 0, for true or false, and their mean a share: its
            interval is the interval of a count.
    """

    name: str
    asserts: str
    source: str
    quantity: str
    values: tuple[float, ...] = ()
    above: float | None = None
    below: float | None = None
    ours: bool = False
    chosen: str = ""
    variant: str = ""
    repeated: str = "seed"
    counted: bool = False

    def __post_init__(self) -> None:
        """Check that something decides the claim.

        Raises:
            ValueError: No end is given, or the ends leave nothing between them.
        """
        if self.above is None and self.below is None:
            raise ValueError(f"claim {self.name}: give `above`, `below` or both")
        if not self._least < self._most:
            raise ValueError(
                f"claim {self.name}: nothing is above {self.above}, below {self.below}"
            )

    @property
    def paper(self) -> str:
        """Number of the paper at arXiv."""
        return self.source.partition(", ")[0]

    @property
    def place(self) -> str:
        """Section or figure of the paper, "4.2, fig. 3"."""
        return self.source.partition(", ")[2]

    @property
    def measured(self) -> Estimate:
        """Mean over the repetitions, with its 95 % interval."""
        return estimate_share(self.values) if self.counted else estimate(self.values)

    @property
    def verdict(self) -> Verdict:
        """Whether the whole interval lies in the claimed range, outside it, or on both sides."""
        low, high = self.measured.low, self.measured.high
        if low > self._least and high < self._most:
            return "agrees"
        return "disagrees" if high <= self._least or low >= self._most else "undecided"

    @property
    def limits(self) -> str:
        """Range that the claim gives for the number, "> 0" or "0 to 2.5"."""
        if self.above is None:
            return f"<{self.below:.3g}"
        return (
            f">{self.above:.3g}" if self.below is None else f"{self.above:.3g} to {self.below:.3g}"
        )

    @property
    def mean_words(self) -> str:
        """The mean with its margin, to the digits that the margin leaves, "2.0 ± 2.5"."""
        measured = self.measured
        if self.counted:
            return f"{measured.mean:.2f} ({measured.low:.2f} to {measured.high:.2f})"
        if not math.isfinite(measured.margin):
            return f"{measured.mean:.3g}, one value"
        if measured.margin == 0:
            return f"{measured.mean:.3g} ± 0"
        digits = 1 - math.floor(math.log10(measured.margin))
        if digits > 4:
            return f"{measured.mean:.3g} ± {measured.margin:.2g}"
        shown = (f"{round(x, digits):.{max(digits, 0)}f}" for x in (measured.mean, measured.margin))
        return " ± ".join(shown)

    @property
    def _least(self) -> float:
        return -math.inf if self.above is None else self.above

    @property
    def _most(self) -> float:
        return math.inf if self.below is None else self.below


@dataclass(frozen=True)
class Results:
    """Findings of an experiment.

    Attributes:
        experiment: Name of the experiment.
        differs: In which way its trainings differ in kind from the published ones.
        claims: The claims.
    """

    experiment: str
    differs: str
    claims: tuple[Claim, ...]


# A claim without values, and what measures it on a seed: a value, or values of heads or layers.
Question = tuple[Claim, Callable[[Any], float | Sequence[float]]]


def answers(questions: Iterable[Question], seeds: Iterable[Any]) -> Iterator[Claim]:
    """Answer questions: put them to each seed, and collect what can be measured."""
    every = list(seeds)
    for claim, measure in questions:
        found = [np.asarray(measure(seed), float).ravel().tolist() for seed in every]
        yield replace(claim, values=tuple(filter(math.isfinite, itertools.chain(*found))))


def save_results(results: Results, folder: str | os.PathLike[str]) -> Path:
    """Write results to `claims.json` in a folder.

    Returns:
        Path of the file.
    """
    return write_json(Path(folder) / FILE_NAME, asdict(results))


def load_results(folder: str | os.PathLike[str]) -> Results:
    """Read the results of an experiment.

    Raises:
        InputError: The folder holds no claims that can be read.
    """
    try:
        content: dict[str, Any] = json.loads((Path(folder) / FILE_NAME).read_text())
        claims = [Claim(**{**one, "values": tuple(one["values"])}) for one in content["claims"]]
        return Results(**{**content, "claims": tuple(claims)})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder} holds no claims that can be read ({error})") from error


def verdict_line(claim: Claim) -> str:
    """Write a claim in a line: verdict, name, mean with its 95 % interval, and what decides it."""
    return (
        f"{claim.verdict:<9}  {claim.name}: {claim.mean_words} "
        f"({len(claim.values)} x {claim.repeated}; {claim.limits})"
    )
