"""Commands on the record of a run: `geomon watch`, `geomon figure` and `geomon summary`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from geomon.analysis import summarise
from geomon.record import FILE_NAME, Readings, read
from geomon.record.printable import printable

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the commands that look at a record.

    Args:
        app: The command line that gets them.

    Raises:
        ImportError: typer or rich is missing.
    """
    import rich  # noqa: F401  (if missing, fail now and not in the middle of a command)
    import typer

    folder = typer.Argument(help=f"Folder of a run, with its {FILE_NAME} in it.", metavar="DIR")
    one_stack = typer.Option(
        help="Of a model with several stacks, the one to show: encoder, decoder."
    )

    @app.command()
    def watch(
        directories: Annotated[
            list[Path],
            typer.Argument(
                help=f"Folders of runs, with their {FILE_NAME} in them; they may appear later.",
                metavar="DIR...",
            ),
        ],
        once: Annotated[bool, typer.Option("--once", help="Print the present, and leave.")] = False,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Follow runs live: charts in a terminal (q quits), a line per reading on a pipe."""
        with exit_on_bad_input():
            from geomon.show.terminal import follow, print_view

            print_view(directories, stack) if once else follow(directories, stack)

    @app.command()
    def figure(
        directory: Annotated[Path, folder],
        out: Annotated[
            Path | None, typer.Option(help="Where to write; by default geometry.png in DIR.")
        ] = None,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Draw the picture of a run: geometry.png."""
        with exit_on_bad_input():
            typer.echo(printable(f"wrote {write_figure(directory, out, stack)}"))

    @app.command()
    def summary(
        directory: Annotated[Path, folder], stack: Annotated[str | None, one_stack] = None
    ) -> None:
        """Say in words what happened in a run."""
        with exit_on_bad_input():
            typer.echo("\n".join(map(printable, summarise(_load(directory, stack)))))


def write_figure(directory: Path, out: Path | None = None, stack: str | None = None) -> Path:
    """Write the figure of a run.

    Args:
        directory: Folder of the run, or the path of its file.
        out: Path of the figure; None for `geometry.png` beside the record.
        stack: Name of the stack to draw, for a model with several; None for the main one.

    Returns:
        Path of the figure.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The record has no readings or no such stack, or `out` does not end like the name
            of a picture.
        ImportError: matplotlib is missing.
    """
    readings = _load(directory, stack)
    from geomon.show.figures import geometry_figure, save

    figure = geometry_figure(readings)
    folder = directory if directory.is_dir() else directory.parent
    return save(figure, out or folder / "geometry.png")


def _load(directory: Path, stack: str | None) -> Readings:
    """Read one stack of a record that has at least one reading."""
    readings = read(directory)
    if not len(readings):
        raise ValueError(f"no readings yet in {directory}: try again when the run has begun")
    return readings.of_stack(stack)


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn errors of bad input into one line of text and exit code 2."""
    import typer

    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"geomon: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(2) from error
