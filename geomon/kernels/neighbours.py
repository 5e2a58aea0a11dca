"""Distances to the nearest neighbours: candidates in float32, decisions in float64.

FAISS expands |x|^2 + |y|^2 - 2xy in float32, which loses small distances of near-duplicates and of
rows far from the origin. Rows are therefore centred in float64, a few more candidates than
neighbours are taken, and their distances are recomputed in float64 from differences of the original
rows. If rounding may have excluded a true neighbour, the row is searched again: the expansion in
float64 excludes rows that are certainly too far, and all others are compared by differences. Every
distance is thus right, however close near-duplicates are.

FAISS or torch proposes the candidates. FAISS brings a linear algebra library of its own, which is
slow on some processors, so the first searches of each size try both, and the faster one does the
others. The result does not depend on it. On accelerators, torch searches. Extra memory is one
float32 copy of the searched rows, the result, and blocks.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import row_blocks, rows_in_block, sort_each
from geomon.kernels.products import factor_type, without_autocast

faiss: Any
try:
    import faiss
except ImportError:  # torch searches instead
    faiss = None

# Candidates beyond k and the row itself, at least 1. With more of them fewer rows remain unclear,
# but every search costs more.
_SLACK = 2
# Rows are scaled if the exponent of their largest number exceeds this: squares must fit float32.
_MODERATE = 30
# Largest exponent of a scale, so that its inverse fits float64 too.
_LARGEST = 1022
# Queries that are searched at a time.
_QUERIES = 4096
# Fewest queries per thread: starting a thread takes 0.1 ms.
_QUERIES_OF_A_THREAD = 256
# Smallest stack of a thread, in bytes: with 64 kB, linear algebra libraries crash the process.
_SMALL_STACK = 2**20
# Times that each search is tried for a kind of size, before the faster one does the others.
_TRIALS = 5
# Longest rows that numpy sorts in registers, and the bits of a place in float64.
_SHORT, _PLACE = 256, 2**29 - 1
# Exceeds the total loss of float32 squares that underflow, below 1e-38.
_UNDERFLOW = 1e-30

_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_Search = Callable[[Tensor, Tensor, int], Tensor]
# Seconds that each search took in its trials, by kind of size.
_taken: dict[tuple[Any, ...], dict[_Search, list[float]]] = {}


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

    Rows at equal distance come in the order of their indices. Equal rows are neighbours at distance
    0, so remove them first with `unique_rows`.

    Args:
        rows: Finite points, [tokens, width], any floating-point dtype.
        k: Number of neighbours; fewer are returned if there are fewer other rows.
        of: Indices of the rows whose neighbours are wanted, all among the searched rows. Defaults
            to all searched rows.
        among: Indices of the rows to search, ascending. Defaults to all rows.

    Returns:
        Neighbours of shape [len(of), min(k, searched rows - 1)], with indices into `rows`.

    Raises:
        ValueError: If `rows` is not a floating-point matrix, there are fewer than two rows to
            search, `k` is below 1, `among` is not ascending, or a row in `of` is not searched.

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
    if among is None:
        among = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
    else:
        among = _ascending(among, len(rows))
    points = _Points(rows, among, *_centre_and_scale(rows))
    own = _places(among if of is None else of, among)
    with without_autocast({"cpu", rows.device.type}):
        values = points.in_float32()
        # Some at a time, because several copies of their candidates are held.
        found = [
            _search(points, values, part, min(k, searched - 1)) for part in own.split(_QUERIES)
        ]
    distances, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Neighbours(distances.mul_(points.scale), indices)


def pass_over(distances: Tensor, passed: Tensor, count: int) -> Tensor:
    """Return the nearest of listed neighbours, skipping some of them.

    If too few remain, the farthest remaining one replaces those that are not listed.

    Args:
        distances: Distances to the listed neighbours, [rows, listed].
        passed: True for neighbours to skip, [rows, listed].
        count: Number of neighbours.

    Returns:
        Distances, ascending, [rows, count]; 0 for a row without remaining neighbours.

    Example:
        >>> listed = torch.tensor([[1.0, 2.0, 3.0]])
        >>> pass_over(listed, torch.tensor([[True, False, False]]), 3).tolist()
        [[2.0, 3.0, 3.0]]
    """
    left = sort_each(distances.masked_fill(passed, torch.inf))[:, :count]
    known = left.masked_fill(left.isinf(), 0)
    return torch.where(left.isinf(), known.amax(dim=1, keepdim=True), left)


def copies_of(hidden: Tensor) -> Tensor:
    """Find the first row with the same content as each row.

    Rows are compared by their captured values. Equality is exact, whereas a search that reports a
    distance of 0 finds only about half of the copies.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        Index of the first equal row, which can be the row itself, int64, [tokens].

    Example:
        >>> copies_of(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])).tolist()
        [0, 1, 0]
    """
    if hidden.shape[1] == 0:
        return torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    # Most rows already differ in the first column, so sorting one column decides for them.
    _, value, counts = torch.unique(hidden[:, 0], return_inverse=True, return_counts=True)
    tied = (counts[value] > 1).nonzero().squeeze(1)
    first = torch.arange(len(hidden), dtype=torch.int64, device=hidden.device)
    first[tied] = _first_equal(hidden, tied)
    return first


def unique_rows(copies: Tensor) -> Tensor:
    """Find one row for each distinct content, in ascending order.

    Args:
        copies: For each row, the first row with the same content (see `copies_of`), int64,
            [tokens].

    Returns:
        Indices of these rows, int64, [distinct rows].

    Example:
        >>> unique_rows(copies_of(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]))).tolist()
        [0, 1]
    """
    order = torch.arange(len(copies), dtype=torch.int64, device=copies.device)
    return (copies == order).nonzero().squeeze(1)


def content_keys(rows: Tensor, some: Tensor) -> Tensor:
    """Compute a hash of each row's content: equal for equal rows, and otherwise random.

    It is the sum over columns of the numbers, read as integers, times random factors, modulo 2^64.
    Different rows share a hash with probability 2^-64. The hash stays the same if all rows are
    multiplied by a power of two.

    Args:
        rows: Rows, [tokens, width].
        some: Indices of the rows to hash, [some].

    Returns:
        int64, [some].

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> one, other, copy = content_keys(rows, torch.arange(3)).tolist()
        >>> one == copy, one == other
        (True, False)
    """
    kind: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, rows.shape[1:], generator=generator, **kind)
    factors = factors.to(rows.device)
    whole = _AS_INTEGERS[rows.element_size()]
    step = rows_in_block(rows.shape[1], rows.device)
    largest = max((float(b.abs().max()) for b in row_blocks(rows) if b.numel()), default=0.0)
    # Two factors, because one may exceed the type; torch.ldexp takes 30 times as long.
    exponent = -math.frexp(largest)[1]
    one, other = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    # + 0 turns -0 into 0, which equals it.
    keys = torch.empty(len(some), dtype=torch.int64, device=rows.device)
    for target, part in zip(keys.split(step), some.split(step), strict=True):
        block = rows.index_select(0, part).mul_(one).mul_(other).add_(0)
        target.copy_((block.view(whole).long() * factors).sum(dim=1))
    return keys


def _first_equal(rows: Tensor, some: Tensor) -> Tensor:
    """Find for each of some rows the first of them with the same content."""
    # By hash, because sorting whole rows would need several copies of them.
    _, group = torch.unique(content_keys(rows, some), return_inverse=True)
    first = some[_firsts(group)[group]]
    step = rows_in_block(rows.shape[1], rows.device)
    pairs = zip(some.split(step), first.split(step), strict=True)
    if all(torch.equal(rows[one], rows[other]) for one, other in pairs):
        return first
    _, group = torch.unique(rows[some], dim=0, return_inverse=True)
    return some[_firsts(group)[group]]


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
    """Return indices as contiguous int64, after checking that they are indices."""
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expected indices of rows, int64 [some], got {index.dtype} {list(index.shape)}: for a "
            "mask, pass mask.nonzero().squeeze(1)"
        )
    return index.long().contiguous()


def _ascending(among: Tensor, count: int) -> Tensor:
    """Return indices after checking that they are ascending and below `count`."""
    among = _as_indices(among)
    if not ((among[0] >= 0) & (among[-1] < count) & (among.diff() > 0).all()):
        raise ValueError(
            f"expected indices of rows from 0 to {count - 1} in ascending order, without "
            "repetition: pass indices.unique()"
        )
    return among


def _places(index: Tensor, among: Tensor) -> Tensor:
    """Convert indices of rows to places among the searched rows."""
    index = _as_indices(index)
    places = torch.searchsorted(among, index)
    if not (among[places.clamp(max=len(among) - 1)] == index).all():
        raise ValueError(f"expected only indices of the {len(among)} searched rows, got others too")
    return places


@dataclass(frozen=True)
class _Points:
    """The searched rows, with the centre and scale of the search."""

    rows: Tensor
    among: Tensor  # indices of the searched rows
    centre: Tensor
    scale: float  # a power of two; 1 except for very large or small numbers

    def __len__(self) -> int:
        return len(self.among)

    def rounding(self, dtype: torch.dtype) -> float:
        """Bound the rounding error of an expansion, relative to its squares."""
        return float((4 + self.rows.shape[1] ** 0.5) * torch.finfo(dtype).eps)

    def at(self, places: Tensor) -> Tensor:
        """Copy points in float64."""
        # Indexing with [] takes twice as long.
        return self.rows.index_select(0, self.among[places]).double()

    def centred(self, places: Tensor) -> Tensor:
        """Return points about the centre, scaled, in float64."""
        return self.at(places).sub_(self.centre).mul_(1 / self.scale)

    def in_float32(self) -> Tensor:
        """Copy all points about the centre, scaled, in float32."""
        values = self.rows.new_empty((len(self), self.rows.shape[1]), dtype=torch.float32)
        # An eighth of a block, which stays in the cache.
        step = rows_in_block(8 * values.shape[1], values.device)
        order = torch.arange(len(self), dtype=torch.int64, device=values.device)
        for target, part in zip(values.split(step), order.split(step), strict=True):
            target.copy_(self.centred(part))
        return values

    def distances_to(self, own: Tensor, others: Tensor) -> Tensor:
        """Compute scaled distances to others, [own, count], from differences of original rows."""
        count, width = others.shape[1], self.rows.shape[1]
        distances = torch.empty(others.shape, dtype=torch.float64, device=others.device)
        # A quarter of a block, which stays in the cache.
        step = rows_in_block(4 * count * width, others.device)
        for target, x, y in zip(
            distances.split(step), own.split(step), others.split(step), strict=True
        ):
            difference = self.at(y.flatten()).view(-1, count, width).sub_(self.at(x)[:, None])
            if self.scale != 1:  # so that squares neither vanish nor overflow
                difference.mul_(1 / self.scale)
            torch.linalg.vector_norm(difference, dim=2, out=target)
        return distances


def _centre_and_scale(rows: Tensor) -> tuple[Tensor, float]:
    """Choose a centre to subtract from rows, and a power of two to divide them by."""
    # Any centre near most rows will do, but a few massive rows would move a mean.
    centre = rows[:: max(1, len(rows) // 63)].double().median(dim=0).values
    # torch.aminmax takes four times as long.
    ends = torch.stack([rows.amin(dim=0), rows.amax(dim=0)]).double()
    _, exponent = math.frexp(float((ends - centre).abs().max()))
    if abs(exponent) <= _MODERATE:
        return centre, 1.0
    return centre, 2.0 ** max(-_LARGEST, min(exponent, _LARGEST))


def _search(points: _Points, values: Tensor, own: Tensor, k: int) -> Neighbours:
    """Find the k nearest of the wanted points, at scaled distances."""
    candidates = _candidates(values, own, min(k + 1 + _SLACK, len(points)))
    near = _ranked(points, own, candidates)
    found = Neighbours(near.distances[:, :k], near.indices[:, :k])
    if candidates.shape[1] == len(points):
        return found
    # Other points seemed no nearer than the last candidate. They can still be nearer than the k-th
    # if the last is farther by less than the rounding of the expansion, which grows with the norms.
    # (The very last column can be the row itself.)
    kth, last = near.distances[:, k - 1], near.distances[:, -2]
    norm = torch.linalg.vector_norm(values, dim=1)[own].double()
    error = points.rounding(torch.float32) * (norm.square() + (norm + last).square())
    unclear = last.square() - kth.square() <= 2 * error + _UNDERFLOW
    if unclear.any():
        again = _certain(points, own[unclear], found.distances[unclear, -1], k)
        found.distances[unclear], found.indices[unclear] = again
    return found


def searched_by(device: torch.device) -> str:
    """Say which libraries search neighbours.

    Args:
        device: Device of the rows.

    Example:
        >>> searched_by(torch.device("cuda"))
        'torch'
    """
    if len(_searches(device)) == 1:
        return "torch"
    return f"FAISS {faiss.__version__} or torch, the faster one in trials"


def _candidates(values: Tensor, own: Tensor, count: int) -> Tensor:
    """Find the `count` points that seem nearest to each wanted point, judged in float32."""
    sizes = (len(own), *values.shape, count, torch.get_num_threads())
    kind = (values.device.type, factor_type(values.device), *map(int.bit_length, sizes))
    taken = _taken.setdefault(kind, {search: [] for search in _searches(values.device)})
    # Those that need more trials come first.
    search = min(taken, key=lambda one: (len(taken[one]) >= _TRIALS, min(taken[one], default=0.0)))
    began = time.perf_counter()
    found = search(values, own, count)
    if len(taken[search]) < _TRIALS:
        taken[search].append(time.perf_counter() - began)
    return found


def _searches(device: torch.device) -> tuple[_Search, ...]:
    """Return the searches that are possible on a device."""
    return (_by_torch,) if faiss is None or device.type != "cpu" else (_by_torch, _by_faiss)


def _by_torch(values: Tensor, own: Tensor, count: int) -> Tensor:
    """Search with torch, block by block."""
    kind = factor_type(values.device)
    squares = torch.linalg.vector_norm(values, dim=1).to(kind).square()
    # All points at once, unless they have to be converted.
    step = len(values) if kind == values.dtype else rows_in_block(4 * values.shape[1], own.device)
    parts = own.split(rows_in_block(len(values), own.device))
    whole = squares.new_empty(len(parts[0]), len(values))
    found = []
    for part in parts:
        blocks = (block.to(kind) for block in values.split(step))
        expanded = _expand(values[part].to(kind), blocks, squares, out=whole[: len(part)])
        found.append(_smallest(expanded, count))
    return torch.cat(found)


def _smallest(rows: Tensor, count: int) -> Tensor:
    """Find the places of the smallest numbers of each row, in any order.

    On the host, long rows are cut into strides: the smallest numbers lie in the strides with the
    smallest minima, which are found in the same way.
    """
    width = rows.shape[1]
    if rows.device.type != "cpu" or count >= _SHORT // 2:
        return rows.topk(count, dim=1, largest=False, sorted=False).indices
    order = torch.arange(width, dtype=torch.int64, device="cpu")
    if width <= _SHORT:
        # Sorted as numbers in float64, with the place in the bits that float32 leaves at 0.
        keys = rows.float().double().view(torch.int64).bitwise_or_(order).view(torch.float64)
        return sort_each(keys)[:, :count].view(torch.int64) & _PLACE
    step = 2 ** math.ceil(math.log2(width / _SHORT))
    strides = width // step
    whole = strides * step
    minima = rows[:, :whole].view(len(rows), step, strides).amin(dim=1)
    places = (_smallest(minima, count)[:, :, None] + order[:whole:strides]).flatten(1)
    if whole < width:
        places = torch.cat([places, order[whole:].expand(len(rows), -1)], dim=1)
    return places.gather(1, _smallest(rows.gather(1, places), count))


def _by_faiss(values: Tensor, own: Tensor, count: int) -> Tensor:
    """Search with FAISS in threads of our own, where each thread searches alone.

    FAISS would start OpenMP threads that belong to the calling thread, and a process forked from it
    (a worker of a data loader) would hang when it searches itself. The number of threads is a
    per-thread setting, so the training's threads keep theirs.
    """
    rows, every = values[own].numpy(), values.numpy()
    threads = min(torch.get_num_threads(), max(1, len(own) // _QUERIES_OF_A_THREAD))
    if faiss.omp_get_max_threads() > 1 or threads > 1:
        cuts = [part.numpy() for part in torch.from_numpy(rows).chunk(threads)]
        found: list[Future[Any]] = []
        with ThreadPoolExecutor(threads, "geomon", faiss.omp_set_num_threads, (1,)) as pool:
            # BLAS needs larger stacks than some programs give, and some threads cannot be started.
            if not 0 < threading.stack_size() < _SMALL_STACK:
                with contextlib.suppress(RuntimeError):
                    found += [pool.submit(faiss.knn, part, every, count) for part in cuts]
        if found:
            return torch.cat([torch.from_numpy(each.result()[1]) for each in found])
    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(1)
        return torch.from_numpy(faiss.knn(rows, every, count)[1])
    finally:
        faiss.omp_set_num_threads(before)


def _expand(queries: Tensor, blocks: Iterable[Tensor], squares: Tensor, *, out: Tensor) -> Tensor:
    """Compute |y|^2 - 2xy for queries x and all points y, given y in blocks and |y|^2."""
    start = 0
    for block in blocks:
        some = slice(start, start + len(block))
        torch.addmm(squares[some], queries, block.T, alpha=-2, out=out[:, some])
        start += len(block)
    return out


def _ranked(points: _Points, own: Tensor, candidates: Tensor) -> Neighbours:
    """Sort candidates by distance in float64, ties by index, with the row itself last."""
    candidates = sort_each(candidates)
    distances = points.distances_to(own, candidates).masked_fill_(
        candidates == own[:, None], torch.inf
    )
    distances, order = distances.sort(dim=1, stable=True)
    return Neighbours(distances, points.among[candidates.gather(1, order)])


def _certain(points: _Points, own: Tensor, reach: Tensor, k: int) -> Neighbours:
    """Find the k nearest of points that have k others within `reach`, regardless of rounding."""
    order = torch.arange(len(points), dtype=torch.int64, device=own.device)
    blocks = order.split(rows_in_block(4 * points.rows.shape[1], own.device))
    squares = torch.cat([points.centred(block).square().sum(dim=1) for block in blocks])
    rounding = points.rounding(torch.float64)
    step = rows_in_block(len(points), own.device)
    found = []
    whole = squares.new_empty(min(step, len(own)), len(points))
    for part, within in zip(own.split(step), reach.split(step), strict=True):
        # Rounding of the centred rows, of the expansion, and of `reach` itself. Points beyond the
        # limit are excluded; all others are compared by differences, which lose nothing.
        limit = within.square()[:, None] + 4 * rounding * (squares[part, None] + squares)
        centred = map(points.centred, blocks)
        expanded = _expand(points.centred(part), centred, squares, out=whole[: len(part)])
        near = expanded + squares[part, None] <= limit
        near.scatter_(1, part[:, None], value=False)
        row, column = near.nonzero(as_tuple=True)
        distance = points.distances_to(part[row], column[:, None]).squeeze(1)
        # Sort by distance, then stably by row, so that each row's nearest come first.
        nearest_first = distance.argsort(stable=True)
        nearest_first = nearest_first[row[nearest_first].argsort(stable=True)]
        counts = near.sum(dim=1)
        chosen = nearest_first[(counts.cumsum(0) - counts)[:, None] + order[:k]]
        found.append((distance[chosen], points.among[column[chosen]]))
    return Neighbours(*(torch.cat(parts) for parts in zip(*found, strict=True)))
