"""Runs that are watched: as an application, or printed once where no terminal can show one."""

import sys
from collections.abc import Sequence
from pathlib import Path

from geomon.record import read
from geomon.show.loading import name_runs
from geomon.show.terminal.overview import safe, view
from geomon.show.terminal.runs import Watched

try:
    from rich.console import Console
except ImportError as error:
    raise ImportError("the terminal view needs rich: pip install 'geomon[terminal]'") from error

# For outputs without Unicode.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█·±→−–…", "_.-~=+*#|+>--.")


def watch(directories: Sequence[Path], stack: str | None = None, *, once: bool = False) -> None:
    """Show runs while they are recorded, until q is pressed; or print how they are now.

    They are printed once where that is asked for, and where the output is no terminal that can
    draw. An application waits for folders that are not there yet.

    Raises:
        FileNotFoundError: A folder holds no record, and it is printed.
        ValueError: A file is not a record, or a model has no such stack.
        ImportError: textual is missing for the application.
    """
    console = Console()
    can_draw = console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()
    names = name_runs(directories)
    if once or not can_draw or not console.encoding.startswith("utf"):
        _print(console, names, directories, stack)
        return
    from geomon.show.terminal.app import WatchApp

    pairs = zip(directories, names, strict=True)
    app = WatchApp([Watched(directory, stack, name) for directory, name in pairs])
    trouble = app.run(mouse=False)  # so that text can be selected as ever
    if trouble:
        raise ValueError(trouble)


def _print(
    console: Console, names: Sequence[str], directories: Sequence[Path], stack: str | None
) -> None:
    runs = [read(directory).of_stack(stack) for directory in directories]
    with console.capture() as captured:
        for name, readings in zip(names, runs, strict=True):
            if len(runs) > 1:
                console.print(safe(name, "bold"))
            console.print(view(readings))
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.write(text if console.encoding.startswith("utf") else text.translate(_ASCII))
