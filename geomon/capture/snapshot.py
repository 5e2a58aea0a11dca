"""A layer: what was seen of one layer at one step, and the views that metrics read from it.

*Captured views* are what the window kept. *Derived views* are functions whose parameter names are
other views, computed when first asked for and then kept, so that metrics share what is expensive.
A derived view may be made in several ways: the first whose captured views are there is taken.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from geomon.kernels import spectrum as kernels
from geomon.kernels.attention import AttentionRows, attention_rows, score_rows
from geomon.kernels.heads import mean_rows
from geomon.kernels.massive import ordinary_rows, sink_share
from geomon.kernels.moments import mean_square_norm, variance
from geomon.kernels.neighbours import Neighbours, first_of_each, nearest, nearest_among, unique_rows
from geomon.kernels.token_types import TokenTypes, token_types
from geomon.metrics.cautions import Note

# Neighbours of every row; of the few rows that stand for the large scales, as many as those need.
NEAR = 8
FAR = 64
FAR_ROWS = 256

# What each captured view is taken from: a window places only the hooks that are asked for.
CAPTURED: dict[str, str] = {
    "hidden": "hidden",  # [tokens, width]
    "token_ids": "hidden",  # [tokens]
    "positions": "hidden",  # [tokens]
    "precision": "hidden",  # spacing of the captured numbers at 1: eps of the dtype they had
    "query": "attention",  # as attended, [sequences, heads, queries, head width]
    "key": "attention",  # as attended, [sequences, key heads, keys, head width]
    "visible": "attention",  # bool, broadcastable to [sequences, heads, queries, keys]
    "bias": "attention",  # added to the scores, or None
    "scale": "attention",  # factor on the dot products
    "softcap": "attention",  # bound on the scores before the bias, or None
    "sink": "attention",  # logits of learned sinks, [heads], or None
    "scores": "attention",  # before the softmax, where it is written out by hand and q, k not seen
    "projected_query": "projection",  # [tokens, heads, head width]
    "projected_key": "projection",  # [tokens, key heads, head width]
}

# All that a layer of a transformer has; what enters the first block has hidden states only.
SOURCES = frozenset(CAPTURED.values())

# Views of rows of hidden states are measured batch by batch; these rows go together.
ROW_VIEWS = ("hidden", "token_ids", "positions")


def _unique_rows(hidden: Tensor) -> Tensor:
    return unique_rows(hidden)


def _duplicates(hidden: Tensor, unique_rows: Tensor) -> float:
    return 1 - len(unique_rows) / len(hidden)


def _ordinary_rows(hidden: Tensor) -> Tensor:
    return ordinary_rows(hidden)


def _ordinary_spectrum(hidden: Tensor, ordinary_rows: Tensor, spectrum: Tensor) -> Tensor:
    return spectrum if bool(ordinary_rows.all()) else kernels.spectrum(hidden[ordinary_rows])


def _sink_variance(hidden: Tensor, ordinary_rows: Tensor) -> float:
    return 0.0 if bool(ordinary_rows.all()) else float(sink_share(hidden))


def _total_variance(hidden: Tensor) -> Tensor:
    return variance(hidden)


def _token_types(hidden: Tensor, token_ids: Tensor) -> TokenTypes:
    return token_types(hidden, token_ids)


def _within(token_types: TokenTypes) -> Tensor:
    return token_types.within_variance


def _mean_query(projected_query: Tensor) -> Tensor:
    return mean_rows(projected_query)


def _mean_key(projected_key: Tensor) -> Tensor:
    return mean_rows(projected_key)


def _nearest(hidden: Tensor, unique_rows: Tensor) -> Neighbours:
    return nearest(hidden, k=NEAR, among=unique_rows)


def _neighbours(nearest: Neighbours) -> Tensor:
    return nearest.distances


def _far_neighbours(hidden: Tensor, unique_rows: Tensor) -> Tensor:
    count = min(len(unique_rows), FAR_ROWS)
    spread = torch.linspace(0, len(unique_rows) - 1, count, device=hidden.device).long()
    return nearest(hidden, k=FAR, of=unique_rows[spread], among=unique_rows).distances


def _rounding(hidden: Tensor, neighbours: Tensor, precision: float) -> float:
    # Each number is off by up to half its spacing, evenly: variance spacing^2 / 12, and a
    # difference of two has twice that.
    noise = precision * mean_square_norm(hidden).sqrt() / 6**0.5
    return float(noise / neighbours[:, 0].median())


def _distinct(unique_rows: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
    token, position = token_ids[unique_rows].long(), positions[unique_rows].long()
    # One number for each pair: sorting pairs costs twenty times as much.
    position = position - position.min()
    return unique_rows[first_of_each(token * (position.max() + 1) + position)]


def _distinct_neighbours(
    nearest: Neighbours, hidden: Tensor, distinct: Tensor, unique_rows: Tensor
) -> Tensor:
    return nearest_among(nearest, hidden, distinct, k=2, among=unique_rows).distances


def _repeated(hidden: Tensor, distinct: Tensor) -> float:
    return 1 - len(distinct) / len(hidden)


def _attention(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None,
    softcap: float | None, sink: Tensor | None,
) -> AttentionRows:  # fmt: skip
    return attention_rows(query, key, visible, scale, bias, softcap, sink)


def _attention_by_hand(scores: Tensor, visible: Tensor) -> AttentionRows:
    return score_rows(scores, visible)


DERIVED: dict[str, Callable[..., Any] | tuple[Callable[..., Any], ...]] = {
    "ordinary_rows": _ordinary_rows,  # False for the few rows of massive norm
    "ordinary_spectrum": _ordinary_spectrum,  # the same without the rows of massive norm
    "sink_variance": _sink_variance,  # share of the variance that those rows carry
    "spectrum": kernels.spectrum,  # eigenvalues of the centred covariance, descending, [rank]
    "total_variance": _total_variance,  # around the mean of all rows
    "token_types": _token_types,  # count, norm of the mean and scatter of the rows of each
    "within": _within,  # variance around the mean of each row's token type
    "mean_query": _mean_query,  # of each head, [heads, head width]
    "mean_key": _mean_key,  # of each key head, [key heads, head width]
    "unique_rows": _unique_rows,  # index of one row for each distinct content
    "duplicates": _duplicates,  # share of the rows that copy another
    "nearest": _nearest,  # neighbours among unique rows: distances and who they are
    "neighbours": _neighbours,  # distances among unique rows, ascending, [tokens, k]
    "far_neighbours": _far_neighbours,  # the same to a higher rank, of evenly spread rows
    "rounding": _rounding,  # distance that rounding alone makes, over the median nearest distance
    "distinct": _distinct,  # index of one unique row for each (token id, position)
    "distinct_neighbours": _distinct_neighbours,  # distances among distinct rows
    "repeated": _repeated,  # share of the rows that repeat a (token id, position)
    "attention": (_attention, _attention_by_hand),  # reduced softmax rows: AttentionRows
}


def ways(name: str) -> tuple[Callable[..., Any], ...]:
    """The functions that make a derived view, the preferred one first."""
    made = DERIVED[name]
    return made if isinstance(made, tuple) else (made,)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of `function` that have no default: the views that it reads."""
    try:
        return _parameters(function)
    except TypeError:  # an object of the user's own that cannot be hashed
        return _parameters.__wrapped__(function)


@functools.lru_cache(maxsize=1024)  # asked for every metric, layer and view of every reading
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind in kinds
    )


def captured_views(names: Iterable[str]) -> set[str]:
    """The captured views that the named views come down to, whichever way they are made.

    Raises:
        KeyError: A name that is no view.
    """
    leaves: set[str] = set()
    for name in names:
        if name in CAPTURED:
            leaves.add(name)
        else:
            leaves |= captured_views(view for way in ways(name) for view in parameters(way))
    return leaves


class MissingViewError(LookupError):
    """A view that was not captured at this layer; the message says which and why."""


@dataclass
class Layer:
    """What was seen of one layer: captured views by name, derived ones when asked for.

    Attributes:
        index: Depth; 0 is what enters the first block, l is what leaves block l.
        name: Name of the module, as shown to people.
        captured: Captured views by name.
        missing: Why a captured view is not there, by name.
        stack: Which stack of blocks the layer belongs to ("encoder", say); "" where there is one.
        sources: What a layer of its kind has at all ("hidden", "attention", "projection"): metrics
            of anything else are not asked of it.
    """

    index: int
    name: str
    captured: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)
    stack: str = ""
    sources: frozenset[str] = SOURCES
    _derived: dict[str, Any] = field(default_factory=dict, repr=False)

    def view(self, name: str) -> Any:
        """The view called `name`; a derived one is computed once.

        Raises:
            MissingViewError: It comes down to something that was not captured.
            KeyError: There is no view of that name.
        """
        if name in self.captured:
            return self.captured[name]
        if name in CAPTURED:
            reason = self.missing.get(name, "it was not seen")
            raise MissingViewError(f"'{name}' is missing: {reason}")
        if name not in self._derived:
            function = self._way(name)
            self._derived[name] = function(*(self.view(part) for part in parameters(function)))
        return self._derived[name]

    def _way(self, name: str) -> Callable[..., Any]:
        """How a derived view can be made of what was captured; the first way where none can."""
        first, *others = ways(name)
        able = (w for w in (first, *others) if captured_views(parameters(w)) <= {*self.captured})
        return next(able, first)

    def batches(self, rows: int, count: int) -> list["Layer"]:
        """Layers of `rows` rows each, at most `count`; what is not made of rows is shared.

        Fewer rows than one batch make one batch of what there is; a rest is left out.
        """
        hidden = self.captured.get("hidden")
        if hidden is None:
            return [replace(self, _derived={})]
        full = max(1, min(count, len(hidden) // rows))
        cuts = [slice(start * rows, (start + 1) * rows) for start in range(full)]
        return [
            replace(
                self,
                captured={k: v[cut] if k in ROW_VIEWS else v for k, v in self.captured.items()},
                _derived={},
            )
            for cut in cuts
        ]


@dataclass
class Snapshot:
    """All layers at one step, and what is true of the whole.

    Attributes:
        layers: By depth; layer 0 has hidden states only.
        tokens: Rows that were kept, over all batches.
        mode: "train" or "eval": dropout changes the numbers.
        dtype: What the hidden states had before they were copied to float32.
        notes: What a reader of the numbers should know.
    """

    layers: list[Layer]
    tokens: int
    mode: str
    dtype: str
    notes: list[Note] = field(default_factory=list)
