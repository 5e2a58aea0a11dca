"""The window: hooks in, sampled rows kept during one forward pass, hooks out.

Nothing stays on the model between windows: hooks that stay cost every step, break pickling and make
compiled models recompile. A hook selects rows and copies them, and does no arithmetic.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from geomon.capture.anatomy.blocks import Anatomy, Attention, Block
from geomon.capture.anatomy.projections import find_sizes, multihead_weights
from geomon.capture.assemble import Drawn, assembled, drawn, place_in
from geomon.capture.attention import (
    SEVERAL,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    again,
    local,
    softened,
    thinned,
)
from geomon.capture.first_pass import Kept, Pass, Visit, sample_places
from geomon.capture.masks import padding_masks
from geomon.capture.patches import listening, run_eagerly, without_fast_path
from geomon.capture.room import Room
from geomon.capture.sampling import RowDraw, select, width_last
from geomon.capture.snapshot import CAPTURED, Snapshot
from geomon.metrics.cautions import Note


class Window:
    """A context manager that keeps sampled rows of one forward pass.

    Args:
        anatomy: Where the blocks are.
        views: Captured views that are wanted; hooks are placed for these only.
        rows: Rows of hidden states to keep; the same at every layer.
        seed: Seeds the private generator that draws them. No global random state is touched.
        max_mb: Largest memory of what is kept, in millions of bytes: rows are thinned for it, and
            attention that does not fit is left out. None for no limit.

    After the `with`, `snapshot()` gives what was seen. The first pass of each stack counts
    (`geomon.capture.first_pass.Pass` has the rule); calls from other threads and recomputation under activation
    checkpointing are ignored.
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
        self._draw = RowDraw(rows, seed)
        blocks = sum(len(stack.blocks) for stack in anatomy.stacks)
        attends = bool(self._sources & {"attention", "projection"})
        self._room = Room(
            max_mb, self._draw, layers=blocks + len(anatomy.stacks), blocks=blocks * attends
        )
        self._passes = [Pass(stack, self._draw) for stack in anatomy.stacks]
        self._thread = threading.get_ident()
        self._elsewhere = False  # a block ran in another thread
        self._exit = ExitStack()
        self._running: list[tuple[Pass, Visit | None]] = []  # the calls of blocks, outermost first
        self._failures: list[str] = []  # of hooks
        self.seconds = 0.0  # spent in hooks, and in placing and removing them

    def __enter__(self) -> Self:
        began = time.perf_counter()
        with ExitStack() as stack:  # undone whatever happens while it is built
            self._place_hooks(stack)
            if self._sources & {"attention", "projection"}:
                stack.enter_context(listening(self))
            stack.enter_context(without_fast_path())
            stack.enter_context(run_eagerly())
            self._exit = stack.pop_all()
        self.seconds += time.perf_counter() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began = time.perf_counter()
        self._exit.close()
        self.seconds += time.perf_counter() - began

    def snapshot(self) -> Snapshot:
        """What was seen, on the host, in float32, without rows that are not finite."""
        snapshot = assembled(self._passes, self._sources, elsewhere=self._elsewhere)
        for failure in dict.fromkeys(self._failures):
            text = f"a hook failed, and what it looks at is missing: {failure}"
            snapshot.notes.append(Note(text, text))
        snapshot.notes += self._room.notes()
        return snapshot

    def drawn(self, stack: str, index: int) -> Drawn:
        """Which rows of the model's own tensors stand in a layer of the snapshot.

        Args:
            stack: Of the layer.
            index: Of the layer.
        """
        return drawn(self._passes, stack, index)

    def routes(self, stack: str, *, cross: bool = False) -> set[str]:
        """Where the attention of a stack was seen: of "interface", "sdpa", "softmax".

        Args:
            stack: Its name.
            cross: Whether its cross-attention is meant.
        """
        return {
            visit.routes[place]
            for found in self._passes
            if found.stack.name == stack
            for visit in found.visits
            if (place := place_in(found.stack.blocks[visit.block], cross=cross)) is not None
            and place in visit.routes
        }

    # -- placing hooks ---------------------------------------------------------------------------

    def _place_hooks(self, stack: ExitStack) -> None:
        def hold(handle: Any) -> None:
            stack.callback(handle.remove)

        if self._wants_tokens:
            for table in self._anatomy.embeddings:
                hold(table.register_forward_pre_hook(self._hook(self._on_embedding)))
        for number, found in enumerate(self._passes):
            for module in found.stack.above:
                hook = self._hook(self._on_call_above, found, number)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
            owner = found.stack.owner
            if owner is not None:
                hold(owner.register_forward_pre_hook(self._hook(self._on_owner, found)))
                hold(owner.register_forward_hook(self._hook(self._on_owner_left, found)))
            for place, block in enumerate(found.stack.blocks):
                hook = self._hook(self._on_block, found, place)
                hold(block.module.register_forward_pre_hook(hook, with_kwargs=True))
                hold(block.module.register_forward_hook(self._hook(self._on_left, found, place)))
                if self._sources & {"attention", "projection"}:
                    self._place_attention_hooks(hold, block)

    def _place_attention_hooks(self, hold: Callable[[Any], None], block: Block) -> None:
        for place, attention in enumerate(block.attentions):
            module = attention.module
            if len(block.attentions) > 1:  # else every call in the block is its own
                hold(module.register_forward_pre_hook(self._hook(self._on_attending, place)))
                hold(module.register_forward_hook(self._hook(self._on_attending, None)))
            if "projection" not in self._sources:
                continue
            projections = attention.projections
            if projections.kind == "multihead":
                hook = self._hook(self._on_multihead, place, attention)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
                continue
            hook = self._hook(self._on_projected, place, attention, "query")
            hold(projections.query.register_forward_hook(hook))
            if projections.kind != "fused":
                hook = self._hook(self._on_projected, place, attention, "key")
                hold(projections.key.register_forward_hook(hook))

    def _hook(self, action: Callable[..., None], *before: Any) -> "_Hook":
        """A hook that ignores calls which are not of the pass that is watched."""

        def guarded(*call: Any) -> None:
            if not self._ignored():
                with self._guarded():
                    action(*before, *call)

        return _Hook(guarded)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time what is done, and let no error of it end the run: it is said in the snapshot."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failures.append(f"{type(error).__name__}: {error}")
        finally:
            self.seconds += time.perf_counter() - began

    def _ignored(self) -> bool:
        """Whether the present call is another thread's or a recomputation inside backward."""
        if torch._C._current_graph_task_id() != -1:
            return True
        if threading.get_ident() != self._thread:
            self._elsewhere = True
            return True
        return False

    # -- around the blocks -----------------------------------------------------------------------

    def _on_call_above(
        self, found: Pass, number: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if found.visits or found.over:
            return
        masks = padding_masks(module, args, kwargs)
        if number == 0 and len(self._passes) > 1:  # of a call that is about all stacks
            masks = {n: m for n, m in masks.items() if not n.startswith(("tgt", "decoder"))}
        found.masks += masks.items()

    def _on_embedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0] if args else None
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested:
            return
        running = [found for found in self._passes if found.running]
        kept = local(ids).detach().clone()
        for found in running or self._passes:
            if not found.over and not (found.visits and found not in running):
                found.token_ids.append(kept)

    def _on_owner(self, found: Pass, module: nn.Module, args: Any) -> None:
        if found.enter():
            self._running.clear()

    def _on_owner_left(self, found: Pass, module: nn.Module, args: Any, output: Any) -> None:
        found.leave()

    # -- blocks ----------------------------------------------------------------------------------

    def _on_block(
        self, found: Pass, place: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if not found.visits:
            found.masks += padding_masks(module, args, kwargs).items()
        visit = found.visit(place)
        self._running.append((found, visit))
        if visit is None:
            return
        if len(found.visits) > 1:
            if found.stack.entering:
                entered = first_tensor([*args, *kwargs.values()])
                before = found.visits[-2]
                before.hidden = None if entered is None else self._kept(found, entered, module)
        else:
            found.mode = "train" if module.training else "eval"
            entered = first_tensor([*args, *kwargs.values()])
            if entered is not None:
                found.entered = self._kept(found, entered, module)

    def _on_left(self, found: Pass, place: int, module: nn.Module, args: Any, output: Any) -> None:
        visit = self._close(found, place)
        values = output.values() if isinstance(output, Mapping) else output
        hidden = first_tensor(values)
        if visit is not None and hidden is not None and not found.stack.entering:
            visit.hidden = self._kept(found, hidden, module)

    def _close(self, found: Pass, place: int) -> Visit | None:
        """Take the block's call off those that run, and any inside that an exception ended."""
        while self._running:
            owner, visit = self._running.pop()
            if owner is found and (visit is None or visit.block == place):
                return visit
        return None

    def _kept(self, found: Pass, hidden: Tensor, block: nn.Module) -> Kept | None:
        if hidden.is_nested:
            return None
        found.local = found.local or hasattr(hidden, "to_local")
        rows = width_last(local(hidden), block)
        if not found.shape:
            self._room.limit(rows.shape[-1])
            found.begin_rows(tuple(rows.shape[:-1]), rows.dtype)
        chosen = found.rows(tuple(rows.shape[:-1]))
        return Kept(select(rows, chosen), chosen, tuple(rows.shape[:-1]))

    # -- attention -------------------------------------------------------------------------------

    def _current(self) -> tuple[Pass, Visit, Block] | None:
        """The innermost block that is being run, where its call counts."""
        if not self._running or self._running[-1][1] is None or self._ignored():
            return None
        found, visit = self._running[-1]
        assert visit is not None
        return found, visit, found.stack.blocks[visit.block]

    def _on_attending(self, place: int | None, module: nn.Module, *call: Any) -> None:
        if self._running and self._running[-1][1] is not None:
            self._running[-1][1].attending = place

    def on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        """Keep the sampled queries of a call (of `geomon.capture.patches.Listener`)."""
        current = self._current()
        if current is None:
            return
        _, visit, block = current
        place = _place(block, visit, module)
        if isinstance(visit.calls.get(place), AttentionCall):
            return  # a softmax that was taken for one gives way
        with self._guarded(), torch.no_grad():
            try:
                call = thinned(self._draw, route, module, query, key, mask, options)
                self._keep_call(visit, place, route, call)
            except NotUnderstoodError as error:
                visit.refused.setdefault(place, str(error))

    def on_softmax(self, scores: Any, dim: Any) -> None:
        """Keep the sampled rows of scores that are softened by hand (of `Listener`)."""
        current = self._current()
        if current is None or not isinstance(scores, Tensor) or not scores.is_floating_point():
            return
        found, visit, block = current
        place = _place(block, visit, None)
        before = visit.calls.get(place)
        if isinstance(before, AttentionCall) or place in visit.refused or not found.shape:
            return
        known = place < len(block.attentions)
        if before is not None:
            if known and again(before, scores, dim):
                visit.refuse(place, SEVERAL)
            return
        with self._guarded(), torch.no_grad():
            heads = None
            if known:
                attention = block.attentions[place]
                heads = find_sizes(attention.projections, [attention.module]).heads
            call = softened(self._draw, scores, dim, found.shape_at(visit), heads)
            if call is not None:
                self._keep_call(visit, place, "softmax", call)

    def _keep_call(
        self, visit: Visit, place: int, route: str, call: AttentionCall | SoftmaxCall
    ) -> None:
        refusal = self._room.refusal(call)
        if refusal is None:
            visit.calls[place] = call
            visit.routes[place] = route
        else:
            visit.refuse(place, refusal)

    # -- projections -----------------------------------------------------------------------------

    def _on_projected(
        self,
        place: int,
        attention: Attention,
        which: str,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        current = self._current()
        output = first_tensor(output)
        if current is None or output is None or output.is_nested:
            return
        found, visit, _ = current
        if (place, which) in visit.projected:
            return
        output = local(output)
        self._keep_rows(found, visit, place, attention, which, output)
        shape = found.as_batch(tuple(output.shape[:-1]))
        if attention.projections.kind == "fused" and shape is not None:
            sequences, places = self._draw.queries(*shape)
            flat = (sequences[:, None] * shape[1] + places).flatten()
            visit.samples[place] = select(output, flat[sample_places(len(flat))])

    def _on_multihead(
        self, place: int, attention: Attention, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        current = self._current()
        if current is None:
            return
        found, visit, _ = current
        given = dict(zip(("query", "key"), args, strict=False)) | kwargs
        for which in ("query", "key"):
            values = given.get(which)
            plain = isinstance(values, Tensor) and not values.is_nested
            if plain and (place, which) not in visit.projected:
                self._keep_rows(found, visit, place, attention, which, local(values))
        weights = multihead_weights(module)
        if weights is not None:
            visit.weights.setdefault(place, weights)

    def _keep_rows(
        self,
        found: Pass,
        visit: Visit,
        place: int,
        attention: Attention,
        which: str,
        values: Tensor,
    ) -> None:
        shape = tuple(values.shape[:-1])
        rows = found.rows(shape, "key" if attention.cross and which == "key" else "")
        visit.projected[place, which] = Kept(select(values, rows), rows, shape)


class _Hook:
    """What is placed on a module; in a copy or a pickle of the model it does nothing."""

    def __init__(self, action: Callable[..., None]) -> None:
        self._action = action

    def __call__(self, *call: Any) -> None:
        self._action(*call)

    def __reduce__(self) -> tuple[Callable[[Callable[..., None]], "_Hook"], tuple[Any, ...]]:
        return _Hook, (_nothing,)


def _nothing(*call: Any) -> None:
    return


def _place(block: Block, visit: Visit, module: Any) -> int:
    """Which of the block's attentions is calling."""
    for place, attention in enumerate(block.attentions):
        if attention.module is module:
            return place
    return visit.attending or 0


def first_tensor(values: Any) -> Tensor | None:
    """The first floating-point tensor of a call's arguments or of a module's output."""
    if isinstance(values, Tensor):
        return values
    for value in values or ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None
