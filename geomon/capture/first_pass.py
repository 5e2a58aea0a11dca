"""First pass: which calls of the blocks of a stack count, and what is kept of them.

A window may be open over several calls of a model; `StackPass` has the rule by which one pass makes
the layers. Padding masks are found among the arguments of the modules around the blocks.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.anatomy import Anatomy, Block, Stack
from geomon.capture.attention import AttentionCall, SoftmaxCall
from geomon.capture.qkv import Multihead
from geomon.capture.sampling import RowSampler

Shape = tuple[int, ...]

# Queries at which the output of a fused projection is compared with what was attended.
SAMPLES = 64

# Arguments that are True or 1 where there is a token.
_TOKENS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# Arguments that are True or -inf where there is none.
_PADDING = (
    "key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    "encoder_padding_mask",
)  # fmt: skip
_MASKS = (*_TOKENS, *_PADDING)
# Beginnings of the names of masks over what a decoder attends to, not over its own tokens.
_OF_MEMORY = ("memory", "encoder")

_ADDED = -1.0  # an additive mask is 0 where there is a token and far below where there is none


class SampledRows(NamedTuple):
    """Copies of sampled rows.

    Attributes:
        values: The rows, [rows, width], float32.
        indices: Flat indices of the rows in `shape`.
        shape: Shape of the tensor that they were copied from, without the width.
    """

    values: Tensor
    indices: Tensor
    shape: Shape


@dataclass
class BlockCall:
    """One call of a block, and what was kept of it.

    Attentions of the block are numbered as in `Block.attentions`, from 0.

    Attributes:
        block: Index of the block in its stack, from 0.
        hidden: Rows of the hidden states that left the block.
        running_attention: Index of the attention that is running, if the block has several.
        attention_calls: Recorded call of each attention.
        routes: Where each attention was seen: "interface", "sdpa" or "softmax".
        refused: Why the call of an attention was not kept.
        projected: Rows of the output of the projections of each attention, by its index and "query"
            or "key" (of `nn.MultiheadAttention`: of the input).
        weights: Weights of each `nn.MultiheadAttention`.
        samples: Rows of the output of each fused projection at the first sampled queries.
    """

    block: int
    hidden: SampledRows | None = None
    running_attention: int | None = None
    attention_calls: dict[int, AttentionCall | SoftmaxCall] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    projected: dict[tuple[int, str], SampledRows] = field(default_factory=dict)
    weights: dict[int, Multihead] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)

    def refuse(self, attention: int, reason: str) -> None:
        """Drop what was recorded of an attention.

        Args:
            attention: Index of the attention.
            reason: Why its call is not kept.
        """
        self.refused[attention] = reason
        self.attention_calls.pop(attention, None)
        self.routes.pop(attention, None)


class StackPass:
    """The first pass through a stack.

    The rule, here and nowhere else: of the calls of a stack's blocks those count that come between
    the first call of the stack's owner and its return. A second pass in the same window (of
    contrastive training, of a generation loop) does not count, and neither does a pass that never
    returned, once another begins. Where nobody calls the owner (its `forward` is called directly,
    or the training step runs the blocks itself) the first call of each block counts.

    Args:
        stack: The stack.
        sampler: Sampler of the rows.

    Attributes:
        stack: The stack.
        block_calls: The calls that count, in order.
        entered: Rows of the hidden states that entered the first of these calls.
        shape: Shape of those hidden states, without the width.
        masks: Names and values of padding masks, False where there is padding, in the order seen.
        length_first: Whether the modules take hidden states as [length, batch, width].
        token_ids: Inputs of embedding tables, in the order seen.
        mode: "train" or "eval".
        dtype: Data type of the hidden states in the model.
        sharded: Whether hidden states were sharded, and this rank's part was taken.
    """

    def __init__(self, stack: Stack, sampler: RowSampler) -> None:
        self.stack = stack
        self.masks: list[tuple[str, Tensor]] = []
        self.token_ids: list[Tensor] = []
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
        self._indices: dict[tuple[Shape, str], Tensor] = {}

    # -- which calls count -----------------------------------------------------------------------

    def begin(self) -> bool:
        """Note that the owner is called.

        Returns:
            Whether the pass that counts begins.
        """
        if self._state == "over":
            return False
        self._clear()
        self._state = "running"
        return True

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
        self.shape, self.dtype = shape, dtype

    def shape_at(self, block_call: BlockCall) -> Shape:
        """Return the shape of the hidden states that entered a block, without the width.

        Args:
            block_call: The call of the block.
        """
        before = [c for c in self.block_calls if c.hidden is not None and c is not block_call]
        return before[-1].hidden.shape if before and before[-1].hidden else self.shape

    def as_batch(self, shape: Shape) -> tuple[int, int] | None:
        """Return the number of sequences and their length.

        Args:
            shape: Shape of the output of a projection, without the width.

        Returns:
            Both numbers, or None where the shape has neither.
        """
        if len(shape) != 2 and math.prod(shape) == math.prod(self.shape):
            shape = self.shape
        return (shape[0], shape[1]) if len(shape) == 2 else None

    def row_indices(self, shape: Shape, role: str = "") -> Tensor:
        """Return flat indices of the sampled rows; the same for every tensor of one shape.

        Args:
            shape: Shape of the tensor, without the width.
            role: "key" for keys that come from another stack, whose padding is another.
        """
        if not role and shape != self.shape[::-1] and math.prod(shape) == math.prod(self.shape):
            shape = self.shape  # the same rows, folded or flattened
        if (shape, role) not in self._indices:
            valid = self.valid(shape, role)
            self._indices[shape, role] = self._sampler.sample_rows(torch.Size(shape), valid)
        return self._indices[shape, role]

    def valid(self, shape: Shape, role: str = "") -> Tensor | None:
        """Return which tokens are no padding.

        Args:
            shape: Shape of the hidden states, without the width.
            role: "key" for keys that come from another stack, whose padding is another.

        Returns:
            False where there is padding, a tensor of the given shape; None where no mask fits it.
        """
        for name, mask in reversed(self.masks):  # the innermost module's first
            if name.startswith(_OF_MEMORY) != (role == "key"):
                continue
            if shape == mask.shape:
                square = shape[0] == shape[1]
                return mask.T if square and self.length_first else mask
            if shape == mask.shape[::-1]:
                return mask.T
        return None

    def valid_queries(self, call: AttentionCall | SoftmaxCall) -> Tensor | None:
        """Return which of the sampled queries are no padding.

        Args:
            call: Recorded call of an attention.

        Returns:
            False where a query is padding, [sequences, queries]; None where no mask fits the call.
        """
        for name, mask in reversed(self.masks):
            if not name.startswith(_OF_MEMORY) and call.shape == mask.shape:
                return mask.cpu()[call.sequences].gather(1, call.places)
        return None

    # -- which layers they make ------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Number of layers: of blocks, or of calls where blocks are called again."""
        return len(self.block_calls) if self.repeats_blocks else len(self.stack.blocks)

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


def attention_key(block: Block, *, cross: bool) -> int | None:
    """Return the index under which an attention is kept in `BlockCall`.

    Args:
        block: The block.
        cross: Whether its cross-attention is meant, and not the one to its own stack.

    Returns:
        The index in `Block.attentions`; 0 for the own attention of a block without known ones; None
        where the block has no such attention.
    """
    return 0 if not block.attentions and not cross else block.attention_index(cross=cross)


def spread_indices(count: int) -> Tensor:
    """Return evenly spread indices, at most `SAMPLES` of them.

    Args:
        count: Number of sampled queries.
    """
    kept = min(count, SAMPLES)
    order = torch.arange(kept, dtype=torch.int64, device="cpu")
    return order * (count - 1) // max(kept - 1, 1)


# -- padding masks -------------------------------------------------------------------------------


@torch.no_grad()
def find_padding_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Find the padding masks [batch, length] among the arguments of a call.

    Args:
        module: The module that is called; its signature names positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.

    Returns:
        Masks by the name of the argument, False where there is padding.
    """
    given = _by_name(module, args, kwargs)
    found = {}
    for name in _MASKS:
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_nested:
            found[name] = _as_valid(mask.detach().clone(), inverted=name in _PADDING)
    return found


def padding_arguments(anatomy: Anatomy) -> list[str]:
    """List the names of the arguments by which the modules around the blocks take padding masks.

    Masks over what a decoder attends to count only in a model with cross-attention.

    Args:
        anatomy: Anatomy of the model.
    """
    found: dict[str, None] = {}
    for stack in anatomy.stacks:
        for module in stack.above:
            parameters = inspect.signature(module.forward).parameters
            found |= dict.fromkeys(name for name in _MASKS if name in parameters)
    crossing = any(block.attention_index(cross=True) is not None for block in anatomy.blocks)
    return [name for name in found if crossing or not name.startswith(_OF_MEMORY)]


def _as_valid(mask: Tensor, *, inverted: bool) -> Tensor:
    """Convert a mask to False where there is padding; `inverted` masks are True there."""
    if mask.is_floating_point() and (inverted or not _is_ones_for_tokens(mask)):
        return mask > _ADDED
    return ~mask.bool() if inverted else mask.bool()


def _is_ones_for_tokens(mask: Tensor) -> bool:
    """Whether a floating-point mask has ones for tokens, and is not added to scores."""
    return bool((mask > 0).any()) and not bool((mask < 0).any())


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Name all arguments of a call; positional ones are lost where there is no signature."""
    if not args:
        return kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments | dict(
            kwargs
        )
    except (TypeError, ValueError):
        return kwargs
