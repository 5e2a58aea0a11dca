"""Sinks that consist of parts, so that one of them may fail and the others go on."""

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from geomon.record import Reading, Sink
from geomon.record.sinks import DescribedSink


class Pages(abc.ABC):
    """Sink that shows a run on several pages, each of which is a sink.

    A monitor takes the parts and calls each by itself. Where the sink is called as one, every part
    is called, whatever another one does.
    """

    def __init__(self) -> None:
        self._parts: list[Sink] | None = None

    def __str__(self) -> str:
        return type(self).__name__

    def parts(self) -> Sequence[Sink]:
        """Return the parts, in the order in which they are written; they are closed in reverse."""
        if self._parts is None:
            self._parts = list(self._make_parts())
        return self._parts

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run.

        Args:
            description: Description of the run, as the record holds it.
        """
        for part in self.parts():
            if isinstance(part, DescribedSink):
                part.describe(description)

    def write(self, reading: Reading) -> None:
        """Show a reading on every page.

        Raises:
            ExceptionGroup: What parts have raised.
        """
        self._call([functools.partial(part.write, reading) for part in self.parts()])

    def close(self) -> None:
        """Close every page, the last one first; may be called more than once.

        Raises:
            ExceptionGroup: What parts have raised.
        """
        self._call([part.close for part in reversed(self.parts())])

    def _call(self, actions: Sequence[Callable[[], object]]) -> None:
        failures = []
        for action in actions:
            try:
                action()
            except Exception as error:  # the other parts are called all the same
                failures.append(error)
        if failures:
            reasons = "; ".join(f"{type(error).__name__}: {error}" for error in failures)
            raise ExceptionGroup(f"{self} failed in part: {reasons}", failures)

    @abc.abstractmethod
    def _make_parts(self) -> Iterator[Sink]:
        """Make the parts."""


__all__ = ["Pages"]
