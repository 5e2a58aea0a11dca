"""Sinks: objects that receive every reading after it was recorded.

A sink receives a whole reading and decides what to show. A sink that fails is tried again at the
next readings, then left out; the training and the other sinks go on. Messages name it by its
`__str__`, if it has its own, or else by its class.

Sinks that draw charts show the headline values (`geomon.record.headline`), and with
`detail="layers"` every charted value.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from geomon.record.alert import RaisedAlert
from geomon.record.headline import HEADLINE, Charts, Detail
from geomon.record.reading import Reading

# Name under which loggers get the number of alerts so far.
ALERTS = "geomon/alerts"
# Number of readings that `Memory` keeps.
_MOST_READINGS = 10_000


@runtime_checkable
class Sink(Protocol):
    """Receiver of readings: any object with these two methods."""

    def write(self, reading: Reading) -> None:
        """Receive a reading."""

    def close(self) -> None:
        """Flush what is buffered; may be called more than once."""


@runtime_checkable
class DescribedSink(Protocol):
    """Sink that also shows the description of the run."""

    def describe(self, description: Mapping[str, Any]) -> None:
        """Receive the description of the run, as the record holds it, before the first reading."""


@runtime_checkable
class AlertSink(Protocol):
    """Sink that shows alerts when they are raised."""

    def alert(self, alert: RaisedAlert) -> None:
        """Receive an alert, whose step may lie between two readings."""


@runtime_checkable
class SinkOfParts(Protocol):
    """Sink that consists of others, so that one part may fail while the others go on."""

    def parts(self) -> Sequence[Sink]:
        """Return the parts in the order in which they are written; they are closed in reverse."""


def parts_of(sinks: Iterable[Sink]) -> list[Sink]:
    """List sinks, replacing each sink of parts by its parts.

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
        """Keep a reading, dropping the oldest beyond the largest number."""
        self.readings.append(reading)

    def alert(self, alert: RaisedAlert) -> None:
        """Keep an alert, dropping the oldest beyond the largest number."""
        self.alerts.append(alert)

    def close(self) -> None:
        """Do nothing, because nothing is buffered."""


class LoggerSink:
    """Sink that writes charted values to one logger.

    Args:
        name: Name of the logger, for messages.
        log: Function that passes charted values, by name, and their step to the logger.
        detail: "headline", "layers", or names of metrics whose means become headline values too.
            Defaults to "headline".
        save: Function that flushes the logger. Defaults to one that does nothing.
        writers: Function that returns the logger's `SummaryWriter`s, which get the layout of the
            charts. Defaults to None, for a logger other than TensorBoard.
        prefix: Text before every name. Defaults to "".

    Attributes:
        named: Names of metrics in the detail.

    Raises:
        ValueError: If the detail is none of them.
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
        self._alerts = 0

    def __str__(self) -> str:
        return self._name

    def describe(self, description: Mapping[str, Any]) -> None:
        """Receive the description of the run, which says what charts show of its metrics.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._charts.describe(description)

    def write(self, reading: Reading) -> None:
        """Pass charted values to the logger, and the layout of their charts before the first."""
        if self._writers is not None and not self._is_laid_out:
            layout = self._layout(reading)
            for writer in self._writers():
                writer.add_custom_scalars(layout)
            self._is_laid_out = True  # only now: a failed layout is tried with the next reading
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

    def alert(self, alert: RaisedAlert) -> None:
        """Log the number of alerts so far, `geomon/alerts`, at the step of this one."""
        self._alerts += 1
        self._log({f"{self._prefix}{ALERTS}": float(self._alerts)}, alert.step)
        if self._writers is None:  # TensorBoard is flushed with the text of the alert
            self._save()

    def close(self) -> None:
        """Flush the logger, which whoever made it will close."""
        self._save()
