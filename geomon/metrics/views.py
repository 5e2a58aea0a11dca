"""Views: everything that metrics can read of a layer, by name.

*Captured views* are what the window kept (`geomon.capture.snapshot`). *Derived views* are computed
from other views by functions whose parameters name them, when first needed, and then kept, so that
metrics share expensive results. If there are several ways, the first one with available captured
views is used. Each view is declared once, with its meaning and its form without a group of
sequences.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture import CAPTURED
from geomon.kernels import spectrum as kernels
from geomon.kernels.attention import (
    attention_rows,
    given_scores,
    row_medians,
    scores_of,
    sequence_extremes,
)
from geomon.kernels.groups import GROUPS, Groups, group_sequences, group_sums
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
from geomon.kernels.scores import query_variances, score_moments
from geomon.kernels.spectrum import PrincipalAxes, head_axes, principal_axes
from geomon.kernels.token_types import TokenTypes, token_types
from geomon.metrics.without import (
    LeaveOut,
    other_groups,
    other_neighbourhoods,
    other_neighbours,
    others_of,
    recomputed,
    refused,
    same,
    sliced,
    sliced_at,
    variance_of_others,
)

# Default number of rows from which distances are measured; None would mean all.
DISTANCE_QUERIES = 1024
# Neighbours of each of these rows that metrics read, and neighbours that are listed for margins,
# which skip those in one group of sequences.
NEAR, _NEAR_LISTED = 16, 24
# Neighbours for large scales, and the number of rows for which they are searched.
FAR, _FAR_LISTED = 64, 96
FAR_ROWS = 256
# For each search, the view with the number of neighbours to find.
LISTED = {"near_search": "near_listed", "far_search": "far_listed"}
# Rows that a spectrum uses at most in layers with more than this many columns.
SPECTRAL_ROWS, SPECTRAL_WIDTH = 2048, 1024

# Odd multiplier with spread bits, for mixing labels: about 2^63 over the golden ratio.
_MIXING = 5_700_357_409_661_599_241
# 32-bit multiplier that orders rows so that the first few, of any number, are evenly spread.
_SPREADING, _SPREAD = 2_654_435_761, 2**32


class Reader(NamedTuple):
    """A function, and the views that are its arguments.

    Attributes:
        function: The function.
        reads: Names of the views.
    """

    function: Callable[..., Any]
    reads: tuple[str, ...]


def reader(function: Callable[..., Any], *views: str) -> Reader:
    """Make a reader of a function.

    Args:
        function: A function of views.
        views: Names of the views, in the order of its parameters. Defaults to the names of its
            parameters.
    """
    return Reader(function, views or parameters(function))


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """List the views that a function names: its parameters without a default.

    Args:
        function: A function of views.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind in kinds
    )


class View(NamedTuple):
    """A derived view.

    Attributes:
        text: One line of meaning, with the shape.
        without: Rule for the view without a group of sequences.
        ways: Readers that compute it, the preferred one first.
        neighbours: Number of neighbours that they read of a search, 0 for no search.
    """

    text: str
    without: LeaveOut
    ways: tuple[Reader, ...]
    neighbours: int = 0


def derived(
    text: str,
    without: LeaveOut,
    way: Callable[..., Any] | Reader,
    *others: Callable[..., Any] | Reader,
    neighbours: int = 0,
) -> View:
    """Declare a derived view, with the preferred way to compute it first."""
    ways = (one if isinstance(one, Reader) else reader(one) for one in (way, *others))
    return View(text, without, tuple(ways), neighbours)


def groups_of(sequences: Tensor) -> Groups:
    """Put rows into groups of sequences."""
    group = group_sequences(sequences)
    return Groups(torch.zeros_like(sequences), 1) if group is None else Groups(group, GROUPS)


def one_group(hidden: Tensor) -> Groups:
    """Put all rows into one group, which is never left out."""
    return Groups(torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device), 1)


def spread_rows(rows: Tensor, most: int | None) -> Tensor:
    """Choose evenly spread rows, such that similar sets of rows give mostly the same choice.

    Args:
        rows: Indices of rows, ascending.
        most: Number of rows to choose, or None for all.
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
    """Compute the axes of some rows; wide layers use a stable subset of them."""
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


def _search(hidden: Tensor, k: int, of: Tensor, among: Tensor) -> Neighbours:
    if min(k, len(among) - 1) < 1:  # a row without any other has a neighbour at infinity
        own = of[:, None][:, :k]
        return Neighbours(torch.full_like(own, torch.inf, dtype=torch.float64), own)
    return find_nearest(hidden, k, of=of, among=among)


def _near_search(
    hidden: Tensor, query_rows: Tensor, unique_rows: Tensor, far_rows: Tensor,
    far_search: Neighbours, near_listed: int,
) -> Neighbours:  # fmt: skip
    """Search the neighbours of the rows whose farther neighbours are not known yet."""
    if far_search.distances.shape[1] < min(near_listed, len(unique_rows) - 1):
        return _search(hidden, near_listed, query_rows, unique_rows)
    place, known = _find(query_rows, far_rows)
    found = _search(hidden, near_listed, query_rows[~known], unique_rows)
    listed = found.distances.shape[1]
    merged = Neighbours(*(part.new_empty(len(query_rows), listed) for part in found))
    for target, searched, far in zip(merged, found, far_search, strict=True):
        target[~known] = searched
        target[known] = far[place[known], :listed]
    return merged


def _find(wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find rows in an ascending list: their places, and whether they are there."""
    place = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    return place, rows[place] == wanted


def _first(found: Neighbours, count: int) -> Neighbours:
    return Neighbours(*(part[:, :count] for part in found))


def first_neighbours(distances: Tensor, count: int) -> Tensor:
    """Return the first few of listed distances, with infinity in place of a missing second one."""
    missing = max(0, 2 - distances.shape[1])
    return torch.nn.functional.pad(distances, (0, missing), value=torch.inf)[:, :count]


def _rounding(mean_square: Tensor, two_nearest: Tensor, precision: float) -> float:
    # Rounding errors are uniform within half a spacing, with variance spacing^2 / 12; a difference
    # of two numbers has twice that variance.
    noise = precision * mean_square.sqrt() / 6**0.5
    spacing = two_nearest[:, 0].median()
    return float(torch.where(spacing.isfinite(), noise / spacing, torch.nan))


def _distinct_by_sequence(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor, sequences: Tensor
) -> Tensor:
    # Chosen by sequence, so that the same row represents its pair at every layer, in every number
    # format, and at every step of a probe. The pair is mixed in, so that no sequence always wins.
    key = torch.zeros_like(sequences, dtype=torch.int64)
    for labels in (token_ids, positions, sequences):
        key = (key ^ labels) * _MIXING  # modulo 2^64
        key = key ^ (key >> 29)
    return _distinct(hidden, copies, token_ids, positions, key)


def _distinct_by_content(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor
) -> Tensor:
    return _distinct(hidden, copies, token_ids, positions, None)


def _distinct(
    hidden: Tensor, copies: Tensor, token_ids: Tensor, positions: Tensor, key: Tensor | None
) -> Tensor:
    """Choose one row for each pair of token id and position, then drop equal rows.

    Pairs come first: otherwise the remaining pairs would depend on the order of the rows.
    """
    # One number per pair, because sorting pairs costs twenty times as much. Labels are renumbered
    # first, so that no product exceeds 64 bits.
    token, position = (
        torch.unique(labels, return_inverse=True)[1] for labels in (token_ids, positions)
    )
    _, pair, count = torch.unique(
        token * len(hidden) + position, return_inverse=True, return_counts=True
    )
    alone = (count[pair] == 1).nonzero().squeeze(1)
    tied = (count[pair] > 1).nonzero().squeeze(1)
    # Choose the first by key, or by content if there is no key or rows share it.
    order = content_keys(hidden, tied).argsort()
    if key is not None:
        order = order[key[tied[order]].argsort(stable=True)]
    chosen = torch.cat([alone, tied[order[first_of_each(pair[tied[order]])]]])
    return chosen[first_of_each(copies[chosen])].sort().values


def _distinct_neighbours(
    hidden: Tensor, copies: Tensor, distinct: Tensor, distinct_rows: Tensor, query_rows: Tensor,
    near_search: Neighbours,
) -> Tensor:  # fmt: skip
    """Search again for rows with fewer than two distinct rows among their listed neighbours."""
    counts = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    counts[copies[distinct]] = True  # among equal rows, only the first is listed
    place, known = _find(copies[distinct_rows], query_rows)
    counted = counts[near_search.indices[place]]
    known &= counted.sum(dim=1) >= 2
    found = hidden.new_empty(len(distinct_rows), 2, dtype=torch.float64)
    found[known] = pass_over(near_search.distances[place[known]], ~counted[known], 2)
    rest = _search(hidden, 2, distinct_rows[~known], distinct)
    found[~known] = first_neighbours(rest.distances, 2)
    return found


def _attention_groups(query: Tensor) -> Groups:
    return groups_of(torch.arange(len(query), dtype=torch.int64, device=query.device))


def _attention_row_groups(attention_groups: Groups, query: Tensor) -> Groups:
    return Groups(attention_groups.of.repeat_interleave(query.shape[2]), attention_groups.size)


# -- the table -------------------------------------------------------------------------------------

# View that holds the groups of a captured view's rows, by the kind of rows.
GROUPS_OF = {
    "tokens": "groups",
    "queries": "query_groups",
    "keys": "key_groups",
    "sequences": "attention_groups",
}
_BY_ROWS = {rows: sliced(groups) for rows, groups in GROUPS_OF.items()}

DERIVED: dict[str, View] = {
    "queries": derived(
        "number of rows from which distances are measured; None for all", same,
        lambda hidden: DISTANCE_QUERIES,
    ),
    "groups": derived(
        "groups of sequences that margins leave out: Groups", recomputed, groups_of, one_group
    ),
    "row_sums": derived(
        "sums of the rows and of their directions by group: GroupSums", other_groups,
        lambda hidden, groups: group_sums(hidden[:, None], *groups),
    ),
    "drift": derived("norm of the mean row", recomputed, lambda row_sums: row_sums.mean[0].norm()),
    "mean_square": derived(
        "mean squared norm of the rows", recomputed, lambda row_sums: row_sums.square[0]
    ),
    "mean_cosine": derived(
        "mean cosine over all pairs of rows", recomputed, lambda row_sums: row_sums.cosine[0]
    ),
    "ordinary_rows": derived(
        "False for the few rows of massive norm, [tokens]", sliced("groups"), ordinary_rows
    ),
    "squares_about_mean": derived(
        "squared distance of each row from the mean of all, [tokens]", sliced("groups"),
        squares_about_mean,
    ),
    "total_variance": derived(
        "mean squared distance from the mean", variance_of_others,
        lambda squares_about_mean: squares_about_mean.mean(),
    ),
    "massive_share": derived(
        "share of the variance that massive rows carry", recomputed, _massive_share
    ),
    "axes": derived(
        "eigenvalues of the covariance, and variance along each by group: PrincipalAxes",
        recomputed, _axes,
    ),
    "ordinary_axes": derived(
        "axes without the rows of massive norm", recomputed, _ordinary_axes
    ),
    "spectrum": derived(
        "eigenvalues of the covariance, [rank]", others_of("axes"), lambda axes: axes.eigenvalues
    ),
    "ordinary_spectrum": derived(
        "spectrum without the rows of massive norm, [rank]", others_of("ordinary_axes"),
        lambda ordinary_axes: ordinary_axes.eigenvalues,
    ),
    "token_types": derived(
        "count, norm of the mean and scatter of the rows of each type: TokenTypes",
        others_of("token_types"), _token_types,
    ),
    "within": derived(
        "variance around the mean of each row's token type", recomputed,
        lambda token_types: token_types.within_variance,
    ),
    "query_groups": derived(
        "groups of the projected queries", recomputed,
        reader(groups_of, "query_sequences"), reader(one_group, "projected_query"),
    ),
    "key_groups": derived(
        "groups of the projected keys", recomputed,
        reader(groups_of, "key_sequences"), reader(one_group, "projected_key"),
    ),
    "query_sums": derived(
        "sums of the projected queries by group: GroupSums", other_groups,
        lambda projected_query, query_groups: group_sums(projected_query, *query_groups),
    ),
    "key_sums": derived(
        "sums of the projected keys by group: GroupSums", other_groups,
        lambda projected_key, key_groups: group_sums(projected_key, *key_groups),
    ),
    "mean_query": derived(
        "mean query of each head, [heads, head width]", recomputed,
        lambda query_sums: query_sums.mean,
    ),
    "mean_key": derived(
        "mean key of each key head, [key heads, head width]", recomputed,
        lambda key_sums: key_sums.mean,
    ),
    "query_axes": derived(
        "axes of the queries of each head: PrincipalAxes", recomputed,
        lambda projected_query, query_groups: head_axes(projected_query, *query_groups),
    ),
    "key_axes": derived(
        "axes of the keys of each key head: PrincipalAxes", recomputed,
        lambda projected_key, key_groups: head_axes(projected_key, *key_groups),
    ),
    "query_spectrum": derived(
        "eigenvalues of the covariance of queries, [heads, head width]", others_of("query_axes"),
        lambda query_axes: query_axes.eigenvalues,
    ),
    "key_spectrum": derived(
        "eigenvalues of the covariance of keys, [key heads, head width]", others_of("key_axes"),
        lambda key_axes: key_axes.eigenvalues,
    ),
    "copies": derived(
        "index of the first row of the same content, [tokens]", refused,
        reader(copies_of, "hidden"),
    ),
    "unique_rows": derived(
        "index of one row for each distinct content", refused, reader(unique_rows, "copies")
    ),
    "duplicates": derived(
        "share of the rows that copy another", same,
        lambda hidden, unique_rows: 1 - len(unique_rows) / len(hidden),
    ),
    "query_rows": derived(
        "index of the unique rows whose neighbours are searched, ascending", refused,
        reader(spread_rows, "unique_rows", "queries"),
    ),
    "near_listed": derived(
        "number of neighbours to search for each of them", refused, lambda hidden: _NEAR_LISTED
    ),
    "near_search": derived(
        "their nearest unique rows, as many as metrics read: Neighbours", refused, _near_search
    ),
    "nearest": derived(
        "their 24 nearest unique rows: Neighbours", refused,
        lambda near_search: _first(near_search, _NEAR_LISTED), neighbours=_NEAR_LISTED,
    ),
    "two_nearest": derived(
        "distances to the two nearest, [query rows, 2]", sliced_at("query_rows"),
        lambda near_search: first_neighbours(near_search.distances, 2), neighbours=2,
    ),
    "neighbours": derived(
        "distances to the 16 nearest, ascending, [query rows, 16]",
        other_neighbours("nearest", "query_rows", NEAR),
        lambda near_search: first_neighbours(near_search.distances, NEAR), neighbours=NEAR,
    ),
    "far_rows": derived(
        "index of 256 unique rows, evenly spread", refused,
        lambda unique_rows: spread_rows(unique_rows, FAR_ROWS),
    ),
    "far_listed": derived(
        "number of neighbours to search for each of them", refused, lambda hidden: _FAR_LISTED
    ),
    "far_search": derived(
        "their nearest unique rows, as many as metrics read: Neighbours", refused,
        reader(_search, "hidden", "far_listed", "far_rows", "unique_rows"),
    ),
    "far_nearest": derived(
        "their 96 nearest unique rows: Neighbours", refused,
        lambda far_search: _first(far_search, _FAR_LISTED), neighbours=_FAR_LISTED,
    ),
    "far_neighbours": derived(
        "distances to the 64 nearest, ascending, [far rows, 64]",
        other_neighbours("far_nearest", "far_rows", FAR),
        lambda far_search: first_neighbours(far_search.distances, FAR), neighbours=FAR,
    ),
    "members": derived(
        "index of the 64 rows near each of the far rows, itself not among them", refused,
        lambda far_search: far_search.indices[:, :FAR], neighbours=FAR,
    ),
    "local_dimensions": derived(
        "TwoNN of each of these neighbourhoods, [far rows]",
        other_neighbourhoods(local_dimension, FAR),
        reader(local_dimension, "hidden", "members"),
    ),
    "local_anisotropies": derived(
        "anisotropy of each about its own mean, [far rows]",
        other_neighbourhoods(local_anisotropy, FAR),
        reader(local_anisotropy, "hidden", "members"),
    ),
    "rounding": derived(
        "distance that rounding alone makes, over the median nearest distance", same, _rounding
    ),
    "distinct": derived(
        "index of one row for each (token id, position), no two of them equal", refused,
        _distinct_by_sequence, _distinct_by_content,
    ),
    "distinct_rows": derived(
        "those `distinct` rows whose neighbours are searched", refused,
        reader(spread_rows, "distinct", "queries"),
    ),
    "distinct_neighbours": derived(
        "distances to their two nearest distinct rows, [distinct rows, 2]",
        sliced_at("distinct_rows"), _distinct_neighbours, neighbours=2,
    ),
    "repeated": derived(
        "share of the rows that repeat a (token id, position)", same,
        lambda hidden, distinct: 1 - len(distinct) / len(hidden),
    ),
    "score_source": derived(
        "scores, block by block: ScoreSource", recomputed,
        reader(scores_of, "query", "key", "visible", "scale", "bias", "softcap", "sink"),
        given_scores,
    ),
    "attention": derived(
        "reduced softmax rows: AttentionRows", sliced("attention_row_groups", 1), attention_rows
    ),
    "attention_groups": derived(
        "groups of the sequences of attention", recomputed,
        reader(_attention_groups, "query"), reader(_attention_groups, "scores"),
    ),
    "attention_row_groups": derived(
        "groups of the rows of attention", recomputed,
        reader(_attention_row_groups, "attention_groups", "query"),
        reader(_attention_row_groups, "attention_groups", "scores"),
    ),
    "row_medians": derived(
        "of the weights of each row: RowMedians", sliced("attention_row_groups", 1), row_medians
    ),
    "score_moments": derived(
        "of the scores of each query: ScoreMoments", sliced("attention_row_groups", 1),
        score_moments,
    ),
    "query_variances": derived(
        "of scores of mean queries and of all queries: QueryVariances",
        others_of("query_variances"),
        lambda query, key, visible, attention_groups: query_variances(
            query, key, visible, *attention_groups
        ),
    ),
    "sequence_extremes": derived(
        "of the weights of each sequence: SequenceExtremes", sliced("attention_groups", 1),
        sequence_extremes,
    ),
}  # fmt: skip


def rule_of(name: str) -> LeaveOut:
    """Return the rule for a view without a group of sequences."""
    if name in DERIVED:
        return DERIVED[name].without
    captured = CAPTURED[name]
    rules = {"same": same, "refused": refused}
    return rules[captured.without] if captured.without in rules else _BY_ROWS[captured.rows]


def captured_views(names: Iterable[str]) -> frozenset[str]:
    """List all captured views from which the named views can be made."""
    return frozenset().union(*map(_captured_views, names))


@functools.lru_cache(maxsize=1024)  # called for every metric of every layer
def _captured_views(name: str) -> frozenset[str]:
    if name in CAPTURED:
        return frozenset([name])
    return captured_views(view for way in DERIVED[name].ways for view in way.reads)


def neighbours_to_search(names: Iterable[str], *, with_margins: bool) -> dict[str, int]:
    """Return how many neighbours each search has to find, for some views and all behind them.

    Args:
        names: Names of the views.
        with_margins: Whether the views are also made without each group of sequences.
    """
    counts = dict.fromkeys(LISTED.values(), 0)
    left, seen = [*names], set[str]()
    while left:
        name = left.pop()
        if name in seen or name not in DERIVED:
            continue
        seen.add(name)
        view = DERIVED[name]
        reads = {read for way in view.ways for read in way.reads}
        for search in reads & LISTED.keys():
            counts[LISTED[search]] = max(counts[LISTED[search]], view.neighbours)
        left += [*reads, *(view.without.reads if with_margins else ())]
    return counts


def can_be_made(names: Iterable[str], captured: Iterable[str]) -> bool:
    """Whether all of these views can be made, in some way, from the available captured views."""
    there = frozenset(captured)
    return all(_can_be_made(name, there) for name in names)


@functools.lru_cache(maxsize=4096)  # called for every view of every layer
def _can_be_made(name: str, captured: frozenset[str]) -> bool:
    if name in CAPTURED:
        return name in captured
    return any(can_be_made(way.reads, captured) for way in DERIVED[name].ways)


def is_view(name: str) -> bool:
    """Return whether a view that metrics can read has this name."""
    return name in CAPTURED or (name in DERIVED and name not in {*LISTED, *LISTED.values()})
