"""The values of one seed at moments of its training."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import fmean

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from geomon import Reading, Readings
from geomon.analysis import profile_of, single_source
from geomon.record import Column
from recipes.papers.alignment import LayerAlignment, align_layers
from recipes.papers.arrays import arrays_over_training
from recipes.papers.correlation import Correlation, correlate

# Part of the training after which its beginning is over. The papers name no step; a quarter is the
# same for every curve, so that no curve chooses the moments that suit it.
QUARTER = 0.25

# The layer behind the final norm: the last hidden state as transformers gives it.
NORMED = "final_norm_mean"

# Layer and number of a head.
Head = tuple[int, int]


class History:
    """Values of one seed over training.

    Args:
        readings: Readings of the seed, step 0 among them.
    """

    def __init__(self, readings: Readings) -> None:
        self.record = readings
        self.readings: Sequence[Reading] = single_source(readings)
        self.steps = [reading.step for reading in self.readings]

    @property
    def first(self) -> Reading:
        """Reading at step 0."""
        return self.readings[0]

    @property
    def last(self) -> Reading:
        """Reading at the end."""
        return self.readings[-1]

    @cached_property
    def joined_heads(self) -> Mapping[int, LayerAlignment]:
        """Mean query against mean key by layer, the heads of each joined to one vector."""
        return align_layers(arrays_over_training(self.record, "mean_query"))

    def values(self, tag: str) -> list[float]:
        """Collect a value over the readings; NaN for readings without one."""
        return [reading.values.get(tag, math.nan) for reading in self.readings]

    def at(self, step: float, tag: str) -> float:
        """Interpolate a value between readings, on a logarithmic axis of steps."""
        return float(np.interp(math.log1p(step), np.log1p(self.steps), self.values(tag)))

    def change(self, tag: str, begin: float, end: float) -> float:
        """Compute last / first - 1 of a value above 0, between two shares of the steps."""
        total = self.steps[-1]
        return self.at(end * total, tag) / self.at(begin * total, tag) - 1

    def late_drift(self, tag: str) -> float:
        """Compute how much a value still moves at the end, as a share of its range over training.

        The mean over the readings of the last quarter of steps, minus that over the quarter before:
        0.25 for a value that grows by the same amount at every step, 0 for one that has settled.

        Returns:
            The share; NaN without a reading in the third quarter.
        """
        values = [reading.values[tag] for reading in self.readings]
        total = self.steps[-1]
        third, fourth = (
            [v for s, v in zip(self.steps, values, strict=True) if low < s / total <= high]
            for low, high in ((0.5, 0.75), (0.75, 1.0))
        )
        if not third:
            return math.nan
        return (fmean(fourth) - fmean(third)) / (max(values) - min(values))


def over_layers(
    reading: Reading, metric: str, summary: Callable[[Sequence[float]], float] = fmean
) -> float:
    """Summarise a metric over the outputs of the blocks, layer 0 left out."""
    return summary(profile_of(reading, metric)[1:])


def hidden_states(reading: Reading, metric: str) -> list[float]:
    """Collect a metric over `hidden_states` of transformers, as papers show profiles over depth.

    They begin with what enters the first block, and the last layer is taken after the final norm,
    if the reading has that.
    """
    layers = profile_of(reading, metric)
    normed = reading.stacks.get("final_norm", {}).get(metric, Column())
    return [*layers[:-1], *normed.layers[-1:]] if normed.layers else layers


def over_training(
    seeds: Sequence[History], measure: Callable[[Reading], float]
) -> list[list[float]]:
    """Measure every reading of every seed."""
    return [[measure(reading) for reading in seed.readings] for seed in seeds]


def at_layer(reading: Reading, metric: str, layer: int) -> float:
    """Return the value of a metric at the output of a block."""
    return profile_of(reading, metric)[layer]


def gain(measure: Callable[[Reading], float]) -> Callable[[History], float]:
    """Make the function that subtracts a number of the first reading from the last reading's."""
    return lambda history: measure(history.last) - measure(history.first)


def growth(history: History, metric: str) -> list[float]:
    """Compute the value at the end minus that at step 0, for each block's output."""
    before, after = (profile_of(reading, metric)[1:] for reading in (history.first, history.last))
    return [last - first for first, last in zip(before, after, strict=True)]


def drift_and_cosine(reading: Reading, test: str) -> Correlation:
    """Correlate the norm of the mean row with the mean cosine over layers."""
    nothing = Correlation(math.nan, math.nan)
    return correlate(reading.column("drift_norm"), reading.column("cosine")).get(test, nothing)


def with_depth(reading: Reading, metric: str, part: str = "") -> float:
    """Compute Spearman's correlation of a metric with the number of the layer, from layer 0 on."""
    profile = profile_of(reading, metric, part=part)
    return float(stats.spearmanr(range(len(profile)), profile).statistic)


def over_heads(
    reading: Reading, metric: str, *, layers: Sequence[int] = (), size: bool = False
) -> float:
    """Average a metric over heads."""
    found = reading.column(metric).by_head()
    values = [value for (layer, _), value in found.items() if layer in layers or not layers]
    return fmean(abs(value) if size else value for value in values)


def onset(history: History, metric: str, head: Head, limit: float) -> float:
    """Find the step from which the value of a head stays beyond a limit, on the side of its end.

    Returns:
        Share of the training's steps that were made by then, [0, 1].
    """
    values = [reading.column(metric).by_head()[head] for reading in history.readings]
    side = math.copysign(1, values[-1])
    begun = len(values) - 1
    while begun > 0 and side * values[begun - 1] > limit:
        begun -= 1
    return history.steps[begun] / history.steps[-1]
