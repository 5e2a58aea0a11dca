"""Runs that are watched: as an application, as a view that is updated, or as lines on a pipe."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from geomon.record import Follower, Readings, read
from geomon.record.printable import printable
from geomon.show.loading import name_runs
from geomon.show.terminal.history import Watched
from geomon.show.terminal.overview import format_line, view

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text
except ImportError as error:
    raise ImportError("the terminal view needs rich: pip install 'geomon[terminal]'") from error

# Seconds between two looks at the files.
_POLL = 0.5
# Seconds after which the view is drawn again without a new reading, because it shows an age.
_REFRESH = 5.0


def print_view(directories: Sequence[Path], stack: str | None = None) -> None:
    """Print the view of each run once.

    Args:
        directories: Folders of runs, or paths of their files.
        stack: Name of the stack to show, for a model with several; None for the main one.

    Raises:
        FileNotFoundError: A folder holds no record.
        ValueError: A file is not a record, or a model has no such stack.
    """
    runs = [read(directory).of_stack(stack) for directory in directories]
    Console().print(_side_by_side(directories, runs))


def follow(
    directories: Sequence[Path],
    stack: str | None = None,
    *,
    console: Console | None = None,
    keep_going: Callable[[], bool] | None = None,
) -> None:
    """Show runs while they are recorded.

    In a terminal that can draw, charts, until q or Ctrl-C; in another one, or without textual, a
    view that is updated; in a dumb terminal and on a pipe, a line per reading.

    Args:
        directories: Folders of runs, which may appear later.
        stack: Name of the stack to show, for a model with several; None for the main one.
        console: Console of rich for the view or the lines; None for standard output.
        keep_going: Function that returns whether to go on, called before each look at the files of
            the view or the lines; None for as long as nobody ends it.

    Raises:
        ValueError: A file is not a record, or a model has no such stack.
    """
    is_given, console = console is not None, console or Console()
    lines = not console.is_terminal or console.is_dumb_terminal
    if not lines and not is_given and _can_draw(console):
        try:
            from geomon.show.terminal.app import WatchApp
        except ImportError as error:
            _say(console, f"a plain view is shown: {error}")
        else:
            pairs = zip(directories, name_runs(directories), strict=True)
            runs = [Watched(directory, stack, name) for directory, name in pairs]
            trouble = WatchApp(runs).run(mouse=False)  # so that text can be selected as ever
            if trouble:
                raise ValueError(trouble)
            return
    followers = [Follower(directory, stack) for directory in directories]
    for follower in followers:
        if not follower.path.is_file():
            _say(console, f"waiting for {follower.path} (Ctrl-C ends)")
    try:
        show = _print_lines if lines else _update_view
        show(directories, followers, console, keep_going or (lambda: True))
    except KeyboardInterrupt:
        console.show_cursor()


def _can_draw(console: Console) -> bool:
    """Return whether charts of Braille characters can be drawn, and keys be read."""
    return console.encoding.startswith("utf") and sys.stdin.isatty()


def _update_view(
    directories: Sequence[Path],
    followers: Sequence[Follower],
    console: Console,
    keep_going: Callable[[], bool],
) -> None:
    with Live(console=console, auto_refresh=False) as live:
        drawn = -_REFRESH
        while keep_going():
            news = [follower.look() for follower in followers]
            if any(news) or time.monotonic() - drawn > _REFRESH:
                drawn = time.monotonic()
                if any(follower.path.is_file() for follower in followers):
                    runs = list(map(_followed, followers))
                    live.update(_side_by_side(directories, runs), refresh=True)
            time.sleep(_POLL)


def _print_lines(
    directories: Sequence[Path],
    followers: Sequence[Follower],
    console: Console,
    keep_going: Callable[[], bool],
) -> None:
    names = name_runs(directories)
    before = [f"{name}: " if len(names) > 1 else "" for name in names]
    said: set[str] = set()
    while keep_going():
        for name, follower in zip(before, followers, strict=True):
            for new in follower.look():
                _say(console, name + format_line(new, follower.readings))
            for remark in follower.remarks():
                if name + remark not in said:
                    _say(console, name + remark)
                    said.add(name + remark)
        time.sleep(_POLL)


def _side_by_side(directories: Sequence[Path], runs: Sequence[Readings]) -> RenderableType:
    """Lay out the views of runs below one another, each with its name where there are several."""
    if len(runs) == 1:
        return view(runs[0])
    parts: list[RenderableType] = []
    for name, readings in zip(name_runs(directories), runs, strict=True):
        parts += [Text(printable(name), style="bold", overflow="ellipsis"), view(readings)]
    return Group(*parts)


def _followed(follower: Follower) -> Readings:
    return Readings(follower.runs, follower.readings, follower.mixed_at, newer=follower.newer)


def _say(console: Console, words: str) -> None:
    console.print(printable(words), soft_wrap=True, markup=False, highlight=False)
