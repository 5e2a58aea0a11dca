"""What happened: which value left its band first, and in which order the others followed."""

from collections.abc import Iterable
from dataclasses import dataclass

from geomon.analysis.alerts import alert_notes
from geomon.analysis.bands import Bands, Departure
from geomon.record import Reading

# Readings without a departure before the first alert, at which a story begins.
_BEFORE = 12
_TOLD = 6  # places that are named, the first ones


@dataclass(frozen=True)
class Step:
    """A value that left its band, and when.

    Attributes:
        step: Step of the first reading at which it was outside.
        departure: The value and its band.
    """

    step: int
    departure: Departure


def departures_of(readings: Iterable[Reading]) -> list[Step]:
    """Find when each value left its band for the first time since the quiet before the first alert.

    Args:
        readings: Readings of a run, from one source, steps ascending.

    Returns:
        One entry for each place that left its band, in the order in which they did; empty where the
        run has no alert.
    """
    bands = Bands()
    found: dict[object, Step] = {}
    quiet, alerted = 0, False
    for reading in readings:
        departures = bands.add(reading)
        quiet = 0 if departures else quiet + 1
        alerted = alerted or bool(alert_notes(reading))
        if not alerted and quiet >= _BEFORE:
            found.clear()
        for departure in departures:
            found.setdefault(departure.place, Step(reading.step, departure))
    return list(found.values()) if alerted else []
