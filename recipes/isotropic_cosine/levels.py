"""Mean cosines of watched models beside the 95th percentile at their width, from their records."""

import math
from pathlib import Path
from typing import NamedTuple

from geomon import Reading, read
from geomon.kernels.baselines import isotropic_cosine_quantile
from geomon.record import tags

_METRIC = "cosine"
_LARGEST_WIDTH = 2**20


class Level(NamedTuple):
    """Mean cosine of the layers of a model at one step.

    Attributes:
        name: Name of the model: that of its run's folder.
        width: Width of the hidden states.
        step: Number of optimizer updates.
        mean: Mean over the layers without layer 0.
        least: Smallest mean cosine of one of those layers.
        null: 95th percentile of the cosine of a pair of isotropic rows of that width.
    """

    name: str
    width: int
    step: int
    mean: float
    least: float
    null: float


def width_of(quantile: float) -> int:
    """Find the width whose 95th percentile of the isotropic cosine is nearest to a value.

    A record holds that percentile (`cosine/isotropic_pair`) and not the width.

    Args:
        quantile: 95th percentile.

    Example:
        >>> width_of(isotropic_cosine_quantile(768))
        768
    """
    low, high = 2, _LARGEST_WIDTH
    while high - low > 1:
        middle = (low + high) // 2
        above = isotropic_cosine_quantile(middle) > quantile
        low, high = (middle, high) if above else (low, middle)
    return min(low, high, key=lambda width: abs(isotropic_cosine_quantile(width) - quantile))


def levels(folder: Path) -> list[Level]:
    """Collect the levels of all readings of a run, steps ascending.

    Args:
        folder: Folder of the run.

    Raises:
        ValueError: The record holds no mean cosine of layers.
    """
    found = [_level(folder.name, reading) for reading in read(folder).of_stack()]
    known = sorted((level for level in found if level is not None), key=lambda level: level.step)
    if not known:
        raise ValueError(
            f"{folder} holds no mean cosine of layers: record the metric {_METRIC!r}, which is one "
            "of those by default"
        )
    return known


def _level(name: str, reading: Reading) -> Level | None:
    null = reading.values.get(f"{_METRIC}/isotropic_pair")
    mean = reading.values.get(tags.mean_tag(_METRIC), math.nan)
    layers = [
        reading.values.get(tags.layer_tag(_METRIC, layer), math.nan)
        for layer in reading.layers(_METRIC)
        if layer > 0
    ]
    if null is None or not layers or not all(map(math.isfinite, [mean, *layers])):
        return None
    return Level(name, width_of(null), reading.step, mean, min(layers), null)
