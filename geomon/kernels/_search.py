"""Searches for candidates: which points can be among the k nearest, and what was not missed.

Each search returns candidates and says below which squared distance it has missed no point. They
differ in cost and in rounding: float32, float64, differences.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import in_blocks, row_blocks, rows_in_block

faiss: Any
try:
    import faiss
except ImportError:  # the exact search in torch is used instead
    faiss = None

# Candidates beyond k and the row itself: of the search in float32, which can put near-duplicates in
# the wrong order, and of the search in float64 for the few rows of which float32 is not certain.
# Both are a matter of speed alone: with more candidates fewer rows are uncertain, but every search
# costs more.
_SLACK = 2
_MORE_SLACK = 24
# Wanted rows that are copied for the search at a time, where not all are wanted.
_QUERIES = 4096


@dataclass(frozen=True)
class Points:
    """The rows that are searched: all, or some of them by their indices, without a copy."""

    rows: Tensor
    among: Tensor | None

    def blocks(self) -> Iterable[Tensor]:
        """Cut the points into blocks."""
        if self.among is None:
            return row_blocks(self.rows)
        step = rows_in_block(self.rows.shape[1])
        return (self.rows[index] for index in self.among.split(step))

    def __len__(self) -> int:
        return len(self.rows) if self.among is None else len(self.among)

    def __getitem__(self, places: Tensor) -> Tensor:
        return self.rows[self.index(places)]

    def index(self, places: Tensor) -> Tensor:
        """Convert places among the points to indices into the rows."""
        return places if self.among is None else self.among[places]

    def places(self, index: Tensor | None) -> Tensor:
        """Convert indices into the rows to places among the points; None gives all places."""
        if index is None:
            return torch.arange(len(self), dtype=torch.int64, device=self.rows.device)
        return index if self.among is None else torch.searchsorted(self.among, index.contiguous())


@dataclass(frozen=True)
class Frame:
    """Centre and scale of the points, which are subtracted and divided by before a search."""

    centre: Tensor
    scale: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows.double() - self.centre).div_(self.scale)


def frame_of(rows: Tensor) -> Frame:
    """Choose the centre and the scale of a search: no coordinate is above 1 then.

    Args:
        rows: Rows, [tokens, width].
    """
    # Any centre near most of the rows will do; a mean would be moved by a few massive rows.
    # Transposed first: the median down the columns of a row-major matrix is several times slower.
    some = rows[:: max(1, len(rows) // 255)].double().T.contiguous()
    centre = some.median(dim=1).values
    largest = [block.sub_(centre).abs_().amax() for block in in_blocks(rows)]
    reach = torch.stack(largest).amax()
    return Frame(centre, torch.where(reach > 0, reach, 1.0))


class Wanted(NamedTuple):
    """The rows whose neighbours are wanted.

    Attributes:
        own: Places of these rows among the points, int64, [wanted].
        within: A distance that their k-th nearest other point does not exceed, scaled by the frame,
            [wanted].
        k: Number of neighbours.
    """

    own: Tensor
    within: Tensor
    k: int


class Candidates(NamedTuple):
    """What a search has found for each wanted row, in ascending order of distance as computed.

    Attributes:
        places: Places of the candidates among the points, without the row itself, int64,
            [wanted, count].
        squared: Their squared distances as computed, or lower bounds of them, in the frame.
        reach: The least that the squared distance to any other point can be as computed, [wanted];
            infinite where there is no other point.
        rounding: Largest error of a computed square, as a share of the two squared norms.
    """

    places: Tensor
    squared: Tensor
    reach: Tensor
    rounding: float


@dataclass(frozen=True)
class Cloud:
    """The points of a search in the forms that searches use.

    Attributes:
        points: The points as given.
        frame: Centre and scale.
        scaled: The points in the frame, [points, width], float32.
        norms: Their norms, [points], float64.
    """

    points: Points
    frame: Frame
    scaled: Tensor
    norms: Tensor

    def single(self, wanted: Wanted) -> Candidates:
        """Search in float32, by |x|^2 + |y|^2 - 2xy."""
        count, terms = wanted.k + 1 + _SLACK, _terms(self.scaled.shape[1])
        return search_single(self.scaled, wanted.own, count, terms)

    def double(self, wanted: Wanted) -> Candidates:
        """Search in float64, by |x|^2 + |y|^2 - 2xy."""
        count = min(wanted.k + 1 + _MORE_SLACK, len(self.points))
        found = _expanded(self.points, self.frame, wanted.own, count)
        rounding = self._rounding(torch.float64)
        return _without_own(*found, wanted.own, rounding, complete=count == len(self.points))

    def differences(self, wanted: Wanted) -> Candidates:
        """Search by differences of the rows as given, among the points that can be near enough."""
        own, within, k = wanted
        points, width = self.points, self.scaled.shape[1]
        limit = within.square() + self.error(own, within, self._rounding(torch.float64))
        places = torch.empty(len(own), k + 1, dtype=torch.int64, device=own.device)
        # Near-duplicates lie side by side along any direction: rows of one block share candidates.
        generator = torch.Generator("cpu").manual_seed(0)
        direction = torch.randn(width, generator=generator, dtype=torch.float32, device="cpu")
        direction = direction.to(within)
        pieces = own.split(rows_in_block(width))
        order = torch.cat([self.frame(points[part]) @ direction for part in pieces]).argsort()
        # A power of 2, so that nothing is rounded but the difference itself.
        unit = torch.ldexp(torch.ones_like(within[0]), -torch.frexp(self.frame.scale).exponent)
        for some in order.split(rows_in_block(len(points))):
            squared = _squared(points, self.frame, own[some])
            near = (squared <= limit[some, None]).any(dim=0).nonzero().squeeze(1)
            queries = points[own[some]].double() * unit
            apart = [
                torch.cdist(
                    queries,
                    points[part].double() * unit,
                    compute_mode="donot_use_mm_for_euclid_dist",
                )
                for part in near.split(rows_in_block(width))
            ]
            places[some] = near[torch.cat(apart, dim=1).topk(k + 1, largest=False).indices]
        # The differences have put them in order: every one is looked at, and no other.
        squared = torch.zeros_like(places, dtype=torch.float64)
        return _without_own(squared, places, own, 0.0, complete=True)

    def error(self, own: Tensor, kth: Tensor, rounding: float) -> Tensor:
        """Bound the error of a squared distance to a point no farther than the k-th neighbour.

        Args:
            own: Places of the wanted rows.
            kth: Distance to the k-th neighbour found, scaled by the frame, [wanted].
            rounding: As in `Candidates`.
        """
        norm = self.norms[own]
        # Products of numbers below 1e-19 vanish in float32.
        least = torch.finfo(torch.float32).tiny if rounding > 1e-10 else 0.0
        return (norm.square() + (norm + kth).square()).mul_(rounding).add_(least)

    def certified(self, own: Tensor, found: Candidates, kth: Tensor) -> Tensor:
        """Tell for which wanted rows the candidates have the k nearest for sure.

        A point that is nearer than the k-th neighbour found has a squared distance, as computed, of
        at most kth^2 + error. Where all but the candidates are farther, none was missed.

        Args:
            own: Places of the wanted rows.
            found: Candidates of these rows.
            kth: Distance to the k-th nearest candidate, scaled by the frame, [wanted].
        """
        return found.reach - kth.square() > self.error(own, kth, found.rounding)

    def _rounding(self, dtype: torch.dtype) -> float:
        return _terms(self.scaled.shape[1]) * torch.finfo(dtype).eps


def cloud_of(points: Points) -> Cloud:
    """Centre and scale points for a search.

    Args:
        points: The points, at least two.
    """
    frame = frame_of(points.rows)
    scaled = points.rows.new_empty((len(points), points.rows.shape[1]), dtype=torch.float32)
    # One buffer for all blocks: most of the time would go into touching new memory.
    buffer = scaled.new_empty(row_blocks(scaled)[0].shape, dtype=torch.float64)
    for target, block in zip(row_blocks(scaled), points.blocks(), strict=True):
        exact = buffer[: len(block)].copy_(block)
        target.copy_(exact.sub_(frame.centre).div_(frame.scale))
    return Cloud(points, frame, scaled, torch.linalg.vector_norm(scaled, dim=1).double())


def search_single(scaled: Tensor, own: Tensor, count: int, terms: float) -> Candidates:
    """Find the `count` points nearest to each wanted one, itself among them, in float32.

    Args:
        scaled: Points, [points, width], float32.
        own: Places of the wanted rows.
        count: Number of candidates; all points where there are fewer.
        terms: Errors of rounding in a squared distance, in units of the float32 epsilon.
    """
    count = min(count, len(scaled))
    rounding = terms * torch.finfo(torch.float32).eps
    if faiss is None or scaled.device.type != "cpu":
        found = _expanded(Points(scaled, None), lambda points: points, own, count)
        return _without_own(*found, own, rounding, complete=count == len(scaled))
    squared = [torch.empty(0, count, dtype=torch.float32, device="cpu")]
    places = [torch.empty(0, count, dtype=torch.int64, device="cpu")]
    points = scaled.numpy()
    whole = len(own) == len(scaled)
    for part in (own,) if whole else own.split(_QUERIES):
        queries = points if whole else scaled[part].numpy()
        for kept, result in zip((squared, places), faiss.knn(queries, points, count), strict=True):
            kept.append(torch.from_numpy(result))
    found = torch.cat(squared), torch.cat(places)
    return _without_own(*found, own, rounding, complete=count == len(scaled))


def _terms(width: int) -> float:
    """Errors of rounding in a squared distance: they add up as the root of the number of terms."""
    return 4 + width**0.5


def _without_own(
    squared: Tensor, places: Tensor, own: Tensor, rounding: float, *, complete: bool
) -> Candidates:
    """Take each row's own entry out, or the farthest where equal points have left it no place."""
    count = places.shape[1]
    reach = squared[:, -1].double()
    entry = (places == own[:, None]).byte()
    entry[:, -1] = 1
    other = torch.arange(count - 1, dtype=torch.int64, device=own.device)
    other = other + (other >= entry.argmax(dim=1, keepdim=True))
    return Candidates(
        places.gather(1, other),
        squared.gather(1, other),
        torch.full_like(reach, torch.inf) if complete else reach,
        rounding,
    )


def _expanded(
    points: Points, frame: Callable[[Tensor], Tensor], own: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Find the nearest by |x|^2 + |y|^2 - 2xy, block by block: squared distances and places."""
    parts = own.split(rows_in_block(len(points)))
    found = [_squared(points, frame, part).topk(count, dim=1, largest=False) for part in parts]
    return torch.cat([near.values for near in found]), torch.cat([near.indices for near in found])


def _squared(points: Points, frame: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
    """Compute |x|^2 + |y|^2 - 2xy in the precision that `frame` returns, [wanted, points]."""
    queries = frame(points[own])
    squared = queries.new_empty(len(own), len(points))
    targets = squared.split(rows_in_block(points.rows.shape[1]), dim=1)
    for target, block in zip(targets, map(frame, points.blocks()), strict=True):
        norms = block.square().sum(dim=1)
        target.copy_(torch.addmm(norms[None, :], queries, block.T, alpha=-2))
    return squared.add_(queries.square().sum(dim=1)[:, None])
