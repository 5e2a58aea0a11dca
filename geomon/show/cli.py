"""The command line: `geomon watch`, `geomon figure` and `geomon summary` on the record of a run."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from geomon.record.reading import FILE_NAME, Reading, Readings, read
from geomon.record.stacks import of_stack

if TYPE_CHECKING:
    import typer
    from rich.console import Console

# Seconds between looks at the file, and after which the view is drawn anew though nothing came.
_LOOK, _REFRESH = 0.5, 5.0


def main() -> None:
    """Run the command line."""
    try:
        app = make_app()
    except ImportError as error:
        sys.exit(f"the command line needs typer and rich ({error}): pip install 'geomon[terminal]'")
    app()


def make_app() -> "typer.Typer":
    """The commands.

    Raises:
        ImportError: typer or rich is missing.
    """
    import rich  # noqa: F401  (missing: better said now than in the middle of a command)
    import typer

    run = typer.Argument(help=f"Folder of a run, with its {FILE_NAME} in it.", metavar="DIR")
    of = typer.Option(help="Of a model with several stacks, the one to show: encoder, decoder.")
    app = typer.Typer(
        help="Look at what geomon recorded of a training run.",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.command()
    def watch(
        directory: Annotated[Path, run],
        once: Annotated[bool, typer.Option("--once", help="Show the present, and leave.")] = False,
        stack: Annotated[str | None, of] = None,
    ) -> None:
        """Follow a run live, until Ctrl-C."""
        with _errors_in_a_line():
            watch_once(directory, stack) if once else follow(directory, stack)

    @app.command()
    def figure(
        directory: Annotated[Path, run],
        out: Annotated[
            Path | None, typer.Option(help="Where to write; by default geometry.png in DIR.")
        ] = None,
        stack: Annotated[str | None, of] = None,
    ) -> None:
        """Draw the picture of a run: geometry.png."""
        with _errors_in_a_line():
            typer.echo(f"wrote {draw(directory, out, stack)}")

    @app.command()
    def summary(directory: Annotated[Path, run], stack: Annotated[str | None, of] = None) -> None:
        """Say in words what happened in a run."""
        from geomon.analysis.summary import summarise

        with _errors_in_a_line():
            typer.echo("\n".join(summarise(_readings(directory, stack))))

    return app


def draw(directory: Path, out: Path | None = None, stack: str | None = None) -> Path:
    """Write the figure of a run.

    Args:
        directory: Of the run.
        out: Of the figure; None for `geometry.png` beside the record.
        stack: Of a model with several, the one to draw; None for the main one.

    Raises:
        FileNotFoundError: There is no record.
        ValueError: There are no readings, or `out` has an ending that is no picture's.
        ImportError: matplotlib is missing.
    """
    readings = _readings(directory, stack)
    from geomon.show.figures import geometry_figure, save

    folder = directory if directory.is_dir() else directory.parent
    return save(geometry_figure(readings), out or folder / "geometry.png")


def watch_once(directory: Path, stack: str | None = None) -> None:
    """Print the present view, of one stack.

    Raises:
        FileNotFoundError: There is no record.
    """
    from rich.console import Console

    from geomon.show.terminal import view

    Console().print(view(of_stack(read(directory), stack)))


def follow(
    directory: Path,
    stack: str | None = None,
    *,
    console: "Console | None" = None,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Show a run as it is recorded: a view that renews itself, or on a pipe a line per reading.

    Args:
        directory: Of the run; it is waited for.
        stack: Of a model with several, the one to show; None for the main one.
        console: Of rich; None for standard output.
        going: Asked before each look, whether to go on.

    Raises:
        ValueError: The file is not a record.
    """
    from rich.console import Console

    console = console or Console()
    follower = Follower(directory, stack)
    if not follower.path.is_file():
        console.print(
            f"waiting for {follower.path} (Ctrl-C ends)",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    try:
        (_live if console.is_terminal else _lines)(follower, console, going)
    except KeyboardInterrupt:
        console.show_cursor()


def _live(follower: "Follower", console: "Console", going: Callable[[], bool]) -> None:
    from rich.live import Live

    from geomon.show.terminal import view

    with Live(console=console, auto_refresh=False) as live:
        drawn = -_REFRESH
        while going():
            if follower.look() or time.monotonic() - drawn > _REFRESH:
                drawn = time.monotonic()
                if follower.path.is_file():
                    live.update(view(follower.readings), refresh=True)
            time.sleep(_LOOK)


def _lines(follower: "Follower", console: "Console", going: Callable[[], bool]) -> None:
    from geomon.show.terminal import line

    while going():
        for text in [line(new, follower.readings) for new in follower.look()]:
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        time.sleep(_LOOK)


class Follower:
    """Reads on where it stopped: a record of a large model grows to hundreds of megabytes.

    Args:
        directory: Of the run, or the file itself; it may appear later.
        stack: Of a model with several, the one to follow; None for the main one.
    """

    def __init__(self, directory: Path, stack: str | None = None) -> None:
        self._stack = stack
        self.path = directory if directory.suffix == ".jsonl" else directory / FILE_NAME
        self.readings: list[Reading] = []
        self._inode, self._offset = -1, 0

    def look(self) -> list[Reading]:
        """The readings written since the last look.

        Raises:
            ValueError: The file is not a record.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self.readings = status.st_ino, 0, []
        if status.st_size == self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        new = [reading for line in whole.splitlines() if (reading := self._reading(line))]
        self._offset += len(whole)
        new = of_stack(Readings([], new), self._stack).readings if new else new
        self.readings += new
        return new

    def _reading(self, line: bytes) -> Reading | None:
        """The reading of a line; None for a description of the run."""
        try:
            content: dict[str, Any] = json.loads(line)
            return None if "run" in content else Reading.from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} holds a line that is not a record's ({error}): expected what geomon "
                "writes"
            ) from error


def _readings(directory: Path, stack: str | None) -> Readings:
    """A record with at least one reading, of one stack."""
    readings = read(directory)
    if not len(readings):
        raise ValueError(f"no readings yet in {directory}: try again when the run has begun")
    return of_stack(readings, stack)


@contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """Bad input ends with one line and exit code 2."""
    import typer

    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"geomon: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    main()
