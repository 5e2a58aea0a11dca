"""Trainings of an experiment: side by side, each in its folder, none made twice."""

import json
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from geomon import Readings, read
from geomon.record import Record

_FILE_NAME = "finished.json"
_SEED = "seed_"


class RunError(ValueError):
    """The experiment cannot be made as asked; one line says what was given, and what to do."""


def new_folder(name: str) -> Path:
    """Find the first free folder of runs/NAME, runs/NAME-2, ...

    Args:
        name: Name of the experiment.
    """
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def seed_folder(folder: Path, seed: int) -> Path:
    """Build the path of the folder of one seed.

    Args:
        folder: Folder of the experiment.
        seed: Number of the seed.
    """
    return folder / f"{_SEED}{seed}"


def seed_folders(folder: Path) -> list[Path]:
    """List the folders of all seeds that there are, in order.

    Args:
        folder: Folder of the experiment.
    """
    return sorted(folder.glob(f"{_SEED}*"), key=lambda path: int(path.name.removeprefix(_SEED)))


def is_finished(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder holds a complete training with these settings.

    Args:
        folder: Folder of one training.
        settings: Everything that makes the training what it is, as plain values.

    Raises:
        RunError: It holds a complete training with other settings.
    """
    path = folder / _FILE_NAME
    if not path.is_file():
        return False
    earlier = json.loads(path.read_text())["settings"]
    now = json.loads(json.dumps(settings))
    if earlier == now:
        return True
    differing = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    raise RunError(
        f"{folder} holds a training with another {', '.join(sorted(differing))}: choose another "
        "folder by --out"
    )


def begin_training(folder: Path, settings: Mapping[str, Any]) -> float | None:
    """Prepare a folder for one training: delete the records of one that was broken off.

    Args:
        folder: Folder of one training.
        settings: Everything that makes the training what it is, as plain values.

    Returns:
        Time of the processor until now, in seconds, for `finish_training`; None where the folder
        holds the complete training, and nothing is to be done.

    Raises:
        RunError: The folder holds a complete training with other settings, or another process
            trains there.
    """
    if is_finished(folder, settings):
        return None
    for place in sorted({path.parent for path in folder.glob("**/readings*.jsonl")}):
        try:
            record = Record(place)  # one process at a time
        except ValueError as error:
            raise RunError(str(error)) from error
        for path in (*place.glob("readings*.jsonl"), *place.glob("arrays*/step_*.npz")):
            path.unlink()
        record.close()
    return time.process_time()


def finish_training(folder: Path, settings: Mapping[str, Any], began: float) -> None:
    """Note that the training in a folder is complete, and the time of the processor it took.

    Args:
        folder: Folder of one training.
        settings: Everything that makes the training what it is, as plain values.
        began: What `begin_training` returned.
    """
    mark_finished(folder, settings, time.process_time() - began)


def mark_finished(folder: Path, settings: Mapping[str, Any], seconds: float) -> None:
    """Note that the training in a folder is complete.

    Args:
        folder: Folder of one training.
        settings: Everything that makes the training what it is, as plain values.
        seconds: Time of the processor that it took.
    """
    content = {"settings": settings, "seconds": round(seconds, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{_FILE_NAME}.part"
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(folder / _FILE_NAME)


def seconds_on_two_cores(folders: Iterable[Path]) -> float:
    """Sum the processor's time of complete trainings, of which two run side by side.

    Args:
        folders: Folders of the trainings.
    """
    return sum(json.loads((each / _FILE_NAME).read_text())["seconds"] for each in folders) / 2


def call(function: Callable[..., object], *arguments: object) -> None:
    """Call a function: for jobs of several functions, whose first argument is the function.

    Args:
        function: Function of a module.
        arguments: Its arguments.
    """
    function(*arguments)


def run_side_by_side(
    function: Callable[..., object],
    jobs: Iterable[tuple[Any, ...]],
    *,
    processes: int,
    report: Callable[[int, int], object],
) -> None:
    """Call a function with the arguments of each job, several at once, each on one thread.

    Args:
        function: Function of a module, and not of the program's main one, which other processes do
            not have; what it returns is ignored.
        jobs: Arguments of each call.
        processes: Number of processes; with 1 everything runs in this one.
        report: Function that is called with the number of finished calls and of all.

    Raises:
        ValueError: The function is of a main module.
        Exception: The first error of a call; the calls that have not begun are given up.
    """
    if function.__module__.rpartition(".")[2] == "__main__":
        raise ValueError(
            f"{function.__name__} is defined in the program's main module, which other processes "
            "do not have: define it in a module of its own"
        )
    everything = list(jobs)
    if processes == 1:
        for number, arguments in enumerate(everything, 1):
            function(*arguments)
            report(number, len(everything))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(function, *arguments) for arguments in everything]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                future.result()
                report(number, len(everything))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_kinds(
    train: Callable[..., object],
    kinds: Collection[str],
    *settings: object,
    seeds: int,
    folder: Path,
    processes: int,
    report: Callable[[int, int], object],
) -> None:
    """Train each kind from each seed, several side by side.

    Args:
        train: Function of a module; its arguments are a kind, the settings, a seed, and the folder
            of the training.
        kinds: Names of the kinds that are compared.
        settings: What all trainings have in common.
        seeds: Number of seeds.
        folder: Folder of the experiment, in which each seed has a folder, and each kind one there.
        processes: Number of processes.
        report: Function that is called with the number of finished trainings and of all.
    """
    jobs = [
        (name, *settings, seed, seed_folder(folder, seed) / name)
        for seed in range(seeds)
        for name in kinds
    ]
    run_side_by_side(train, jobs, processes=processes, report=report)


def read_kinds(folder: Path, kinds: Iterable[str]) -> dict[str, list[Readings]]:
    """Read what `train_kinds` recorded: the readings of each kind, one record for each seed.

    Args:
        folder: Folder of the experiment.
        kinds: Names of the kinds.
    """
    seeds = seed_folders(folder)
    return {name: [read(seed / name) for seed in seeds] for name in kinds}


def seconds_of_kinds(folder: Path, kinds: Collection[str]) -> float:
    """Sum the processor's time of what `train_kinds` trained, of which two run side by side.

    Args:
        folder: Folder of the experiment.
        kinds: Names of the kinds.
    """
    return seconds_on_two_cores(seed / name for seed in seed_folders(folder) for name in kinds)
