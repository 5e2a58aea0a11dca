"""The views of one layer, of some of its rows, or without a group; each is computed once."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from geomon.capture import CAPTURED, LAST, Layer, source_of
from geomon.kernels.groups import Groups
from geomon.metrics.views import (
    DERIVED,
    GROUPS_OF,
    LISTED,
    can_be_made,
    groups_of,
    one_group,
    rule_of,
)


class Reads(Protocol):
    """A metric, or a way to make a view."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the views that are its arguments."""


class MissingViewError(LookupError):
    """A view was not captured at this layer, or not enough of it; the message says why."""


class NoRowsError(LookupError):
    """No row of hidden states is left, because all are padding or not finite."""


class LayerViews:
    """The views of one layer, or of some of its rows; derived views are computed once.

    Args:
        layer: The layer with its captured views.
        prefix: Prefix of these views' names in messages: "last_" for last tokens.
        given: Derived views that are already known.

    Attributes:
        layer: The layer.
        prefix: The argument.
    """

    def __init__(
        self, layer: Layer, prefix: str = "", given: Mapping[str, Any] | None = None
    ) -> None:
        self.layer = layer
        self.prefix = prefix
        self._known: dict[str, Any] = dict(given or {})

    def __getitem__(self, name: str) -> Any:
        """Return a view by name, computing it if it is derived.

        Raises MissingViewError if it depends on something that was not captured, and KeyError if
        the name is unknown.
        """
        captured = self.layer.captured
        if name in captured:
            return captured[name]
        if name in CAPTURED:
            reason = self.layer.missing.get(name, "it was not seen")
            raise MissingViewError(f"'{self.prefix}{name}' is missing: {reason}")
        if name not in self._known:
            self._known[name] = self.compute(name)
        return self._known[name]

    def compute(self, name: str) -> Any:
        """Compute a derived view in the first possible way, or fail with the error of the first."""
        ways, there = DERIVED[name].ways, self.layer.captured.keys()
        return self.apply(next((way for way in ways if can_be_made(way.reads, there)), ways[0]))

    @functools.cached_property
    def last(self) -> "LayerViews":
        """The views of the last tokens, under the names of the views of all rows."""
        captured, missing = (
            {name.removeprefix(LAST): value for name, value in views.items() if _is_last(name)}
            for views in (self.layer.captured, self.layer.missing)
        )
        layer = replace(self.layer, captured=captured, missing=missing)
        given = {name: self[name] for name in ("queries", *LISTED.values()) if self.has(name)}
        return LayerViews(layer, LAST, given)

    def groups(self, captured: Iterable[str]) -> int:
        """Count the groups of sequences behind captured views; 1 if they are unknown."""
        counts = [1]
        for name in captured:
            rows, views = CAPTURED[name].rows, self.last if _is_last(name) else self
            if rows:
                try:
                    counts.append(views[GROUPS_OF[rows]].size)
                except MissingViewError:
                    return 1
        return min(counts[1:], default=1)

    def has(self, name: str) -> bool:
        """Return whether a view of these rows was captured, or has been computed already."""
        return name in self.layer.captured or name in self._known

    def apply(self, reader: Reads) -> Any:
        """Call a metric, or a way to make a view, with the views that it reads."""
        return reader.function(*(self[name] for name in reader.reads))

    def apply_to_copies(self, reader: Reads) -> Any:
        """Call a user's metric with copies of its views, because it may change them in place."""
        return reader.function(*(_copied(self[name]) for name in reader.reads))


class ViewsWithout(LayerViews):
    """The views of a layer without the rows of one group of sequences.

    Attributes:
        whole: The views of all rows.
        group: Index of the group.
    """

    def __init__(self, whole: LayerViews, group: int) -> None:
        super().__init__(whole.layer, whole.prefix)
        self.whole = whole
        self.group = group
        self._stay: dict[str, Tensor] = {}  # rows of other groups, by name of the groups' view

    def __getitem__(self, name: str) -> Any:
        """Return a view by name without the group; raises NoMarginError if that is impossible."""
        if _is_last(name):
            return self.last[name.removeprefix(LAST)]
        if name not in self._known:
            self._known[name] = rule_of(name).leave_out(self, name)
        return self._known[name]

    def staying(self, groups: str) -> Tensor:
        """Return the indices of rows outside the group, given the name of the groups' view."""
        if groups not in self._stay:
            self._stay[groups] = self.whole[groups].staying(self.group)
        return self._stay[groups]

    @functools.cached_property
    def last(self) -> LayerViews:
        """The views of the last tokens without the group."""
        return ViewsWithout(self.whole.last, self.group)


def _is_last(name: str) -> bool:
    return name in CAPTURED and source_of(name) == "last"


def _copied(view: Any) -> Any:
    """Copy a tensor, or the tensors in a tuple; other values are returned as they are."""
    if isinstance(view, Tensor):
        return view.clone()
    if isinstance(view, tuple):
        parts = map(_copied, view)
        return view._make(parts) if hasattr(view, "_make") else tuple(parts)
    return view


def split_rows(
    layer: Layer, rows: int, count: int, sizes: Mapping[str, int | None], *, has_groups: bool = True
) -> list[LayerViews]:
    """Cut the rows of a layer into splits of equal size; views without rows are shared.

    A sequence belongs to the same group in every split. The sizes are derived views, by name.
    """
    hidden = layer.captured.get("hidden")
    if hidden is None:
        return [LayerViews(layer, given={} if has_groups else _in_one_group(layer))]
    full = max(1, min(count, len(hidden) // rows))
    sequences = layer.captured.get("sequences")
    groups = None if sequences is None or not has_groups else groups_of(sequences)
    splits = []
    for start in range(full):
        cut = slice(start * rows, (start + 1) * rows)
        captured = {
            name: view[cut] if CAPTURED[name].rows == "tokens" and not _is_last(name) else view
            for name, view in layer.captured.items()
        }
        part = replace(layer, captured=captured)
        given: dict[str, Any] = {} if has_groups else _in_one_group(part)
        if groups is not None:
            given["groups"] = Groups(groups.of[cut], groups.size)
        splits.append(LayerViews(part, given={**given, **sizes}))
    return splits


def _in_one_group(layer: Layer) -> dict[str, Groups]:
    """Put all rows of a layer into one group, so that none is left out."""
    leading: dict[str, Tensor] = {}
    for name, view in CAPTURED.items():
        if view.rows and view.heads != "shared" and name in layer.captured:
            leading.setdefault(GROUPS_OF[view.rows], layer.captured[name])
    return {groups: one_group(rows) for groups, rows in leading.items()}


__all__ = ["LayerViews", "MissingViewError", "NoRowsError", "ViewsWithout", "split_rows"]
