"""Nearest rows by lower bounds of their distances from 8-bit integers: exact where certified.

Processors multiply 8-bit integers four times as fast as float32, and exactly. So the rows are cut
off at a largest number, which never lengthens a distance, and rounded to integers from -127 to 127.
Let c be the number of integers in a unit, q the integers of a row, e how far its rounding moved it:

    c |x - y| >= |q_x - q_y| - e_x - e_y

The squares |q_x - q_y|^2 are exact. A row's candidates are the rows whose integers are nearer than
a limit; all others are farther than what the limit leaves after the rounding. The limit comes from
the smallest square in each of many groups of rows: k + 1 of these are of k + 1 rows. The integers
serve several searches among the same rows, or among some of them. They may be of few coordinates,
in which distances are lower bounds too: those in float32 then leave fewer candidates. Of the
candidates, float32 differences find the few whose distances are computed in float64, and a row is
*certified* when its k-th distance is below both bounds. A row that is not is left to another
search.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.kernels._blocks import BLOCK, row_blocks, rows_in_block, sum_of
from geomon.kernels._candidates import nearest_first
from geomon.kernels._eight_bits import LARGEST, is_fast, multiply
from geomon.kernels.certified import (
    UNDERFLOW,
    Certified,
    Exact,
    leading,
    lower_bounds,
    nearest_of_trial,
)
from geomon.kernels.products import as_factor

# Share of the sum of squares that may be cut off: fewer integers for the few large numbers leave
# more for all others. With 0.001 to 0.01 there are the fewest candidates on hidden states, trained
# or not, and where a few coordinates are much larger than the others; on noise with less.
_CUT_OFF = 0.001
# Numbers from which that is estimated, and rows, but those that are so much longer than most.
_SAMPLED, _SAMPLED_ROWS, _MASSIVE = 32_768, 512, 3.0
# Columns whose products are added up at a time where coordinates are computed.
_COLUMNS = 64
# Numbers in float32 beyond which products with them would end.
_STEEPEST = 1e30
# Shares of the points for which the first limit is enough, of which the cheapest is chosen; for the
# others it is set again.
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
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
# Squares in one product of the points that are tried first. Where nothing will be certified nearly
# all of them are looked at, and lists of them take several times their memory.
_TRIAL_SQUARES = BLOCK // 2
# Candidates of a row beyond which it is not certified: in units of k, at least, and where there are
# few coordinates, which noise has not, of how many points one.
_MOST, _AT_LEAST, _FULL = 16, 128, 16
# Candidates of all rows that are listed without a look at how many each has, in units of k.
_LISTED = 8
# Candidates that are kept beyond the k + 2 nearest: one for so many of k.
_SPARE = 16
# Share of certified rows below which the other search alone costs less; and the wanted rows that
# are tried first, with the share of these that is far below it.
_LEAST = 0.5
_TRIED, _HOPELESS = 128, 0.25
# Fewest coordinates, and fewest points and wanted points, for which this is faster; and most
# coordinates for which sums of products, and twice them, have 32 bits.
_NARROWEST, _POINTS, _WANTED, _WIDEST = 24, 1024, 128, 20_000
# Numbers of directions that are tried, and the widths from which on: more of them cost more for
# each coordinate of a row and leave fewer candidates. With 127 the trial costs what is gained. Rows
# of the trial, half of them for the directions; and the share of the usual distance beyond which
# the nearest row says that no direction is of use.
_DIRECTIONS = {31: 256, 63: 1024}
_WIDE, _POOL, _ALIKE = 256, 1024, 0.85
# Candidates in all coordinates, in units of k; and of how many beyond the first limit those in few
# leave one.
_USUAL, _LOOSER = 3.0, 2.0
# Nanoseconds for each coordinate: of a product of integers and one in float32, of a difference in
# float32, of reading a number and of taking it along a direction; and of a candidate beside that.
_PRODUCT, _IN_FLOAT, _DIFFERENCE = 0.0045, 0.04, 0.15
_READING, _ALONG, _CANDIDATE = 1.0, 0.025, 120.0
# Nanoseconds for a point whose limit is set again.
_AGAIN = 2500.0
# Squares of points that are none: beyond all others.
_NONE = 2**30

_EPS = torch.finfo(torch.float32).eps


class Few(NamedTuple):
    """Points in few coordinates, in which distances are lower bounds.

    Attributes:
        values: Coordinates, [points, coordinates], float32.
        moved: How far their computation may have moved each point, [points], float64.
        leading: Coordinate along the leading direction, [points].
    """

    values: Tensor
    moved: Tensor
    leading: Tensor


class Integers(NamedTuple):
    """Points as integers, in random order.

    Attributes:
        rows: Integers of each point, filled up with zeros to whole groups, [places, width], int8.
        square: Squared norm of the integers at each place, [places], int32.
        place: Which point stands at each place, [places], int64.
        at: At which place each point stands, [points], int64.
        norm: Norm of each point, at least, [points], float64.
        moved: How far the rounding may have moved each point, in integers, [points], float64.
        per_unit: Number of integers in a unit.
        few: The few coordinates that were rounded to integers; None where these were all.
        wanted: Number of points for whose search the coordinates were chosen.
    """

    rows: Tensor
    square: Tensor
    place: np.ndarray
    at: Tensor
    norm: np.ndarray
    moved: np.ndarray
    per_unit: float
    few: "Few | None"
    wanted: int

    def of(self, some: Tensor) -> "Integers":
        """Select some of the points.

        Args:
            some: Places of these points among all, ascending.
        """
        order = self.at[some].argsort()
        here = self.at[some][order]
        rows, square = _filled(len(some), self.rows.shape[1])
        torch.index_select(self.rows, 0, here, out=rows[: len(some)])
        torch.index_select(self.square, 0, here, out=square[: len(some)])
        kept = some.numpy()
        few = None if self.few is None else Few(*(whole[some] for whole in self.few))
        return Integers(
            rows, square, *_places(order, len(rows)), self.norm[kept], self.moved[kept],
            self.per_unit, few, self.wanted,
        )  # fmt: skip


class _Squares(NamedTuple):
    """Squared distances of integers, without the squared norm of the wanted points themselves.

    Attributes:
        whole: To the point at each place, [wanted, places], int32.
        smallest: Smallest of each group of places side by side, [wanted, groups].
    """

    whole: np.ndarray
    smallest: np.ndarray


class _Reach(NamedTuple):
    """How far the rounding may have moved any point whose norm is at most a limit.

    Attributes:
        norm: Norm of each point, ascending, [points].
        moved: The most that the points up to this one were moved, in integers, [points].
        moved_few: The same of few coordinates by their computation, [points].
    """

    norm: np.ndarray
    moved: np.ndarray
    moved_few: np.ndarray

    def last(self, longest: np.ndarray) -> np.ndarray:
        """Find the last of the points up to some norms."""
        found: np.ndarray = np.searchsorted(self.norm, longest, side="right") - 1
        return found.clip(min=0)


class _Limit(NamedTuple):
    """Squares beyond which no point can be one of the k nearest.

    Attributes:
        of_integers: Of integers, without the squared norm of the wanted point, [wanted], int32.
        of_few: In few coordinates, [wanted]; infinite where there are all.
    """

    of_integers: np.ndarray
    of_few: np.ndarray


def _reach(integers: Integers) -> _Reach:
    """Sort the points by their norm, with the most that those up to each were moved."""
    order = integers.norm.argsort()
    few = np.zeros(len(order)) if integers.few is None else integers.few.moved.numpy()
    moved = (np.maximum.accumulate(one[order]) for one in (integers.moved, few))
    return _Reach(integers.norm[order], *moved)


class _Near(NamedTuple):
    """The nearest candidates of wanted points, by differences in float32.

    Attributes:
        places: Which points the nearest are, somewhat more than k, nearest first; -1 where there
            are fewer, [wanted, kept].
        squared: Their squared distances in float32, infinite where there are fewer,
            [wanted, kept].
        complete: Whether every point within the limit was a candidate, [wanted].
    """

    places: np.ndarray
    squared: np.ndarray
    complete: np.ndarray

    def of(self, rows: np.ndarray) -> "_Near":
        """Select some of the wanted points."""
        return _Near(*(whole[rows] for whole in self))


class _Known(NamedTuple):
    """What is known of wanted points whose limit is set again.

    Attributes:
        near: The nearest of the candidates within the first limit.
        limit: That limit, [some].
        of_few: Square in few coordinates beyond which no point can be one of the k nearest, [some].
    """

    near: _Near
    limit: np.ndarray
    of_few: np.ndarray


def pays(points: int, width: int, wanted: int, k: int) -> bool:
    """Say whether integers find the neighbours faster than float32 on this machine.

    Args:
        points: Number of points.
        width: Number of coordinates.
        wanted: Number of points whose neighbours are wanted.
        k: Number of neighbours.
    """
    wide = width >= _NARROWEST and points >= _POINTS and wanted >= _WANTED
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
    values: Tensor, own: Tensor, k: int, exact: Exact, scale: float, faiss: Any,
    integers: Integers | None = None,
) -> Certified:  # fmt: skip
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
        integers: The points as `prepare` made them integers; None makes them here.
    """
    found = Certified(
        torch.empty(len(own), k, dtype=torch.float64, device="cpu"),
        torch.zeros(len(own), k, dtype=torch.int64, device="cpu"),
        torch.zeros(len(own), dtype=torch.bool, device="cpu"),
    )
    if len(own) == 0:
        return found
    if integers is None:
        integers = prepare(values, len(own), k)
    if integers is None:
        return found
    generator = torch.Generator("cpu").manual_seed(0)
    # In random order, so that the first ones stand for all.
    order = torch.randperm(len(own), generator=generator, dtype=torch.int64, device="cpu")
    if integers.few is not None:
        # The others with their neighbours, whose candidates then are in the cache.
        later = order[_QUERIES:]
        order[_QUERIES:] = later[integers.few.leading[own[later]].argsort()]
    reach = _reach(integers)
    places = len(integers.rows)
    step = max(_FEWEST, min(_QUERIES, _SQUARES // places, len(own)))
    rank = _first_rank(k)
    done = 0
    squares = torch.empty(0, places, dtype=torch.int32, device="cpu")
    for some in _in_turn(order, places, step):
        mine = own[some]
        if len(squares) < len(some):
            squares = torch.empty(
                step if done >= _TRIED else len(some), places, dtype=torch.int32, device="cpu"
            )
        near, rank = _near(values, integers, reach, mine, k, rank, squares, faiss)
        left = torch.arange(len(some), dtype=torch.int64, device="cpu")
        # Where float32 cannot tell the k-th from the one after it, more are computed in float64.
        kept = near.places.shape[1] - 1
        for count in (k, kept) if values.shape[1] >= _WIDE else (kept,):
            rows = some[left]
            candidates = torch.from_numpy(near.places[left.numpy(), :count])
            candidates = torch.where(candidates < 0, own[rows][:, None], candidates)
            distances, nearest = nearest_first(exact(own[rows], candidates), candidates)
            found.distances[rows], found.places[rows] = distances[:, :k], nearest[:, :k]
            within = _within_float32(integers, own[rows], distances[:, k - 1] / scale, values)
            alone = torch.from_numpy(near.squared[left.numpy(), count] > within)
            complete = torch.from_numpy(near.complete)[left]
            found.certain[rows] = complete & alone
            left = left[complete & ~alone]
            if len(left) == 0:
                break
        done += len(some)
        if done >= _TRIED:
            share = float(found.certain[order[:done]].double().mean())
            if share < (_LEAST if done >= _QUERIES else _HOPELESS):
                break
    return found


def _in_turn(order: Tensor, places: int, step: int) -> list[Tensor]:
    """Cut the wanted points into those that are searched at a time, the ones to be tried first.

    Args:
        order: The wanted points in the order in which they are searched.
        places: Number of places.
        step: How many are searched at a time.
    """
    if len(order) <= _QUERIES:
        return list(order.split(step))
    few = max(1, min(step, _TRIAL_SQUARES // places))
    parts = (order[:_TRIED], few), (order[_TRIED:_QUERIES], step), (order[_QUERIES:], step)
    return [some for part, size in parts for some in part.split(size)]


def ended_early(found: Certified) -> bool:
    """Say whether so few points were certain that the search ended before all were searched.

    Args:
        found: What was found.
    """
    return float(found.certain.double().mean()) < _LEAST


def _few(values: Tensor, wanted: int, k: int) -> Few | None:
    """Choose few coordinates in which distances are lower bounds; None where all cost less."""
    directions = _directions(values, wanted, k)
    if directions is None:
        return None
    # Turned among themselves at random, no direction carries much more than the others.
    count = directions.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    turn = torch.randn(count, count, generator=generator, dtype=torch.float64, device="cpu")
    short, moved = _coordinates(values, directions, torch.linalg.qr(turn).Q)
    # Norms of the rest are alike, and only their differences count. The subtraction may move a row
    # that is short by the rounding of the median, which is far more than that of its own norm.
    short[:, -1] -= short[:, -1].median()
    moved += _EPS / 2 * short[:, -1].abs().double()
    return Few(short, moved, values @ directions[:, 0].float())


def _coordinates(values: Tensor, directions: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Compute coordinates along turned directions and the norm of the rest, in float32.

    Sums of products are made in parts of c columns, m of them, so that they are off by little. Let
    u = 2^-24. A sum in float32, in any order, is off by at most c + m + 2 times u of the sum of the
    sizes, so a coordinate a_j of x before the turn by g |x| with g = (c + m + 2) u. Directions
    rounded to float32 move all p by u sqrt(p) |x|, and the turn by (p + 3) u sqrt(p) |x|. The
    square of the norm of the rest is off by at most

        B = ((c + m + p + 16) u + 2 u sqrt(p) + (g + u)^2 p) |x|^2 + 2 g |x| sum_j |a_j|

    and the norm r itself by the root of B, and by B / r. Leading directions make the sum small.

    Args:
        values: Points, [points, width], float32.
        directions: Orthonormal columns, [width, p], float64.
        turn: Orthonormal columns, [p, p], float64.

    Returns:
        The coordinates, [points, p + 1], and how far rounding may have moved each point, [points],
        float64.
    """
    width, p = directions.shape
    short = torch.empty(len(values), p + 1, dtype=torch.float32, device="cpu")
    moved = torch.empty(len(values), dtype=torch.float64, device="cpu")
    factors, turns = as_factor(directions.float()), as_factor(turn.float())
    unit = _EPS / 2
    terms = min(width, _COLUMNS) + -(-width // _COLUMNS)
    product = (terms + 2) * unit
    always = (terms + p + 16 + 2 * math.sqrt(p)) * unit + (product + unit) ** 2 * p
    along_off = (terms + p + 8) * unit * math.sqrt(p)
    step = rows_in_block(width, values.device)
    targets = zip(values.split(step), short.split(step), moved.split(step), strict=True)
    for block, target, off in targets:
        along = factors.new_zeros(len(block), p)
        square = factors.new_zeros(len(block))
        for columns, part in zip(
            block.split(_COLUMNS, dim=1), factors.split(_COLUMNS), strict=True
        ):
            along.addmm_(as_factor(columns), part)
            square += torch.linalg.vector_norm(columns, dim=1).square()
        rest = (square - along.square().sum(dim=1)).clamp_(min=0).sqrt_()
        target[:, :p].copy_(along @ turns)
        target[:, p].copy_(rest)
        norm = square.double().sqrt()
        lost = always * norm.square() + 2 * product * norm * along.abs().sum(dim=1)
        rest_off = torch.minimum(lost.sqrt(), (lost / rest.double()).nan_to_num(nan=0.0))
        torch.add(along_off * norm, rest_off, out=off)
    # For what is off by the rounding of these numbers themselves.
    return short, 1.05 * moved


def _directions(values: Tensor, wanted: int, k: int) -> Tensor | None:
    """Try a few leading directions on some rows; None where all coordinates cost less."""
    points, width = values.shape
    counts = [count for count, narrowest in _DIRECTIONS.items() if width >= narrowest]
    # As near as the k-th of all points is about the one of so many of these.
    wished = k * _POOL / points
    rank = max(1, round(wished))
    if not counts or points < _POOL or 2 * rank > _POOL:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(points, generator=generator, dtype=torch.int64, device="cpu")
    drawn = values[order[:_POOL]]
    near = nearest_of_trial(drawn, rank)
    if float(near.distance.median()) > _ALIKE * float(near.usual):
        return None
    # The number of points within a distance grows with its power: the exponent is their dimension.
    grown = float((near.farther / near.distance).nan_to_num(nan=1.0).median())
    distance = near.distance * (wished / rank) ** math.log2(max(grown, 1.0))
    directions = leading(drawn[: _POOL // 2], counts[-1], generator)
    most = max(_MOST * k, _AT_LEAST, points // _FULL)
    # Nanoseconds of one core of 2024, for each wanted point; only their ratios matter.
    least = points * _PRODUCT * width + (_CANDIDATE + _DIFFERENCE * width) * _USUAL * k
    cheapest = None
    for count, (short, apart) in zip(counts, lower_bounds(drawn, directions, counts), strict=True):
        # The rounding to integers moves two points in two directions, and the worst is allowed for.
        off = _rounding(short)
        loose = ((distance + 2 * off).square() - 2 * off**2).sqrt()
        nearer, seen = (
            (apart <= limit[:, None]).sum(dim=1) * (points / _POOL)
            for limit in (1.001 * distance, loose)
        )
        crowded = seen >= most  # and searched again, in float32
        looked_at = (_CANDIDATE + _DIFFERENCE * (count + 1)) * seen + _DIFFERENCE * width * nearer
        candidates = looked_at.masked_fill(crowded, 0)
        candidates += crowded * points * width * _IN_FLOAT
        reading = width * points / wanted * (_READING + _ALONG * count)
        cost = points * _PRODUCT * count + float(candidates.mean()) + reading
        if cost < least:
            least, cheapest = cost, count
    return None if cheapest is None else directions[:, :cheapest]


def _rounding(short: Tensor) -> float:
    """Estimate how far the rounding of few coordinates to integers will move a point."""
    # Turned among themselves all are alike, and about normal: few are beyond three deviations.
    apart = torch.cat([short[:, :-1], short[:, -1:] - short[:, -1].median()], dim=1)
    step = 3 * float(apart.square().mean().sqrt()) / LARGEST
    return step * math.sqrt(short.shape[1] / 12)


def prepare(values: Tensor, wanted: int, k: int) -> Integers | None:
    """Make points integers, for several searches among them; None where that is of no use.

    Args:
        values: Points, centred, at most 1 in every coordinate, [points, width], float32.
        wanted: Number of points whose neighbours are wanted.
        k: Number of neighbours.
    """
    return _integers(values, _few(values, wanted, k), wanted)


def _integers(values: Tensor, few: Few | None, wanted: int) -> Integers | None:
    """Cut points off, round them to integers, and put them in random order."""
    numbers = values if few is None else few.values
    count, width = numbers.shape
    largest = _cut_off(numbers)
    if largest == 0:
        return None  # nearly all numbers are 0
    per_unit = float(np.float32(min(LARGEST / largest, _STEEPEST)))
    # Rows that are near each other often stand together, and would share a group.
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
    rows, square = _filled(count, width)
    place, at = _places(order, len(rows))
    norm = torch.cat([torch.linalg.vector_norm(block, dim=1) for block in row_blocks(values)])
    error = torch.empty_like(norm)
    step = rows_in_block(4 * width, values.device)
    for block, here, moved in zip(
        numbers.split(step), at.split(step), error.split(step), strict=True
    ):
        number = (block * per_unit).clamp_(-LARGEST, LARGEST)
        nearest = number.round()
        rows.index_copy_(0, here, nearest.to(torch.int8))
        torch.linalg.vector_norm(number.sub_(nearest), dim=1, out=moved)
        squares = nearest.square_().split(_EXACT, dim=1)
        own = sum_of(some.sum(dim=1).double() for some in squares)
        square.index_copy_(0, here, own.int())
    summed = _summed(values.shape[1])
    # Float32 rounds a number of up to 127 by less than 127 times e.
    error = error.double() * summed + math.sqrt(width) * LARGEST * _EPS
    if few is not None:
        error += per_unit * few.moved
    return Integers(
        rows, square, place, at, (norm.double() * summed + _SHORTEST).numpy(), error.numpy(),
        per_unit, few, wanted,
    )  # fmt: skip


def _filled(count: int, width: int) -> tuple[Tensor, Tensor]:
    """Allocate integers and their squares, which are beyond all others where no point will be."""
    places = -(-count // _SIZES[0]) * _SIZES[0]
    rows = torch.zeros(places, width, dtype=torch.int8, device="cpu")
    return rows, torch.full((places,), _NONE, dtype=torch.int32, device="cpu")


def _places(order: Tensor, places: int) -> tuple[np.ndarray, Tensor]:
    """Return which point stands at each place, filled up, and at which place each point stands."""
    at = torch.empty_like(order)
    at[order] = torch.arange(len(order), dtype=torch.int64, device="cpu")
    return torch.nn.functional.pad(order, (0, places - len(order))).numpy(), at


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
    values: Tensor, integers: Integers, reach: _Reach, part: Tensor, k: int, rank: int,
    squares: Tensor, faiss: Any,
) -> tuple[_Near, int]:  # fmt: skip
    """Find the candidates of wanted points, and the nearest of them.

    Args:
        values: Points, [points, width], float32.
        integers: Points as integers.
        reach: How far points were moved.
        part: Places of the wanted points, [wanted].
        k: Number of neighbours.
        rank: How many groups are within the first limit.
        squares: Where squares go, [wanted or more, places], int32.
        faiss: The library.

    Returns:
        The candidates, and how many groups would have been enough for most of the points.
    """
    whole = squares[: len(part)]
    at = integers.at[part]
    multiply(integers.rows[at], integers.rows.T, out=whole)
    torch.sub(integers.square, whole, alpha=2, out=whole)
    own = integers.square[at].double().numpy()
    size = next(size for size in _SIZES if len(integers.at) >= size * _GROUPS * k)
    block = _Squares(whole.numpy(), whole.view(len(part), -1, size).amin(dim=2).numpy())
    groups = block.smallest.shape[1]
    # Within this, so many groups have a point: k others at least, and few beyond them.
    limit = np.partition(block.smallest, rank, axis=1)[:, rank].clip(max=_NONE - 1)
    mine = part.numpy()
    near = _within(values, integers, mine, block, np.arange(len(mine)), limit, k, faiss)
    bound = _limit(integers, reach, mine, near.squared[:, k - 1], own, values.shape[1])
    ranks = np.count_nonzero(block.smallest <= bound.of_integers[:, None], axis=1)[near.complete]
    fewest, most = min(k + 2, groups - 1), max(groups // 2, k + 2)
    enough = _next_rank(ranks.clip(fewest, most), values.shape[1], integers, _first_rank(k))
    again = np.flatnonzero((bound.of_integers > limit) & near.complete)
    if len(again) > 0:
        later = _within(
            values, integers, mine[again], block, again, bound.of_integers[again], k, faiss,
            _Known(near.of(again), limit[again], bound.of_few[again]),
        )  # fmt: skip
        for target, some in zip(near, later, strict=True):
            target[again] = some
    return near, enough


def _next_rank(ranks: np.ndarray, width: int, integers: Integers, first: int) -> int:
    """Choose how many groups are within the first limit of the next wanted points.

    A lower limit has fewer candidates, and more points whose limit has to be set again.

    Args:
        ranks: How many groups each of some points needs, [some].
        width: Number of coordinates.
        integers: Points as integers.
        first: The number where no point says any.
    """
    if len(ranks) == 0:
        return first
    candidate = later = _CANDIDATE + _DIFFERENCE * width
    if integers.few is not None:  # some of these are farther in few coordinates
        few = integers.few.values.shape[1]
        later = _CANDIDATE + _DIFFERENCE * (few + width / _LOOSER)
    tried = np.unique(np.quantile(ranks, _SHARES, method="lower"))
    beyond = (ranks - tried[:, None]).clip(min=0)
    again = _AGAIN * (beyond > 0).mean(axis=1) + later * beyond.mean(axis=1)
    return int(tried[np.argmin(candidate * tried + again)])


def _first_rank(k: int) -> int:
    """Choose how many groups are within the first limit, before any was tried."""
    return k + k // 2 + 1


def _limit(
    integers: Integers, reach: _Reach, part: np.ndarray, kth: np.ndarray, own: np.ndarray,
    width: int,
) -> _Limit:  # fmt: skip
    """Bound the squares of the k nearest in integers and in few coordinates.

    Let x be a wanted point, in exact numbers, and y one at a distance of at most t, so that
    |x| + |y| <= s = 2|x| + t. Rounding to float32 moves each of the two by at most 2^-24 of its
    norm: their float32 values are at most t + e s / 2 apart (e = 2^-23), and so much is `kth` off,
    which is of float32 values too: 2 e s is twice what may be lost. What the computation of few
    coordinates moved the two is part of `moved`, with what the rounding to integers did.
    The integers are at most c times as far apart as the values, and what the two were moved. The
    few coordinates are as far apart as the values, and what their computation moved the two.

    Args:
        integers: Points as integers.
        reach: How far points were moved.
        part: Places of the wanted points, [wanted].
        kth: Squared distance in float32 within which each has k others, [wanted].
        own: Squared norms of the integers of the wanted points, [wanted].
        width: Number of coordinates.
    """
    distance = np.sqrt(kth * _summed(width) + UNDERFLOW, dtype=np.float64)
    norm = integers.norm[part]
    # Stored norms are longer than true ones by as much as this allows.
    longest = (norm + distance) * _summed(width) ** 3 + 3 * _SHORTEST
    distance += 2 * _EPS * (2 * norm + distance)
    last = reach.last(longest)
    apart = integers.per_unit * distance + integers.moved[part] + reach.moved[last]
    limit = (apart**2 - own + 1).clip(max=_NONE - 1).astype(np.int32)
    if integers.few is None:
        return _Limit(limit, np.full(len(part), np.inf))
    apart = distance + integers.few.moved.numpy()[part] + reach.moved_few[last]
    return _Limit(limit, apart**2 * _summed(integers.few.values.shape[1]) + UNDERFLOW)


def _summed(width: int) -> float:
    """Bound the quotient of a sum of squared differences and what float32 makes of it.

    Each square is off by three roundings, and the sum of them by one for each, in any order.
    """
    return 1 + (width + 8) * _EPS


def _within(
    values: Tensor, integers: Integers, part: np.ndarray, block: _Squares, rows: np.ndarray,
    limit: np.ndarray, k: int, faiss: Any, known: _Known | None = None,
) -> _Near:  # fmt: skip
    """Find the points whose squares are within a limit, and the nearest of them.

    Args:
        values: Points, [points, width], float32.
        integers: Points as integers.
        part: Places of the wanted points, [wanted].
        block: Squares of these and other points.
        rows: Which of these the wanted points are, [wanted].
        limit: Limit for each wanted point, [wanted].
        k: Number of neighbours.
        faiss: The library.
        known: What is known of these points; None for nothing.
    """
    wanted, groups = len(rows), block.smallest.shape[1]
    size = block.whole.shape[1] // groups
    smallest = block.smallest if wanted == len(block.smallest) else block.smallest[rows]
    row, group = np.divmod(np.flatnonzero(smallest <= limit[:, None]), groups)
    squares = np.take(block.whole.reshape(-1, size), rows[row] * groups + group, axis=0)
    inside = squares <= limit[row][:, None]
    if known is not None:
        inside &= squares > known.limit[row][:, None]
    # Of points with too many candidates none is looked at: of noise they would be nearly all pairs.
    most = _most(integers, k)
    crowded = np.zeros(wanted, dtype=bool)
    if np.count_nonzero(inside) > _LISTED * k * wanted:  # already their list would be long
        crowded = np.bincount(row, inside.sum(axis=1), wanted) > most
        inside &= ~crowded[row][:, None]
    hit, offset = np.divmod(np.flatnonzero(inside), size)
    place = integers.place[group[hit] * size + offset]
    row = row[hit]
    counts = np.bincount(row, minlength=wanted)
    if counts.max() > most:
        over = counts > most
        place, row = place[~over[row]], row[~over[row]]
        counts[over] = 0
        crowded |= over
    position = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    kept_count = k + 2 + k // _SPARE
    places = np.full((wanted, max(kept_count, int(counts.max()))), -1)
    places[row, position] = place
    places[places == part[:, None]] = -1
    if known is not None and integers.few is not None:
        apart = _differences(integers.few.values, part, places, faiss)
        places[apart > known.of_few[:, None]] = -1
    squared = _differences(values, part, places, faiss)
    if known is not None:
        places = np.concatenate([known.near.places, places], axis=1)
        squared = np.concatenate([known.near.squared, squared], axis=1)
    # Of so few numbers a partition takes twice as long.
    order = np.argsort(squared, axis=1)[:, :kept_count]
    return _Near(
        np.take_along_axis(places, order, axis=1), np.take_along_axis(squared, order, axis=1),
        ~crowded,
    )  # fmt: skip


def _most(integers: Integers, k: int) -> int:
    """Choose the most candidates of a point; beyond them another search costs no more."""
    few = 0 if integers.few is None else len(integers.norm) // _FULL
    return max(_MOST * k, _AT_LEAST, few)


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


def _within_float32(
    integers: Integers, mine: Tensor, distance: Tensor, values: Tensor
) -> np.ndarray:
    """Bound the squared distances in float32 to all points within a distance, [wanted].

    Args:
        integers: Points as integers.
        mine: Places of the wanted points, [wanted].
        distance: Distance for each of them, [wanted], float64.
        values: Points, [points, width], float32.
    """
    within = distance.numpy() * (1 + 2 * _EPS) + 4 * _EPS * integers.norm[mine.numpy()]
    found: np.ndarray = within**2 * _summed(values.shape[1]) + UNDERFLOW
    return found
