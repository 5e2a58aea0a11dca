"""Trace the elements of a tensor back to rows and columns of projections.

A projection is a product of tokens with a weight matrix. The operators between it and attention
(splitting heads, rotations, norms, copies) keep each element with its token and head, so elements
are traced by their place in memory, without names of modules or knowledge of layouts. Rows of a
projection are traced on to rows of the block's input. An element counts as traced only if all of
its parts are.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

_UNKNOWN, _ZERO = -1, -2  # instead of the index of a projection


class Layout(NamedTuple):
    """Layout of a tensor in its storage, in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    size: int  # bytes of one element

    def addresses(self, indices: Integers) -> Integers:
        """Return the addresses of elements, given their indices, [dimensions, elements]."""
        strides = np.array(self.strides, dtype=np.int64)
        found: Integers = strides @ indices + self.offset
        return found

    def with_dimension(self, dim: int, count: int = 1) -> "Layout":
        """Return the layout with more dimensions, of size 1."""
        return self._replace(
            shape=(*self.shape[:dim], *(1,) * count, *self.shape[dim:]),
            strides=(*self.strides[:dim], *(0,) * count, *self.strides[dim:]),
        )

    def indices(self, addresses: Integers) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the indices of elements, remainders of their addresses, and which are inside."""
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
    """Return the layout of a tensor in its storage."""
    size = values.element_size()
    strides = tuple(stride * size for stride in values.stride())
    return Layout(values.shape, strides, int(values.storage_offset()) * size, size)


class Projection:
    """Product of tokens with weights; or the hidden states that all others are made from.

    Args:
        values: The product.
        features: Dimensions that count features, in order; all others count tokens.
        given: Address and shape of the projected tensor, or None if it was not seen.
        source: Origin of the projected tensor, and its layout, or None if unknown.
        is_input: Whether this is where tracing starts: hidden states that a block received, or the
            output of an embedding table.
        made_at: Number of the operator that made it, among the operators of the block; -1 - n for
            the n-th module that projected in its own way.

    Attributes:
        given: The argument.
        is_input: The argument.
        first: Index of its first feature on all ranks that share the matrix.
        made_at: The argument.
        changes: Whether it was copied, because it is changed in place later.
        by_values: Whether its rows were chosen by numbers in tensors.
    """

    def __init__(
        self,
        values: Tensor,
        features: tuple[int, ...],
        given: tuple[int | None, tuple[int, ...]] | None = None,
        source: "tuple[ElementOrigin, Layout] | None" = None,
        *,
        is_input: bool = False,
        made_at: int = -1,
    ) -> None:
        self.first = 0
        self.made_at, self.changes = made_at, False
        self.is_input = is_input
        self._above = frozenset[Projection]() if source is None else source[0].inputs
        self._source = source if self._above else None
        self.by_values: bool = self._source is not None and self._source[0].by_values
        self._values = values
        self._features = tuple(dim % values.ndim for dim in features)
        self._tokens = tuple(dim for dim in range(values.ndim) if dim not in self._features)
        self.given = given

    def like(self, values: Tensor, made_at: int, features: tuple[int, ...] = (-1,)) -> "Projection":
        """Make a projection of the same tokens from other values."""
        return Projection(values, features, self.given, self._source, made_at=made_at)

    @property
    def inputs(self) -> "frozenset[Projection]":
        """Starting points to which its rows may be traced."""
        # Not an attribute: a cycle would keep the tensor until the garbage collector runs.
        return frozenset([self]) if self.is_input else self._above

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

    def outline(self, roots: "list[Projection]") -> tuple[Any, ...]:
        """Return all that tracing its rows depends on (see `ElementOrigin.outline`)."""
        source = self._source and (self._source[0].outline(roots), self._source[1])
        return *self.sizes, self.is_input, source

    def trace_rows(self, rows: Integers, start: "Projection | None" = None) -> Integers:
        """Trace rows to rows of a starting point; -1 if unknown."""
        if self.is_input:
            return rows
        if self._source is None:
            return np.full_like(rows, _UNKNOWN)
        made, layout = self._source
        return made.trace_rows(layout, rows, start)

    def keep(self) -> None:
        """Copy the product, because it is about to be changed in place."""
        self._values, self.changes = self._values.detach().clone(), True

    def places(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return the token index and feature index of elements, given their indices."""
        shape = self._values.shape

        def number(dims: tuple[int, ...]) -> Integers:
            found = np.zeros(indices.shape[1], dtype=np.int64)
            for dim in dims:
                found = found * shape[dim] + indices[dim]
            return found

        return number(self._tokens), number(self._features)

    @property
    def by_token(self) -> tuple[Tensor, int]:
        """The product with its token dimensions first, and the number of these dimensions."""
        return self._values.permute(*self._tokens, *self._features), len(self._tokens)


class SourceSlice(NamedTuple):
    """A region of a tensor whose elements come from another tensor.

    Attributes:
        made: Origin of the other tensor's elements.
        layout: Layout of the other tensor, with as many dimensions as this one.
        start: First index of the region, by dimension; None if it covers the whole tensor, repeated
            along dimensions where it is shorter.
        chosen: A dimension and index tensors of equal shape that select elements of the other
            tensor from that dimension on, as in advanced indexing; None if all are selected.
        where: Boolean mask of the region, expandable to the tensor; None for the whole tensor.
    """

    made: "ElementOrigin"
    layout: Layout
    start: tuple[int, ...] | None = None
    chosen: tuple[int, tuple[Tensor, ...]] | None = None
    where: Tensor | None = None

    def enter(self, indices: Integers) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the indices in the other tensor, and which are inside it."""
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
            return indices % sizes, np.ones(1, dtype=np.bool_)
        indices = indices - np.array(self.start, dtype=np.int64)[:, None]
        return indices, np.all((indices >= 0) & (indices < sizes), axis=0)


class ElementOrigin:
    """How the elements of a storage were made.

    Args:
        out: Layout of the elements.
        pieces: Regions that come from other tensors; in an overlap (a sum), the first one counts.
        projection: The projection that the elements are, instead of pieces.
        before: Origin of the rest of the storage.
        pads: Whether elements outside all pieces are zero.
        mixes: Whether an element combines several numbers of its token, and so lacks a column.
        moves: Whether elements may belong to a different token than those at their place in pieces.

    Attributes:
        out: The argument.
        projection: The argument.
        mixes: The argument.
        roots: Projections that the elements come from.
        inputs: Starting points to which rows may be traced.
        by_values: Whether elements were chosen by numbers in tensors.
    """

    def __init__(
        self,
        out: Layout,
        pieces: Sequence[SourceSlice] = (),
        projection: Projection | None = None,
        before: "ElementOrigin | None" = None,
        *,
        pads: bool = False,
        mixes: bool = False,
        moves: bool = False,
    ) -> None:
        self.out = out
        if mixes:  # pieces that lead to the start tell the row, so they come first
            pieces = sorted(pieces, key=lambda piece: not piece.made.inputs)
        self._pieces, self._before, self._pads = pieces, before, pads
        self.mixes, self._moves = mixes, moves
        self.projection = projection
        parts = [piece.made for piece in pieces] + ([] if before is None else [before])
        own = frozenset[Projection](() if projection is None else (projection,))
        self.roots: frozenset[Projection] = own.union(*(made.roots for made in parts))
        self.inputs: frozenset[Projection] = frozenset().union(
            *(root.inputs for root in self.roots)
        )
        chosen = any(piece.chosen is not None or piece.where is not None for piece in pieces)
        above: list[Projection | ElementOrigin] = [*own, *parts]
        self.by_values: bool = chosen or any(each.by_values for each in above)

    def outline(self, roots: list[Projection]) -> tuple[Any, ...]:
        """Return all that tracing depends on, as a key, if no numbers chose elements.

        Projections are represented by their index in `roots`, to which new ones are appended.
        """
        own = None
        if self.projection is not None:
            if self.projection not in roots:
                roots.append(self.projection)
            own = roots.index(self.projection), self.projection.outline(roots)
        pieces = [(piece.layout, piece.start, piece.made.outline(roots)) for piece in self._pieces]
        before = self._before and self._before.outline(roots)
        return self.out, self._pads, self.mixes, self._moves, own, before, *pieces

    def trace(
        self,
        addresses: Integers,
        known: list[Projection],
        *,
        second: bool = False,
        of_rows: bool = False,
        start: Projection | None = None,
    ) -> Integers:
        """Trace the elements at some addresses in the storage.

        New projections are appended to `known`. `second` follows sums to their last summand, not
        the first; `of_rows` asks for rows, not columns; `start` restricts tracing to one starting
        point.

        Returns:
            Index of the projection (or `_UNKNOWN` or `_ZERO`), row and column of each element,
            [3, elements].
        """
        trace = functools.partial(
            ElementOrigin.trace, known=known, second=second, of_rows=of_rows, start=start
        )
        found = np.full((3, len(addresses)), _UNKNOWN, dtype=np.int64)
        indices, rest, inside = self.out.indices(addresses)
        if self.projection is not None:
            if self.projection not in known:
                known.append(self.projection)
            found[1:] = self.projection.places(indices)
            found[0, inside] = known.index(self.projection)
        for piece in self._followed(start, of_rows=of_rows)[:: -1 if second else 1]:
            inner, fits = piece.enter(indices)
            here = inside & (found[0] == _UNKNOWN) & fits
            if here.any():
                places = piece.layout.addresses(inner[:, here])
                scaled = rest[here] * piece.layout.size // self.out.size  # inside complex numbers
                found[:, here] = trace(piece.made, places + scaled)
        if self._pads:
            found[0, inside & (found[0] == _UNKNOWN)] = _ZERO
        if self._before is not None and not inside.all():
            found[:, ~inside] = trace(self._before, addresses[~inside])
        return found

    def _followed(self, start: Projection | None, *, of_rows: bool) -> Sequence[SourceSlice]:
        """Return the pieces that tell rows (of a starting point), or columns."""
        if self._moves if of_rows else self.mixes:
            return ()
        return [piece for piece in self._pieces if start is None or start in piece.made.inputs]

    def trace_rows(
        self, layout: Layout, rows: Integers, start: Projection | None = None
    ) -> Integers:
        """Trace rows of a layout to rows of a starting point; -1 if unknown."""
        found = np.full_like(rows, _UNKNOWN)
        known: list[Projection] = []
        indices = np.stack([*np.unravel_index(rows, layout.shape[:-1]), 0 * rows])
        projection, row, _ = self.trace(layout.addresses(indices), known, of_rows=True, start=start)
        for number, root in enumerate(known):
            own = projection == number
            found[own] = root.trace_rows(row[own], start)
        return found


@dataclass(frozen=True, eq=False)
class Pattern:
    """Places of the numbers of heads in projections, by shapes alone.

    Tokens that are projected by the same weights form a *kind*. A model that has separate weights
    for image tokens, for example, has two.

    Attributes:
        which: Projection of each number of a head, [kinds, heads, width].
        columns: Column of each number of a head in its projection, [kinds, heads, width].
        kinds: Kind of each token, [sequences, tokens]; -1 if its source is unknown because it comes
            from a cache or is learned.
        rows: Row of each token in each projection, [projections, sequences, tokens]; -1 if it has
            none.
        tokens: Row of each token in the block's input, [sequences, tokens], or -1 if it is not one
            of them. None if no token is one of them, or if two share a row.
    """

    which: Integers
    columns: Integers
    kinds: Integers
    rows: Integers
    tokens: Integers | None

    @functools.cached_property
    def distinct(self) -> "Pattern":
        """The heads without repetitions, in order of first occurrence."""
        every = np.concatenate([self.which, self.columns], axis=2).swapaxes(0, 1)
        heads: dict[bytes, int] = {}  # np.unique takes ten times as long
        for number, head in enumerate(every):
            heads.setdefault(head.tobytes(), number)
        if len(heads) == len(every):
            return self
        firsts = [*heads.values()]
        return replace(self, which=self.which[:, firsts], columns=self.columns[:, firsts])

    @functools.cached_property
    def repeats(self) -> int:
        """How many times in a row each head is repeated, if equal for all heads; else 1."""
        once = self.distinct
        count = self.which.shape[1] // once.which.shape[1]
        same = (np.array_equal(own, each.repeat(count, axis=1)) for own, each in
                ((self.which, once.which), (self.columns, once.columns)))  # fmt: skip
        return count if all(same) else 1

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether each token of the block, in its order, is a row of a single projection."""
        order = np.arange(self.kinds.size)
        tokens = order if self.tokens is None else self.tokens.ravel()
        return (
            len(self.rows) == 1
            and not self.kinds.any()
            and np.array_equal(self.rows.ravel(), order)
            and np.array_equal(tokens, order)
        )

    @functools.cached_property
    def run(self) -> slice | Tensor:
        """Columns of all heads, in order, of the tokens of the first kind."""
        columns = self.columns[0].ravel()
        first = int(columns[0])
        if np.array_equal(columns, np.arange(first, first + len(columns))):
            return slice(first, first + len(columns))
        return torch.from_numpy(columns)


@dataclass(frozen=True, eq=False)
class Columns:
    """Projections, with the columns that make up the heads of queries or keys.

    Attributes:
        projections: The projections.
        pattern: The column of each number of a head.
    """

    projections: tuple[Projection, ...]
    pattern: Pattern

    @property
    def numbers(self) -> tuple[int, ...]:
        """Index of the first feature of each head, counted over all ranks."""
        firsts = np.array([projection.first for projection in self.projections], dtype=np.int64)
        which, columns = self.pattern.which[0, :, 0], self.pattern.columns[0, :, 0]
        return tuple(map(int, firsts[which] + columns))

    @property
    def tokens(self) -> Integers | None:
        """Row of each token in the block's input (see `Pattern`)."""
        return self.pattern.tokens

    @property
    def repeats(self) -> int:
        """How many times in a row each head is repeated, if equal for all heads; else 1."""
        return self.pattern.repeats

    @property
    def width(self) -> int:
        """Number of features of a head that come from projections."""
        return int(self.pattern.which.shape[2])

    def distinct(self) -> "Columns":
        """Return the heads without repetitions, in order of first occurrence."""
        return Columns(self.projections, self.pattern.distinct)


def find_columns(made: ElementOrigin, values: Tensor) -> Columns | None:
    """Find the columns of projections that make up heads, or None if some source is unknown."""
    roots: list[Projection] = []
    key, layout = made.outline(roots), layout_of(values)
    find = functools.partial(_find_pattern, made, layout, roots)
    found = find() if made.by_values else remembered((key, layout), find)
    return found and Columns(tuple(roots[number] for number in found[0]), found[1])


def find_rows(made: ElementOrigin, values: Tensor, start: Projection) -> Integers:
    """Find the row of `start` behind each row of a tensor, [..., width]; -1 if there is none."""
    roots = [start]
    key, layout = made.outline(roots), layout_of(values)
    rows = np.arange(math.prod(values.shape[:-1]))
    find = functools.partial(made.trace_rows, layout, rows, start)
    return find() if made.by_values else remembered((key, layout, "rows"), find)


# Results of earlier tracing, by all that they depend on: a third of the time in which the blocks of
# a model, which are alike, are understood.
_FOUND: dict[Any, Any] = {}
_MOST_FOUND = 16


def remembered(key: Any, find: Callable[[], Any]) -> Any:
    """Return what was found for a key before, or find it."""
    if key not in _FOUND:
        found = find()
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = found
    return _FOUND[key]


# With more kinds than this, each token has its own weights (experts, for example).
_MOST_KINDS = 8


def _find_pattern(
    made: ElementOrigin, layout: Layout, roots: list[Projection]
) -> tuple[list[int], Pattern] | None:
    """Find which of some projections make up heads, and where the numbers stand in them."""
    sequences, heads, length, _ = layout.shape
    if 0 in layout.shape:
        return None
    every = np.arange(sequences * length)
    ends = [made.trace(_addresses(layout, every, head, 0), roots) for head in (0, heads - 1)]
    members = _tokens_by_kind(*ends)
    picks = not np.array_equal(ends[0][1], ends[1][1])  # heads differ in their tokens
    if not members or (picks and not _are_of_all(ends, len(members), every.size, roots)):
        return None
    found = _columns_by_kind(made, layout, [own[len(own) // 2] for own in members], roots)
    if found is None:
        return None
    which, columns = found
    used = np.unique(which)
    kinds, tokens = np.full((2, every.size), -1)
    rows = np.full((len(used), every.size), -1)
    for kind, own in enumerate(members):
        kinds[own] = kind
        for root in np.unique(which[kind]):
            at = np.argwhere(which[kind] == root)[0]
            projection, row, _ = made.trace(_addresses(layout, own, *at), roots)
            rows[used == root, own] = np.where(projection == root, own if picks else row, -1)
        first = which[kind, 0, 0]
        tokens[own] = roots[first].trace_rows(rows[used == first, own])
    grid = sequences, length
    pattern = Pattern(
        np.searchsorted(used, which), columns, kinds.reshape(grid), rows.reshape(-1, *grid),
        tokens.reshape(grid) if _is_order(tokens) else None,
    )  # fmt: skip
    return used.tolist(), pattern


def _addresses(layout: Layout, tokens: Any, heads: Any, columns: Any) -> Integers:
    """Return addresses of numbers of heads, by the numbers of their tokens in all sequences."""
    sequences, places = np.divmod(tokens, layout.shape[2])
    return layout.addresses(np.stack(np.broadcast_arrays(sequences, heads, places, columns)))


def _tokens_by_kind(first: Integers, last: Integers) -> list[Integers]:
    """Group tokens by the columns at both ends of their heads; empty if there are too many kinds.

    Tokens with an unknown end are left out.
    """
    columns = np.stack([first[0], first[2], last[0], last[2]])
    unique, kind_of = np.unique(columns, axis=1, return_inverse=True)
    known = np.flatnonzero((unique[::2] >= 0).all(axis=0))
    if len(known) > _MOST_KINDS:
        return []
    return [np.flatnonzero(kind_of.reshape(-1) == kind) for kind in known]


def _are_of_all(
    ends: Sequence[Integers], kinds: int, tokens: int, roots: Sequence[Projection]
) -> bool:
    """Whether heads that pick their tokens do so among all heads of one kind."""
    used = {int(root) for end in ends for root in end[0] if root >= 0}
    return kinds == 1 and all(roots[root].rows == tokens for root in used)


def _is_order(tokens: Integers) -> bool:
    """Whether some tokens are rows of the block's input, and no two are the same."""
    own = tokens[tokens >= 0]
    return 0 < len(own) == len(np.unique(own))


def _columns_by_kind(
    made: ElementOrigin, layout: Layout, tokens: Sequence[int], roots: list[Projection]
) -> Integers | None:
    """Find projection and column of all numbers of tokens' heads, [2, tokens, heads, width]."""
    found = [_columns_of(made, layout, token, roots) for token in tokens]
    known = [each for each in found if each is not None]
    if len(known) < len(found) or len({each.shape for each in known}) > 1:
        return None
    return np.moveaxis(np.stack(known), -1, 0)


def _columns_of(
    made: ElementOrigin, layout: Layout, token: int, roots: list[Projection]
) -> Integers | None:
    """Find projection and column of each number of a token's heads, [heads, width, 2]."""
    heads, width = layout.shape[1], layout.shape[3]
    head, place = (each.ravel() for each in np.indices((heads, width)))
    addresses = _addresses(layout, token, head, place)

    def pairs_of(*, second: bool) -> Integers:
        return made.trace(addresses, roots, second=second)[::2].T.reshape(heads, width, 2)

    pairs = pairs_of(second=False)
    which = pairs[..., 0]
    kept = width - (which == _ZERO).all(axis=0)[::-1].cumprod().sum().item()
    if not kept or (which[:, :kept] < 0).any():
        return None
    of = [roots[root] for root in np.unique(which[:, :kept])]
    # Hidden states are not a projection, and all heads must have the same tokens.
    if any(root.is_input for root in of) or len({root.rows for root in of}) > 1:
        return None
    pairs = pairs[:, :kept].copy()
    numbers = np.sort(pairs[..., 0] * max(root.width for root in of) + pairs[..., 1], axis=1)
    repeats = (numbers[:, 1:] == numbers[:, :-1]).any()
    return None if repeats and not _make_distinct(pairs, pairs_of(second=True)) else pairs


def _make_distinct(pairs: Integers, others: Integers) -> bool:
    """Give each number of a head a different column; return whether that was possible.

    A rotation makes two numbers from the same two columns, so either assignment is valid.
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
