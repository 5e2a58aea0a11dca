"""Mean queries and mean keys of a layer, by head or as one vector (2401.12143, figure 23)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from geomon.record import tags
from recipes.papers.arrays import Arrays, Floats, layers_with


@dataclass(frozen=True, eq=False)
class LayerAlignment:
    """Mean queries against mean keys of one layer over training.

    Attributes:
        layer: Number of the layer.
        steps: Steps with mean queries and mean keys, ascending.
        queries: Mean query of each head, [steps, heads, width].
        keys: Mean key of each query head, [steps, heads, width].
    """

    layer: int
    steps: tuple[int, ...]
    queries: Floats
    keys: Floats

    @property
    def width(self) -> int:
        """Length of the joined vectors: number of query heads times width of one head."""
        return int(self.queries[0].size)

    @cached_property
    def cosines(self) -> list[float]:
        """Cosine of the heads' means, joined to one vector, at each step; NaN without one."""
        return cosine(*(each.reshape(len(each), -1) for each in (self.queries, self.keys))).tolist()


def align_layers(by_step: Mapping[int, Arrays]) -> dict[int, LayerAlignment]:
    """Collect mean queries and mean keys of each layer that has them.

    If several query heads share a key head, its mean key stands once for each of them (Godey et
    al., 2401.12143, appendix D, figure 23).

    Args:
        by_step: Arrays of a run by step.

    Returns:
        Alignments by number of the layer.
    """
    found = {}
    layers = {n for arrays in by_step.values() for n in layers_with(arrays, "mean_query")}
    for layer in sorted(layers):
        names = [tags.layer_tag(name, layer) for name in ("mean_query", "mean_key")]
        pairs = {
            step: [arrays[name] for name in names]
            for step, arrays in by_step.items()
            if arrays.keys() >= {*names}
        }
        if pairs:
            queries, keys = map(np.stack, zip(*pairs.values(), strict=True))
            shared = np.arange(queries.shape[1]) * keys.shape[1] // queries.shape[1]
            found[layer] = LayerAlignment(layer, tuple(pairs), queries, keys[:, shared])
    return found


def cosine(one: Floats, other: Floats) -> Floats:
    """Compute cosines along the last dimension; NaN if a vector is 0 or not finite."""
    # Each is scaled by its largest entry first: the squares of long or short ones leave the range.
    with np.errstate(invalid="ignore"):
        one, other = (rows / np.abs(rows).max(axis=-1, keepdims=True) for rows in (one, other))
        norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        return np.asarray((one * other).sum(axis=-1) / norms)
