"""Leave out one of 8 groups of sequences from each view, for margins.

A view with an entry per row is sliced, not recomputed, so that a row keeps its neighbours even if
they are in the group left out: near neighbours do not depend smoothly on the rows, and without them
intervals are up to 2.6 times too wide. Sums are kept by group, and spectra follow to first order.
Each view declares its rule (`geomon.metrics.views`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from geomon.kernels.groups import Groups, GroupSums
from geomon.kernels.neighbours import pass_over


class NoMarginError(LookupError):
    """A metric reads a view that cannot leave out a group of sequences."""


class Without(Protocol):
    """The views of a layer without a group, as rules see them.

    Attributes:
        whole: The views of all rows, by name.
        group: Index of the group.
    """

    whole: Any
    group: int

    def __getitem__(self, name: str) -> Any:
        """Return a view without the group."""

    def compute(self, name: str) -> Any:
        """Compute a derived view from the views without the group."""

    def staying(self, groups: str) -> Tensor:
        """Return the indices of rows outside the group, given the name of the groups' view."""


class LeaveOut(NamedTuple):
    """Rule for a view without a group.

    Attributes:
        words: The rule in words, for docs.
        leave_out: Function of the views without the group, and the name of the view.
        reads: Names of the views of all rows that have to be searched for the rule alone.
    """

    words: str
    leave_out: Callable[[Without, str], Any]
    reads: tuple[str, ...] = ()


def _refuse(views: Without, name: str) -> Any:
    raise NoMarginError(f"'{name}' describes all rows, and has no form without some of them")


# Computed from views without the group.
recomputed = LeaveOut("computed again", lambda views, name: views.compute(name))
# Describes what a value rests on; values do not depend on it.
same = LeaveOut("the same", lambda views, name: views.whole[name])
# Names rows of the whole layer, or is an extreme.
refused = LeaveOut("refused: no margin", _refuse)


def sliced(groups: str, dimension: int = 0) -> LeaveOut:
    """Make a rule that keeps the entries of the rows that stay.

    Args:
        groups: Name of the view with the groups of these rows.
        dimension: Dimension of the rows. Defaults to 0.
    """

    def leave_out(views: Without, name: str) -> Any:
        return _slice(views.whole[name], views.staying(groups), dimension)

    return LeaveOut("sliced", leave_out)


def sliced_at(rows: str) -> LeaveOut:
    """Make a rule that keeps the entries of rows that stay, for a view of only some rows."""

    def leave_out(views: Without, name: str) -> Any:
        groups = views.whole["groups"].at(views.whole[rows])
        return _slice(views.whole[name], groups.staying(views.group), 0)

    return LeaveOut("sliced", leave_out)


def _other_groups(views: Without, name: str) -> Any:
    """Keep the entries of the other groups, for a view with an entry per group."""
    whole: GroupSums = views.whole[name]
    before, behind = slice(None, views.group), slice(views.group + 1, None)
    return GroupSums(*(torch.cat([part[before], part[behind]]) for part in whole))


other_groups = LeaveOut("sums of the other groups", _other_groups)


def others_of(name: str) -> LeaveOut:
    """Make a rule that asks another view, which holds sums by group."""
    return LeaveOut("from sums by group", lambda views, _: views.whole[name].without(views.group))


def other_neighbours(listed: str, rows: str, count: int) -> LeaveOut:
    """Make a rule that lists, for rows of other groups, the nearest rows of other groups."""

    def leave_out(views: Without, _: str) -> Tensor:
        groups: Groups = views.whole["groups"]
        stay = groups.at(views.whole[rows]).staying(views.group)
        distances, indices = (part[stay] for part in views.whole[listed])
        return pass_over(distances, groups.of[indices] == views.group, count)

    return LeaveOut("sliced; neighbours passed over", leave_out, (listed,))


def other_neighbourhoods(of: Callable[[Tensor, Tensor], Tensor], size: int) -> LeaveOut:
    """Make a rule that recomputes the neighbourhoods of far rows from other groups' rows.

    64-row neighbourhoods among 1,024 rows overlap much: without recomputing, intervals of their
    dimension are only a third as wide as they should be.
    """

    def leave_out(views: Without, _: str) -> Tensor:
        groups: Groups = views.whole["groups"]
        stay = groups.at(views.whole["far_rows"]).staying(views.group)
        indices = views.whole["far_nearest"].indices[stay]
        order = (groups.of[indices] == views.group).long().argsort(dim=1, stable=True)
        return of(views.whole["hidden"], indices.gather(1, order)[:, :size])

    return LeaveOut("computed from the neighbourhoods without it", leave_out, ("far_nearest",))


def _variance_of_others(views: Without, _: str) -> Tensor:
    """Return the variance of the other groups: dropping a group shifts the mean."""
    sums, squares = views.whole["row_sums"], views.whole["squares_about_mean"]
    rows = sums.rows.sum(dim=0) - sums.rows[views.group]
    shift = rows / (sums.counts.sum() - sums.counts[views.group]) - sums.mean
    return squares[views.staying("groups")].mean() - shift.square().sum()


variance_of_others = LeaveOut("about the mean of the rows that stay", _variance_of_others)


def _slice(view: Any, stay: Tensor, dimension: int) -> Any:
    """Keep the entries of some rows; a size of 1 stands for all rows."""
    if isinstance(view, Tensor):
        return view if view.shape[dimension] == 1 else view.index_select(dimension, stay)
    if isinstance(view, tuple):
        return type(view)(*(_slice(part, stay, dimension) for part in view))
    return view


__all__ = ["NoMarginError"]
