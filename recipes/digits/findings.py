"""What the claims and the figure read off the record of a training."""

import math
from collections.abc import Sequence
from pathlib import Path

from geomon import read
from geomon.analysis.profile import profile_of
from geomon.record.tags import training_tag
from recipes.digits.train import ACCURACY
from recipes.study.history import Head, History, drift_and_cosine, over_heads


class Training(History):
    """Values of one training."""

    @property
    def accuracy(self) -> float:
        """Accuracy on held-out images after the last update."""
        return self.last.values[training_tag(ACCURACY)]

    def profile(self, metric: str, number: int = -1) -> list[float]:
        """Values of a metric by layer, from what enters the first block on.

        Args:
            metric: Name of the metric.
            number: Number of the reading; the last one if not given.
        """
        return profile_of(self.readings[number], metric)

    def anisotropy(self) -> float:
        """Largest mean cosine over layers, as a multiple of what is large for isotropic rows.

        That is the 95th percentile of the cosine of one pair of them (appendix B).
        """
        return max(self.profile("cosine")) / self.last.values["cosine/isotropic_pair"]

    def drift_correlation(self) -> tuple[float, float]:
        """Spearman correlation of drift and mean cosine over layers, with its exact p-value."""
        return drift_and_cosine(self.last, "spearman")

    def heads(self, metric: str) -> dict[Head, list[float]]:
        """Values of each head over the readings, by layer and number of the head.

        Args:
            metric: Name of a metric with values of heads.
        """
        by_reading = [reading.column(metric).by_head() for reading in self.readings]
        return {head: [values[head] for values in by_reading] for head in by_reading[-1]}

    def alignment(self) -> list[float]:
        """Mean over heads of |cos(mean query, mean key)| at each reading."""
        return [over_heads(reading, "qk_cosine", size=True) for reading in self.readings]

    def layers(self, metric: str) -> dict[int, list[float]]:
        """Values of a metric over the readings, mean over heads, by layer.

        Args:
            metric: Name of the metric.
        """
        by_reading = [profile_of(reading, metric) for reading in self.readings]
        return {
            layer: [profile[layer] for profile in by_reading]
            for layer, value in enumerate(by_reading[-1])
            if not math.isnan(value)
        }


def load_training(folder: Path) -> Training:
    """Read the record of one training.

    Args:
        folder: Folder of the record.
    """
    return Training(read(folder))


def mean_over(values: Sequence[Sequence[float]]) -> list[float]:
    """Mean of several curves at each of their common places.

    Args:
        values: Curves of equal length.
    """
    return [math.fsum(column) / len(column) for column in zip(*values, strict=True)]
