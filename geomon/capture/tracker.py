"""Tracker: which calls of blocks count, in one pass or in each micro-batch of a batch."""

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

    The rule, here and nowhere else: of the calls of a stack's blocks those count that come between
    the first call of the stack's owner and its return. A second pass in the same window (of
    contrastive training, of a generation loop) does not count, unless it goes on with what the one
    before has made: then the model runs its blocks in a loop, and each call is a layer. Nor does a
    pass that never returned count, once another begins. A pass in which gradients are recorded
    takes the place of one in which none are: what a training step generates or scores without them
    is not what it trains on. Where nobody calls the owner (its `forward` is called directly,
    or the training step runs the blocks itself) the first call of each block counts.

    Args:
        anatomy: Anatomy of the model.
        limit: Makes the limit of the memory of a sampler.
        rows: Number of rows of hidden states to keep.
        seed: Seed of the sampler.
        place: Place of this rank among those that share out the weights of the blocks.
        micro_batches: For each part of a pipeline, a function that counts its micro-batches, 0
            before that is known. None if a batch is one pass.

    Attributes:
        passes: Of each stack the pass that counts, or that is to count.
        other_thread: Whether a block ran in another thread.
        no_rows: Why calls of blocks did not count, if some were refused for what they were given.
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
        self._memories: list[MemoryLimit] = []  # of each micro-batch, with the sampler of its rows
        self._stacks = anatomy.stacks
        self.passes = [self._new_pass(number) for number in range(len(anatomy.stacks))]
        self._earlier: list[list[StackPass]] = [[] for _ in self.passes]  # of micro-batches
        self._calls = [0] * len(self.passes)  # of the part that holds the stack
        self._thread = threading.get_ident()
        self.other_thread = False
        self.no_rows: str | None = None
        # Calls of blocks that are running, outermost first: the module that was called, the pass of
        # its stack and the call, None for one that does not count.
        self._running: list[tuple[nn.Module, StackPass, BlockCall | None]] = []
        self._above: set[int] = set()  # addresses of outermost modules that are running

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
        """The call of the innermost block that is running, if that call counts."""
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
        """Whether no pass that may follow counts: one with gradients, if that is said, may."""
        over = all(x.over and (x.with_gradients or not with_gradients) for x in self.passes)
        return over and not self._micro_batches

    @property
    def above(self) -> bool:
        """Whether an outermost module is running."""
        return bool(self._above)

    def is_inferring(self, number: int) -> bool:
        """Whether a stage of a pipeline only infers shapes, of numbers that mean nothing."""
        return self._count(number) == 0

    def ids_to_come(self) -> list[TokenIds]:
        """List the token ids of the passes to which what tables are given now may belong."""
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
        """Return the sampler of the rows of a micro-batch, with its limit; a batch is the first."""
        counts = [count() for count in self._micro_batches]
        count = max(counts, default=1)
        if not count:  # nothing is sampled before it is known
            return self._limit(RowSampler(self._rows, self._seed))
        while len(self._memories) <= number:
            place = len(self._memories)
            rows = self._rows // count + (place < self._rows % count)
            seed = derive_seed(self._seed, "micro-batch", place) if place else self._seed
            self._memories.append(self._limit(RowSampler(rows, seed), share=count))
        return self._memories[number]

    # -- what happens ----------------------------------------------------------------------------

    def call_above(self, number: int, module: nn.Module) -> tuple[list[StackPass], bool]:
        """Note that a module around a stack is called.

        Args:
            number: Number of the stack.
            module: The module, without wrappers.

        Returns:
            The passes that the arguments of the call may belong to, and whether the module is
            around several stacks.
        """
        if self.is_inferring(number):
            return [], False
        is_outermost = module is unwrap(self._stacks[number].above[0])
        self._prefer_gradients(module)
        if is_outermost:
            self._above.add(id(module))
            self._begin_micro_batch(number)
        stack_pass = self.passes[number]
        if stack_pass.block_calls or stack_pass.over:
            return [], False
        around = [x for x in self.passes if x.stack.part == stack_pass.stack.part]
        shared = stack_pass is around[0] and len(around) > 1  # a module around all stacks
        return [x for x in (around if shared else [stack_pass]) if not x.block_calls], shared

    def leave_above(self, module: nn.Module) -> None:
        """Note that an outermost module has returned."""
        self._above.discard(id(module))

    def call_owner(self, number: int, *, goes_on: bool) -> None:
        """Note that the owner of a stack is called, and whether with what the blocks have made."""
        stack_pass, with_gradients = self.passes[number], records_gradients()
        if self.is_inferring(number):
            return
        if stack_pass.over and not (goes_on and with_gradients == stack_pass.with_gradients):
            stack_pass.passed_over += with_gradients == stack_pass.with_gradients
            return
        if stack_pass.block_calls and not stack_pass.over:  # a pass that never returned
            tokens = stack_pass.tokens
            tokens.forget_states()
            stack_pass = self.passes[number] = self._new_pass(number)
            stack_pass.tokens = tokens
        stack_pass.running, stack_pass.over = True, False
        stack_pass.with_gradients = with_gradients
        self._running.clear()

    def leave_owner(self, number: int) -> None:
        """Note that the owner of a stack has returned."""
        stack_pass = self.passes[number]
        stack_pass.over |= stack_pass.running
        stack_pass.running = False

    def begin_call(
        self, number: int, index: int, module: nn.Module, entered: Tensor | None
    ) -> BlockCall | None:
        """Decide whether a call of a block counts: the one place where that is decided.

        It does not if it has no tokens (where data run out, a rank is given an empty batch), inside
        `torch.func.vmap` (whose tensors are of no use behind it), where a stage infers shapes, and
        outside of the pass that counts. Modules of a list that is a block are one call together.

        Args:
            number: Number of the stack.
            index: Index of the block in its stack.
            module: The module that is called.
            entered: The hidden states that it is given; None if they are not known.
        """
        stack_pass = self.passes[number]
        counts = self._counts(number, index, module, entered)
        if counts and not _goes_on(stack_pass, index, module):
            stack_pass.block_calls.append(BlockCall(index))
        block_call = stack_pass.block_calls[-1] if counts else None
        if block_call is not None:
            block_call.called.add(id(module))
        self._running.append((module, stack_pass, block_call))
        return block_call

    def _counts(self, number: int, index: int, module: nn.Module, entered: Tensor | None) -> bool:
        if entered is not None and (why := _why_no_rows(entered)) is not None:
            self.no_rows = why
            return False
        stack_pass = self.passes[number]
        if self.is_inferring(number) or stack_pass.over:
            return False
        again = any(call.block == index for call in stack_pass.block_calls)
        return stack_pass.running or not again or _goes_on(stack_pass, index, module)

    def end_call(self, module: nn.Module) -> tuple[StackPass, BlockCall] | None:
        """Remove a block's call from those that run, and calls inside that an exception ended."""
        while self._running:
            called, stack_pass, block_call = self._running.pop()
            if called is module:
                return None if block_call is None else (stack_pass, block_call)
        return None

    # -- micro-batches, and passes without gradients ---------------------------------------------

    def _new_pass(self, number: int, micro_batch: int = 0) -> StackPass:
        stack = self._stacks[number]
        first = not number or self._stacks[number - 1].part != stack.part  # of its part
        return StackPass(stack, self.memory(micro_batch), first=first, place=self._place)

    def _inferred(self, number: int) -> int:
        """Count the calls of a stage that were made before the first micro-batch.

        Between training and evaluation torch calls a stage once more, to infer shapes.
        """
        calls, count = self._calls[number], self._count(number) or 0
        return int(calls % count == 1 if count > 1 else count == 1 < calls)

    def _count(self, number: int) -> int | None:
        """Count the micro-batches of a stage, 0 before they are known; None without a pipeline."""
        counts = self._micro_batches
        return counts[self._stacks[number].part]() if counts else None

    def _prefer_gradients(self, module: nn.Module) -> None:
        """Forget passes without gradients where one with gradients begins."""
        if not records_gradients():
            return
        for number, stack_pass in enumerate(self.passes):
            passed = stack_pass.over and not stack_pass.with_gradients
            if passed and any(x is stack_pass.stack.owner for x in module.modules()):
                self._earlier[number].clear()
                self._calls[number] = 0
                self.passes[number] = self._new_pass(number)  # and of micro-batches the first

    def _begin_micro_batch(self, number: int) -> None:
        """Begin the pass of a further micro-batch, if a stage is called again.

        As many are kept as there are in a batch, and one more: the first may be none.
        """
        earlier, stack_pass, count = self._earlier[number], self.passes[number], self._count(number)
        if count is None:
            return
        self._calls[number] += 1
        if self._calls[number] == 1:
            self.passes[number] = self._new_pass(number)
        elif stack_pass.over and len(earlier) < count:
            stack_pass.leaving = None
            earlier.append(stack_pass)
            self.passes[number] = self._new_pass(number, len(earlier))


def _goes_on(stack_pass: StackPass, index: int, module: nn.Module) -> bool:
    """Whether a call goes on with the last one, of a block that is a list of modules."""
    last = stack_pass.block_calls[-1:]
    return any(call.block == index and id(module) not in call.called for call in last)


def _why_no_rows(entered: Tensor) -> str | None:
    """Say why nothing can be seen of a call on a tensor; None if it can."""
    if entered.numel() == 0:
        return "the block was given a batch without tokens"
    if private.is_batched(local_shard(entered)):
        return "the block was run inside torch.func.vmap: measure by a probe outside of it"
    return None
