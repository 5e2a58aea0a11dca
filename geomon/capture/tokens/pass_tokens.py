"""Tokens of one pass through a stack: their sequences, which are padding, and which are kept.

Padding, token ids and boundaries are inferred from the pass. `PassTokens` collects what shows them
while the pass runs; `KnownTokens` is what is known at one time, in the end after the pass.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from geomon.capture.storage import send
from geomon.capture.tokens.boundaries import (
    GivenPlaces,
    Sequences,
    find_odd_places,
    find_places,
    find_sequences,
    last_tokens,
    rows_as_sequences,
    sequences_from,
)
from geomon.capture.tokens.padding import Padding
from geomon.capture.tokens.sampling import RowSampler, SampledRows
from geomon.capture.tokens.token_ids import TokenIds, checksum, no_positions
from geomon.note import Note
from geomon.note_kinds import NoteKind

Shape = tuple[int, ...]

_LENGTHS_DIFFER = "padding is known only for sequences of another length: here all rows count"
_STREAMS = (
    "the model has {streams} streams of hidden states: each token has {streams} rows, which are "
    "measured together; similar rows of one token count as near-duplicates"
)
_PACKED = (
    "rows of the batch hold several sequences, separated by {source}: metrics of hidden states and "
    "of projected queries and keys count each sequence separately"
)
_STARTED = "{name} starts at {start:,}, and in no row at 0"
_REPEATED = "{name} repeats positions: tokens half a row apart have the same one"


Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Remember the answers of a method, by identity of tensors; its object must not change."""

    @functools.wraps(method)
    def ask(self: Any, *key: Any) -> Any:
        question = method.__name__, *key
        if question not in self._answers:
            self._answers[question] = method(self, *key)
        return self._answers[question]

    return ask  # type: ignore[return-value]


class KnownTokens:
    """Everything known of the tokens of a pass at one time.

    Args:
        shape: Shape of the hidden states that entered the first block, without the width.
        ids: The token ids.
        padding: The padding.
        given: Arguments that may show where sequences begin, in the order seen.
        by_modules: Whether the modules take hidden states as [length, batch, width].
        attended: [batch, queries] of each attention; () while the pass runs.
        begins: Whether each token of a single row begins a sequence, as attention shows; None if
            it does not, and while the pass runs.
    """

    def __init__(
        self,
        shape: Shape,
        ids: TokenIds,
        padding: Padding,
        given: Sequence[GivenPlaces],
        *,
        by_modules: bool,
        attended: Sequence[Shape] = (),
        begins: Tensor | None = None,
    ) -> None:
        self.shape, self.ids, self.padding = shape, ids, padding
        self._given, self._by_modules = given, by_modules
        self._attended, self._begins = attended, begins
        self._answers: dict[tuple[Any, ...], Any] = {}

    # -- which of them are padding ---------------------------------------------------------------

    @once
    def valid(self, shape: Shape, role: str = "") -> Tensor | None:
        """Return a mask of `shape`, False for padding, or None if nothing shows any padding."""
        turned = not role and (self._by_modules or self._turned)
        known = self.padding.valid(shape, role, turned=turned)
        streams = None if role else self._streams(shape)
        if known is not None or streams is None:
            return known
        tokens = self.valid_queries(streams[0])
        return None if tokens is None else _arranged(tokens, streams[1])

    @once
    def valid_queries(self, shape: Shape) -> Tensor | None:
        """Return which queries are tokens, [batch, queries], or None if nothing shows any."""
        return self.padding.valid(shape)

    def valid_at(self, shape: Shape, sequences: Tensor, places: Tensor) -> Tensor | None:
        """Return which sampled queries are tokens, [sequences, queries], or None if unknown."""
        valid = self.valid_queries(shape)
        return None if valid is None else valid[sequences].gather(1, places)

    def loses_padding(self, shape: Shape) -> bool:
        """Whether padding is known at the stack's input but not for hidden states of this shape."""
        first = self.valid(self.shape)
        known = shape in (self.shape, self.shape[::-1]) or self.valid(shape) is not None
        return first is not None and not known and not first.all()

    def without_padding(self, rows: SampledRows, shape: Shape) -> SampledRows:
        """Remove sampled rows that turned out to be padding."""
        places = self._places_of_tokens(rows.indices, shape, rows.role)
        return rows if places is None else rows.at(*places)

    @once
    def _places_of_tokens(
        self, indices: Tensor, shape: Shape, role: str
    ) -> tuple[Tensor, Tensor] | None:
        """Find which of some rows are tokens, and their indices; None if nothing shows padding."""
        valid = self.valid(shape, role)
        if valid is None:
            return None
        places = valid.cpu().flatten()[indices].nonzero().squeeze(1)
        return places, indices[places]

    # -- which sequences they are of -------------------------------------------------------------

    @property
    def batch(self) -> Shape:
        """Shape of the first hidden states, or of their tokens if each token has several rows."""
        streams = self._streams(self.shape)
        return self.shape if streams is None else streams[0]

    @property
    @once
    def inverted_mask(self) -> str | None:
        """Error text if a mask marks as tokens exactly what attention hides, else None."""
        return self.padding.contradiction(self.batch)

    @property
    def _turned(self) -> bool:
        """Whether token ids are [batch, length] but hidden states are [length, batch, width]."""
        return self.ids.turned(self.shape)

    @property
    def length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], judged by modules, ids or attention."""
        turned = len(self.shape) == 2 and self.shape[0] != self.shape[1]
        by_attention = turned and self.shape[::-1] in self._attended
        return self._by_modules or by_attention or self._turned

    @once
    def sequences(self, shape: Shape) -> Sequences | None:
        """Return the sequence (or feature map) of each token, or None if that is unknown."""
        packed = self.packed(shape)
        if packed is not None or len(shape) == 1:
            return packed
        return rows_as_sequences(shape, length_first=self.length_first)

    @once
    def packed(self, shape: Shape) -> Sequences | None:
        """Return the sequences of the tokens if they are not simply the rows of the batch."""
        return self._find_packed(shape) or self._packed_by_attention(shape)

    @once
    def last_of(self, shape: Shape, most: int) -> Tensor:
        """Return flat indices of the last tokens of at most `most` sequences."""
        found = self.sequences(shape)
        assert found is not None
        return last_tokens(found, self.valid(shape), most)

    def numbers(self, rows: Tensor, shape: Shape, role: str = "") -> Tensor | None:
        """Return the index of each row's sequence, or None if it is unknown."""
        if role and len(shape) > 1:
            return rows_as_sequences(shape, length_first=False).numbers.flatten()[rows]
        found = None if role else self.sequences(shape)
        return None if found is None else found.numbers.flatten()[rows]

    def positions(self, rows: Tensor, shape: Shape) -> Tensor:
        """Return the position of each row in its sequence or feature map."""
        found = self.sequences(shape)
        return rows if found is None else found.places.flatten()[rows]

    def _find_packed(self, shape: Shape) -> Sequences | None:
        """Find sequences from streams, or from arguments of the calls."""
        streams = self._streams(shape)
        if streams is not None:
            return _of_streams(*streams, length_first=self._by_modules or self._turned)
        # Positions restart if an image follows a text, and only the text has token ids.
        if len(shape) > 2 or not math.prod(shape) or self.ids.fewer_than(shape):
            return None
        turned = len(shape) == 2 and self.length_first
        rows, length = (1, shape[0]) if len(shape) == 1 else shape[::-1] if turned else shape
        valid = self.valid(shape)
        tokens = None if valid is None else (valid.T if turned else valid).reshape(rows, length)
        packed = find_sequences(self._given[::-1], rows, length, tokens)
        if packed is None:
            return None
        numbers, places = (x.T if turned else x.view(shape) for x in packed[:2])
        return packed._replace(numbers=numbers, places=places)

    def _odd_places(self, stack: str) -> list[Note]:
        """Say if positions start elsewhere than at 0, or repeat."""
        shape = self.shape
        if len(shape) != 2 or self.length_first or self.ids.fewer_than(shape):
            return []
        found = find_odd_places(self._given[::-1], *shape, self.valid(shape))
        if found is None:
            return []
        text = _REPEATED if found.start is None else _STARTED
        numbers: dict[str, int | float | str] = {"name": found.name, "start": found.start or 0}
        return [Note(NoteKind.ODD_POSITIONS, text, stack, numbers=numbers, is_odd=True)]

    def _packed_by_attention(self, shape: Shape) -> Sequences | None:
        """Return the sequences that attention separates in the single row of a batch.

        Attention either hides them from each other, or reshapes the row into sequences.
        """
        length, begins = math.prod(shape), self._begins
        if begins is None or len(begins) != length:
            if len(shape) > 1 or not self._attended or math.prod(self._attended[0]) != length:
                return None
            order = torch.arange(length, dtype=torch.int64, device="cpu")
            begins = order % self._attended[0][1] == 0
        valid = self.valid(shape)
        tokens = None if valid is None else valid.view(1, -1)
        found = sequences_from(begins.cpu().view(1, -1), tokens, "attention")
        if found is None:
            return None
        return found._replace(numbers=found.numbers.view(shape), places=found.places.view(shape))

    @once
    def _streams(self, shape: Shape) -> tuple[Shape, Tensor] | None:
        """Return the tokens' shape and the token of each row, if each token has several rows.

        Token ids show it, or attention on a single stream (streams are the first dimension).
        """
        found = self.ids.streams(shape)
        if found is not None:
            return found.lookup.ids.shape, found.order
        taken = self._attended and all(shape[1:] == seen for seen in self._attended)
        if len(shape) != 3 or shape[0] == 1 or not taken:
            return None
        order = torch.arange(math.prod(shape[1:]), dtype=torch.int64, device="cpu")
        return shape[1:], order.view(shape[1:]).expand(shape)

    # -- what is said of them --------------------------------------------------------------------

    @once
    def remarks(self, shape: Shape) -> list[tuple[NoteKind, str]]:
        """List remarks for a reader of the numbers on hidden states of this shape."""
        streams = self._streams(shape)
        found = []
        if self.loses_padding(shape):
            found.append((NoteKind.PADDING_OF_OTHER_LENGTH, _LENGTHS_DIFFER))
        if streams is not None:
            count = math.prod(shape) // math.prod(streams[0])
            found.append((NoteKind.STREAMS, _STREAMS.format(streams=count)))
        return found

    def notes(self, stack: str) -> list[Note]:
        """Make the notes on tokens for a reader of the numbers."""
        if not self.shape:
            return []
        packed = self.packed(self.shape)
        notes = self.padding.notes(self.batch, stack)
        if packed is not None and self._streams(self.shape) is None:
            numbers = {"source": packed.source}
            notes.append(Note(NoteKind.PACKED, _PACKED, stack, numbers=numbers))
        return notes + (self._odd_places(stack) if packed is None else [])


class PassTokens:
    """The tokens of one pass through a stack, while it runs.

    Args:
        sampler: Sampler of the rows.
        padding: Padding of the stack.
        length_first: Whether the modules take hidden states as [length, batch, width].

    Attributes:
        ids: The token ids.
        padding: The padding.
        shape: Shape of the hidden states that entered the first block, without the width.
        landmarks: Rows at fixed places of these hidden states, [rows, width].
    """

    def __init__(self, sampler: RowSampler, padding: Padding, *, length_first: bool) -> None:
        self._sampler = sampler
        self._by_modules = length_first
        self._given: list[GivenPlaces] = []  # in the order seen
        self.padding = padding
        self.ids = TokenIds()
        self.forget_states()

    def forget_states(self) -> None:
        """Forget the hidden states, because another pass begins with the same arguments."""
        self.ids.forget_states()
        self.padding.forget_attention()
        self.shape: Shape = ()
        self.landmarks: Tensor | None = None
        self._begins: Tensor | None = None  # tokens that begin a sequence, in one packed row
        self._kept: dict[tuple[Shape, str], Tensor] = {}
        self._order: dict[int, Tensor] = {}  # sampling rank of each row, by number of rows

    def take_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        shared: bool = False,
    ) -> None:
        """Keep the arguments of a call that mark padding or the beginnings of sequences."""
        self.padding.take_arguments(module, args, kwargs, shared=shared)
        if not shared:
            self._given += find_places(module, args, kwargs)

    def take_begins(self, length: int, find: Callable[[int], Tensor]) -> None:
        """Keep the starts of packed sequences in the stack's single row."""
        if self._begins is None and math.prod(self.shape) == length:
            self._begins = find(length)

    def begin(self, shape: Shape) -> None:
        """Remember the shape of the first hidden states, without the width."""
        self.shape = shape
        self.ids.begin()

    def unfolded(self, shape: Shape) -> Shape:
        """Return the shape of rows where they enter the stack, in case a block flattens them."""
        flattened = shape != self.shape[::-1] and math.prod(shape) == math.prod(self.shape)
        return self.shape if flattened else shape

    def known(self, attended: Sequence[Shape] = (), begins: Tensor | None = None) -> KnownTokens:
        """Return what is known by now, and from attention if the pass is over."""
        return KnownTokens(
            self.shape, self.ids, self.padding, self._given, by_modules=self._by_modules,
            attended=attended, begins=begins,
        )  # fmt: skip

    def settle(self, attended: Iterable[Shape]) -> KnownTokens:
        """Return what is known after the pass, given each attention's [batch, queries]."""
        self.padding.settle()
        return self.known([*attended], self._begins)

    @property
    def length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], as far as known."""
        return self.known().length_first

    @property
    def max_rows(self) -> int:
        """Largest number of rows that are kept."""
        return self._sampler.max_rows

    def rows(self, shape: Shape, role: str = "") -> Tensor:
        """Return flat indices of the sampled rows, equal for all tensors of one shape and role."""
        if (shape, role) not in self._kept:
            valid = self.known().valid(shape, role)
            self._kept[shape, role] = self._sampler.sample_rows(torch.Size(shape), valid)
        return self._kept[shape, role]

    def last(self, shape: Shape) -> Tensor | None:
        """Return flat indices of the last token of each sequence, as far as known during the pass.

        None if the hidden states are not sequences. At most as many sequences as sampled rows
        count.
        """
        known = self.known()
        if len(shape) != 2 and known.packed(shape) is None:
            return None
        return known.last_of(shape, self.max_rows)

    def number(self, rows: Tensor, shape: Shape) -> Tensor:
        """Return the place of rows in the sampling order for rows of a shape."""
        count = math.prod(shape)
        if count not in self._order:
            self._order[count] = self._sampler.number_rows(count)
        return self._order[count][rows]

    @property
    def checksum(self) -> str:
        """Text that differs between passes over different tokens; "" if nothing was seen.

        Integers of tables may be positions, equal in every batch. They suffice only if they
        outnumber the hidden states, so that this rank has a part of these.
        """
        if self.landmarks is None:
            return ""
        known, count = self.ids.checksum(), math.prod(self.shape)
        if any(lookup.ids.numel() > count for lookup in self.ids.lookups):
            return known
        rows = self.landmarks.cpu().float().contiguous()
        return f"{known} {zlib.crc32(rows.numpy().tobytes()):08x}"

    @property
    def ids_checksum(self) -> str:
        """Checksum of the token ids; "" if they are unknown, or may be positions."""
        found = self.ids.find(self.shape) if self.shape else None
        return "" if found is None or not no_positions(found.lookup) else checksum(found.lookup)


def _of_streams(shape: Shape, order: Tensor, *, length_first: bool) -> Sequences:
    """Number the sequences of tokens that have several rows of hidden states each."""
    ways = [torch.arange(n, dtype=torch.int64, device="cpu") for n in shape]
    number, place = ways[0][:, None].expand(shape), ways[1].expand(shape)
    number, place = (place, number) if length_first else (number, place)
    return Sequences(_arranged(number, order), _arranged(place, order), "")


def _arranged(values: Tensor, order: Tensor) -> Tensor:
    """Expand values of tokens to the rows that belong to them."""
    return values.flatten()[send(order, values.device)]
