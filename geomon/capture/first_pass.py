"""The block calls of a stack that count in one pass, and what is kept of each.

All observers of a call fill in these forms, and `geomon.capture.assemble` makes layers from them.
`geomon.capture.tracker` decides which calls count.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from geomon.capture.anatomy import CROSS, Block, Stack
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.selection import RowSelection, SequenceSplit
from geomon.capture.shards import WHOLE, TensorPlace
from geomon.capture.storage import Shape
from geomon.capture.tap import Origins, Plan, Provenance
from geomon.capture.tokens.known_tokens import KnownTokens
from geomon.capture.tokens.padding import Padding
from geomon.capture.tokens.pass_tokens import PassTokens
from geomon.capture.tokens.sampling import MemoryLimit, RowSampler, SampledRows
from geomon.capture.weights import Norms, said
from geomon.note_kinds import NoteKind

TensorId = tuple[int, Shape]  # address and shape, which identify a tensor while it lives

# Number of rows of hidden states that ranks compare to see whether they have the same tokens.
LANDMARKS = 8

_SHARED_OUT = "ranks share the sequence, and only attention showed it, after this layer was read"


@dataclass
class BlockCall:
    """One call of a block, and what was kept of it.

    Attentions of the block are numbered as in `Block.attentions`, from 0.

    Attributes:
        block: Index of the block in its stack, from 0.
        shape: Shape of the hidden states that entered the block, over all ranks that share them,
            without the width; None if they are nested.
        input_shape: Shape of the block's input on this rank, with the width.
        given: Address and shape of each tensor among the block's arguments.
        handed_on: Whether the block's input is the output of the block called before it.
        called: Ids of the modules called so far, if the block is a list of modules.
        hidden: Rows of the hidden states that left the block.
        summed: Rows of the sum of its input and output, if the model makes one after the block.
        running_attention: Index of the attention that is running, if the block has several.
        attentions: Observations of each attention.
        provenance: Answers where tensors of the call come from.
        known_as: The module that is called, and the form of its call.
        plan: Plan of its operators, if one could be made.
        goes_on: Whether attention was seen after the call's own attention was complete.
        finished: Whether following tensors has ended.
        inputs: By id of a module that is projecting: its input, and the index of its first feature
            on all ranks.
        weight_norms: Frobenius norms of the weight matrices of the block, or None if not read.
        expert_counts: How often the tokens chose each expert, or None without experts.
    """

    block: int
    shape: Shape | None = None
    input_shape: Shape | None = None
    given: frozenset[TensorId] = frozenset()
    handed_on: bool = True
    called: set[int] = field(default_factory=set)
    hidden: SampledRows | None = None
    summed: SampledRows | None = None
    running_attention: int | None = None
    attentions: dict[int, SeenAttention] = field(default_factory=dict)
    provenance: Origins = field(default_factory=Provenance)
    known_as: tuple[nn.Module, Any] | None = None
    plan: Plan | None = None
    goes_on: bool = False
    finished: bool = False
    inputs: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    weight_norms: Norms | None = None
    expert_counts: Tensor | None = None

    def seen(self, index: int) -> SeenAttention:
        """Return what was seen of an attention so far."""
        return self.attentions.setdefault(index, SeenAttention())

    def forget_tensors(self) -> None:
        """Release the model's tensors, and stop following any."""
        self.finished = True
        self.provenance.forget()
        self.provenance = Provenance()
        self.inputs.clear()
        for seen in self.attentions.values():
            seen.heads = None


class OwnerCall:
    """The call of a stack's owner that makes a pass.

    Attributes:
        running: Whether the owner is running.
        over: Whether it has returned.
        with_gradients: Whether it records gradients.
        passed_over: Number of later calls, which do not count.
    """

    def __init__(self) -> None:
        self.running = self.over = self.with_gradients = False
        self.passed_over = 0

    def begin(self, *, with_gradients: bool) -> None:
        """Handle the beginning of the call, or of one that goes on with its output."""
        self.running, self.over, self.with_gradients = True, False, with_gradients

    def end(self) -> None:
        """Handle the return of the owner."""
        self.over |= self.running
        self.running = False


class StackPass:
    """One pass through a stack: its block calls, and what is known about all of them.

    Args:
        stack: The stack.
        memory: Memory limit of the rows, with their sampler.
        first: Whether the stack is the model's first one.
        place: Place of this rank among those that share the weights of the blocks.
        tokens: Tokens of a pass with the same arguments. Defaults to None, for new ones.

    Attributes:
        stack: The stack.
        is_part: Whether other ranks may hold other heads of the same attention.
        owner_call: The call of the stack's owner.
        tokens: The tokens of the pass: padding, token ids, sequences, sampled rows.
        selection: The rows of the hidden states that are kept.
        block_calls: The calls that count, in order.
        input_rows: Rows of the hidden states that entered the first of these calls.
        last_output_id: Address and shape of the output of the last block that was called.
        last_output: That output, kept so that no other tensor gets its address.
        normed: Rows of the final norm's output, and the name of the norm.
        mode: "train" or "eval"; "" if no block was called.
        remarks: Remarks on the order of the blocks, for the reader of the numbers.
    """

    def __init__(
        self,
        stack: Stack,
        memory: MemoryLimit,
        *,
        first: bool = True,
        place: TensorPlace = WHOLE,
        tokens: PassTokens | None = None,
    ) -> None:
        self.stack, self.is_part = stack, place.shards > 1 or not stack.is_whole
        self.owner_call = OwnerCall()
        self.tokens = _new_tokens(stack, memory.sampler, first=first) if tokens is None else tokens
        self.selection = RowSelection(memory, self.tokens, SequenceSplit(place, self.tokens))
        self.block_calls: list[BlockCall] = []
        self.input_rows: SampledRows | None = None
        self.last_output_id: TensorId | None = None
        self.last_output: Tensor | None = None
        self.normed: tuple[SampledRows, str] | None = None
        self.mode = ""
        self.remarks: dict[NoteKind, str] = {}

    # -- which rows are kept ---------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """Shape of the hidden states that entered the first of the calls, without the width."""
        return self.tokens.shape

    def shape_at(self, block_call: BlockCall) -> Shape:
        """Return the shape of the hidden states that entered a block, without the width."""
        return self.shape if block_call.shape is None else block_call.shape

    def possible_shapes(self, block_call: BlockCall) -> list[Shape]:
        """List the shapes that a block's input may have over all ranks."""
        return self.selection.split.possible_shapes(self.shape_at(block_call))

    def take_attention(self, block_call: BlockCall, shape: Shape) -> None:
        """Accept the shape of hidden states over all ranks that attention has shown.

        Rows sampled before, under the assumption of a smaller shape, are dropped.
        """
        part = self.shape_at(block_call)
        if not self.selection.split.settle(part, shape):
            return
        self.input_rows = None
        self.selection.begin_anew(_SHARED_OUT)
        for other in self.block_calls:
            other.hidden = other.summed = None
            other.shape = shape if other.shape == part else other.shape
        self.tokens.begin(shape)

    @property
    def adds_outside(self) -> bool:
        """Whether layers are sums that the model makes after its blocks.

        Blocks that return branches have such a sum behind most of them. A few sums, between other
        blocks that hand on their outputs, are skips.
        """
        calls = self.block_calls
        follow = [each.block == before.block + 1 for before, each in itertools.pairwise(calls)]
        return 2 * sum(call.summed is not None for call in calls) > sum(follow)

    def settle(self) -> KnownTokens:
        """Return what is known of the tokens, now that the pass is over."""
        attended = (
            tuple(seen.call.shape)
            for block_call in self.block_calls
            for seen in block_call.attentions.values()
            if seen.call is not None
        )
        return self.tokens.settle(attended, self.is_routed)

    # -- which layers they make ------------------------------------------------------------------

    def layers(self) -> list[tuple[Block, BlockCall | None, str]]:
        """List (block, call or None, name) for each layer.

        If a block was called again, or after one that follows it, each call is a layer.
        """
        blocks, calls = self.stack.blocks, self.block_calls
        if any(call.block >= following.block for call, following in itertools.pairwise(calls)):
            numbered = [(blocks[call.block], call) for call in calls]
            return [(b, call, f"{b.name}, call {n}") for n, (b, call) in enumerate(numbered, 1)]
        by_block = {call.block: call for call in calls}
        return [(block, by_block.get(n), block.name) for n, block in enumerate(blocks)]

    def is_routed(self, shape: Shape) -> bool:
        """Whether this layer saw only the tokens routed to it.

        Merged tokens stay merged; tokens are routed if a block has fewer of them than a neighbour,
        or as few that did not come from the block before.
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
        """Shape, without the width, of the block input with the most tokens."""
        return max(map(self.shape_at, self.block_calls), key=math.prod, default=())


def _new_tokens(stack: Stack, sampler: RowSampler, *, first: bool) -> PassTokens:
    """Begin to collect the tokens of a pass, given what modules say of their order."""
    length_first = any(
        said(attention.module, "batch_first") is False
        for block in stack.blocks
        for attention in block.attentions
    )
    decodes = any(block.attention_index(CROSS) is not None for block in stack.blocks)
    return PassTokens(sampler, Padding(first=first, decodes=decodes), length_first=length_first)


def _is_part(shape: Shape, whole: Shape) -> bool:
    """Whether one shape has as many sequences as another, but shorter ones."""
    if len(shape) != 2 or len(whole) != 2:
        return False
    return any(shape[i] == whole[i] and shape[1 - i] < whole[1 - i] for i in (0, 1))


def attention_key(block: Block, label: str = "") -> int | None:
    """Return the key of an attention in `BlockCall.attentions`, or None if the block lacks it."""
    return 0 if not block.attentions and not label else block.attention_index(label)
