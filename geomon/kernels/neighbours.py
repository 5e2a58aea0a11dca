"""Distances to the nearest neighbours: searched fast, certified, decided in float64.

A search by |x|^2 + |y|^2 - 2xy in float32 is fast and loses the small distances of rows far from
the origin and of near-duplicates; a search in a few coordinates is faster and orders the rows by a
lower bound of the distance. So searches only give candidates: a row's own entry is dropped by its
index, the distances of the candidates are computed in float64 from differences of the rows as
given, and those are sorted. A row is certified where its k-th distance lies below what every other
row can have, with rounding counted in. Rows that are not certified get the next search: float32,
float64, differences, after which no row is uncertain.
The memory beyond the rows themselves is one float32 copy of them, the result, and blocks of a few
MB.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import rows_in_block
from geomon.kernels._search import Candidates, Cloud, Points, Wanted, cloud_of
from geomon.kernels._sketch import choose_sketch

# Numbers in one block of candidates' coordinates: 2 MB in float64, the fastest of 2^16 to 2^20.
_BLOCK = 262_144
# Wanted rows whose candidates are held at a time.
_ROWS = 16_384

_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Neighbours(NamedTuple):
    """The k nearest other rows of each row.

    Attributes:
        distances: Distances to the neighbours, ascending, [tokens, k], float64.
        indices: Indices of the neighbours among the rows, [tokens, k], int64.
    """

    distances: Tensor
    indices: Tensor


def nearest(
    rows: Tensor, k: int, *, of: Tensor | None = None, among: Tensor | None = None
) -> Neighbours:
    """Compute the Euclidean distances of rows to their k nearest other rows.

    Equal rows are neighbours at distance 0: leave them out first with `unique_rows`.

    Args:
        rows: Finite points, [tokens, width], any floating-point dtype.
        k: Number of neighbours; fewer come back where there are fewer other rows.
        of: Indices of the rows whose neighbours are wanted, each one of the searched rows; None
            for all searched rows.
        among: Indices of the rows that are searched, ascending; None for all rows.

    Returns:
        Neighbours, of shape [searched rows (or len(of)), min(k, searched rows - 1)]; the indices
        are into `rows`.

    Raises:
        ValueError: `rows` is not a floating-point matrix, there are fewer than two rows to search,
            or `k` is below 1.

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
    points = Points(rows, None if searched == len(rows) else among)
    own, k = points.places(of), min(k, searched - 1)
    cloud = cloud_of(points)
    sketch = choose_sketch(cloud, own, k)
    searches: list[Callable[[Wanted], Candidates]] = [] if sketch is None else [sketch]
    searches += [cloud.single, cloud.double, cloud.differences]
    found = Neighbours(
        rows.new_full((len(own), k), torch.inf, dtype=torch.float64),
        torch.empty(len(own), k, dtype=torch.int64, device=rows.device),
    )
    left = torch.arange(len(own), dtype=torch.int64, device=rows.device)
    for search in searches:
        left = torch.cat([_step(cloud, search, own, part, found) for part in left.split(_ROWS)])
        if len(left) == 0:
            break
    return found


def nearest_among(
    neighbours: Neighbours,
    rows: Tensor,
    members: Tensor,
    k: int,
    *,
    among: Tensor | None = None,
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

    Returns:
        Neighbours, of shape [members, min(k, members - 1)]; the indices are into `rows`.

    Raises:
        ValueError: There are fewer than two members.
    """
    if len(members) < 2:
        raise ValueError(f"expected at least 2 member rows, got {len(members)}")
    k = min(k, len(members) - 1)
    is_member = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    is_member[members] = True
    places = members if among is None else torch.searchsorted(among, members.contiguous())
    index = neighbours.indices[places]
    distances = neighbours.distances[places].masked_fill(~is_member[index], torch.inf)
    near = distances.topk(min(k, distances.shape[1]), dim=1, largest=False)
    found = Neighbours(near.values, index.gather(1, near.indices))
    short = found.distances.isinf().any(dim=1).nonzero().squeeze(1)
    if found.distances.shape[1] < k:
        return nearest(rows, k, among=members)
    if len(short) > 0:
        again = nearest(rows, k, of=members[short], among=members)
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


def _groups(rows: Tensor, some: Tensor) -> Tensor:
    """Label each of some rows, equal rows with the same label."""
    # The label is a hash: the sum over columns of the numbers as integers times random factors,
    # modulo 2^64. Rows that differ share it once in 2^64. Sorting whole rows would need several
    # copies of them.
    factors = torch.randint(
        -(2**63),
        2**63 - 1,
        rows.shape[1:],
        generator=torch.Generator("cpu").manual_seed(0),
        dtype=torch.int64,
        device="cpu",
    ).to(rows.device)
    whole = _AS_INTEGERS[rows.element_size()]
    step = rows_in_block(rows.shape[1])
    blocks = some.split(step)
    # + 0 makes -0 and 0, which are equal, the same.
    keys = torch.empty(len(some), dtype=torch.int64, device=rows.device)
    for target, part in zip(keys.split(step), blocks, strict=True):
        target.copy_(((rows[part] + 0).view(whole).long() * factors).sum(dim=1))
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


def _step(
    cloud: Cloud,
    search: Callable[[Wanted], Candidates],
    own: Tensor,
    some: Tensor,
    found: Neighbours,
) -> Tensor:
    """Search the neighbours of some of the wanted rows, and keep what is found.

    Args:
        cloud: The points.
        search: Search for candidates.
        own: Places of all wanted rows.
        some: Which of them are searched.
        found: Neighbours of all wanted rows, in which those of `some` are replaced.

    Returns:
        Those of `some` that are not certified.
    """
    k = found.distances.shape[1]
    wanted = Wanted(own[some], found.distances[some, k - 1] / cloud.frame.scale, k)
    candidates = search(wanted)
    ranked = _ranked(cloud, wanted, candidates)
    for whole, part in zip(found, ranked, strict=True):
        whole[some] = part
    kth = ranked.distances[:, k - 1] / cloud.frame.scale
    return some[~cloud.certified(wanted.own, candidates, kth)]


def _ranked(cloud: Cloud, wanted: Wanted, candidates: Candidates) -> Neighbours:
    """Sort candidates by their distance in float64: those that can be among the k nearest.

    Returns:
        Neighbours, of shape [wanted, k].
    """
    points, scale, k = cloud.points, cloud.frame.scale, wanted.k
    row, index = points.index(wanted.own), points.index(candidates.places)
    distances = torch.full(index.shape, torch.inf, dtype=torch.float64, device=index.device)
    distances[:, :k] = _distances_to_each(points.rows, row, index[:, :k])
    kth = distances[:, :k].amax(dim=1) / scale
    limit = kth.square() + cloud.error(wanted.own, kth, candidates.rounding)
    some, column = (candidates.squared[:, k:] <= limit[:, None]).nonzero(as_tuple=True)
    column = column + k
    distances[some, column] = _distances(points.rows, row[some], index[some, column])
    order = distances.sort(dim=1)
    return Neighbours(order.values[:, :k].contiguous(), index.gather(1, order.indices[:, :k]))


def _distances_to_each(rows: Tensor, wanted: Tensor, others: Tensor) -> Tensor:
    """Compute distances in float64, from wanted rows to the others of each, [wanted, others]."""
    count, width = others.shape[1], rows.shape[1]
    distances = torch.empty(others.shape, dtype=torch.float64, device=rows.device)
    step = max(1, _BLOCK // (count * width))
    # Allocated once: the allocator does not find again what is freed between blocks.
    taken = rows.new_empty(min(step, len(wanted)) * count, width)
    exact = torch.empty_like(taken, dtype=torch.float64)
    for start in range(0, len(wanted), step):
        block = others[start : start + step]
        part = slice(0, block.numel())
        torch.index_select(rows, 0, block.flatten(), out=taken[part])
        difference = exact[part].copy_(taken[part]).view(len(block), count, width)
        difference.sub_(rows[wanted[start : start + step], None])
        torch.linalg.vector_norm(difference, dim=-1, out=distances[start : start + step])
    return distances


def _distances(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute distances in float64 between rows of two lists of indices, [pairs]."""
    return _distances_to_each(rows, first, second[:, None]).squeeze(1)
