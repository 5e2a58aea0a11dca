"""Columns: which rows and columns of which projection the elements of a tensor were made of.

A projection is a product of tokens with a matrix of weights. What follows it until attention (heads
taken apart, rotations, norms, copies) keeps each element of the same token and head: so an element
is traced back through the operators, by where it lies in memory, and neither names of modules nor
layouts have to be known. From a row of a projection it goes on to the row of the hidden states that
the block was given. If any part of an element is not traced, the element is not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

_UNKNOWN, _ZERO = -1, -2  # instead of the number of a projection


class Layout(NamedTuple):
    """Layout of a tensor in its storage, in bytes."""

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
    """Return where the elements of a tensor lie in its storage."""
    size = values.element_size()
    strides = tuple(stride * size for stride in values.stride())
    return Layout(values.shape, strides, int(values.storage_offset()) * size, size)


class Projection:
    """What a matrix of weights made of tokens; or the hidden states, of which all others are made.

    Args:
        values: The product.
        features: Its dimensions that count features, from the first; the others count tokens.
        given: Address and shape of what it was made of; None if that was not seen.
        source: How what it was made of was itself made, and where its elements lie; None if that is
            not known.
        is_input: Whether these are what is followed from the start: the hidden states that a block
            was given, or what an embedding table returned.

    Attributes:
        given: The argument.
        is_input: The argument.
        first: Number of its first feature among those of all ranks that share out the matrix.
        inputs: What is followed from the start and its rows may be traced to.
    """

    def __init__(
        self,
        values: Tensor,
        features: tuple[int, ...],
        given: tuple[int | None, tuple[int, ...]] | None = None,
        source: "tuple[Made, Layout] | None" = None,
        *,
        is_input: bool = False,
    ) -> None:
        self.first = 0
        self.is_input = is_input
        self._source = source
        above = frozenset[Projection]() if source is None else source[0].inputs
        self.inputs: frozenset[Projection] = frozenset([self]) if is_input else above
        self._values = values
        self._features = tuple(dim % values.ndim for dim in features)
        self._tokens = tuple(dim for dim in range(values.ndim) if dim not in self._features)
        self.given = given

    def like(self, values: Tensor) -> "Projection":
        """Make a projection of the same tokens, whose values have the width last."""
        return Projection(values, (-1,), self.given, self._source)

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

    def outline(self, roots: "list[Projection]") -> tuple[Any, ...] | None:
        """Return all that tracing its rows depends on (see `Made.outline`)."""
        source = self._source if self.inputs else None
        inner = None if source is None else source[0].outline(roots)
        if source is not None and inner is None:
            return None
        return *self.sizes, self.is_input, source and source[1], inner

    def trace_rows(self, rows: Integers, start: "Projection | None" = None) -> Integers:
        """Return the rows that some rows were made of, of what is followed; -1 if not known."""
        if self.is_input or not self.inputs or self._source is None:
            return rows if self.is_input else np.full_like(rows, _UNKNOWN)
        made, layout = self._source
        return made.trace_rows(layout, rows, start)

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
        start: Index of its first element in the tensor, by dimension; None if it covers all of
            it, repeated along dimensions in which it is shorter.
        chosen: A dimension, and which indices were taken of each of the other tensor's dimensions
            from that one on, all of one shape, which stands in their place; None for all.
        where: Which elements of the tensor are its own, as a tensor that can be expanded to it;
            None for all.
    """

    made: "Made"
    layout: Layout
    start: tuple[int, ...] | None = None
    chosen: tuple[int, tuple[Tensor, ...]] | None = None
    where: Tensor | None = None

    def enter(self, indices: Integers) -> tuple[Integers, NDArray[np.bool_] | None]:
        """Return the indices in the other tensor, and which are inside it (None for all)."""
        sizes = np.array(self.layout.shape, dtype=np.int64)[:, None]
        if self.where is not None:
            own = self.where.cpu().numpy()
            places = np.minimum(indices, np.array(own.shape)[:, None] - 1)
            return indices % sizes, own[tuple(places)]
        if self.chosen is not None:
            dim, orders = self.chosen
            end = dim + orders[0].ndim
            taken = [order.cpu().numpy()[tuple(indices[dim:end])] for order in orders]
            indices = np.stack([*indices[:dim], *taken, *indices[end:]])
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
        mixes: Whether an element is made of several numbers of its token, so that it has no column.
        moves: Whether elements may be of another token than those at their place in the pieces.

    Attributes:
        out: The argument.
        projection: The argument.
        mixes: The argument.
        roots: Projections that they come from.
        inputs: What is followed from the start and rows may be traced to.
    """

    def __init__(
        self,
        out: Layout,
        pieces: Sequence[Piece] = (),
        projection: Projection | None = None,
        before: "Made | None" = None,
        *,
        pads: bool = False,
        mixes: bool = False,
        moves: bool = False,
    ) -> None:
        self.out = out
        if mixes:  # of several that may tell the row, those that lead to the start go first
            pieces = sorted(pieces, key=lambda piece: not piece.made.inputs)
        self._pieces, self._before, self._pads = pieces, before, pads
        self.mixes, self._moves = mixes, moves
        self.projection = projection
        parts = [piece.made for piece in pieces] + ([] if before is None else [before])
        own = frozenset[Projection](() if projection is None else (projection,))
        self.roots: frozenset[Projection] = own.union(*(made.roots for made in parts))
        self.inputs = frozenset[Projection]().union(*(root.inputs for root in self.roots))

    def outline(self, roots: list[Projection]) -> tuple[Any, ...] | None:
        """Return all that tracing depends on, for a key; None if indices chose elements.

        Args:
            roots: Projections, to which those that are met are added; numbers stand for them.
        """
        parts: list[Any] = [self.out, self._pads, self.mixes, self._moves]
        if self.projection is not None:
            if self.projection not in roots:
                roots.append(self.projection)
            rows = self.projection.outline(roots)
            if rows is None:
                return None
            parts.append((roots.index(self.projection), rows))
        for piece in self._pieces:
            by_values = piece.chosen is not None or piece.where is not None
            inner = None if by_values else piece.made.outline(roots)
            if inner is None:
                return None
            parts.append((piece.layout, piece.start, inner))
        if self._before is not None:
            parts.append(self._before.outline(roots))
            if parts[-1] is None:
                return None
        return tuple(parts)

    def trace(
        self,
        addresses: Integers,
        known: list[Projection],
        *,
        second: bool = False,
        of_rows: bool = False,
        start: Projection | None = None,
    ) -> Traced:
        """Return where elements come from.

        Args:
            addresses: Their addresses in the storage.
            known: Projections, to which those that are met are added.
            second: Whether sums are followed to the last of what was added, not to the first.
            of_rows: Whether rows are asked for, and not columns.
            start: Of what is followed, that which rows are traced to; None for all.
        """
        found = Traced(*np.full((3, len(addresses)), _UNKNOWN, dtype=np.int64))
        indices, rest, inside = self.out.indices(addresses)
        if self.projection is not None:
            if self.projection not in known:
                known.append(self.projection)
            found.row[:], found.column[:] = self.projection.places(indices)
            found.projection[inside] = known.index(self.projection)
        pieces = () if (self._moves if of_rows else self.mixes) else self._pieces
        if start is not None:
            pieces = [piece for piece in pieces if start in piece.made.inputs]
        for piece in pieces[::-1] if second else pieces:
            entered, fits = piece.enter(indices)
            here = inside & (found.projection == _UNKNOWN)
            here = here if fits is None else here & fits
            if here.any():
                inner = piece.layout.addresses(entered[:, here])
                scaled = rest[here] * piece.layout.size // self.out.size  # in a complex number
                _assign(
                    found,
                    here,
                    piece.made.trace(
                        inner + scaled, known, second=second, of_rows=of_rows, start=start
                    ),
                )
        if self._pads:
            found.projection[inside & (found.projection == _UNKNOWN)] = _ZERO
        if self._before is not None and not inside.all():
            _assign(
                found,
                ~inside,
                self._before.trace(
                    addresses[~inside], known, second=second, of_rows=of_rows, start=start
                ),
            )
        return found

    def trace_rows(
        self, layout: Layout, rows: Integers, start: Projection | None = None
    ) -> Integers:
        """Return the rows that some rows were made of, of what is followed; -1 if not known."""
        found = np.full_like(rows, _UNKNOWN)
        known: list[Projection] = []
        indices = np.stack([*np.unravel_index(rows, layout.shape[:-1]), 0 * rows])
        traced = self.trace(layout.addresses(indices), known, of_rows=True, start=start)
        for number, root in enumerate(known):
            own = traced.projection == number
            found[own] = root.trace_rows(traced.row[own], start)
        return found


def _assign(found: Traced, here: NDArray[np.bool_], others: Traced) -> None:
    for own, other in zip(found, others, strict=True):
        own[here] = other


class Columns(NamedTuple):
    """The columns of projections that the heads of queries or keys are made of.

    Tokens that are projected by the same weights are a *kind*: there is more than one if a model
    has weights of their own for the tokens of an image, say.

    Attributes:
        projections: The projections.
        which: Which of them each number of a head comes from, [kinds, heads, width].
        columns: Which of its columns, [kinds, heads, width].
        kinds: The kind of each token, [sequences, tokens]; -1 for one whose source is not known: it
            was kept in a cache, or is learned.
        rows: Row of each token in each projection, [projections, sequences, tokens]; -1 if it has
            none there.
        tokens: Row of each token in the hidden states that the block was given, [sequences,
            tokens]; -1 for one that is none of them, and None if that is all of them, or if two are
            of one row.
    """

    projections: tuple[Projection, ...]
    which: Integers
    columns: Integers
    kinds: Integers
    rows: Integers
    tokens: Integers | None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of the first feature of each head among those of all ranks."""
        firsts = np.array([projection.first for projection in self.projections], dtype=np.int64)
        return tuple(map(int, firsts[self.which[0, :, 0]] + self.columns[0, :, 0]))

    @property
    def repeats(self) -> int:
        """How many heads in a row are the same, if that is the same number for all; else 1."""
        once = self.distinct()
        count = self.which.shape[1] // once.which.shape[1]
        same = (np.array_equal(own, each.repeat(count, axis=1)) for own, each in
                ((self.which, once.which), (self.columns, once.columns)))  # fmt: skip
        return count if all(same) else 1

    def distinct(self) -> "Columns":
        """Return those of the heads that differ, in the order of the first of each."""
        every = np.concatenate([self.which, self.columns], axis=2).swapaxes(0, 1)
        heads: dict[bytes, int] = {}  # np.unique takes ten times as long
        for number, head in enumerate(every):
            heads.setdefault(head.tobytes(), number)
        firsts = [*heads.values()]
        return self._replace(which=self.which[:, firsts], columns=self.columns[:, firsts])


def find_columns(made: Made, values: Tensor) -> Columns | None:
    """Find the columns of projections that heads are made of; of blocks that are alike, once.

    None if there are others whose source is not known.
    """
    roots: list[Projection] = []
    outline = made.outline(roots)
    if outline is None:
        return _find_columns(made, values)

    def find() -> tuple[tuple[int, ...], Columns | None]:
        found = _find_columns(made, values)
        order = () if found is None else tuple(map(roots.index, found.projections))
        return order, found and found._replace(projections=())

    order, found = _remembered((outline, layout_of(values)), find)
    return found and found._replace(projections=tuple(roots[number] for number in order))


def find_rows(made: Made, values: Tensor, start: Projection) -> Integers:
    """Find the row of `start` that each row of a tensor is of; -1 if it is of none.

    Args:
        made: How the storage of the tensor was made.
        values: The tensor, [..., width].
        start: One of `made.inputs`.
    """
    roots: list[Projection] = []
    outline, layout = made.outline(roots), layout_of(values)
    rows = np.arange(math.prod(values.shape[:-1]))
    if outline is None or start not in roots:
        return made.trace_rows(layout, rows, start)
    key = outline, layout, roots.index(start)
    return _remembered(key, lambda: made.trace_rows(layout, rows, start))


# What was traced in passes before, by all that it depends on: without the projections, of which
# numbers among those that were met are kept.
_FOUND: dict[Any, Any] = {}
_MOST_FOUND = 16


def _remembered(key: Any, find: Callable[[], Any]) -> Any:
    if key not in _FOUND:
        found = find()
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = found
    return _FOUND[key]


# More kinds of tokens than this are no kinds: each token has its own weights (experts, say).
_MOST_KINDS = 8


def _find_columns(made: Made, values: Tensor) -> Columns | None:
    """Trace both ends of every token, and all numbers of one token of each kind."""
    sequences, heads, length, _ = values.shape
    layout, known = layout_of(values), list[Projection]()
    number, place = (each.ravel() for each in np.indices((sequences, length)))
    every = np.arange(number.size)

    def trace(tokens: Integers, head: int, column: int) -> Traced:
        at = np.stack([number[tokens], 0 * tokens + head, place[tokens], 0 * tokens + column])
        return made.trace(layout.addresses(at), known)

    if not values.numel():
        return None
    ends = [trace(every, head, 0) for head in (0, heads - 1)]
    traced = np.stack([x for end in ends for x in (end.projection, end.column)])
    unique, kind_of = np.unique(traced, axis=1, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    kinds = np.flatnonzero((unique[::2] >= 0).all(axis=0))
    if not 0 < len(kinds) <= _MOST_KINDS:
        return None
    members = [every[kind_of == kind] for kind in kinds]
    picked = not np.array_equal(ends[0].row, ends[1].row)  # each head has tokens of its own
    if picked and (len(kinds) > 1 or any(root.rows != every.size for root in known)):
        return None
    middle = [own[len(own) // 2] for own in members]
    found = [_columns_of(made, layout, number[at], place[at], known) for at in middle]
    pairs = [each for each in found if each is not None]
    if len(pairs) < len(found) or len({each.shape for each in pairs}) > 1:
        return None
    which, columns = np.moveaxis(np.stack(pairs), -1, 0)
    used = np.unique(which)
    rows, tokens = np.full((len(used), number.size), -1), np.full(number.size, -1)
    kind = np.full(number.size, -1)
    for at, own in enumerate(members):
        kind[own] = at
        for root in np.unique(which[at]):
            end = trace(own, *np.argwhere(which[at] == root)[0])
            row = every if picked else end.row
            rows[used == root, own] = np.where(end.projection == root, row, -1)
        first = which[at, 0, 0]
        tokens[own] = known[first].trace_rows(rows[used == first, own])
    own = tokens[tokens >= 0]
    is_order = len(own) > 0 and len(np.unique(own)) == len(own)
    grid = sequences, length
    return Columns(
        tuple(known[root] for root in used), np.searchsorted(used, which), columns,
        kind.reshape(grid), rows.reshape(-1, *grid), tokens.reshape(grid) if is_order else None,
    )  # fmt: skip


def _columns_of(
    made: Made, layout: Layout, sequence: int, token: int, known: list[Projection]
) -> Integers | None:
    """Find projection and column of each number of the heads of a token, [heads, width, 2]."""
    heads, width = layout.shape[1], layout.shape[3]
    head, place = (each.ravel() for each in np.indices((heads, width)))
    at = np.stack([0 * head + sequence, head, 0 * head + token, place])
    addresses = layout.addresses(at)
    traced = made.trace(addresses, known)
    pairs = np.stack([traced.projection, traced.column], axis=-1).reshape(heads, width, 2)
    which = pairs[..., 0]
    kept = width - (which == _ZERO).all(axis=0)[::-1].cumprod().sum().item()
    if not kept or (which[:, :kept] < 0).any():
        return None
    of = [known[root] for root in np.unique(which[:, :kept])]
    # Hidden states are no projection, and heads are of the same tokens.
    if any(root.is_input for root in of) or len({root.rows for root in of}) > 1:
        return None
    pairs = pairs[:, :kept].copy()
    widest = max(projection.width for projection in known)
    numbers = np.sort(pairs[..., 0] * widest + pairs[..., 1], axis=1)
    if (numbers[:, 1:] == numbers[:, :-1]).any():
        again = made.trace(addresses, known, second=True)
        both = np.stack([again.projection, again.column], axis=-1)
        if not _make_distinct(pairs, both.reshape(heads, width, 2)):
            return None
    return pairs


def _make_distinct(pairs: Integers, others: Integers) -> bool:
    """Give each number of a head a column of its own; say whether that was possible.

    A rotation makes two numbers of the same two: which of them comes from which is a choice.
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
