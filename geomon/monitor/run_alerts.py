"""Alerts of a run: looked for in readings, losses and weights, and raised as soon as found."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from geomon.analysis import Alert, AlertWatch, Inputs
from geomon.monitor.hooks import Hooks
from geomon.monitor.losses import Jump, LossWatch
from geomon.monitor.moves import Still
from geomon.monitor.run_writer import RunWriter
from geomon.monitor.warnings import Warnings
from geomon.note import Note
from geomon.record import RaisedAlert, Reading


class RunAlerts:
    """Finds and raises alerts, and keeps the notes of those that belong to no reading yet.

    Args:
        names: Names of the watched rules.
        writer: Records and shows alerts.
        hooks: Calls the user's function.
        warnings: Turns errors into warnings.

    Attributes:
        noted: Notes of alerts between readings, and other remarks, for the next reading.
    """

    def __init__(
        self, names: Collection[str], writer: RunWriter, hooks: Hooks, warnings: Warnings
    ) -> None:
        self._names, self._writer, self._hooks, self._warnings = names, writer, hooks, warnings
        self._watch = AlertWatch(names)
        self._losses = LossWatch()
        self.noted: list[Note] = []

    def begin(self) -> None:
        """Begin anew, as the record is opened."""
        self._watch = AlertWatch(self._names)

    def recall(self, reading: Reading) -> None:
        """Take a reading of an earlier start into account, without raising anything for it."""
        self._watch.recall(reading)
        self._losses.put(reading.step, reading.training)

    def recall_given_up(self, readings: Sequence[Reading]) -> None:
        """Remember readings of branches that were given up, the last branch last."""
        self._watch.recall_given_up(readings)

    @property
    def asks_again(self) -> bool:
        """Whether the next look decides whether a value of the last one has left its band."""
        return self._watch.asks_again

    def find(self, reading: Reading) -> list[Alert]:
        """Look for alerts in a reading or check."""
        found: list[Alert] = []
        self._warnings.attempt(
            lambda: found.extend(self._watch.add(reading)),
            "alerts could not be looked for in a reading",
        )
        return found

    def watch_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Raise an alert if a loss among the values of a step is not finite any more, or jumps."""
        for found in self._losses.put(step, values):
            add = self._watch.add_jump if isinstance(found, Jump) else self._watch.add_loss
            self.raise_between(add(*found), "log")

    def watch_weights(self, found: tuple[int, Still] | None) -> None:
        """Raise an alert if trainable weights were found to stand still at a step."""
        if found is not None:
            step, still = found
            self.raise_between(self._watch.add_still(step, *still), "weights")

    def raise_between(
        self, alerts: Sequence[Alert], source: str, inputs: Inputs | None = None
    ) -> None:
        """Raise alerts that do not belong to a reading; the next one has their notes."""
        for alert in alerts:
            self.noted.append(alert.note())
            self.raise_alert(alert, source, inputs)

    def raise_alert(self, alert: Alert, source: str, inputs: Inputs | None) -> None:
        """Record, print and show an alert, and call the user's function."""
        raised = RaisedAlert(alert.step, time.time(), source, alert.note(), alert.courses)
        self._writer.write_alert(raised)
        self._hooks.call("on_alert", replace(alert, inputs=inputs))


__all__ = ["RunAlerts"]
