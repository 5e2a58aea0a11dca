"""Tracks: the numbers of one training over its steps, healthy until the fault comes."""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon import read
from geomon.analysis.bands import WATCHED
from geomon.record import Reading
from recipes.study.training import is_finished

Array = NDArray[np.float64]

# Parts of places: half width of the 95 % interval of a value; mean over layers, which stands where
# it has an interval; and half width of that.
MARGIN, MEAN, MEAN_MARGIN = "margin", "mean", "margin of the mean"


class Place(NamedTuple):
    """What a number is of.

    Attributes:
        metric: Name of a metric, or of a value that the training logs.
        layer: Number of the layer; 0 for the input of the first block, and where there is none.
        part: Number of the head, name of the matrix; "" where there is none.
    """

    metric: str
    layer: int = 0
    part: str = ""


@dataclass(frozen=True)
class Track:
    """Numbers of a training at the steps that were read; those before a fault are in front.

    Attributes:
        name: Name of the healthy training.
        fault: Name of the fault; "" for a healthy training.
        fault_step: First step of the fault; None for a healthy training.
        block: Number of the faulty block, from 0; None if it is everywhere, or there is none.
        steps: Steps, ascending, [readings].
        values: Numbers by place, [readings] each; NaN where one is missing.
    """

    name: str
    fault: str
    fault_step: int | None
    block: int | None
    steps: NDArray[np.int64]
    values: dict[Place, Array]

    @property
    def size(self) -> str:
        """Name of the sizes of the model."""
        return self.name.rpartition("_")[0]

    @property
    def number(self) -> int:
        """Number of the training among those of its size."""
        return int(self.name.rpartition("_")[2])

    def places(self, metric: str) -> list[Place]:
        """List the places of a metric."""
        return [place for place in self.values if place.metric == metric]

    def at(self, chosen: NDArray[np.bool_]) -> "Track":
        """Select readings.

        Args:
            chosen: Whether each reading is kept, [readings].
        """
        values = {place: each[chosen] for place, each in self.values.items()}
        return replace(self, steps=self.steps[chosen], values=values)


def read_tracks(folder: Path, record: str, numbers: Collection[int]) -> Iterator[Track]:
    """Read the complete trainings of an experiment, each healthy one before its branches."""
    for base in sorted(path for path in folder.iterdir() if path.is_dir()):
        number = int(base.name.rpartition("_")[2])
        if number not in numbers or not is_finished(base / "healthy"):
            continue
        healthy = _read(base / "healthy" / record)
        yield Track(base.name, "", None, None, *healthy)
        for branch in sorted(base.iterdir()):
            if branch.name != "healthy" and is_finished(branch):
                yield _branch(base.name, branch, record, *healthy)


def _branch(
    name: str, folder: Path, record: str, steps: NDArray[np.int64], values: dict[Place, Array]
) -> Track:
    fault = json.loads((folder / "fault.json").read_text())
    own_steps, own = _read(folder / record)
    before = steps < fault["step"]
    missing = np.full(len(own_steps), np.nan)
    joined = {
        place: np.concatenate([each[before], own.get(place, missing)])
        for place, each in values.items()
    }
    all_steps = np.concatenate([steps[before], own_steps])
    return Track(name, fault["fault"], fault["step"], fault["block"], all_steps, joined)


def _read(folder: Path) -> tuple[NDArray[np.int64], dict[Place, Array]]:
    readings = list(read(folder))
    values: dict[Place, Array] = {}
    for number, reading in enumerate(readings):
        for place, value in _values(reading):
            values.setdefault(place, np.full(len(readings), np.nan))[number] = value
    return np.array([reading.step for reading in readings]), values


def _values(reading: Reading) -> Iterator[tuple[Place, float]]:
    for metric, column in reading.columns.items():
        if metric in WATCHED and WATCHED[metric].by_part:
            for part, own in column.parts.items():
                for layer, value in own.by_layer().items():
                    yield Place(metric, layer, part), value
            continue
        heads = column.by_head()
        for (layer, head), value in heads.items():
            yield Place(metric, layer, str(head)), value
        for layer, value in column.by_layer().items() if not heads else ():
            yield Place(metric, layer), value
            if math.isfinite(width := column.margin_at(layer)):
                yield Place(metric, layer, MARGIN), width
        if math.isfinite(column.mean_margin):
            yield Place(metric, 0, MEAN), column.mean
            yield Place(metric, 0, MEAN_MARGIN), column.mean_margin
    for name, value in reading.training.items():
        metric, _, rest = name.partition("/")
        number, _, part = rest.partition("/")
        yield Place(metric, int(number or 0), part), value
