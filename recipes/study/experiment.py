"""An experiment: its question, its trainings, its claims and its figures; and how it is run."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import joblib  # type: ignore[import-untyped]
import torch
import typer
from matplotlib.figure import Figure

from geomon import read
from recipes.enwik8.text import InputError, Text
from recipes.study.claim import Claim, Results, save_results, verdict_line
from recipes.study.drawing import save_small
from recipes.study.history import History
from recipes.study.training import (
    Training,
    begin_training,
    finish_training,
    fit,
    is_finished,
)

_SEED = "seed_"


class Runs:
    """The records of an experiment.

    Args:
        folder: Folder of the experiment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def folders(self, kind: str) -> list[Path]:
        """List the folders of the complete trainings of a kind, one for each seed, in order."""
        seeds = sorted(self.folder.glob(f"{_SEED}*"), key=lambda path: int(path.name[len(_SEED) :]))
        return [seed / kind for seed in seeds if is_finished(seed / kind)]

    def of(self, kind: str, watch: str = "") -> list[History]:
        """Read what was recorded of a kind, for each seed."""
        return [History(read(folder / watch)) for folder in self.folders(kind)]


class Experiment(ABC):
    """An experiment; a subclass is a frozen dataclass whose fields are its options.

    The first line of its docstring is its question.
    """

    #: Names of the kinds of trainings that are compared.
    kinds: ClassVar[Sequence[str]]
    #: Number of seeds, enough for every claim to come out either way.
    default_seeds: ClassVar[int] = 3
    #: Fewest characters of a text that the trainings need; 0 for none.
    characters: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """Name of the experiment and of its folder."""
        return type(self).__module__.split(".")[1]

    @property
    @abstractmethod
    def differs(self) -> str:
        """In which way the trainings differ in kind from the published ones."""

    @abstractmethod
    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator has the seed."""

    @abstractmethod
    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure what papers assert; a claim without values is one that no seed could answer."""

    @abstractmethod
    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records; figures by the name of their file."""

    def check(self) -> None:  # noqa: B027
        """Check the options; every one of itself is checked by its declaration.

        Raises:
            InputError: No training can be made with them.
        """

    def table(self, runs: Runs) -> Iterable[str]:
        """Write what is printed before the claims, as lines."""
        return ()

    def seeds_of(self, kind: str, seeds: int) -> int:
        """Return the number of trainings of a kind."""
        return seeds


def check_heads(width: int, heads: int) -> None:
    """Check that heads share a width evenly.

    Raises:
        InputError: They do not.
    """
    if width % heads:
        raise InputError(f"--width {width} cannot be shared among --heads {heads}: choose others")


@contextmanager
def one_line_errors(kind: type[ValueError] = InputError) -> Iterator[None]:
    """Turn errors of bad input, and of files, into one line of text and exit code 2."""
    try:
        yield
    except (kind, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


def train_all(
    experiment: Experiment, corpus: Text | None, *, seeds: int, folder: Path, processes: int
) -> None:
    """Train all kinds from all seeds, several side by side.

    Raises:
        Exception: The first error of a training; those that have not begun are given up.
    """
    counts = {kind: experiment.seeds_of(kind, seeds) for kind in experiment.kinds}
    jobs = [
        (experiment, kind, seed, corpus, folder / f"{_SEED}{seed}" / kind)
        for seed in range(max(counts.values()))
        for kind, count in counts.items()
        if seed < count
    ]
    in_processes(train_one, jobs, processes)


def in_processes(
    function: Callable[..., None], jobs: Sequence[tuple[Any, ...]], processes: int
) -> None:
    """Call a function with each of many sets of arguments, and print how many calls are complete.

    Raises:
        Exception: The first error of a call; those that have not begun are given up.
    """
    began = time.perf_counter()
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        side_by_side = joblib.Parallel(processes, return_as="generator_unordered")
    ends = side_by_side(joblib.delayed(function)(*job) for job in jobs)
    for done, _ in enumerate(ends, 1):
        seconds = time.perf_counter() - began
        print(f"{done} of {len(jobs)} trainings are complete, {seconds:.0f} s", flush=True)


def train_one(
    experiment: Experiment, kind: str, seed: int, corpus: Text | None, folder: Path
) -> None:
    """Make one training and leave its record, or do nothing if the record is complete."""
    settings: dict[str, Any] = {**asdict(experiment), "kind": kind, "seed": seed}  # type: ignore[call-overload]
    if corpus is not None:
        settings["text"] = corpus.sha256()
    if begin_training(folder, settings):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            training = experiment.training(kind, seed, corpus)
        fit(training, folder, seed)
        finish_training(folder, settings)


def show(experiment: Experiment, folder: Path) -> None:
    """Measure the claims from the records, draw the figures, write and print both."""
    runs = Runs(folder)
    asked = list(experiment.claims(runs))
    answered = tuple(claim for claim in asked if claim.values)
    results = Results(experiment.name, experiment.differs, answered)
    lines = list(experiment.table(runs))
    lines += [f"no value   {claim.name}" for claim in asked if not claim.values]
    print("\n".join(["", *lines, *[""] * bool(lines), *map(verdict_line, results.claims), ""]))
    for name, figure in experiment.figures(runs).items():
        print(f"figure: {save_small(figure, folder / f'{name}.png')}")
    print(f"claims: {save_results(results, folder)}")
    print(f"records: in {folder}; geomon watch shows one")
