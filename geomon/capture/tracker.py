"""Decide which calls of blocks count, in one pass or in each micro-batch of a batch."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.anatomy import Anatomy, Block
from geomon.capture.calling.calls import unwrap
from geomon.capture.calling.patches import records_gradients
from geomon.capture.first_pass import BlockCall, StackPass
from geomon.capture.micro_batches import BatchMemory, MicroBatches
from geomon.capture.shards import TensorPlace
from geomon.capture.storage import local_shard
from geomon.capture.tokens.pass_tokens import PassTokens
from geomon.capture.tokens.sampling import MemoryLimit
from geomon.capture.tokens.token_ids import TokenIds


class Tracker:
    """Decides which calls count; nothing else begins, ends or forgets a pass.

    The rule, stated only here: calls of a stack's blocks count if they come between the first call
    of the stack's owner and its return. A second pass in the same window (contrastive training,
    generation) does not count, unless it continues from the output of the one before: then the
    model runs its blocks in a loop, and each call is a layer. A pass that never returned stops
    counting once another begins. A pass with gradients replaces one without, because what a
    training step generates or scores without gradients is not what it trains on.

    If nobody calls the owner (its `forward` is called directly, or another module runs the blocks
    that it holds), the modules around it count as the owner: a pass ends when the outermost one
    returns, or one of them is called again. If nobody calls these either (the training step runs
    the blocks itself), the first call of each block counts.

    Args:
        anatomy: Anatomy of the model.
        limit: Makes the memory limit of a sampler.
        rows: Number of rows of hidden states to keep.
        seed: Seed of the sampler.
        place: Place of this rank among those that share the weights of the blocks.
        micro_batches: For each pipeline stage, a function that counts its micro-batches (0 before
            they are known). Empty if a batch is one pass.

    Attributes:
        memory: Memory limits of the rows.
        passes: For each stack, the pass that counts or will count.
        other_thread: Whether a block ran in another thread.
        no_rows: Why block calls were refused because of their input, or None.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        limit: Callable[..., MemoryLimit],
        *,
        rows: int,
        seed: int,
        place: TensorPlace,
        micro_batches: Sequence[Callable[[], int]],
    ) -> None:
        self._stacks, self._place = anatomy.stacks, place
        self.memory = BatchMemory(limit, rows=rows, seed=seed, counts=micro_batches)
        self._micro_batches = MicroBatches(anatomy.stacks, micro_batches)
        self.passes = [self._new_pass(number) for number in range(len(anatomy.stacks))]
        self._thread = threading.get_ident()
        self.other_thread = False
        self.no_rows: str | None = None
        # Running block calls, outermost first: the called module, the pass of its stack, and the
        # call (None if it does not count).
        self._running: list[tuple[nn.Module, StackPass, BlockCall | None]] = []
        self._above: set[int] = set()  # ids of modules around stacks that are running

    # -- what is asked ---------------------------------------------------------------------------

    def is_ignored(self) -> bool:
        """Whether the present call is another thread's or a recomputation inside backward."""
        if private.graph_task() != -1:
            return True
        if threading.get_ident() != self._thread:
            self.other_thread = True
            return True
        return False

    @property
    def current(self) -> tuple[StackPass, BlockCall, Block] | None:
        """The call of the innermost running block, if that call counts."""
        if not self._running or self.is_ignored():
            return None
        _, stack_pass, block_call = self._running[-1]
        if block_call is None:
            return None
        return stack_pass, block_call, stack_pass.stack.blocks[block_call.block]

    @property
    def has_attention(self) -> bool:
        """Whether the call of any attention was seen."""
        calls = (call for stack_pass in self.passes for call in stack_pass.block_calls)
        return any(seen.route for call in calls for seen in call.attentions.values())

    @property
    def in_block(self) -> bool:
        """Whether a block is running, whether or not its call counts."""
        return bool(self._running)

    def is_over(self, *, with_gradients: bool) -> bool:
        """Whether no later pass can count; if `with_gradients`, a pass with gradients still can."""
        calls = [stack_pass.owner_call for stack_pass in self.passes]
        over = all(call.over and (call.with_gradients or not with_gradients) for call in calls)
        return over and not self._micro_batches.has_pipeline

    @property
    def above(self) -> bool:
        """Whether a module around a stack is running."""
        return bool(self._above)

    def is_inferring(self, number: int) -> bool:
        """Whether a pipeline stage only infers shapes, from meaningless numbers."""
        return self._micro_batches.count(number) == 0

    def ids_to_come(self) -> list[TokenIds]:
        """List the token ids of the passes to which integers received now may belong."""
        running = [stack_pass for stack_pass in self.passes if stack_pass.owner_call.running]
        return [
            stack_pass.tokens.ids
            for stack_pass in running or self.passes
            if not stack_pass.owner_call.over
            and not (stack_pass.block_calls and stack_pass not in running)
        ]

    def of_batch(self) -> Iterator[list[StackPass]]:
        """Iterate over the passes through all stacks: one, or one for each micro-batch."""
        return self._micro_batches.passes(self.passes)

    # -- what happens ----------------------------------------------------------------------------

    def call_above(self, number: int, module: nn.Module) -> tuple[list[StackPass], bool]:
        """Handle the call of a module around a stack.

        Returns the passes that its arguments may belong to, and whether it surrounds several
        stacks.
        """
        if self.is_inferring(number):
            return [], False
        self._prefer_gradients(module)
        if id(module) in self._above:  # calls that never returned
            self._above.clear()
            if module is unwrap(self._stacks[number].above[0]):
                self._begin_anew(self._stacks[number].part)
        self._end_open_pass(number, module)
        self._above.add(id(module))
        if module is unwrap(self._stacks[number].above[0]):
            micro_batch = self._micro_batches.begin(number, self.passes[number])
            if micro_batch is not None:
                self.passes[number] = self._new_pass(number, micro_batch)
        stack_pass = self.passes[number]
        if stack_pass.block_calls or stack_pass.owner_call.over:
            return [], False
        around = [x for x in self.passes if x.stack.part == stack_pass.stack.part]
        shared = stack_pass is around[0] and len(around) > 1  # a module around all stacks
        return [x for x in (around if shared else [stack_pass]) if not x.block_calls], shared

    def _end_open_pass(self, number: int, module: nn.Module) -> None:
        """End a pass that nobody ended if a module around its owner is called again."""
        stack_pass, above = self.passes[number], self._stacks[number].above
        if not (stack_pass.owner_call.running and stack_pass.block_calls):
            return
        outside = itertools.takewhile(lambda each: each is not stack_pass.stack.owner, above)
        if not self._above:  # it never returned
            self._begin_again(number)
        elif any(module is unwrap(each) for each in outside):
            self.leave_owner(number)
            stack_pass.owner_call.passed_over += 1

    def leave_above(self, module: nn.Module) -> None:
        """Handle the return of a module around a stack; the outermost one ends all passes."""
        self._above.discard(id(module))
        if not self._above:
            for number in range(len(self.passes)):
                self.leave_owner(number)

    def call_owner(self, number: int, *, goes_on: bool) -> None:
        """Handle the call of a stack's owner, which may go on with the output of its blocks."""
        stack_pass, with_gradients = self.passes[number], records_gradients()
        call = stack_pass.owner_call
        if self.is_inferring(number):
            return
        if call.over and not (goes_on and with_gradients == call.with_gradients):
            call.passed_over += with_gradients == call.with_gradients
            return
        if stack_pass.block_calls and not call.over:  # a pass that never returned
            call = self._begin_again(number).owner_call
        call.begin(with_gradients=with_gradients)
        self._running.clear()

    def leave_owner(self, number: int) -> None:
        """Handle the return of a stack's owner."""
        self.passes[number].owner_call.end()

    def begin_call(
        self, number: int, index: int, module: nn.Module, hidden: Tensor | None
    ) -> BlockCall | None:
        """Decide whether a call of a block counts, and return it if so.

        It does not count without tokens (a rank may get an empty batch when data run out), inside
        `torch.func.vmap` (whose tensors are useless afterwards), while a stage infers shapes, or
        outside of the pass that counts. The modules of a block that is a list make one call
        together.
        """
        stack_pass = self.passes[number]
        call = stack_pass.owner_call
        if self._above and not (call.running or call.over or stack_pass.block_calls):
            self.call_owner(number, goes_on=False)  # which nobody has called
        counts = self._counts(number, index, module, hidden)
        if counts and not _goes_on(stack_pass, index, module):
            stack_pass.block_calls.append(BlockCall(index))
        block_call = stack_pass.block_calls[-1] if counts else None
        if block_call is not None:
            block_call.called.add(id(module))
        self._running.append((module, stack_pass, block_call))
        return block_call

    def _counts(self, number: int, index: int, module: nn.Module, hidden: Tensor | None) -> bool:
        if hidden is not None and (why := _why_no_rows(hidden)) is not None:
            self.no_rows = why
            return False
        stack_pass = self.passes[number]
        if self.is_inferring(number) or stack_pass.owner_call.over:
            return False
        again = any(call.block == index for call in stack_pass.block_calls)
        return stack_pass.owner_call.running or not again or _goes_on(stack_pass, index, module)

    def end_call(self, module: nn.Module) -> tuple[StackPass, BlockCall] | None:
        """Remove a block's call from the running ones, with inner calls that an exception ended."""
        while self._running:
            called, stack_pass, block_call = self._running.pop()
            if called is module:
                return None if block_call is None else (stack_pass, block_call)
        return None

    def forget(self) -> None:
        """Release all rows; nothing can be seen afterwards."""
        self.passes.clear()
        self._micro_batches.forget()

    # -- new passes ------------------------------------------------------------------------------

    def _new_pass(
        self, number: int, micro_batch: int = 0, tokens: PassTokens | None = None
    ) -> StackPass:
        stack = self._stacks[number]
        first = not number or self._stacks[number - 1].part != stack.part  # of its part
        memory = self.memory.of(micro_batch)
        return StackPass(stack, memory, first=first, place=self._place, tokens=tokens)

    def _begin_anew(self, part: int) -> None:
        """Replace the passes of a model that never returned, as it is given other arguments."""
        opened = [each for each in self.passes if each.stack.part == part]
        if any(each.owner_call.running and each.block_calls for each in opened):
            self._running.clear()
            for number, stack in enumerate(self._stacks):
                if stack.part == part:
                    self.passes[number] = self._new_pass(number)

    def _begin_again(self, number: int) -> StackPass:
        """Replace a pass that never returned by one with the same arguments."""
        tokens = self.passes[number].tokens
        tokens.forget_states()
        self.passes[number] = self._new_pass(number, tokens=tokens)
        return self.passes[number]

    def _prefer_gradients(self, module: nn.Module) -> None:
        """Forget passes without gradients when a pass with gradients begins."""
        if not records_gradients():
            return
        for number, stack_pass in enumerate(self.passes):
            call = stack_pass.owner_call
            passed = call.over and not call.with_gradients
            if passed and any(x is stack_pass.stack.owner for x in module.modules()):
                self._micro_batches.begin_again(number)
                self.passes[number] = self._new_pass(number)


def _goes_on(stack_pass: StackPass, index: int, module: nn.Module) -> bool:
    """Whether a call continues the last one, of a block that is a list of modules."""
    last = stack_pass.block_calls[-1:]
    return any(call.block == index and id(module) not in call.called for call in last)


def _why_no_rows(hidden: Tensor) -> str | None:
    """Say why the rows of a call's input cannot be read, or return None."""
    if hidden.numel() == 0:
        return "the block received a batch without tokens"
    if private.is_batched(local_shard(hidden)):
        return "the block ran inside torch.func.vmap: measure by a probe outside of it"
    return None
