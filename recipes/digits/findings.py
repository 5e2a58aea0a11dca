"""What the claims and the figure read off the record of a training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geomon import Reading, Readings, read
from geomon.analysis.profile import profile_of
from geomon.record.tags import head_part, layer_tag, training_tag
from recipes.digits.train import ACCURACY


@dataclass(frozen=True)
class Training:
    """The readings of one training.

    Attributes:
        readings: Readings, steps ascending.
    """

    readings: Readings

    @property
    def last(self) -> Reading:
        """Reading after the last update."""
        return self.readings[len(self.readings) - 1]

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
        return profile_of(self.readings[number % len(self.readings)].values, metric)

    def anisotropy(self) -> float:
        """Largest mean cosine over layers, as a multiple of what is large for isotropic rows.

        That is the 95th percentile of the cosine of one pair of them (appendix B).
        """
        return max(self.profile("cosine")) / self.last.values["cosine/isotropic_pair"]

    def drift_correlation(self) -> tuple[float, float]:
        """Spearman correlation of drift and mean cosine over layers, with its exact p-value."""
        values = self.last.values
        return values["drift_cosine/spearman"], values["drift_cosine/spearman_p"]

    def heads(self, metric: str) -> dict[tuple[int, int], list[float]]:
        """Values of each head over the readings, by layer and number of the head.

        Args:
            metric: Name of a metric with values of heads.
        """
        found: dict[tuple[int, int], list[float]] = {}
        for layer in self.readings.layers(metric):
            head = 0
            while (tag := layer_tag(metric, layer, head_part(head))) in self.last.values:
                found[layer, head] = [each.values[tag] for each in self.readings]
                head += 1
        return found

    def alignment(self) -> list[float]:
        """Mean over heads of |cos(mean query, mean key)| at each reading."""
        heads = list(self.heads("qk_cosine").values())
        return [math.fsum(map(abs, values)) / len(values) for values in zip(*heads, strict=True)]

    def layers(self, metric: str) -> dict[int, list[float]]:
        """Values of a metric over the readings, mean over heads, by layer.

        Args:
            metric: Name of the metric.
        """
        return {
            layer: [each.values[layer_tag(metric, layer)] for each in self.readings]
            for layer in self.readings.layers(metric)
        }


def load_training(folder: Path) -> Training:
    """Read the record of one training.

    Args:
        folder: Folder of the record.
    """
    return Training(read(folder))


def chance_alignment(width: int) -> float:
    """Mean |cos| of two random directions.

    Args:
        width: Number of their dimensions, 2 or more.

    Example:
        >>> round(chance_alignment(64), 3)
        0.1
    """
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


def mean_over(values: Sequence[Sequence[float]]) -> list[float]:
    """Mean of several curves at each of their common places.

    Args:
        values: Curves of equal length.
    """
    return [math.fsum(column) / len(column) for column in zip(*values, strict=True)]
