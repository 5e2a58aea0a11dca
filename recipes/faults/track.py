"""Tracks: the numbers of one training, one row for each step, healthy until the fault comes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon import read
from geomon.record import Reading, Readings
from recipes.faults.training import EACH_STEP, FULL

Array = NDArray[np.float64]


class Place(NamedTuple):
    """What a number is of.

    Attributes:
        metric: Name of the metric, or of a value that the training logs.
        layer: Number of the layer; 0 where it is of none.
        head: Number of the head; -1 where it is of none.
    """

    metric: str
    layer: int = 0
    head: int = -1


@dataclass(frozen=True)
class Track:
    """Numbers of a training at the steps that were read, those before a fault in front.

    Attributes:
        name: Name of the healthy training.
        fault: Name of the fault; "" for a healthy training.
        fault_step: First step of the fault; None for a healthy training.
        block: Number of the faulty block, from 0; None where it is everywhere or there is none.
        steps: Steps, ascending, [readings].
        values: Numbers by place, [readings] each; NaN where one is missing.
    """

    name: str
    fault: str
    fault_step: int | None
    block: int | None
    steps: NDArray[np.int64]
    values: dict[Place, Array]
