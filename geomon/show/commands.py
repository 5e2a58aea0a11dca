"""Commands on the record of a run: `geomon watch`, `geomon figure` and `geomon summary`."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from geomon.analysis import summarise
from geomon.record import FILE_NAME, Readings
from geomon.record.printable import printable
from geomon.show.loading import load, load_all, name_runs

if TYPE_CHECKING:
    import typer

# Kinds of figures, that of the run first; matplotlib is loaded only to draw them.
_KINDS = (
    "run", "dimension", "profiles", "map", "heads", "cosines", "means", "clouds", "stability",
    "drift", "norms", "spectra",
)  # fmt: skip


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
    one_stack = typer.Option(help="Which stack to show of a model with several: encoder, decoder.")

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
        """Follow runs live: charts in a terminal (q quits); elsewhere print the present."""
        with exit_on_bad_input():
            from geomon.show.terminal import watch as show

            show(directories, stack, once=once)

    @app.command()
    def figure(
        directories: Annotated[
            list[Path],
            typer.Argument(
                help=f"Folder of a run, with its {FILE_NAME} in it; folders of several runs for "
                "the kind stability.",
                metavar="DIR...",
            ),
        ],
        kind: Annotated[
            list[str] | None,
            typer.Option(help=f"What to draw: {', '.join(_KINDS)}. May be given several times."),
        ] = None,
        every: Annotated[
            bool, typer.Option("--all", help="Draw every kind that the run can give.")
        ] = False,
        metric: Annotated[
            str | None, typer.Option(help="Metric of profiles, map, heads or cosines.")
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(
                help="Where to write: the file of one figure, or the folder of several. By default "
                "geometry.png in DIR for the run, and DIR/figures for the others; of several runs "
                "in the first."
            ),
        ] = None,
        dark: Annotated[bool, typer.Option("--dark", help="For a dark page.")] = False,
        stack: Annotated[str | None, one_stack] = None,
    ) -> None:
        """Draw figures of a run: geometry.png, or others by --kind."""
        with exit_on_bad_input():
            kinds = list(_KINDS) if every else kind or [_KINDS[0]]
            figures = write_figures(
                directories, kinds, out, stack, metric=metric, dark=dark, skip=every
            )
            for line in figures:
                typer.echo(printable(line))

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

            runs = load_runs(directories, stack)
            _say_remarks([run.path for run in runs], [run.readings for run in runs])
            with _writes(out) as part:
                size = write_report(runs, part).stat().st_size / 1e6
            typer.echo(printable(f"wrote {out} ({size:.1f} MB): open it in a browser"))

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

            readings = load_all(directory)
            _say_remarks([directory], [readings])
            with _writes(out) as part:
                write(readings, part)
            typer.echo(printable(f"wrote {out}"))

    @app.command()
    def alerts(
        name: Annotated[str | None, typer.Argument(help="One of them.", metavar="NAME")] = None,
    ) -> None:
        """Say what each alert looks for, and what to do."""
        with exit_on_bad_input():
            from geomon.analysis.alerts import RULES, check_alerts

            check_alerts(() if name is None else (name,))
            for each in RULES if name is None else (name,):
                rule = RULES[each]
                found = re.sub(r"\{[^}]*\}", "...", rule.text.replace("head{plural}", "heads"))
                typer.echo(fit_to_terminal(f"{each}: {found}; {rule.advice}"))

    @app.command()
    def summary(
        directory: Annotated[Path, folder], stack: Annotated[str | None, one_stack] = None
    ) -> None:
        """Say in words what happened in a run."""
        with exit_on_bad_input():
            for sentence in summarise(load(directory, stack)):
                typer.echo(fit_to_terminal(printable(sentence)))


def fit_to_terminal(text: str, *, indent: str = "") -> str:
    """Break a text between words where the output is a terminal, which would break words.

    Args:
        text: Text in one line.
        indent: Beginning of its first line; further lines begin two columns farther.

    Returns:
        The text in lines; in one line where the output is a file or a pipe.
    """
    if not sys.stdout.isatty():
        return indent + text
    return textwrap.fill(
        text, shutil.get_terminal_size().columns, initial_indent=indent,
        subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def write_figures(
    directories: Sequence[Path],
    kinds: Sequence[str],
    out: Path | None = None,
    stack: str | None = None,
    *,
    metric: str | None = None,
    dark: bool = False,
    skip: bool = False,
) -> Iterator[str]:
    """Write figures of a run or of several, one after another.

    Args:
        directories: Folder of the run, or the path of its file; several for kinds that lay runs
            over one another.
        kinds: Names of the kinds of figures.
        out: Path of the figure, or of the folder of several; None for `geometry.png` beside the
            first record, and `figures/` for others than that of the run.
        stack: Name of the stack to draw, for a model with several; None for the main one.
        metric: Name of the metric to draw, for kinds that take one.
        dark: Whether the figures are for a dark page.
        skip: Whether a kind that the runs cannot give is left out, with a line that says why.

    Yields:
        A line on each figure.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The record has no readings or no such stack, there is no such kind, the runs
            cannot give it, or `out` does not end like the name of a picture or cannot be written.
        ImportError: matplotlib is missing.
    """
    runs = [load(directory, stack) for directory in directories]
    _say_remarks(directories, runs)
    from geomon.show.figures import KINDS, draw, page, save
    from geomon.show.panels import NotMeasuredError

    if out is not None and len(kinds) > 1 and out.is_file():
        raise ValueError(f"{out} is a file: give a folder by --out, for several figures")
    first = directories[0]
    folder = first if first.is_dir() else first.parent
    ending = "_dark" if dark else ""
    for kind in kinds:
        if skip and len(runs) > 1 and not KINDS[kind].takes_runs:
            yield f"no {kind}: it is of one run"
            continue
        takes = len(kinds) == 1 or (kind in KINDS and KINDS[kind].takes_metric)
        wanted = metric if takes else None
        try:
            with page(dark=dark):
                figure = draw(kind, runs, wanted)
        except NotMeasuredError as error:
            if not skip:
                raise
            yield f"no {kind}: {error}"
            continue
        name = f"{kind}_{metric}{ending}.png" if wanted else f"{kind}{ending}.png"
        if out is not None:
            path = out / name if len(kinds) > 1 else out
        elif kind == _KINDS[0]:
            path = folder / f"geometry{ending}.png"
        else:
            path = folder / "figures" / name
        with _writes(path) as part, page(dark=dark):
            save(figure, part)
        yield f"wrote {path}"


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
            `out` does not end like the name of a picture or cannot be written.
        ImportError: matplotlib is missing, for a picture.
    """
    from geomon.analysis.compare import compare
    from geomon.show.comparison import describe_differences
    from geomon.show.settings import describe_settings

    runs = load(first, stack), load(second, stack)
    _say_remarks([first, second], runs)
    names = (str(first), str(second))
    found = compare(*runs)
    lines = describe_differences(found, names)
    settings = describe_settings(*runs)
    lines[1:1] = [settings] if settings else []
    if out is not None:
        from geomon.show.figures import save
        from geomon.show.figures.compare import compare_figure

        one, other = name_runs([first, second])
        figure = compare_figure(runs, (one, other), found)
        with _writes(out) as part:
            save(figure, part)
        lines.append(f"wrote {out}")
    return lines


def _say_remarks(paths: Sequence[Path], runs: Sequence[Readings]) -> None:
    """Say on standard error what is to be known of records as a whole."""
    for path, readings in zip(paths, runs, strict=True):
        for remark in readings.remarks():
            sys.stderr.write(printable(f"geomon: {path}: {remark}") + "\n")


@contextmanager
def _writes(path: Path) -> Iterator[Path]:
    """Have a file written whole or not at all, and say of one that cannot be what to do.

    Args:
        path: Path of the file.

    Yields:
        Path to write to, of the same ending: that of a part beside the file, which takes its place
        in the end. What is no file, /dev/stdout say, is written itself.

    Raises:
        ValueError: The file cannot be written.
    """
    place = Path(os.path.realpath(path))
    whole = path.exists() and not path.is_file()
    part = path if whole else place.with_name(f".{place.stem[:100]}-part{place.suffix}")
    try:
        yield part
        if not whole:
            part.replace(place)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}): give another place by --out"
        ) from error
    finally:
        if not whole:
            with suppress(OSError):
                part.unlink(missing_ok=True)


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn errors of bad input into one line of text and exit code 2."""
    import typer

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:  # who reads has seen enough: `geomon compare A B | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error
    except (ValueError, OSError, ImportError) as error:
        words = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            words = f"{os.fspath(error.filename)}: {error.strerror}"
        typer.echo(f"geomon: {printable(' '.join(words.split()))}", err=True)
        raise typer.Exit(2) from error
