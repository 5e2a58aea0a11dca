"""Window: keeps sampled rows during one forward pass.

Nothing is placed on the model: what stays there costs every step, breaks pickling, goes along with
copies and makes compiled models compile again. What sees a call selects rows and copies them, and
does no arithmetic but for the largest logit, which no sample has (`capture.attending.max_logit`).
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.anatomy import Anatomy, Block, Stack
from geomon.capture.anatomy.projections import projects_in_its_own_way
from geomon.capture.assemble import build_snapshot, matrix_layer
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.calling.calls import calling_compiled, unwatch_calls, unwrap, watch_calls
from geomon.capture.calling.patches import in_extra_pass, run_eagerly, subclasses
from geomon.capture.first_pass import (
    LANDMARKS,
    BlockCall,
    StackPass,
    attention_key,
)
from geomon.capture.modes import unseen, without_modes
from geomon.capture.recorder import AttentionRecorder
from geomon.capture.shards import (
    WHOLE,
    ShardingError,
    Slice,
    TensorPlace,
    first_feature,
)
from geomon.capture.snapshot import (
    CAPTURED,
    EMBEDDING,
    FINAL_NORM,
    HOST,
    UNEMBEDDING,
    Layer,
    Snapshot,
)
from geomon.capture.storage import local_shard
from geomon.capture.tap import Stream, Tap
from geomon.capture.tap.provenance import tensors_in
from geomon.capture.tokens.sampling import (
    MemoryLimit,
    RowSampler,
    SampledRows,
    copy_rows,
    derive_seed,
    move_width_last,
    spread_indices,
)
from geomon.capture.tokens.table_calls import TableCalls
from geomon.capture.tokens.token_ids import TokenIds
from geomon.capture.weights import weight_norms
from geomon.note import Note

_FORCED = (
    "compiled code of the training ran eagerly while it was watched: dropout draws other random "
    "numbers there, and the memory may be more: measure by a probe"
)


_ADAPTED = (
    "its rows are those of the matrix itself; what an adapter around it adds is not in them until "
    "it is merged"
)

_OUTSIDE = (
    "attention was seen outside the blocks that are watched, and none in them: these may be the "
    "wrong blocks. print(geomon.describe(model)) shows them, blocks=... names others"
)

_LEFT_OUT = (
    "{count} blocks {pattern} are not watched: {reason}. blocks=... with a regular expression that "
    "matches the names of all blocks measures them too"
)


class Window:
    """A context manager that keeps sampled rows of one forward pass.

    After the `with`, `snapshot()` gives what was seen. The first pass of each stack counts
    (`geomon.capture.first_pass.StackPass` has the rule), or in a pipeline the passes of all
    micro-batches of a batch, which `snapshots()` gives; calls from other threads and recomputation
    under activation checkpointing are ignored. An error of geomon's own never ends the pass: one
    while a call is looked at becomes a note, and one in opening is raised by `snapshot()`.

    Args:
        anatomy: Anatomy of the model, or of the parts of it that this rank has.
        views: Captured views that are wanted; only the calls that these need are looked at.
        rows: Number of rows of hidden states to keep; the same at every layer.
        seed: Seed of the private generator that samples rows. No global random state is touched.
        max_mb: Largest memory of what is kept, in millions of bytes: the number of rows is lowered
            for it, and attention that does not fit is left out. None for no limit.
        keep_inputs: Whether to keep what the model is called with, as it is, in `inputs`.
        may_run_eagerly: Whether compiled code of which there is no twin is run eagerly, to be seen.
        extra_layers: Names of layers to see beside those of the blocks
            (`geomon.capture.snapshot.EXTRA_LAYERS`).
        place: Place of this rank among those that share out the weights of the blocks.
        micro_batches: For each part of a pipeline, a function that counts the micro-batches of a
            batch, 0 before that is known: each is a pass. None if a batch is one pass.
        charge: Returns a context manager, which is entered around each piece of work beside the
            pass to account for its time. Pieces may be nested.

    Attributes:
        seconds: Time taken from the training.
        inputs: Positional arguments of the first call of the model, and arguments by name.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        views: set[str],
        *,
        rows: int,
        seed: int,
        max_mb: float | None = None,
        keep_inputs: bool = False,
        may_run_eagerly: bool = True,
        extra_layers: Sequence[str] = (),
        place: TensorPlace = WHOLE,
        micro_batches: Sequence[Callable[[], int]] = (),
        charge: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._anatomy = anatomy
        self._charge = charge
        self._place = place
        self._keeps_inputs = keep_inputs
        self._may_run_eagerly = may_run_eagerly
        self.inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._sources = {CAPTURED[view] for view in views}
        self._extra = tuple(extra_layers) if "hidden" in self._sources else ()
        self._wants_last = "last" in self._sources
        wants_ids = self._wants_last or EMBEDDING in self._extra
        self._wants_tokens = wants_ids or views & {"token_ids", "positions"}
        self._rows, self._seed = rows, seed
        blocks = sum(len(stack.blocks) for stack in anatomy.stacks)
        attentions = sum(max(1, len(block.attentions)) for block in anatomy.blocks)
        self._attends = bool(self._sources & {"attention", "projection", "routing"})
        beside = len(anatomy.stacks) * (1 + (FINAL_NORM in self._extra))
        layers = (blocks + beside) * (1 + self._wants_last)
        self._limit = functools.partial(
            MemoryLimit, max_mb, layers=layers, blocks=attentions * self._attends
        )
        self._micro_batches = micro_batches
        self._memories: list[MemoryLimit] = []  # of each micro-batch, with the sampler of its rows
        self._passes = [
            StackPass(stack, self._memory(0).sampler, first=_is_first(stack, anatomy), place=place)
            for stack in anatomy.stacks
        ]
        self._earlier: list[list[StackPass]] = [[] for _ in self._passes]  # of micro-batches
        self._calls = [0] * len(self._passes)  # of the part that holds the stack
        self._thread = threading.get_ident()
        self._other_thread = False  # a block ran in another thread
        self._no_rows: str | None = None  # why calls of blocks did not count
        # What is done as the call of a module begins, and when it has returned, by its address.
        self._before: dict[int, list[Callable[..., None]]] = {}
        self._after: dict[int, list[Callable[..., None]]] = {}
        self._tables = TableCalls(anatomy.of_output, functools.partial(_ids_to_come, self._passes))
        # Passes whose final norm is running, by the address of the norm.
        self._norming: dict[int, StackPass] = {}
        # Calls of blocks that are running, outermost first; None for one that does not count.
        self._running: list[tuple[StackPass, BlockCall | None]] = []
        self._failure: Exception | None = None  # in opening the window
        self._failures: list[str] = []  # in what sees the calls
        self._recorder = AttentionRecorder(max_logits="max_logits" in views)
        self._twin_records = False  # whether the call that a twin is run for records gradients
        self._forced_eager = False  # whether compiled code of the training was run eagerly
        self._stream = Stream()  # what follows tensors between blocks
        self._entered: Tensor | None = None  # what the block that is running was given
        self._above: set[int] = set()  # addresses of outermost modules that are running
        self._tap: Tap | None = None  # what sees attention, while the window is open
        self._sees_above = True  # whether operators around the blocks are seen too
        self._blocks: set[int] = set()  # addresses of the blocks and of their parts
        self._hiding: set[int] = set()  # of those that call compiled functions
        self._settled = True  # whether nothing is half open or half closed
        self.seconds = 0.0

    def __enter__(self) -> Self:
        with self.timed():
            self._settled = False
            try:
                self._open()
            except Exception as error:
                self.close()
                self._failure = error
            except BaseException:
                self.close()
                raise
            self._settled = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.timed():
            self._settled = False
            try:
                self.close()
            except BaseException:  # Ctrl-C in between
                self.close()
                raise

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the body as taken from the training; nested bodies count once."""
        began, before = time.perf_counter(), self.seconds
        try:
            with self._charge():
                yield
        finally:
            self.seconds = before + time.perf_counter() - began

    @property
    def settled(self) -> bool:
        """Whether nothing has interrupted the opening or the closing of the window."""
        return self._settled

    def _open(self) -> None:
        self._choose_calls()
        if self._attends:
            self._recorder.open(
                current=self._current_call,
                outside=lambda: not (self._running or self._ignored()),
                guarded=self._guarded,
                on_failure=self.on_failure,
                stream=self._stream,
            )
            self._tap = Tap(self._recorder)
            subclasses.hold(self)
            self._find_compiled()
        watch_calls(self)

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

    def _find_compiled(self) -> None:
        """Find the blocks that call compiled functions, of which operators show nothing."""
        reaching = calling_compiled(self.modules())
        self._sees_above = not reaching
        for block in self._anatomy.blocks:
            for module in (block.module, *block.parts):
                self._blocks.add(id(module))
                if reaching and not reaching.isdisjoint(map(id, module.modules())):
                    self._hiding.add(id(module))

    def close(self) -> None:
        """Leave nothing behind; may be called more than once, and after an interruption."""
        if self._tap is not None:
            self._tap.close()
        self._recorder.close()
        unwatch_calls(self)
        subclasses.release(self)
        # They refer to the window: what it keeps would be freed by the garbage collector alone.
        self._before.clear()
        self._after.clear()
        self._tables.clear()
        self._stream.forget()
        self._entered = None
        for stack_pass in self._passes:
            stack_pass.leaving = None
            for block_call in stack_pass.block_calls:
                block_call.forget_tensors()
        self._settled = True

    def snapshot(self, device: torch.device = HOST) -> Snapshot:
        """Build the snapshot: rows in float32, without those that are not finite.

        Args:
            device: Where the rows stay. On the device of the model they are not moved.

        Raises:
            Exception: The window could not be opened; the error is the one that was met there.
        """
        return self.snapshots(device)[0]

    def snapshots(self, device: torch.device = HOST, *, wait: bool = True) -> list[Snapshot]:
        """Build the snapshot of each pass: one, or in a pipeline one for each micro-batch.

        Args:
            device: Where the rows stay. On the device of the model they are not moved.
            wait: Whether copies are there when this returns (see `Layer.to`).

        Raises:
            Exception: The window could not be opened; the error is the one that was met there.
        """
        if self._failure is not None:
            raise self._failure
        with without_modes():  # weights may be of subclasses, whose functions give their rows
            return self._snapshots(device, wait=wait)

    def _snapshots(self, device: torch.device, *, wait: bool) -> list[Snapshot]:
        """Build the snapshots, once the window could be opened."""
        every = [[*x, last] for x, last in zip(self._earlier, self._passes, strict=True)]
        every = [passes[self._inferred(n) :] for n, passes in enumerate(every)]
        count = min(map(len, every), default=1)
        count = min([count, *(known() or count for known in self._micro_batches)])
        return [
            self._snapshot([passes[n] for passes in every], device, wait=wait) for n in range(count)
        ]

    def _inferred(self, number: int) -> int:
        """Count the calls of a stage that were made before the first micro-batch.

        Between training and evaluation torch calls a stage once more, to infer shapes.
        """
        calls, count = self._calls[number], self._count(self._passes[number]) or 0
        return int(calls % count == 1 if count > 1 else count == 1 < calls)

    def _count(self, stack_pass: StackPass) -> int | None:
        """Count the micro-batches of a stage, 0 before they are known; None without a pipeline."""
        counts = self._micro_batches
        return counts[stack_pass.stack.part]() if counts else None

    def _snapshot(
        self, passes: Sequence[StackPass], device: torch.device, *, wait: bool
    ) -> Snapshot:
        """Build the snapshot of a pass through all stacks."""
        texts = [
            f"a hook failed, and what it looks at is missing: {failure}"
            for failure in dict.fromkeys(self._failures)
        ]
        texts += [
            f"torch {torch.__version__} has no {name}: {lost}"
            for name, lost in private.MISSING.items()
        ]
        texts += [_FORCED] * self._forced_eager
        seen = any(self._seen_attentions())
        texts += [
            f"{name}: {_ADAPTED}"
            for name, module in self._found_matrices().items()
            if any(module is adapted for adapted in self._anatomy.adapted)
        ]
        # Behind the last block of a stage attention may be that of another part of the model.
        texts += [_OUTSIDE] * (self._recorder.attends_outside and not seen and bool(passes))
        texts += [
            _LEFT_OUT.format(count=family.count, pattern=family.pattern, reason=family.reason)
            for family in self._anatomy.left_out
            if family.is_large
        ]
        return build_snapshot(
            passes,
            self._sources,
            matrices=self._matrices(),
            final_norm=FINAL_NORM in self._extra,
            other_thread=self._other_thread,
            no_rows=self._no_rows,
            notes=[*(Note(text, text) for text in texts), *self._memory(0).notes()],
            device=device,
            wait=wait,
        )

    def _matrices(self) -> list[Layer]:
        """Make the layers of the matrices of weights that are asked for."""
        if not any(stack_pass.block_calls for stack_pass in self._passes):
            return []
        found = self._found_matrices()
        sampler = self._memory(0).sampler
        return [matrix_layer(name, module, sampler) for name, module in found.items()]

    def _found_matrices(self) -> dict[str, nn.Module | None]:
        """Find the modules that hold the matrices that are asked for."""
        tables = self.token_tables() or self._anatomy.embeddings
        found = {
            EMBEDDING: next(iter(tables), None),
            UNEMBEDDING: self._anatomy.output,
        }
        elsewhere = {
            EMBEDDING: all(stack.before for stack in self._anatomy.stacks),
            UNEMBEDDING: all(stack.behind for stack in self._anatomy.stacks),
        }
        wanted = (name for name in found if name in self._extra and not elsewhere[name])
        return {name: found[name] for name in wanted}

    def routes(self, stack: str, label: str = "") -> set[str]:
        """List the routes by which attention was seen: keys of `geomon.description.ROUTES`.

        Args:
            stack: Name of the stack.
            label: Label of the attention in the blocks: "" for the one to the stack itself.
        """
        return {seen.route for seen in self._attentions(stack, label) if seen.route}

    def attends_elsewhere(self, stack: str, label: str) -> bool:
        """Whether the keys of an attention were made of another tensor than its queries.

        Args:
            stack: Name of the stack.
            label: Label of the attention in the blocks.
        """
        return any(seen.other_source for seen in self._attentions(stack, label))

    def projects(self, stack: str, label: str = "") -> bool:
        """Whether queries and keys were found as projected.

        Args:
            stack: Name of the stack.
            label: Label of the attention in the blocks.
        """
        return any(seen.projected is not None for seen in self._attentions(stack, label))

    def _attentions(self, stack: str, label: str) -> Iterator[SeenAttention]:
        """Iterate over what was seen of the attentions with a label."""
        for stack_pass in self._passes:
            for block_call in stack_pass.block_calls if stack_pass.stack.name == stack else ():
                index = attention_key(stack_pass.stack.blocks[block_call.block], label)
                if index in block_call.attentions:
                    yield block_call.attentions[index]

    def _seen_attentions(self) -> Iterator[bool]:
        """Say of each attention that was met whether its call was seen."""
        for stack_pass in self._passes:
            for block_call in stack_pass.block_calls:
                yield from (bool(seen.route) for seen in block_call.attentions.values())

    def token_tables(self) -> tuple[nn.Module, ...]:
        """List the embedding tables whose inputs were the token ids, in the order of the stacks."""
        tables = (x.tokens.ids.table(x.shape) for x in self._passes if x.shape)
        return tuple(dict.fromkeys(table for table in tables if table is not None))

    def padding(self, stack: str) -> str | None:
        """Say what the padding of a stack is known by; None if nothing says that there is any.

        Args:
            stack: Name of the stack.
        """
        tokens = (x.tokens for x in self._passes if x.stack.name == stack)
        return next((x.padding.source(x.batch) for x in tokens), None)

    # -- which calls are seen --------------------------------------------------------------------

    def _choose_calls(self) -> None:
        if self._wants_tokens:
            for table in self._anatomy.embeddings:
                self._see(self._before, table, self._tables.before, table)
                self._see(self._after, table, self._tables.after, table)
            for module, table in self._anatomy.around_embeddings:
                self._see(self._before, module, self._tables.before_around)
                self._see(self._after, module, self._tables.after_around, table)
        for _, norm in self._anatomy.norms if self._attends else ():
            self._see(self._before, norm, self._on_next)
        for name, norm in self._anatomy.norms if FINAL_NORM in self._extra else ():
            self._see(self._before, norm, self._on_norm)
            self._see(self._after, norm, self._on_normed, name)
        for number, stack_pass in enumerate(self._passes):
            for module in stack_pass.stack.above:
                self._see(self._before, module, self._on_call_above, stack_pass, number)
            for module in stack_pass.stack.above[:1]:
                self._see(self._after, module, self._on_return_above)
            owner = stack_pass.stack.owner
            if owner is not None:
                self._see(self._before, owner, self._on_owner, stack_pass)
                self._see(self._after, owner, self._on_owner_left, stack_pass)
            for index, block in enumerate(stack_pass.stack.blocks):
                for part in block.parts:
                    self._see(self._before, part, self._on_part, stack_pass, index)
                    self._see(self._after, part, self._on_block_left, stack_pass, index)
                self._see(self._before, block.module, self._on_block, stack_pass, index)
                self._see(self._after, block.module, self._on_block_left, stack_pass, index)
                if "weights" in self._sources and self._place.shards == 1:
                    for part in (block.module, *block.parts):
                        self._see(self._before, part, self._on_weights, block)
                if self._attends:
                    self._choose_calls_of_attention(block)

    def _choose_calls_of_attention(self, block: Block) -> None:
        for index, attention in enumerate(block.attentions):
            module = attention.module
            if module is not block.module:
                self._see(self._before, module, self._on_attending, index)
                self._see(self._after, module, self._on_attending, None)
        named = {m for attention in block.attentions for m in attention.projections.apart}
        traces = "projection" in self._sources or self._place.shards > 1
        for module in block.matrices if traces else ():
            if module in named or projects_in_its_own_way(module):
                self._see(self._before, module, self._on_projecting)
                self._see(self._after, module, self._on_projected)

    def _see(
        self,
        when: dict[int, list[Callable[..., None]]],
        module: nn.Module,
        action: Callable[..., None],
        *first: Any,
    ) -> None:
        when.setdefault(id(unwrap(module)), []).append(functools.partial(action, *first))

    def watches(self, module: nn.Module) -> bool:
        """Whether a module's calls are seen (see `geomon.capture.calling.calls.CallObserver`).

        Args:
            module: Any module.
        """
        return id(module) in self._before or id(module) in self._after

    def before_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take a call that begins.

        Args:
            module: The module.
            args: Positional arguments.
            kwargs: Arguments by name.
        """
        for action in () if self._ignored() else self._before.get(id(module), ()):
            with self._guarded(), unseen():
                action(module, args, kwargs)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Take a call that has returned.

        Args:
            module: The module.
            output: What it returned.
        """
        if self._ignored():
            return
        for action in self._after.get(id(module), ()):
            with self._guarded(), unseen():
                action(module, output)
        self._rest()

    @property
    def finished(self) -> bool:
        """Whether the passes that count are over: nothing more is to be seen.

        Where gradients are recorded, a pass without them may be followed by one that counts.
        """
        records = self._records_gradients()
        over = all(x.over and (x.with_gradients or not records) for x in self._passes)
        return over and not self._micro_batches

    def needs_twin(self, module: nn.Module) -> bool:
        """Whether the compiled code of a module hides what this window is to see.

        Args:
            module: The module, without wrappers.
        """
        self._twin_records = torch.is_grad_enabled()
        if self.finished:
            return False
        inside = self._attends and bool(self._running) and self._running[-1][1] is not None
        return (inside or any(map(self.watches, module.modules()))) and not self._ignored()

    def on_failure(self, error: Exception) -> None:
        """Keep an error for the notes.

        Args:
            error: The error.
        """
        self._failures.append(f"{type(error).__name__}: {error}")

    def modules(self) -> Iterator[nn.Module]:
        """List the modules that may be compiled in place: those of the model."""
        above = [module for stack in self._anatomy.stacks for module in stack.above]
        inside = [part for block in self._anatomy.blocks for part in (block.module, *block.parts)]
        for root in above[:1] or inside:  # the outermost one holds all of them
            yield from root.modules()

    @contextmanager
    def seeing(self, module: nn.Module) -> Iterator[None]:
        """See operators: in blocks, and around them where nothing that is compiled runs there.

        Args:
            module: The module that is called.
        """
        wanted = self._sees_between or id(module) in self._blocks
        if self._tap is None or not wanted or self._ignored():
            yield
            return
        with run_eagerly.held(), self._tap.seeing():
            yield

    def hides(self, module: nn.Module) -> bool:
        """Whether compiled functions in a block hide its attention (see `CallObserver`)."""
        return id(module) in self._hiding and not in_extra_pass()

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context manager in which no operator is seen."""
        return nullcontext() if self._tap is None else self._tap.suspended()

    def on_twin_end(self) -> None:
        """Leave the training alone if the twin has shown all (see `CallObserver`)."""
        self._rest()

    def on_compiled_end(self, module: nn.Module, output: Any) -> None:
        """Note what goes on from a compiled block: not what its twin has returned.

        Args:
            module: The module, without wrappers.
            output: What it returned.
        """
        left = next(iter(_floating(output)), None)
        if left is None or self._ignored():
            return
        for stack_pass in self._passes:
            if any(module is block.module for block in stack_pass.stack.blocks):
                stack_pass.left = _place(left)
                if stack_pass.leaving is not None:
                    stack_pass.leaving = left.detach()

    def _rest(self) -> None:
        """Close the window where nothing more is to be seen: what follows is left alone."""
        more_to_come = self._micro_batches or FINAL_NORM in self._extra
        if more_to_come or in_extra_pass() or not self._before:
            return
        complete = all(x.over and x.with_gradients for x in self._passes) and not self._above
        if complete and any(self._seen_attentions()):
            self.close()

    def forces_eager(self) -> bool:
        """Whether the training's own compiled code is to run eagerly, since it has no twin."""
        self._forced_eager = self._may_run_eagerly
        return self._may_run_eagerly

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the body, and keep its error for the notes: no hook ends a run."""
        with self.timed():
            try:
                yield
            except Exception as error:
                self.on_failure(error)

    def _ignored(self) -> bool:
        """Whether the present call is another thread's or a recomputation inside backward."""
        if private.graph_task() != -1:
            return True
        if threading.get_ident() != self._thread:
            self._other_thread = True
            return True
        return False

    # -- around the blocks -----------------------------------------------------------------------

    def _on_call_above(
        self,
        stack_pass: StackPass,
        number: int,
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        if self._count(stack_pass) == 0:
            return  # shapes are inferred, of numbers that mean nothing
        if module is unwrap(stack_pass.stack.above[0]):
            self._above.add(id(module))
        self._prefer_gradients(module)
        if module is unwrap(stack_pass.stack.above[0]):
            self._begin_micro_batch(number)
        if self._keeps_inputs and self.inputs is None:
            self.inputs = tuple(args), dict(kwargs)
        if stack_pass.block_calls or stack_pass.over:
            return
        self._tables.take_arguments(args, kwargs)
        around = [x for x in self._passes if x.stack.part == stack_pass.stack.part]
        shared = stack_pass is around[0] and len(around) > 1  # a module around all stacks
        for other in around if shared else (stack_pass,):
            if not other.block_calls:
                other.tokens.take_arguments(module, args, kwargs, shared=shared)

    def _on_return_above(self, module: nn.Module, output: Any) -> None:
        self._above.discard(id(module))
        self._stream.forget()  # what is done outside of the model is not seen

    def _prefer_gradients(self, module: nn.Module) -> None:
        """Forget passes without gradients where one with gradients begins."""
        if not self._records_gradients():
            return
        for number, stack_pass in enumerate(self._passes):
            passed = stack_pass.over and not stack_pass.with_gradients
            if passed and any(x is stack_pass.stack.owner for x in module.modules()):
                self._earlier[number].clear()
                self._calls[number] = 0
                stack_pass.forget(self._memory(0).sampler)  # and of micro-batches the first

    def _begin_micro_batch(self, number: int) -> None:
        """Begin the pass of a further micro-batch, if a stage is called again.

        As many are kept as there are in a batch, and one more: the first may be none.
        """
        earlier, stack_pass = self._earlier[number], self._passes[number]
        count = self._count(stack_pass)
        if count is None:
            return
        self._calls[number] += 1
        if self._calls[number] == 1:
            stack_pass.forget(self._memory(0).sampler)
        elif stack_pass.over and len(earlier) < count:
            earlier.append(stack_pass.hand_over())
            stack_pass.forget(self._memory(len(earlier)).sampler)

    def _records_gradients(self) -> bool:
        """Whether the call that is seen, or the one whose twin it is, records gradients."""
        return self._twin_records if in_extra_pass() else torch.is_grad_enabled()

    def _on_norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = first_tensor([*args, *kwargs.values()])
        if given is None or given.is_nested:
            return
        for stack_pass in self._passes:
            if stack_pass.leaving is not None and _place(given) == _place(stack_pass.leaving):
                self._norming[id(module)] = stack_pass

    def _on_normed(self, name: str, module: nn.Module, output: Any) -> None:
        stack_pass, normed = self._norming.pop(id(module), None), first_tensor(output)
        if stack_pass is None or normed is None or stack_pass.normed is not None:
            return
        rows = self._sample_hidden(stack_pass, normed, stack_pass.stack.blocks[-1].module)
        if rows is not None:
            stack_pass.normed = rows, name

    def _on_owner(self, stack_pass: StackPass, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._count(stack_pass) == 0:
            return
        given = tensors_in([args, kwargs])
        goes_on = any("returned" in self._stream.origins(x) for x in given)
        if stack_pass.begin(with_gradients=self._records_gradients(), goes_on=goes_on):
            self._running.clear()

    def _on_owner_left(self, stack_pass: StackPass, module: nn.Module, output: Any) -> None:
        stack_pass.end()

    # -- blocks ----------------------------------------------------------------------------------

    def _on_block(
        self,
        stack_pass: StackPass,
        index: int,
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        entered = _entering(stack_pass, [*args, *kwargs.values()])
        block_call = self._begin_call(stack_pass, index, module, args, kwargs, entered)
        self._run(stack_pass, block_call, module, [args, kwargs], entered)

    def _on_weights(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the norms of the weights of a block that begins: its optimizer step is to come."""
        current = self._current_call()
        if current is not None and not current[1].weight_norms:
            current[1].weight_norms = weight_norms(unwrap(block.module))

    def _run(
        self,
        stack_pass: StackPass,
        block_call: BlockCall | None,
        module: nn.Module,
        given: list[Any],
        entered: Tensor | None,
    ) -> None:
        self._running.append((stack_pass, block_call))
        if block_call is None:
            return
        block_call.finished = False
        if entered is not None and not entered.is_nested:
            entered = move_width_last(local_shard(entered), module, entering=True)
            if tuple(entered.shape[:-1]) != block_call.shape:  # others are on other ranks
                entered = None
        block_call.provenance.start(given, entered)

    def _on_part(
        self,
        stack_pass: StackPass,
        index: int,
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        block_call, block, called = stack_pass.parts
        entered = _entering(stack_pass, [*args, *kwargs.values()])
        if block != index or id(module) in called:
            block_call = self._begin_call(stack_pass, index, module, args, kwargs, entered)
            called = set()
        stack_pass.parts = block_call, index, called | {id(module)}
        self._run(stack_pass, block_call, module, [args, kwargs], entered)

    def _begin_call(
        self,
        stack_pass: StackPass,
        index: int,
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
        entered: Tensor | None,
    ) -> BlockCall | None:
        """Note that a block is called, and keep what enters the first one that counts.

        A call without tokens does not count: where data run out, a rank is given an empty batch.
        Nor does one inside `torch.func.vmap`, whose tensors are of no use behind it.
        """
        if entered is not None and (why := _why_no_rows(entered)) is not None:
            self._no_rows = why
            return None
        if self._count(stack_pass) == 0:
            return None
        if not stack_pass.block_calls:
            stack_pass.tokens.take_arguments(module, args, kwargs)
        again = any(call.block == index for call in stack_pass.block_calls)
        block_call = stack_pass.begin_call(index)
        if block_call is None:
            return None
        if entered is not None and not entered.is_nested:
            rows = move_width_last(local_shard(entered), module, entering=True)
            block_call.shape = self._shape_of(stack_pass, entered, rows)
            block_call.entered = tuple(entered.shape)
            block_call.handed_on = stack_pass.left in (None, _place(entered))
            if again and not (block_call.handed_on or self._stream.origins(entered)):
                stack_pass.restarts = True
            if self._entered is not None and len(stack_pass.block_calls) > 1:
                same = _place(entered) == _place(self._entered)
                stack_pass.side_by_side |= same and not block_call.handed_on
        self._entered = entered
        if len(stack_pass.block_calls) > 1:
            before = stack_pass.block_calls[-2]
            if entered is not None and index == before.block + 1:
                self._take_sum(stack_pass, before, entered, module)
            if stack_pass.stack.entering:
                if index <= before.block:  # another round, whose input may be other rows
                    return block_call
                before.hidden = (
                    None
                    if entered is None
                    else self._sample_hidden(stack_pass, entered, module, entering=True)
                )
        else:
            stack_pass.mode = "train" if module.training else "eval"
            if entered is not None:
                stack_pass.entered = self._sample_hidden(stack_pass, entered, module, entering=True)
            if stack_pass.entered is not None:
                places = spread_indices(math.prod(rows.shape[:-1]), LANDMARKS)
                stack_pass.tokens.landmarks = copy_rows(rows, places)
        return block_call

    @property
    def _sees_between(self) -> bool:
        """Whether operators between the blocks are seen."""
        return self._tap is not None and (self._sees_above or in_extra_pass())

    def _take_sum(
        self, stack_pass: StackPass, before: BlockCall, stream: Tensor, module: nn.Module
    ) -> None:
        """Take for a layer the sum that is made behind a block, of its input and its output."""
        if tuple(stream.shape) != before.entered:
            return
        if not self._sees_between:
            stack_pass.hides_between |= _place(stream) != stack_pass.left
        elif len(self._stream.origins(stream)) > 1 and not stack_pass.side_by_side:
            before.is_sum = True
            before.hidden = self._sample_hidden(stack_pass, stream, module, entering=True)

    def _on_next(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at what enters a norm outside the blocks: behind the last one, it may be the sum."""
        given = first_tensor([*args, *kwargs.values()])
        for stack_pass in self._passes if given is not None and not self._running else ():
            last = stack_pass.block_calls[-1:]
            if given is not None and last and last[0].block == len(stack_pass.stack.blocks) - 1:
                self._take_sum(stack_pass, last[0], given, module)

    def _on_block_left(
        self, stack_pass: StackPass, index: int, module: nn.Module, output: Any
    ) -> None:
        block_call = self._end_call(stack_pass, index)
        if block_call is None:
            return
        self._finish(stack_pass, block_call, stack_pass.stack.blocks[index])
        hidden = first_tensor(output)
        if hidden is None:
            return
        if hidden is not output:
            alike = [x for x in _floating(output) if tuple(x.shape) == block_call.entered]
            hidden = next(iter(alike), hidden)
            stack_pass.hands_on_several |= len(alike) > 1
        if not hidden.is_nested:
            stack_pass.left = _place(hidden)
            if self._sees_between:  # else memory that is used again would tell nothing
                self._stream.start(self._entered, hidden)
            if FINAL_NORM in self._extra:
                # It is kept alive: no other tensor is at its address while the window is open.
                stack_pass.leaving = hidden.detach()
                stack_pass.normed = None
        if not stack_pass.stack.entering:
            block_call.hidden = self._sample_hidden(stack_pass, hidden, module)

    def _end_call(self, stack_pass: StackPass, index: int) -> BlockCall | None:
        """Remove a block's call from those that run, and calls inside that an exception ended."""
        while self._running:
            owner, block_call = self._running.pop()
            if owner is stack_pass and (block_call is None or block_call.block == index):
                return block_call
        return None

    def _sample_hidden(
        self, stack_pass: StackPass, hidden: Tensor, block: nn.Module, *, entering: bool = False
    ) -> SampledRows | None:
        if hidden.is_nested:
            return None
        rows = move_width_last(local_shard(hidden), block, entering=entering)
        try:
            part = stack_pass.slice_of(hidden, rows)
        except ShardingError as error:
            stack_pass.why_not_read = f"{error}"
            return None
        tokens = stack_pass.tokens
        tokens.ids.meet(part.shape, rows if part.is_whole else None)
        if not tokens.shape:
            self._fit_rows(stack_pass, rows.shape[-1])
            tokens.begin(part.shape)
            stack_pass.dtype = rows.dtype
        last = tokens.last(part.shape) if self._wants_last else None
        ends = None if last is None else _copy_slice(rows, last, part)
        return _copy_slice(rows, stack_pass.row_indices(part.shape), part)._replace(last=ends)

    def _fit_rows(self, stack_pass: StackPass, width: int) -> None:
        """Lower the number of rows of a pass, if a limit of memory asks for it."""
        for memory in self._memories:
            if memory.sampler is stack_pass.sampler:
                memory.fit_rows(width)

    def _shape_of(
        self, stack_pass: StackPass, entered: Tensor, rows: Tensor
    ) -> tuple[int, ...] | None:
        """Return the shape of what entered a block, on all ranks and without the width."""
        try:
            return stack_pass.slice_of(entered, rows).shape
        except ShardingError:  # what is sampled of it says why it is not read
            return None

    # -- attention -------------------------------------------------------------------------------

    def _current_call(self) -> tuple[StackPass, BlockCall, Block] | None:
        """Return the call of the innermost block that is running, if that call counts."""
        if not self._running or self._running[-1][1] is None or self._ignored():
            return None
        stack_pass, block_call = self._running[-1]
        assert block_call is not None
        return stack_pass, block_call, stack_pass.stack.blocks[block_call.block]

    def _on_attending(self, index: int | None, module: nn.Module, *call: Any) -> None:
        current = self._current_call()
        if current is None:
            return
        current[1].running_attention = index
        if index is None and self._recorder.has_all(current[1], current[2]):
            self._finish(*current)

    def _finish(self, stack_pass: StackPass, block_call: BlockCall, block: Block) -> None:
        """Follow the tensors of a block no further."""
        if "projection" in self._sources:
            self._recorder.finish(stack_pass, block_call, block)
        block_call.forget_tensors()

    def _on_projecting(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        current, given = self._current_call(), first_tensor([*args, *kwargs.values()])
        if current is not None and given is not None:
            current[1].inputs[id(module)] = given
            # FSDP has gathered the weight by now: what is sharded is so by tensor parallelism.
            current[1].firsts[id(module)] = first_feature(module)

    def _on_projected(self, module: nn.Module, output: Any) -> None:
        current, output = self._current_call(), first_tensor(output)
        given = None if current is None else current[1].inputs.pop(id(module), None)
        if current is None or given is None or output is None or output.is_nested:
            return
        # The width of a convolution's output is not its last dimension.
        output = move_width_last(local_shard(output), module, entering=False)
        first = current[1].firsts.get(id(module), 0)
        found = current[1].provenance.projected(output, local_shard(given), first)
        if found is not None:
            current[1].outputs.setdefault(id(module), (found, tuple(output.shape[:-1])))


def _copy_slice(rows: Tensor, indices: Tensor, part: Slice) -> SampledRows:
    """Copy those of some rows that are on this rank.

    Args:
        rows: Hidden states on this rank, [..., width].
        indices: Flat indices of the rows among those of all ranks.
        part: Where those on this rank lie.
    """
    places, flat = part.inside(indices)
    start = () if part.is_whole else part.start
    return SampledRows(copy_rows(rows, flat), indices[places], part.shape, start=start)


def _is_first(stack: Stack, anatomy: Anatomy) -> bool:
    """Whether a stack is the first one of its part of the model."""
    return next(other for other in anatomy.stacks if other.part == stack.part) is stack


def _ids_to_come(passes: Sequence[StackPass]) -> list[TokenIds]:
    """List the token ids of the passes to which what tables are given now may belong."""
    running = [stack_pass for stack_pass in passes if stack_pass.running]
    return [
        stack_pass.tokens.ids
        for stack_pass in running or passes
        if not stack_pass.over and not (stack_pass.block_calls and stack_pass not in running)
    ]


def _floating(values: Any) -> list[Tensor]:
    """List the tensors of floating-point numbers, those at the top before those in containers."""
    given = [values] if isinstance(values, Tensor) else values or ()
    given = list(given.values() if isinstance(given, Mapping) else given)
    inner = tensors_in(x for x in given if not isinstance(x, Tensor))
    every = [*(x for x in given if isinstance(x, Tensor)), *inner]
    return [x for x in every if x.is_floating_point()]


def _entering(stack_pass: StackPass, given: Sequence[Any]) -> Tensor | None:
    """Choose the hidden states among the arguments of a block.

    Tables of rotations and masks may come before them: they are what the block before gave, else
    of the shape and the width of what the tables of tokens gave, else the first argument.
    """
    found = _floating(given)
    known = [x for x in found if not (x.is_nested or private.is_batched(local_shard(x)))]
    handed_on = [x for x in known if _place(x) == stack_pass.left]
    fitting = [x for x in known if stack_pass.tokens.ids.may_have_made(x)]
    return next(iter(handed_on or fitting or found), None)


def _why_no_rows(entered: Tensor) -> str | None:
    """Say why nothing can be seen of a call on a tensor; None if it can."""
    if entered.numel() == 0:
        return "the block was given a batch without tokens"
    if private.is_batched(local_shard(entered)):
        return "the block was run inside torch.func.vmap: measure by a probe outside of it"
    return None


def _place(values: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the address and the shape of a tensor, which tell it from others while it lives."""
    return local_shard(values).data_ptr(), tuple(values.shape)


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor.

    Args:
        values: Arguments of a call, or the output of a module: a tensor, or several values.
    """
    return values if isinstance(values, Tensor) else next(iter(_floating(values)), None)
