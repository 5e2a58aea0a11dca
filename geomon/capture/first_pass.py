"""First pass: the calls of the blocks of a stack that count, and what is kept of them.

Everything that sees a call fills these; layers are made of them (`geomon.capture.assemble`).
`geomon.capture.tracker` has the rule which calls count.
"""

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
from geomon.capture.tokens.sampling import MemoryLimit, SampledRows
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
        called: Addresses of the modules that were called, of a block that is a list of them.
        hidden: Rows of the hidden states that left the block.
        is_sum: Whether these are the sum of what entered the block and what left it.
        running_attention: Index of the attention that is running, if the block has several.
        attentions: What was seen of each attention.
        provenance: What follows tensors through the call.
        finished: Whether nothing more is followed.
        inputs: Inputs of the modules that are projecting, and the number of their first feature
            among those of all ranks, by the address of the module.
        weight_norms: Frobenius norm of the block's matrices of weights by name; empty if they were
            not read.
        expert_counts: How often the tokens chose each expert; None without experts.
    """

    block: int
    shape: Shape | None = None
    entered: Shape | None = None
    handed_on: bool = True
    called: set[int] = field(default_factory=set)
    hidden: SampledRows | None = None
    is_sum: bool = False
    running_attention: int | None = None
    attentions: dict[int, SeenAttention] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)
    finished: bool = False
    inputs: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
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
    """One pass through a stack: the calls of its blocks, and what is known of all of them.

    Args:
        stack: The stack.
        memory: Limit of the memory of the rows, with their sampler.
        first: Whether the stack is the first one of the model.
        place: Place of this rank among those that share out the weights of the blocks.

    Attributes:
        stack: The stack.
        memory: Limit of the memory of the rows, with their sampler.
        place: Place of this rank among those that share out the weights of the blocks.
        running: Whether the stack's owner is running.
        over: Whether the owner has returned.
        with_gradients: Whether gradients are recorded in it.
        passed_over: Number of later passes, which do not count.
        tokens: The tokens of the pass: padding, token ids, sequences, sampled rows.
        block_calls: The calls that count, in order.
        entered: Rows of the hidden states that entered the first of these calls.
        left: Address and shape of what left the last block that was called.
        leaving: What left the last block that was called; kept for the final norm alone.
        normed: Rows of what the final norm made of it, and the name of the norm.
        mode: "train" or "eval"; "" where no block was called.
        dtype: Data type of the hidden states in the model.
        why_not_read: Why hidden states were not read, where they were not; "" for no reason.
        remarks: What a reader of the numbers has to know of the order of the blocks.
    """

    def __init__(
        self,
        stack: Stack,
        memory: MemoryLimit,
        *,
        first: bool = True,
        place: TensorPlace = WHOLE,
    ) -> None:
        self.stack, self.memory, self.place = stack, memory, place
        self.running = self.over = self.with_gradients = False
        self.passed_over = 0
        length_first = any(
            said(attention.module, "batch_first") is False
            for block in stack.blocks
            for attention in block.attentions
        )
        decodes = any(block.attention_index(CROSS) is not None for block in stack.blocks)
        padding = Padding(first=first, decodes=decodes)
        self.tokens = PassTokens(memory.sampler, padding, length_first=length_first)
        self.block_calls: list[BlockCall] = []
        self.entered: SampledRows | None = None
        self.left: tuple[int, Shape] | None = None
        self.leaving: Tensor | None = None
        self.normed: tuple[SampledRows, str] | None = None
        self.dtype = torch.float32
        self.mode = self.why_not_read = ""
        self.remarks: dict[str, None] = {}
        # Dimension along which hidden states that are plain tensors are shared out among ranks, and
        # whether it is known yet.
        self._along: int | None = None
        self._along_is_known = place.shards == 1

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

        A plan of tensor parallelism may split them along the sequence and leave plain tensors:
        token ids of so many times the length show it, or attention (`take_attention`).
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
        """Decide what is padding and what is packed, now that the pass was seen."""
        self.tokens.settle(
            [
                tuple(seen.call.shape)
                for block_call in self.block_calls
                for seen in block_call.attentions.values()
                if seen.call is not None
            ]
        )

    def without_padding(self, rows: SampledRows) -> SampledRows:
        """Remove rows of hidden states that are known to be padding now."""
        return self.tokens.without_padding(rows, self._unfolded(rows.shape))

    def _unfolded(self, shape: Shape) -> Shape:
        """Return the shape in which rows entered the stack, where a block flattens them."""
        flattened = shape != self.shape[::-1] and math.prod(shape) == math.prod(self.shape)
        return self.shape if flattened else shape

    # -- which layers they make ------------------------------------------------------------------

    def layers(self) -> list[tuple[Block, BlockCall | None, str]]:
        """List the block of each layer, its call (None if it was not called) and a name.

        Each call is a layer if a block came again, or behind one that follows it.
        """
        blocks, calls = self.stack.blocks, self.block_calls
        if any(call.block >= following.block for call, following in itertools.pairwise(calls)):
            numbered = [(blocks[call.block], call) for call in calls]
            return [(b, call, f"{b.name}, call {n}") for n, (b, call) in enumerate(numbered, 1)]
        by_block = {call.block: call for call in calls}
        return [(block, by_block.get(n), block.name) for n, block in enumerate(blocks)]

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
