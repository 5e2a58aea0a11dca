"""A published claim beside what is measured here, with a verdict that follows from the numbers."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from recipes.study.seeds import Estimate, Share, estimate, estimate_share

FILE_NAME = "claims.json"

Verdict = Literal["agrees", "disagrees", "undecided"]


@dataclass(frozen=True)
class Claim:
    """One assertion of a paper, and a number that decides it.

    A sentence of a paper that asserts several things ("grows and stabilises at every layer") is
    several claims.

    Attributes:
        name: Name of the claim, unique, in words joined by underscores.
        asserts: What is asserted, in one sentence.
        published: What the paper shows: a shape, or a number of its prose.
        source: Number of the paper at arXiv with the section or figure.
        command: Command that measures it, from the top of the repository.
        quantity: What is measured, with its unit.
        values: One value for each independent repetition.
        repeated: What one value is of: "seed", "head".
        counted: Whether each value is 1 or 0, for something that is so or not, and their mean a
            share: its interval is that of a count.
        above: Number that the mean must exceed for the claim to hold; None for no such end.
        below: Number that the mean must stay under for the claim to hold; None for no such end.
        picture: Path of the picture, from the top of the repository; empty for none.
        differs: In which way this run differs in kind from the published one.
        seconds: Time of the command that measured it, on two cores; nan where it was not taken.
    """

    name: str
    asserts: str
    published: str
    source: str
    command: str
    quantity: str
    values: tuple[float, ...]
    repeated: str = "seed"
    above: float | None = None
    below: float | None = None
    picture: str = ""
    differs: str = ""
    seconds: float = math.nan
    counted: bool = False

    def __post_init__(self) -> None:
        """Check that something decides the claim.

        Raises:
            ValueError: No end is given, or the ends leave nothing between them.
        """
        if self.above is None and self.below is None:
            raise ValueError(f"claim {self.name}: give `above`, `below` or both")
        if None not in (self.above, self.below) and not self.above < self.below:  # type: ignore[operator]
            raise ValueError(
                f"claim {self.name}: nothing is above {self.above}, below {self.below}"
            )

    @property
    def measured(self) -> Estimate | Share:
        """Mean over the repetitions, with its 95 % interval."""
        return estimate_share(self.values) if self.counted else estimate(self.values)

    @property
    def verdict(self) -> Verdict:
        """Whether the whole interval lies where the claim puts it, or outside, or on both sides."""
        low, high = self.measured.low, self.measured.high
        if low > self._least and high < self._most:
            return "agrees"
        return "disagrees" if high <= self._least or low >= self._most else "undecided"

    @property
    def _least(self) -> float:
        return -math.inf if self.above is None else self.above

    @property
    def _most(self) -> float:
        return math.inf if self.below is None else self.below


def save_claims(claims: Iterable[Claim], folder: str | os.PathLike[str]) -> Path:
    """Write claims to `claims.json` in a folder, whole or not at all.

    Args:
        claims: Claims of one experiment.
        folder: Folder of the experiment, which is made.

    Returns:
        Path of the file.
    """
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")
    part.replace(path)
    return path


def load_claims(folder: str | os.PathLike[str]) -> list[Claim]:
    """Read the claims of an experiment.

    Args:
        folder: Folder of the experiment.

    Raises:
        FileNotFoundError: The folder holds no claims.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: run the experiment first")
    return [
        Claim(**(each | {"values": tuple(each["values"])})) for each in json.loads(path.read_text())
    ]


def verdict_lines(claims: Iterable[Claim]) -> list[str]:
    """Write each claim in a line: verdict, name, mean with its 95 % interval, and what decides it.

    Args:
        claims: Claims of one experiment.
    """
    return [
        f"{each.verdict:<9}  {each.name}: {_mean_words(each.measured)} "
        f"({each.measured.count} x {each.repeated}; {_ends(each)})"
        for each in claims
    ]


def _mean_words(measured: Estimate | Share) -> str:
    if isinstance(measured, Share):
        return f"{measured.mean:.2f} ({measured.low:.2f} to {measured.high:.2f})"
    return f"{measured.mean:.3g} ± {measured.margin:.2g}"


def _ends(claim: Claim) -> str:
    ends = {"above": claim.above, "below": claim.below}
    return " and ".join(f"{word} {end:g}" for word, end in ends.items() if end is not None)
