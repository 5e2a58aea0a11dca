"""What is kept of the first pass of a stack, and which calls of its blocks belong to it."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.capture.anatomy.blocks import Block, Stack
from geomon.capture.anatomy.projections import Multihead
from geomon.capture.attention import AttentionCall, SoftmaxCall
from geomon.capture.masks import OF_MEMORY
from geomon.capture.sampling import RowDraw

Shape = tuple[int, ...]


# Queries at which the output of a fused projection is compared with what was attended.
SAMPLES = 64


class Kept(NamedTuple):
    """Rows that were copied.

    Attributes:
        values: [rows, width], float32.
        rows: Which rows of the whole they are: flat indices into `shape`.
        shape: Of the whole, without the width.
    """

    values: Tensor
    rows: Tensor
    shape: Shape


@dataclass
class Visit:
    """One call of a block, and what was kept of it.

    Attributes:
        block: Which block of the stack, from 0.
        hidden: What left the block.
        attending: Which of the block's attentions is being run.
        calls: By attention, what it attended with.
        routes: By attention, where it was seen: "interface", "sdpa" or "softmax".
        refused: By attention, why a call was not kept.
        projected: By attention and "query" or "key", what left the projection (of
            `nn.MultiheadAttention`: what entered it).
        weights: By attention, those of `nn.MultiheadAttention`.
        samples: By attention, what left a fused projection at the first sampled queries.
    """

    block: int
    hidden: Kept | None = None
    attending: int | None = None
    calls: dict[int, AttentionCall | SoftmaxCall] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    projected: dict[tuple[int, str], Kept] = field(default_factory=dict)
    weights: dict[int, Multihead] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)

    def refuse(self, attention: int, reason: str) -> None:
        """Let go of what was kept of an attention."""
        self.refused[attention] = reason
        self.calls.pop(attention, None)
        self.routes.pop(attention, None)


class Pass:
    """The first pass through a stack.

    The rule, here and nowhere else: of the calls of a stack's blocks those count that come between
    the first call of the stack's owner and its return. A second pass in the same window (of
    contrastive training, of a generation loop) counts for nothing, and neither does a pass that
    never returned once another begins. Where nobody calls the owner (its `forward` is called
    directly, or the training step runs the blocks itself) the first call of each block counts.

    Attributes:
        stack: Which one.
        visits: The calls that count, in order.
        entered: What entered the first of them.
        shape: Of the hidden states there, without the width.
        masks: By argument name, False where there is padding, in the order seen.
        length_first: Whether hidden states are [length, batch, width], as far as modules say so.
        token_ids: What embedding tables were given, in the order seen.
        mode: "train" or "eval".
        dtype: Of the hidden states in the model.
        local: Whether they were sharded, and this rank's part was taken.
    """

    def __init__(self, stack: Stack, draw: RowDraw) -> None:
        self.stack = stack
        self.masks: list[tuple[str, Tensor]] = []
        self.token_ids: list[Tensor] = []
        self.length_first = any(
            getattr(attention.module, "batch_first", True) is False
            for block in stack.blocks
            for attention in block.attentions
        )
        self._draw = draw
        self._state = "never called"
        self._begin()

    def _begin(self) -> None:
        self.visits: list[Visit] = []
        self.entered: Kept | None = None
        self.shape: Shape = ()
        self.dtype = torch.float32
        self.mode = "eval"
        self.local = False
        self._rows: dict[tuple[Shape, str], Tensor] = {}

    # -- which calls count -----------------------------------------------------------------------

    def enter(self) -> bool:
        """The owner is called; whether this is the pass that counts."""
        if self._state == "over":
            return False
        self._begin()
        self._state = "running"
        return True

    def leave(self) -> None:
        """The owner has returned."""
        if self._state == "running":
            self._state = "over"

    @property
    def running(self) -> bool:
        """Whether the owner is being run for the time that counts."""
        return self._state == "running"

    @property
    def over(self) -> bool:
        """Whether all that counts has been seen."""
        return self._state == "over"

    def visit(self, block: int) -> Visit | None:
        """A block is called; None where the call does not count."""
        called = any(visit.block == block for visit in self.visits)
        if self._state == "over" or (self._state == "never called" and called):
            return None
        self.visits.append(Visit(block))
        return self.visits[-1]

    @property
    def shared(self) -> bool:
        """Whether a block was called more than once: layers are counted by calls then."""
        return len({visit.block for visit in self.visits}) < len(self.visits)

    # -- which rows are kept ---------------------------------------------------------------------

    def begin_rows(self, shape: Shape, dtype: torch.dtype) -> None:
        """Take the first hidden states for what the stack works on."""
        self.shape, self.dtype = shape, dtype

    def shape_at(self, visit: Visit) -> Shape:
        """Shape of the hidden states that entered a block, without the width."""
        before = [v for v in self.visits if v.hidden is not None and v is not visit]
        return before[-1].hidden.shape if before and before[-1].hidden else self.shape

    def as_batch(self, shape: Shape) -> tuple[int, int] | None:
        """Sequences and length of rows of a shape; None where they have neither."""
        if len(shape) != 2 and math.prod(shape) == math.prod(self.shape):
            shape = self.shape
        return (shape[0], shape[1]) if len(shape) == 2 else None

    def rows(self, shape: Shape, role: str = "") -> Tensor:
        """Flat indices of the rows of one shape; the same at every layer.

        Args:
            shape: Of the rows, without the width.
            role: "key" for keys that come from another stack, whose padding is another.
        """
        if not role and shape != self.shape[::-1] and math.prod(shape) == math.prod(self.shape):
            shape = self.shape  # the same rows, folded or flattened
        if (shape, role) not in self._rows:
            self._rows[shape, role] = self._draw.rows(torch.Size(shape), self.valid(shape, role))
        return self._rows[shape, role]

    def valid(self, shape: Shape, role: str = "") -> Tensor | None:
        """False where there is padding, of the given shape; None where no mask has that shape."""
        for name, mask in reversed(self.masks):  # the innermost module's first
            if name.startswith(OF_MEMORY) != (role == "key"):
                continue
            if shape == mask.shape:
                square = shape[0] == shape[1]
                return mask.T if square and self.length_first else mask
            if shape == mask.shape[::-1]:
                return mask.T
        return None

    def valid_queries(self, call: AttentionCall | SoftmaxCall) -> Tensor | None:
        """False where a sampled query is padding, [sequences, queries]; None without a mask."""
        for name, mask in reversed(self.masks):
            if not name.startswith(OF_MEMORY) and call.shape == mask.shape:
                return mask.cpu()[call.sequences].gather(1, call.places)
        return None

    # -- which layers they make ------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Number of layers: of blocks, or of calls where blocks are called again."""
        return len(self.visits) if self.shared else len(self.stack.blocks)

    def at(self, depth: int) -> tuple[Block, Visit | None, str]:
        """The block of a layer, its call (None where it was not called), the layer's name."""
        if self.shared:
            visit = self.visits[depth - 1]
            block = self.stack.blocks[visit.block]
            return block, visit, f"{block.name}, call {depth}"
        block = self.stack.blocks[depth - 1]
        called = (visit for visit in self.visits if visit.block == depth - 1)
        return block, next(called, None), block.name


def sample_places(count: int) -> Tensor:
    """Evenly spread indices, at most `SAMPLES`, into that many sampled queries."""
    return torch.linspace(0, count - 1, min(count, SAMPLES)).long()
