"""First pass: which calls of the blocks of a stack count, and what is kept of them.

A window may be open over several calls of a model; `StackPass` has the rule by which one pass makes
the layers.
"""

import copy
import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geomon.capture.anatomy import CROSS, Block, Stack
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.shards import (
    WHOLE,
    Slice,
    TensorPlace,
    is_sharded,
    sharded_along,
    slice_of,
    whole,
)
from geomon.capture.tap import Provenance
from geomon.capture.tokens.padding import Padding
from geomon.capture.tokens.pass_tokens import PassTokens
from geomon.capture.tokens.sampling import RowSampler, SampledRows
from geomon.capture.weights import said

Shape = tuple[int, ...]

# Rows of hidden states by which ranks see whether they have the same tokens.
LANDMARKS = 8


@dataclass
class BlockCall:
    """One call of a block, and what was kept of it.

    Attentions of the block are numbered as in `Block.attentions`, from 0.

    Attributes:
        block: Index of the block in its stack, from 0.
        shape: Shape of the hidden states that entered the block, of all ranks that share them out,
            without the width; None if they are nested.
        entered: The same with the width, as the block was given it.
        handed_on: Whether what entered the block is what left the one that was called before.
        hidden: Rows of the hidden states that left the block.
        is_sum: Whether these are the sum of what entered the block and what left it.
        running_attention: Index of the attention that is running, if the block has several.
        attentions: What was seen of each attention.
        provenance: What follows tensors through the call.
        finished: Whether nothing more is followed.
        inputs: Inputs of the modules that are projecting, by the address of the module.
        firsts: Number of the first feature of each of these modules, among those of all ranks.
        weight_norms: Frobenius norm of the block's matrices of weights by name; empty if they were
            not read.
        expert_counts: How often the tokens chose each expert; None without experts.
    """

    block: int
    shape: Shape | None = None
    entered: Shape | None = None
    handed_on: bool = True
    hidden: SampledRows | None = None
    is_sum: bool = False
    running_attention: int | None = None
    attentions: dict[int, SeenAttention] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)
    finished: bool = False
    inputs: dict[int, Tensor] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    weight_norms: dict[str, Tensor] = field(default_factory=dict)
    expert_counts: Tensor | None = None

    def seen(self, index: int) -> SeenAttention:
        """Return what was seen of an attention; nothing so far where it was not met yet.

        Args:
            index: Index of the attention.
        """
        return self.attentions.setdefault(index, SeenAttention())

    def forget_tensors(self) -> None:
        """Free the tensors of the model that were followed, and follow no others."""
        self.finished = True
        self.provenance.forget()
        self.inputs.clear()
        for seen in self.attentions.values():
            seen.heads = None


class StackPass:
    """The first pass through a stack.

    The rule, here and nowhere else: of the calls of a stack's blocks those count that come between
    the first call of the stack's owner and its return. A second pass in the same window (of
    contrastive training, of a generation loop) does not count, unless it goes on with what the one
    before has made: then the model runs its blocks in a loop, and each call is a layer. Nor does a
    pass that never returned count, once another begins. A pass in which gradients are recorded
    takes the place of one in which none are: what a training step generates or scores without them
    is not what it trains on. Where nobody calls the owner (its `forward` is called directly,
    or the training step runs the blocks itself) the first call of each block counts.

    Args:
        stack: The stack.
        sampler: Sampler of the rows.
        first: Whether the stack is the first one of the model.
        place: Place of this rank among those that share out the weights of the blocks.

    Attributes:
        stack: The stack.
        sampler: Sampler of the rows.
        first: Whether the stack is the first one of the model.
        place: Place of this rank among those that share out the weights of the blocks.
        tokens: The tokens of the pass: padding, token ids, sequences, sampled rows.
        block_calls: The calls that count, in order.
        entered: Rows of the hidden states that entered the first of these calls.
        parts: Last call of a block that is a list of modules (None if it does not count), index
            of the block, and addresses of the modules that it called.
        left: Address and shape of what left the last block that was called.
        hands_on_several: Whether a block gave several tensors of the hidden states' shape.
        restarts: Whether a block was called again on another tensor than the last block gave.
        side_by_side: Whether a block was given what the block before was given.
        hides_between: Whether what enters a block is not what the block before returned, and what
            is done between them is not seen.
        passed_over: Number of passes that did not count and were no part of a loop.
        leaving: What left the last block that was called; kept for the final norm alone.
        normed: Rows of what the final norm made of it, and the name of the norm.
        mode: "train" or "eval"; "" where no block was called.
        dtype: Data type of the hidden states in the model.
        why_not_read: Why hidden states were not read, where they were not; "" for no reason.
        with_gradients: Whether gradients are recorded in the pass that counts.
    """

    def __init__(
        self,
        stack: Stack,
        sampler: RowSampler,
        *,
        first: bool = True,
        place: TensorPlace = WHOLE,
    ) -> None:
        self.stack = stack
        self.sampler = sampler
        self.first = first
        self.place = place
        self.with_gradients = False
        self._state = "never called"
        self._see_tokens()
        self._clear()

    def _see_tokens(self) -> None:
        length_first = any(
            said(attention.module, "batch_first") is False
            for block in self.stack.blocks
            for attention in block.attentions
        )
        decodes = any(block.attention_index(CROSS) is not None for block in self.stack.blocks)
        padding = Padding(first=self.first, decodes=decodes)
        self.tokens = PassTokens(self.sampler, padding, length_first=length_first)

    def _clear(self) -> None:
        self.block_calls: list[BlockCall] = []
        self.entered: SampledRows | None = None
        self.dtype = torch.float32
        self.mode = ""
        self.why_not_read = ""
        # Dimension along which hidden states that are plain tensors are shared out among ranks, and
        # whether it is known yet.
        self._along: int | None = None
        self._along_is_known = self.place.shards == 1
        # The last call of a block that is a list of modules, and those of them that it called.
        self.parts: tuple[BlockCall | None, int | None, set[int]] = (None, None, set())
        self.left: tuple[int, Shape] | None = None
        self.restarts = False
        self.side_by_side = self.hides_between = False
        self.passed_over = 0
        self.hands_on_several = False
        self.leaving: Tensor | None = None
        self.normed: tuple[SampledRows, str] | None = None

    # -- which calls count -----------------------------------------------------------------------

    def begin(self, *, with_gradients: bool, goes_on: bool = False) -> bool:
        """Note that the owner is called.

        Args:
            with_gradients: Whether gradients are recorded.
            goes_on: Whether it is given what the blocks have made before.

        Returns:
            Whether the pass that counts begins, or goes on.
        """
        if self._state == "over":
            if goes_on and with_gradients == self.with_gradients:
                self._state = "running"
                return True
            self.passed_over += with_gradients == self.with_gradients
            return False
        self._clear()
        self.tokens.forget_states()
        self._state, self.with_gradients = "running", with_gradients
        return True

    def hand_over(self) -> "StackPass":
        """Return what was seen as a pass of its own, which this one no longer changes."""
        done = copy.copy(self)
        done.leaving = None
        return done

    def forget(self, sampler: RowSampler) -> None:
        """Forget the pass that was seen: another one is to count.

        Args:
            sampler: Sampler of its rows.
        """
        self.sampler = sampler
        self._see_tokens()
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
            The call, to which what is kept of it is added; None if it does not count.
        """
        called = any(call.block == block for call in self.block_calls)
        if self._state == "over" or (self._state == "never called" and called):
            return None
        self.block_calls.append(BlockCall(block))
        return self.block_calls[-1]

    @property
    def counts_calls(self) -> bool:
        """Whether each call is a layer: a block came again, or behind one that follows it."""
        pairs = itertools.pairwise(self.block_calls)
        return any(call.block >= following.block for call, following in pairs)

    # -- which rows are kept ---------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """Shape of the hidden states that entered the first of the calls, without the width."""
        return self.tokens.shape

    def shape_at(self, block_call: BlockCall) -> Shape:
        """Return the shape of the hidden states that entered a block, without the width."""
        return self.shape if block_call.shape is None else block_call.shape

    def slice_of(self, hidden: Tensor, rows: Tensor) -> Slice:
        """Find where the hidden states that are on this rank lie among those of all ranks.

        Where a plan of tensor parallelism shares them out along the sequence, they may be plain
        tensors: token ids of so many times the length tell it, or attention (`take_attention`).
        """
        part = tuple(rows.shape[:-1])
        if is_sharded(hidden):
            return slice_of(hidden)
        if not self._along_is_known:
            self._look_at_ids(part)
        if self._along is None or part == self.shape:
            return whole(part)
        return sharded_along(self._along, part, self.place)

    def possible_shapes(self, block_call: BlockCall) -> list[Shape]:
        """List the shapes that the hidden states which entered a block may have on all ranks."""
        shape = self.shape_at(block_call)
        if self._along_is_known:
            return [shape]
        dims = range(len(shape))
        return [shape, *(sharded_along(dim, shape, self.place).shape for dim in dims)]

    def take_attention(self, block_call: BlockCall, shape: Shape) -> None:
        """Take note that attention has shown the shape of the hidden states on all ranks.

        Rows that were sampled before, as if there were no others, are dropped.
        """
        part = self.shape_at(block_call)
        self._along_is_known = True
        if shape == part:
            return
        self._along = next(dim for dim in range(len(part)) if shape[dim] != part[dim])
        self.entered = None
        for other in self.block_calls:
            other.hidden = None
            other.shape = shape if other.shape == part else other.shape
        self.tokens.begin(shape)

    def _look_at_ids(self, part: Shape) -> None:
        longer = [sharded_along(dim, part, self.place).shape for dim in range(len(part))]
        shape = self.tokens.ids.first_fitting([part, *longer])
        self._along_is_known = shape is not None
        self._along = None if shape in (None, part) else longer.index(shape)

    def row_indices(self, shape: Shape) -> Tensor:
        """Return flat indices of the sampled rows; the same for hidden states of one shape."""
        return self.tokens.rows(self._unfolded(shape))

    def settle(self) -> None:
        """Decide what is padding, now that the pass was seen, and remove the rows of it."""
        self.tokens.settle(
            [
                tuple(seen.call.shape)
                for block_call in self.block_calls
                for seen in block_call.attentions.values()
                if seen.call is not None
            ]
        )
        if self.entered is not None:
            self.entered = self._without_padding(self.entered)
        if self.normed is not None:
            self.normed = self._without_padding(self.normed[0]), self.normed[1]
        for block_call in self.block_calls:
            if block_call.hidden is not None:
                block_call.hidden = self._without_padding(block_call.hidden)
            for seen in block_call.attentions.values():
                if seen.projected is not None:
                    query, key = (self.tokens.without_padding(x, x.shape) for x in seen.projected)
                    seen.projected = query, key

    def _without_padding(self, rows: SampledRows) -> SampledRows:
        return self.tokens.without_padding(rows, self._unfolded(rows.shape))

    def _unfolded(self, shape: Shape) -> Shape:
        """Return the shape in which rows entered the stack, where a block flattens them."""
        flattened = shape != self.shape[::-1] and math.prod(shape) == math.prod(self.shape)
        return self.shape if flattened else shape

    # -- which layers they make ------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Number of layers: of blocks, or of calls (see `counts_calls`)."""
        return len(self.block_calls) if self.counts_calls else len(self.stack.blocks)

    def is_routed(self, shape: Shape) -> bool:
        """Whether hidden states are of some tokens, which only some of the blocks are given.

        Tokens that were merged stay merged: they are routed where a block is given more than one
        before it, or as many that another block has not handed on.
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
        """Return the block of a layer, its call (None if it was not called) and a name."""
        if self.counts_calls:
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


def attention_key(block: Block, label: str = "") -> int | None:
    """Return the index under which an attention is kept in `BlockCall`.

    None if the block has no such attention.
    """
    return 0 if not block.attentions and not label else block.attention_index(label)
