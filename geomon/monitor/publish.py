"""Publishing: finished readings are recorded with what the training logged, then shown."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from geomon.analysis.alerts import Inputs
from geomon.monitor.measuring.executor import ReadingExecutor
from geomon.monitor.measuring.jobs import ReadingJob
from geomon.monitor.planning.budget import Budget
from geomon.monitor.planning.planner import ReadingPlanner
from geomon.monitor.writing.logged import LoggedValues
from geomon.monitor.writing.output import ReadingWriter, Warnings
from geomon.monitor.writing.reactions import Reactions
from geomon.note import Note
from geomon.record import Reading


class Publisher:
    """Takes finished readings from the executor, in order, and records and shows each once.

    The reading of the present step waits for the values that are to stand in it.

    Args:
        executor: Where readings are measured.
        planner: Knows the step that the training is at, and whether it is read.
        writer: Record and sinks.
        reactions: Alerts, and the user's functions.
        logged: Values that the training logs.
        budget: Account of the time that this takes.
        warnings: Turns what goes wrong into warnings.
        notes: Function that returns notes that hold for every reading.

    Attributes:
        latest: The last reading that was recorded; None before the first, and on other ranks.
        entered: The step whose `with` is open where inputs are probed: its reading waits.
    """

    def __init__(
        self,
        executor: ReadingExecutor,
        planner: ReadingPlanner,
        writer: ReadingWriter,
        reactions: Reactions,
        logged: LoggedValues,
        budget: Budget,
        warnings: Warnings,
        notes: Callable[[], list[Note]],
    ) -> None:
        self._executor = executor
        self._planner = planner
        self._writer = writer
        self._reactions = reactions
        self._logged = logged
        self._budget = budget
        self._warnings = warnings
        self._notes = notes
        self.latest: Reading | None = None
        self.entered: int | None = None
        self._alerts: list[Note] = []  # of checks, for the next reading
        self._pending: list[int] = []  # steps of the readings that are not published yet
        self._published: int | None = None  # step of the last reading that has been

    def expect(self, step: int) -> None:
        """Expect the reading of a step from the executor.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        self._pending.append(step)

    def move_to(self, step: int) -> None:
        """Publish what is finished, as the training moves on: nothing waits any more.

        Args:
            step: The step that the training comes to.
        """
        self.publish(wait=False)
        self._logged.forget_before(step, self._pending)

    def publish(self, *, wait: bool = True) -> None:
        """Record and show the readings that are finished, in order.

        Args:
            wait: Whether the present step's reading waits for values that are to be logged.
        """
        while (job := self._executor.first_finished()) is not None:
            if wait and self._waits(job):
                return
            with self._warnings.guard():
                self._publish(job)

    def publish_check(self, reading: Reading, inputs: Inputs | None) -> tuple[bool, bool]:
        """Raise the alerts of a check; their notes stand in the next reading.

        Args:
            reading: What the check has measured.
            inputs: What the model was called with, where it is known.

        Returns:
            Whether there are any, and whether the next check decides about one.
        """
        notes = self._reactions.find_alerts(reading)
        self._warn_of(notes)
        self._alerts += notes
        self._reactions.call_of_alerts(inputs)
        return bool(notes), self._reactions.asks_again

    def end(self) -> None:
        """Close record and sinks, once everything is published."""
        if self._published is not None:
            self._logged.warn_of_absent()
        self._writer.close()

    def log(self, step: int, values: Mapping[str, Any], *, watched: bool) -> None:
        """Put values into the reading of a step.

        Args:
            step: Number of optimizer updates already in the weights.
            values: Numbers, or tensors of one number, by name; None for a value that there is not.
            watched: Whether the window of the step is open.
        """
        if not self._takes_values(step, watched=watched):
            return
        with self._budget.charge():
            if step == self._published and step not in self._pending:
                # Of accumulated batches the first is read: the others' values are not late.
                self._warn_of_late([name for name in values if not self._logged.has(step, name)])
                return
            self._logged.put(step, values)
            self.publish()

    def lacks_values(self, step: int) -> bool:
        """Whether a reading of a step waits for values of the option `log`.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        return step in self._pending and not self._logged.is_complete(step)

    def _takes_values(self, step: int, *, watched: bool) -> bool:
        """Whether a reading of a step is made, being made or due: it may hold logged values."""
        present = self._planner.step
        if step in self._pending or step == self._published or present is None or step > present:
            return True
        return step == present and (watched or self._planner.is_wanted)

    def _waits(self, job: ReadingJob) -> bool:
        """Whether values may still be logged that belong into a reading."""
        if job.failed or job.step != self._planner.step:
            return False
        return job.step == self.entered or not self._logged.is_complete(job.step)

    def _publish(self, job: ReadingJob) -> None:
        """Record a reading, and show it. After Ctrl-C it is recorded by the next call, and once."""
        with self._budget.charge():
            try:
                reading = self._record(job)
            except Exception:
                self._remove(job)
                raise
            self._remove(job)
            if reading is not None:
                self.latest = reading
                self._writer.show(reading)
        if reading is not None:
            self._react(reading, job.inputs)

    def _react(self, reading: Reading, inputs: Inputs | None) -> None:
        """Call the user's functions; their time is the training's, except in calls of geomon."""
        began, spent = time.perf_counter(), self._budget.spent
        try:
            self._reactions.call(reading, inputs)
        finally:
            taken = time.perf_counter() - began - (self._budget.spent - spent)
            self._budget.leave_out(max(0.0, taken))

    def _record(self, job: ReadingJob) -> Reading | None:
        reading = job.result()
        if reading is None:
            return None
        reading = msgspec.structs.replace(
            reading,
            # Before the first hardly any training time has passed.
            overhead=math.nan if self._published is None else self._budget.overhead,
            training=reading.training | self._logged.read(reading.step),
            notes=(*self._notes(), *reading.notes),
        )
        self._published = reading.step
        notes = [*reading.notes, *self._reactions.find_alerts(reading)]
        self._warn_of(notes)
        reading = msgspec.structs.replace(reading, notes=(*notes, *self._alerts))
        self._alerts.clear()
        self._writer.record(reading, job.arrays)
        return reading

    def _remove(self, job: ReadingJob) -> None:
        """Remove the first finished job, which is recorded or has failed."""
        if job.step in self._pending:
            self._pending.remove(job.step)
        self._executor.remove_first()

    def _warn_of(self, notes: Sequence[Note]) -> None:
        for note in notes:
            words = f"alert: {note.words()}" if note.is_alert else note.words()
            self._warnings.warn(words, kind=f"{note.stack}: {note.kind}")

    def _warn_of_late(self, late: Sequence[str]) -> None:
        """Warn of values whose reading is recorded without them, and have later readings wait."""
        if not late:
            return
        names = ", ".join(map(repr, late))
        option = "log=(" + "".join(f"{name!r}, " for name in late).rstrip() + ")"
        self._warnings.warn(
            f"{names} of step {self._published} came after its reading was recorded, and later "
            f"readings wait for it: log inside `with monitor(step)`, or give Monitor {option}",
            kind=f"late {names}",
        )
        self._logged.wait_for(late)


__all__ = ["Publisher"]
