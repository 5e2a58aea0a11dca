"""Output of readings, and warnings: the record first, then the sinks.

Nothing here ends a run: a full disk, a sink that fails or a metric that fails is a warning.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from geomon.distributed import RankFailedError, RankGroup, RanksLostError
from geomon.monitor.writing.console import print_log
from geomon.monitor.writing.sink_thread import SinkThread, SinkTimeoutError
from geomon.record import Reading, Record, Sink
from geomon.record.arrays import Arrays
from geomon.record.printable import printable
from geomon.record.sinks import DescribedSink, parts_of

log = logging.getLogger("geomon")

# Readings in a row at which a sink has failed before it is left out.
_MOST_FAILURES = 5


class Warnings:
    """Turns what goes wrong into warnings, each said once in the log of one rank.

    Args:
        group: The ranks. Where they are connected, the first one warns.
        strict: Whether to raise what goes wrong, instead of a warning.
    """

    def __init__(self, group: RankGroup, *, strict: bool) -> None:
        print_log()
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
            kind: What stays the same while numbers in the words change; None takes the words.
        """
        kind = kind or message
        speaks = self._group.rank == 0 or not self._group.connected
        if speaks and kind not in self._kinds:
            self._kinds.add(kind)
            with contextlib.suppress(Exception):  # a handler of the program's may raise
                log.warning("%s", printable(message))


@dataclass
class _Entry:
    """A sink, how it is called, and at how many readings in a row it has failed."""

    sink: Sink
    call: Callable[[Callable[[], object]], object]
    failures: int = 0

    @property
    def name(self) -> str:
        """What messages call the sink: as it calls itself, or else its class."""
        calls_itself = type(self.sink).__str__ is not object.__str__
        return str(self.sink) if calls_itself else type(self.sink).__name__


class ReadingWriter:
    """Writes readings to the record and to the sinks.

    A sink that fails is tried again with the next readings, and left out where it fails at five in
    a row. The sinks are called in a thread for which the training waits; one that takes longer than
    its limit is left out. Those that are a trainer's own loggers, which the
    training calls anyway, are called in its thread: some of them keep state by thread.

    Args:
        record: The record, which is written before anything is shown; None for no record.
        sinks: Where readings go besides the record.
        warnings: Turns what goes wrong into warnings.
        sink_timeout: Largest duration of one call of a sink, in seconds.
    """

    def __init__(
        self,
        record: Record | None,
        sinks: Sequence[Sink],
        warnings: Warnings,
        *,
        sink_timeout: float,
    ) -> None:
        self._record = record
        self._thread = SinkThread(sink_timeout)
        self._entries = [_Entry(sink, self._thread.call) for sink in parts_of(sinks)]
        self._warnings = warnings

    def add_loggers(self, sinks: Sequence[Sink]) -> None:
        """Add sinks that are called in the training's own thread, without a limit.

        Args:
            sinks: Sinks that write to loggers of the training.
        """
        self._entries += [_Entry(sink, lambda action: action()) for sink in parts_of(sinks)]

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

            def begin() -> None:
                earlier = record.begin(step, description)
                recorded.update((reading.step, reading.source) for reading in earlier)

            self._warnings.attempt(
                begin, f"{record.path} could not be read and is kept under another name"
            )
        with contextlib.closing(self._thread):
            for entry in self._entries:
                if isinstance(entry.sink, DescribedSink):
                    message = f"{entry.name} did not take the description of the run"
                    describe = functools.partial(entry.sink.describe, description)
                    self._call(entry, describe, message)
        return recorded

    def record(self, reading: Reading, arrays: Arrays) -> None:
        """Write a reading to the record: before it is shown, so that nothing shown is ever lost.

        Args:
            reading: The reading.
            arrays: Arrays for figures, which only the record takes.
        """
        if self._record is not None:
            record = self._record
            self._warnings.attempt(
                lambda: record.write(reading),
                f"{record.path} could not be written, and its readings are kept until it can be",
            )
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
        with contextlib.closing(self._thread):
            for entry in self._entries:
                self._write(entry, reading)

    def close(self) -> None:
        """Write what could not be recorded before, and close the sinks; may be called again.

        The last sink is closed first: what draws into a logger comes after it.
        """
        if self._record is not None:
            path = self._record.path
            self._warnings.attempt(self._record.close, f"{path} is not complete")
        with contextlib.closing(self._thread):
            for entry in self._entries[::-1]:
                self._call(entry, entry.sink.close, f"closing {entry.name} failed")
        self._entries = []

    def _write(self, entry: _Entry, reading: Reading) -> None:
        message = (
            f"{entry.name} failed and is tried again with the next readings; the record goes on"
        )
        if self._call(entry, functools.partial(entry.sink.write, reading), message):
            entry.failures = 0
            return
        entry.failures += 1
        if entry.failures == _MOST_FAILURES:
            self._leave_out(entry)
            self._warnings.warn(
                f"{entry.name} failed at {_MOST_FAILURES} readings in a row and is left out from "
                "here on; the record holds every reading"
            )

    def _call(self, entry: _Entry, action: Callable[[], object], message: str) -> bool:
        """Call a sink; returns whether it went well. One that takes too long is left out."""
        left_out = f"{entry.name} takes too long and is left out from here on"

        def limited() -> None:
            try:
                entry.call(action)
            except SinkTimeoutError as error:
                self._leave_out(entry)
                self._warnings.warn(f"{left_out}: {error}", kind=left_out)

        return self._warnings.attempt(limited, message)

    def _leave_out(self, entry: _Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]


__all__ = ["ReadingWriter", "Warnings"]
