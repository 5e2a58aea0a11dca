"""An experiment: its question, its trainings, its claims and its figures; and how it is run."""

import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
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
    seconds_taken,
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
        """List the folders of the complete trainings of a kind, one for each seed, in order.

        Args:
            kind: Name of the kind.
        """
        seeds = sorted(self.folder.glob(f"{_SEED}*"), key=lambda path: int(path.name[len(_SEED) :]))
        return [seed / kind for seed in seeds if is_finished(seed / kind)]

    def of(self, kind: str, watch: str = "") -> list[History]:
        """Read what was recorded of a kind, for each seed.

        Args:
            kind: Name of the kind.
            watch: What was watched, as `Training.watched` names it.
        """
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
        """Name of the experiment, that of its folder."""
        return type(self).__module__.split(".")[1]

    @property
    @abstractmethod
    def differs(self) -> str:
        """In which way the trainings differ in kind from the published ones."""

    @abstractmethod
    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator has the seed.

        Args:
            kind: One of `kinds`.
            seed: Number of the seed.
            corpus: The text; None where the experiment needs none.
        """

    @abstractmethod
    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure what papers assert; a claim without values is one that no seed could answer.

        Args:
            runs: The records.
        """

    @abstractmethod
    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records; figures by the name of their file.

        Args:
            runs: The records.
        """

    def check(self) -> None:  # noqa: B027
        """Check the options; every one of itself is checked by its declaration.

        Raises:
            InputError: No training can be made with them.
        """

    def table(self, runs: Runs) -> Iterable[str]:
        """Write what is printed before the claims, as lines.

        Args:
            runs: The records.
        """
        return ()

    def seeds_of(self, kind: str, seeds: int) -> int:
        """Return the number of trainings of a kind.

        Args:
            kind: One of `kinds`.
            seeds: Number that was asked for.
        """
        return seeds


def check_heads(width: int, heads: int) -> None:
    """Check that heads share a width evenly.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.

    Raises:
        InputError: They do not.
    """
    if width % heads:
        raise InputError(f"--width {width} cannot be shared among --heads {heads}: choose others")


def train_all(
    experiment: Experiment,
    corpus: Text | None,
    *,
    seeds: int,
    folder: Path,
    processes: int,
    report: Callable[[int, int], object],
) -> None:
    """Train all kinds from all seeds, several side by side, each on one thread.

    Args:
        experiment: The experiment.
        corpus: Its text.
        seeds: Number of seeds.
        folder: Folder of the experiment, in which each seed has a folder, and each kind one there;
            trainings that are complete are kept.
        processes: Number of processes; with 1 everything runs in this one.
        report: Function that is called with the number of finished trainings and of all.

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
    in_processes(train_one, jobs, processes, report)


def in_processes(
    function: Callable[..., None],
    jobs: Sequence[tuple[Any, ...]],
    processes: int,
    report: Callable[[int, int], object] = lambda done, count: None,
) -> None:
    """Call a function with each of many sets of arguments, several side by side on one thread each.

    Args:
        function: Function of a module.
        jobs: Arguments of each call.
        processes: Number of processes; with 1 everything runs in this one.
        report: Function that is called with the number of finished calls and of all.

    Raises:
        Exception: The first error of a call; those that have not begun are given up.
    """
    if processes == 1:
        for number, job in enumerate(jobs, 1):
            function(*job)
            report(number, len(jobs))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                future.result()
                report(number, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_one(
    experiment: Experiment, kind: str, seed: int, corpus: Text | None, folder: Path
) -> None:
    """Make one training and leave its record; nothing is done where that is complete.

    Args:
        experiment: The experiment.
        kind: One of its kinds.
        seed: Seed of the weights, the batches and the sampled rows.
        corpus: Its text.
        folder: Folder of the training.
    """
    settings: dict[str, Any] = {**asdict(experiment), "kind": kind, "seed": seed}  # type: ignore[call-overload]
    if corpus is not None:
        settings["text"] = corpus.sha256()
    if begin_training(folder, settings):
        began = time.process_time()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            training = experiment.training(kind, seed, corpus)
        fit(training, folder, seed)
        finish_training(folder, settings, began)


def show(experiment: Experiment, folder: Path) -> None:
    """Measure the claims from the records, draw the figures, write and print both.

    Args:
        experiment: The experiment.
        folder: Its folder.
    """
    runs = Runs(folder)
    asked = list(experiment.claims(runs))
    done = [each for kind in experiment.kinds for each in runs.folders(kind)]
    results = Results(
        experiment.name, experiment.differs, sum(map(seconds_taken, done)) / 2,
        tuple(claim for claim in asked if claim.values),
    )  # fmt: skip
    lines = list(experiment.table(runs))
    lines += [f"no value   {claim.name}" for claim in asked if not claim.values]
    print("\n".join(["", *lines, *[""] * bool(lines), *map(verdict_line, results.claims), ""]))
    for name, figure in experiment.figures(runs).items():
        print(f"figure: {save_small(figure, folder / f'{name}.png')}")
    print(f"claims: {save_results(results, folder)}")
    print(f"records: in {folder}; geomon watch shows one")
