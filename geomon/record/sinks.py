"""Sinks: objects that receive every reading after it was recorded.

A sink takes a whole reading and decides itself what it shows. One that fails is tried again with
the next readings, then left out; the training and the other sinks go on. Messages call it by its
`__str__`, if it has one of its own, or else by the name of its class.

Those that draw charts show the headline values (`geomon.record.headline`), and with
`detail="layers"` every value that is charted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from geomon.record.alert import RaisedAlert
from geomon.record.headline import HEADLINE, Charts, Detail
from geomon.record.reading import Reading

# Readings that `Memory` keeps.
_MOST_READINGS = 10_000


@runtime_checkable
class Sink(Protocol):
    """Receiver of readings: any object with these two methods."""

    def write(self, reading: Reading) -> None:
        """Take a reading."""

    def close(self) -> None:
        """Flush what is buffered; may be called more than once."""


@runtime_checkable
class DescribedSink(Protocol):
    """Sink that shows the description of the run too."""

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, as the record holds it, before the first reading."""


@runtime_checkable
class AlertSink(Protocol):
    """Sink that shows alerts at the moment when they are raised."""

    def alert(self, alert: RaisedAlert) -> None:
        """Take an alert: its step may lie between two readings."""


@runtime_checkable
class SinkOfParts(Protocol):
    """Sink that consists of others, so that one of them may fail and the others go on."""

    def parts(self) -> Sequence[Sink]:
        """Return the parts, in the order in which they are written; they are closed in reverse."""


def parts_of(sinks: Iterable[Sink]) -> list[Sink]:
    """List sinks, with the parts of those that consist of parts in their place.

    Args:
        sinks: Sinks of a run.
    """
    parts: list[Sink] = []
    for sink in sinks:
        parts += sink.parts() if isinstance(sink, SinkOfParts) else [sink]
    return parts


class Memory:
    """Sink that keeps the last 10,000 readings in memory, and as many alerts.

    Attributes:
        readings: Readings kept, oldest first.
        alerts: Alerts kept, in the order in which they were raised.
    """

    def __init__(self) -> None:
        self.readings: deque[Reading] = deque(maxlen=_MOST_READINGS)
        self.alerts: deque[RaisedAlert] = deque(maxlen=_MOST_READINGS)

    def write(self, reading: Reading) -> None:
        """Keep a reading; beyond the largest number, the oldest is dropped."""
        self.readings.append(reading)

    def alert(self, alert: RaisedAlert) -> None:
        """Keep an alert, likewise."""
        self.alerts.append(alert)

    def close(self) -> None:
        """Do nothing: there is nothing to flush."""


class LoggerSink:
    """Sink that writes charted values to one logger.

    Args:
        name: Name of the logger, for messages.
        log: Function that hands the charted values to the logger, by name, with their step.
        detail: "headline", "layers", or names of metrics whose means are headline values too.
        save: Function that flushes the logger.
        writers: Function that returns the logger's `SummaryWriter`s, which get the layout of the
            charts; None if it is not TensorBoard.
        prefix: What the logger gets before every name.

    Attributes:
        named: Names of metrics that the detail holds.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(
        self,
        name: str,
        log: Callable[[dict[str, float], int], object],
        *,
        detail: Detail = HEADLINE,
        save: Callable[[], object] = lambda: None,
        writers: Callable[[], Iterable[Any]] | None = None,
        prefix: str = "",
    ) -> None:
        self._name, self._log, self._save, self._writers = name, log, save, writers
        self._charts, self._prefix = Charts(detail), prefix
        self.named = self._charts.named
        self._is_laid_out = False

    def __str__(self) -> str:
        return self._name

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, which says what charts show of its metrics.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._charts.describe(description)

    def write(self, reading: Reading) -> None:
        """Hand charted values to the logger; before the first, write the layout of their charts."""
        if self._writers is not None and not self._is_laid_out:
            layout = self._layout(reading)
            for writer in self._writers():
                writer.add_custom_scalars(layout)
            self._is_laid_out = True  # only now: one that failed is written with the next reading
        if values := self._charts.select(reading):
            self._log({f"{self._prefix}{tag}": v for tag, v in values.items()}, reading.step)

    def _layout(self, reading: Reading) -> dict[str, dict[str, list[Any]]]:
        """Lay out the charts of a reading, with the names that the logger gets."""
        return {
            category: {
                title: [kind, [f"{self._prefix}{name}" for name in names]]
                for title, (kind, names) in charts.items()
            }
            for category, charts in self._charts.layout(reading).items()
        }

    def close(self) -> None:
        """Flush the logger, which is closed by whoever made it."""
        self._save()


class NumberSink(LoggerSink):
    """Sink that writes to a logger without a place for words: it counts the alerts."""

    _alerts = 0

    def alert(self, alert: RaisedAlert) -> None:
        """Log the number of alerts so far, `geomon/alerts`, at the step of this one."""
        self._alerts += 1
        self._log({f"{self._prefix}geomon/alerts": float(self._alerts)}, alert.step)
        self._save()
