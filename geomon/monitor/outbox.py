"""The outbox: from measured to shown, the only queue of a monitor's readings and alerts.

A reading is measured, completed with what the training logs, recorded, then shown. An alert is
recorded, printed and shown as soon as it is seen.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from geomon.analysis import Alert, AlertWatch, Curve, Inputs, Phase, alert_opening, measured
from geomon.failures import failures
from geomon.monitor.executor import ReadingExecutor
from geomon.monitor.jobs import CHECK, ReadingJob
from geomon.monitor.logged import LoggedValues
from geomon.monitor.losses import Jump, LossWatch
from geomon.monitor.moves import Still
from geomon.monitor.options import MonitorOptions
from geomon.monitor.planner import Account, Planner
from geomon.monitor.sinks import SinkCalls
from geomon.monitor.warnings import Warnings
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import RaisedAlert, Reading, Readings, Record


class _Completed(NamedTuple):
    """A reading ready to be recorded, with its alerts; without a reading on ranks but the first."""

    reading: Reading | None
    alerts: Sequence[Alert] = ()


_NOTHING = _Completed(None)


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
        sinks: The sinks.
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
        self._record = record
        self._executor, self._planner, self._account = executor, planner, account
        self._warnings, self._notes = warnings, notes
        self._hooks: dict[str, Callable[[Any], object] | None] = {
            name: options[name] for name in ("on_alert", "on_phase", "on_peak")
        }
        self._alerts = options["alerts"]
        self._watch = AlertWatch(self._alerts)
        self._logged = LoggedValues(options["log"], warnings)
        self._losses = LossWatch()
        self.sinks = SinkCalls(options["sinks"], warnings, options["sink_timeout"])
        self.latest: Reading | None = None
        self._before: Reading | None = None  # the reading before, of this start or an earlier one
        self._checks_before = 0  # checks of earlier starts
        self.open_step: int | None = None
        self._noted: list[Note] = []  # alerts of checks and remarks since the last reading
        self._last_completed: tuple[ReadingJob | None, _Completed] = None, _NOTHING
        self._published: int | None = None  # step of the last reading that was published
        # Dimensions, and the name of their last phase, by source of the readings.
        self._curves: defaultdict[str, Curve] = defaultdict(lambda: Curve([]))
        self._phases: dict[str, str] = {}

    def begin(self, step: int, description: dict[str, Any]) -> int:
        """Open the record at a first step, or when training goes back; return the earlier readings.

        The number returned counts the readings of earlier starts on the branch that continues here.
        """
        found: list[Readings] = []
        self._watch = AlertWatch(self._alerts)
        self._curves.clear()
        self._phases.clear()
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
        earlier = found[0] if found else Readings([], [])
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
        self._watch.recall_given_up(earlier.abandoned)
        self._before = earlier[-1] if earlier else None
        checks = self._before.checks if self._before else 0
        self._checks_before = checks - self._planner.checks.made
        self.sinks.describe(description | {"from_step": step})
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
        self._noted += notes

    def log(self, step: int, values: Mapping[str, Any], *, watched: bool) -> None:
        """Put values into the reading of a step; `watched` says whether its window is open."""
        if not self._takes_values(step, watched=watched):
            return
        with self._account.charge():
            if step == self._published and step not in self._pending:
                # Only the first accumulated batch is read, so values of others are not late.
                self._warn_of_late([name for name in values if not self._logged.has(step, name)])
                return
            self._logged.put(step, values)
            self.publish()

    def watch_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Raise an alert if a loss among the values of a step is not finite any more, or jumps."""
        for found in self._losses.put(step, values):
            add = self._watch.add_jump if isinstance(found, Jump) else self._watch.add_loss
            self._raise_facts(add(*found), "log")

    def watch_weights(self, found: tuple[int, Still] | None) -> None:
        """Raise an alert if trainable weights were found to stand still at a step."""
        if found is not None:
            step, still = found
            self._raise_facts(self._watch.add_still(step, *still), "weights")

    def _raise_facts(self, alerts: Sequence[Alert], source: str) -> None:
        """Raise alerts that do not belong to a reading; the next one has their notes."""
        for alert in alerts:
            self._noted.append(alert.note())
            self._raise(alert, source, None)

    def lacks_values(self, step: int) -> bool:
        """Return whether a reading of a step waits for values of the option `log`."""
        return step in self._pending and not self._logged.is_complete(step)

    def close(self) -> None:
        """Publish everything, and close record and sinks; may be called more than once."""
        self.publish(wait=False)
        if self._published is not None:
            self._logged.warn_of_absent()
        if self._record is not None:
            path = self._record.path
            self._warnings.attempt(self._record.close, f"{path} is not complete")
        self.sinks.close()

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
                reading, alerts = self._completed(job)
                if reading is not None:
                    self._write(reading, job)
            except failures():
                self._take_first()
                raise
            self._take_first()
            if reading is None:
                return
            self.latest = self._before = reading
            said, self._noted = self._noted, []
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
            for alert in alerts:
                self._raise(alert, reading.source, job.inputs)
            for name, phase in self._follow(reading).items():
                self._call(name, phase)

    def _publish_check(self, job: ReadingJob) -> None:
        """Raise the alerts of a check, which itself is not recorded."""
        with self._account.charge():
            self._take_first()
            check = job.result()
            assert check is not None
            alerts = self._find_alerts(check)
            if self._watch.asks_again:
                self._planner.checks.ask_again()
            if alerts:
                self._planner.owe()
            for alert in alerts:
                self._noted.append(alert.note())
                self._raise(alert, check.source, job.inputs)

    def _take_first(self) -> None:
        self._executor.take_first()
        self._last_completed = None, _NOTHING

    def _completed(self, job: ReadingJob) -> "_Completed":
        """Complete the reading of a job with what the run knows, only once even after Ctrl-C."""
        if self._last_completed[0] is not job:
            self._last_completed = job, self._complete(job)
        return self._last_completed[1]

    def _complete(self, job: ReadingJob) -> "_Completed":
        reading = job.result()
        if reading is None:
            return _NOTHING
        # Before the first reading, hardly any training time has passed.
        overhead = math.nan if self._published is None else self._account.overhead
        before = self._before
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
        alerts = self._find_alerts(reading)
        # Sinks without alerts get the notes of alerts since the last reading.
        noted = *reading.notes, *self._noted, *(alert.note() for alert in alerts)
        return _Completed(msgspec.structs.replace(reading, notes=noted), alerts)

    def _find_alerts(self, reading: Reading) -> list[Alert]:
        found: list[Alert] = []
        self._warnings.attempt(
            lambda: found.extend(self._watch.add(reading)),
            "alerts could not be looked for in a reading",
        )
        return found

    def _raise(self, alert: Alert, source: str, inputs: Inputs | None) -> None:
        """Record, print and show an alert, and call the user's function."""
        note = alert.note()
        raised = RaisedAlert(alert.step, time.time(), source, note, alert.courses)
        if self._record is not None:
            self._attempt_to_write(functools.partial(self._record.write_alert, raised))
        for line in filter(None, note.lines(alert_opening(alert.step))):
            self._warnings.warn(line)
        self.sinks.alert(raised)
        self._call("on_alert", replace(alert, inputs=inputs))

    def _write(self, reading: Reading, job: ReadingJob) -> None:
        """Write a reading to the record before it is shown, so that nothing shown is ever lost."""
        self._published = reading.step
        record = self._record
        if record is not None:
            self._attempt_to_write(lambda: record.write(reading))
            self._warnings.attempt(
                lambda: record.write_arrays(reading, job.arrays),
                f"arrays for figures could not be written to {record.arrays.path}; the record "
                "continues without them",
                once=True,
            )

    def _attempt_to_write(self, write: Callable[[], object]) -> None:
        record = self._record
        assert record is not None
        self._warnings.attempt(
            write, f"{record.path} could not be written; its readings are kept until it can be"
        )
        if record.news:
            self._warnings.warn(record.news)
            record.news = ""

    def _recall(self, reading: Reading) -> None:
        """Take a reading of an earlier start into account, without calling anything for it."""
        self._watch.recall(reading)
        self._losses.put(reading.step, reading.training)
        self._follow(reading)

    def _follow(self, reading: Reading) -> dict[str, Phase]:
        """Add a reading to the dimension's curve; return the phase for each hook that it calls."""
        point = measured(reading, "twonn")
        if math.isnan(point.value) or not (self._hooks["on_phase"] or self._hooks["on_peak"]):
            return {}
        curve = self._curves[reading.source]
        curve.points.append(point)
        phase = curve.phase()
        found = {"on_peak": phase} if phase.peak == point else {}
        if phase.since is not None and phase.name != self._phases.get(reading.source):
            self._phases[reading.source] = phase.name
            found["on_phase"] = phase
        return found

    def _call(self, name: str, argument: object) -> None:
        """Call a user's function; its time is the training's, except for calls of geomon."""
        function = self._hooks[name]
        if function is None:
            return
        began, spent = time.perf_counter(), self._account.spent
        try:
            self._warnings.attempt(
                lambda: function(argument),
                f"{name} failed and will be called again the next time; the training goes on",
                once=True,
            )
        finally:
            taken = time.perf_counter() - began
            self._account.left_out += max(0.0, taken - (self._account.spent - spent))

    def _warn_of_late(self, late: Sequence[str]) -> None:
        """Warn about values that came after their reading; later readings will wait for them."""
        if not late:
            return
        names = ", ".join(map(repr, late))
        option = "log=(" + "".join(f"{name!r}, " for name in late).rstrip() + ")"
        self._warnings.warn(
            f"{names} of step {self._published} came after its reading was recorded; later "
            f"readings will wait for it: log inside `with monitor(step)`, or give Monitor {option}",
            kind=f"late {names}",
        )
        self._logged.wait_for(late)


__all__ = ["Outbox"]
