"""Tracker: which calls of blocks count, in one pass or in each micro-batch of a batch."""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.anatomy import Anatomy, Block, Stack
from geomon.capture.calling.calls import unwrap
from geomon.capture.calling.patches import in_extra_pass
from geomon.capture.first_pass import BlockCall, StackPass
from geomon.capture.shards import TensorPlace
from geomon.capture.storage import local_shard
from geomon.capture.tokens.sampling import MemoryLimit, RowSampler, derive_seed
from geomon.capture.tokens.token_ids import TokenIds
from geomon.note import Note


class Tracker:
    """Decides which calls count; nothing else begins, ends or forgets a pass.

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
        self._limit, self._rows, self._seed = limit, rows, seed
        self._micro_batches = micro_batches
        self._memories: list[MemoryLimit] = []  # of each micro-batch, with the sampler of its rows
        self.passes = [
            StackPass(stack, self._memory(0).sampler, first=_is_first(stack, anatomy), place=place)
            for stack in anatomy.stacks
        ]
        self._earlier: list[list[StackPass]] = [[] for _ in self.passes]  # of micro-batches
        self._calls = [0] * len(self.passes)  # of the part that holds the stack
        self._thread = threading.get_ident()
        self.other_thread = False
        self.no_rows: str | None = None
        # Calls of blocks that are running, outermost first; None for one that does not count.
        self._running: list[tuple[StackPass, BlockCall | None]] = []
        self._above: set[int] = set()  # addresses of outermost modules that are running
        self._twin_records = False  # whether the call that a twin is run for records gradients

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
        if not self._running or self._running[-1][1] is None or self.is_ignored():
            return None
        stack_pass, block_call = self._running[-1]
        assert block_call is not None
        return stack_pass, block_call, stack_pass.stack.blocks[block_call.block]

    @property
    def in_block(self) -> bool:
        """Whether a block is running, whether or not its call counts."""
        return bool(self._running)

    @property
    def finished(self) -> bool:
        """Whether the passes that count are over: nothing more is to be seen.

        If gradients are recorded, a pass without them may be followed by one that counts.
        """
        records = self._records_gradients()
        over = all(x.over and (x.with_gradients or not records) for x in self.passes)
        return over and not self._micro_batches

    @property
    def complete(self) -> bool:
        """Whether no later pass can count, and the model has returned."""
        over = all(x.over and x.with_gradients for x in self.passes)
        return over and not self._above and not self._micro_batches

    def is_inferring(self, stack_pass: StackPass) -> bool:
        """Whether a stage of a pipeline only infers shapes, of numbers that mean nothing."""
        return self._count(stack_pass) == 0

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

    @property
    def sampler(self) -> RowSampler:
        """The sampler of the rows of a pass, or of the first micro-batch."""
        return self._memory(0).sampler

    def notes_on_memory(self) -> list[Note]:
        """List the notes on rows that a limit of memory has left out."""
        return self._memory(0).notes()

    def fit_rows(self, stack_pass: StackPass, width: int) -> None:
        """Lower the number of rows of a pass, if a limit of memory asks for it."""
        for memory in self._memories:
            if memory.sampler is stack_pass.sampler:
                memory.fit_rows(width)

    # -- what happens ----------------------------------------------------------------------------

    def take_twin(self) -> None:
        """Note that a twin is run next, for a call that records gradients or does not."""
        self._twin_records = torch.is_grad_enabled()

    def call_above(self, number: int, module: nn.Module) -> tuple[list[StackPass], bool]:
        """Note that a module around a stack is called.

        Args:
            number: Number of the stack.
            module: The module, without wrappers.

        Returns:
            The passes that the arguments of the call may belong to, and whether the module is
            around several stacks.
        """
        stack_pass = self.passes[number]
        if self.is_inferring(stack_pass):
            return [], False
        is_outermost = module is unwrap(stack_pass.stack.above[0])
        if is_outermost:
            self._above.add(id(module))
        self._prefer_gradients(module)
        if is_outermost:
            self._begin_micro_batch(number)
        if stack_pass.block_calls or stack_pass.over:
            return [], False
        around = [x for x in self.passes if x.stack.part == stack_pass.stack.part]
        shared = stack_pass is around[0] and len(around) > 1  # a module around all stacks
        return [x for x in (around if shared else [stack_pass]) if not x.block_calls], shared

    def leave_above(self, module: nn.Module) -> None:
        """Note that an outermost module has returned.

        Args:
            module: The module.
        """
        self._above.discard(id(module))

    def call_owner(self, stack_pass: StackPass, *, goes_on: bool) -> None:
        """Note that the owner of a stack is called.

        Args:
            stack_pass: The pass of the stack.
            goes_on: Whether it is given what the blocks have made before.
        """
        if not self.is_inferring(stack_pass) and stack_pass.begin(
            with_gradients=self._records_gradients(), goes_on=goes_on
        ):
            self._running.clear()

    def begin_call(
        self, stack_pass: StackPass, index: int, entered: Tensor | None
    ) -> BlockCall | None:
        """Decide whether a call of a block counts: the one place where that is decided.

        It does not if it has no tokens (where data run out, a rank is given an empty batch), inside
        `torch.func.vmap` (whose tensors are of no use behind it), where a stage infers shapes, and
        outside of the pass that counts (`StackPass`).

        Args:
            stack_pass: The pass of the stack.
            index: Index of the block in its stack.
            entered: The hidden states that it is given; None if they are not known.
        """
        if entered is not None and (why := _why_no_rows(entered)) is not None:
            self.no_rows = why
            return None
        return None if self.is_inferring(stack_pass) else stack_pass.begin_call(index)

    def run(self, stack_pass: StackPass, block_call: BlockCall | None) -> None:
        """Note that a block runs from here on, until `end_call`.

        Args:
            stack_pass: The pass of its stack.
            block_call: Its call; None if that does not count.
        """
        self._running.append((stack_pass, block_call))

    def end_call(self, stack_pass: StackPass, index: int) -> BlockCall | None:
        """Remove a block's call from those that run, and calls inside that an exception ended.

        Args:
            stack_pass: The pass of its stack.
            index: Index of the block in its stack.
        """
        while self._running:
            owner, block_call = self._running.pop()
            if owner is stack_pass and (block_call is None or block_call.block == index):
                return block_call
        return None

    # -- micro-batches, and passes without gradients ---------------------------------------------

    def _memory(self, number: int) -> MemoryLimit:
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

    def _inferred(self, number: int) -> int:
        """Count the calls of a stage that were made before the first micro-batch.

        Between training and evaluation torch calls a stage once more, to infer shapes.
        """
        calls, count = self._calls[number], self._count(self.passes[number]) or 0
        return int(calls % count == 1 if count > 1 else count == 1 < calls)

    def _count(self, stack_pass: StackPass) -> int | None:
        """Count the micro-batches of a stage, 0 before they are known; None without a pipeline."""
        counts = self._micro_batches
        return counts[stack_pass.stack.part]() if counts else None

    def _prefer_gradients(self, module: nn.Module) -> None:
        """Forget passes without gradients where one with gradients begins."""
        if not self._records_gradients():
            return
        for number, stack_pass in enumerate(self.passes):
            passed = stack_pass.over and not stack_pass.with_gradients
            if passed and any(x is stack_pass.stack.owner for x in module.modules()):
                self._earlier[number].clear()
                self._calls[number] = 0
                stack_pass.forget(self.sampler)  # and of micro-batches the first

    def _begin_micro_batch(self, number: int) -> None:
        """Begin the pass of a further micro-batch, if a stage is called again.

        As many are kept as there are in a batch, and one more: the first may be none.
        """
        earlier, stack_pass = self._earlier[number], self.passes[number]
        count = self._count(stack_pass)
        if count is None:
            return
        self._calls[number] += 1
        if self._calls[number] == 1:
            stack_pass.forget(self.sampler)
        elif stack_pass.over and len(earlier) < count:
            earlier.append(stack_pass.hand_over())
            stack_pass.forget(self._memory(len(earlier)).sampler)

    def _records_gradients(self) -> bool:
        """Whether the call that is seen, or the one whose twin it is, records gradients."""
        return self._twin_records if in_extra_pass() else torch.is_grad_enabled()


def _is_first(stack: Stack, anatomy: Anatomy) -> bool:
    """Whether a stack is the first one of its part of the model."""
    return next(other for other in anatomy.stacks if other.part == stack.part) is stack


def _why_no_rows(entered: Tensor) -> str | None:
    """Say why nothing can be seen of a call on a tensor; None if it can."""
    if entered.numel() == 0:
        return "the block was given a batch without tokens"
    if private.is_batched(local_shard(entered)):
        return "the block was run inside torch.func.vmap: measure by a probe outside of it"
    return None
