"""First pass: which calls of the blocks of a stack count, and what is kept of them.

A window may be open over several calls of a model; `StackPass` has the rule by which one pass makes
the layers.
"""

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.anatomy import Block, Stack
from geomon.capture.attending.attention import AttentionCall, SoftmaxCall
from geomon.capture.attending.by_hand import Product
from geomon.capture.attending.qkv import Multihead
from geomon.capture.tokens.boundaries import GivenPlaces, Sequences, find_sequences
from geomon.capture.tokens.lookups import (
    Found,
    Lookup,
    agreement,
    agrees,
    candidates,
    choose,
)
from geomon.capture.tokens.padding import (
    OF_MEMORY,
    GivenMask,
    Padding,
    end_runs,
    infer_padding,
)
from geomon.capture.tokens.sampling import RowSampler

Shape = tuple[int, ...]

# Queries at which the output of a fused projection is compared with what was attended.
SAMPLES = 64

# Rows of hidden states by which ranks see whether they have the same tokens.
LANDMARKS = 8


class SampledRows(NamedTuple):
    """Copies of sampled rows.

    Attributes:
        values: The rows, [rows, width], float32.
        indices: Flat indices of the rows in `shape`.
        shape: Shape of the tensor that they were copied from, without the width.
        role: "key" for keys that come from another stack, whose padding is another.
        last: Rows of the tokens that may be the last of their sequences; None where not wanted.
    """

    values: Tensor
    indices: Tensor
    shape: Shape
    role: str = ""
    last: "SampledRows | None" = None


@dataclass
class BlockCall:
    """One call of a block, and what was kept of it.

    Attentions of the block are numbered as in `Block.attentions`, from 0.

    Attributes:
        block: Index of the block in its stack, from 0.
        shape: Shape of the hidden states that entered the block, without the width; None where
            they are no plain tensor.
        entered: The same with the width, as the block was given it.
        handed_on: Whether what entered the block is what left the one that was called before.
        hidden: Rows of the hidden states that left the block.
        running_attention: Index of the attention that is running, if the block has several.
        attention_calls: Recorded call of each attention.
        routes: Where each attention was seen: "interface", "sdpa", "flex", "flash" or "softmax".
        refused: Why the call of an attention was not kept.
        max_logits: Largest score of each row of each call of an attention, [sequences, heads,
            queries] each.
        products: Products that were made in each attention that is written out by hand.
        weight_storages: Addresses of the block's weights, once they are asked for.
        passed_over: Why a softmax in an attention was not taken for its own.
        inside: Attentions whose call came from their own module, and not from elsewhere in the
            block: such a call goes before another.
        further: Attentions that were called again, which is not watched.
        inputs: Address and shape of the input of projections, by attention and "query" or "key", in
            a block with several attentions.
        projected: Rows of the output of the projections of each attention, by its index and
            "query", "key" or "shared" (of `nn.MultiheadAttention`: of the input).
        weights: Weights of each `nn.MultiheadAttention`.
        samples: Rows of the output of each projection at the first sampled queries, by the same.
    """

    block: int
    shape: Shape | None = None
    entered: Shape | None = None
    handed_on: bool = True
    hidden: SampledRows | None = None
    running_attention: int | None = None
    attention_calls: dict[int, AttentionCall | SoftmaxCall] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    max_logits: dict[int, list[Tensor]] = field(default_factory=dict)
    products: dict[int, list[Product]] = field(default_factory=dict)
    weight_storages: frozenset[int] | None = None
    passed_over: dict[int, str] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    further: set[int] = field(default_factory=set)
    inputs: dict[tuple[int, str], tuple[int, Shape]] = field(default_factory=dict)
    projected: dict[tuple[int, str], SampledRows] = field(default_factory=dict)
    weights: dict[int, Multihead] = field(default_factory=dict)
    samples: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def other_source(self, attention: int) -> bool:
        """Whether the keys of an attention are made of another tensor than its queries.

        Args:
            attention: Index of the attention.
        """
        query, key = (self.inputs.get((attention, which)) for which in ("query", "key"))
        return query is not None and key is not None and query != key

    def refuse(self, attention: int, reason: str) -> None:
        """Drop what was recorded of an attention.

        Args:
            attention: Index of the attention.
            reason: Why its call is not kept.
        """
        self.refused[attention] = reason
        self.attention_calls.pop(attention, None)
        self.max_logits.pop(attention, None)
        self.routes.pop(attention, None)


class StackPass:
    """The first pass through a stack.

    The rule, here and nowhere else: of the calls of a stack's blocks those count that come between
    the first call of the stack's owner and its return. A second pass in the same window (of
    contrastive training, of a generation loop) does not count, and neither does a pass that never
    returned, once another begins. A pass in which gradients are recorded takes the place of one in
    which none are: what a training step generates or scores without them is not what it trains on.
    Where nobody calls the owner (its `forward` is called directly,
    or the training step runs the blocks itself) the first call of each block counts.

    Args:
        stack: The stack.
        sampler: Sampler of the rows.
        first: Whether the stack is the first one of the model.

    Attributes:
        stack: The stack.
        first: Whether the stack is the first one of the model.
        block_calls: The calls that count, in order.
        entered: Rows of the hidden states that entered the first of these calls.
        shape: Shape of those hidden states, without the width.
        masks: Names and values of padding masks, False where there is padding, in the order seen.
        given: Other arguments that may be such masks, in the order seen.
        given_places: Arguments that may say where sequences begin, in the order seen.
        hidden_keys: True for keys that attention hides from every query, [batch, keys], by the role
            of the keys ("" for those of the stack itself, "key" for those of another) and by their
            shape.
        begins: True for a token that begins a sequence, in one row of packed sequences; None where
            attention did not say it.
        landmarks: Rows at fixed places of the hidden states that entered the first of these calls.
        parts: Last call of a block that is a list of modules (None where it does not count), index
            of the block, and addresses of the modules that it called.
        left: Address and shape of what left the last block that was called.
        hands_on_several: Whether a block gave several tensors of the hidden states' shape.
        restarts: Whether a block was called again on another tensor than the last block gave.
        length_first: Whether the modules take hidden states as [length, batch, width].
        lookups: Calls of embedding tables, in the order seen.
        leaving: What left the last block that was called; kept for the final norm alone.
        normed: Rows of what the final norm made of it, and the name of the norm.
        mode: "train" or "eval".
        dtype: Data type of the hidden states in the model.
        sharded: Whether hidden states were sharded, and this rank's part was taken.
        with_gradients: Whether gradients are recorded in the pass that counts.
    """

    def __init__(self, stack: Stack, sampler: RowSampler, *, first: bool = True) -> None:
        self.stack = stack
        self.first = first
        self.masks: list[tuple[str, Tensor]] = []
        self.given: list[GivenMask] = []
        self.given_places: list[GivenPlaces] = []
        self.lookups: list[Lookup] = []
        self.with_gradients = False
        self.length_first = any(
            getattr(attention.module, "batch_first", True) is False
            for block in stack.blocks
            for attention in block.attentions
        )
        self._sampler = sampler
        self._state = "never called"
        self._clear()

    def _clear(self) -> None:
        self.block_calls: list[BlockCall] = []
        self.entered: SampledRows | None = None
        self.shape: Shape = ()
        self.dtype = torch.float32
        self.mode = "eval"
        self.sharded = False
        self.hidden_keys: dict[tuple[str, Shape], Tensor] = {}
        self.begins: Tensor | None = None
        self.landmarks: Tensor | None = None
        # The last call of a block that is a list of modules, and those of them that it called.
        self.parts: tuple[BlockCall | None, int, set[int]] = (None, -1, set())
        self.left: tuple[int, Shape] | None = None
        self.restarts = False
        self.hands_on_several = False
        self.leaving: Tensor | None = None
        self.normed: tuple[SampledRows, str] | None = None
        self._indices: dict[tuple[Shape, str], Tensor] = {}
        self._max_rows = 0
        self._begun: int | None = None  # lookups that were seen before hidden states
        self._likely: Tensor | None = None  # padding by its looks, before attention is seen
        self._inferred: dict[str, list[Padding]] = {}  # from the whole pass, by role
        self._found: dict[Shape, Found | None] = {}  # token ids, by the shape of hidden states

    # -- which calls count -----------------------------------------------------------------------

    def begin(self, *, with_gradients: bool) -> bool:
        """Note that the owner is called.

        Args:
            with_gradients: Whether gradients are recorded.

        Returns:
            Whether the pass that counts begins.
        """
        if self._state == "over":
            return False
        self._clear()
        self._state, self.with_gradients = "running", with_gradients
        return True

    def forget(self) -> None:
        """Forget the pass that was seen: another one is to count."""
        for seen in (self.masks, self.given, self.given_places, self.lookups):
            seen.clear()
        self._clear()
        self._state = "never called"

    def end(self) -> None:
        """Note that the owner has returned."""
        if self._state == "running":
            self._state = "over"

    @property
    def running(self) -> bool:
        """Whether the owner is running in the pass that counts."""
        return self._state == "running"

    @property
    def over(self) -> bool:
        """Whether the pass that counts is over."""
        return self._state == "over"

    def begin_call(self, block: int) -> BlockCall | None:
        """Note that a block is called.

        Args:
            block: Index of the block in the stack.

        Returns:
            The call, to which what is kept of it is added; None where it does not count.
        """
        called = any(call.block == block for call in self.block_calls)
        if self._state == "over" or (self._state == "never called" and called):
            return None
        self.block_calls.append(BlockCall(block))
        return self.block_calls[-1]

    @property
    def repeats_blocks(self) -> bool:
        """Whether a block was called more than once: each call is a layer then."""
        return len({call.block for call in self.block_calls}) < len(self.block_calls)

    # -- which rows are kept ---------------------------------------------------------------------

    def set_shape(self, shape: Shape, dtype: torch.dtype) -> None:
        """Set the shape and the data type of the hidden states.

        Args:
            shape: Shape of the first hidden states that are seen, without the width.
            dtype: Their data type in the model.
        """
        self.shape, self.dtype, self._begun = shape, dtype, len(self.lookups)
        self._max_rows = self._sampler.max_rows
        if self.valid(shape) is None and len(shape) == 2:
            self._likely = self._find_likely()

    def shape_at(self, block_call: BlockCall) -> Shape:
        """Return the shape of the hidden states that entered a block, without the width.

        Args:
            block_call: The call of the block.
        """
        return self.shape if block_call.shape is None else block_call.shape

    def as_batch(self, shape: Shape, block_call: BlockCall) -> tuple[int, int] | None:
        """Return the number of sequences and their length.

        Args:
            shape: Shape of the output of a projection, without the width.
            block_call: The call of the block that projects.

        Returns:
            Both numbers, or None where the shape has neither.
        """
        entered = self.shape_at(block_call)
        if len(shape) != 2 and math.prod(shape) == math.prod(entered):
            shape = entered
        if len(shape) == 1:  # packed: attention takes them as one row
            shape = (1, *shape)
        elif self.turned:
            shape = shape[::-1]
        return (shape[0], shape[1]) if len(shape) == 2 else None

    def row_indices(
        self, shape: Shape, role: str = "", block_call: BlockCall | None = None
    ) -> Tensor:
        """Return flat indices of the sampled rows; the same for every tensor of one shape.

        Args:
            shape: Shape of the tensor, without the width.
            role: "key" for keys that come from another stack, whose padding is another.
            block_call: The call of the block in which the tensor was seen; None for hidden states.
        """
        shape = self._unfolded(shape, role, block_call)
        if (shape, role) not in self._indices:
            likely = None if role or self._likely is None else self._oriented(self._likely, shape)
            self._indices[shape, role] = self._sampler.sample_rows(
                torch.Size(shape), self.valid(shape, role), likely
            )
        return self._indices[shape, role]

    def likely_last(self, shape: Shape) -> Tensor | None:
        """Return flat indices of the tokens that may be the last of their sequences.

        Where padding is certain, one of each sequence; where it may be found later, also the one
        that is the last if what looks like padding is padding. Of as many sequences as rows are
        sampled, evenly spread.

        Args:
            shape: Shape of the hidden states, without the width.

        Returns:
            Flat indices into `shape`, ascending; None where the hidden states are no sequences.
        """
        known = len(shape) == 2 or self.sequences(shape, None, length_first=False) is not None
        if not known:
            return None
        key = (shape, "last")
        if key not in self._indices:
            valid = self.valid(shape)
            first = self.length_first or self.turned
            found = self.last_places(shape, valid, length_first=first)
            likely = None if self._likely is None else self._oriented(self._likely, shape)
            if valid is None and likely is not None:
                more = self.last_places(shape, likely, length_first=first)
                found = torch.cat([found, more]).unique()
            self._indices[key] = found
        return self._indices[key]

    def last_places(self, shape: Shape, valid: Tensor | None, *, length_first: bool) -> Tensor:
        """Find the last token of each sequence that is no padding.

        Args:
            shape: Shape of the hidden states, without the width.
            valid: False where there is padding, of that shape; None without padding.
            length_first: Whether the shape is [length, batch].

        Returns:
            Flat indices into `shape`, ascending; none of sequences that are padding alone, and of
            at most as many sequences as rows are sampled.
        """
        packed = self.sequences(shape, valid, length_first=length_first)
        if packed is not None:
            return self._last_of(packed, shape, valid)
        tokens = torch.ones(shape, dtype=torch.bool, device="cpu") if valid is None else valid.cpu()
        tokens = tokens.T if length_first else tokens
        sequences, length = tokens.shape
        count = min(sequences, self._sampler.max_rows)
        chosen = torch.arange(count, dtype=torch.int64, device="cpu") * sequences // max(count, 1)
        order = torch.arange(1, length + 1, dtype=torch.int64, device="cpu")
        place = (tokens[chosen] * order).amax(dim=1) - 1 if length else chosen - 1
        chosen, place = chosen[place >= 0], place[place >= 0]
        flat = place * sequences + chosen if length_first else chosen * length + place
        return flat.sort().values

    def _last_of(self, packed: Sequences, shape: Shape, valid: Tensor | None) -> Tensor:
        """Find the last token of each of several sequences in a row that is no padding."""
        numbers = packed.numbers.flatten()
        places = torch.arange(len(numbers), dtype=torch.int64, device="cpu")
        if valid is not None:
            places = places[valid.cpu().flatten()]
        last = torch.full((int(numbers.max()) + 1,), -1, dtype=torch.int64, device="cpu")
        last.scatter_reduce_(0, numbers[places], places, "amax")
        last = last[last >= 0]
        count = min(len(last), self._sampler.max_rows)
        chosen = torch.arange(count, dtype=torch.int64, device="cpu") * len(last) // max(count, 1)
        return last[chosen].sort().values

    def sequences(
        self, shape: Shape, valid: Tensor | None, *, length_first: bool
    ) -> Sequences | None:
        """Return which sequences the tokens are of, where rows of the batch hold several.

        Args:
            shape: Shape of the hidden states, without the width.
            valid: False where there is padding, of that shape; None without padding.
            length_first: Whether the shape is [length, batch].

        Returns:
            The sequences, of the given shape; None where each row is one, or nothing says more.
        """
        found = self._found.get(shape)
        if found is not None and found.layout.streams > 1:
            return _of_streams(found, length_first=length_first)
        if len(shape) > 2 or not self.given_places or not math.prod(shape):
            return None
        turned = length_first and len(shape) == 2
        rows, length = (1, shape[0]) if len(shape) == 1 else shape[::-1] if turned else shape
        tokens = None if valid is None else (valid.T if turned else valid).reshape(rows, length)
        packed = find_sequences(self.given_places[::-1], rows, length, tokens)
        if packed is None:
            return None
        numbers, places = (x.T if turned else x.view(shape) for x in packed[:2])
        return packed._replace(numbers=numbers, places=places)

    def meet(self, hidden: Tensor) -> None:
        """Find the token ids of hidden states of a shape, where that was not done before.

        Args:
            hidden: Hidden states of that shape, [..., width].
        """
        shape = tuple(hidden.shape[:-1])
        if shape not in self._found:
            self._found[shape] = self._find_ids(shape, hidden)

    def has_ids_of(self, hidden: Tensor) -> bool:
        """Whether a table may have given one row for each row of a tensor, of the same width.

        Args:
            hidden: Any tensor.
        """
        shape, width = tuple(hidden.shape[:-1]), hidden.shape[-1:]
        return any(
            found.lookup.rows is None or found.lookup.rows.shape[1:] == width
            for found in candidates(self.lookups, shape, streams=False)
        )

    def ids_as(self, shape: Shape) -> Tensor | None:
        """Return the token ids among the inputs of embedding tables.

        Args:
            shape: Shape of the hidden states, without the width.

        Returns:
            Token ids of that shape; None where no table was given integers of it.
        """
        found = self._ids_of(shape)
        return None if found is None else found.layout.arrange(found.lookup.ids)

    @property
    def turned(self) -> bool:
        """Whether token ids [batch, length] are those of hidden states [length, batch, width]."""
        found = self._found.get(self.shape)
        return found is not None and found.layout.turned

    def streams(self, shape: Shape) -> int:
        """Return the number of rows of hidden states that each token has: mostly 1.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        found = self._found.get(shape)
        return 1 if found is None else found.layout.streams

    @property
    def batch(self) -> str:
        """What tells the tokens of the pass from others; "" where nothing was seen.

        Integers that tables were given may be positions, the same in every batch: they tell alone
        only where they are more than the hidden states, of which a rank then has a part.
        """
        if self.landmarks is None:
            return ""
        ids = [lookup.ids.cpu().contiguous() for lookup in self.lookups]
        known = "-".join(f"{zlib.crc32(each.numpy().tobytes()):08x}" for each in ids)
        if any(each.numel() > math.prod(self.shape) for each in ids):
            return known
        rows = self.landmarks.cpu().float().contiguous()
        return f"{known} {zlib.crc32(rows.numpy().tobytes()):08x}"

    def token_table(self) -> nn.Module | None:
        """Return the embedding table of the tokens; None where no table was given token ids."""
        found = self._ids_of(self.shape)
        return None if found is None else found.lookup.table

    def _ids_of(self, shape: Shape) -> Found | None:
        return self._found.get(shape) or self._find_ids(shape, None)

    def _find_ids(self, shape: Shape, hidden: Tensor | None) -> Found | None:
        """Find token ids of a shape, by hidden states where several may be those.

        What tables are given when the blocks have begun (the tokens to be predicted next, say) is
        not what entered them.
        """
        begun = len(self.lookups) if self._begun is None else self._begun
        found = [*candidates(self.lookups[:begun], shape, streams=False)]
        found = found or [*candidates(self.lookups[begun:], shape, streams=False)]
        if len(found) == 1:
            return found[0]
        if found:
            return choose(
                [(one, None if hidden is None else agreement(*one, hidden)) for one in found]
            )
        if hidden is None:
            return None
        streams = [*candidates(self.lookups[:begun], shape, streams=True)]
        strong = [(one, known) for one in streams if agrees(known := agreement(*one, hidden))]
        return choose(strong) if strong else None

    # -- which of them are padding ---------------------------------------------------------------

    def valid(self, shape: Shape, role: str = "") -> Tensor | None:
        """Return which tokens are no padding.

        Args:
            shape: Shape of the hidden states, without the width.
            role: "key" for keys that come from another stack, whose padding is another.

        Returns:
            False where there is padding, a tensor of the given shape; None where no mask fits it.
        """
        for name, mask in reversed(self.masks):  # the innermost module's first
            if name.startswith(OF_MEMORY) != (role == "key"):
                continue
            oriented = self._oriented(mask, shape)
            if oriented is not None:
                return oriented
        inferred = (
            self._oriented(padding.valid, shape) for padding in self._inferred.get(role, ())
        )
        known = next((valid for valid in inferred if valid is not None), None)
        found = None if role else self._found.get(shape)
        if known is not None or found is None or found.layout.streams < 2:
            return known
        tokens = self.valid(tuple(found.lookup.ids.shape))
        return None if tokens is None else found.layout.arrange(tokens)

    def valid_queries(self, call: AttentionCall | SoftmaxCall) -> Tensor | None:
        """Return which of the sampled queries are no padding.

        Args:
            call: Recorded call of an attention.

        Returns:
            False where a query is padding, [sequences, queries]; None where no mask fits the call.
        """
        mask = self.valid_in(call.shape)
        return None if mask is None else mask.cpu()[call.sequences].gather(1, call.places)

    def valid_in(self, shape: tuple[int, int]) -> Tensor | None:
        """Return which queries of an attention are no padding.

        Args:
            shape: Number of sequences and of queries in each.

        Returns:
            False where a query is padding, [sequences, queries]; None where no mask fits the shape.
        """
        masks = [mask for name, mask in self.masks if not name.startswith(OF_MEMORY)]
        inferred = [padding.valid for padding in self._inferred.get("", ())]
        for mask in [*reversed(masks), *inferred]:
            if shape == mask.shape:
                return mask
        return None

    @property
    def padding_source(self) -> str | None:
        """What the padding is known by: the name of an argument, say; None where it is not."""
        for name, mask in reversed(self.masks):
            if not name.startswith(OF_MEMORY) and self._fits(mask):
                return name
        inferred = (x.source for x in self._inferred.get("", ()) if self._fits(x.valid))
        return next(inferred, None)

    def _fits(self, mask: Tensor) -> bool:
        return self._oriented(mask, self.shape) is not None

    @property
    def has_inferred_padding(self) -> bool:
        """Whether the padding was inferred, and not given by a mask of a known name."""
        return "" in self._inferred

    @property
    def unrecognised(self) -> Tensor | None:
        """Runs of one token id that look like padding and were counted, False there; or None."""
        if not self.shape or self.padding_source is not None or len(self.shape) != 2:
            return None
        ids = self._ids_by_sequence()
        return None if ids is None else end_runs(ids)

    def loses_padding(self, shape: Shape) -> bool:
        """Whether padding is known where the stack begins, and not for hidden states of a shape.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        first = self.valid(self.shape)
        known = shape in (self.shape, self.shape[::-1]) or self.valid(shape) is not None
        return first is not None and not known and not bool(first.all())

    def keep_begins(self, length: int, find: Callable[[int], Tensor]) -> None:
        """Keep where packed sequences begin in the one row that a stack was given.

        Args:
            length: Number of tokens in the row.
            find: Finds them: True for a token that begins one, [length].
        """
        if self.begins is None and math.prod(self.shape) == length:
            self.begins = find(length)

    def keep_hidden_keys(self, role: str, shape: Shape, find: Callable[[], Tensor]) -> None:
        """Keep which keys an attention hides from every query.

        Args:
            role: "key" for keys that come from another stack.
            shape: Number of sequences and of keys.
            find: Finds them: True for a hidden key, [sequences (or 1), keys].
        """
        if (role, shape) not in self.hidden_keys:
            self.hidden_keys[role, shape] = find().expand(*shape)

    @property
    def contradicted(self) -> str | None:
        """Name of a mask that marks as tokens exactly what attention hides; None where none does.

        Its values mean the opposite of what its name says elsewhere, and the rows that were sampled
        by it are padding.
        """
        for name, mask in self.masks:
            hidden = self.hidden_keys.get(("", tuple(mask.shape)))
            if hidden is None or name.startswith(OF_MEMORY) or not self._fits(mask):
                continue
            mixed = bool(mask.any()) and not bool(mask.all())  # of nothing but padding any is true
            if mixed and torch.equal(mask.to(hidden.device), hidden):
                return name
        return None

    def settle_padding(self) -> None:
        """Decide what is padding, now that the pass was seen, and remove the rows of it."""
        if len(self.shape) == 2 and self.valid(self.shape) is None:
            padding = self._infer(self._own_hidden_keys())
            if padding is not None:
                self._inferred.setdefault("", []).append(padding)
        for (role, shape), hidden in self.hidden_keys.items():
            if self.valid(shape, role) is None:
                padding = infer_padding([], None, hidden)
                if padding is not None:
                    self._inferred.setdefault(role, []).append(padding)
        if self.entered is not None:
            self.entered = self._without_padding(self.entered)
        if self.normed is not None:
            self.normed = self._without_padding(self.normed[0]), self.normed[1]
        for block_call in self.block_calls:
            if block_call.hidden is not None:
                block_call.hidden = self._without_padding(block_call.hidden)
            for place, rows in block_call.projected.items():
                block_call.projected[place] = self._without_padding(rows, block_call)

    def _find_likely(self) -> Tensor | None:
        padding = self._infer(None)
        if padding is not None:
            return padding.valid
        ids = self._ids_by_sequence()
        return None if ids is None else end_runs(ids)

    def _infer(self, hidden: Tensor | None) -> Padding | None:
        given = [
            mask._replace(values=values)
            for mask in reversed(self.given)
            if (values := self._by_sequence(mask.values)) is not None
        ]
        return infer_padding(given, self._ids_by_sequence(), hidden, first=self.first)

    def _ids_by_sequence(self) -> Tensor | None:
        ids = self.ids_as(self.shape)
        return ids.T if ids is not None and self._is_length_first() else ids

    def _is_length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], by the modules or by attention."""
        turned = self.shape[::-1]
        by_attention = turned != self.shape and ("", turned) in self.hidden_keys
        return self.length_first or self.turned or by_attention

    def _own_hidden_keys(self) -> Tensor | None:
        shape = self.shape[::-1] if self._is_length_first() else self.shape
        return self.hidden_keys.get(("", shape))

    def _by_sequence(self, values: Tensor | None) -> Tensor | None:
        """View values of all tokens as [batch, length]; None where they are not of all tokens."""
        if values is None:
            return None
        shape = self.shape[::-1] if self._is_length_first() else self.shape
        if values.shape == shape:
            return values
        return values.T if values.shape == shape[::-1] else None

    def _oriented(self, mask: Tensor, shape: Shape) -> Tensor | None:
        """View a mask [batch, length] in a shape; None where it does not fit."""
        if shape == mask.shape:
            square = shape[0] == shape[1]
            return mask.T if square and (self.length_first or self.turned) else mask
        return mask.T if shape == mask.shape[::-1] else None

    def _unfolded(self, shape: Shape, role: str, block_call: BlockCall | None) -> Shape:
        """Return the shape in which the same rows entered the block, unfolded and not flattened."""
        entered = self.shape if block_call is None else self.shape_at(block_call)
        own = not role and shape != entered[::-1]
        return entered if own and math.prod(shape) == math.prod(entered) else shape

    def _without_padding(
        self, rows: SampledRows, block_call: BlockCall | None = None
    ) -> SampledRows:
        """Remove rows of padding that was inferred after they had been sampled."""
        if not self._inferred and self._likely is None:
            return rows
        valid = self.valid(self._unfolded(rows.shape, rows.role, block_call), rows.role)
        kept = torch.arange(len(rows.indices), dtype=torch.int64, device="cpu")
        if valid is not None:
            kept = valid.cpu().flatten()[rows.indices].nonzero().squeeze(1)
        kept = kept[: self._max_rows]
        if len(kept) == len(rows.indices):
            return rows
        return rows._replace(
            values=rows.values[kept.to(rows.values.device)], indices=rows.indices[kept]
        )

    # -- which layers they make ------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Number of layers: of blocks, or of calls where blocks are called again."""
        return len(self.block_calls) if self.repeats_blocks else len(self.stack.blocks)

    def is_routed(self, shape: Shape) -> bool:
        """Whether hidden states are of some tokens, which only some of the blocks are given.

        Tokens that were merged stay merged: they are routed where a block is given more than one
        before it, or as many that another block has not handed on.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        if not _is_part(shape, self._longest):
            return False
        return any(
            _is_part(self.shape_at(one), self.shape_at(other))
            or (self.shape_at(one) == self.shape_at(other) == shape and not other.handed_on)
            for one, other in itertools.pairwise(self.block_calls)
        )

    @property
    def _longest(self) -> Shape:
        """Shape of the hidden states of most tokens that a block was given, without the width."""
        return max(map(self.shape_at, self.block_calls), key=math.prod, default=())

    def layer_at(self, depth: int) -> tuple[Block, BlockCall | None, str]:
        """Return the block of a layer, its call (None where it was not called) and a name.

        Args:
            depth: Depth of the layer, from 1.
        """
        if self.repeats_blocks:
            block_call = self.block_calls[depth - 1]
            block = self.stack.blocks[block_call.block]
            return block, block_call, f"{block.name}, call {depth}"
        block = self.stack.blocks[depth - 1]
        calls = (call for call in self.block_calls if call.block == depth - 1)
        return block, next(calls, None), block.name


def _is_part(shape: Shape, whole: Shape) -> bool:
    """Whether sequences of one shape are shorter than as many of another."""
    if len(shape) != 2 or len(whole) != 2:
        return False
    return any(shape[i] == whole[i] and shape[1 - i] < whole[1 - i] for i in (0, 1))


def _of_streams(found: Found, *, length_first: bool) -> Sequences:
    """Number the sequences where several rows of hidden states stand for each token."""
    shape, arrange = found.lookup.ids.shape, found.layout.arrange
    ways = [torch.arange(n, dtype=torch.int64, device="cpu") for n in shape]
    number, place = ways[0][:, None].expand(shape), ways[1].expand(shape)
    number, place = (place, number) if length_first else (number, place)
    return Sequences(arrange(number), arrange(place), "streams")


def attention_key(block: Block, label: str = "") -> int | None:
    """Return the index under which an attention is kept in `BlockCall`.

    Args:
        block: The block.
        label: Label of the attention: "" for the one to the block's own stack.

    Returns:
        The index in `Block.attentions`; 0 for the own attention of a block without known ones; None
        where the block has no such attention.
    """
    return 0 if not block.attentions and not label else block.attention_index(label)


def spread_indices(count: int, most: int = SAMPLES) -> Tensor:
    """Return evenly spread indices.

    Args:
        count: Number of sampled queries, say.
        most: Largest number of indices.
    """
    kept = min(count, most)
    order = torch.arange(kept, dtype=torch.int64, device="cpu")
    return order * (count - 1) // max(kept - 1, 1)
