"""Values of one layer, before those of a whole reading are made of them."""

from dataclasses import dataclass, field, fields
from typing import Any

from numpy.typing import NDArray

# The parts of one metric at one layer in one split of the rows, of heads a list: "" is the value
# itself.
Parts = dict[str, float | list[float]]


@dataclass
class LayerValues:
    """What was measured of one layer, in plain values that ranks can exchange.

    Attributes:
        stack: Stack of the layer.
        index: Depth of the layer.
        shape: Rows and width of the layer's hidden states; None if it has none.
        parts: For each metric, its parts in each split of the rows.
        without: For each metric that has a margin, by part: the value without each group of
            sequences, of heads their mean; mean over splits.
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
    parts: dict[str, list[Parts]] = field(default_factory=dict)
    without: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    sequences: int | None = None
    unseen: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    without_margin: dict[str, str] = field(default_factory=dict)
    heads: tuple[int, int] | None = None
    queries: int | None = None
    log_visible: float | None = None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    without_arrays: str = ""

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
