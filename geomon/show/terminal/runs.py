"""What the application knows of a run: what was read of it, and the curves that it can show."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from geomon.analysis import Curve, Phase, curve_of, mean_abs_over_heads, single_source
from geomon.analysis.curves import plain_curve, training_curve
from geomon.analysis.summary import headline
from geomon.record import Follower, Readings
from geomon.record.headline import TRUST
from geomon.record.printable import printable


class Quantity(NamedTuple):
    """A value of each reading that can be drawn over steps.

    Attributes:
        label: Name of it, with its unit.
        curve: Function of readings and the number of a layer, None for the mean over layers.
        metric: Name of the metric; "" for a value of the run as a whole.
        part: Name of a part of the metric, "k32" say; "" for its value.
        places: Numbers of the layers that have the value, by their names; of the mean it is None.
    """

    label: str
    curve: Callable[[Readings, int | None], Curve]
    metric: str = ""
    part: str = ""
    places: Mapping[str, int | None] = MappingProxyType({})


def quantities_of(readings: Readings) -> dict[str, Quantity]:
    """List what can be drawn over steps by name, what charts show by default first.

    Args:
        readings: Readings of a run, of one source.
    """
    places: dict[str, dict[str, set[int | None]]] = {}  # by metric and part; None for the mean
    logged: dict[str, None] = {}
    for reading in readings:
        logged |= dict.fromkeys(reading.training)
        for metric, column in reading.columns.items():
            for part, own in {"": column, **column.parts}.items():
                has_mean = (
                    column.heads if _is_signed(readings, metric) else not math.isnan(own.mean)
                )
                found_here = {*own.depths(), *([None] if has_mean else [])}
                if found_here:
                    places.setdefault(metric, {}).setdefault(part, set()).update(found_here)
    known = dict.fromkeys([*(name for name in readings.metrics if name in places), *places])
    found = {}
    for metric in sorted(known, key=lambda name: not readings.text_of(name).charts):
        text = readings.text_of(metric)
        charted = [part for part in places[metric] if part in text.charts]
        others = [part for part in places[metric] if part.rpartition("/")[2] not in TRUST]
        for part in [""] if "" in places[metric] else charted or others:
            label = text.title_of(part) + f" ({text.unit})" * bool(text.unit)
            curve, mean = partial(_of_metric, metric, part), "mean over layers"
            if _is_signed(readings, metric):  # a mean over heads would cancel
                curve, mean = partial(_of_size, metric), "size, mean over heads"
            named: dict[str, int | None] = {mean: None} if None in places[metric][part] else {}
            layers = sorted(layer for layer in places[metric][part] if layer is not None)
            named |= {f"layer {layer}": layer for layer in layers}
            name = "/".join(filter(None, (metric, part)))
            found[name] = Quantity(printable(label), curve, metric, part, named)
    for name in logged:
        curve = partial(_of_training, name)
        found[f"training/{name}"] = Quantity(printable(f"training {name}"), curve)
    found["geomon/overhead"] = Quantity("geomon's share of the time", _of_overhead)
    return found


def _is_signed(readings: Readings, metric: str) -> bool:
    return "size" in readings.text_of(metric).charts


def _of_metric(metric: str, part: str, readings: Readings, layer: int | None) -> Curve:
    return curve_of(readings, metric, part=part, layer=layer)


def _of_size(metric: str, readings: Readings, layer: int | None) -> Curve:
    if layer is None:
        return mean_abs_over_heads(readings, metric)
    return curve_of(readings, metric, layer=layer)


def _of_training(name: str, readings: Readings, layer: int | None) -> Curve:
    return training_curve(readings, name)


def _of_overhead(readings: Readings, layer: int | None) -> Curve:
    return plain_curve(readings, lambda reading: reading.overhead)


class Watched:
    """A run that is followed: `look` reads its file, in any thread, and then sets the rest.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        stack: Name of the stack to follow, for a model with several; None for the main one.
        name: Name of the run on the screen.

    Attributes:
        whole: All readings of the record.
        readings: One reading per step, of the source that the run used most.
        quantities: What can be drawn over steps, by name.
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
        self.quantities, self.headline = quantities_of(selected), headline(whole)
        curve = curve_of(selected, "twonn")
        phase = curve.phase() if len(curve) else None
        self.fallen = phase if phase is not None and phase.earliest is not None else None
        self.whole, self.readings, self.state, self.trouble = whole, selected, "", ""
