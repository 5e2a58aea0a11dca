"""Warnings and messages of a monitor: no error inside geomon ends a run."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from geomon.distributed import RankFailedError, RankGroup, RanksLostError
from geomon.failures import failures, ignored
from geomon.record import printable

log = logging.getLogger("geomon")


class Console(logging.Handler):
    """Prints messages to standard error, one line each, above a progress bar.

    If the program has handlers of its own, they show the messages, and nothing is printed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message after the name of its logger: "geomon: ..."."""
        own = logging.getLogger(record.name.partition(".")[0]).handlers
        if logging.getLogger().handlers or any(handler is not self for handler in own):
            return
        try:
            line = f"{record.name}: {' '.join(record.getMessage().split())}"
            bars = sys.modules.get("tqdm")
            if bars is None:
                sys.stderr.write(f"{line}\n")
            else:  # redraws progress bars below the line
                bars.tqdm.write(line, file=sys.stderr)
        except failures():  # a closed stream, for example, must not end a training
            self.handleError(record)


_CONSOLE = Console()


class Warnings:
    """Turns errors into warnings, each logged once by one rank.

    Args:
        group: The ranks. If they are connected, the first one warns.
        strict: Whether to raise errors instead.
    """

    def __init__(self, group: RankGroup, *, strict: bool) -> None:
        log.addHandler(_CONSOLE)  # takes effect only once
        self._group = group
        self._strict = strict
        self._kinds: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception inside the `with` into a warning that a reading is left out.

        If another rank does not answer, the ranks are disconnected.
        """
        try:
            yield
        except RanksLostError as error:
            self._group.disconnect()
            if self._strict:
                raise
            self.warn(
                f"rank {self._group.rank} lost the other ranks ({error}): their rows are no longer "
                "gathered, and rank 0 continues with its own"
            )
        except failures() as error:
            if self._strict:
                raise
            kind = "" if isinstance(error, RankFailedError) else f"{type(error).__name__}: "
            self.warn(f"a reading failed and is left out: {kind}{error}")

    def attempt(self, action: Callable[[], Any], message: str, *, once: bool = False) -> bool:
        """Call a function, turn its exception into a warning, and return whether it succeeded.

        With `once`, failures with this message give a single warning, whatever their reasons.
        """
        try:
            action()
        except failures() as error:
            if self._strict:
                raise
            kind = message if once else None
            self.warn(f"{message}: {type(error).__name__}: {error}", kind=kind)
            return False
        return True

    def warn(self, message: str, *, kind: str | None = None) -> None:
        """Log a warning, unless one of its kind (or the same message) was already logged."""
        if self._speaks and self.is_new(kind or message):
            with ignored():  # a handler of the program may raise
                log.warning("%s", printable(message))

    def is_new(self, kind: str) -> bool:
        """Whether nothing of a kind was logged so far; from now on, something was."""
        known = len(self._kinds)
        self._kinds.add(kind)
        return len(self._kinds) > known

    def say(self, message: str) -> None:
        """Print a line of information; a program with its own log gets it as INFO."""
        if self._speaks and log.level <= logging.INFO:  # by default no level is set
            text = printable(message)
            with ignored():
                _CONSOLE.handle(logging.LogRecord("geomon", logging.INFO, "", 0, text, None, None))
                log.info("%s", text)

    @property
    def _speaks(self) -> bool:
        return self._group.rank == 0 or not self._group.connected


__all__ = ["Console", "Warnings"]
