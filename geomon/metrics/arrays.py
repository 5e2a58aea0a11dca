"""Arrays for figures, copied from views that metrics have already computed.

Nothing is captured or computed for them, so that they cost only a copy.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geomon.kernels.token_types import TokenTypes
from geomon.metrics.layer_views import LayerViews
from geomon.metrics.views import Reader, reader
from geomon.record import ArrayPlace

# Rows of queries and keys per head, and bytes of one reading above which there are fewer.
ROWS = 32
MOST_BYTES = 2**20
# Largest number of eigenvalues, and of token types, per layer.
EIGENVALUES = 256
TYPES = 256

_LARGEST_HALF = float(np.finfo(np.float16).max)


def _eigenvalues(spectrum: Tensor) -> Tensor:
    return spectrum[:EIGENVALUES]


def _type_ids(token_types: TokenTypes, token_ids: Tensor) -> Tensor:
    return token_ids.unique()[_frequent(token_types)]


def _type_rows(token_types: TokenTypes) -> Tensor:
    return token_types.rows[_frequent(token_types)]


def _type_square_of_mean(token_types: TokenTypes) -> Tensor:
    return token_types.m[_frequent(token_types)]


def _type_scatter(token_types: TokenTypes) -> Tensor:
    return token_types.scatter[_frequent(token_types)]


def _frequent(token_types: TokenTypes) -> Tensor:
    """Indices of the most frequent token types, in ascending order of id."""
    order = token_types.rows.argsort(descending=True, stable=True)
    return order[:TYPES].sort().values


def _few(rows: Tensor) -> Tensor:
    places = _spread(len(rows), ROWS)
    return rows[torch.tensor(places, dtype=torch.int64, device=rows.device)]


def _spread(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` indices, evenly spaced."""
    taken = min(count, most)
    return [index * count // taken for index in range(taken)]


# An array by its name, as a function of views.
_FUNCTIONS: dict[str, Callable[..., Tensor] | Reader] = {
    "mean_query": lambda mean_query: mean_query,  # as projected, [heads, head width]
    "mean_key": lambda mean_key: mean_key,  # as projected, [key heads, head width]
    "queries": reader(_few, "projected_query"),  # a few rows, [rows, heads, head width]
    "keys": reader(_few, "projected_key"),  # for the same tokens, [rows, key heads, head width]
    "eigenvalues": _eigenvalues,  # largest eigenvalues of the covariance, descending
    "type_ids": _type_ids,  # the most frequent token types, ascending
    "type_rows": _type_rows,  # number of rows of each type
    "type_square_of_mean": _type_square_of_mean,  # squared norm of each type's mean
    "type_scatter": _type_scatter,  # sum of squared distances from that mean
}
ARRAYS = {
    name: function if isinstance(function, Reader) else reader(function)
    for name, function in _FUNCTIONS.items()
}
# Arrays that are cut to fewer rows if a reading would be too large.
_ROWS_OF = ("queries", "keys")


def arrays_of(views: LayerViews) -> dict[str, NDArray[Any]]:
    """Copy the arrays of a layer whose views have been computed."""
    return {
        name: _plain(views.apply(array), single_rows=name in _ROWS_OF)
        for name, array in ARRAYS.items()
        if all(map(views.has, array.reads))
    }


def _plain(values: Tensor, *, single_rows: bool) -> NDArray[Any]:
    values = values.detach().cpu()
    if not values.is_floating_point():
        return values.numpy().copy()
    largest = values.abs().max().item() if values.numel() else 0.0
    half = single_rows and not largest > _LARGEST_HALF  # NaN fits as well
    return values.to(torch.float16 if half else torch.float32).numpy().copy()


def join_arrays(
    layers: Iterable[tuple[str, int, Mapping[str, NDArray[Any]]]],
) -> dict[ArrayPlace, NDArray[Any]]:
    """Join the arrays of all layers, with fewer single rows if a reading would be too large."""
    found = {
        ArrayPlace(stack, name, index): array
        for stack, index, arrays in layers
        for name, array in arrays.items()
    }
    of_rows = [place for place in found if place.name in _ROWS_OF]
    others = sum(array.nbytes for place, array in found.items() if place not in of_rows)
    one_each = sum(found[place][0].nbytes for place in of_rows if len(found[place]))
    rows = max(0, MOST_BYTES - others) // one_each if one_each else 0
    for place in of_rows:
        found[place] = found[place][_spread(len(found[place]), rows) if rows else []]
    return {place: array for place, array in found.items() if array.size}


__all__ = ["ARRAYS", "arrays_of", "join_arrays"]
