"""`python -m recipes.faults`: make all trainings, compare the detectors, write the table."""

from pathlib import Path
from typing import Annotated

import typer

from recipes.enwik8.data import load
from recipes.faults.kinds import FAULTS
from recipes.faults.subject import draw_settings
from recipes.faults.training import Job, run_job
from recipes.study.experiment import in_processes


def plan(count: int, steps: int) -> list[Job]:
    """List the trainings, those that are needed first at the front.

    Args:
        count: Number of healthy trainings of a size into which faults are put, and of those by
            which limits are chosen.
        steps: Updates of a healthy training.
    """
    faults = tuple(name for name, fault in FAULTS.items() if not fault.block)
    others = tuple(name for name, fault in FAULTS.items() if fault.block)
    jobs = []
    for number in range(count):
        for size in ("narrow", "wide"):
            jobs.append(Job(draw_settings(size, 100 + number), steps))
            jobs.append(Job(draw_settings(size, number), steps, faults))
            jobs.append(Job(draw_settings(size, 200 + number, block="mixtral"), steps, others))
    return jobs


def main(
    small: Annotated[
        bool, typer.Option(help="Two trainings of each kind, in ten minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder; what is complete is kept.")] = Path(
        "runs/faults"
    ),
    data: Annotated[str | None, typer.Option(help="Text, as `make enwik8` takes it.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Trainings side by side.")] = 2,
) -> None:
    """Put faults into healthy trainings, and see which numbers notice them."""
    given = load(data)
    jobs = [(job, given, out) for job in plan(2 if small else 20, 1600)]
    in_processes(run_job, jobs, processes)


if __name__ == "__main__":
    typer.run(main)
