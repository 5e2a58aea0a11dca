"""Lower bounds of distances from a few coordinates: a search that need not see the whole width.

Split a centred row x into its part along p orthonormal directions, y, and the rest, of norm r. Then
|x_i - x_j|^2 >= |y_i - y_j|^2 + (r_i - r_j)^2, by the orthogonal split and the triangle inequality,
so a search in the p + 1 coordinates (y, r) orders points by a lower bound of their distance.
Directions of large variance make the bound tight; any others would do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from geomon.kernels._blocks import row_blocks, rows_in_block
from geomon.kernels._search import Candidates, Cloud, Wanted, search_single

# Numbers of directions and of candidates of which the best are chosen.
_SIZES = (8, 16, 24, 32, 48, 64)
_COUNTS = (4, 6, 8, 11, 16, 24, 32, 48, 64, 96)

# Below these sizes a sketch cannot save more than its trial costs: at width 128 a search in 33
# coordinates takes half of the time of the full one, but what comes before it the rest.
_LEAST_POINTS = 1024
_LEAST_WIDTH = 192

# Points from which the directions are taken, and rows on which the sketches are tried.
_SAMPLE = 1024
_TRIAL = 64

# Time of a search per pair of rows, of keeping one more candidate per row, and of ranking one
# coordinate of a candidate in float64, in units of one multiplication within the product of rows.
# Measured with FAISS on one core; they decide which search comes first, never the result.
_PAIR = 60
_KEEP = 10_000
_RANK = 60
# A multiplication in float64, by which the coordinates are computed.
_DOUBLE = 3
# A sketch is used where the model says that it saves as much of the time.
_LEAST_GAIN = 0.15

# Errors of the coordinates and of r beyond those of the search itself, in float32 epsilons.
_ROUNDING = 12


@dataclass(frozen=True)
class Sketch:
    """Points in the few coordinates that give a lower bound of their distances.

    Attributes:
        coordinates: Parts along the directions and norm of the rest, [points, p + 1], float32.
        count: Number of candidates to search.
    """

    coordinates: Tensor
    count: int

    def __call__(self, wanted: Wanted) -> Candidates:
        """Search in float32 by the lower bound."""
        terms = _terms(self.coordinates.shape[1])
        return search_single(self.coordinates, wanted.own, self.count, terms)


def choose_sketch(cloud: Cloud, own: Tensor, k: int) -> Sketch | None:
    """Choose the sketch in which a search is expected to cost least, by a trial on a few rows.

    The distances to the k-th neighbour are those of a search among all points; how many points look
    nearer than that is counted among a sample of them.

    Args:
        cloud: The points.
        own: Places of the wanted rows.
        k: Number of neighbours.

    Returns:
        The sketch, or None where the search in all coordinates is expected to cost less.
    """
    scaled, (points, width) = cloud.scaled, cloud.scaled.shape
    if len(own) < points / 4 or points < _LEAST_POINTS or width < _LEAST_WIDTH or k >= points - 1:
        return None
    # Not on the points that gave the directions: those look farther apart along them than others.
    axes = _leading_axes(scaled[_spread(points, _SAMPLE, shift=1).to(own)], _SIZES[-1])
    places, trial = _spread(points, _SAMPLE).to(own), own[_spread(len(own), _TRIAL).to(own)]
    sample, queries = scaled[places], scaled[trial]
    limit = _kth_square(queries, scaled, k)
    other = places != trial[:, None]
    full = _cost_of_full(points, width, k)
    best, least = None, (1 - _LEAST_GAIN) * full
    for size, (some, others) in _prefixes(axes, queries, sample):
        near = (_squared(some, others) <= limit) & other
        # Each sampled point stands for as many; the row itself and its neighbours are known.
        needed = k + 1 + near.sum(dim=1) * (points / len(sample))
        for count in (count for count in _COUNTS if k + 1 < count < points):
            uncertain = float((needed >= count).double().mean())
            ranked = float(needed.clamp(max=count).mean())
            cost = points * (_PAIR + size + 1) + count * _KEEP + ranked * _RANK * width
            cost += _DOUBLE * size * width + uncertain * full
            if cost < least:
                best, least = (size, count), cost
    if best is None:
        return None
    return Sketch(_coordinates(scaled, axes[:, : best[0]].contiguous()), best[1])


def _terms(coordinates: int) -> float:
    return float(_ROUNDING + coordinates**0.5)


def _cost_of_full(points: int, width: int, k: int) -> float:
    """Time of the search in all coordinates, for one row."""
    return float(points * (_PAIR + width) + (k + 3) * (_KEEP + _RANK * width))


def _spread(count: int, some: int, *, shift: int = 0) -> Tensor:
    """Spread at most `some` places evenly over `count`, each moved by `shift` halves of a step."""
    some = min(some, count)
    step = torch.arange(some, dtype=torch.int64, device="cpu")
    return (2 * step + shift) * count // (2 * some)


def _leading_axes(rows: Tensor, size: int) -> Tensor:
    """Find directions of large variance, the largest first, [width, size], float64.

    By a random subspace and one step of the power method: how well they are found is a matter of
    speed alone; that they are orthonormal to float64 is not.
    """
    centred = rows - rows.mean(dim=0)
    generator = torch.Generator("cpu").manual_seed(0)
    mixed = torch.randn(size, len(rows), generator=generator, dtype=torch.float32, device="cpu").to(
        rows
    )
    start = (mixed @ centred).T
    axes = torch.linalg.qr((centred.T @ (centred @ start)).double()).Q
    image = centred @ axes.to(rows)
    return axes @ torch.linalg.eigh((image.T @ image).double()).eigenvectors.flip(1)


def _coordinates(scaled: Tensor, axes: Tensor) -> Tensor:
    """Compute the parts along the axes and the norm of the rest, [points, axes + 1], float32."""
    coordinates = scaled.new_empty(len(scaled), axes.shape[1] + 1)
    for target, block in zip(
        coordinates.split(rows_in_block(scaled.shape[1])), row_blocks(scaled), strict=True
    ):
        exact = block.double()
        along = exact @ axes
        # Norms of the same numbers: where little is left, r^2 is a small difference of them.
        rest = exact.square_().sum(dim=1) - along.square().sum(dim=1)
        target[:, :-1] = along
        target[:, -1] = rest.clamp_(min=0).sqrt_()
    return coordinates


def _prefixes(axes: Tensor, *rows: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Compute coordinates along the first few axes, in float32: enough to choose, not to search."""
    along = [part @ axes.to(part) for part in rows]
    whole = [part.square().sum(dim=1) for part in rows]
    for size in _SIZES:
        rest = [
            (norm - part[:, :size].square().sum(dim=1)).clamp(min=0).sqrt()
            for norm, part in zip(whole, along, strict=True)
        ]
        yield (
            size,
            tuple(
                torch.cat([part[:, :size], left[:, None]], dim=1)
                for part, left in zip(along, rest, strict=True)
            ),
        )


def _kth_square(queries: Tensor, points: Tensor, k: int) -> Tensor:
    """Find the squared distance to the k-th nearest other point in float32, [queries, 1]."""
    least = [
        _squared(queries, block).topk(min(k + 1, len(block)), dim=1, largest=False).values
        for block in row_blocks(points)
    ]
    return torch.cat(least, dim=1).topk(k + 1, dim=1, largest=False).values[:, -1:]


def _squared(queries: Tensor, points: Tensor) -> Tensor:
    """Compute |x|^2 + |y|^2 - 2xy, [queries, points]."""
    norms = points.square().sum(dim=1) + queries.square().sum(dim=1)[:, None]
    return torch.addmm(norms, queries, points.T, alpha=-2)
