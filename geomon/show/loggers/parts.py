"""Sinks that show a run in one way, and sinks of such parts, where one part can fail alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from geomon.record import RaisedAlert, Reading, Sink
from geomon.record.sinks import AlertSink, DescribedSink


class Page:
    """Sink with a name for messages, which does nothing yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def write(self, reading: Reading) -> None:
        """Do nothing with a reading."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class Pages(Page):
    """Sink that shows a run on several pages, each a sink that the monitor calls separately."""

    def __init__(self, name: str, parts: Sequence[Sink]) -> None:
        super().__init__(name)
        self._parts = parts

    def parts(self) -> Sequence[Sink]:
        """Return the parts in the order in which they are written; they are closed in reverse."""
        return self._parts

    def describe(self, description: Mapping[str, Any]) -> None:
        """Pass the description of the run to each page that takes one."""
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
        """Close every page, the last one first. Can be called more than once."""
        for part in reversed(self._parts):
            part.close()
