"""Nearest rows by lower bounds of their distances: exact where certified, at a part of the cost.

With p orthonormal directions Q, a row x has the coordinates Q'x and one more, the norm of the rest
|x - QQ'x|. The distance of two rows in these p + 1 coordinates is a *lower bound* of their
distance, by Pythagoras and the triangle inequality, whatever the directions. So the rows are
searched in p + 1 coordinates instead of all: candidates come in the order of their bounds, their
true distances are computed, and a row is *certified* as soon as its k-th true distance is below the
bound of the last candidate, by more than the rounding. A row that is not certified is left to
another search.
What is gained depends on the rows. A trial on a few hundred of them estimates how many candidates
each row needs, and a count of operations chooses the number of directions and of candidates, or
none of this; where few rows of a block of 4,096 are certified, the search ends with it.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import rows_in_block
from geomon.kernels._candidates import nearest_first

# Numbers of directions, and the widths from which on they are worth a trial. With the norm of the
# rest these are 32, 64 ... coordinates; with 16, the product in FAISS takes longer than with 32.
_WIDTHS = {31: 256, 63: 256, 127: 1024}
_EXTRA = 8  # directions of the range finder beyond those that are kept
# Rows of the trial, those of them from which the directions are made, and those that are tried.
_POOL, _DIRECTING, _TRIED = 1024, 512, 64
# Rows that are searched at a time. FAISS takes as many, and smaller products can be much slower.
_QUERIES = 4096
# A cost of less than this share of the other search's is a gain; estimates are not better.
_WORTH = 0.85
# Nanoseconds on one core of 2024; only their ratios matter. For each pair of rows: of a coordinate,
# and of comparing. For each row: of a candidate in the search, and of a coordinate of a candidate's
# true distance. For each coordinate of a row: of reading it in float64.
_PRODUCT, _COMPARISON = 0.0204, 1.1
_CANDIDATE, _DIFFERENCE, _READING = 250.0, 1.1, 2.0
# OpenBLAS has another way for products of fewer multiplications, here four times as slow, and FAISS
# multiplies with so many points at a time: torch is used instead. Below the last two numbers FAISS
# stays faster: it takes differences for so few wanted points, and in so few coordinates the
# comparisons, not the products, take most of the time.
_SMALL, _SLOWER, _POINTS = 2**27, 4.0, 1024
_BY_PRODUCTS, _MANY = 8, 256

# Squares in float32 of numbers up to 1 end at 1e-38; far above all that they lose together.
UNDERFLOW = 1e-30

Exact = Callable[[Tensor, Tensor], Tensor]
"""Distances of points to candidates, [wanted] and [wanted, count] -> [wanted, count]."""


class Plan(NamedTuple):
    """How rows are searched by lower bounds.

    Attributes:
        directions: Orthonormal columns, [width, p], float64.
        candidates: Largest number of candidates of a row, itself among them.
        least: Share of certified rows below which the other search alone costs less.
    """

    directions: Tensor
    candidates: int
    least: float


class Certified(NamedTuple):
    """What the search by lower bounds found.

    Attributes:
        distances: True distances to the nearest, ascending, [wanted, k], float64.
        places: Which points those are, [wanted, k], int64.
        certain: Which rows are certified, [wanted], bool; the others hold any numbers.
    """

    distances: Tensor
    places: Tensor
    certain: Tensor


def choose(values: Tensor, wanted: int, k: int) -> Plan | None:
    """Choose directions and a number of candidates by a trial and a count of operations.

    Args:
        values: Points, centred, at most 1 in every coordinate, [points, width], float32.
        wanted: Number of points whose neighbours are wanted.
        k: Number of neighbours.

    Returns:
        The cheapest plan; None where nothing would be gained.
    """
    points, width = values.shape
    pool = min(points, _POOL)
    counts = [p for p, narrowest in _WIDTHS.items() if width >= narrowest and pool >= 4 * p]
    rungs = [rung for rung in _rungs(k) if rung < pool]
    if not counts or not rungs:
        return None
    full = _pairs_cost(points, wanted, width) + _DIFFERENCE * width * (k + 3)
    least = _pairs_cost(points, wanted, counts[0] + 1) + _DIFFERENCE * width * rungs[0]
    least = wanted * least + _coordinates_cost(points, width, counts[0])
    if least + _directions_cost(pool, width, counts[-1] + _EXTRA) > _WORTH * wanted * full:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = values[
        torch.randperm(points, generator=generator, dtype=torch.int64, device="cpu")[:pool]
    ]
    directions = leading(drawn[:_DIRECTING], counts[-1], generator)
    # Among more rows there are more candidates below the same bound, and nearer neighbours: between
    # one and four times as many in 4,096 rows as in 1,024 of them, and about twice on most layers.
    growth = (points / pool) ** 0.5
    cheapest = _WORTH * wanted * full
    plan = None
    # A thousandth for the rounding.
    distance = 1.001 * nearest_of_trial(drawn, k).distance[:, None]
    for p, (_, apart) in zip(counts, lower_bounds(drawn, directions, counts), strict=True):
        need = growth * (apart <= distance).sum(dim=1).double()
        for tried in range(1, len(rungs) + 1):
            short = _pairs_cost(points, wanted, p + 1)
            short += _candidates_cost(width, rungs[:tried], need)
            rest = float((need >= rungs[tried - 1]).double().mean()) * full
            cost = _coordinates_cost(points, width, p) + wanted * (short + rest)
            if cost < cheapest:
                cheapest = cost
                plan = Plan(directions[:, :p], rungs[tried - 1], min(short / full, 1.0))
    return plan


def search(
    values: Tensor, own: Tensor, k: int, plan: Plan, exact: Exact, scale: float, knn: Any
) -> Certified:
    """Find the k nearest other points of some points, and say of which that is certain.

    Among points at the same distance the one with the lowest place comes first.

    Args:
        values: Points, centred and divided by `scale`, at most 1 in every coordinate,
            [points, width], float32.
        own: Places of the points whose neighbours are wanted, [wanted].
        k: Number of neighbours.
        plan: Directions and number of candidates.
        exact: True distances in float64, infinite from a point to itself.
        scale: Number by which the points were divided.
        knn: FAISS's search: queries, points and a number -> squared distances and places.
    """
    short = coordinates(values, plan.directions)
    found = Certified(
        torch.empty(len(own), k, dtype=torch.float64, device="cpu"),
        torch.zeros(len(own), k, dtype=torch.int64, device="cpu"),
        torch.zeros(len(own), dtype=torch.bool, device="cpu"),
    )
    generator = torch.Generator("cpu").manual_seed(0)
    # In random order, so that the first block stands for all.
    order = torch.randperm(len(own), generator=generator, dtype=torch.int64, device="cpu")
    for block in order.split(_QUERIES):
        mine = own[block]
        near = knn(short[mine].numpy(), short.numpy(), min(plan.candidates, len(values)))
        squared, candidates = map(torch.from_numpy, near)
        norm = torch.linalg.vector_norm(short[mine], dim=1, dtype=torch.float64)
        limit = _Limit(norm, values.shape[1], short.shape[1])
        left = torch.arange(len(block), dtype=torch.int64, device="cpu")
        apart = torch.empty(len(block), 0, dtype=torch.float64, device="cpu")
        start = 0
        for stop in _rungs(k):
            if stop > candidates.shape[1]:
                break
            new = exact(mine[left], candidates[left, start:stop])
            apart = torch.cat([apart, new], dim=1)
            start = stop
            kth = apart.kthvalue(k, dim=1).values / scale
            sure = squared[left, stop - 1] > limit.of(kth, left)
            done = left[sure]
            distances, places = nearest_first(apart[sure], candidates[done, :stop])
            rows = block[done]
            found.distances[rows], found.places[rows] = distances[:, :k], places[:, :k]
            found.certain[rows] = True
            left, apart = left[~sure], apart[~sure]
            if len(left) == 0:
                break
        if float(found.certain[block].double().mean()) < plan.least:
            break
    return found


def coordinates(values: Tensor, directions: Tensor) -> Tensor:
    """Compute the coordinates in which distances are lower bounds.

    Args:
        values: Points, [points, width], float32.
        directions: Orthonormal columns, [width, p], float64.

    Returns:
        The coordinates along the directions, and the norm of the rest, [points, p + 1], float32.
    """
    p = directions.shape[1]
    short = torch.empty(len(values), p + 1, dtype=torch.float32, device=values.device)
    # The rest is a difference of squares, in which float32 would lose half of its digits.
    step = rows_in_block(4 * values.shape[1], values.device)
    for target, block in zip(short.split(step), values.split(step), strict=True):
        exact = block.double()
        along = exact @ directions
        rest = exact.square_().sum(dim=1) - along.square().sum(dim=1)
        target[:, :p].copy_(along)
        target[:, p].copy_(rest.clamp_(min=0).sqrt_())
    return short


def root_of_rounding(width: int) -> float:
    """Bound how far float64 moves the last coordinate, in units of the norm.

    Args:
        width: Number of coordinates of the points.
    """
    return 8 * math.sqrt(width * torch.finfo(torch.float64).eps)


class _Limit(NamedTuple):
    """Squared lower bound in float32 above which no point can be as near as a distance.

    Let x be a wanted point, in exact numbers, and y one at a distance of at most t, so that
    |y| <= |x| + t and |x| + |y| <= s = 2|x| + t.

    Rounding to float32, before the coordinates and after, moves each of the two by at most
    e / 2 = 2^-24 of its norm. In float64, the difference of squares under the root of the last
    coordinate is off by at most 2 w (1 + sqrt(p)) 2^-53 of the squared norm (w: width), and by as
    much again where the directions are not quite orthonormal; its root by the root of that, which
    h = 8 sqrt(w 2^-52) exceeds for p up to 200. Everything else in float64 is far smaller, the
    rounding of t too. So the computed coordinates of the two are at most t + (e + h) s apart.
    FAISS adds up m products of m coordinates for each of two norms and a product, in any order, or
    m squared differences: it is off by less than (m + 8) e s^2, twice what is possible.
    A point whose computed square is above the sum of both is farther than t.
    """

    norm: Tensor
    width: int
    size: int

    def of(self, distance: Tensor, places: Tensor) -> Tensor:
        """Compute the limit for some points, [places].

        Args:
            distance: Distance t of each, [places], float64.
            places: Which of the points those are.
        """
        eps = torch.finfo(torch.float32).eps
        reach = 2 * self.norm[places] + distance
        moved = (eps + root_of_rounding(self.width)) * reach
        return (distance + moved).square() + (self.size + 8) * eps * reach.square() + UNDERFLOW


def _rungs(k: int) -> list[int]:
    """List the numbers of candidates, a row itself among them, after which it may be certified."""
    rungs = [1 + k + max(1, k // 2)]
    while rungs[-1] < max(60, 2 * k):
        rungs.append(rungs[-1] + max(3, rungs[-1] // 2))
    return rungs


def leading(drawn: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Find directions that carry most of the variance of some rows, the leading one first.

    One step of a randomised range finder: any orthonormal directions give lower bounds.

    Args:
        drawn: Some of the points, [drawn, width], float32.
        count: Number of directions.
        generator: Random state.

    Returns:
        Orthonormal columns, [width, count], float64.
    """
    norm = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
    # A few massive rows would leave nothing of the others in float32.
    drawn = drawn * (norm.median() / norm).nan_to_num(nan=1.0).clamp(max=1)
    wide = min(count + _EXTRA, *drawn.shape)
    start = torch.randn(
        drawn.shape[1], wide, generator=generator, dtype=torch.float32, device="cpu"
    )
    basis = torch.linalg.qr((drawn.T @ (drawn @ start)).double()).Q
    along = (drawn @ basis.float()).double()
    order = torch.linalg.eigh(along.T @ along).eigenvectors.flip(1)
    return basis @ order[:, :count]


class NearOfTrial(NamedTuple):
    """Distances among the rows of a trial.

    Attributes:
        distance: Distance to the k-th nearest, of some of the rows, [tried].
        farther: Distance to the 2k-th nearest, or to the farthest, [tried].
        usual: Median of the distances.
    """

    distance: Tensor
    farther: Tensor
    usual: Tensor


def nearest_of_trial(drawn: Tensor, k: int) -> NearOfTrial:
    """Compute the distances to the k-th nearest rows of a trial, and the usual distance.

    Args:
        drawn: Some of the points, in random order, [pool, width], float32.
        k: Number of neighbours, fewer than rows.
    """
    apart = torch.cdist(drawn[:_TRIED], drawn)
    near = apart.topk(min(2 * k + 1, len(drawn)), dim=1, largest=False).values
    return NearOfTrial(near[:, k], near[:, -1], apart[0].median())


def lower_bounds(
    drawn: Tensor, directions: Tensor, counts: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute lower bounds of the distances of the first rows of a trial to all of them.

    In float32: only the certificate takes account of the rounding.

    Args:
        drawn: Some of the points, in random order, [pool, width], float32.
        directions: Orthonormal columns, the leading one first, [width, p].
        counts: Numbers of directions.

    Yields:
        For each of these, the coordinates of all rows, [pool, count + 1], and the bounds,
        [tried, pool].
    """
    along = drawn @ directions.float()
    square = drawn.square().sum(dim=1)
    for p in counts:
        rest = (square - along[:, :p].square().sum(dim=1)).clamp(min=0).sqrt()
        short = torch.cat([along[:, :p], rest[:, None]], dim=1)
        yield short, torch.cdist(short[:_TRIED], short)


def is_slow_in_faiss(wanted: int, coordinates: int) -> bool:
    """Say whether torch finds the neighbours of so few wanted points faster than FAISS.

    Args:
        wanted: Number of points whose neighbours are wanted.
        coordinates: Number of coordinates.
    """
    of_products = wanted >= _BY_PRODUCTS and coordinates >= _MANY
    return of_products and _is_small(wanted, coordinates)


def _is_small(wanted: int, coordinates: int) -> bool:
    """Say whether OpenBLAS has few multiplications in one product of FAISS's."""
    return min(wanted, _QUERIES) * _POINTS * coordinates < _SMALL


def _pairs_cost(points: int, wanted: int, coordinates: int) -> float:
    """Estimate the nanoseconds in which one row is compared with all points."""
    product = _PRODUCT * coordinates
    if _is_small(wanted, coordinates) and not is_slow_in_faiss(wanted, coordinates):
        product *= _SLOWER
    return points * (product + _COMPARISON)


def _candidates_cost(width: int, rungs: list[int], needed: Tensor) -> float:
    """Estimate the nanoseconds that the candidates of one row take.

    Args:
        width: Width of the rows.
        rungs: Numbers of candidates after which a row may be certified.
        needed: Candidates that each of some rows needs.
    """
    compared = rungs[0] + sum(
        float((needed >= before).double().mean()) * (after - before)
        for before, after in itertools.pairwise(rungs)
    )
    return _CANDIDATE * rungs[-1] + _DIFFERENCE * width * compared


def _coordinates_cost(points: int, width: int, p: int) -> float:
    """Estimate the nanoseconds of the coordinates of all points."""
    return points * width * (_READING + 2 * _PRODUCT * p)


def _directions_cost(pool: int, width: int, count: int) -> float:
    """Estimate the nanoseconds of the directions and of the trial."""
    products = (3 * _DIRECTING + pool) * width * count + _TRIED * pool * (width + count)
    return _PRODUCT * (products + 8 * width * count**2 + 20 * count**3)
