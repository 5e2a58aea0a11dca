"""Facts about the tokens of a pass, as known at one time, in the end after the pass.

`KnownTokens` holds what the pass showed. `ShapeTokens` is what follows from it for all rows of one
shape: which are padding, to which sequences they belong, their token ids and last tokens.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from geomon.capture.storage import Shape, send
from geomon.capture.tokens.boundaries import (
    GivenPlaces,
    Sequences,
    find_odd_places,
    find_sequences,
    last_tokens,
    rows_as_sequences,
    sequences_from,
)
from geomon.capture.tokens.padding import Padding
from geomon.capture.tokens.sampling import RowSampler, SampledRows
from geomon.capture.tokens.token_ids import TokenIds
from geomon.note import Note
from geomon.note_kinds import NoteKind

Places = tuple[Tensor, Tensor]  # which of some rows are chosen, and their flat indices

# Reasons for missing facts.
ROUTED = (
    "the block received fewer tokens than other blocks (tokens may be routed past it): it is not "
    "known which tokens of the sequence these are"
)
PACKED = "the hidden states are [tokens, width]: the boundaries between sequences are unknown"
_LAST_UNKNOWN = (
    "it became known only after the pass which token is the last of its sequence: pass the model a "
    "mask [batch, length] as attention_mask"
)
_ENDS_LATE = (
    "the hidden states are [tokens, width]: only the attention that follows shows where a sequence "
    "ends, after the rows were kept"
)

_LENGTHS_DIFFER = "padding is known only for sequences of another length: here all rows count"
_STREAMS = (
    "the model has {streams} streams of hidden states: each token has {streams} rows, which are "
    "measured together; similar rows of one token count as near-duplicates"
)
_SEPARATED = (
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
        if question not in self.answers:
            self.answers[question] = method(self, *key)
        return self.answers[question]

    return ask  # type: ignore[return-value]


@dataclass(eq=False)
class KnownTokens:
    """Facts that a pass has shown about its tokens until now.

    Attributes:
        shape: Shape of the hidden states that entered the first block, without the width.
        sampler: Sampler of the rows.
        ids: The token ids.
        padding: The padding.
        given: Arguments that may show where sequences begin, the newest first.
        by_modules: Whether the modules take hidden states as [length, batch, width].
        ends: By shape, flat indices of the rows that the pass kept as last tokens.
        attended: [batch, queries] of each attention; () while the pass runs.
        begins: Whether each token of a single row begins a sequence, as attention shows; None if
            it does not, and while the pass runs.
        is_routed: Whether a layer of a shape saw only tokens that were routed to it, which is known
            after the pass.
    """

    shape: Shape
    sampler: RowSampler
    ids: TokenIds
    padding: Padding
    given: Sequence[GivenPlaces]
    by_modules: bool
    ends: Mapping[Shape, Tensor]
    attended: Sequence[Shape] = ()
    begins: Tensor | None = None
    is_routed: Callable[[Shape], bool] = lambda shape: False
    answers: dict[Any, Any] = field(default_factory=dict, init=False)

    def of(self, shape: Shape, role: str = "") -> "ShapeTokens":
        """Return what is known of the tokens of rows of a shape; `role` as in `ShapeTokens`.

        Rows that a block has flattened are those that entered the stack.
        """
        flattened = len(shape) == 1 and math.prod(shape) == math.prod(self.shape)
        if self.shape and flattened and not role:
            shape = self.shape
        return ShapeTokens(self, shape, role)

    @property
    def batch(self) -> Shape:
        """Shape of the first hidden states, or of their tokens if each token has several rows."""
        streams = self.of(self.shape).streams
        return self.shape if streams is None else streams.shape

    @property
    def length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], judged by modules, ids or attention."""
        differs = len(self.shape) == 2 and self.shape[0] != self.shape[1]
        by_attention = differs and self.shape[::-1] in self.attended
        return self.by_modules or by_attention or self.ids.turned(self.shape)

    @property
    @once
    def inverted_mask(self) -> str | None:
        """Error text if a mask marks as tokens exactly what attention hides, else None."""
        return self.padding.contradiction(self.batch)

    @once
    def valid_queries(self, shape: Shape) -> Tensor | None:
        """Return which queries are tokens, [batch, queries], or None if nothing shows any."""
        return self.padding.valid(shape)

    def valid_at(self, shape: Shape, sequences: Tensor, places: Tensor) -> Tensor | None:
        """Return which sampled queries are tokens, [sequences, queries], or None if unknown."""
        valid = self.valid_queries(shape)
        return None if valid is None else valid[sequences].gather(1, places)

    def notes(self, stack: str) -> list[Note]:
        """Make the notes on tokens for a reader of the numbers."""
        if not self.shape:
            return []
        first = self.of(self.shape)
        notes = self.padding.notes(self.batch, stack)
        if first.packed is None:
            return notes + self._odd_places(stack)
        if first.streams is None:
            numbers = {"source": first.packed.source}
            notes.append(Note(NoteKind.PACKED, _SEPARATED, stack, numbers=numbers))
        return notes

    def _odd_places(self, stack: str) -> list[Note]:
        """Say if positions start elsewhere than at 0, or repeat."""
        if len(self.shape) != 2 or self.length_first or self.ids.fewer_than(self.shape):
            return []
        found = find_odd_places(self.given, *self.shape, self.of(self.shape).valid)
        if found is None:
            return []
        text = _REPEATED if found.start is None else _STARTED
        numbers: dict[str, int | float | str] = {"name": found.name, "start": found.start or 0}
        return [Note(NoteKind.ODD_POSITIONS, text, stack, numbers=numbers, is_odd=True)]


class Streams(NamedTuple):
    """Tokens that have several rows of hidden states each.

    Attributes:
        shape: Shape of the tokens.
        order: Index of the token of each row, in the shape of the hidden states.
    """

    shape: Shape
    order: Tensor

    @property
    def number(self) -> int:
        """Number of rows per token."""
        return self.order.numel() // math.prod(self.shape)

    def arrange(self, values: Tensor) -> Tensor:
        """Expand values of tokens to the rows that belong to them."""
        return values.flatten()[send(self.order, values.device)]

    def sequences(self, *, length_first: bool) -> Sequences:
        """Number the sequences of the rows."""
        first, second = (torch.arange(n, dtype=torch.int64, device="cpu") for n in self.shape)
        number = self.arrange(first[:, None].expand(self.shape))
        place = self.arrange(second.expand(self.shape))
        return Sequences(place, number, "") if length_first else Sequences(number, place, "")


class ShapeTokens:
    """The tokens of all rows of one shape: hidden states, or projected queries or keys.

    Args:
        known: Facts that the pass has shown.
        shape: The shape, without the width.
        role: "key" for keys from another stack, of whose tokens only the padding is known; else "".
    """

    def __init__(self, known: KnownTokens, shape: Shape, role: str) -> None:
        self._known, self._shape, self._role = known, shape, role
        # No object for a shape is kept, as a cycle of references would keep the tensors alive.
        self.answers = known.answers.setdefault((shape, role), {})

    # -- all of them -----------------------------------------------------------------------------

    @property
    @once
    def streams(self) -> Streams | None:
        """The tokens of the rows if each token has several, else None.

        Token ids show it, or attention on a single stream (streams are the first dimension).
        """
        shape, attended = self._shape, self._known.attended
        found = None if self._role else self._known.ids.streams(shape)
        if found is not None:
            return Streams(found.lookup.ids.shape, found.order)
        alone = bool(attended) and all(shape[1:] == seen for seen in attended)
        if self._role or len(shape) != 3 or shape[0] == 1 or not alone:
            return None
        order = torch.arange(math.prod(shape[1:]), dtype=torch.int64, device="cpu")
        return Streams(shape[1:], order.view(shape[1:]).expand(shape))

    @property
    @once
    def valid(self) -> Tensor | None:
        """Mask of the shape, False for padding; None if nothing shows any padding."""
        known, shape = self._known, self._shape
        turned = not self._role and known.length_first
        found = known.padding.valid(shape, self._role, turned=turned)
        if found is not None or self._role:
            return found
        if self.streams is not None:
            tokens = known.valid_queries(self.streams.shape)
            return None if tokens is None else self.streams.arrange(tokens)
        entered = known.shape
        if shape == entered or math.prod(shape) != math.prod(entered):
            return None
        tokens = known.of(entered).valid
        return None if tokens is None else tokens.reshape(shape)

    @property
    @once
    def packed(self) -> Sequences | None:
        """The sequences of the tokens if they are not simply the rows of the batch."""
        if self.streams is not None:
            return self.streams.sequences(length_first=self._known.length_first)
        return self._packed_by_positions() or self._packed_by_attention()

    @property
    @once
    def sequences(self) -> Sequences | None:
        """The sequence (or feature map) of each token, or None if that is unknown."""
        if self._role:
            several = len(self._shape) > 1
            return rows_as_sequences(self._shape, length_first=False) if several else None
        if self.packed is not None or len(self._shape) == 1:
            return self.packed
        return rows_as_sequences(self._shape, length_first=self._known.length_first)

    @property
    @once
    def last(self) -> Tensor:
        """Flat indices of the last tokens of at most as many sequences as sampled rows."""
        assert self.sequences is not None
        return last_tokens(self.sequences, self.valid, self._known.sampler.max_rows)

    @property
    @once
    def remarks(self) -> list[tuple[NoteKind, str]]:
        """Remarks for a reader of the numbers on hidden states of this shape."""
        found = []
        first = self._known.of(self._known.shape).valid
        known = self._shape == self._known.shape[::-1] or self.valid is not None
        if first is not None and not known and not first.all():
            found.append((NoteKind.PADDING_OF_OTHER_LENGTH, _LENGTHS_DIFFER))
        if self.streams is not None:
            found.append((NoteKind.STREAMS, _STREAMS.format(streams=self.streams.number)))
        return found

    @property
    @once
    def is_routed(self) -> bool:
        """Whether these are only the tokens that were routed to a layer."""
        return self._known.is_routed(self._shape)

    # -- some of them ----------------------------------------------------------------------------

    @once
    def among(self, indices: Tensor) -> Places:
        """Find which of some rows are tokens, not padding."""
        if self.valid is None:
            return torch.arange(len(indices), dtype=torch.int64, device="cpu"), indices
        places = self.valid.cpu().flatten()[indices].nonzero().squeeze(1)
        return places, indices[places]

    def last_of(self, kept: SampledRows) -> SampledRows | str:
        """Return the last tokens, now that padding is known, or the reason why there are none."""
        if self.is_routed:
            return ROUTED
        if kept.last is None:
            return PACKED if self.sequences is None else _ENDS_LATE
        found = self._last_among(kept.last.indices, self._known.ends[kept.shape])
        return _LAST_UNKNOWN if found is None else kept.last.at(*found)

    @once
    def _last_among(self, indices: Tensor, ends: Tensor) -> Places | None:
        """Find the last tokens among some rows; None if the pass kept other rows in their place."""
        if not torch.isin(self.last, ends).all():
            return None
        places = torch.isin(indices, self.last).nonzero().squeeze(1)
        return places, indices[places]

    @once
    def positions(self, indices: Tensor) -> Tensor | None:
        """Return the position of some rows in their sequence, or None if they were routed."""
        if self.is_routed:
            return None
        return indices if self.sequences is None else self.sequences.places.flatten()[indices]

    @once
    def numbers(self, indices: Tensor) -> Tensor | None:
        """Return the index of the sequence of some rows, or None if it is unknown."""
        return None if self.sequences is None else self.sequences.numbers.flatten()[indices]

    @once
    def token_ids(self, indices: Tensor) -> Tensor | None:
        """Return the token ids of some rows, or None if no table received any."""
        found = self._known.ids.find(self._shape)
        return None if found is None else found.arrange(found.lookup.ids).flatten().cpu()[indices]

    @once
    def order(self, indices: Tensor) -> Tensor:
        """Return the place of some rows in the order in which rows of this shape are sampled."""
        return self._order[indices]

    @property
    @once
    def _order(self) -> Tensor:
        return self._known.sampler.number_rows(math.prod(self._shape))

    # -- several sequences in a row --------------------------------------------------------------

    def _packed_by_positions(self) -> Sequences | None:
        """Return the sequences that positions among the arguments of the calls separate."""
        shape, known = self._shape, self._known
        # Positions restart if an image follows a text, and only the text has token ids.
        if len(shape) > 2 or not math.prod(shape) or known.ids.fewer_than(shape):
            return None
        turned = len(shape) == 2 and known.length_first
        rows, length = (1, shape[0]) if len(shape) == 1 else shape[::-1] if turned else shape
        valid = self.valid
        tokens = None if valid is None else (valid.T if turned else valid).reshape(rows, length)
        found = find_sequences(known.given, rows, length, tokens)
        if found is None or not turned:
            return found and found.view(shape)
        return Sequences(found.numbers.T, found.places.T, found.source)

    def _packed_by_attention(self) -> Sequences | None:
        """Return the sequences that attention separates in the single row of a batch.

        Attention either hides them from each other, or reshapes the row into sequences.
        """
        shape, attended, begins = self._shape, self._known.attended, self._known.begins
        length = math.prod(shape)
        if begins is None or len(begins) != length:
            if len(shape) > 1 or not attended or math.prod(attended[0]) != length:
                return None
            order = torch.arange(length, dtype=torch.int64, device="cpu")
            begins = order % attended[0][1] == 0
        tokens = None if self.valid is None else self.valid.reshape(1, -1)
        found = sequences_from(begins.cpu().view(1, -1), tokens, "attention")
        return None if found is None else found.view(shape)
