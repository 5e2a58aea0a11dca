"""Commands that show the record of a run: `geomon watch`, `report`, `figure`, `summary` etc."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from geomon.record import FILE_NAME, Readings, printable, read
from geomon.show.settings import describe_settings, name_runs
from geomon.show.tables import fit, run_table, write_text

if TYPE_CHECKING:
    import typer

# Kinds of figures, listed here because importing them from figures would load matplotlib.
_KINDS = ("run", "dimension", "profiles", "map", "heads", "cosines")


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Report errors from bad input as one line on standard error and exit with code 2."""
    import typer

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:  # the reader stopped early: `geomon compare A B | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error
    except (ValueError, OSError, ImportError) as error:
        words = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            words = f"{os.fspath(error.filename)}: {error.strerror}"
        typer.echo(f"geomon: {printable(' '.join(words.split()))}", err=True)
        raise typer.Exit(2) from error


def add_commands(app: "typer.Typer") -> None:
    """Add the commands that show a record.

    Args:
        app: Command line application to add them to.

    Raises:
        ImportError: If typer or rich is missing.
    """
    import rich  # noqa: F401  (if missing, fail now and not in the middle of a command)
    import typer

    folder = typer.Argument(help=f"Folder of a run that contains its {FILE_NAME}.", metavar="DIR")
    one_stack = typer.Option(help="Stack to show if the model has several: encoder or decoder.")

    @app.command()
    @exit_on_bad_input()
    def watch(
        directories: Annotated[
            list[Path],
            typer.Argument(
                help=f"Folders of runs that contain their {FILE_NAME}; they may appear later.",
                metavar="DIR...",
            ),
        ],
        metric: Annotated[
            str | None, typer.Option(help="Metric of the chart; by default the first one.")
        ] = None,
        layer: Annotated[
            int | None, typer.Option(help="Layer of the chart; by default the mean over layers.")
        ] = None,
        once: Annotated[bool, typer.Option("--once", help="Print the current state.")] = False,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Follow runs live in a terminal until Ctrl-C; elsewhere print the current state."""
        from geomon.show.terminal import watch as show

        show(directories, stack, metric=metric, layer=layer, once=once)

    @app.command()
    @exit_on_bad_input()
    def figure(
        directory: Annotated[Path, folder],
        kind: Annotated[
            list[str] | None,
            typer.Option(help=f"What to draw: {', '.join(_KINDS)}. Can be repeated."),
        ] = None,
        every: Annotated[
            bool, typer.Option("--all", help="Draw every kind that the run has values for.")
        ] = False,
        metric: Annotated[
            str | None, typer.Option(help="Metric of profiles, map, heads or cosines.")
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(
                help="Output file of one figure, or output folder of several. By default "
                "geometry.png in DIR for the run, and DIR/figures for the others."
            ),
        ] = None,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Draw figures of a run: geometry.png by default, or those named by --kind."""
        kinds = list(_KINDS) if every else kind or [_KINDS[0]]
        (readings,) = _load([directory], stack)
        for line in _write_figures(readings, directory, kinds, metric, out, skip=every):
            typer.echo(printable(line))

    @app.command()
    @exit_on_bad_input()
    def report(
        directories: Annotated[
            list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")
        ],
        out: Annotated[Path, typer.Option("--out", "-o", help="Output file.")] = Path(
            "report.html"
        ),
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Write an HTML report on one or several runs that works offline: report.html."""
        from geomon.show.report import write_report

        runs = dict(zip(name_runs(directories), _load(directories, stack), strict=True))
        with _writes(out) as part:
            size = write_report(runs, part).stat().st_size / 1e6
        typer.echo(printable(f"wrote {out} ({size:.1f} MB): open it in a browser"))

    @app.command()
    @exit_on_bad_input()
    def compare(
        first: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
        second: Annotated[Path, typer.Argument(help="Folder of another run.", metavar="DIR")],
        out: Annotated[
            Path | None, typer.Option("--out", "-o", help="Draw the differences into this picture.")
        ] = None,
        steps: Annotated[
            str | None,
            typer.Option(
                help="A step of each run, such as 1500:0 or last:first; by default the last that "
                "both have read."
            ),
        ] = None,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """List the values where two runs differ by more than their errors, or draw them."""
        from geomon.analysis import compare as find_differences
        from geomon.show.comparison import describe_differences, parse_steps

        one, other = _load([first, second], stack)
        asked = None if steps is None else parse_steps(steps, (one, other))
        found = find_differences(one, other, asked)
        lines = describe_differences(found, (str(first), str(second)), are_given=steps is not None)
        lines[1:1] = filter(None, [describe_settings(one, other)])
        if out is not None:
            from geomon.show.figures import compare_figure, save

            picture = compare_figure((one, other), name_runs([first, second]), found)
            with _writes(out) as part:
                save(picture, part)
            lines.append(f"wrote {out}")
        for line in lines:
            typer.echo(printable(line))

    @app.command()
    @exit_on_bad_input()
    def export(
        directory: Annotated[Path, folder],
        out: Annotated[Path, typer.Option("--out", "-o", help="Output file: .csv or .parquet.")],
    ) -> None:
        """Write all values of a run to a table with one row per value: CSV or Parquet."""
        from geomon.record import export as write

        readings = _read(directory)
        _say_remarks(directory, readings)
        with _writes(out) as part:
            write(readings, part)
        typer.echo(printable(f"wrote {out}"))

    @app.command()
    @exit_on_bad_input()
    def alerts(
        name: Annotated[str | None, typer.Argument(help="A single alert.", metavar="NAME")] = None,
    ) -> None:
        """Explain what each alert detects, what to do about it, and how often it is false."""
        from geomon.analysis import RULES, check_alerts

        check_alerts(() if name is None else (name,))
        for each in RULES if name is None else (name,):
            rule = RULES[each]
            write_text(fit(f"{each}: {rule.seeks}; {rule.advice}; {rule.odds}"))

    @app.command()
    @exit_on_bad_input()
    def summary(
        directory: Annotated[Path, folder], stack: Annotated[str | None, one_stack] = None
    ) -> None:
        """Summarise a run: a table of its headline values, alerts, its cost and all notes."""
        readings = _read(directory).of_stack(stack)
        notes = {note.key: note for each in readings for note in each.notes}
        words = [f"note: {note.words()}" for note in notes.values() if not note.is_alert]
        write_text("\n".join([run_table(readings), *map(fit, map(printable, words))]))


def _read(directory: Path) -> Readings:
    """Read all stacks of a record, or say in one line why no page can be made of it."""
    readings = read(directory)
    if not readings:
        why = [*readings.remarks(), "try again when the run has begun"][0]
        raise ValueError(f"no readings yet in {directory}: {why}")
    return readings


def _load(directories: Sequence[Path], stack: str | None) -> list[Readings]:
    """Read one stack of each record, and write remarks on the records to standard error."""
    runs = [_read(directory).of_stack(stack) for directory in directories]
    for directory, readings in zip(directories, runs, strict=True):
        _say_remarks(directory, readings)
    return runs


def _say_remarks(directory: Path, readings: Readings) -> None:
    for remark in readings.remarks():
        sys.stderr.write(printable(f"geomon: {directory}: {remark}") + "\n")


def _write_figures(
    readings: Readings,
    directory: Path,
    kinds: Sequence[str],
    metric: str | None,
    out: Path | None,
    *,
    skip: bool,
) -> Iterator[str]:
    """Write figures of a run and yield a line on each; with `skip`, skip kinds without values."""
    from geomon.show.figures import TAKES_METRIC, draw, save
    from geomon.show.panels import NotMeasuredError

    if out is not None and len(kinds) > 1 and out.is_file():
        raise ValueError(f"{out} is a file: pass a folder with --out for several figures")
    folder = directory if directory.is_dir() else directory.parent
    for kind in kinds:
        wanted = metric if len(kinds) == 1 or kind in TAKES_METRIC else None
        try:
            figure = draw(kind, readings, wanted)
        except NotMeasuredError as error:
            if not skip:
                raise
            yield f"no {kind}: {error}"
            continue
        name = f"{kind}_{metric}.png" if wanted else f"{kind}.png"
        if out is not None:
            path = out / name if len(kinds) > 1 else out
        else:
            path = folder / ("geometry.png" if kind == _KINDS[0] else f"figures/{name}")
        with _writes(path) as part:
            save(figure, part)
        yield f"wrote {path}"


@contextmanager
def _writes(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once written, so no file is left incomplete."""
    place = Path(os.path.realpath(path))
    whole = path.exists() and not path.is_file()  # /dev/stdout, for instance
    part = path if whole else place.with_name(f".{place.stem[:100]}-part{place.suffix}")
    try:
        yield part
        if not whole:
            part.replace(place)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}): pass another path with --out"
        ) from error
    finally:
        if not whole:
            with suppress(OSError):
                part.unlink(missing_ok=True)
