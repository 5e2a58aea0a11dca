"""Mean queries and keys of a run: how far chance goes, and the heads of a layer together.

Chance is two isotropic directions: their cosine c has c^2 ~ Beta(1/2, (width - 1)/2), whatever the
number of tokens that the means were taken over. An untrained head is exactly that, since its mean
query and its mean key are made by independent random matrices (Godey et al., 2401.12143, equation
1).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.analysis.curves import single_source
from geomon.record import Reading, Readings, tags

# Probability of one head among all of them beyond the null by chance.
_ALPHA = 0.05
# Mean absolute cosines that have a width: 0.64 is that of 2, the lower end that of 640,000.
_MAGNITUDES = (1e-3, 0.7)


@dataclass(frozen=True)
class LayerAlignment:
    """Mean query against mean key of one layer over training, its heads joined to one vector.

    Attributes:
        layer: Number of the layer.
        width: Length of the vectors: number of query heads times width of one head.
        steps: Steps with mean queries and mean keys, ascending.
        cosines: Cosine of the two vectors at each step; NaN if one of them is 0 or not finite.
    """

    layer: int
    width: int
    steps: tuple[int, ...]
    cosines: tuple[float, ...]


def heads_limit(reading: Reading) -> float:
    """Compute the size of a cosine above which a head is beyond chance, among all heads.

    With random directions, 5 % of readings would have at least one head beyond it (Bonferroni's
    correction).

    Args:
        reading: A reading with `qk_cosine`.

    Returns:
        The limit; NaN without a null, off which the width of a head is read, or without heads.
    """
    column = reading.column("qk_cosine")
    width, count = _width_of(column.whole.get("null_magnitude", math.nan)), len(column.by_head())
    return chance_limit(width, 1 - _ALPHA / count) if width and count else math.nan


def align_layers(readings: Readings) -> dict[int, LayerAlignment]:
    """Compute the cosine of mean query and mean key of each layer, its heads joined to one vector.

    Where several query heads share a key head, its mean key stands once for each of them (Godey et
    al., 2401.12143, appendix D, figure 23).

    Args:
        readings: Readings of a run, of one stack.

    Returns:
        What was found by number of the layer; nothing where no mean queries and keys stand beside
        the record.
    """
    selected = single_source(readings)
    if readings.folder is None or not selected:
        return {}
    source = selected[0].source
    kept = set(readings.folder.steps(source))
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for step in [reading.step for reading in selected if reading.step in kept]:
        arrays = readings.arrays(step, source)
        for layer, cosine in _joined_cosines(arrays, layers_of(readings)).items():
            found.setdefault(layer, {})[step] = cosine
    return {
        layer: LayerAlignment(
            layer,
            width=next(reversed(by_step.values()))[1],
            steps=tuple(by_step),
            cosines=tuple(cosine for cosine, _ in by_step.values()),
        )
        for layer, by_step in sorted(found.items())
    }


def chance_limit(width: int, probability: float = 0.95) -> float:
    """Compute the size below which cosines of isotropic directions lie with a probability.

    Args:
        width: Number of dimensions, at least 2.
        probability: Probability, (0, 1).

    Example:
        >>> round(chance_limit(3), 6)  # on a sphere all cosines are equally likely
        0.95
    """
    from scipy import special  # type: ignore[import-untyped]  # only where it is needed

    return math.sqrt(float(special.betaincinv(0.5, (width - 1) / 2, probability)))


def layers_of(readings: Iterable[Reading]) -> range:
    """Return all depths of the main stack of a run.

    Args:
        readings: Readings of a run.
    """
    columns = (column for reading in readings for column in reading.columns.values())
    return range(max((column.first + len(column.layers) for column in columns), default=0))


def _joined_cosines(
    arrays: Mapping[str, NDArray[Any]], layers: Iterable[int]
) -> dict[int, tuple[float, int]]:
    """Compute the cosine of joined mean queries and keys, with their width, by layer."""
    found = {}
    for layer in layers:
        of_queries, of_keys = (
            arrays.get(tags.layer_tag(name, layer)) for name in ("mean_query", "mean_key")
        )
        if of_queries is None or of_keys is None:
            continue
        query = np.asarray(of_queries, dtype=np.float64)
        shared = np.arange(len(query)) * len(of_keys) // len(query)
        key = np.asarray(of_keys, dtype=np.float64)[shared]
        found[layer] = (_cosine(query.ravel(), key.ravel()), query.size)
    return found


def _cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    # Each is scaled by its largest entry first: the squares of long or short ones leave the range.
    sizes = float(np.abs(one).max()), float(np.abs(other).max())
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return math.nan
    one, other = one / sizes[0], other / sizes[1]
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def _width_of(magnitude: float) -> int | None:
    """Find the width at which two isotropic directions have a mean absolute cosine; None if none.

    E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)), which falls with the width: about
    sqrt(2 / (pi (width - 1/2))).
    """
    if not _MAGNITUDES[0] < magnitude < _MAGNITUDES[1]:
        return None
    guess = round(2 / (math.pi * magnitude**2) + 0.5)
    near = range(max(2, guess - 2), guess + 3)
    return min(near, key=lambda width: abs(_magnitude(width) - magnitude))


def _magnitude(width: int) -> float:
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
