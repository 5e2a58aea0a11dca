"""What the application keeps of a run: its curves, extracted once for each new reading."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomon.analysis import Curve, Phase, single_source
from geomon.analysis.alerts import alert_notes
from geomon.record import Follower, Reading, Readings
from geomon.record.printable import printable
from geomon.show.terminal.quantities import Contents, Quantity, contents_of


@dataclass(frozen=True)
class Look:
    """What one look at the file of a run has found.

    Attributes:
        readings: All readings so far.
        remarks: Sentences on the record as a whole.
        waiting: Whether there is no file yet.
        trouble: Why the file cannot be read; "" where it can.
        runs: Descriptions of the run so far.
    """

    readings: list[Reading]
    remarks: list[str]
    waiting: bool = False
    trouble: str = ""
    runs: tuple[dict[str, Any], ...] = ()


class Watched:
    """A run that is followed: `look` reads its file, in any thread; the rest is of one thread.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        stack: Name of the stack to follow, for a model with several; None for the main one.
        name: Name of the run on the screen.

    Attributes:
        selected: One reading per step, of the source that the run used most.
        contents: What charts can show.
        alerts: Step and words of each alert.
        latest: What the last look has found.
        readings: The same readings with the descriptions of the run.
        is_looked_at: Whether there was a look at the file.
    """

    def __init__(self, directory: Path, stack: str | None = None, name: str = "") -> None:
        self.path = Follower(directory, stack).path
        self.name = printable(name or str(directory))
        self.selected: list[Reading] = []
        self.contents = Contents([], {}, [])
        self.alerts: list[tuple[int, str]] = []
        self.latest = Look([], [], waiting=True)
        self.readings = Readings([], [])
        self.is_looked_at = False
        self._new_follower = lambda: Follower(directory, stack)
        self._follower = self._new_follower()
        self._refused: tuple[int, int] | None = None
        self._shapes: dict[tuple[object, ...], Reading] = {}  # a reading of each set of columns
        self._extremes: dict[str, tuple[int, float, float]] = {}
        self._curves: dict[tuple[Quantity, int | None], tuple[int, Curve]] = {}
        self._phases: dict[Quantity, Phase] = {}

    def look(self) -> Look | None:
        """Read what was written since the last look; None where nothing has changed.

        A file that cannot be read is said once, and read again from its start when it has changed.
        """
        try:
            state = self.path.stat()
        except OSError:
            if self.is_looked_at:
                return None  # not there yet, or on its way: a synced file is replaced by a new one
            return Look([], [], waiting=True)
        key = state.st_size, state.st_mtime_ns
        if key == self._refused:
            return None
        try:
            before, new = self._read()
        except (OSError, ValueError) as error:
            self._follower = self._new_follower()
            self._refused = key if isinstance(error, ValueError) else None
            trouble = printable(" ".join(str(error).split()))
            if trouble == self.latest.trouble:
                return None
            return Look(
                self.latest.readings, self.latest.remarks, trouble=trouble, runs=self.latest.runs
            )
        self._refused = None
        readings = self._follower.readings
        fine = not self.latest.trouble and not self.latest.waiting
        if fine and not new and readings is before:
            return None
        return Look(list(readings), self._follower.remarks(), runs=tuple(self._follower.runs))

    def _read(self) -> tuple[list[Reading], list[Reading]]:
        """Return all readings before this look, and the new ones.

        A file that was written anew in its place, as some tools that synchronise folders do, does
        not go on where it ended before: it is then read from its start.
        """
        before = self._follower.readings
        try:
            return before, self._follower.look()
        except ValueError:
            if not before:
                raise
            self._follower = self._new_follower()
            return before, self._follower.look()

    def take(self, look: Look) -> None:
        """Take what a look has found: the run's curves go on, or begin anew with a new record.

        Args:
            look: What `look` has returned.
        """
        self.is_looked_at = True
        known, readings = len(self.latest.readings), look.readings
        goes_on = _begins_with(readings, self.latest.readings)
        selected = single_source(readings)
        if not goes_on:
            self._shapes.clear()
            self._extremes.clear()
            self.alerts, known = [], 0
        if not goes_on or not _begins_with(selected, self.selected):
            self._curves.clear()
            self._extremes.clear()
        self._phases.clear()
        self.latest, self.selected = look, selected
        self._collect(readings[known:])

    def _collect(self, new: Iterable[Reading]) -> None:
        """Add the alerts and the columns of new readings."""
        for reading in new:
            self.alerts += [
                (reading.step, printable(" ".join(note.words().split())))
                for note in alert_notes(reading)
            ]
            self._shapes.setdefault(_shape(reading), reading)
        self.readings = Readings(list(self.latest.runs), self.selected)
        self.contents = contents_of(self._shapes.values(), self.readings.metrics)

    def curve(self, quantity: Quantity, layer: int | None = None) -> Curve:
        """Return the curve of a quantity.

        Args:
            quantity: The quantity.
            layer: Number of a layer; None for the mean.
        """
        done, curve = self._curves.get((quantity, layer), (0, Curve([], [], [])))
        if done < len(self.selected):
            new = quantity.curve(self.selected[done:], layer)
            curve = Curve(
                curve.steps + new.steps, curve.values + new.values, curve.margins + new.margins
            )
            self._curves[quantity, layer] = len(self.selected), curve
        return curve

    def extremes(self, metric: str) -> tuple[float, float]:
        """Return the lowest and the highest value of a head in the run; NaN without any.

        Args:
            metric: Name of a metric of heads.
        """
        done, low, high = self._extremes.get(metric, (0, math.inf, -math.inf))
        for reading in self.selected[done:]:
            values = reading.column(metric).by_head().values()
            low, high = min([low, *values]), max([high, *values])
        self._extremes[metric] = len(self.selected), low, high
        return low, high

    def phase(self, quantity: Quantity) -> Phase:
        """Return the phase of the mean of a quantity."""
        if quantity not in self._phases:
            self._phases[quantity] = self.curve(quantity).phase()
        return self._phases[quantity]

    def at(self, step: int | None) -> Reading | None:
        """Return the last reading up to a step; the last of all for None."""
        earlier = [r for r in self.selected if step is None or r.step <= step]
        return earlier[-1] if earlier else None

    def notes(self) -> list[str]:
        """List the notes of the last reading that are no alerts."""
        last = self.selected[-1].notes if self.selected else ()
        return [printable(" ".join(str(note).split())) for note in last if not note.is_alert]


def _shape(reading: Reading) -> tuple[object, ...]:
    """Return what differs between readings that charts show differently."""
    columns = reading.columns.items()
    found = [
        (metric, column.depths(), math.isnan(column.mean), bool(column.heads), *column.parts)
        for metric, column in columns
    ]
    return (*found, *reading.training)


def _begins_with(longer: list[Reading], shorter: list[Reading]) -> bool:
    if len(longer) < len(shorter):
        return False
    return all(one is other for one, other in zip(shorter, longer, strict=False))
