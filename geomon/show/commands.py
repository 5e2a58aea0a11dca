"""Commands on the record of a run: `geomon watch`, `geomon figure` and `geomon summary`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from geomon.analysis import summarise
from geomon.record import FILE_NAME, Follower, Readings, read
from geomon.record.printable import printable

if TYPE_CHECKING:
    import typer
    from rich.console import Console

# Seconds between two looks at the file.
_POLL = 0.5
# Seconds after which the view is drawn again without a new reading, because it shows an age.
_REFRESH = 5.0


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
    folders = typer.Argument(help="Folders of runs.", metavar="DIR...")
    one_stack = typer.Option(
        help="Of a model with several stacks, the one to show: encoder, decoder."
    )

    @app.command()
    def watch(
        directory: Annotated[Path, folder],
        once: Annotated[bool, typer.Option("--once", help="Show the present, and leave.")] = False,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Follow a run live, until Ctrl-C."""
        with exit_on_bad_input():
            print_view(directory, stack) if once else follow(directory, stack)

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
    def report(
        directories: Annotated[list[Path], folders],
        out: Annotated[Path, typer.Option("--out", "-o", help="Where to write.")] = Path(
            "report.html"
        ),
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Write a page on one run or several that works without network: report.html."""
        with exit_on_bad_input():
            from geomon.show.report import load_runs, write_report

            path = write_report(load_runs(directories, stack), out)
            size = path.stat().st_size / 1e6
            typer.echo(printable(f"wrote {path} ({size:.1f} MB): open it in a browser"))

    @app.command()
    def compare(
        first: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
        second: Annotated[Path, typer.Argument(help="Folder of another.", metavar="DIR")],
        out: Annotated[
            Path | None, typer.Option("--out", "-o", help="Draw the differences: a picture.")
        ] = None,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Say in which values two runs differ by more than their errors, and draw it."""
        with exit_on_bad_input():
            for line in compare_runs(first, second, out, stack):
                typer.echo(printable(line))

    @app.command()
    def export(
        directory: Annotated[Path, folder],
        out: Annotated[Path, typer.Option("--out", "-o", help="File: .csv or .parquet.")],
    ) -> None:
        """Write all values of a run to a table, a row for each: CSV or Parquet."""
        with exit_on_bad_input():
            from geomon.record.export import export as write

            typer.echo(printable(f"wrote {write(read(directory), out)}"))

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


def compare_runs(
    first: Path, second: Path, out: Path | None = None, stack: str | None = None
) -> list[str]:
    """Compare two runs in words, and draw their differences.

    Args:
        first: Folder of a run, or the path of its file.
        second: Folder of another run.
        out: Path of the picture; None for none.
        stack: Name of the stack to compare, for models with several; None for the main one.

    Returns:
        Lines of text.

    Raises:
        FileNotFoundError: A folder holds no record.
        ValueError: A record has no readings or no such stack, the runs have no common step, or
            `out` does not end like the name of a picture.
        ImportError: matplotlib is missing, for a picture.
    """
    from geomon.analysis.compare import compare, describe_differences

    runs = _load(first, stack), _load(second, stack)
    names = (str(first), str(second))
    found = compare(*runs)
    lines = describe_differences(found, names)
    if out is not None:
        from geomon.show.figures import save
        from geomon.show.figures.compare import compare_figure

        short = (first.name, second.name) if first.name != second.name else names
        lines.append(f"wrote {save(compare_figure(runs, short, found), out)}")
    return lines


def print_view(directory: Path, stack: str | None = None) -> None:
    """Print the view of a run once.

    Args:
        directory: Folder of the run, or the path of its file.
        stack: Name of the stack to show, for a model with several; None for the main one.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The file is not a record, or the model has no such stack.
    """
    from rich.console import Console

    from geomon.show.terminal import view

    Console().print(view(read(directory).of_stack(stack)))


def follow(
    directory: Path,
    stack: str | None = None,
    *,
    console: "Console | None" = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> None:
    """Show a run while it is recorded: a view that is updated, or a line per reading on a pipe.

    Args:
        directory: Folder of the run, which may appear later.
        stack: Name of the stack to show, for a model with several; None for the main one.
        console: Console of rich; None for standard output.
        keep_going: Function that returns whether to go on, called before each look at the file.

    Raises:
        ValueError: The file is not a record, or the model has no such stack.
    """
    from rich.console import Console

    console = console or Console()
    follower = Follower(directory, stack)
    if not follower.path.is_file():
        console.print(
            printable(f"waiting for {follower.path} (Ctrl-C ends)"),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    try:
        show = _update_view if console.is_terminal else _print_lines
        show(follower, console, keep_going)
    except KeyboardInterrupt:
        console.show_cursor()


def _update_view(follower: Follower, console: "Console", keep_going: Callable[[], bool]) -> None:
    from rich.live import Live

    from geomon.show.terminal import view

    with Live(console=console, auto_refresh=False) as live:
        drawn = -_REFRESH
        while keep_going():
            if follower.look() or time.monotonic() - drawn > _REFRESH:
                drawn = time.monotonic()
                if follower.path.is_file():
                    live.update(view(_followed(follower)), refresh=True)
            time.sleep(_POLL)


def _print_lines(follower: Follower, console: "Console", keep_going: Callable[[], bool]) -> None:
    from geomon.show.terminal import format_line

    said = False
    while keep_going():
        texts = [format_line(new, follower.readings) for new in follower.look()]
        remarks = _followed(follower).remarks()
        if not said:
            texts += remarks
            said = bool(remarks)
        for text in texts:
            console.print(printable(text), soft_wrap=True, markup=False, highlight=False)
        time.sleep(_POLL)


def _followed(follower: Follower) -> Readings:
    return Readings([], follower.readings, follower.mixed_at)


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
