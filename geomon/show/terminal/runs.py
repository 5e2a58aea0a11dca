"""What the application knows of a run: what was read of it, and the curves that it can show."""

import math
from dataclasses import replace
from pathlib import Path

from geomon.analysis import Phase, curve_of, single_source
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.analysis.summary import headline
from geomon.record import Follower, Readings
from geomon.record.headline import TRUST
from geomon.record.printable import printable


def offered(readings: Readings) -> dict[str, Quantity]:
    """List what can be drawn over steps by tag, what charts show by default first.

    Of a metric it is its value, or its parts where it has none. Means over heads of both signs
    cancel: their mean size is offered instead.

    Args:
        readings: Readings of a run, of one source.
    """
    every = quantities_of(readings)
    by_metric: dict[str, list[Quantity]] = {}
    for each in every.values():
        if each.metric and each.value is None and _has_values(each, readings):
            by_metric.setdefault(each.metric, []).append(each)
    found = {}
    for metric in sorted(by_metric, key=lambda name: not readings.text_of(name).charts):
        own = [each for each in by_metric[metric] if not each.part]
        charted = [each for each in by_metric[metric] if each.chart]
        others = [each for each in by_metric[metric] if each.part.rpartition("/")[2] not in TRUST]
        size = every.get(f"{metric}_size")
        for each in own or charted or others:
            found[each.tag] = each if size is None or each.part else replace(size, title=each.title)
    return found | {tag: each for tag, each in every.items() if not each.metric}


def places_of(quantity: Quantity, readings: Readings) -> dict[str, int | None]:
    """List where a quantity has values, in words: layers by number, None for their mean.

    Args:
        quantity: The quantity.
        readings: Readings of a run, of one source.
    """
    if not quantity.metric:
        return {}
    columns = [reading.column(quantity.metric, quantity.part) for reading in readings]
    layers = sorted({layer for column in columns for layer in column.depths()})
    mean = "mean over layers" if quantity.value is None else "size, mean over heads"
    found: dict[str, int | None] = {mean: None} if len(quantity.curve(readings)) else {}
    return found | {f"layer {layer}": layer for layer in layers}


def _has_values(quantity: Quantity, readings: Readings) -> bool:
    columns = (reading.column(quantity.metric, quantity.part) for reading in readings)
    return any(column.layers or math.isfinite(column.mean) for column in columns)


class Watched:
    """A run that is followed: `look` reads its file, in any thread, and then sets the rest.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        stack: Name of the stack to follow, for a model with several; None for the main one.
        name: Name of the run on the screen.

    Attributes:
        whole: All readings of the record.
        readings: One reading per step, of the source that the run used most.
        quantities: What can be drawn over steps, by tag.
        headline: What a reader must know first.
        fallen: Phase of the dimension, where it has fallen from a peak; else None.
        state: Why nothing is shown yet; "" once there are readings.
        trouble: Why the file cannot be read; "" where it can.
    """

    def __init__(self, directory: Path, stack: str | None = None, name: str = "") -> None:
        self._follower, self._stack = Follower(directory), stack
        self.name = printable(name or str(directory))
        self.whole = self.readings = Readings([], [])
        self.quantities: dict[str, Quantity] = {}
        self.headline = ""
        self.fallen: Phase | None = None
        self.state, self.trouble = f"reading {printable(str(self._follower.path))}", ""

    def look(self) -> bool:
        """Read what was written since the last look, and return whether anything has changed."""
        before, follower = (self.state, self.trouble), self._follower
        try:
            is_new = bool(follower.look())
            every = follower.readings()
            if is_new or (self.trouble and len(every)):
                self._take(every.of_stack(self._stack))
                return True
        except (OSError, ValueError) as error:
            self.trouble = printable(" ".join(str(error).split()))
            return before != (self.state, self.trouble)
        if not len(self.whole):
            there = follower.path.is_file()
            waiting = f"waiting for {printable(str(follower.path))}"
            self.state = "no readings yet" if there else waiting
        return before != (self.state, self.trouble)

    def _take(self, whole: Readings) -> None:
        selected = Readings(whole.runs, single_source(whole))
        self.quantities, self.headline = offered(selected), headline(whole)
        curve = curve_of(selected, "twonn")
        phase = curve.phase() if len(curve) else None
        self.fallen = phase if phase is not None and phase.earliest is not None else None
        self.whole, self.readings, self.state, self.trouble = whole, selected, "", ""
