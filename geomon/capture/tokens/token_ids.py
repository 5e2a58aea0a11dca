"""Find the token ids of a pass among all integers that embedding tables received.

Several tables may receive integers of the tokens' shape: token types, positions, hashes of several
tokens, sentences of another stack, tokens to predict. Hidden states are traced back to the rows
that a table returned; if the operators between were not seen (compiled code), the shape decides.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.storage import Shape, send

# Integers with at least this share of steps by one are positions; token ids rarely step by one.
_BY_ONE = 0.5
# Largest number of different token types.
_MOST_TYPES = 4


class Lookup(NamedTuple):
    """One call of an embedding table.

    Attributes:
        ids: The integers that it received.
        table: The table.
        passed: Whether the integers are (part of) an argument of the model.
        number: Number of the call in the window.
        width: Width of its output, or None if it was not seen.
    """

    ids: Tensor
    table: nn.Module
    passed: bool = False
    number: int = 0
    width: int | None = None


class FoundIds(NamedTuple):
    """The token ids of hidden states.

    Attributes:
        lookup: The call of the table that received them.
        order: Index into the ids for each row of hidden states, in the hidden states' shape.
    """

    lookup: Lookup
    order: Tensor

    def arrange(self, values: Tensor) -> Tensor:
        """Expand values in the ids' shape to the shape of the hidden states."""
        return values.flatten()[send(self.order, values.device)]

    @property
    def streams(self) -> int:
        """Number of rows of hidden states per token."""
        return max(1, self.order.numel() // max(1, self.lookup.ids.numel()))

    @property
    def turned(self) -> bool:
        """Whether ids are [batch, length] but hidden states are [length, batch]."""
        ids = self.lookup.ids.shape
        if len(ids) != 2:
            return False
        first = self.order[..., 0] if self.order.ndim > len(ids) else self.order
        return torch.equal(first, _numbered(ids).T)


def no_positions(lookup: Lookup) -> bool:
    """Whether these integers are not position ids (position ids mostly rise by one)."""
    ids = lookup.ids
    if ids.shape[-1:].numel() < 2:
        return True
    return float((ids.diff(dim=-1) == 1).float().mean()) < _BY_ONE


def checksum(lookup: Lookup) -> str:
    """Return a checksum of the integers that a table received."""
    return f"{zlib.crc32(lookup.ids.cpu().contiguous().numpy().tobytes()):08x}"


class TokenIds:
    """The calls of embedding tables of one pass, and which of them received the token ids.

    Attributes:
        lookups: Calls of tables, in the order seen.
    """

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self.forget_states()

    def forget_states(self) -> None:
        """Forget the hidden states, as another pass begins whose tables were already called."""
        self._begun: int | None = None  # number of lookups before the first hidden states
        self._found: dict[Shape, FoundIds | None] = {}  # by the shape of hidden states

    def begin(self) -> None:
        """Remember that hidden states exist: later integers (targets, say) did not make them."""
        self._begun = len(self.lookups)

    def meet(self, shape: Shape, trace: Callable[[], Mapping[int, Tensor]]) -> None:
        """Find the token ids of hidden states of a new shape.

        `trace` returns, by number of a table's call, the row of its output behind each row of
        hidden states.
        """
        if shape not in self._found:
            self._found[shape] = self._choose(shape, trace())

    def first_fitting(self, shapes: Sequence[Shape]) -> Shape | None:
        """Return the first shape that fits the token ids, or None.

        Shapes that need transposed ids come later, and shapes of integers that look like positions
        last.
        """
        found = [
            (not no_positions(one.lookup), one.turned, shape)
            for shape in shapes
            for one in _by_shape(self.lookups, shape)
        ]
        return min(found, key=lambda fit: fit[:2])[2] if found else None

    def may_have_made(self, hidden: Tensor) -> bool:
        """Whether some table may have returned one row, of equal width, per row of this tensor."""
        found = _by_shape(self.lookups, hidden.shape[:-1])
        return any(one.lookup.width in (None, *hidden.shape[-1:]) for one in found)

    def find(self, shape: Shape) -> FoundIds | None:
        """Return the token ids of hidden states of a shape, or None if no table received any."""
        return self._found.get(shape) or self._choose(shape, {})

    def turned(self, shape: Shape) -> bool:
        """Whether ids are [batch, length] but hidden states are [length, batch, width]."""
        found = self._found.get(shape)
        return found is not None and found.turned

    def streams(self, shape: Shape) -> FoundIds | None:
        """Return the token ids of hidden states with several rows per token, else None."""
        found = self._found.get(shape)
        return found if found is not None and found.streams > 1 else None

    def table(self, shape: Shape) -> nn.Module | None:
        """Return the embedding table of the tokens, or None if no table received token ids."""
        found = self.find(shape)
        return None if found is None else found.lookup.table

    def fewer_than(self, shape: Shape) -> bool:
        """Whether tables received integers for these sequences, but never for all tokens."""
        found = self.find(shape)
        if len(shape) != 2 or (found is not None and no_positions(found.lookup)):
            return False
        given = [x.ids.shape for x in self.lookups]
        return any(len(x) == 2 and x[0] == shape[0] and x[1] < shape[1] for x in given)

    def checksum(self) -> str:
        """Return a checksum of all integers."""
        return "-".join(map(checksum, self.lookups))

    def _choose(self, shape: Shape, traced: Mapping[int, Tensor]) -> FoundIds | None:
        """Choose the integers that made the hidden states, or else that have their shape."""
        before, behind = self.lookups[: self._begun], self.lookups[self._begun :]
        found = [
            FoundIds(each, traced[each.number].view(shape))
            for each in self.lookups
            if each.number in traced and _is_whole(traced[each.number], each.ids.numel())
        ]
        one_each = [one for one in found if one.streams == 1]
        found = one_each or [*_by_shape(before, shape)] or [x for x in found if _is_streams(x)]
        found = found or [*_by_shape(behind, shape)]
        for is_better in (no_positions, _passed):
            found = [one for one in found if is_better(one.lookup)] or found
        return max(found, key=lambda one: _values(one.lookup), default=None)


def _by_shape(lookups: Sequence[Lookup], shape: Shape) -> Iterator[FoundIds]:
    """Iterate over integers that fit hidden states of a shape, with one row each."""
    for lookup in lookups:
        ids = lookup.ids.shape
        # Packed hidden states have flattened ids, or plain ids were given a batch dimension of 1.
        packed = 1 in (len(shape), *shape[:-1])
        if ids == shape or (math.prod(ids) == math.prod(shape) and packed):
            yield FoundIds(lookup, _numbered(ids).reshape(shape))
        elif len(ids) == 2 and ids[::-1] == shape:
            yield FoundIds(lookup, _numbered(ids).T)


@functools.lru_cache(maxsize=64)
def _numbered(shape: Shape) -> Tensor:
    """Number the places of a shape."""
    return torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").view(shape)


def _is_whole(order: Tensor, count: int) -> bool:
    """Whether every row belongs to an id, and every id has equally many rows."""
    if not count or order.numel() % count or bool((order < 0).any()):
        return False
    rows = torch.bincount(order.flatten(), minlength=count)
    return bool((rows == order.numel() // count).all())


def _is_streams(found: FoundIds) -> bool:
    """Whether ids with several rows each are tokens, not positions or token types."""
    lookup = found.lookup
    return lookup.ids.ndim == 2 and no_positions(lookup) and _values(lookup) > _MOST_TYPES


def _passed(lookup: Lookup) -> bool:
    """Whether the integers are an argument of the model, and not token types."""
    return lookup.passed and _values(lookup) > _MOST_TYPES


def _values(lookup: Lookup) -> int:
    return len(lookup.ids.unique())
