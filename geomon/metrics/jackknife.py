"""Margins: half widths of 95 % intervals, by leaving out one of 8 groups of sequences.

Every metric is called again on the views of a layer without a group, 8 times, unchanged. What has
an entry for each row is sliced and never computed again, so that a row keeps its neighbours, also
those in the group that is left out: near neighbours are no smooth function of the rows, and without
them intervals are up to 2.6 times too wide. Sums are kept by group. Spectra follow to first order.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from scipy import special  # type: ignore[import-untyped]
from torch import Tensor

from geomon.kernels.groups import GROUPS
from geomon.kernels.neighbours import Neighbours, pass_over
from geomon.metrics.views import FAR, NEAR, Groups, LayerViews

# 97.5 % point of Student's distribution with as many degrees of freedom as groups less one.
_STUDENT = float(special.stdtrit(GROUPS - 1, 0.975))

# Views with an entry for each of some rows: the view of the groups of these rows, and the dimension
# along which the rows lie.
_OF_ROWS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(
        ("hidden", "token_ids", "positions", "sequences", "ordinary_rows", "squares_about_mean"),
        ("groups", 0),
    ),
    **dict.fromkeys(("projected_query", "query_sequences"), ("query_groups", 0)),
    **dict.fromkeys(("projected_key", "key_sequences"), ("key_groups", 0)),
    **dict.fromkeys(("query", "key", "visible", "bias", "scores"), ("attention_groups", 0)),
    "attention": ("attention_row_groups", 1),
    "row_medians": ("attention_row_groups", 1),
    "score_moments": ("attention_row_groups", 1),
    "sequence_extremes": ("attention_groups", 1),
}  # fmt: skip

# The same, where the rows are some of those of the layer: the view that names them.
_OF_SOME: dict[str, str] = {
    "two_nearest": "query_rows",
    "distinct_neighbours": "distinct_rows",
    "local_dimensions": "far_rows",
    "local_anisotropies": "far_rows",
}

# Views with an entry for each group.
_OF_GROUPS = frozenset({"row_sums", "query_sums", "key_sums"})

# Views that stay what they are: they say on what a value stands, and no value depends on them.
_CONSTANT = frozenset({"queries", "duplicates", "repeated", "rounding"})

# Views that name rows of the whole layer, or are an extreme of it: what reads them has no margin,
# nor has a view that is made of them.
_OF_WHOLE = frozenset({"copies", "max_logits", "weight_norms", "expert_counts"})


class NoMarginError(LookupError):
    """A metric reads a view that cannot be had without a group of sequences."""


def margin(values: Sequence[float]) -> float:
    """Compute the half width of a 95 % interval from the values without each group.

    t sqrt((G - 1) / G sum (value_g - mean)^2), with t the 97.5 % point of Student's distribution
    with G - 1 degrees of freedom (the jackknife with groups; Quenouille 1956, Tukey 1958).

    Args:
        values: Value without each of the G = 8 groups.

    Returns:
        At least 0; NaN without values, or where one of them is not finite.

    Example:
        >>> round(margin([1.0, 3.0] * 4), 3)  # 2.365 sqrt(7/8 x 8)
        6.256
    """
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    mean = math.fsum(values) / len(values)
    return _STUDENT * math.sqrt(1 - 1 / len(values)) * math.dist(values, [mean] * len(values))


class ViewsWithout(LayerViews):
    """The views of a layer without the rows of one group of sequences.

    Args:
        whole: The views of all rows.
        group: Number of the group.
    """

    def __init__(self, whole: LayerViews, group: int) -> None:
        super().__init__(whole.layer, whole.prefix)
        self._whole = whole
        self._group = group
        self._stay: dict[str, Tensor] = {}  # rows of other groups, by the name of the groups

    def __getitem__(self, name: str) -> Any:
        """Return the view called `name` without the group.

        Raises:
            NoMarginError: It cannot be had without a group.
            MissingViewError: The view is made of something that was not captured.
            KeyError: There is no view of that name.
        """
        if name not in self._derived:
            self._derived[name] = self._without(name)
        return self._derived[name]

    def _without(self, name: str) -> Any:
        if name in _OF_WHOLE:
            raise NoMarginError(f"'{name}' is of all rows, and cannot be had without some of them")
        if name in _CONSTANT:
            return self._whole[name]
        if name in _OF_ROWS:
            groups, dimension = _OF_ROWS[name]
            if groups not in self._stay:
                self._stay[groups] = self._staying(self._whole[groups])
            return _slice(self._whole[name], self._stay[groups], dimension)
        if name in _OF_SOME:
            groups = self._whole["groups"].at(self._whole[_OF_SOME[name]])
            return _slice(self._whole[name], self._staying(groups), 0)
        if name in _OF_GROUPS:
            stay = [group for group in range(GROUPS) if group != self._group]
            return type(self._whole[name])(*(part[stay] for part in self._whole[name]))
        if name in _RULES:
            return _RULES[name](self._whole, self._group)
        return super().__getitem__(name)

    def _staying(self, groups: Groups) -> Tensor:
        return (groups.of != self._group).nonzero().squeeze(1)

    @functools.cached_property
    def last(self) -> LayerViews:
        """The views of the last tokens without the group."""
        return ViewsWithout(self._whole.last, self._group)


def _slice(view: Any, stay: Tensor, dimension: int) -> Any:
    """Take the entries of some rows; of what is the same for all rows there is one."""
    if isinstance(view, Tensor):
        return view if view.shape[dimension] == 1 else view.index_select(dimension, stay)
    if isinstance(view, tuple):
        parts = [_slice(part, stay, dimension) for part in view]
        return type(view)(*parts)
    return view


def _others(listed: Neighbours, rows: Tensor, groups: Groups, group: int, count: int) -> Tensor:
    """Take the distances of the rows of other groups to their nearest rows of other groups."""
    stay = (groups.of[rows] != group).nonzero().squeeze(1)
    distances, indices = (part[stay] for part in listed)
    return pass_over(distances, groups.of[indices] == group, count)


def _neighbours(whole: LayerViews, group: int) -> Tensor:
    return _others(whole["nearest"], whole["query_rows"], whole["groups"], group, NEAR)


def _far_neighbours(whole: LayerViews, group: int) -> Tensor:
    return _others(whole["far_nearest"], whole["far_rows"], whole["groups"], group, FAR)


def _total_variance(whole: LayerViews, group: int) -> Tensor:
    """The mean of the rows that stay is another one: what it moves by is no variance."""
    sums, squares = whole["row_sums"], whole["squares_about_mean"]
    stay = whole["groups"].of != group
    rows = sums.rows.sum(dim=0) - sums.rows[group]
    shift = rows / (sums.counts.sum() - sums.counts[group]) - sums.mean
    return squares[stay].mean() - shift.square().sum()


def _of(name: str) -> Callable[[LayerViews, int], Any]:
    """Ask a view that knows its sums by group for the others' share."""
    return lambda whole, group: whole[name].without(group)


_RULES: dict[str, Callable[[LayerViews, int], Any]] = {
    "spectrum": _of("axes"),
    "ordinary_spectrum": _of("ordinary_axes"),
    "query_spectrum": _of("query_axes"),
    "key_spectrum": _of("key_axes"),
    "token_types": _of("token_types"),
    "total_variance": _total_variance,
    "query_variances": _of("query_variances"),
    "neighbours": _neighbours,
    "far_neighbours": _far_neighbours,
}


__all__ = ["NoMarginError", "ViewsWithout", "margin"]
