"""Window: keep sampled rows during one forward pass.

Nothing is attached to the model: hooks would cost every step, break pickling, travel with copies
and trigger recompilation. Observers select rows and copy them; their only arithmetic is the largest
logit, which sampling could miss (`capture.attending.max_logit`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from geomon.capture import private
from geomon.capture.anatomy import Anatomy, Block
from geomon.capture.anatomy.families import is_callable
from geomon.capture.anatomy.projections import projects_in_its_own_way
from geomon.capture.assemble import build_snapshot, matrix_layer
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.calling.calls import (
    compiled_in,
    unwatch_calls,
    unwrap,
    watch_calls,
)
from geomon.capture.calling.patches import (
    in_extra_pass,
    records_gradients,
    run_eagerly,
    subclasses,
)
from geomon.capture.first_pass import BlockCall, StackPass, attention_key
from geomon.capture.hidden_states import HiddenStates, find_entering, first_tensor, floating
from geomon.capture.modes import unseen, without_modes
from geomon.capture.recorder import AttentionRecorder, failing_silently
from geomon.capture.shards import (
    WHOLE,
    TensorPlace,
    first_feature,
)
from geomon.capture.snapshot import (
    EMBEDDING,
    FINAL_NORM,
    HOST,
    UNEMBEDDING,
    Snapshot,
    source_of,
)
from geomon.capture.storage import local_shard
from geomon.capture.tap import DepartedError, Plans, Tap
from geomon.capture.tap.operators import tensors_in
from geomon.capture.tokens.sampling import (
    MemoryLimit,
    move_width_last,
)
from geomon.capture.tracker import Tracker
from geomon.capture.weights import WeightNorms
from geomon.failures import failures
from geomon.note import Note
from geomon.note_kinds import NoteKind

_FORCED = (
    "compiled code of the training ran eagerly while it was watched: dropout draws other random "
    "numbers then, and memory use may be higher: measure by a probe"
)


_ADAPTED = (
    "these are the rows of the matrix itself, without the contribution of the adapter around it "
    "until it is merged"
)

_OUTSIDE = (
    "attention was seen outside the watched blocks, but not inside them: these may be the wrong "
    "blocks. print(geomon.describe(model)) shows them, blocks=... names others"
)

_LEFT_OUT = (
    "{count} blocks {pattern} are not watched: {reason}. To measure them too, pass blocks=... with "
    "a regular expression that matches the names of all blocks"
)


class Window:
    """A context manager that keeps sampled rows of one forward pass.

    After the `with`, `snapshot()` returns what was seen. The first pass of each stack counts (see
    `geomon.capture.tracker.Tracker`); in a pipeline, the passes of all micro-batches count, and
    `snapshots()` returns them. Calls from other threads and recomputation under activation
    checkpointing are ignored. An error of geomon's own never ends the pass: an error while looking
    at a call becomes a note, and an error while opening is raised by `snapshot()`.

    Args:
        anatomy: Anatomy of the model, or of the parts of it that this rank has.
        views: Captured views that are wanted; only the calls that they need are watched.
        rows: Number of rows of hidden states to keep; the same at every layer.
        seed: Seed of the private generator that samples rows. Global random state is not touched.
        max_mb: Memory limit in megabytes (10^6 bytes). The number of rows is lowered to fit, and
            attention that does not fit is left out. Defaults to None, for no limit.
        keep_inputs: Whether to keep the arguments of the model's call in `inputs`. Defaults to
            False.
        may_run_eagerly: Whether to run compiled code eagerly if a twin is impossible. Defaults to
            True.
        extra_layers: Names of further layers to see (`geomon.capture.snapshot.EXTRA_LAYERS`).
            Defaults to ().
        place: Place of this rank among those that share the weights of the blocks. Defaults to a
            rank that has them all.
        micro_batches: For each pipeline stage, a function that counts the micro-batches of a batch
            (0 before they are known); each micro-batch is a pass. Defaults to (), for one pass per
            batch.
        charge: Returns a context manager that is entered around each piece of extra work, to
            account for its time. Pieces may be nested.
        plans: What earlier windows on the same anatomy understood of the blocks; this window adds
            to it. Defaults to None, for nothing.

    Attributes:
        seconds: Time taken from the training.
        settled: Whether nothing has interrupted the opening or the closing of the window.
        inputs: Positional and keyword arguments of the model's first call.
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
        plans: Plans | None = None,
    ) -> None:
        self._anatomy = anatomy
        self._charge = charge
        self._place = place
        self._keeps_inputs = keep_inputs
        self._may_run_eagerly = may_run_eagerly
        self.inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._views, self._sources = views, {source_of(view) for view in views}
        self._extra = tuple(extra_layers) if "hidden" in self._sources else ()
        self._wants_last = "last" in self._sources
        wants_ids = self._wants_last or EMBEDDING in self._extra
        self._wants_tokens = wants_ids or views & {"token_ids", "positions"}
        blocks = sum(len(stack.blocks) for stack in anatomy.stacks)
        attentions = sum(max(1, len(block.attentions)) for block in anatomy.blocks)
        self._attends = bool(self._sources & {"attention", "projection", "routing"})
        # Operators show attention, and the path from embedding tables to the blocks.
        self._follows = self._attends or bool(self._wants_tokens)
        others = len(anatomy.stacks) * (1 + (FINAL_NORM in self._extra))
        layers = (blocks + others) * (1 + self._wants_last)
        limit = partial(MemoryLimit, max_mb, layers=layers, blocks=attentions * self._attends)
        self._tracker = Tracker(
            anatomy, limit, rows=rows, seed=seed, place=place, micro_batches=micro_batches
        )
        self._states = HiddenStates(
            self._tracker,
            anatomy.embeddings if self._wants_tokens else (),
            keeps_last=self._wants_last,
        )
        self._weights = WeightNorms([unwrap(block.module) for block in anatomy.blocks])
        # Actions before and after the call of a module, by its id.
        self._before: dict[int, list[Callable[..., None]]] = {}
        self._after: dict[int, list[Callable[..., None]]] = {}
        self._projecting: set[int] = set()  # ids of modules that only project
        self._sees_projecting = True  # whether the plan of the running block is not known
        self._failure: Exception | None = None  # in opening the window
        self._failures: list[str] = []  # while looking at calls
        self._recorder = AttentionRecorder(
            self._tracker,
            self._states.stream,
            attends=self._attends,
            max_logits="max_logits" in views,
            outputs="head_outputs" in views,
            projects="projection" in self._sources,
            plans=Plans() if plans is None else plans,
        )
        self._forced_eager = False  # whether the training's compiled code ran eagerly
        self._has_seen_all = False  # whether nothing more is to be seen in the running block
        self._tap: Tap | None = None  # sees attention while the window is open
        self._sees_above = True  # whether operators around the blocks are seen too
        self._blocks: set[int] = set()  # ids of the blocks and of their parts
        self._hiding: set[int] = set()  # ids of those, and of their owners, with compiled code
        self.settled = True
        self.seconds = 0.0

    def __enter__(self) -> Self:
        with self.timed():
            self.settled = False
            try:
                self._open()
            except failures() as error:
                self.close()
                self._failure = error
            except BaseException:
                self.close()
                raise
            self.settled = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.timed():
            self.settled = False
            try:
                self.close()
            except BaseException:  # Ctrl-C in between
                self.close()
                raise
            finally:
                if self._tap is not None:
                    self._tap.rest()
                run_eagerly.release(self)  # left by Ctrl-C

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the body as taken from the training; nested bodies count once."""
        began, before = time.perf_counter(), self.seconds
        try:
            with self._charge():
                yield
        finally:
            self.seconds = before + time.perf_counter() - began

    def _open(self) -> None:
        self._choose_calls()
        if self._follows:
            self._recorder.guarded = self._guarded
            self._tap = Tap(self._recorder)
            self._turn()
            subclasses.hold(self)
        self._find_compiled()
        watch_calls(self)

    def _find_compiled(self) -> None:
        """Find the blocks, and what runs them, that have compiled code in them."""
        found = compiled_in(self.modules(), inside=bool(self._follows))
        self._sees_above = not found
        blocks = [part for each in self._anatomy.blocks for part in (each.module, *each.parts)]
        self._blocks.update(map(id, blocks))
        owners = [stack.owner for stack in self._anatomy.stacks if stack.owner is not None]
        self._hiding.update(
            id(module)
            for module in (*owners, *blocks)
            if found and not found.isdisjoint(map(id, module.modules()))
        )

    def close(self) -> None:
        """Remove everything that the window placed; may be called more than once."""
        if self._tap is not None:
            self._tap.close()
        self._recorder.guarded = failing_silently
        unwatch_calls(self)
        subclasses.release(self)
        # These refer to the window and would delay freeing its rows until garbage collection.
        self._before.clear()
        self._after.clear()
        self._states.forget()
        for stack_pass in self._tracker.passes:
            stack_pass.last_output = None
            for block_call in stack_pass.block_calls:
                block_call.forget_tensors()
        self.settled = True

    def release(self) -> None:
        """Release the rows, which only snapshots made before hold from now on."""
        self._tracker.forget()

    def snapshot(self, device: torch.device = HOST) -> Snapshot:
        """Build the snapshot: finite rows, in float32.

        Args:
            device: Device of the rows. Rows on the model's device are not moved. Defaults to the
                host.

        Raises:
            Exception: If the window could not be opened; the error that was met then.
        """
        return self.snapshots(device)[0]

    def snapshots(self, device: torch.device = HOST, *, wait: bool = True) -> list[Snapshot]:
        """Build the snapshot of each pass: one, or in a pipeline one per micro-batch.

        Args:
            device: Device of the rows. Rows on the model's device are not moved. Defaults to the
                host.
            wait: Whether to wait for copies (see `Layer.to`). Defaults to True.

        Raises:
            Exception: If the window could not be opened; the error that was met then.
        """
        if self._failure is not None:
            raise self._failure
        with without_modes():  # weights may be tensor subclasses, whose functions give their rows
            return [self._snapshot(x, device, wait=wait) for x in self._tracker.of_batch()]

    def _snapshot(
        self, passes: Sequence[StackPass], device: torch.device, *, wait: bool
    ) -> Snapshot:
        """Build the snapshot of a pass through all stacks."""
        matrices, sampler = self._found_matrices(), self._tracker.memory().sampler
        failed = "watching a call failed, and what it would have shown is missing: "
        notes = [
            Note(NoteKind.WATCHING_FAILED, f"{failed}{failure}", about=failure)
            for failure in dict.fromkeys(self._failures)
        ]
        lacks = f"torch {torch.__version__} lacks "
        notes += [
            Note(NoteKind.TORCH_LACKS, f"{lacks}{name}: {lost}", about=name)
            for name, lost in private.MISSING.items()
        ]
        if self._forced_eager:
            notes.append(Note(NoteKind.RAN_EAGERLY, _FORCED))
        seen = self._sees_attention()
        notes += [
            Note(NoteKind.ADAPTED_MATRIX, f"{name}: {_ADAPTED}", about=name)
            for name, module in matrices.items()
            if any(module is adapted for adapted in self._anatomy.adapted)
        ]
        # Attention after a stage's last block may belong to another part of the model.
        if self._recorder.attends_outside and not seen and passes:
            notes.append(Note(NoteKind.OUTSIDE_BLOCKS, _OUTSIDE))
        notes += [
            Note(
                NoteKind.BLOCKS_LEFT_OUT,
                _LEFT_OUT.format(count=family.count, pattern=family.pattern, reason=family.reason),
                about=family.pattern,
            )
            for family in self._anatomy.left_out
            if family.is_large
        ]
        return build_snapshot(
            passes,
            self._views,
            matrices=(matrix_layer(name, m, sampler) for name, m in matrices.items()),
            final_norm=FINAL_NORM in self._extra,
            other_thread=self._tracker.other_thread,
            no_rows=self._tracker.no_rows,
            notes=[*notes, *self._tracker.memory().notes()],
            device=device,
            wait=wait,
        )

    def _found_matrices(self) -> dict[str, nn.Module | None]:
        """Find the modules that hold the requested matrices."""
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
            label: Label of the attention in the blocks. Defaults to "", self-attention.
        """
        return {seen.route for seen in self.attentions(stack, label) if seen.route}

    def heads(self, stack: str, label: str = "") -> set[tuple[int, int]]:
        """Return the numbers of (query heads, key heads) of the attentions with a label.

        Args:
            stack: Name of the stack.
            label: Label of the attention in the blocks. Defaults to "", self-attention.
        """
        calls = (seen.call for seen in self.attentions(stack, label))
        return {(call.heads, call.key_heads) for call in calls if call is not None}

    def attentions(self, stack: str, label: str = "") -> list[SeenAttention]:
        """List what was seen of the attentions with a label, in the blocks of a stack.

        Args:
            stack: Name of the stack.
            label: Label of the attention in the blocks. Defaults to "", self-attention.
        """
        return [
            block_call.attentions[index]
            for stack_pass in self._tracker.passes
            for block_call in stack_pass.block_calls
            if stack_pass.stack.name == stack
            if (index := attention_key(stack_pass.stack.blocks[block_call.block], label))
            in block_call.attentions
        ]

    def _sees_attention(self) -> bool:
        """Whether the call of any attention was seen."""
        calls = (call for stack_pass in self._tracker.passes for call in stack_pass.block_calls)
        return any(seen.route for call in calls for seen in call.attentions.values())

    def token_tables(self) -> tuple[nn.Module, ...]:
        """List the embedding tables that received the token ids, in the order of the stacks."""
        tables = (x.tokens.ids.table(x.shape) for x in self._tracker.passes if x.shape)
        return tuple(dict.fromkeys(table for table in tables if table is not None))

    def padding(self, stack: str) -> str | None:
        """Say how the padding of a stack is known, or return None if nothing shows any.

        Args:
            stack: Name of the stack.
        """
        known = (x.settle() for x in self._tracker.passes if x.stack.name == stack)
        return next((x.padding.source(x.batch) for x in known), None)

    # -- which calls are seen --------------------------------------------------------------------

    def _choose_calls(self) -> None:
        for table in self._anatomy.embeddings if self._wants_tokens else ():
            self._see(table, partial(self._states.enter_table, table), self._states.leave_table)
        for name, norm in self._anatomy.norms if self._follows or self._extra else ():
            leaves = partial(self._states.leave_norm, name) if FINAL_NORM in self._extra else None
            self._see(norm, self._on_norm, leaves)
        for number, stack in enumerate(self._anatomy.stacks):
            for module in stack.above:
                self._see(module, partial(self._on_call_above, number), self._on_return_above)
            if stack.owner is not None:
                before, after = (
                    partial(self._on_owner, number),
                    partial(self._on_owner_left, number),
                )
                self._see(stack.owner, before, after)
            for index, block in enumerate(stack.blocks):
                for part in (*block.parts, block.module):
                    self._see(part, partial(self._on_block, number, index), self._on_block_left)
                if self._attends:
                    self._choose_calls_of_attention(block)

    def _choose_calls_of_attention(self, block: Block) -> None:
        for index, attention in enumerate(block.attentions):
            before, after = partial(self._on_attending, index), partial(self._on_attending, None)
            if attention.module is not block.module:
                self._see(attention.module, before, after)
        # Outputs of heads may be projected beside the module that makes them.
        attending = {attention.module for attention in block.attentions}
        for module in filter(is_callable, block.module.children()):
            if module not in attending and not attending.isdisjoint(module.modules()):
                self._see(module, None, self._on_attended)
        traces = "projection" in self._sources or self._place.shards > 1
        for module in block.matrices if traces else ():
            if projects_in_its_own_way(module):
                if not self.watches(module):
                    self._projecting.add(id(module))
                self._see(module, self._on_projecting, self._on_projected)

    def _see(
        self,
        module: nn.Module,
        before: Callable[..., None] | None,
        after: Callable[..., None] | None,
    ) -> None:
        """Act before and after the calls of a module."""
        number = id(unwrap(module))
        for actions, action in ((self._before, before), (self._after, after)):
            if action is not None:
                actions.setdefault(number, []).append(action)

    def watches(self, module: nn.Module) -> bool:
        """Whether a module's calls are watched (see `geomon.capture.calling.calls.CallObserver`).

        Args:
            module: Any module.
        """
        if id(module) in self._projecting and not self._sees_projecting:
            return False
        return id(module) in self._before or id(module) in self._after

    def before_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Handle a call that begins."""
        if self._tracker.is_ignored():
            return
        for action in self._before.get(id(module), ()):
            with self._guarded(), unseen():
                action(module, args, kwargs)
        self._turn()

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Handle a call that has returned."""
        if self._tracker.is_ignored():
            return
        for action in self._after.get(id(module), ()):
            with self._guarded(), unseen():
                action(module, output)
        self._turn()
        if self._has_seen_all and self._tap is not None:
            self._tap.rest()
        elif self._tap is not None and self._tap.sight is not None:
            self._tap.go_on()
        self._has_seen_all = False
        self._rest()

    def _turn(self) -> None:
        """Show the operators that follow to whoever sees them now."""
        if self._tap is not None:
            self._tap.sight = self._recorder.sight()

    def needs_twin(self, module: nn.Module) -> bool:
        """Whether a module's compiled code hides what this window must see."""
        if self._tracker.is_over(with_gradients=records_gradients()):
            return False
        inside = self._attends and self._tracker.current is not None
        watched = inside or any(map(self.watches, module.modules()))
        return watched and not self._tracker.is_ignored()

    def on_failure(self, error: Exception) -> None:
        """Keep an error for the notes."""
        if isinstance(error, DepartedError):
            return
        self._failures.append(f"{type(error).__name__}: {error}")

    def modules(self) -> Iterator[nn.Module]:
        """List the modules of the model, which may be compiled in place."""
        above = [module for stack in self._anatomy.stacks for module in stack.above]
        inside = [part for block in self._anatomy.blocks for part in (block.module, *block.parts)]
        for root in above[:1] or inside:  # the outermost one holds all of them
            yield from root.modules()

    def seeing(self, module: nn.Module) -> AbstractContextManager[None] | None:
        """See operators inside blocks, and around them unless compiled code runs there."""
        wanted = self._sees_between or id(module) in self._blocks
        if self._tap is None or not wanted or self._tracker.is_ignored() or self._tap.is_open:
            return None
        return self._seeing(self._tap)

    @contextmanager
    def _seeing(self, tap: Tap) -> Iterator[None]:
        held = self in run_eagerly.holders  # around a twin
        with nullcontext() if held else run_eagerly.held(self), tap.seeing():
            yield

    def hides(self, module: nn.Module) -> bool:
        """Whether a block, or what runs blocks, has compiled code (see `CallObserver`)."""
        return id(module) in self._hiding and not in_extra_pass()

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are not seen."""
        return nullcontext() if self._tap is None else self._tap.suspended()

    def on_compiled_end(self, module: nn.Module, output: Any) -> None:
        """Remember the output of a compiled block, which replaces its twin's output."""
        left = None if self._tracker.is_ignored() else first_tensor(output)
        for stack_pass in self._tracker.passes:
            if left is not None and any(module is x.module for x in stack_pass.stack.blocks):
                self._states.hand_on(stack_pass, left)
        self._rest()

    def _rest(self) -> None:
        """Close the window early if nothing more can be seen, so the rest runs untouched."""
        if FINAL_NORM in self._extra or in_extra_pass() or not self._before:
            return
        over = self._tracker.is_over(with_gradients=True) and not self._tracker.above
        if over and self._sees_attention():
            self.close()

    def forces_eager(self) -> bool:
        """Whether the training's compiled code must run eagerly because a twin is impossible."""
        self._forced_eager = self._may_run_eagerly
        return self._may_run_eagerly

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the body, and keep its error for the notes: no hook ends a run."""
        with self.timed():
            try:
                yield
            except failures() as error:
                self.on_failure(error)

    # -- around the blocks -----------------------------------------------------------------------

    def _on_call_above(
        self, number: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        around, shared = self._tracker.call_above(number, module)
        if self._keeps_inputs and self.inputs is None and not self._tracker.is_inferring(number):
            self.inputs = tuple(args), dict(kwargs)
        if around:
            self._states.take_arguments(args, kwargs)
        for other in around:
            other.tokens.take_arguments(module, args, kwargs, shared=shared)

    def _on_return_above(self, module: nn.Module, output: Any) -> None:
        self._tracker.leave_above(module)
        if not self._tracker.above:
            self._states.stream.forget()  # operators outside of the model are not seen

    def _on_norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        self._states.enter_norm(module, given, sees_between=self._sees_between)

    def _on_owner(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        origins = map(self._states.stream.origins, tensors_in([args, kwargs]))
        self._tracker.call_owner(number, goes_on=any("returned" in x for x in origins))

    def _on_owner_left(self, number: int, module: nn.Module, output: Any) -> None:
        self._tracker.leave_owner(number)

    # -- blocks ----------------------------------------------------------------------------------

    def _on_block(
        self, number: int, index: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Handle the call of a block, or of one module of a block that is a list."""
        stack_pass = self._tracker.passes[number]
        given = floating([*args, *kwargs.values()])
        hidden = find_entering(stack_pass, given)
        block_call = self._tracker.begin_call(number, index, module, hidden)
        if block_call is None:
            return
        if len(block_call.called) == 1 == len(stack_pass.block_calls):
            stack_pass.tokens.take_arguments(module, args, kwargs)
        if self._attends:
            self._recorder.begin(block_call, module, [args, kwargs])
            self._sees_projecting = block_call.provenance.sees_modules
        self._states.enter(
            stack_pass, block_call, module, given, hidden,
            sees_between=self._sees_between,
        )  # fmt: skip
        if "weights" in self._sources and self._place.shards == 1 and not block_call.weight_norms:
            # Read now, before the optimizer changes them.
            block = stack_pass.stack.blocks[index]
            block_call.weight_norms = self._weights.of(unwrap(block.module))

    @property
    def _sees_between(self) -> bool:
        """Whether operators between the blocks are seen."""
        return self._tap is not None and (self._sees_above or in_extra_pass())

    def _on_block_left(self, module: nn.Module, output: Any) -> None:
        ended = self._tracker.end_call(module)
        if ended is not None:
            stack_pass, block_call = ended
            self._finish(stack_pass, block_call, stack_pass.stack.blocks[block_call.block])
            self._has_seen_all = False
            self._recorder.end(block_call)
            self._states.leave(
                stack_pass, block_call, module, output, sees_between=self._sees_between
            )

    # -- attention -------------------------------------------------------------------------------

    def _on_attending(self, index: int | None, module: nn.Module, *call: Any) -> None:
        current = self._tracker.current
        if current is None:
            return
        current[1].running_attention = index
        if index is None:
            self._on_attended()

    def _on_attended(self, *call: Any) -> None:
        """Finish the block that runs if all of its attentions were seen."""
        current = self._tracker.current
        if current is None:
            return
        _, block_call, block = current
        seen = all(block_call.seen(n).call for n in range(len(block.attentions)))
        if seen and block_call.provenance.is_complete:
            self._finish(*current)

    def _finish(self, stack_pass: StackPass, block_call: BlockCall, block: Block) -> None:
        """Stop following the tensors of a block."""
        if block_call.finished:
            return
        goes_on = self._recorder.finish(stack_pass, block_call, block)
        block_call.forget_tensors()
        self._has_seen_all = not goes_on  # and the block still runs

    def _on_projecting(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        current, given = self._tracker.current, first_tensor([*args, *kwargs.values()])
        if current is not None and given is not None:
            # FSDP has gathered the weight by now, so a sharded weight means tensor parallelism.
            current[1].inputs[id(module)] = given, first_feature(module)

    def _on_projected(self, module: nn.Module, output: Any) -> None:
        current, output = self._tracker.current, first_tensor(output)
        taken = None if current is None else current[1].inputs.pop(id(module), None)
        if current is None or taken is None or output is None:
            return
        # A convolution's output does not have its width last.
        output = move_width_last(local_shard(output), module, entering=False)
        given, first = taken
        current[1].provenance.projected(output, local_shard(given), first)
