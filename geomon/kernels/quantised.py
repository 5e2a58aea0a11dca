"""Nearest rows by lower bounds of their distances from 8-bit integers: exact where certified.

Processors multiply 8-bit integers four times as fast as float32, and exactly. So the rows are cut
off at a largest number, which never lengthens a distance, and rounded to integers from -127 to 127.
Let c be the number of integers in a unit, q the integers of a row, e how far its rounding moved it:

    c |x - y| >= |q_x - q_y| - e_x - e_y

The squares |q_x - q_y|^2 are exact. A row's candidates are the rows whose integers are nearer than
a limit; all others are farther than what the limit leaves after the rounding. The limit comes from
the smallest square in each of many groups of rows: k + 1 of these are of k + 1 rows. Of the
candidates, float32 differences find the few whose distances are computed in float64, and a row is
*certified* when its k-th distance is below both bounds. A row that is not is left to another
search.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.kernels._blocks import BLOCK, rows_in_block, sum_of
from geomon.kernels._candidates import nearest_first
from geomon.kernels._eight_bits import LARGEST, is_fast, multiply
from geomon.kernels.certified import (
    UNDERFLOW,
    Certified,
    Exact,
    coordinates,
    leading,
    needed,
    root_of_rounding,
)

# Share of the sum of squares that may be cut off: fewer integers for the few large numbers leave
# more for all others. With 0.001 to 0.01 there are the fewest candidates on hidden states, trained
# or not, and where a few coordinates are much larger than the others; on noise with less.
_CUT_OFF = 0.001
# Numbers from which that is estimated, and rows, but those that are so much longer than most.
_SAMPLED, _SAMPLED_ROWS, _MASSIVE = 32_768, 512, 3.0
# Numbers in float32 beyond which products with them would end.
_STEEPEST = 1e30
# Share of the points for which the first limit is enough; for the others it is set again.
_ENOUGH = 0.9
# Squares of so many integers add up to less than 2^24, exactly in float32; and norms in float32 are
# wrong where squares vanish, below this.
_EXACT, _SHORTEST = 1024, 1e-15
# Rows in a group, the most that leave four groups for each neighbour. Fewer cost more.
_SIZES = (32, 16, 8, 4)
_GROUPS = 4  # for each neighbour
# Wanted rows in one product, after which the share that is certified is looked at; fewer where that
# would be more squares, but not less. With several threads fewer at a time take longer: those of
# FAISS and of torch wait for each other.
_QUERIES, _SQUARES, _FEWEST = 1024, 4 * BLOCK, 32
# Candidates of a row beyond which it is not certified, in units of k and at least.
_MOST, _AT_LEAST = 16, 128
# Share of certified rows below which the other search alone costs less; and the wanted rows that
# are tried first, with the share of these that is far below it.
_LEAST = 0.5
_TRIED, _HOPELESS = 128, 0.25
# Fewest coordinates, and fewest points and wanted points, for which this is faster; and most
# coordinates for which sums of products, and twice them, have 32 bits.
_NARROWEST, _POINTS, _WIDEST = 24, 1024, 20_000
# Directions that are tried, the width from which on, and rows of that trial, half of them for the
# directions.
_DIRECTIONS, _WIDE, _POOL = 31, 256, 1024
# Candidates in all coordinates, in units of k; and how many more the rounding to integers makes.
_USUAL, _LOOSER = 2.0, 1.3
# Nanoseconds: of a product of integers, a difference in float32, and a coordinate in float64 along
# all directions, for each coordinate; and of the trial for each column of the rows.
_PRODUCT, _DIFFERENCE, _READING, _TRIAL = 0.0041, 0.2, 3.3, 10_000.0
# Squares of points that are none: beyond all others.
_NONE = 2**30

_EPS = torch.finfo(torch.float32).eps


class _Integers(NamedTuple):
    """Points as integers, in random order.

    Attributes:
        rows: Integers of each point, filled up with zeros to whole groups, [places, width], int8.
        square: Squared norm of the integers at each place, [places], int32.
        place: Which point stands at each place, [places], int64.
        at: At which place each point stands, [points], int64.
        norm: Norm of each point, at least, [points], float64.
        moved: How far the rounding may have moved each point, in integers, [points], float64.
        per_unit: Number of integers in a unit.
        lost: How much farther apart than two points their coordinates may be by rounding, in units
            of the sum of the norms.
        size: Number of places in a group.
    """

    rows: Tensor
    square: Tensor
    place: np.ndarray
    at: Tensor
    norm: np.ndarray
    moved: np.ndarray
    per_unit: float
    lost: float
    size: int


class _Squares(NamedTuple):
    """Squares of integers, without those of the wanted points themselves, int32.

    Attributes:
        part: Places of the wanted points, [wanted].
        grouped: Of each wanted point and each group of points, [wanted x groups, size].
        smallest: Smallest square of each group, [wanted, groups].
    """

    part: np.ndarray
    grouped: np.ndarray
    smallest: np.ndarray


class _Near(NamedTuple):
    """The nearest candidates of wanted points, by differences in float32.

    Attributes:
        places: Which points the nearest k + 2 are, the k-th and the last at their places;
            -1 where there are fewer, [wanted, k + 2].
        squared: Their squared distances in float32, infinite where there are fewer,
            [wanted, k + 2].
        complete: Whether every point within the limit was a candidate, [wanted].
    """

    places: np.ndarray
    squared: np.ndarray
    complete: np.ndarray

    def of(self, rows: np.ndarray) -> "_Near":
        """Select some of the wanted points."""
        return _Near(*(whole[rows] for whole in self))


def pays(points: int, width: int, wanted: int, k: int) -> bool:
    """Say whether integers find the neighbours faster than float32 on this machine.

    Args:
        points: Number of points.
        width: Number of coordinates.
        wanted: Number of points whose neighbours are wanted.
        k: Number of neighbours.
    """
    wide = width >= _NARROWEST and min(points, wanted) >= _POINTS
    return wide and fits(points, width, k) and is_fast()


def fits(points: int, width: int, k: int) -> bool:
    """Say whether there are enough groups of points, and sums of products have 32 bits.

    Args:
        points: Number of points.
        width: Number of coordinates.
        k: Number of neighbours.
    """
    # Products of one coordinate alone are wrong in torch 2.13.
    return points >= _SIZES[-1] * _GROUPS * k and 2 <= width <= _WIDEST


def search(
    values: Tensor, own: Tensor, k: int, exact: Exact, scale: float, faiss: Any
) -> Certified:
    """Find the k nearest other points of some points, and say of which that is certain.

    Among points at the same distance the one with the lowest place comes first.

    Args:
        values: Points, centred and divided by `scale`, at most 1 in every coordinate,
            [points, width], float32.
        own: Places of the points whose neighbours are wanted, [wanted].
        k: Number of neighbours.
        exact: True distances in float64, infinite from a point to itself.
        scale: Number by which the points were divided.
        faiss: The library, for differences in float32.
    """
    found = Certified(
        torch.empty(len(own), k, dtype=torch.float64, device="cpu"),
        torch.zeros(len(own), k, dtype=torch.int64, device="cpu"),
        torch.zeros(len(own), dtype=torch.bool, device="cpu"),
    )
    if len(own) == 0:
        return found
    bounds = _bounds(values, len(own), k)
    integers = _integers(values, bounds, k)
    if integers is None:
        return found
    generator = torch.Generator("cpu").manual_seed(0)
    # In random order, so that the first ones stand for all.
    order = torch.randperm(len(own), generator=generator, dtype=torch.int64, device="cpu")
    if bounds.leading is not None:
        # The others with their neighbours, whose candidates then are in the cache.
        later = order[_QUERIES:]
        order[_QUERIES:] = later[bounds.leading[own[later]].argsort()]
    places = len(integers.rows)
    step = max(_FEWEST, min(_QUERIES, _SQUARES // places))
    squares = torch.empty(step, places, dtype=torch.int32, device="cpu")
    rank = _first_rank(k)
    done = 0
    parts = order[:_TRIED], order[_TRIED:_QUERIES], order[_QUERIES:]
    for some in (some for part in parts for some in part.split(step) if len(some) > 0):
        mine = own[some]
        near, rank = _near(values, integers, mine, k, rank, squares, faiss)
        candidates = torch.from_numpy(near.places[:, : k + 1])
        candidates = torch.where(candidates < 0, mine[:, None], candidates)
        distances, nearest = nearest_first(exact(mine, candidates), candidates)
        found.distances[some], found.places[some] = distances[:, :k], nearest[:, :k]
        kth = distances[:, k - 1] / scale
        alone = _no_other(integers, mine.numpy(), near, kth, values.shape[1])
        found.certain[some] = torch.from_numpy(near.complete) & alone
        done += len(some)
        if done >= _TRIED:
            share = float(found.certain[order[:done]].double().mean())
            if share < (_LEAST if done >= _QUERIES else _HOPELESS):
                break
    return found


def ended_early(found: Certified) -> bool:
    """Say whether so few points were certain that the search ended before all were searched.

    Args:
        found: What was found.
    """
    return float(found.certain.double().mean()) < _LEAST


class _Bounds(NamedTuple):
    """Coordinates in which distances are lower bounds.

    Attributes:
        values: Coordinates, [points, coordinates], float32.
        lost: How much farther apart than two points their coordinates may be by rounding, in units
            of the sum of the norms.
        leading: Coordinate along the leading direction, [points]; None where it is not known.
    """

    values: Tensor
    lost: float
    leading: Tensor | None


def _bounds(values: Tensor, wanted: int, k: int) -> _Bounds:
    """Choose coordinates in which distances are lower bounds: all, or few where that costs less."""
    directions = _directions(values, wanted, k)
    if directions is None:
        return _Bounds(values, 2 * _EPS, None)
    # Turned among themselves at random, no direction carries much more than the others.
    count = directions.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    turned = torch.randn(count, count, generator=generator, dtype=torch.float64, device="cpu")
    short = coordinates(values, directions @ torch.linalg.qr(turned).Q)
    # Norms of the rest are alike, and their differences alone count.
    short[:, -1] -= short[:, -1].median()
    lost = 3 * _EPS + root_of_rounding(values.shape[1])
    return _Bounds(short, lost, values @ directions[:, 0].float())


def _directions(values: Tensor, wanted: int, k: int) -> Tensor | None:
    """Try a few leading directions on some rows; None where all coordinates cost less."""
    points, width = values.shape
    pool = min(points, _POOL)
    # As near as the k-th of all points is the one of so many of these.
    rank = max(1, round(k * pool / points))
    if width < _WIDE or pool < max(_POOL, 2 * rank):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(points, generator=generator, dtype=torch.int64, device="cpu")
    drawn = values[order[:pool]]
    directions = leading(drawn[: pool // 2], _DIRECTIONS, generator)
    within = needed(drawn, directions, [_DIRECTIONS], rank)[0] * (points / pool) * _LOOSER
    most = max(_MOST * k, _AT_LEAST)
    candidates = float(torch.where(within < most, within, points).mean())
    # Nanoseconds of one core of 2024, for each wanted point; only their ratios matter.
    here = points * _PRODUCT * _DIRECTIONS + width * (
        _DIFFERENCE * candidates + points / wanted * _READING + _TRIAL / wanted
    )
    whole = points * _PRODUCT * width + width * _DIFFERENCE * _USUAL * k
    return directions if here < whole else None


def _integers(values: Tensor, bounds: _Bounds, k: int) -> _Integers | None:
    """Cut points off, round them to integers, and put them in random order into groups."""
    count, width = bounds.values.shape
    largest = _cut_off(bounds.values)
    if largest == 0:
        return None  # nearly all numbers are 0
    per_unit = float(np.float32(min(LARGEST / largest, _STEEPEST)))
    size = next(size for size in _SIZES if count >= size * _GROUPS * k)
    places = -(-count // size) * size
    # Rows that are near each other often stand together, and would share a group.
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
    rows = torch.zeros(places, width, dtype=torch.int8, device="cpu")
    square = torch.full((places,), _NONE, dtype=torch.int32, device="cpu")
    norm = torch.empty(count, dtype=torch.float32, device="cpu")
    error = torch.empty_like(norm)
    step = rows_in_block(4 * values.shape[1], values.device)
    targets = (whole.split(step) for whole in (rows[:count], square[:count], norm, error))
    for part, target, own, length, moved in zip(order.split(step), *targets, strict=True):
        torch.linalg.vector_norm(values[part], dim=1, out=length)
        number = bounds.values[part]
        number.mul_(per_unit).clamp_(-LARGEST, LARGEST)
        nearest = number.round()
        target.copy_(nearest)
        torch.linalg.vector_norm(number.sub_(nearest), dim=1, out=moved)
        squares = nearest.square_().split(_EXACT, dim=1)
        own.copy_(sum_of(some.sum(dim=1).double() for some in squares))
    at = torch.empty_like(order)
    at[order] = torch.arange(count, dtype=torch.int64, device="cpu")
    summed = _summed(values.shape[1])
    return _Integers(
        rows, square, torch.nn.functional.pad(order, (0, places - count)).numpy(), at,
        (norm.double() * summed + _SHORTEST)[at].numpy(),
        # Float32 rounds a number of up to 127 by less than 127 times e.
        (error.double() * summed + math.sqrt(width) * LARGEST * _EPS)[at].numpy(),
        per_unit, bounds.lost, size,
    )  # fmt: skip


def _cut_off(values: Tensor) -> float:
    """Choose the largest number, by what is lost of the squares of some rows above it."""
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(values), generator=generator, dtype=torch.int64, device="cpu")
    some = values[order[:_SAMPLED_ROWS]]
    norm = torch.linalg.vector_norm(some, dim=1)
    numbers = some[norm <= _MASSIVE * norm.median()].abs().flatten()
    numbers = numbers[:: max(1, len(numbers) // _SAMPLED)]
    descending = np.sort(numbers.numpy())[::-1].astype(np.float64)
    sums, squares = descending.cumsum(), (descending**2).cumsum()
    # Of the squares of what is above the i-th number.
    lost = squares - 2 * descending * sums + descending**2 * np.arange(1, len(descending) + 1)
    found = np.flatnonzero(lost <= _CUT_OFF * squares[-1])
    return float(descending[found[-1]])


def _near(
    values: Tensor, integers: _Integers, part: Tensor, k: int, rank: int, squares: Tensor,
    faiss: Any,
) -> tuple[_Near, int]:  # fmt: skip
    """Find the candidates of wanted points, and the nearest of them.

    Args:
        values: Points, [points, width], float32.
        integers: Points as integers.
        part: Places of the wanted points, [wanted].
        k: Number of neighbours.
        rank: How many groups are within the first limit.
        squares: Where squares go, [wanted or more, places], int32.
        faiss: The library.

    Returns:
        The candidates, and how many groups would have been enough for most of the points.
    """
    block = squares[: len(part)]
    at = integers.at[part]
    multiply(integers.rows[at], integers.rows.T, out=block)
    torch.sub(integers.square, block, alpha=2, out=block)
    own = integers.square[at].double().numpy()
    smallest = block.view(len(part), -1, integers.size).amin(dim=2).numpy()
    # Within this, so many groups have a point: k others at least, and few beyond them.
    limit = np.partition(smallest, rank, axis=1)[:, rank].clip(max=_NONE - 1)
    seen = _Squares(part.numpy(), block.numpy().reshape(-1, integers.size), smallest)
    near = _within(values, integers, seen, np.arange(len(part)), limit, k, faiss)
    bound = _limit(integers, seen.part, near.squared[:, k - 1], own, values.shape[1])
    groups = smallest.shape[1]
    ranks = np.sort(np.count_nonzero(smallest <= bound[:, None], axis=1)[near.complete])
    enough = int(ranks[int(_ENOUGH * len(ranks))]) if len(ranks) > 0 else _first_rank(k)
    again = np.flatnonzero((bound > limit) & near.complete)
    if len(again) > 0:
        later = _within(
            values, integers, seen, again, bound[again], k, faiss,
            beyond=limit[again], known=near.of(again),
        )  # fmt: skip
        for whole, some in zip(near, later, strict=True):
            whole[again] = some
    return near, max(min(enough, groups // 2), min(k + 2, groups - 1))


def _first_rank(k: int) -> int:
    """Choose how many groups are within the first limit, before any was tried."""
    return k + k // 2 + 1


def _limit(
    integers: _Integers, part: np.ndarray, kth: np.ndarray, own: np.ndarray, width: int
) -> np.ndarray:
    """Bound the squares of integers of the k nearest, without those of the wanted point.

    Let x be a wanted point, in exact numbers, and y one at a distance of at most t, so that
    |x| + |y| <= s = 2|x| + t. Rounding to float32 moves each of the two by at most 2^-24 of its
    norm: their float32 values are at most t + e s / 2 apart (e = 2^-23), and so much is `kth` off,
    which is of float32 values too. Coordinates of few directions lose as much again twice, after
    their computation and with the median of the last, and in float64 what `root_of_rounding`
    bounds. So `lost` is twice what may be lost of all coordinates, and 1 e above it of few.
    The integers are at most c times as far apart as the values, and what the rounding to integers
    moved the two.

    Args:
        integers: Points as integers.
        part: Places of the wanted points, [wanted].
        kth: Squared distance in float32 within which each has k others, [wanted].
        own: Squared norms of the integers of the wanted points, [wanted].
        width: Number of coordinates.

    Returns:
        Limits, [wanted], int32.
    """
    distance = np.sqrt(kth * _summed(width) + UNDERFLOW, dtype=np.float64)
    distance += integers.lost * (2 * integers.norm[part] + distance)
    distance = integers.per_unit * distance + integers.moved[part] + integers.moved.max()
    limit: np.ndarray = (distance**2 - own + 1).clip(max=_NONE - 1).astype(np.int32)
    return limit


def _summed(width: int) -> float:
    """Bound the quotient of a sum of squared differences and what float32 makes of it.

    Each square is off by three roundings, and the sum of them by one for each, in any order.
    """
    return 1 + (width + 8) * _EPS


def _within(
    values: Tensor, integers: _Integers, seen: _Squares, rows: np.ndarray, limit: np.ndarray,
    k: int, faiss: Any, beyond: np.ndarray | None = None, known: _Near | None = None,
) -> _Near:  # fmt: skip
    """Find the points whose squares are within a limit, and the nearest of them.

    Args:
        values: Points, [points, width], float32.
        integers: Points as integers.
        seen: Squares of wanted points and all points.
        rows: Which of the wanted points, [rows].
        limit: Limit for each of these, [rows].
        k: Number of neighbours.
        faiss: The library.
        beyond: Limit within which all are known, [rows].
        known: The nearest of these.
    """
    groups = seen.smallest.shape[1]
    row, group = np.nonzero(seen.smallest[rows] <= limit[:, None])
    squares = np.take(seen.grouped, rows[row] * groups + group, axis=0)
    inside = squares <= limit[row][:, None]
    if beyond is not None:
        inside &= squares > beyond[row][:, None]
    # Of points with too many candidates none is looked at: of noise they would be nearly all pairs.
    counts = np.bincount(row, inside.sum(axis=1), len(rows)).astype(np.int64)
    complete = counts <= max(_MOST * k, _AT_LEAST)
    inside &= complete[row][:, None]
    counts[~complete] = 0
    hit, offset = np.nonzero(inside)
    position = np.arange(len(hit)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.full((len(rows), max(k + 2, int(counts.max()))), -1)
    places[row[hit], position] = integers.place[group[hit] * integers.size + offset]
    part = seen.part[rows]
    places[places == part[:, None]] = -1
    squared = _differences(values, part, places, faiss)
    if known is not None:
        places = np.concatenate([known.places, places], axis=1)
        squared = np.concatenate([known.squared, squared], axis=1)
    order = np.argpartition(squared, (k - 1, k + 1), axis=1)[:, : k + 2]
    return _Near(
        np.take_along_axis(places, order, axis=1), np.take_along_axis(squared, order, axis=1),
        complete,
    )  # fmt: skip


def _differences(
    values: Tensor, part: np.ndarray, candidates: np.ndarray, faiss: Any
) -> np.ndarray:
    """Compute squared distances of points to candidates by differences in float32.

    Args:
        values: Points, [points, width], float32.
        part: Places of the points that have candidates, [wanted].
        candidates: Places of these, -1 for none, [wanted, count].
        faiss: The library.

    Returns:
        Squared distances, infinite to none, [wanted, count].
    """
    apart = np.full(candidates.shape, np.inf, dtype=np.float32)
    points = values.numpy()
    step = rows_in_block(points.shape[1], values.device)
    for start in range(0, len(part), step):
        some = slice(start, start + step)
        queries = points[part[some]]
        # Which stay alive while FAISS has their addresses.
        given = (apart[some], queries, points, candidates[some])
        faiss.fvec_L2sqr_by_idx(
            *map(faiss.swig_ptr, given), points.shape[1], len(queries), candidates.shape[1]
        )
    return apart


def _no_other(
    integers: _Integers, mine: np.ndarray, near: _Near, distance: Tensor, width: int
) -> Tensor:
    """Mark the wanted points whose candidates beyond the nearest are all farther than a distance.

    Args:
        integers: Points as integers.
        mine: Places of the wanted points, [wanted].
        near: Their nearest candidates.
        distance: Distance to the k-th nearest of them, [wanted], float64.
        width: Number of coordinates.
    """
    within = distance.numpy() * (1 + 2 * _EPS) + 4 * _EPS * integers.norm[mine]
    return torch.from_numpy(near.squared[:, -1] > within**2 * _summed(width) + UNDERFLOW)
