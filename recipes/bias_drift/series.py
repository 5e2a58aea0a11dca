"""What the records of one block hold, by the norm of the bias."""

import json
from dataclasses import dataclass
from pathlib import Path

from geomon import Reading, read
from recipes.bias_drift.watch import QUANTILES, SCORES

_PREFIX = "bias_"
# What enters the block, and what leaves it.
INPUT, OUTPUT = 0, 1


@dataclass(frozen=True)
class Series:
    """Readings of a block under one direction of the bias.

    Attributes:
        levels: Norms of the bias, ascending from 0.
        readings: A reading at each of them.
        scores: Quantiles of the scores of one head at each of them, as last written.
    """

    levels: list[float]
    readings: list[Reading]
    scores: list[list[float]]

    def values(self, metric: str, layer: int = OUTPUT, part: str = "") -> list[float]:
        """Collect the values of a metric by level.

        Args:
            metric: Name of the metric.
            layer: 0 for what enters the block, 1 for what leaves it and for its attention.
            part: Name of a part of it; "" for its value.
        """
        return [reading.column(metric, part).at(layer) for reading in self.readings]

    def heads(self, metric: str) -> list[list[float]]:
        """Collect the values of all heads by level.

        Args:
            metric: Name of the metric.
        """
        return [list(reading.column(metric).by_head().values()) for reading in self.readings]


def load_series(folder: Path, step: int = 0) -> list[Series]:
    """Read the series of all directions of a block.

    Args:
        folder: Folder of the untrained or of the trained block.
        step: Number of optimizer updates in the weights.

    Raises:
        FileNotFoundError: A record is missing.
    """
    return [
        _load(
            sorted([*folder.glob(f"{_PREFIX}*"), *direction.glob(f"{_PREFIX}*")], key=_level), step
        )
        for direction in sorted(folder.glob("direction_*"))
    ]


def _load(folders: list[Path], step: int) -> Series:
    readings = [next(one for one in read(folder) if one.step == step) for folder in folders]
    scores = [json.loads((folder / SCORES).read_text()) for folder in folders]
    assert all(len(row) == len(QUANTILES) for row in scores)
    return Series([_level(folder) for folder in folders], readings, scores)


def _level(folder: Path) -> float:
    return float(folder.name.removeprefix(_PREFIX))
