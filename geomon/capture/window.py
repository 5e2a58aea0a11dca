"""Window: keeps sampled rows during one forward pass.

Nothing is placed on the model: what stays there costs every step, breaks pickling, goes along with
copies and makes compiled models compile again. What sees a call selects rows and copies them, and
does no arithmetic.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from geomon.capture.anatomy import Anatomy, Attention, Block, find_sizes
from geomon.capture.assemble import build_snapshot
from geomon.capture.attention import (
    SEVERAL_SOFTMAXES,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    is_second_softmax,
    local_shard,
    record_call,
    record_softmax,
    tensors_of,
)
from geomon.capture.calls import unwatch_calls, unwrap, watch_calls
from geomon.capture.first_pass import (
    BlockCall,
    SampledRows,
    StackPass,
    attention_key,
    find_padding_masks,
    spread_indices,
)
from geomon.capture.patches import run_eagerly, watch_attention, without_fast_path
from geomon.capture.qkv import copy_multihead_weights
from geomon.capture.sampling import MemoryLimit, RowSampler, copy_rows, move_width_last
from geomon.capture.snapshot import CAPTURED, Note, Snapshot

_FORCED = (
    "compiled code of the training ran eagerly while it was watched: dropout draws other random "
    "numbers there, and the memory may be more. A compiled function hides its modules: compile the "
    "model instead (model.compile() or torch.compile(model)), or measure by a probe"
)


class Window:
    """A context manager that keeps sampled rows of one forward pass.

    After the `with`, `snapshot()` gives what was seen. The first pass of each stack counts
    (`geomon.capture.first_pass.StackPass` has the rule); calls from other threads and recomputation
    under activation checkpointing are ignored. An error of geomon's own never ends the pass: one
    while a call is looked at becomes a note, and one in opening is raised by `snapshot()`.

    Args:
        anatomy: Anatomy of the model.
        views: Captured views that are wanted; only the calls that these need are looked at.
        rows: Number of rows of hidden states to keep; the same at every layer.
        seed: Seed of the private generator that samples rows. No global random state is touched.
        max_mb: Largest memory of what is kept, in millions of bytes: the number of rows is lowered
            for it, and attention that does not fit is left out. None for no limit.

    Attributes:
        seconds: Time taken from the training.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        views: set[str],
        *,
        rows: int,
        seed: int,
        max_mb: float | None = None,
    ) -> None:
        self._anatomy = anatomy
        self._sources = {CAPTURED[view] for view in views}
        self._wants_tokens = bool(views & {"token_ids", "positions"})
        self._sampler = RowSampler(rows, seed)
        blocks = sum(len(stack.blocks) for stack in anatomy.stacks)
        attends = bool(self._sources & {"attention", "projection"})
        self._memory = MemoryLimit(
            max_mb, self._sampler, layers=blocks + len(anatomy.stacks), blocks=blocks * attends
        )
        self._passes = [StackPass(stack, self._sampler) for stack in anatomy.stacks]
        self._thread = threading.get_ident()
        self._other_thread = False  # a block ran in another thread
        # What is done as the call of a module begins, and when it has returned, by its address.
        self._before: dict[int, list[Callable[..., None]]] = {}
        self._after: dict[int, list[Callable[..., None]]] = {}
        # Calls of blocks that are running, outermost first; None for one that does not count.
        self._running: list[tuple[StackPass, BlockCall | None]] = []
        self._failure: Exception | None = None  # in opening the window
        self._failures: list[str] = []  # in what sees the calls
        self._forced_eager = False  # whether compiled code of the training was run eagerly
        self._settled = True  # whether nothing is half open or half closed
        self.seconds = 0.0

    def __enter__(self) -> Self:
        began = time.perf_counter()
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
        self.seconds += time.perf_counter() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began = time.perf_counter()
        self._settled = False
        try:
            self.close()
        except BaseException:  # Ctrl-C in between
            self.close()
            raise
        self.seconds += time.perf_counter() - began

    @property
    def settled(self) -> bool:
        """Whether nothing has interrupted the opening or the closing of the window."""
        return self._settled

    def _open(self) -> None:
        self._choose_calls()
        if self._sources & {"attention", "projection"}:
            watch_attention.hold(self)
        without_fast_path.hold(self)
        run_eagerly.hold(self)
        watch_calls(self)

    def close(self) -> None:
        """Leave nothing behind; may be called more than once, and after an interruption."""
        unwatch_calls(self)
        for patch in (run_eagerly, without_fast_path, watch_attention):
            patch.release(self)
        self._settled = True

    def snapshot(self) -> Snapshot:
        """Build the snapshot: rows on the host, in float32, without those that are not finite.

        Raises:
            Exception: The window could not be opened; the error is the one that was met there.
        """
        if self._failure is not None:
            raise self._failure
        texts = [
            f"a hook failed, and what it looks at is missing: {failure}"
            for failure in dict.fromkeys(self._failures)
        ]
        texts += [_FORCED] * self._forced_eager
        return build_snapshot(
            self._passes,
            self._sources,
            other_thread=self._other_thread,
            notes=[*(Note(text, text) for text in texts), *self._memory.notes()],
        )

    def routes(self, stack: str, *, cross: bool = False) -> set[str]:
        """List the routes by which attention was seen: of "interface", "sdpa", "softmax".

        Args:
            stack: Name of the stack.
            cross: Whether the cross-attention of its blocks is meant.
        """
        return {
            block_call.routes[index]
            for stack_pass in self._passes
            if stack_pass.stack.name == stack
            for block_call in stack_pass.block_calls
            if (index := attention_key(stack_pass.stack.blocks[block_call.block], cross=cross))
            is not None
            and index in block_call.routes
        }

    # -- which calls are seen --------------------------------------------------------------------

    def _choose_calls(self) -> None:
        self._before.clear()
        self._after.clear()
        if self._wants_tokens:
            for table in self._anatomy.embeddings:
                self._see(self._before, table, self._on_embedding)
        for number, stack_pass in enumerate(self._passes):
            for module in stack_pass.stack.above:
                self._see(self._before, module, self._on_call_above, stack_pass, number)
            owner = stack_pass.stack.owner
            if owner is not None:
                self._see(self._before, owner, self._on_owner, stack_pass)
                self._see(self._after, owner, self._on_owner_left, stack_pass)
            for index, block in enumerate(stack_pass.stack.blocks):
                self._see(self._before, block.module, self._on_block, stack_pass, index)
                self._see(self._after, block.module, self._on_block_left, stack_pass, index)
                if self._sources & {"attention", "projection"}:
                    self._choose_calls_of_attention(block)

    def _choose_calls_of_attention(self, block: Block) -> None:
        for index, attention in enumerate(block.attentions):
            module = attention.module
            if len(block.attentions) > 1:  # else every call in the block belongs to the only one
                self._see(self._before, module, self._on_attending, index)
                self._see(self._after, module, self._on_attending, None)
            if "projection" not in self._sources:
                continue
            projections = attention.projections
            if projections.kind == "multihead":
                self._see(self._before, module, self._on_multihead, index, attention)
                continue
            on_query = (self._on_projected, index, attention, "query")
            self._see(self._after, projections.query, *on_query)
            if projections.kind != "fused":
                on_key = (self._on_projected, index, attention, "key")
                self._see(self._after, projections.key, *on_key)

    def _see(
        self,
        when: dict[int, list[Callable[..., None]]],
        module: nn.Module,
        action: Callable[..., None],
        *first: Any,
    ) -> None:
        when.setdefault(id(unwrap(module)), []).append(functools.partial(action, *first))

    def watches(self, module: nn.Module) -> bool:
        """Whether a module's calls are seen (see `geomon.capture.calls.CallObserver`).

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
            with self._guarded():
                action(module, args, kwargs)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Take a call that has returned.

        Args:
            module: The module.
            output: What it returned.
        """
        for action in () if self._ignored() else self._after.get(id(module), ()):
            with self._guarded():
                action(module, output)

    def needs_twin(self, module: nn.Module) -> bool:
        """Whether the compiled code of a module hides what this window is to see.

        Args:
            module: The module, without wrappers.
        """
        if all(stack_pass.over for stack_pass in self._passes):
            return False
        attends = bool(self._sources & {"attention", "projection"})
        inside = attends and bool(self._running) and self._running[-1][1] is not None
        return (inside or any(map(self.watches, module.modules()))) and not self._ignored()

    def on_failure(self, error: Exception) -> None:
        """Keep an error for the notes.

        Args:
            error: The error.
        """
        self._failures.append(f"{type(error).__name__}: {error}")

    def on_forced_eager(self) -> None:
        """Note that compiled code of the training is run eagerly."""
        self._forced_eager = True

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the body, and keep its error for the notes: no hook ends a run."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.on_failure(error)
        finally:
            self.seconds += time.perf_counter() - began

    def _ignored(self) -> bool:
        """Whether the present call is another thread's or a recomputation inside backward."""
        if torch._C._current_graph_task_id() != -1:
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
        if stack_pass.block_calls or stack_pass.over:
            return
        masks = find_padding_masks(module, args, kwargs)
        if number == 0 and len(self._passes) > 1:  # the call of a module around all stacks
            masks = {n: m for n, m in masks.items() if not n.startswith(("tgt", "decoder"))}
        stack_pass.masks += masks.items()

    def _on_embedding(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        ids = args[0] if args else None
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested:
            return
        running = [stack_pass for stack_pass in self._passes if stack_pass.running]
        kept = local_shard(ids).detach().clone()
        for stack_pass in running or self._passes:
            if not stack_pass.over and not (stack_pass.block_calls and stack_pass not in running):
                stack_pass.token_ids.append(kept)

    def _on_owner(self, stack_pass: StackPass, module: nn.Module, args: Any, kwargs: Any) -> None:
        if stack_pass.begin():
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
        if not stack_pass.block_calls:
            stack_pass.masks += find_padding_masks(module, args, kwargs).items()
        block_call = stack_pass.begin_call(index)
        self._running.append((stack_pass, block_call))
        if block_call is None:
            return
        if len(stack_pass.block_calls) > 1:
            if stack_pass.stack.entering:
                entered = first_tensor([*args, *kwargs.values()])
                before = stack_pass.block_calls[-2]
                before.hidden = (
                    None if entered is None else self._sample_hidden(stack_pass, entered, module)
                )
        else:
            stack_pass.mode = "train" if module.training else "eval"
            entered = first_tensor([*args, *kwargs.values()])
            if entered is not None:
                stack_pass.entered = self._sample_hidden(stack_pass, entered, module)

    def _on_block_left(
        self, stack_pass: StackPass, index: int, module: nn.Module, output: Any
    ) -> None:
        block_call = self._end_call(stack_pass, index)
        values = output.values() if isinstance(output, Mapping) else output
        hidden = first_tensor(values)
        if block_call is not None and hidden is not None and not stack_pass.stack.entering:
            block_call.hidden = self._sample_hidden(stack_pass, hidden, module)

    def _end_call(self, stack_pass: StackPass, index: int) -> BlockCall | None:
        """Remove a block's call from those that run, and calls inside that an exception ended."""
        while self._running:
            owner, block_call = self._running.pop()
            if owner is stack_pass and (block_call is None or block_call.block == index):
                return block_call
        return None

    def _sample_hidden(
        self, stack_pass: StackPass, hidden: Tensor, block: nn.Module
    ) -> SampledRows | None:
        if hidden.is_nested:
            return None
        stack_pass.sharded = stack_pass.sharded or hasattr(hidden, "to_local")
        rows = move_width_last(local_shard(hidden), block)
        shape = tuple(rows.shape[:-1])
        if not stack_pass.shape:
            self._memory.fit_rows(rows.shape[-1])
            stack_pass.set_shape(shape, rows.dtype)
        indices = stack_pass.row_indices(shape)
        return SampledRows(copy_rows(rows, indices), indices, shape)

    # -- attention -------------------------------------------------------------------------------

    def _current_call(self) -> tuple[StackPass, BlockCall, Block] | None:
        """Return the call of the innermost block that is running, if that call counts."""
        if not self._running or self._running[-1][1] is None or self._ignored():
            return None
        stack_pass, block_call = self._running[-1]
        assert block_call is not None
        return stack_pass, block_call, stack_pass.stack.blocks[block_call.block]

    def _on_attending(self, index: int | None, module: nn.Module, *call: Any) -> None:
        if self._running and self._running[-1][1] is not None:
            self._running[-1][1].running_attention = index

    def on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        """Record the sampled queries of a call (see `geomon.capture.patches.AttentionObserver`).

        Args:
            route: "interface" or "sdpa".
            module: The module that calls, or None.
            query: Queries of the call.
            key: Keys of the call.
            mask: Mask of the call.
            options: All other arguments of the call by name.
        """
        current = self._current_call()
        if current is None:
            return
        _, block_call, block = current
        index = _running_index(block, block_call, module)
        if isinstance(block_call.attention_calls.get(index), AttentionCall):
            return  # the first call counts; the call of a softmax is replaced
        with self._guarded(), torch.no_grad():
            try:
                call = record_call(self._sampler, route, module, query, key, mask, options)
                self._keep_call(block_call, index, route, call)
            except NotUnderstoodError as error:
                block_call.refused.setdefault(index, str(error))

    def on_softmax(self, scores: Any, dim: Any) -> None:
        """Record the sampled rows of a softmax of scores (see `AttentionObserver`).

        Args:
            scores: Input of the softmax.
            dim: The dimension that the softmax runs over.
        """
        current = self._current_call()
        if current is None or not isinstance(scores, Tensor) or not scores.is_floating_point():
            return
        stack_pass, block_call, block = current
        index = _running_index(block, block_call, None)
        recorded = block_call.attention_calls.get(index)
        refused = index in block_call.refused
        if isinstance(recorded, AttentionCall) or refused or not stack_pass.shape:
            return
        known = index < len(block.attentions)
        if recorded is not None:
            if known and is_second_softmax(recorded, scores, dim):
                block_call.refuse(index, SEVERAL_SOFTMAXES)
            return
        with self._guarded(), torch.no_grad():
            heads = None
            if known:
                attention = block.attentions[index]
                heads = find_sizes(attention.projections, [attention.module]).heads
            shape = stack_pass.shape_at(block_call)
            call = record_softmax(self._sampler, scores, dim, shape, heads)
            if call is not None:
                self._keep_call(block_call, index, "softmax", call)

    def _keep_call(
        self, block_call: BlockCall, index: int, route: str, call: AttentionCall | SoftmaxCall
    ) -> None:
        reason = self._memory.why_not(tensors_of(call))
        if reason is None:
            block_call.attention_calls[index] = call
            block_call.routes[index] = route
        else:
            block_call.refuse(index, reason)

    # -- projections -----------------------------------------------------------------------------

    def _on_projected(
        self,
        index: int,
        attention: Attention,
        which: str,
        module: nn.Module,
        output: Any,
    ) -> None:
        current = self._current_call()
        output = first_tensor(output)
        if current is None or output is None or output.is_nested:
            return
        stack_pass, block_call, _ = current
        if (index, which) in block_call.projected:
            return
        output = local_shard(output)
        self._sample_projected(stack_pass, block_call, index, attention, which, output)
        shape = stack_pass.as_batch(tuple(output.shape[:-1]))
        if attention.projections.kind == "fused" and shape is not None:
            sequences, places = self._sampler.sample_queries(*shape)
            flat = (sequences[:, None] * shape[1] + places).flatten()
            block_call.samples[index] = copy_rows(output, flat[spread_indices(len(flat))])

    def _on_multihead(
        self, index: int, attention: Attention, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        current = self._current_call()
        if current is None:
            return
        stack_pass, block_call, _ = current
        given = dict(zip(("query", "key"), args, strict=False)) | kwargs
        for which in ("query", "key"):
            values = given.get(which)
            plain = isinstance(values, Tensor) and not values.is_nested
            if plain and (index, which) not in block_call.projected:
                values = local_shard(values)
                self._sample_projected(stack_pass, block_call, index, attention, which, values)
        weights = copy_multihead_weights(module)
        if weights is not None:
            block_call.weights.setdefault(index, weights)

    def _sample_projected(
        self,
        stack_pass: StackPass,
        block_call: BlockCall,
        index: int,
        attention: Attention,
        which: str,
        values: Tensor,
    ) -> None:
        shape = tuple(values.shape[:-1])
        role = "key" if attention.cross and which == "key" else ""
        indices = stack_pass.row_indices(shape, role)
        rows = SampledRows(copy_rows(values, indices), indices, shape)
        block_call.projected[index, which] = rows


def _running_index(block: Block, block_call: BlockCall, module: Any) -> int:
    """Return the index of the block's attention that is calling."""
    for index, attention in enumerate(block.attentions):
        if attention.module is module:
            return index
    return block_call.running_attention or 0


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor.

    Args:
        values: Arguments of a call, or the output of a module: a tensor, or several values.
    """
    if isinstance(values, Tensor):
        return values
    for value in values or ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None
