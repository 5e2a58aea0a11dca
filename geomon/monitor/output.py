"""Where readings go, and where trouble is said: the record first, then the sinks; once in the log.

Nothing here ends a run: a full disk, a dying logger or a failed metric is a warning.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from geomon.distributed.gather import RankFailedError
from geomon.distributed.group import Ranks, RanksLostError
from geomon.record.reading import Reading, Record
from geomon.record.sinks import Sink

log = logging.getLogger("geomon")

_Value = TypeVar("_Value")


class Outlet:
    """The record, the sinks and the log of one monitor.

    Args:
        sinks: Where readings go besides the record.
        ranks: Among which the first one speaks.
        strict: Raise what goes wrong, instead of a warning.

    Attributes:
        record: Written before anything is shown; None for none.
    """

    record: Record | None = None

    def __init__(self, sinks: Sequence[Sink], ranks: Ranks, *, strict: bool) -> None:
        self._sinks = list(sinks)
        self._ranks = ranks
        self._strict = strict
        self._warned: set[str] = set()

    def begin(self, step: int, description: dict[str, Any]) -> set[tuple[int, str]]:
        """Open the record; (step, source) of what it holds already.

        Args:
            step: The first that this run reads.
            description: Of the run.
        """
        known: set[tuple[int, str]] = set()
        if self.record is not None:
            record = self.record
            self.safely(
                lambda: known.update(record.begin(step, description)),
                f"{record.path} could not be read and is kept under another name",
            )
        return known

    def write(self, reading: Reading) -> None:
        """To the record first: what has been shown is never lost."""
        if self.record is not None:
            record = self.record
            self.safely(lambda: record.write(reading), f"{record.path} could not be written")
        for sink in list(self._sinks):
            message = f"{type(sink).__name__} failed and is left out from here on"
            if not self.safely(lambda sink=sink: sink.write(reading), message):  # type: ignore[misc]
                self._sinks.remove(sink)

    def close(self) -> None:
        """Flush and close the sinks; may be called more than once."""
        for sink in self._sinks:
            self.safely(sink.close, f"closing {type(sink).__name__} failed")
        self._sinks = []

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around what a reading takes: a failure is a warning, and the run goes on."""
        try:
            yield
        except RanksLostError as error:
            self._ranks.part()
            if self._strict:
                raise
            log.warning(
                "rank %d lost the other ranks (%s): their rows are no longer gathered, rank 0 "
                "goes on with its own",
                self._ranks.rank,
                error,
            )
        except Exception as error:
            if self._strict:
                raise
            kind = "" if isinstance(error, RankFailedError) else f"{type(error).__name__}: "
            self.warn(f"a reading failed and is left out: {kind}{error}")

    def from_first(self, value: _Value) -> _Value:
        """What the first rank has, a collective; this rank's own where there is no line."""
        if self._ranks.linked:
            with self.guard():
                return self._ranks.hand_out(value)
        return value

    def safely(self, action: Callable[[], Any], message: str) -> bool:
        """Whether an action went well; if not, `message` and the reason are said once.

        Args:
            action: What is to be done.
            message: What its failure means.
        """
        try:
            action()
        except Exception as error:
            if self._strict:
                raise
            self.warn(f"{message}: {type(error).__name__}: {error}")
            return False
        return True

    def warn(self, message: str, *, kind: str | None = None) -> None:
        """Say it once in the log, on one rank; the record has notes with every reading.

        Args:
            message: The words.
            kind: What stays the same while numbers in the words change; None takes the words.
        """
        kind = message if kind is None else kind
        heard = self._ranks.rank == 0 or not self._ranks.linked
        if heard and kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)


__all__ = ["Outlet"]
