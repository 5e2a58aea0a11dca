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
from geomon.capture.shards import TensorPlace
from geomon.capture.storage import local_shard
from geomon.capture.tokens.sampling import MemoryLimit, RowSampler, derive_seed
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
        self._limit, self._rows, self._seed, self._place = limit, rows, seed, place
        self._micro_batches = micro_batches
        self._memories: list[MemoryLimit] = []  # one per micro-batch, with its sampler
        self._stacks = anatomy.stacks
        self.passes = [self._new_pass(number) for number in range(len(anatomy.stacks))]
        self._earlier: list[list[StackPass]] = [[] for _ in self.passes]  # of micro-batches
        self._calls = [0] * len(self.passes)  # calls of the part that holds the stack
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
    def in_block(self) -> bool:
        """Whether a block is running, whether or not its call counts."""
        return bool(self._running)

    def is_over(self, *, with_gradients: bool) -> bool:
        """Whether no later pass can count; if `with_gradients`, a pass with gradients still can."""
        over = all(x.over and (x.with_gradients or not with_gradients) for x in self.passes)
        return over and not self._micro_batches

    @property
    def above(self) -> bool:
        """Whether a module around a stack is running."""
        return bool(self._above)

    def is_inferring(self, number: int) -> bool:
        """Whether a pipeline stage only infers shapes, from meaningless numbers."""
        return self._count(number) == 0

    def ids_to_come(self) -> list[TokenIds]:
        """List the token ids of the passes to which integers received now may belong."""
        running = [stack_pass for stack_pass in self.passes if stack_pass.running]
        return [
            stack_pass.tokens.ids
            for stack_pass in running or self.passes
            if not stack_pass.over and not (stack_pass.block_calls and stack_pass not in running)
        ]

    def of_batch(self) -> Iterator[list[StackPass]]:
        """Iterate over the passes through all stacks: one, or one for each micro-batch."""
        every = [[*x, last] for x, last in zip(self._earlier, self.passes, strict=True)]
        every = [passes[self._inferred(n) :] for n, passes in enumerate(every)]
        count = min(map(len, every), default=1)
        count = min([count, *(known() or count for known in self._micro_batches)])
        return ([passes[n] for passes in every] for n in range(count))

    def memory(self, number: int = 0) -> MemoryLimit:
        """Return the memory limit of a micro-batch, with its sampler."""
        counts = [count() for count in self._micro_batches]
        count = max(counts, default=1)
        if not count:  # nothing is sampled before the count is known
            return self._limit(RowSampler(self._rows, self._seed))
        while len(self._memories) <= number:
            place = len(self._memories)
            rows = self._rows // count + (place < self._rows % count)
            seed = derive_seed(self._seed, "micro-batch", place) if place else self._seed
            self._memories.append(self._limit(RowSampler(rows, seed), share=count))
        return self._memories[number]

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
        self._end_open_pass(number, module)
        self._above.add(id(module))
        if module is unwrap(self._stacks[number].above[0]):
            self._begin_micro_batch(number)
        stack_pass = self.passes[number]
        if stack_pass.block_calls or stack_pass.over:
            return [], False
        around = [x for x in self.passes if x.stack.part == stack_pass.stack.part]
        shared = stack_pass is around[0] and len(around) > 1  # a module around all stacks
        return [x for x in (around if shared else [stack_pass]) if not x.block_calls], shared

    def _end_open_pass(self, number: int, module: nn.Module) -> None:
        """End a pass that nobody ended if a module around its owner is called again."""
        stack_pass, above = self.passes[number], self._stacks[number].above
        if not (stack_pass.running and stack_pass.block_calls):
            return
        outside = itertools.takewhile(lambda each: each is not stack_pass.stack.owner, above)
        if not self._above:  # it never returned
            self._begin_again(number)
        elif any(module is unwrap(each) for each in outside):
            self.leave_owner(number)
            stack_pass.passed_over += 1

    def leave_above(self, module: nn.Module) -> None:
        """Handle the return of a module around a stack; the outermost one ends all passes."""
        self._above.discard(id(module))
        if not self._above:
            for number in range(len(self.passes)):
                self.leave_owner(number)

    def call_owner(self, number: int, *, goes_on: bool) -> None:
        """Handle the call of a stack's owner, which may go on with the output of its blocks."""
        stack_pass, with_gradients = self.passes[number], records_gradients()
        if self.is_inferring(number):
            return
        if stack_pass.over and not (goes_on and with_gradients == stack_pass.with_gradients):
            stack_pass.passed_over += with_gradients == stack_pass.with_gradients
            return
        if stack_pass.block_calls and not stack_pass.over:  # a pass that never returned
            stack_pass = self._begin_again(number)
        stack_pass.running, stack_pass.over = True, False
        stack_pass.with_gradients = with_gradients
        self._running.clear()

    def leave_owner(self, number: int) -> None:
        """Handle the return of a stack's owner."""
        stack_pass = self.passes[number]
        stack_pass.over |= stack_pass.running
        stack_pass.running = False

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
        if self._above and not (stack_pass.running or stack_pass.over or stack_pass.block_calls):
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
        if self.is_inferring(number) or stack_pass.over:
            return False
        again = any(call.block == index for call in stack_pass.block_calls)
        return stack_pass.running or not again or _goes_on(stack_pass, index, module)

    def end_call(self, module: nn.Module) -> tuple[StackPass, BlockCall] | None:
        """Remove a block's call from the running ones, with inner calls that an exception ended."""
        while self._running:
            called, stack_pass, block_call = self._running.pop()
            if called is module:
                return None if block_call is None else (stack_pass, block_call)
        return None

    def forget(self) -> None:
        """Release all rows; nothing can be seen afterwards."""
        for passes in (self.passes, *self._earlier):
            passes.clear()

    # -- micro-batches, and passes without gradients ---------------------------------------------

    def _new_pass(self, number: int, micro_batch: int = 0) -> StackPass:
        stack = self._stacks[number]
        first = not number or self._stacks[number - 1].part != stack.part  # of its part
        return StackPass(stack, self.memory(micro_batch), first=first, place=self._place)

    def _begin_again(self, number: int) -> StackPass:
        """Replace a pass that never returned by one with the same arguments."""
        tokens = self.passes[number].tokens
        tokens.forget_states()
        self.passes[number] = self._new_pass(number)
        self.passes[number].tokens = tokens
        return self.passes[number]

    def _inferred(self, number: int) -> int:
        """Count the calls of a stage before its first micro-batch.

        Between training and evaluation, torch calls a stage once more to infer shapes.
        """
        calls, count = self._calls[number], self._count(number) or 0
        return calls % count == 1 if count > 1 else count == 1 < calls

    def _count(self, number: int) -> int | None:
        """Count the micro-batches of a stage (0 before they are known); None without a pipeline."""
        counts = self._micro_batches
        return counts[self._stacks[number].part]() if counts else None

    def _prefer_gradients(self, module: nn.Module) -> None:
        """Forget passes without gradients when a pass with gradients begins."""
        if not records_gradients():
            return
        for number, stack_pass in enumerate(self.passes):
            passed = stack_pass.over and not stack_pass.with_gradients
            if passed and any(x is stack_pass.stack.owner for x in module.modules()):
                self._earlier[number].clear()
                self._calls[number] = 0
                self.passes[number] = self._new_pass(number)  # the first micro-batch again

    def _begin_micro_batch(self, number: int) -> None:
        """Begin the pass of a further micro-batch if a stage is called again.

        One more than a batch has is kept, because the first call may only infer shapes.
        """
        earlier, stack_pass, count = self._earlier[number], self.passes[number], self._count(number)
        if count is None:
            return
        self._calls[number] += 1
        if self._calls[number] == 1:
            self.passes[number] = self._new_pass(number)
        elif stack_pass.over and len(earlier) < count:
            stack_pass.last_output = None
            earlier.append(stack_pass)
            self.passes[number] = self._new_pass(number, len(earlier))


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
