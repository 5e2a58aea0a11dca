"""Columns: which columns of which projection the elements of a tensor were made of.

A projection is a product of tokens with a matrix of weights. What follows it until attention (heads
taken apart, rotations, norms, copies) keeps each element of the same token and head: so an element
is traced back through the operators, by where it lies in memory, and neither names of modules nor
layouts have to be known.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

_UNKNOWN, _ZERO = -1, -2  # instead of the number of a projection


class Layout(NamedTuple):
    """Where the elements of a tensor lie in its storage, in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    size: int  # of an element

    def addresses(self, indices: Integers) -> Integers:
        """Return the addresses of elements, given their indices, [dimensions, elements]."""
        strides = np.array(self.strides, dtype=np.int64)
        found: Integers = strides @ indices + self.offset
        return found

    def with_dimension(self, dim: int) -> "Layout":
        """Return the same with one more dimension, of size 1."""
        return self._replace(
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            strides=(*self.strides[:dim], 0, *self.strides[dim:]),
        )

    def indices(self, addresses: Integers) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the indices of elements, what is left of their addresses, and which are inside."""
        rest = addresses - self.offset
        found = np.zeros((len(self.shape), len(addresses)), dtype=np.int64)
        for dim in sorted(range(len(self.shape)), key=self.strides.__getitem__, reverse=True):
            if self.strides[dim] and self.shape[dim] > 1:
                found[dim] = rest // self.strides[dim]
                rest = rest - found[dim] * self.strides[dim]
        sizes = np.array(self.shape, dtype=np.int64)[:, None]
        inside = ((found >= 0) & (found < sizes)).all(axis=0) & (rest >= 0) & (rest < self.size)
        return found, rest, inside


def layout_of(values: Tensor) -> Layout:
    """Return where the elements of a tensor lie in its storage.

    Args:
        values: Any strided tensor.
    """
    size = values.element_size()
    strides = tuple(stride * size for stride in values.stride())
    return Layout(values.shape, strides, int(values.storage_offset()) * size, size)


class Projection:
    """What a matrix of weights made of tokens.

    Args:
        values: The product.
        features: Its dimensions that count features, from the first; the others count tokens.
        given: Address and shape of what it was made of; None where it was not seen.

    Attributes:
        given: The argument.
        first: Number of its first feature among those of all ranks that share out the matrix.
    """

    def __init__(
        self,
        values: Tensor,
        features: tuple[int, ...],
        given: tuple[int | None, tuple[int, ...]] | None = None,
    ) -> None:
        self.first = 0
        self._values = values
        self._features = tuple(dim % values.ndim for dim in features)
        self._tokens = tuple(dim for dim in range(values.ndim) if dim not in self._features)
        self.given = given

    @property
    def rows(self) -> int:
        """Number of tokens."""
        return math.prod(self._values.shape[dim] for dim in self._tokens)

    @property
    def width(self) -> int:
        """Number of features."""
        return math.prod(self._values.shape[dim] for dim in self._features)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the product, and its dimensions that count features."""
        return tuple(self._values.shape), self._features

    def keep(self) -> None:
        """Copy the product: it is about to be changed in place."""
        self._values = self._values.detach().clone()

    def places(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return the number of the token and of the feature of elements, given their indices."""
        shape = self._values.shape

        def number(dims: tuple[int, ...]) -> Integers:
            found = np.zeros(indices.shape[1], dtype=np.int64)
            for dim in dims:
                found = found * shape[dim] + indices[dim]
            return found

        return number(self._tokens), number(self._features)

    @property
    def by_token(self) -> tuple[Tensor, int]:
        """The product with the dimensions of its tokens first, and how many these are."""
        return self._values.permute(*self._tokens, *self._features), len(self._tokens)


class Piece(NamedTuple):
    """A part of a tensor that holds elements of another one.

    Attributes:
        made: How the other one was made.
        layout: Where its elements lie, with as many dimensions as the tensor.
        start: Index of its first element in the tensor, by dimension; None where it covers all of
            it, repeated along dimensions in which it is shorter.
        chosen: A dimension, and which of its indices were taken; None for all.
    """

    made: "Made"
    layout: Layout
    start: tuple[int, ...] | None = None
    chosen: tuple[int, Tensor] | None = None

    def enter(self, indices: Integers) -> tuple[Integers, NDArray[np.bool_] | None]:
        """Return the indices in the other tensor, and which are inside it (None for all)."""
        sizes = np.array(self.layout.shape, dtype=np.int64)[:, None]
        if self.chosen is not None:
            dim, order = self.chosen
            indices = indices.copy()
            indices[dim] = order.cpu().numpy()[indices[dim]]
        if self.start is None:
            return indices % sizes, None
        indices = indices - np.array(self.start, dtype=np.int64)[:, None]
        return indices, np.all((indices >= 0) & (indices < sizes), axis=0)


class Traced(NamedTuple):
    """Where elements come from: projection, or `_UNKNOWN` or `_ZERO`; token and feature of each."""

    projection: Integers
    row: Integers
    column: Integers


class Made:
    """How the elements of a storage were made.

    Args:
        out: Where they lie.
        pieces: What they hold elements of; where these overlap (sums), the first ones count.
        projection: What they are themselves, instead.
        before: How the rest of the storage was made.
        pads: Whether what is of no piece is zero.

    Attributes:
        out: The argument.
        projection: The argument.
        roots: Projections that they come from.
    """

    def __init__(
        self,
        out: Layout,
        pieces: Sequence[Piece] = (),
        projection: Projection | None = None,
        before: "Made | None" = None,
        *,
        pads: bool = False,
    ) -> None:
        self.out = out
        self._pieces, self._before, self._pads = pieces, before, pads
        self.projection = projection
        parts = [piece.made for piece in pieces] + ([] if before is None else [before])
        own = frozenset[Projection](() if projection is None else (projection,))
        self.roots: frozenset[Projection] = own.union(*(made.roots for made in parts))

    def outline(self, roots: list[Projection]) -> tuple[Any, ...] | None:
        """Return all that tracing depends on, for a key; None if indices chose elements.

        Args:
            roots: Projections, to which those that are met are added; numbers stand for them.
        """
        parts: list[Any] = [self.out, self._pads]
        if self.projection is not None:
            if self.projection not in roots:
                roots.append(self.projection)
            parts.append((roots.index(self.projection), *self.projection.sizes))
        for piece in self._pieces:
            inner = None if piece.chosen is not None else piece.made.outline(roots)
            if inner is None:
                return None
            parts.append((piece.layout, piece.start, inner))
        if self._before is not None:
            parts.append(self._before.outline(roots))
            if parts[-1] is None:
                return None
        return tuple(parts)

    def trace(
        self, addresses: Integers, known: list[Projection], *, second: bool = False
    ) -> Traced:
        """Return where elements come from.

        Args:
            addresses: Their addresses in the storage.
            known: Projections, to which those that are met are added.
            second: Whether sums are followed to the last of what was added, not to the first.
        """
        found = Traced(*np.full((3, len(addresses)), _UNKNOWN, dtype=np.int64))
        indices, rest, inside = self.out.indices(addresses)
        if self.projection is not None:
            if self.projection not in known:
                known.append(self.projection)
            found.row[:], found.column[:] = self.projection.places(indices)
            found.projection[inside] = known.index(self.projection)
        for piece in self._pieces[::-1] if second else self._pieces:
            entered, fits = piece.enter(indices)
            here = inside & (found.projection == _UNKNOWN)
            here = here if fits is None else here & fits
            if here.any():
                inner = piece.layout.addresses(entered[:, here])
                scaled = rest[here] * piece.layout.size // self.out.size  # in a complex number
                _assign(found, here, piece.made.trace(inner + scaled, known, second=second))
        if self._pads:
            found.projection[inside & (found.projection == _UNKNOWN)] = _ZERO
        if self._before is not None and not inside.all():
            _assign(found, ~inside, self._before.trace(addresses[~inside], known, second=second))
        return found


def _assign(found: Traced, here: NDArray[np.bool_], others: Traced) -> None:
    for own, other in zip(found, others, strict=True):
        own[here] = other


class Columns(NamedTuple):
    """The columns of projections that the heads of queries or keys are made of.

    Attributes:
        projections: The projections.
        which: Which of them each number of a head comes from, [heads, width].
        columns: Which of its columns, [heads, width].
        steps: From a sequence to the next, and from a token to the next, in rows of each of them.
        sequences: Number of sequences.
    """

    projections: tuple[Projection, ...]
    which: Integers
    columns: Integers
    steps: tuple[tuple[int, int], ...]
    sequences: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of the first feature of each head among those of all ranks."""
        firsts = np.array([projection.first for projection in self.projections], dtype=np.int64)
        return tuple(map(int, firsts[self.which[:, 0]] + self.columns[:, 0]))

    @property
    def repeats(self) -> int:
        """How many heads in a row are the same, where that is the same number for all; else 1."""
        once = self.distinct()
        count = len(self.which) // len(once.which)
        same = (np.array_equal(own, each.repeat(count, axis=0)) for own, each in
                ((self.which, once.which), (self.columns, once.columns)))  # fmt: skip
        return count if all(same) else 1

    def distinct(self) -> "Columns":
        """Return those of the heads that differ, in the order of the first of each."""
        rows = np.hstack([self.which, self.columns])
        heads: dict[bytes, int] = {}  # np.unique takes ten times as long
        for number, row in enumerate(rows):
            heads.setdefault(row.tobytes(), number)
        firsts = [*heads.values()]
        return self._replace(which=self.which[firsts], columns=self.columns[firsts])

    def with_heads_of(self, other: "Columns") -> "Columns":
        """Add the heads of another call of the same attention that are not here yet.

        Args:
            other: Columns of heads of the same width; others are not added.
        """
        if other.which.shape[1] != self.which.shape[1] or other.sequences != self.sequences:
            return self
        projections = list(self.projections)
        steps = list(self.steps)
        for projection, step in zip(other.projections, other.steps, strict=True):
            if projection not in projections:
                projections.append(projection)
                steps.append(step)
        order = np.array([projections.index(each) for each in other.projections])
        joined = Columns(
            tuple(projections),
            np.concatenate([self.which, order[other.which]]),
            np.concatenate([self.columns, other.columns]),
            tuple(steps),
            self.sequences,
        )
        return joined.distinct()


def find_columns(made: Made, values: Tensor) -> Columns | None:
    """Find the columns of projections that heads are made of; of blocks that are alike, once.

    Args:
        made: How the storage of the heads was made.
        values: Queries or keys, [sequences, heads, places, width].
    """
    roots: list[Projection] = []
    outline = made.outline(roots)
    if outline is None:
        return _find_columns(made, values)
    key = outline, layout_of(values)
    if key not in _FOUND:
        found = _find_columns(made, values)
        order = () if found is None else tuple(map(roots.index, found.projections))
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = order, found and found._replace(projections=())
    order, found = _FOUND[key]
    return found and found._replace(projections=tuple(roots[number] for number in order))


# Columns that were found, without their projections, by all that they depend on; and the numbers of
# these projections among those that were met.
_FOUND: dict[Any, tuple[tuple[int, ...], Columns | None]] = {}
_MOST_FOUND = 16


def _find_columns(made: Made, values: Tensor) -> Columns | None:
    """Find the columns of projections that heads are made of.

    Args:
        made: How the storage of the heads was made.
        values: Queries or keys, [sequences, heads, places, width].

    Returns:
        The columns, without those at the end that no head has (zeros that widen heads for a
        kernel); None where there are others whose source is not known.
    """
    length = values.shape[2]
    # Keys at both ends may be of no token of this pass: kept in a cache, or learned.
    for place in dict.fromkeys((length // 2, length - 1, 0)):
        found = _columns_at(made, values, place) if values.numel() else None
        if found is not None:
            return found
    return None


def _columns_at(made: Made, values: Tensor, place: int) -> Columns | None:
    """Find the columns by one token, and by the next ones the steps between tokens."""
    sequences, heads, length, width = values.shape
    beside = place - 1 if place else min(1, length - 1)
    head, column = (each.flatten() for each in np.indices((heads, width)))
    tokens = np.stack([np.zeros_like(head), head, np.full_like(head, place), column])
    ends = tokens[:, [0, width - 1]]
    others = np.concatenate([ends, ends], axis=1)
    others[0, :2], others[2, 2:] = sequences - 1, beside
    known: list[Projection] = []
    addresses = layout_of(values).addresses(np.concatenate([tokens, others], axis=1))
    traced = made.trace(addresses, known)
    which, row, columns = (each[:-4].reshape(heads, width) for each in traced)
    kept = width - (which == _ZERO).all(axis=0)[::-1].cumprod().sum().item()
    if not kept or (which[:, :kept] < 0).any():
        return None
    steps = [(0, 0)] * len(known)
    for end in (1, 0):
        number, first = (each[0, (width - 1) * end] for each in (which, row))
        if number < 0:
            continue
        across, along = ((traced.row[at + end - 4] - first).item() for at in (0, 2))
        apart = max(sequences - 1, 1), (beside - place) or 1
        steps[number] = across // apart[0], along // apart[1]
    pairs = np.stack([which, columns], axis=-1)[:, :kept]
    widest = max(projection.width for projection in known)
    numbers = np.sort(pairs[..., 0] * widest + pairs[..., 1], axis=1)
    if (numbers[:, 1:] == numbers[:, :-1]).any():
        again = made.trace(addresses[:-4], known, second=True)
        both = np.stack([again.projection, again.column], axis=-1)
        if not _make_distinct(pairs, both.reshape(heads, width, 2)):
            return None
    return Columns(tuple(known), pairs[..., 0], pairs[..., 1], tuple(steps), sequences)


def _make_distinct(pairs: Integers, others: Integers) -> bool:
    """Give each number of a head a column of its own; say whether that was possible.

    A rotation makes two numbers of the same two: which of them comes from which is a choice.

    Args:
        pairs: Projection and column of each number, [heads, width, 2]; changed in place.
        others: What else they were made of.
    """
    for head, other in zip(pairs, others, strict=True):
        taken = set[tuple[int, int]]()
        for place, pair in enumerate(head):
            own = tuple(map(int, pair))
            if own in taken:
                own = tuple(map(int, other[place]))
                head[place] = own
            if own in taken or own[0] < 0:
                return False
            taken.add((own[0], own[1]))
    return True
