"""Mean query against mean key of a layer, its heads as one vector (2401.12143, figure 23)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon import Readings
from geomon.record import tags
from recipes.papers.arrays import arrays_over_training, layers_with


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
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for step, arrays in arrays_over_training(readings, "mean_query").items():
        for layer, cosine in _joined_cosines(arrays, layers_with(arrays, "mean_query")).items():
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
