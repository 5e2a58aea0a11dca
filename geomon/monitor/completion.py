"""Complete a measured reading with logged values, notes, its place in the run, alerts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from geomon.analysis import Alert
from geomon.monitor.jobs import ReadingJob
from geomon.monitor.logged import LoggedValues
from geomon.monitor.planner import Planner
from geomon.monitor.run_alerts import RunAlerts
from geomon.note import Note
from geomon.record import Reading, Readings


class Completed(NamedTuple):
    """A reading ready to be recorded, with its alerts; without a reading on ranks but the first."""

    reading: Reading | None
    alerts: Sequence[Alert] = ()


_NOTHING = Completed(None)


class Completion:
    """Completes each measured reading with what the run knows, once even after Ctrl-C.

    Args:
        planner: Knows the checks, and the readings that were left out.
        logged: Values that the training logs.
        alerts: Finds alerts in the reading, and has the notes of earlier ones.
        notes: Returns the notes that hold for every reading.

    Attributes:
        before: The reading before, of this start of the run or an earlier one; None before all.
    """

    def __init__(
        self,
        planner: Planner,
        logged: LoggedValues,
        alerts: RunAlerts,
        notes: Callable[[], list[Note]],
    ) -> None:
        self._planner, self._logged, self._alerts, self._notes = planner, logged, alerts, notes
        self.before: Reading | None = None
        self._checks_before = 0  # checks of earlier starts
        self._last: tuple[ReadingJob | None, Completed] = None, _NOTHING

    def begin(self, earlier: Readings) -> None:
        """Go on after the readings of earlier starts."""
        self.before = earlier[-1] if earlier else None
        checks = self.before.checks if self.before else 0
        self._checks_before = checks - self._planner.checks.made

    def complete(self, job: ReadingJob, overhead: float) -> Completed:
        """Return the reading of a finished job, completed; a second call returns it again."""
        if self._last[0] is not job:
            self._last = job, self._complete(job, overhead)
        return self._last[1]

    def forget(self) -> None:
        """Drop the last reading, which is not asked for again."""
        self._last = None, _NOTHING

    def _complete(self, job: ReadingJob, overhead: float) -> Completed:
        reading = job.result()
        if reading is None:
            return _NOTHING
        before = self.before
        reading = msgspec.structs.replace(
            reading,
            overhead=overhead,
            training=reading.training | self._logged.read(reading.step),
            notes=(*self._notes(), *reading.notes),
            left_out=self._planner.left_out,
            count=1 if before is None else before.count + 1,
            gap=0 if before is None else max(before.gap, reading.step - before.step),
            checks=self._checks_before + self._planner.checks.made,
        )
        alerts = self._alerts.find(reading)
        # Sinks without alerts get the notes of alerts since the last reading.
        noted = *reading.notes, *self._alerts.noted, *(alert.note() for alert in alerts)
        return Completed(msgspec.structs.replace(reading, notes=noted), alerts)


__all__ = ["Completed", "Completion"]
