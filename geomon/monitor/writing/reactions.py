"""Reactions to what a run shows: alerts in the notes, and calls of the user's functions."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from geomon.analysis import Phase, find_phase
from geomon.analysis.alerts import Alert, AlertWatch, Inputs
from geomon.analysis.curves import measured
from geomon.monitor.writing.output import Warnings
from geomon.note import Note
from geomon.record import Reading


class Reactions:
    """Watches the readings of a run for alerts and changes of phase.

    Args:
        alerts: Names of the alerts that are watched.
        on_phase: Function of a `Phase`, called when the name of the phase changes; None for none.
        on_alert: Function of an `Alert`, called for each; None for none.
        warnings: Turns what goes wrong into warnings.
    """

    def __init__(
        self,
        alerts: Collection[str],
        on_phase: Callable[[Phase], object] | None,
        on_alert: Callable[[Alert], object] | None,
        warnings: Warnings,
    ) -> None:
        self._watch = AlertWatch(alerts)
        self._on_phase = on_phase
        self._on_alert = on_alert
        self._warnings = warnings
        # Steps, dimensions and margins, by source of the readings.
        self._curves: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
        self._phases: dict[str, str] = {}  # by source, the name of the last phase
        self._raised: list[Alert] = []  # by the reading that is being published

    @property
    def asks_again(self) -> bool:
        """Whether the next reading decides about an alert (see `AlertWatch`)."""
        return self._watch.asks_again

    def recall(self, readings: Iterable[Reading]) -> None:
        """Take the readings of an earlier start of the run; nothing is called for them.

        Args:
            readings: Readings of the record, in the order in which they were written.
        """
        for reading in readings:
            self._watch.add(reading)
            self._follow(reading)

    def find_alerts(self, reading: Reading) -> list[Note]:
        """Find the alerts that a reading raises, as notes of the reading.

        Args:
            reading: A reading, with its notes.
        """
        self._raised = []
        self._warnings.attempt(
            lambda: self._raised.extend(self._watch.add(reading)),
            "alerts could not be looked for in a reading",
        )
        return [alert.note() for alert in self._raised]

    def call_of_alerts(self, inputs: Inputs | None) -> None:
        """Call the user's function for each alert that `find_alerts` found last.

        Args:
            inputs: What the model was called with, where it is known.
        """
        for alert in self._raised:
            self._call("on_alert", self._on_alert, replace(alert, inputs=inputs))

    def call(self, reading: Reading, inputs: Inputs | None = None) -> None:
        """Call the user's functions for a reading that has been recorded.

        Args:
            reading: The reading to which `find_alerts` was applied last.
            inputs: What the model was called with, where it is known.
        """
        self.call_of_alerts(inputs)
        phase = self._follow(reading)
        if phase is not None:
            self._call("on_phase", self._on_phase, phase)

    def _follow(self, reading: Reading) -> Phase | None:
        """Add a reading to the curve of the dimension; the phase, where it is another one."""
        if self._on_phase is None:
            return None
        curve = self._curves[reading.source]
        curve.append((reading.step, *measured(reading, "twonn")))
        phase = find_phase(*zip(*curve, strict=True))
        if phase.name in ("unknown", self._phases.get(reading.source)):
            return None
        self._phases[reading.source] = phase.name
        return phase

    def _call(self, name: str, function: Callable[[Any], object] | None, argument: object) -> None:
        if function is None:
            return
        self._warnings.attempt(
            lambda: function(argument),
            f"{name} failed and is called again the next time; the training goes on",
            once=True,
        )


__all__ = ["Reactions"]
