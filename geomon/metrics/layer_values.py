"""Values of one layer, before those of a whole reading are made of them."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The values of one metric at one layer, by part, "" for the value itself: [splits, columns], or of
# heads [splits, columns, heads]. Column 0 is of all rows; if there is a margin, 8 more columns are
# each without one group of sequences.
Parts = dict[str, NDArray[np.float64]]


@dataclass
class LayerValues:
    """What was measured of one layer, in plain values that ranks can exchange.

    Attributes:
        stack: Stack of the layer.
        index: Depth of the layer.
        shape: Rows and width of the layer's hidden states; None if it has none.
        parts: For each metric, its values by part.
        sequences: Number of sequences that the rows are of; None if unknown.
        unseen: For each metric that could not be asked, which view was not seen and why.
        failed: For each metric that failed, what it raised.
        without_margin: For each metric whose margin failed, what it raised.
        heads: Number of query heads as projected, and the width of one; None if unknown.
        queries: Number of sampled queries that see a key; None if unknown.
        log_visible: Mean logarithm of the number of keys that a sampled query sees, over queries
            and heads: the entropy of uniform attention; None if unknown.
        arrays: Arrays for figures by name, of the first split of the rows.
        without_arrays: What taking the arrays raised; "" for nothing.
    """

    stack: str
    index: int
    shape: tuple[int, int] | None
    parts: dict[str, Parts] = field(default_factory=dict)
    sequences: int | None = None
    unseen: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    without_margin: dict[str, str] = field(default_factory=dict)
    heads: tuple[int, int] | None = None
    queries: int | None = None
    log_visible: float | None = None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    without_arrays: str = ""

    def has_margin(self, name: str) -> bool:
        """Return whether a part of a metric has a margin.

        Args:
            name: Name of the metric.
        """
        return any(values.shape[1] > 1 for values in self.parts.get(name, {}).values())

    def joined_with(self, other: "LayerValues") -> "LayerValues":
        """Join the values of two measurements of one layer, each of other sources."""
        joined = {}
        for one in fields(self):
            mine, others = getattr(self, one.name), getattr(other, one.name)
            joined[one.name] = mine | others if isinstance(mine, dict) else _first(mine, others)
        return LayerValues(**joined)


def _first(mine: Any, others: Any) -> Any:
    """The first of two values that is known: not None, False or ""."""
    return others if mine is None or mine is False or mine == "" else mine
