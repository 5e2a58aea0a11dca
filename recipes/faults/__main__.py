"""`python -m recipes.faults`: make all runs, compare the detectors, write the page."""

from pathlib import Path
from typing import Annotated

import typer

from recipes.enwik8.text import Text, load
from recipes.faults import campaign, unseen_page, widths
from recipes.faults.detectors import read_run
from recipes.faults.kinds import FAULTS
from recipes.faults.page import KINDS, draw, write
from recipes.faults.training import Job, run
from recipes.faults.trainings import TRAININGS
from recipes.study.drawing import save_small
from recipes.study.experiment import in_processes, one_line_errors

# Numbers from here on: no limit of an alert was chosen with any of these runs.
_FIRST = 1_000
_WIDTHS = (64, 96)


def plan(count: int, *, small: bool) -> list[Job]:
    """List the runs: as many of each fault and width, and twice as many healthy ones.

    Args:
        count: Number of runs.
        small: Whether to take one width and the first fault of each kind alone.
    """
    names = [faults[0] for faults in KINDS.values()] if small else list(FAULTS)
    return [
        Job(number, fault, width)
        for number in range(_FIRST, _FIRST + 2 * count)
        for width in _WIDTHS[: 1 if small else None]
        for fault in ("", *(names if number < _FIRST + count else ()))
    ]


def make_unseen(given: Text, folder: Path, processes: int) -> None:
    """Put the faults that no alert was made for into five trainings, and write two pages."""
    calls = [(name, given, folder) for name in TRAININGS]
    in_processes(campaign.run, calls, min(processes, len(calls)))
    for name, text in {"unseen": unseen_page.write(folder), "widths": widths.write(folder)}.items():
        page = folder / f"{name}.md"
        page.write_text(text)
        print(page)


def main(
    small: Annotated[
        bool, typer.Option(help="A narrow model with one fault of each kind, in ten minutes.")
    ] = False,
    unseen: Annotated[
        bool, typer.Option(help="Faults that no alert was made for, in five other trainings.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; what is complete is kept.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, as `make enwik8` takes it.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    count: Annotated[int | None, typer.Option(min=1, help="Runs of each fault and width.")] = None,
) -> None:
    """Put faults into healthy trainings, and measure which numbers notice them, and how early."""
    name = "faults-unseen" if unseen else "faults-small" if small else "faults"
    folder = out or Path("runs") / name
    jobs = plan(count or (1 if small else 6), small=small)
    with one_line_errors():
        given = load(data)
        if unseen:
            make_unseen(given, folder, processes)
            return
        print(f"text: {given.source}\n{len(jobs)} runs in {folder}", flush=True)
        in_processes(run, [(job, given, folder) for job in jobs], processes)
    runs = [read_run(job, folder) for job in jobs]
    page = folder / "warnings.md"
    page.write_text(write(runs))
    print(page, save_small(draw(runs), folder / "pictures" / "warnings.png"), sep="\n")


if __name__ == "__main__":
    typer.run(main)
