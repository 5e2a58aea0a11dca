"""Distances to the nearest neighbours: searched in float32, decided in float64.

FAISS expands |x|^2 + |y|^2 - 2xy in float32, which loses the small distances of rows far from the
origin and of near-duplicates. So: centre and scale in float64 before the search, ask for more
candidates than are wanted, drop a row's own entry by its index, compute the candidates' distances
again in float64 from differences of the rows as given, and sort those. Where a true neighbour may
be missing from the candidates because of rounding, the row is searched again: by the expansion in
float64, every row that its rounding cannot exclude is compared by differences. So no row stays
uncertain, however close near-duplicates are.
Where it costs less, candidates come by lower bounds of the distances instead, from 8-bit integers
(`quantised`) or from a few coordinates (`certified`); what these leave uncertain is searched as
above. The distances and their order are the same.
The memory beyond the rows themselves is one float32 copy of them and one of 8 bits, which serve
several searches of the same rows, the result, and blocks of up to 16 MB.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.kernels import certified, quantised
from geomon.kernels._blocks import row_blocks, rows_in_block
from geomon.kernels._candidates import distances_to, nearest_first, norms
from geomon.kernels.products import as_factor, without_autocast

faiss: Any
try:
    import faiss
except ImportError:  # the exact search in torch is used instead
    faiss = None

# Candidates beyond k of the search in float32, which can put near-duplicates in the wrong order. A
# matter of speed alone: with more candidates fewer rows are uncertain, but every search costs more.
_SLACK = 2
# Powers of two up to which numbers, as they are, have squares that float64 can add; and up to which
# their inverses are numbers too.
_ORDINARY, _LARGEST = 400, 1000
# Powers of two up to which differences in float32, and their products, are far from its ends.
_MODERATE = 60
# Wanted rows that are copied for the search at a time, where not all are wanted.
_QUERIES = 4096

_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Neighbours(NamedTuple):
    """The k nearest other rows of each row.

    Attributes:
        distances: Distances to the neighbours, ascending, [tokens, k], float64.
        indices: Indices of the neighbours among the rows, [tokens, k], int64.
    """

    distances: Tensor
    indices: Tensor


@dataclass(frozen=True)
class ScaledRows:
    """Rows made ready once for several searches: about a centre, scaled, in float32.

    Attributes:
        among: Indices of the rows that are ready, ascending; None for all.
        frame: Centre and scale.
        values: These rows, [len(among), width], float32.
        integers: These rows as integers, once a search has made them: one item at most, which is
            None where integers are of no use.
    """

    among: Tensor | None
    frame: "_Frame"
    values: Tensor
    integers: list[quantised.Integers | None] = field(
        default_factory=list, compare=False, repr=False
    )

    def of(self, among: Tensor | None) -> Tensor:
        """Return some of the rows, [len(among), width].

        Args:
            among: Indices of these rows, ascending, each of them ready; None for all rows.
        """
        places = self._places(among)
        return self.values if places is None else self.values[places]

    def integers_of(self, among: Tensor | None, wanted: int, k: int) -> quantised.Integers | None:
        """Return some of the rows as integers; None where these are of no use.

        Those of all rows are kept for later searches of no more rows.

        Args:
            among: Indices of these rows, ascending, each of them ready; None for all rows.
            wanted: Number of rows whose neighbours are wanted.
            k: Number of neighbours.
        """
        places = self._places(among)
        # One step each, so that searches in several threads can do no more than make them twice.
        for kept in self.integers[-1:]:
            if kept is None and places is None:
                return None
            if kept is not None and kept.wanted >= wanted:
                return kept if places is None else kept.of(places)
        if places is not None:
            return quantised.prepare(self.values[places], wanted, k)
        made = quantised.prepare(self.values, wanted, k)
        self.integers[:] = [made]
        return made

    def leave_integers(self, among: Tensor | None) -> None:
        """Free the integers of all rows, which were of no use in a search of each of them.

        Args:
            among: Indices of the rows that were searched, as in `integers_of`; where these are not
                all rows, nothing changes.
        """
        if self._places(among) is None:
            self.integers[:] = [None]

    def _places(self, among: Tensor | None) -> Tensor | None:
        """Convert indices into the rows to places among those that are ready; None for all.

        Raises:
            ValueError: One of these rows is not ready.
        """
        if among is None or self.among is None:
            return among
        places = _find(among, self.among, "rows that are ready")
        return None if len(places) == len(self.among) else places


def scale_rows(rows: Tensor, among: Tensor | None = None) -> ScaledRows:
    """Make rows ready for several searches by `nearest`.

    Args:
        rows: Finite points, [tokens, width], any floating-point dtype.
        among: Indices of the rows that will be searched, ascending; None for all rows.

    Returns:
        The rows, with one float32 copy of them.

    Raises:
        ValueError: `among` does not name rows in ascending order.
    """
    points = _Points(rows, _unless_all(among, len(rows)))
    frame = _frame(rows)
    values = rows.new_empty((len(points), rows.shape[1]), dtype=torch.float32)
    # An eighth of a block, which stays in the cache.
    step = rows_in_block(8 * rows.shape[1], rows.device)
    for target, block in zip(values.split(step), points.blocks(step), strict=True):
        frame.scale_into(target, block)
    return ScaledRows(points.among, frame, values)


def nearest(
    rows: Tensor,
    k: int,
    *,
    of: Tensor | None = None,
    among: Tensor | None = None,
    scaled: ScaledRows | None = None,
) -> Neighbours:
    """Compute the Euclidean distances of rows to their k nearest other rows.

    Equal rows are neighbours at distance 0: leave them out first with `unique_rows`.

    Args:
        rows: Finite points, [tokens, width], any floating-point dtype.
        k: Number of neighbours; fewer come back where there are fewer other rows.
        of: Indices of the rows whose neighbours are wanted, each one of the searched rows; None
            for all searched rows.
        among: Indices of the rows that are searched, ascending; None for all rows.
        scaled: The rows as `scale_rows` made them ready, with all that are searched; None makes
            them ready for this search alone.

    Returns:
        Neighbours, of shape [searched rows (or len(of)), min(k, searched rows - 1)]; the indices
        are into `rows`.

    Raises:
        ValueError: `rows` is not a floating-point matrix, there are fewer than two rows to search,
            `k` is below 1, `among` does not name rows in ascending order, or a row that is wanted
            is not searched, or one that is searched not ready.

    Example:
        >>> nearest(torch.tensor([[0.0], [1.0], [3.0]]), k=2).distances.tolist()
        [[1.0, 3.0], [1.0, 2.0], [2.0, 3.0]]
    """
    searched = len(rows) if among is None else len(among)
    if rows.ndim != 2 or not rows.is_floating_point() or min(searched - 1, *rows.shape, k) < 1:
        raise ValueError(
            "expected at least 2 floating-point rows [tokens, width] and k of at least 1, got "
            f"{rows.dtype} {list(rows.shape)}, {searched} of them to search, and k={k}"
        )
    points = _Points(rows, _unless_all(among, len(rows)))
    k = min(k, searched - 1)
    own = points.places(of)
    ready = scale_rows(rows, points.among) if scaled is None else scaled
    frame, values = ready.frame, ready.of(points.among)
    if values.shape != (searched, rows.shape[1]):
        raise ValueError(
            f"expected {searched} rows made ready in width {rows.shape[1]}, got "
            f"{list(values.shape)}: make all rows ready that are searched"
        )
    with without_autocast({"cpu", rows.device.type}):
        found = _by_bounds(points, ready, values, own, k)
        if found is None:
            return _searched(points, frame, values, own, k)
        near = Neighbours(found.distances, points.index(found.places))
        left = (~found.certain).nonzero().squeeze(1)
        if len(left) > 0:
            again = _searched(points, frame, values, own[left], k)
            for before, after in zip(near, again, strict=True):
                before[left] = after
        return near


def _by_bounds(
    points: "_Points", ready: ScaledRows, values: Tensor, own: Tensor, k: int
) -> certified.Certified | None:
    """Search by lower bounds of the distances, where that is likely to cost less; None elsewhere.

    What it finds is exact, and says for which of the wanted points.
    """
    if faiss is None or values.device.type != "cpu":
        return None
    exact = functools.partial(_apart, points, ready.frame.unit)
    scale = float(ready.frame.scale)
    if quantised.pays(len(values), values.shape[1], len(own), k):
        integers = ready.integers_of(points.among, len(own), k)
        if integers is not None:
            found = quantised.search(values, own, k, exact, scale, faiss, integers)
            if not quantised.ended_early(found):
                return found
            del integers
            if len(own) == len(values):
                ready.leave_integers(points.among)
    plan = certified.choose(values, len(own), k)
    if plan is None:
        return None
    return certified.search(values, own, k, plan, exact, scale, faiss.knn)


def _searched(
    points: "_Points", frame: "_Frame", values: Tensor, own: Tensor, k: int
) -> Neighbours:
    """Search the wanted points among all, in all coordinates."""
    found = Neighbours(
        torch.empty(len(own), k, dtype=torch.float64, device=own.device),
        torch.empty(len(own), k, dtype=torch.int64, device=own.device),
    )
    count = min(k + 1 + _SLACK, len(points))
    norm = torch.linalg.vector_norm(values, dim=1)
    unsure = torch.zeros(len(own), dtype=torch.bool, device=own.device)
    # Some at a time: of their candidates several copies are held.
    parts = (whole.split(_QUERIES) for whole in (own, *found, unsure))
    for part, distances, indices, unclear in zip(*parts, strict=True):
        near = _ranked(points, part, _candidates(values, part, count), k, frame.unit)
        distances.copy_(near.distances[:, :k])
        indices.copy_(near.indices[:, :k])
        if count < len(points):
            unclear.copy_(_unclear(near, norm[part], values.shape[1], frame.scale, k))
    left = unsure.nonzero().squeeze(1)
    if len(left) > 0:
        again = _certain(points, frame, own[left], found.distances[left, k - 1], k)
        for before, after in zip(found, again, strict=True):
            before[left] = after
    return found


def nearest_among(
    neighbours: Neighbours,
    rows: Tensor,
    members: Tensor,
    k: int,
    *,
    among: Tensor | None = None,
    scaled: ScaledRows | None = None,
) -> Neighbours:
    """Find the k nearest of each member row among the member rows alone.

    Taken from the neighbours among more rows; the search is repeated only for members that have
    fewer than k other members there.

    Args:
        neighbours: Neighbours of the rows `among`, as returned by `nearest`.
        rows: All rows, [tokens, width].
        members: Indices of the member rows, int64, ascending.
        k: Number of neighbours.
        among: Indices of the rows that were searched for `neighbours`, ascending, with every
            member; None for all rows.
        scaled: The rows as `scale_rows` made them ready, with every member; None where they are
            not.

    Returns:
        Neighbours, of shape [members, min(k, members - 1)]; the indices are into `rows`.

    Raises:
        ValueError: There are fewer than two members, `members` or `among` does not name rows in
            ascending order, a member is not among them, or `neighbours` are of other rows.
    """
    if len(members) < 2:
        raise ValueError(f"expected at least 2 member rows, got {len(members)}")
    _unless_all(members, len(rows))
    k = min(k, len(members) - 1)
    is_member = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    is_member[members] = True
    points = _Points(rows, _unless_all(among, len(rows)))
    if len(neighbours.indices) != len(points):
        raise ValueError(
            f"expected neighbours of {len(points)} rows, got those of {len(neighbours.indices)}: "
            "name the rows that were searched as `among`"
        )
    places = points.places(members)
    index = neighbours.indices[places]
    distances = neighbours.distances[places].masked_fill(~is_member[index], torch.inf)
    near = distances.topk(min(k, distances.shape[1]), dim=1, largest=False)
    found = Neighbours(near.values, index.gather(1, near.indices))
    short = found.distances.isinf().any(dim=1).nonzero().squeeze(1)
    if found.distances.shape[1] < k:
        return nearest(rows, k, among=members, scaled=scaled)
    if len(short) > 0:
        again = nearest(rows, k, of=members[short], among=members, scaled=scaled)
        for before, after in zip(found, again, strict=True):
            before[short] = after
    return found


def unique_rows(hidden: Tensor) -> Tensor:
    """Find one row for each distinct content, in ascending order.

    Rows are compared on their values as captured. Equality is exact: a search that reports a
    distance of 0 finds only about half of the copies.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        Indices of these rows, int64, [distinct rows].

    Example:
        >>> unique_rows(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])).tolist()
        [0, 1]
    """
    if hidden.shape[1] == 0:
        return torch.arange(min(len(hidden), 1), dtype=torch.int64, device=hidden.device)
    # Rows that differ in the first column differ: sorting one column decides for most rows.
    _, value, counts = torch.unique(hidden[:, 0], return_inverse=True, return_counts=True)
    tied = (counts[value] > 1).nonzero().squeeze(1)
    alone = (counts[value] == 1).nonzero().squeeze(1)
    return torch.cat([alone, tied[first_of_each(_groups(hidden, tied))]]).sort().values


def content_keys(rows: Tensor, some: Tensor) -> Tensor:
    """Compute a number from the content of each row: equal for equal rows, and otherwise random.

    A hash: the sum over columns of the numbers as integers times random factors, modulo 2^64. Rows
    that differ share it once in 2^64. It stays the same if all rows are multiplied by a power of
    two.

    Args:
        rows: Rows, [tokens, width].
        some: Indices of the rows whose number is wanted, [some].

    Returns:
        int64, [some].

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> one, other, copy = content_keys(rows, torch.arange(3)).tolist()
        >>> one == copy, one == other
        (True, False)
    """
    factors = torch.randint(
        -(2**63),
        2**63 - 1,
        rows.shape[1:],
        generator=torch.Generator("cpu").manual_seed(0),
        dtype=torch.int64,
        device="cpu",
    ).to(rows.device)
    whole = _AS_INTEGERS[rows.element_size()]
    step = rows_in_block(rows.shape[1], rows.device)
    largest = max((float(b.abs().max()) for b in row_blocks(rows) if b.numel()), default=0.0)
    # Two factors, since one can be too large for the type; torch.ldexp takes 30 times as long.
    exponent = -math.frexp(largest)[1]
    one, other = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    # + 0 makes -0 and 0, which are equal, the same.
    keys = torch.empty(len(some), dtype=torch.int64, device=rows.device)
    for target, part in zip(keys.split(step), some.split(step), strict=True):
        block = rows.index_select(0, part).mul_(one).mul_(other).add_(0)
        target.copy_((block.view(whole).long() * factors).sum(dim=1))
    return keys


def _groups(rows: Tensor, some: Tensor) -> Tensor:
    """Label each of some rows, equal rows with the same label."""
    # By a hash: sorting whole rows would need several copies of them.
    keys = content_keys(rows, some)
    step = rows_in_block(rows.shape[1], rows.device)
    blocks = some.split(step)
    _, group = torch.unique(keys, return_inverse=True)
    alike = some[_firsts(group)[group]]
    pairs = zip(blocks, alike.split(step), strict=True)
    if all(torch.equal(rows[part], rows[other]) for part, other in pairs):
        return group
    _, group = torch.unique(rows[some], dim=0, return_inverse=True)
    return group


def first_of_each(group: Tensor) -> Tensor:
    """Find the first member of each group, in ascending order.

    Args:
        group: Labels of the groups, int64, [tokens].

    Returns:
        Indices of these members, int64, [groups].

    Example:
        >>> first_of_each(torch.tensor([7, 3, 7, 3, 1])).tolist()
        [0, 1, 4]
    """
    _, label = torch.unique(group, return_inverse=True)
    return _firsts(label).sort().values


def _firsts(label: Tensor) -> Tensor:
    """Find the first element with label 0, with label 1, and so on."""
    count = int(label.max()) + 1 if len(label) else 0
    order = torch.arange(len(label), dtype=torch.int64, device=label.device)
    first = torch.full((count,), len(label), dtype=torch.int64, device=label.device)
    return first.scatter_reduce(0, label, order, reduce="amin")


def _as_indices(index: Tensor) -> Tensor:
    """Check that a tensor holds indices, and return them as int64."""
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expected indices of rows, int64 [some], got {index.dtype} {list(index.shape)}: for a "
            "mask give mask.nonzero().squeeze(1)"
        )
    return index.long()


def _unless_all(among: Tensor | None, count: int) -> Tensor | None:
    """Check that indices name some of so many rows in ascending order; None where they name all."""
    if among is None:
        return None
    among = _as_indices(among).contiguous()
    inside = (among[:1] >= 0).all() & (among[-1:] < count).all()
    if not bool(inside & (among.diff() > 0).all()):
        raise ValueError(
            f"expected indices of rows from 0 to {count - 1} in ascending order, none of them "
            "twice: give indices.unique()"
        )
    return None if len(among) == count else among


def _find(index: Tensor, among: Tensor, which: str) -> Tensor:
    """Find the places of indices among others, ascending; `which` says in the message of what."""
    places = torch.searchsorted(among, index.contiguous())
    if not bool((among[places.clamp(max=len(among) - 1)] == index).all()):
        raise ValueError(f"expected only indices of the {len(among)} {which}, got others too")
    return places


@dataclass(frozen=True)
class _Points:
    """The rows that are searched: all, or some of them by their indices, without a copy."""

    rows: Tensor
    among: Tensor | None

    def blocks(self, step: int) -> Iterable[Tensor]:
        """Cut the points into blocks of so many."""
        if self.among is None:
            return self.rows.split(step)
        return (self.rows[index] for index in self.among.split(step))

    def __len__(self) -> int:
        return len(self.rows) if self.among is None else len(self.among)

    def index(self, places: Tensor) -> Tensor:
        """Convert places among the points to indices into the rows."""
        return places if self.among is None else self.among[places]

    def places(self, index: Tensor | None) -> Tensor:
        """Convert indices into the rows to places among the points; None gives all places."""
        if index is None:
            return torch.arange(len(self), dtype=torch.int64, device=self.rows.device)
        if self.among is not None:
            return _find(_as_indices(index), self.among, "rows that are searched")
        index = _as_indices(index)
        if not bool(((index >= 0) & (index < len(self))).all()):
            raise ValueError(f"expected indices of rows from 0 to {len(self) - 1}")
        return index


@dataclass(frozen=True)
class _Frame:
    """Centre and scale of the rows, which are subtracted and divided by before a search.

    The scale is a power of two, but for the largest numbers of float64.
    """

    centre: Tensor
    scale: Tensor
    unit: float  # power of two of the order of the scale where that is extreme, else 1

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows.double() - self.centre).div_(self.scale)

    def scale_into(self, target: Tensor, rows: Tensor) -> None:
        """Centre and scale rows in float32, with one rounding, except of numbers near 1e-38.

        Args:
            target: Where they go, [some, width], float32.
            rows: Rows, [some, width].
        """
        _, exponent = math.frexp(float(self.scale))
        if rows.dtype == torch.float64 or abs(exponent) > _MODERATE:
            target.copy_(self(rows))
            return
        # The centre is one of the rows' numbers, and a product with a power of two is exact.
        torch.sub(rows, self.centre.float(), out=target).mul_(2.0 ** (1 - exponent))


def _frame(rows: Tensor) -> _Frame:
    """Choose the centre and the scale of a search."""
    # Any centre near most of the rows will do; a mean would be moved by a few massive rows.
    centre = rows[:: max(1, len(rows) // 63)].double().median(dim=0).values
    # The farthest from the centre is the largest or the smallest of a column: subtraction rounds
    # both ways alike, and no other row has to be converted.
    blocks = rows.split(rows_in_block(4 * rows.shape[1], rows.device))
    ends = torch.cat([torch.stack([block.amax(dim=0), block.amin(dim=0)]) for block in blocks])
    reach = (ends.double() - centre).abs_().max()
    _, exponent = math.frexp(float(reach))
    unit = 1.0 if abs(exponent) <= _ORDINARY else 2.0 ** max(-_LARGEST, min(exponent, _LARGEST))
    power = exponent < sys.float_info.max_exp
    return _Frame(centre, torch.full_like(reach, 2.0**exponent) if power else reach, unit)


def _candidates(scaled: Tensor, own: Tensor, count: int) -> Tensor:
    """Find the `count` points nearest to each wanted one, itself among them, in float32."""
    on_host = faiss is not None and scaled.device.type == "cpu"
    if not on_host or certified.is_slow_in_faiss(len(own), scaled.shape[1]):
        return _expanded(_Points(scaled, None), as_factor, own, count)
    one_by_one = len(own) > 0 and bool((own.diff() == 1).all())
    queries = scaled[own[0] : own[-1] + 1] if one_by_one else scaled[own]  # without a copy
    return torch.from_numpy(faiss.knn(queries.numpy(), scaled.numpy(), count)[1])


def _expanded(
    points: _Points, frame: Callable[[Tensor], Tensor], own: Tensor, count: int
) -> Tensor:
    """Find candidates by |y|^2 - 2xy, in the precision that `frame` returns, block by block."""
    found = [torch.empty(0, count, dtype=torch.int64, device=own.device)]
    for part in own.split(rows_in_block(len(points), own.device)):
        squared, _ = _squared(points, frame, part)
        found.append(squared.topk(count, dim=1, largest=False).indices)
    return torch.cat(found)


def _squared(
    points: _Points, frame: Callable[[Tensor], Tensor], part: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute |y|^2 - 2xy of some points x and all points y, and |y|^2."""
    queries = frame(points.rows[points.index(part)])
    norms = queries.new_empty(len(points))
    # One buffer for all blocks: the allocator would leave gaps between buffers of their own.
    squared = queries.new_empty(len(part), len(points))
    step = rows_in_block(4 * points.rows.shape[1], points.rows.device)
    targets = zip(squared.split(step, dim=1), norms.split(step), strict=True)
    for (target, norm), block in zip(targets, map(frame, points.blocks(step)), strict=True):
        torch.sum(block.square(), dim=1, out=norm)
        target.copy_(torch.addmm(norm[None, :], queries, block.T, alpha=-2))
    return squared, norms


def _certain(points: _Points, frame: _Frame, own: Tensor, reach: Tensor, k: int) -> Neighbours:
    """Find the k nearest of the wanted points, whatever the rounding.

    The expansion in float64 excludes the points that are farther than `reach` by more than its
    rounding. All others are compared by differences, in which nothing is lost.

    Args:
        points: The points that are searched.
        frame: Centre and scale of the expansion.
        own: Places of the wanted points.
        reach: Distance within which each has k others, [wanted].
        k: Number of neighbours.
    """
    found = Neighbours(
        torch.empty(len(own), k, dtype=torch.float64, device=own.device),
        torch.empty(len(own), k, dtype=torch.int64, device=own.device),
    )
    eps = (4 + points.rows.shape[1] ** 0.5) * torch.finfo(torch.float64).eps
    step = rows_in_block(len(points), own.device)
    for part, within, distances, indices in zip(
        own.split(step), (reach / frame.scale).split(step),
        found.distances.split(step), found.indices.split(step), strict=True,
    ):  # fmt: skip
        squared, norms = _squared(points, frame, part)
        # The rounding of a difference of centred rows, of its expansion, and of `reach` itself.
        error = eps * (norms[part, None] + norms)
        near = squared + norms[part, None] <= within.square()[:, None] + 4 * error
        near.scatter_(1, part[:, None], value=False)
        row, column = near.nonzero(as_tuple=True)
        apart = _differences(points, part[row], column, frame.unit)
        # In order of distance, and stably in order of the row: each row's nearest come first.
        order = apart.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        counts = near.sum(dim=1)
        first = counts.cumsum(0) - counts
        chosen = order[first[:, None] + torch.arange(k, dtype=torch.int64, device=own.device)]
        distances.copy_(apart[chosen])
        indices.copy_(points.index(column[chosen]))
    return found


def _differences(points: _Points, one: Tensor, other: Tensor, unit: float) -> Tensor:
    """Compute the distances of pairs of points by differences of the rows as given."""
    apart = torch.empty(len(one), dtype=torch.float64, device=one.device)
    step = rows_in_block(points.rows.shape[1], one.device)
    for target, *pair in zip(apart.split(step), one.split(step), other.split(step), strict=True):
        x, y = (points.rows[points.index(place)].double() for place in pair)
        norms(x.sub_(y), unit, out=target)
    return apart


def _apart(points: _Points, unit: float, own: Tensor, candidates: Tensor) -> Tensor:
    """Compute the distances of wanted points to their candidates, [wanted, count]."""
    return distances_to(points.rows, points.index(own), points.index(candidates), unit)


def _ranked(points: _Points, own: Tensor, candidates: Tensor, k: int, unit: float) -> Neighbours:
    """Sort candidates by their distance in float64.

    Returns:
        Neighbours, of shape [wanted, k + 1]; the last column is the farthest candidate.
    """
    count = candidates.shape[1]
    # A row that is its own candidate is infinitely far from itself, and comes last.
    values, order = nearest_first(_apart(points, unit, own, candidates), points.index(candidates))
    last = count - 1 - values[:, -1:].isinf().long()
    kept = torch.cat(
        [torch.arange(k, dtype=torch.int64, device=last.device).expand(len(last), -1), last], dim=1
    )
    return Neighbours(values.gather(1, kept), order.gather(1, kept))


def _unclear(found: Neighbours, norm: Tensor, width: int, scale: Tensor, k: int) -> Tensor:
    """Mark the wanted rows for which float32 may have found the wrong candidates.

    A row that is no candidate seemed no nearer than the farthest candidate. In truth it can be
    nearer than the k-th where the two are closer than the rounding of the expansion, which grows
    with the norms: among near-duplicates, and for rows far from most others.

    Returns:
        True for these, [wanted].
    """
    kth, farthest = (found.distances[:, column] / scale for column in (k - 1, k))
    norm = norm.double()
    rounding = (4 + width**0.5) * torch.finfo(torch.float32).eps
    error = rounding * (norm.square() + (norm + farthest).square())
    return farthest.square() - kth.square() <= 2 * error + certified.UNDERFLOW
