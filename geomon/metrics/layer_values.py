"""Values of one layer, before they are combined into a reading."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The values of one metric at one layer, by part, with "" for the value itself: [splits, columns],
# or for heads [splits, columns, heads]. Column 0 uses all rows; if there is a margin, 8 further
# columns leave out one group of sequences each.
Parts = dict[str, NDArray[np.float64]]


@dataclass
class LayerValues:
    """All values of one layer, as plain values that ranks can exchange.

    Attributes:
        stack: Stack of the layer.
        index: Depth of the layer.
        shape: Rows and width of the layer's hidden states, or None if it has none.
        parts: For each metric, its values by part.
        sequences: Number of sequences that the rows come from, or None if unknown.
        unseen: For each metric that lacks a view, the view and why it was not seen.
        failed: For each metric that failed, its error; "" if the layer has no row of hidden states,
            which notes on the rows explain.
        not_finite: For each metric with a value that is not finite, the captured views that are
            not finite either; "" if all are.
        without_margin: For each metric whose margin failed, the error.
        heads: Number of projected query heads and the width of one, or None if unknown.
        queries: Number of sampled queries that see a key, or None if unknown.
        log_visible: Mean logarithm of the number of visible keys, over queries and heads, which is
            the entropy of uniform attention; None if unknown.
        arrays: Arrays for figures by name, from the first split of the rows.
        fingerprint: Checksum of the tokens of the rows; "" if they are unknown.
        without_arrays: Error while copying the arrays; "" if there was none.
        traits: Traits that the captured views show of the layer, by name, to compare layers.
    """

    stack: str
    index: int
    shape: tuple[int, int] | None
    parts: dict[str, Parts] = field(default_factory=dict)
    sequences: int | None = None
    unseen: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_finite: dict[str, str] = field(default_factory=dict)
    without_margin: dict[str, str] = field(default_factory=dict)
    heads: tuple[int, int] | None = None
    queries: int | None = None
    log_visible: float | None = None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    fingerprint: str = ""
    without_arrays: str = ""
    traits: dict[str, float] = field(default_factory=dict)

    def has_tried(self, name: str) -> bool:
        """Return whether a metric belongs to the layer, measured or not.

        Args:
            name: Name of the metric.
        """
        return name in self.parts or name in self.unseen or name in self.failed

    def has_margin(self, name: str) -> bool:
        """Return whether a part of a metric has a margin.

        Args:
            name: Name of the metric.
        """
        return any(values.shape[1] > 1 for values in self.parts.get(name, {}).values())

    def joined_with(self, other: "LayerValues") -> "LayerValues":
        """Join two measurements of one layer that cover different sources."""
        joined = {}
        for one in fields(self):
            mine, others = getattr(self, one.name), getattr(other, one.name)
            joined[one.name] = mine | others if isinstance(mine, dict) else _first(mine, others)
        return LayerValues(**joined)


def _first(mine: Any, others: Any) -> Any:
    """Return the first of two values that is not None, False or ""."""
    return others if mine is None or mine is False or mine == "" else mine
