"""Output of readings, and warnings: the record first, then the sinks.

Nothing here ends a run: a full disk, a sink that fails or a metric that fails is a warning.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from geomon.distributed import RankFailedError, RankGroup, RanksLostError
from geomon.monitor.time_limit import time_limit
from geomon.record import Reading, Record, Sink

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
            log.warning(
                "rank %d lost the other ranks (%s): their rows are no longer gathered, rank 0 "
                "goes on with its own",
                self._group.rank,
                error,
            )
        except Exception as error:
            if self._strict:
                raise
            kind = "" if isinstance(error, RankFailedError) else f"{type(error).__name__}: "
            self.warn(f"a reading failed and is left out: {kind}{error}")

    def attempt(self, action: Callable[[], Any], message: str) -> bool:
        """Call a function and turn its exception into a warning; returns whether it went well.

        Args:
            action: The function.
            message: What its failure means, for the warning.
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
        """Log a warning, unless one of its kind has been logged already.

        Args:
            message: The words.
            kind: What stays the same while numbers in the words change; None takes the words.
        """
        kind = message if kind is None else kind
        speaks = self._group.rank == 0 or not self._group.connected
        if speaks and kind not in self._kinds:
            self._kinds.add(kind)
            log.warning(message)


class ReadingWriter:
    """Writes readings to the record and to the sinks.

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
        self._sinks = list(sinks)
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
        return recorded

    def write(self, reading: Reading) -> None:
        """Write a reading: to the record first, so that what has been shown is never lost.

        Args:
            reading: The reading.
        """
        if self._record is not None:
            record = self._record
            self._warnings.attempt(
                lambda: record.write(reading), f"{record.path} could not be written"
            )
        for sink in list(self._sinks):
            message = f"{type(sink).__name__} failed and is left out from here on"
            if not self._call(lambda sink=sink: sink.write(reading), message):  # type: ignore[misc]
                self._sinks.remove(sink)

    def close(self) -> None:
        """Flush and close the sinks; may be called more than once."""
        for sink in self._sinks:
            self._call(sink.close, f"closing {type(sink).__name__} failed")
        self._sinks = []

    def _call(self, action: Callable[[], Any], message: str) -> bool:
        """Call a sink within its time limit; returns whether it went well."""

        def limited() -> None:
            with time_limit(self._sink_timeout):
                action()

        return self._warnings.attempt(limited, message)


__all__ = ["ReadingWriter", "Warnings"]
