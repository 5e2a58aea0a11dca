"""Output of readings, and warnings: the record first, then the sinks.

Nothing here ends a run: a full disk, a sink that fails or a metric that fails is a warning.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from geomon.distributed import RankFailedError, RankGroup, RanksLostError
from geomon.monitor.writing.retries import FAILURES, Retries
from geomon.monitor.writing.time_limit import TimeLimitError, time_limit
from geomon.record import Reading, Record, Sink
from geomon.record.arrays import Arrays
from geomon.record.printable import printable
from geomon.record.sinks import Affords, DescribedSink, parts_of

log = logging.getLogger("geomon")


class Warnings:
    """Turns what goes wrong into warnings, each said once in the log of one rank.

    Args:
        group: The ranks. Where they are connected, the first one warns.
        strict: Whether to raise what goes wrong, instead of a warning.
    """

    def __init__(self, group: RankGroup, *, strict: bool) -> None:
        self._group = group
        self._strict = strict
        self._kinds: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception inside the `with` into a warning: a reading is left out.

        Where another rank does not answer, the ranks are disconnected.
        """
        try:
            yield
        except RanksLostError as error:
            self._group.disconnect()
            if self._strict:
                raise
            with contextlib.suppress(Exception):
                log.warning(
                    "rank %d lost the other ranks (%s): their rows are no longer gathered, rank 0 "
                    "goes on with its own",
                    self._group.rank,
                    printable(str(error)),
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
            kind: What stays the same while numbers in the words change; None takes the words.
        """
        kind = message if kind is None else kind
        speaks = self._group.rank == 0 or not self._group.connected
        if speaks and kind not in self._kinds:
            self._kinds.add(kind)
            with contextlib.suppress(Exception):  # a handler of the program's may raise
                log.warning("%s", printable(message))


class ReadingWriter:
    """Writes readings to the record and to the sinks.

    Args:
        record: The record, which is written before anything is shown; None for no record.
        sinks: Where readings go besides the record.
        warnings: Turns what goes wrong into warnings.
        sink_timeout: Largest duration of one call of a sink, in seconds.
        affords: Function of a number of seconds that returns whether a sink may take them now.
    """

    def __init__(
        self,
        record: Record | None,
        sinks: Sequence[Sink],
        warnings: Warnings,
        *,
        sink_timeout: float,
        affords: Affords,
    ) -> None:
        self._record = record
        self._sinks = [(sink, Retries()) for sink in parts_of(sinks, affords)]
        self._warnings = warnings
        self._sink_timeout = sink_timeout

    def begin(self, step: int, description: dict[str, Any]) -> set[tuple[int, str]]:
        """Open the record.

        Args:
            step: The first step of this run.
            description: Description of the run.

        Returns:
            Step and source of each reading that the record holds already.
        """
        recorded: set[tuple[int, str]] = set()
        if self._record is not None:
            record = self._record
            self._warnings.attempt(
                lambda: recorded.update(record.begin(step, description)),
                f"{record.path} could not be read and is kept under another name",
            )
        for sink, _ in list(self._sinks):
            if isinstance(sink, DescribedSink):
                message = f"{_name_of(sink)} did not take the description of the run"
                self._call(sink, functools.partial(sink.describe, description), message)
        return recorded

    def record(self, reading: Reading, arrays: Arrays | None = None) -> None:
        """Write a reading to the record: before it is shown, so that nothing shown is ever lost.

        Args:
            reading: The reading.
            arrays: Arrays for figures, which only the record takes.
        """
        if self._record is not None:
            record = self._record
            written = self._warnings.attempt(
                lambda: record.write(reading),
                f"{record.path} could not be written, and its readings are kept until it can be",
            )
            if written and arrays:
                self._warnings.attempt(
                    lambda: record.write_arrays(reading, arrays),
                    f"arrays for figures could not be written to {record.arrays.path}, the record "
                    "goes on without them",
                    once=True,
                )

    def show(self, reading: Reading) -> None:
        """Write a reading to the sinks.

        Args:
            reading: The reading, which is recorded.
        """
        for sink, retries in list(self._sinks):
            if retries.is_due:
                pauses = retries.failures + 1 >= FAILURES
                when = "at times, after pauses" if pauses else "with the next reading"
                message = f"{_name_of(sink)} failed and is tried again {when}; the record goes on"
                succeeded = self._call(sink, functools.partial(sink.write, reading), message)
                retries.note(succeeded=succeeded)

    def close(self) -> None:
        """Write what could not be recorded before, and close the sinks; may be called again.

        The last sink is closed first: what draws into a logger comes after it.
        """
        if self._record is not None:
            path = self._record.path
            self._warnings.attempt(self._record.close, f"{path} is not complete")
        for sink, _ in reversed(self._sinks):
            self._call(sink, sink.close, f"closing {_name_of(sink)} failed")
        self._sinks = []

    def _call(self, sink: Sink, action: Callable[[], Any], message: str) -> bool:
        """Call a sink within its time limit; returns whether it went well.

        A sink that takes longer is left out from then on: it would hold up every reading.
        """
        left_out = f"{_name_of(sink)} takes too long and is left out from here on"

        def limited() -> None:
            try:
                with time_limit(self._sink_timeout):
                    action()
            except TimeLimitError as error:
                self._sinks = [entry for entry in self._sinks if entry[0] is not sink]
                self._warnings.warn(f"{left_out}: {error}", kind=left_out)

        return self._warnings.attempt(limited, message)


def _name_of(sink: Sink) -> str:
    """What messages call a sink: as it calls itself, or else its class."""
    calls_itself = type(sink).__str__ is not object.__str__
    return str(sink) if calls_itself else type(sink).__name__


__all__ = ["ReadingWriter", "Warnings"]
