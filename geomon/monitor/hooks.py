"""The user's functions that a monitor calls: on alerts, and on phases of the dimension."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from geomon.analysis import Curve, Phase, measured
from geomon.monitor.options import MonitorOptions
from geomon.monitor.planner import Account
from geomon.monitor.warnings import Warnings
from geomon.record import Reading


class Hooks:
    """Calls the functions given as `on_alert`, `on_phase` and `on_peak`.

    Args:
        options: All options of the monitor, checked.
        account: Account of the time; time in the functions is the training's.
        warnings: Turns errors into warnings.
    """

    def __init__(self, options: MonitorOptions, account: Account, warnings: Warnings) -> None:
        self._functions: dict[str, Callable[[Any], object] | None] = {
            name: options[name] for name in ("on_alert", "on_phase", "on_peak")
        }
        self._account, self._warnings = account, warnings
        # Dimensions, and the name of their last phase, by source of the readings.
        self._curves: defaultdict[str, Curve] = defaultdict(lambda: Curve([]))
        self._phases: dict[str, str] = {}

    def begin(self) -> None:
        """Begin the curves anew, as the record is opened."""
        self._curves.clear()
        self._phases.clear()

    def follow(self, reading: Reading) -> dict[str, Phase]:
        """Add a reading to the dimension's curve; return the phase for each hook that it calls."""
        point = measured(reading, "twonn")
        if math.isnan(point.value) or not (
            self._functions["on_phase"] or self._functions["on_peak"]
        ):
            return {}
        curve = self._curves[reading.source]
        curve.points.append(point)
        phase = curve.phase()
        found = {"on_peak": phase} if phase.peak == point else {}
        if phase.since is not None and phase.name != self._phases.get(reading.source):
            self._phases[reading.source] = phase.name
            found["on_phase"] = phase
        return found

    def call(self, name: str, argument: object) -> None:
        """Call a user's function; its time is the training's, except for calls of geomon."""
        function = self._functions[name]
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


__all__ = ["Hooks"]
