"""Smallest half widths that healthy values need, by metric, and faults that stay outside them."""

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from geomon import Reading, read
from geomon.analysis import FEWEST_READINGS, WATCHED, Bands, continue_line, start_of_window
from recipes.faults.campaign import PREFIX
from recipes.faults.detectors import Place, numbers_of
from recipes.faults.training import EACH_STEP
from recipes.faults.trainings import TRAININGS
from recipes.faults.unseen import CELLS, FAULT_STEP, Cell
from recipes.study.markdown import table
from recipes.study.training import is_finished

_NOTHING = 1e-9  # half width that holds nothing by itself
_SHARES = (0.5, 0.99, 0.999)


class Outside(NamedTuple):
    """A value outside of a band that has no smallest half width.

    Attributes:
        cell: The run; None for the first steps of a training.
        training: Name of the training.
        metric: Name of the metric.
        step: Step of the reading.
        place: Stack and depth of the value.
        distance: Half width that would have held it; of the logarithm, if the band is.
    """

    cell: Cell | None
    training: str
    metric: str
    step: int
    place: tuple[str, int]
    distance: float


class _Stacks:
    """The bands of all stacks of a run, and their values so far."""

    def __init__(self) -> None:
        self._bands: dict[str, Bands] = {}
        self._steps: list[int] = []
        self._values: defaultdict[str, dict[Place, list[float]]] = defaultdict(dict)

    def departures(self, reading: Reading) -> Iterator[tuple[str, float]]:
        """Yield metrics with the distances of values from the lines through those before."""
        start = start_of_window(self._steps, reading.step)
        for stack, columns in reading.stacks.items():
            own = self._values[stack]
            for place, value in numbers_of(columns):
                if place.metric in WATCHED:
                    by_logarithm = WATCHED[place.metric].by_logarithm
                    number = math.log(max(value, _NOTHING)) if by_logarithm else value
                    own.setdefault(place, [math.nan] * len(self._steps)).append(number)
            for values in own.values():
                values.extend([math.nan] * (len(self._steps) + 1 - len(values)))
            history = np.array([*own.values()]).T[start:]
            if len(history) > FEWEST_READINGS:
                apart = np.abs(history[-1] - continue_line(history[:-1]).expected)
                for place, distance in zip(own, apart.tolist(), strict=True):
                    if math.isfinite(distance):
                        yield place.metric, distance
        self._steps.append(reading.step)

    def add(self, reading: Reading) -> Iterator[tuple[str, tuple[str, int], float]]:
        """Yield metric, place and distance of the values of a reading that are outside."""
        for stack in reading.stacks:
            for one in self._bands.setdefault(stack, Bands(stack)).add(reading).departures:
                ends = one.low, one.high
                if WATCHED[one.place.metric].by_logarithm:
                    ends = math.log(one.low), math.log(one.high)
                distance = one.size * (ends[1] - ends[0]) / 2
                yield one.place.metric, (stack, one.place.layer or 0), distance


class Found(NamedTuple):
    """Values in the records of runs.

    Attributes:
        outside: Values outside of bands without a smallest half width.
        departures: Distances of healthy values from the lines through those before, by metric and
            by whether no limit is chosen with the training.
    """

    outside: list[Outside]
    departures: dict[tuple[str, bool], list[float]]


def find(folder: Path, cells: Sequence[Cell] = CELLS) -> Found:
    """Compare all values of the runs of a folder that read every step with those before."""
    without = {name: each._replace(least=_NOTHING) for name, each in WATCHED.items()}
    found = Found([], defaultdict(list))
    with patch.dict(WATCHED, without):
        for training in TRAININGS:
            own = [cell for cell in cells if cell.training == training]
            own = [cell for cell in own if is_finished(folder / cell.folder)]
            first, stacks = folder / training / PREFIX / EACH_STEP, _Stacks()
            if not first.is_dir():
                continue
            _add(found, stacks, read(first), None, training)
            for cell in own:
                readings = read(folder / cell.folder / EACH_STEP)
                _add(found, copy.deepcopy(stacks), readings, cell, training)
    return found


def _add(
    found: Found, stacks: _Stacks, readings: Iterable[Reading], cell: Cell | None, training: str
) -> None:
    for reading in readings:
        if cell is None or cell.fault is None:
            for metric, distance in stacks.departures(reading):
                found.departures[metric, TRAININGS[training].is_held_out].append(distance)
        found.outside.extend(
            Outside(cell, training, metric, reading.step, place, distance)
            for metric, place, distance in stacks.add(reading)
        )


def first_outside(
    found: Sequence[Outside], metric: str, least: float
) -> Mapping[Cell, tuple[int, bool]]:
    """Find for each run with a fault when a metric is first outside of bands of a least width.

    Returns:
        Steps since the fault, and whether a value of the right block was the furthest outside, of
        the runs in which there is one.
    """
    runs = defaultdict(list)
    for one in found:
        if one.cell and one.cell.fault and one.metric == metric and one.distance > least:
            runs[one.cell].append(one)
    result = {}
    for cell, own in runs.items():
        step = min(one.step for one in own)
        furthest = max((one for one in own if one.step == step), key=lambda one: one.distance)
        result[cell] = step - FAULT_STEP, furthest.place == cell.place
    return result


def write(folder: Path, within: int = 50) -> str:
    """Write how far healthy values go in one step, and which faults a smallest half width leaves.

    Args:
        folder: Folder of the runs.
        within: Steps in which a fault counts as seen.
    """
    found = find(folder)
    rows = []
    for metric, watched in WATCHED.items():
        own = [one for one in found.outside if one.metric == metric]
        healthy = [one for one in own if one.cell is None or one.cell.fault is None]
        chosen, others = (
            [one.distance for one in healthy if TRAININGS[one.training].is_held_out == is_held_out]
            for is_held_out in (False, True)
        )
        needed = max(chosen, default=0.0)
        cells: list[str] = []
        for least in (watched.least, needed):
            seen = [
                (cell, is_right)
                for cell, (delay, is_right) in first_outside(own, metric, least).items()
                if delay < within
            ]
            local = [right for cell, right in seen if cell.fault and cell.fault.local]
            cells += [
                f"{least:.3g}",
                f"{sum(d > least for d in chosen)} + {sum(d > least for d in others)}",
                f"{len(seen)}, {sum(local)} of {len(local)}",
            ]
        departures = [
            _shares(found.departures[metric, is_held_out]) for is_held_out in (False, True)
        ]
        rows.append((metric, *departures, *cells))
    shares = ", ".join(f"{100 * share:g} %" for share in _SHARES)
    head = [
        "metric", f"one step where limits are chosen: {shares}, largest", "in the others",
        "least now", "outside", "faults seen, right block",
        "least that holds all", "outside", "faults seen, right block",
    ]  # fmt: skip
    return "\n".join(table(head, rows))


def _shares(distances: Collection[float]) -> str:
    """Format the distances that shares of the values are within."""
    if not distances:
        return "-"
    ends = np.quantile(np.array([*distances]), [*_SHARES, 1.0])
    return ", ".join(f"{each:.2g}" for each in ends)
