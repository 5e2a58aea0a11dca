"""Warnings and messages of a monitor: nothing that goes wrong in geomon ends a run."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from geomon.distributed import RankFailedError, RankGroup, RanksLostError
from geomon.record.printable import printable

log = logging.getLogger("geomon")


class Console(logging.Handler):
    """Prints messages to the standard error, one line each, above a progress bar.

    If the program has handlers of its own, these show the messages, and nothing is printed.
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
            else:  # takes bars away, and draws them again below the line
                bars.tqdm.write(line, file=sys.stderr)
        except Exception:  # a closed stream: no message ends a training
            self.handleError(record)


_CONSOLE = Console()


class Warnings:
    """Turns what goes wrong into warnings, each said once in the log of one rank.

    Args:
        group: The ranks. If they are connected, the first one warns.
        strict: Whether to raise what goes wrong, instead of a warning.
    """

    def __init__(self, group: RankGroup, *, strict: bool) -> None:
        log.addHandler(_CONSOLE)  # has an effect once
        self._group = group
        self._strict = strict
        self._kinds: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception inside the `with` into a warning: a reading is left out.

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
                "gathered, rank 0 goes on with its own"
            )
        except Exception as error:
            if self._strict:
                raise
            kind = "" if isinstance(error, RankFailedError) else f"{type(error).__name__}: "
            self.warn(f"a reading failed and is left out: {kind}{error}")

    def attempt(self, action: Callable[[], Any], message: str, *, once: bool = False) -> bool:
        """Call a function and turn its exception into a warning; returns whether it went well.

        Args:
            action: The function.
            message: What its failure means, for the warning.
            once: Whether failures of the same meaning and another reason are one warning.
        """
        try:
            action()
        except Exception as error:
            if self._strict:
                raise
            kind = message if once else None
            self.warn(f"{message}: {type(error).__name__}: {error}", kind=kind)
            return False
        return True

    def warn(self, message: str, *, kind: str | None = None) -> None:
        """Log a warning, unless one of its kind has been logged already.

        Args:
            message: The words.
            kind: What stays the same while numbers in the words change; by default the words.
        """
        kind = kind or message
        if self._speaks and kind not in self._kinds:
            self._kinds.add(kind)
            with contextlib.suppress(Exception):  # a handler of the program's may raise
                log.warning("%s", printable(message))

    def say(self, message: str) -> None:
        """Print a line of information; a program with a log of its own gets it as INFO.

        Args:
            message: The words.
        """
        if self._speaks and log.level <= logging.INFO:  # by default no level is set
            text = printable(message)
            with contextlib.suppress(Exception):
                _CONSOLE.handle(logging.LogRecord("geomon", logging.INFO, "", 0, text, None, None))
                log.info("%s", text)

    @property
    def _speaks(self) -> bool:
        return self._group.rank == 0 or not self._group.connected


__all__ = ["Console", "Warnings"]
