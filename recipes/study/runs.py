"""Trainings of an experiment: side by side, each in its folder, none made twice."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

_FILE_NAME = "finished.json"


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
