"""Views: what metrics read of a layer, by name.

*Captured views* are what the window kept (`geomon.capture.snapshot`). *Derived views* are functions
whose parameter names are other views. A derived view is computed when it is first asked for and is
then kept, so that metrics share what is expensive. What is made of rows is there a second time of
the last token of each sequence, under its name with "last_" before it. Where a derived view has
several alternatives, the first one whose captured views are there is taken.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.snapshot import CAPTURED, ROW_VIEWS, Layer
from geomon.kernels import spectrum as kernels
from geomon.kernels.attention import (
    ScoreSource,
    attention_rows,
    given_scores,
    row_medians,
    scores_of,
    sequence_extremes,
)
from geomon.kernels.groups import GROUPS, GroupSums, group_sequences, group_sums
from geomon.kernels.massive import ordinary_rows, share_beyond
from geomon.kernels.moments import squares_about_mean
from geomon.kernels.neighbourhoods import local_anisotropy, local_dimension
from geomon.kernels.neighbours import (
    Neighbours,
    content_keys,
    copies_of,
    first_of_each,
    pass_over,
    unique_rows,
)
from geomon.kernels.neighbours import nearest as find_nearest
from geomon.kernels.scores import (
    QueryVariances,
    query_variances,
    score_moments,
)
from geomon.kernels.spectrum import PrincipalAxes, head_axes, principal_axes
from geomon.kernels.token_types import TokenTypes, token_types

# Rows from which distances are measured by default; None for all of them.
DISTANCE_QUERIES = 1024
# Neighbours of each of these rows that metrics read, and that are listed: a margin passes over
# those of one group of sequences.
NEAR, _NEAR_LISTED = 16, 24
# The same for the large scales, and the few rows that stand for them.
FAR, _FAR_LISTED = 64, 96
FAR_ROWS = 256
# Most rows of which a spectrum is computed where layers are wider than so many columns.
SPECTRAL_ROWS, SPECTRAL_WIDTH = 2048, 1024

# An odd number whose bits are spread, by which labels are mixed: about 2^63 over the golden ratio.
_MIXING = 5_700_357_409_661_599_241
# The same of 32 bits, by which rows are put into an order in which any first few are evenly spread.
_SPREADING, _SPREAD = 2_654_435_761, 2**32


class Groups(NamedTuple):
    """Groups of sequences that a margin leaves out in turn.

    Attributes:
        of: Group of each row, int64, [rows].
        size: Number of groups: 8, or 1 where the sequences are unknown or fewer than 8.
    """

    of: Tensor
    size: int

    def at(self, rows: Tensor) -> "Groups":
        """Return the groups of some of the rows.

        Args:
            rows: Indices of the rows.
        """
        return Groups(self.of[rows], self.size)


# Views of groups, and the captured views with a row for each entry.
_GROUPED = {
    "groups": "hidden",
    "query_groups": "projected_query",
    "key_groups": "projected_key",
    "attention_groups": "query",
}


def _all_in_one_group(layer: Layer) -> dict[str, Groups]:
    """Put the rows of a layer into one group: nothing is left out of them."""
    known = ((name, layer.captured.get(view)) for name, view in _GROUPED.items())
    return {name: _one_group(rows) for name, rows in known if rows is not None}


def groups_of(sequences: Tensor) -> Groups:
    """Put rows into groups of sequences."""
    group = group_sequences(sequences)
    return Groups(torch.zeros_like(sequences), 1) if group is None else Groups(group, GROUPS)


def _one_group(hidden: Tensor) -> Groups:
    return Groups(torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device), 1)


def renamed(function: Callable[..., Any], *views: str) -> Callable[..., Any]:
    """Make a function read other views than its parameters name.

    Args:
        function: A function of views.
        views: Names of the views that it is called with, in the order of its parameters.
    """

    def call(*given: Any) -> Any:
        return function(*given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in views])
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def spread_rows(rows: Tensor, most: int | None) -> Tensor:
    """Choose evenly spread rows, mostly the same ones of any two sets that have most in common.

    Args:
        rows: Indices of rows, ascending.
        most: Number of rows that are chosen; None for all.
    """
    if most is None or len(rows) <= most:
        return rows
    order = (rows * _SPREADING) % _SPREAD
    return rows[order.topk(most, largest=False).indices].sort().values


def _massive_share(squares_about_mean: Tensor, ordinary_rows: Tensor) -> float:
    if ordinary_rows.all():
        return 0.0
    return float(share_beyond(squares_about_mean, ordinary_rows))


def _axes_of(hidden: Tensor, groups: Groups, rows: Tensor) -> PrincipalAxes:
    """Compute the axes of some rows; in wide layers, of mostly the same ones for any rows."""
    rows = spread_rows(rows, SPECTRAL_ROWS if hidden.shape[1] > SPECTRAL_WIDTH else None)
    if len(rows) < len(hidden):
        hidden, groups = hidden[rows], groups.at(rows)
    if groups.size > 1:
        return principal_axes(hidden, *groups)
    values = kernels.spectrum(hidden)
    count = values.new_tensor([len(hidden)])
    return PrincipalAxes(values, count, (values * count)[None])


def _axes(hidden: Tensor, groups: Groups) -> PrincipalAxes:
    every = torch.arange(len(hidden), dtype=torch.int64, device=hidden.device)
    return _axes_of(hidden, groups, every)


def _ordinary_axes(
    hidden: Tensor, ordinary_rows: Tensor, axes: PrincipalAxes, groups: Groups
) -> PrincipalAxes:
    if ordinary_rows.all():
        return axes
    return _axes_of(hidden, groups, ordinary_rows.nonzero().squeeze(1))


def _token_types(hidden: Tensor, token_ids: Tensor, groups: Groups) -> TokenTypes:
    return token_types(hidden, token_ids, groups.of if groups.size > 1 else None)


def _query_sums(projected_query: Tensor, query_groups: Groups) -> GroupSums:
    return group_sums(projected_query, *query_groups)


def _key_sums(projected_key: Tensor, key_groups: Groups) -> GroupSums:
    return group_sums(projected_key, *key_groups)


def _query_axes(projected_query: Tensor, query_groups: Groups) -> PrincipalAxes:
    return head_axes(projected_query, *query_groups)


def _key_axes(projected_key: Tensor, key_groups: Groups) -> PrincipalAxes:
    return head_axes(projected_key, *key_groups)


def _search(hidden: Tensor, k: int, of: Tensor, among: Tensor) -> Neighbours:
    if len(among) < 2:  # a row that has no other beside it is counted: the other is infinitely far
        nothing = torch.full((len(of), 1), torch.inf, dtype=torch.float64, device=of.device)
        return Neighbours(nothing, of[:, None])
    return find_nearest(hidden, k, of=of, among=among)


def _nearest(
    hidden: Tensor, query_rows: Tensor, unique_rows: Tensor, far_rows: Tensor,
    far_nearest: Neighbours,
) -> Neighbours:  # fmt: skip
    """Search the rows whose neighbours to a higher rank are not known already."""
    place, known = _find(query_rows, far_rows)
    found = _search(hidden, _NEAR_LISTED, query_rows[~known], unique_rows)
    listed = found.distances.shape[1]
    merged = Neighbours(*(part.new_empty(len(query_rows), listed) for part in found))
    for target, searched, far in zip(merged, found, far_nearest, strict=True):
        target[~known] = searched
        target[known] = far[place[known], :listed]
    return merged


def _find(wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find indices of rows among others, ascending: their places, and whether they are there."""
    place = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    return place, rows[place] == wanted


def _far_nearest(hidden: Tensor, far_rows: Tensor, unique_rows: Tensor) -> Neighbours:
    return _search(hidden, _FAR_LISTED, far_rows, unique_rows)


def first_neighbours(distances: Tensor, count: int) -> Tensor:
    """Take the nearest few of listed distances; a second one, infinitely far, if there is one."""
    missing = max(0, 2 - distances.shape[1])
    return torch.nn.functional.pad(distances, (0, missing), value=torch.inf)[:, :count]


def _rounding(mean_square: Tensor, two_nearest: Tensor, precision: float) -> float:
    # Each number is off by up to half its spacing, evenly: variance spacing^2 / 12, and a
    # difference of two has twice that.
    noise = precision * mean_square.sqrt() / 6**0.5
    spacing = two_nearest[:, 0].median()
    return float(torch.where(spacing.isfinite(), noise / spacing, torch.nan))


def _distinct_by_sequence(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor, sequences: Tensor
) -> Tensor:
    # Chosen by the sequence, the same row stands for its pair at every layer and in every number
    # format, and in a probe at every step. The pair is mixed in, so that no sequence leads in all.
    key = torch.zeros_like(sequences, dtype=torch.int64)
    for labels in (token_ids, positions, sequences):
        key = (key ^ labels) * _MIXING  # 64 bits, the rest is cut off
        key = key ^ (key >> 29)
    return _distinct(hidden, copies, token_ids, positions, key)


def _distinct_by_content(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor
) -> Tensor:
    return _distinct(hidden, copies, token_ids, positions, None)


def _distinct(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor, key: Tensor | None
) -> Tensor:
    """Choose a row for each pair of token id and position; of chosen rows that are equal, one.

    The pairs come first: if one row stood for its copies before, which pairs are left would depend
    on the order of the rows.
    """
    # One number for each pair: sorting pairs costs twenty times as much. Labels are numbered first,
    # so that no product is beyond 64 bits.
    token, position = (
        torch.unique(labels, return_inverse=True)[1] for labels in (token_ids, positions)
    )
    _, pair, count = torch.unique(
        token * len(hidden) + position, return_inverse=True, return_counts=True
    )
    alone = (count[pair] == 1).nonzero().squeeze(1)
    tied = (count[pair] > 1).nonzero().squeeze(1)
    # The first by a key; where there is none, or rows of one sequence have the same, by content.
    order = content_keys(hidden, tied).argsort()
    if key is not None:
        order = order[key[tied[order]].argsort(stable=True)]
    chosen = torch.cat([alone, tied[order[first_of_each(pair[tied[order]])]]])
    return chosen[first_of_each(copies[chosen])].sort().values


def _distinct_neighbours(
    hidden: Tensor, copies: Tensor, distinct: Tensor, distinct_rows: Tensor, query_rows: Tensor,
    nearest: Neighbours,
) -> Tensor:  # fmt: skip
    """Search the rows of whose listed neighbours fewer than two are distinct ones."""
    counts = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    counts[copies[distinct]] = True  # of equal rows the first is listed
    place, known = _find(copies[distinct_rows], query_rows)
    counted = counts[nearest.indices[place]]
    known &= counted.sum(dim=1) >= 2
    found = hidden.new_empty(len(distinct_rows), 2, dtype=torch.float64)
    found[known] = pass_over(nearest.distances[place[known]], ~counted[known], 2)
    rest = _search(hidden, 2, distinct_rows[~known], distinct)
    found[~known] = first_neighbours(rest.distances, 2)
    return found


def _attention_groups(query: Tensor) -> Groups:
    return groups_of(torch.arange(len(query), dtype=torch.int64, device=query.device))


def _attention_row_groups(attention_groups: Groups, query: Tensor) -> Groups:
    return Groups(attention_groups.of.repeat_interleave(query.shape[2]), attention_groups.size)


def _score_row_groups(attention_groups: Groups, scores: Tensor) -> Groups:
    return _attention_row_groups(attention_groups, scores)


def _score_source(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None,
    softcap: float | None, sink: Tensor | None,
) -> ScoreSource:  # fmt: skip
    return scores_of(query, key, visible, scale, bias, softcap, sink)


def _query_variances(
    query: Tensor, key: Tensor, visible: Tensor, attention_groups: Groups
) -> QueryVariances:
    return query_variances(query, key, visible, *attention_groups)


DERIVED: dict[str, Callable[..., Any] | tuple[Callable[..., Any], ...]] = {
    "queries": lambda hidden: (
        DISTANCE_QUERIES
    ),  # rows from which distances are measured; None for all
    "groups": (groups_of, _one_group),  # groups of sequences that margins leave out: Groups
    # Sums of the rows and of their directions by group: GroupSums.
    "row_sums": lambda hidden, groups: group_sums(hidden[:, None], *groups),
    "drift": lambda row_sums: row_sums.mean[0].norm(),  # norm of the mean row
    "mean_square": lambda row_sums: row_sums.square[0],  # mean squared norm of the rows
    "mean_cosine": lambda row_sums: row_sums.cosine[0],  # mean cosine over all pairs of rows
    "ordinary_rows": ordinary_rows,  # False for the few rows of massive norm
    "squares_about_mean": squares_about_mean,  # squared distance of each row from the mean
    # Around the mean of all rows.
    "total_variance": lambda squares_about_mean: squares_about_mean.mean(),
    "massive_share": _massive_share,  # share of the variance that massive rows carry
    "axes": _axes,  # eigenvalues of the covariance, and variance along each by group: PrincipalAxes
    "ordinary_axes": _ordinary_axes,  # the same without the rows of massive norm
    "spectrum": lambda axes: axes.eigenvalues,  # eigenvalues of the covariance, [rank]
    # The same without the rows of massive norm.
    "ordinary_spectrum": lambda ordinary_axes: ordinary_axes.eigenvalues,
    "token_types": _token_types,  # count, norm of the mean and scatter of the rows of each type
    # Variance around the mean of each row's token type.
    "within": lambda token_types: token_types.within_variance,
    # Groups of the projected queries.
    "query_groups": (
        renamed(groups_of, "query_sequences"),
        renamed(_one_group, "projected_query"),
    ),
    # The same of the keys.
    "key_groups": (
        renamed(groups_of, "key_sequences"),
        renamed(_one_group, "projected_key"),
    ),
    "query_sums": _query_sums,  # sums of the projected queries by group: GroupSums
    "key_sums": _key_sums,  # the same of the keys
    "mean_query": lambda query_sums: query_sums.mean,  # of each head, [heads, head width]
    "mean_key": lambda key_sums: key_sums.mean,  # of each key head, [key heads, head width]
    "query_axes": _query_axes,  # eigenvalues of the covariance of queries by head: PrincipalAxes
    "key_axes": _key_axes,  # the same of the keys
    # These eigenvalues, [heads, head width].
    "query_spectrum": lambda query_axes: query_axes.eigenvalues,
    "key_spectrum": lambda key_axes: key_axes.eigenvalues,  # the same of the keys
    "copies": copies_of,  # for each row the first row of the same content
    "unique_rows": unique_rows,  # index of one row for each distinct content
    # Share of the rows that copy another.
    "duplicates": lambda hidden, unique_rows: 1 - len(unique_rows) / len(hidden),
    # Index of the unique rows whose neighbours are searched.
    "query_rows": renamed(spread_rows, "unique_rows", "queries"),
    "nearest": _nearest,  # their neighbours among the unique rows: distances and who they are
    # Distances to the two nearest, [query rows, 2].
    "two_nearest": lambda nearest: first_neighbours(nearest.distances, 2),
    # Distances to the 16 nearest, ascending, [query rows, 16].
    "neighbours": lambda nearest: first_neighbours(nearest.distances, NEAR),
    # Index of a few unique rows, evenly spread.
    "far_rows": lambda unique_rows: spread_rows(unique_rows, FAR_ROWS),
    "far_nearest": _far_nearest,  # their neighbours to a higher rank
    # Distances to the 64 nearest.
    "far_neighbours": lambda far_nearest: first_neighbours(far_nearest.distances, FAR),
    # Index of the 64 rows near each of the few rows, itself not among them.
    "members": lambda far_nearest: far_nearest.indices[:, :FAR],
    # TwoNN of each of these neighbourhoods.
    "local_dimensions": renamed(local_dimension, "hidden", "members"),
    # Anisotropy of each about its own mean.
    "local_anisotropies": renamed(local_anisotropy, "hidden", "members"),
    "rounding": _rounding,  # distance that rounding alone makes, over the median nearest distance
    # Index of one row for each (token id, position), no two of them equal.
    "distinct": (_distinct_by_sequence, _distinct_by_content),
    # Those of them whose neighbours are searched.
    "distinct_rows": renamed(spread_rows, "distinct", "queries"),
    "distinct_neighbours": _distinct_neighbours,  # distances to their two nearest distinct rows
    # Share of the rows that repeat a (token id, position).
    "repeated": lambda hidden, distinct: 1 - len(distinct) / len(hidden),
    "score_source": (_score_source, given_scores),  # scores, block by block: ScoreSource
    "attention": attention_rows,  # reduced softmax rows: AttentionRows
    # Groups of the sequences of attention.
    "attention_groups": (_attention_groups, renamed(_attention_groups, "scores")),
    "attention_row_groups": (_attention_row_groups, _score_row_groups),  # of the attention rows
    "row_medians": row_medians,  # of the weights of each row: RowMedians
    "score_moments": score_moments,  # of each query: ScoreMoments
    "query_variances": _query_variances,  # of scores of mean queries and of all: QueryVariances
    "sequence_extremes": sequence_extremes,  # of the weights of each sequence: SequenceExtremes
}


# Beginning of the names of views of the last token of each sequence.
_LAST = "last_"


def alternatives(name: str) -> tuple[Callable[..., Any], ...]:
    """List the functions that make a derived view, the preferred one first."""
    made = DERIVED[name]
    return made if isinstance(made, tuple) else (made,)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """List the views that a function reads: its parameters without a default.

    Args:
        function: A metric, or a function that makes a derived view.
    """
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
    """List the captured views from which the named views are made, by any alternative."""
    return set().union(*map(_captured_views, names))


@functools.lru_cache(maxsize=1024)  # asked for every metric of every layer
def _captured_views(name: str) -> frozenset[str]:
    if name in CAPTURED:
        return frozenset([name])
    if name in DERIVED:
        ways = alternatives(name)
        return frozenset(captured_views(view for way in ways for view in parameters(way)))
    return frozenset(f"{_LAST}{leaf}" for leaf in captured_views([_of_rows(name)]))


def can_be_made(names: Iterable[str], captured: Iterable[str]) -> bool:
    """Whether views can all be made of the captured ones that are there, by some alternative."""
    there = frozenset(captured)
    return all(_can_be_made(name, there) for name in names)


@functools.lru_cache(maxsize=4096)  # asked for every view of every layer
def _can_be_made(name: str, captured: frozenset[str]) -> bool:
    if name in CAPTURED:
        return name in captured
    if name in DERIVED:
        return any(can_be_made(parameters(way), captured) for way in alternatives(name))
    last = {view.removeprefix(_LAST) for view in captured if CAPTURED[view] == "last"}
    return can_be_made([_of_rows(name)], last)


def is_view(name: str) -> bool:
    """Return whether there is a view of that name."""
    known = name in CAPTURED or name in DERIVED
    return known or (name.startswith(_LAST) and has_last(name.removeprefix(_LAST)))


def has_last(name: str) -> bool:
    """Return whether a view is made of rows alone, so that the last tokens have it too."""
    if name not in CAPTURED and name not in DERIVED:
        return False
    return {CAPTURED[view] for view in captured_views([name])} == {"hidden"}


def _of_rows(name: str) -> str:
    """Name the view of all rows that a view of the last tokens stands for."""
    if not is_view(name):
        raise KeyError(name)
    return name.removeprefix(_LAST)


class MissingViewError(LookupError):
    """A view was not captured at this layer, or not enough of it; the message says why."""


class LayerViews:
    """The views of one layer, or of some of its rows: derived ones are computed once.

    Args:
        layer: The layer with its captured views.
        prefix: Beginning of the names of these views outside: "last_" for those of last tokens.
        given: Derived views that are known already.

    Attributes:
        layer: The layer.
        prefix: Beginning of the names of these views outside.
    """

    def __init__(
        self, layer: Layer, prefix: str = "", given: Mapping[str, Any] | None = None
    ) -> None:
        self.layer = layer
        self.prefix = prefix
        self._derived: dict[str, Any] = dict(given or {})

    def __getitem__(self, name: str) -> Any:
        """Return the view called `name`, computing it if it is a derived one.

        Raises:
            MissingViewError: The view is made of something that was not captured.
            KeyError: There is no view of that name.
        """
        captured = self.layer.captured
        if name in captured:
            return captured[name]
        if name in CAPTURED:
            reason = self.layer.missing.get(name, "it was not seen")
            raise MissingViewError(f"'{self.prefix}{name}' is missing: {reason}")
        if name not in DERIVED:
            return self.last[_of_rows(name)]
        if name not in self._derived:
            self._derived[name] = self.apply(self._function_for(name))
        return self._derived[name]

    @functools.cached_property
    def last(self) -> "LayerViews":
        """The views of the last tokens, under the names that those of all rows have."""
        captured, missing = (
            {_of_rows(name): value for name, value in views.items() if CAPTURED[name] == "last"}
            for views in (self.layer.captured, self.layer.missing)
        )
        layer = replace(self.layer, captured=captured, missing=missing)
        return LayerViews(layer, _LAST, {"queries": self._derived.get("queries", DISTANCE_QUERIES)})

    def has(self, name: str) -> bool:
        """Return whether a view of these rows was captured, or has been computed already.

        Args:
            name: Name of a view.
        """
        return name in self.layer.captured or name in self._derived

    def apply(self, function: Callable[..., Any]) -> Any:
        """Call a function with the views that its parameters name.

        Args:
            function: A metric, or a function that makes a derived view.

        Raises:
            MissingViewError: One of the views is made of something that was not captured.
        """
        return function(*(self[name] for name in parameters(function)))

    def apply_to_copies(self, function: Callable[..., Any]) -> Any:
        """Call a function of the user's with copies of the views that its parameters name.

        It may change them in place, and other metrics read the same views, as does a second
        measurement of a layer (after a trial of its cost, say).
        """
        return function(*(_copied(self[name]) for name in parameters(function)))

    def _function_for(self, name: str) -> Callable[..., Any]:
        """The first alternative that can be made of what was captured; else the preferred one."""
        functions = alternatives(name)
        there = self.layer.captured.keys()
        return next((f for f in functions if can_be_made(parameters(f), there)), functions[0])


def _copied(view: Any) -> Any:
    """A view whose tensors are copies; what is neither a tensor nor a tuple of them is itself."""
    if isinstance(view, Tensor):
        return view.clone()
    if isinstance(view, tuple):
        parts = map(_copied, view)
        return view._make(parts) if hasattr(view, "_make") else tuple(parts)
    return view


def split_rows(
    layer: Layer, rows: int, count: int, queries: int | None, *, has_groups: bool = True
) -> list[LayerViews]:
    """Cut the rows of a layer into splits of equal size; views that are not of rows are shared.

    A sequence is in the same group in every split.
    """
    hidden = layer.captured.get("hidden")
    if hidden is None:
        return [LayerViews(layer, given={} if has_groups else _all_in_one_group(layer))]
    full = max(1, min(count, len(hidden) // rows))
    sequences = layer.captured.get("sequences")
    groups = None if sequences is None or not has_groups else groups_of(sequences)
    splits = []
    for start in range(full):
        cut = slice(start * rows, (start + 1) * rows)
        captured = {k: v[cut] if k in ROW_VIEWS else v for k, v in layer.captured.items()}
        part = replace(layer, captured=captured)
        given: dict[str, Any] = {} if has_groups else _all_in_one_group(part)
        if groups is not None:
            given["groups"] = Groups(groups.of[cut], groups.size)
        splits.append(LayerViews(part, given={**given, "queries": queries}))
    return splits
