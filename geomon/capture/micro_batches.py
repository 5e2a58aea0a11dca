"""The micro-batches of a pipeline: which calls of a stage belong to which, and their memory."""

from collections.abc import Callable, Iterator, Sequence

from geomon.capture.anatomy import Stack
from geomon.capture.first_pass import StackPass
from geomon.capture.tokens.sampling import MemoryLimit, RowSampler, derive_seed


class BatchMemory:
    """Memory limits of the micro-batches of a batch, which share its rows.

    Args:
        limit: Makes the memory limit of a sampler.
        rows: Number of rows of hidden states to keep.
        seed: Seed of the samplers.
        counts: For each pipeline stage, a function that counts its micro-batches (0 before they
            are known). Empty if a batch is one pass.
    """

    def __init__(
        self,
        limit: Callable[..., MemoryLimit],
        *,
        rows: int,
        seed: int,
        counts: Sequence[Callable[[], int]],
    ) -> None:
        self._limit, self._rows, self._seed, self._counts = limit, rows, seed, counts
        self._limits: list[MemoryLimit] = []  # one per micro-batch, with its sampler

    def of(self, micro_batch: int = 0) -> MemoryLimit:
        """Return the memory limit of a micro-batch, with its sampler."""
        counts = [count() for count in self._counts]
        count = max(counts, default=1)
        if not count:  # nothing is sampled before the count is known
            return self._limit(RowSampler(self._rows, self._seed))
        while len(self._limits) <= micro_batch:
            place = len(self._limits)
            rows = self._rows // count + (place < self._rows % count)
            seed = derive_seed(self._seed, "micro-batch", place) if place else self._seed
            self._limits.append(self._limit(RowSampler(rows, seed), share=count))
        return self._limits[micro_batch]


class MicroBatches:
    """Passes of the micro-batches of a batch; without a pipeline, a batch is one pass.

    Args:
        stacks: The stacks, whose parts are the stages.
        counts: For each stage, a function that counts its micro-batches (0 before they are known).
            Empty without a pipeline.
    """

    def __init__(self, stacks: Sequence[Stack], counts: Sequence[Callable[[], int]]) -> None:
        self._stacks, self._counts = stacks, counts
        self._earlier: list[list[StackPass]] = [[] for _ in stacks]
        self._calls = [0 for _ in stacks]  # of the part that holds the stack

    @property
    def has_pipeline(self) -> bool:
        """Whether batches are divided."""
        return bool(self._counts)

    def count(self, number: int) -> int | None:
        """Count the micro-batches of a stack (0 before they are known); None without a pipeline."""
        return self._counts[self._stacks[number].part]() if self._counts else None

    def begin(self, number: int, last: StackPass) -> int | None:
        """Handle the call of a stage: return the micro-batch that begins, or None if none does.

        One more than a batch has is kept, because the first call may only infer shapes.

        Args:
            number: Number of the stack.
            last: Its pass until now.
        """
        count = self.count(number)
        if count is None:
            return None
        self._calls[number] += 1
        if self._calls[number] == 1:
            return 0
        earlier = self._earlier[number]
        if not last.owner_call.over or len(earlier) >= count:
            return None
        last.last_output = None
        earlier.append(last)
        return len(earlier)

    def begin_again(self, number: int) -> None:
        """Forget the micro-batches of a stack: its first one begins again."""
        self._earlier[number].clear()
        self._calls[number] = 0

    def passes(self, last: Sequence[StackPass]) -> Iterator[list[StackPass]]:
        """Iterate over the passes through all stacks: one, or one for each micro-batch.

        Args:
            last: The last pass of each stack.
        """
        every = [[*earlier, own] for earlier, own in zip(self._earlier, last, strict=True)]
        every = [passes[self._inferred(n) :] for n, passes in enumerate(every)]
        count = min(map(len, every), default=1)
        count = min([count, *(known() or count for known in self._counts)])
        return ([passes[n] for passes in every] for n in range(count))

    def forget(self) -> None:
        """Release all passes."""
        for passes in self._earlier:
            passes.clear()

    def _inferred(self, number: int) -> int:
        """Count the calls of a stage before its first micro-batch.

        Between training and evaluation, torch calls a stage once more to infer shapes.
        """
        calls, count = self._calls[number], self.count(number) or 0
        return calls % count == 1 if count > 1 else count == 1 < calls
