"""The claims of all experiments, and the experiments that were not run."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.study import Claim, load_claims
from recipes.study.claim import FILE_NAME

# The experiment that a command runs: make grokking, python -m recipes.grokking.
_EXPERIMENT = re.compile(r"(?:\bmake |\brecipes\.)(\w+)")
# A further run in a folder of its own: grokking-2.
_NUMBERED = re.compile(r"(?P<name>.+?)(?:-(?P<number>\d+))?", re.ASCII)


class CollectError(ValueError):
    """The claims cannot be collected; one line says what was expected and what to do."""


@dataclass(frozen=True)
class Collection:
    """Claims of several experiments.

    Attributes:
        claims: Claims, in the order of their folders.
        missing: Names of experiments that have no claims.
    """

    claims: Sequence[Claim]
    missing: Sequence[str]


def collect(folders: Iterable[Path], experiments: Iterable[str]) -> Collection:
    """Read the claims of experiments.

    Args:
        folders: Folders with claims, one for each experiment.
        experiments: Names of the experiments that make claims.

    Raises:
        CollectError: A folder holds no claims that can be read, or two folders hold the same one.
    """
    found: dict[tuple[str, str, str], Path] = {}
    claims: list[Claim] = []
    for folder in sorted(folders, key=lambda folder: (folder.name, str(folder))):
        for claim in _load(folder):
            key = (experiment_of(claim), claim.source, claim.name)
            if key in found:
                raise CollectError(
                    f"{found[key]} and {folder} both hold the claim {claim.name}: give one folder "
                    "for each experiment"
                )
            found[key] = folder
            claims.append(claim)
    run = {experiment_of(claim) for claim in claims}
    return Collection(claims, [name for name in sorted(experiments) if name not in run])


def newest_folders(top: Path) -> list[Path]:
    """List the folders with claims; of `NAME`, `NAME-2`, ... the one with the highest number.

    Args:
        top: Folder of all runs.
    """
    newest: dict[str, tuple[int, Path]] = {}
    for file in top.glob(f"*/{FILE_NAME}"):
        match = _NUMBERED.fullmatch(file.parent.name)
        assert match is not None
        numbered = int(match["number"] or 1), file.parent
        newest[match["name"]] = max(newest.get(match["name"], numbered), numbered)
    return sorted(folder for _, folder in newest.values())


def experiments_in(recipes: Path) -> list[str]:
    """List the recipes that make claims.

    Args:
        recipes: Folder of all recipes.
    """
    return sorted(
        file.parent.name
        for file in recipes.glob("*/claims.py")
        if (file.parent / "__main__.py").is_file()
    )


def experiment_of(claim: Claim) -> str:
    """Return the name of the experiment that a claim's command runs; "" where it names none.

    Args:
        claim: A claim.
    """
    match = _EXPERIMENT.search(claim.command)
    return match[1] if match else ""


def _load(folder: Path) -> list[Claim]:
    try:
        return load_claims(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CollectError(f"{folder} holds no claims that can be read ({error})") from error
