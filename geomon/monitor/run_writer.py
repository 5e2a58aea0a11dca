"""Writes what a monitor found: to the record first, so that nothing shown is ever lost."""

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from geomon.analysis import alert_opening
from geomon.monitor.sinks import SinkCalls
from geomon.monitor.warnings import Warnings
from geomon.note import Note
from geomon.record import Arrays, RaisedAlert, Reading, Readings, Record


class RunWriter:
    """Records the readings and alerts of a run, prints what must be said, and calls the sinks.

    Args:
        record: The record, or None.
        sinks: The sinks.
        warnings: Prints, and turns errors into warnings.

    Attributes:
        sinks: The argument.
    """

    def __init__(self, record: Record | None, sinks: SinkCalls, warnings: Warnings) -> None:
        self._record, self.sinks, self._warnings = record, sinks, warnings

    @property
    def path(self) -> Path | None:
        """Path of the record, or None."""
        return None if self._record is None else self._record.path

    def check_alone(self) -> None:
        """Raise ValueError if another monitor of this program writes the record too."""
        if self._record is not None:
            self._record.check_alone()

    def begin(self, step: int, description: dict[str, Any]) -> Readings:
        """Open the record at a step; return the earlier readings on the branch that goes on."""
        found: list[Readings] = []
        record = self._record
        if record is not None:
            self._warnings.attempt(
                lambda: found.append(record.begin(step, description)),
                f"{record.path} could not be read and is kept under another name; phases and "
                "alerts start afresh",
            )
            if record.kept_as is not None:
                kept = record.kept_as.name
                self._warnings.say(f"{record.path} holds an earlier run, which is kept as {kept}")
        return found[0] if found else Readings([], [])

    def write(self, reading: Reading, arrays: Arrays) -> None:
        """Record a reading, with the arrays for its figures."""
        record = self._record
        if record is not None:
            self._attempt(record, lambda: record.write(reading))
            self._warnings.attempt(
                lambda: record.write_arrays(reading, arrays),
                f"arrays for figures could not be written to {record.arrays.path}; the record "
                "continues without them",
                once=True,
            )

    def show(self, reading: Reading, said: Collection[Note]) -> None:
        """Print the new notes of a recorded reading, except for what was said, and show it."""
        new = [
            note for note in reading.notes
            if not (note.is_alert or note in said)
            and self._warnings.is_new(note.key)
        ]  # fmt: skip
        is_brief = self._record is not None and len(new) > 1
        if self._record is not None and is_brief:
            self._warnings.warn(
                f"step {reading.step:,} has {len(new)} notes on how far its values can be "
                f"trusted: geomon summary {self._record.path.parent}"
            )
        for note in new:
            if note.is_error or note.is_odd or not is_brief:
                self._warnings.warn(note.words())
        self.sinks.write(reading)

    def write_alert(self, alert: RaisedAlert) -> None:
        """Record, print and show an alert."""
        record = self._record
        if record is not None:
            self._attempt(record, functools.partial(record.write_alert, alert))
        for line in filter(None, alert.note.lines(alert_opening(alert.step))):
            self._warnings.warn(line)
        self.sinks.alert(alert)

    def close(self) -> None:
        """Close record and sinks."""
        if self._record is not None:
            path = self._record.path
            self._warnings.attempt(self._record.close, f"{path} is not complete")
        self.sinks.close()

    def _attempt(self, record: Record, write: Callable[[], object]) -> None:
        self._warnings.attempt(
            write, f"{record.path} could not be written; its readings are kept until it can be"
        )
        if record.news:
            self._warnings.warn(record.news)
            record.news = ""


__all__ = ["RunWriter"]
