"""The outbox: from measured to shown, the only queue of a monitor's readings and alerts.

A reading is measured, completed with what the training logs, recorded, then shown. An alert is
recorded, printed and shown as soon as it is seen.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from geomon.failures import failures
from geomon.monitor.completion import Completion
from geomon.monitor.executor import ReadingExecutor
from geomon.monitor.hooks import Hooks
from geomon.monitor.jobs import CHECK, ReadingJob
from geomon.monitor.logged import LoggedValues
from geomon.monitor.options import MonitorOptions
from geomon.monitor.planner import Account, Planner
from geomon.monitor.run_alerts import RunAlerts
from geomon.monitor.run_writer import RunWriter
from geomon.monitor.sinks import SinkCalls
from geomon.monitor.warnings import Warnings
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Reading, Record, Sink


class Outbox:
    """Takes finished readings from the executor, in order, and records and shows each once.

    The reading of the present step waits for the values that belong into it. After Ctrl-C, the next
    call continues where the last one was interrupted.

    Args:
        record: The record, or None.
        options: All options of the monitor, checked.
        executor: Measures the readings.
        planner: Knows the training's present step, and whether it is read.
        account: Account of the time.
        warnings: Turns errors into warnings.
        notes: Returns the notes that hold for every reading.

    Attributes:
        alerts: Finds and raises alerts.
        latest: The last recorded reading; None before the first, and on other ranks.
        open_step: Step of a probe whose `with` is open, so that its reading waits for values.
    """

    def __init__(
        self,
        record: Record | None,
        options: MonitorOptions,
        executor: ReadingExecutor,
        planner: Planner,
        account: Account,
        warnings: Warnings,
        notes: Callable[[], list[Note]],
    ) -> None:
        self._executor, self._planner, self._account = executor, planner, account
        self._warnings = warnings
        self._logged = LoggedValues(options["log"], warnings)
        self._writer = RunWriter(
            record, SinkCalls(options["sinks"], warnings, options["sink_timeout"]), warnings
        )
        self._hooks = Hooks(options, account, warnings)
        self.alerts = RunAlerts(options["alerts"], self._writer, self._hooks, warnings)
        self._completion = Completion(planner, self._logged, self.alerts, notes)
        self.latest: Reading | None = None
        self.open_step: int | None = None
        self._published: int | None = None  # step of the last reading that was published

    def add_loggers(self, sinks: Sequence[Sink]) -> None:
        """Add sinks that are called in the training's own thread, without a time limit."""
        self._writer.sinks.add_loggers(sinks)

    @property
    def path(self) -> Path | None:
        """Path of the record; None if nothing is recorded, and on other ranks."""
        return self._writer.path

    def check_alone(self) -> None:
        """Raise ValueError if a later monitor of this program records in the same folder."""
        self._writer.check_alone()

    def begin(self, step: int, description: dict[str, Any]) -> int:
        """Open the record at a first step, or when training goes back; return the earlier readings.

        The number returned counts the readings of earlier starts on the branch that continues here.
        """
        self.alerts.begin()
        self._hooks.begin()
        earlier = self._writer.begin(step, description)
        since = 0  # step from which on values can be compared with those to come
        for since, words in earlier.breaks:
            if since == step:
                self._warnings.warn(words)
                self.note([Note(NoteKind.OTHER_SETTINGS, words)])
        for reading in (one for one in earlier if one.step >= since):
            self._warnings.attempt(
                functools.partial(self._recall, reading),
                "earlier readings raise no alerts",
                once=True,
            )
        self.alerts.recall_given_up(earlier.abandoned)
        self._completion.begin(earlier)
        self._writer.sinks.describe(description | {"from_step": step})
        return len(earlier)

    def publish(self, *, wait: bool = True) -> None:
        """Record and show finished readings; the present step's one may wait for logged values."""
        while (job := self._executor.first_finished()) is not None:
            if wait and self._waits(job):
                return
            with self._warnings.guard():
                if job.source == CHECK:
                    self._publish_check(job)
                else:
                    self._publish(job)

    def move_to(self, step: int) -> None:
        """Publish everything finished as training moves on, without waiting any more."""
        self.publish(wait=False)
        self._logged.forget_before(step, self._pending)

    def note(self, notes: Sequence[Note]) -> None:
        """Put notes that were already logged into the next reading."""
        self.alerts.noted += notes

    def log(self, step: int, values: Mapping[str, Any], *, watched: bool) -> None:
        """Put values into the reading of a step; `watched` says whether its window is open."""
        if not self._takes_values(step, watched=watched):
            return
        with self._account.charge():
            if step == self._published and step not in self._pending:
                # Only the first accumulated batch is read, so values of others are not late.
                late = [name for name in values if not self._logged.has(step, name)]
                self._logged.wait_after_late(step, late)
                return
            self._logged.put(step, values)
            self.publish()

    def lacks_values(self, step: int) -> bool:
        """Return whether a reading of a step waits for values of the option `log`."""
        return step in self._pending and not self._logged.is_complete(step)

    def close(self) -> None:
        """Publish everything, and close record and sinks; may be called more than once."""
        self.publish(wait=False)
        if self._published is not None:
            self._logged.warn_of_absent()
        self._writer.close()

    @property
    def _pending(self) -> list[int]:
        """Steps of the readings that are not published yet."""
        return [job.step for job in self._executor.jobs if job.source != CHECK]

    def _takes_values(self, step: int, *, watched: bool) -> bool:
        """Whether a reading of a step is made, being made or due, and so may hold logged values."""
        present = self._planner.step
        if step in self._pending or step == self._published or present is None or step > present:
            return True
        return step == present and (watched or self._planner.is_planned)

    def _waits(self, job: ReadingJob) -> bool:
        """Whether values for a reading may still be logged."""
        if job.failed or job.source == CHECK or job.step != self._planner.step:
            return False
        return job.step == self.open_step or not self._logged.is_complete(job.step)

    def _publish(self, job: ReadingJob) -> None:
        """Record a reading and show it; after Ctrl-C the next call records it, but only once."""
        with self._account.charge():
            try:
                # Before the first reading, hardly any training time has passed.
                overhead = math.nan if self._published is None else self._account.overhead
                reading, alerts = self._completion.complete(job, overhead)
                if reading is not None:
                    self._published = reading.step
                    self._writer.write(reading, job.arrays)
            except failures():
                self._take_first()
                raise
            self._take_first()
            if reading is None:
                return
            self.latest = self._completion.before = reading
            said, self.alerts.noted = self.alerts.noted, []
            self._writer.show(reading, said)
            for alert in alerts:
                self.alerts.raise_alert(alert, reading.source, job.inputs)
            for name, phase in self._hooks.follow(reading).items():
                self._hooks.call(name, phase)

    def _publish_check(self, job: ReadingJob) -> None:
        """Raise the alerts of a check, which itself is not recorded."""
        with self._account.charge():
            self._take_first()
            check = job.result()
            assert check is not None
            alerts = self.alerts.find(check)
            if self.alerts.asks_again:
                self._planner.checks.ask_again()
            if alerts:
                self._planner.owe()
            self.alerts.raise_between(alerts, check.source, job.inputs)

    def _take_first(self) -> None:
        self._executor.take_first()
        self._completion.forget()

    def _recall(self, reading: Reading) -> None:
        """Take a reading of an earlier start into account, without calling anything for it."""
        self.alerts.recall(reading)
        self._hooks.follow(reading)


__all__ = ["Outbox"]
