"""What the commands of the experiments share: options, progress, results, and errors in a line."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from recipes.enwik8.data import DataError
from recipes.study.claim import Claim, save_claims, verdict_lines
from recipes.study.runs import RunError

SeedCount = Annotated[int, Option(min=1, help="Number of seeds: 0, 1, ...")]
Out = Annotated[
    Path | None,
    Option(help="Folder; what is complete there is kept. Default: the first of runs/NAME, "
           "runs/NAME-2, ... that is free."),
]  # fmt: skip
Text = Annotated[str | None, Option(help="enwik8 or a prefix of it, as `make enwik8` takes it.")]
Processes = Annotated[int, Option(min=1, help="Trainings side by side.")]
# Sizes of models and trainings; options with other limits are declared where they are used.
Width = Annotated[int, Option(min=2, help="Width of the hidden states.")]
Heads = Annotated[int, Option(min=1, help="Heads of each attention.")]
Context = Annotated[int, Option(min=2, max=4096, help="Characters in a window.")]
Batch = Annotated[int, Option(min=1, help="Windows in a batch.")]
Steps = Annotated[int, Option(min=1, help="Optimizer updates.")]


@contextmanager
def one_line_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn errors of bad input into one line of text and exit code 2.

    Args:
        more: Kinds of errors besides those of texts, folders and trainings.
    """
    kinds: tuple[type[Exception], ...] = (DataError, RunError, OSError, *more)
    try:
        yield
    except kinds as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


def check_heads(width: int, heads: int) -> None:
    """Check that heads share a width evenly.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.

    Raises:
        RunError: They do not.
    """
    if width % heads:
        raise RunError(f"--width {width} cannot be shared among --heads {heads}: choose others")


def print_progress() -> Callable[[int, int], None]:
    """Make the function that prints how many trainings are complete, and the time until then."""
    begun = time.perf_counter()

    def report(done: int, count: int) -> None:
        seconds = time.perf_counter() - begun
        print(f"{done} of {count} trainings are complete, {seconds:.0f} s", flush=True)

    return report


def leave_results(
    claims: Sequence[Claim], folder: Path, *, figures: Iterable[Path], table: Iterable[str] = ()
) -> None:
    """Write the claims of an experiment, and print them with the paths of what it leaves.

    Args:
        claims: Claims of the experiment.
        folder: Folder of the experiment.
        figures: Paths of its pictures.
        table: Lines that stand before the claims.
    """
    path = save_claims(claims, folder)
    lines = list(table)
    print("\n".join(["", *lines, *[""] * bool(lines), *verdict_lines(claims), ""]))
    for figure in figures:
        print(f"figure: {figure}")
    print(f"claims: {path}")
    print(f"records: in {folder}; geomon watch shows one")
