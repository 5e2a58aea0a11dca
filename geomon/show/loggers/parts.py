"""Sinks that consist of parts, so that one of them may fail and the others go on."""

from collections.abc import Mapping, Sequence
from typing import Any

from geomon.record import RaisedAlert, Reading, Sink
from geomon.record.sinks import AlertSink, DescribedSink


class Pages:
    """Sink that shows a run on several pages, each of which is a sink.

    A monitor takes the parts and calls each by itself.

    Args:
        name: Name of the logger, for messages.
        parts: The pages, in the order in which they are written.
    """

    def __init__(self, name: str, parts: Sequence[Sink]) -> None:
        self._name = name
        self._parts = parts

    def __str__(self) -> str:
        return self._name

    def parts(self) -> Sequence[Sink]:
        """Return the parts, in the order in which they are written; they are closed in reverse."""
        return self._parts

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, as the record holds it."""
        for part in self._parts:
            if isinstance(part, DescribedSink):
                part.describe(description)

    def write(self, reading: Reading) -> None:
        """Show a reading on every page."""
        for part in self._parts:
            part.write(reading)

    def alert(self, alert: RaisedAlert) -> None:
        """Show an alert on every page that takes alerts."""
        for part in self._parts:
            if isinstance(part, AlertSink):
                part.alert(alert)

    def close(self) -> None:
        """Close every page, the last one first; may be called more than once."""
        for part in reversed(self._parts):
            part.close()


__all__ = ["Pages"]
