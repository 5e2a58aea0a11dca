"""Window: keep sampled rows during one forward pass.

Nothing is attached to the model: hooks would cost every step, break pickling, travel with copies
and trigger recompilation. Observers select rows and copy them; their only arithmetic is the largest
logit, which sampling could miss (`capture.attending.max_logit`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from geomon.capture import private
from geomon.capture.anatomy import Anatomy
from geomon.capture.assemble import build_snapshot, matrix_layer
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.first_pass import StackPass, attention_key
from geomon.capture.guard import Guard
from geomon.capture.modes import without_modes
from geomon.capture.observer import PassObserver
from geomon.capture.pass_recorder import PassRecorder
from geomon.capture.shards import WHOLE, TensorPlace
from geomon.capture.snapshot import EMBEDDING, HOST, UNEMBEDDING, Snapshot
from geomon.capture.tap import Plans
from geomon.capture.tracker import Tracker
from geomon.capture.wanted import Wanted
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
        plans: Plans of blocks that earlier windows on the same anatomy made; this window adds
            to them. Defaults to None, for none.

    Attributes:
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
        self._anatomy, self._wanted = anatomy, Wanted(views, extra_layers)
        self._tracker = Tracker(
            anatomy, self._wanted.memory_limit(anatomy, max_mb), rows=rows, seed=seed,
            place=place, micro_batches=micro_batches,
        )  # fmt: skip
        self._guard = Guard(charge)
        self._recorder = PassRecorder(
            anatomy, self._wanted, self._tracker, place=place,
            plans=Plans() if plans is None else plans,
        )  # fmt: skip
        self._observer = PassObserver(
            anatomy, self._wanted, self._tracker, self._recorder, self._guard,
            may_run_eagerly=may_run_eagerly,
        )  # fmt: skip
        self._failure: Exception | None = None  # in opening the window
        self._keeps_inputs = keep_inputs
        self.inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self.settled = True

    @property
    def seconds(self) -> float:
        """Time taken from the training."""
        return self._guard.seconds

    def __enter__(self) -> Self:
        with self._guard.timed():
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
        with self._guard.timed():
            self.settled = False
            try:
                self.close()
            except BaseException:  # Ctrl-C in between
                self.close()
                raise
            finally:
                self._recorder.operators.end()

    def _open(self) -> None:
        self._observer.open()
        for number, stack in enumerate(self._anatomy.stacks if self._keeps_inputs else ()):
            for module in stack.above:
                self._recorder.calls.add(module, partial(self._keep_inputs, number), None)

    def _keep_inputs(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep the arguments of the model's first call."""
        if self.inputs is None and not self._tracker.is_inferring(number):
            self.inputs = tuple(args), dict(kwargs)

    def close(self) -> None:
        """Remove everything that the window placed; may be called more than once."""
        self._observer.close()
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
        matrices, sampler = self._found_matrices(), self._tracker.memory.of().sampler
        return build_snapshot(
            passes,
            self._wanted.views,
            matrices=(matrix_layer(name, m, sampler) for name, m in matrices.items()),
            final_norm=self._wanted.final_norm,
            other_thread=self._tracker.other_thread,
            no_rows=self._tracker.no_rows,
            notes=[
                *self._notes(matrices, ran=bool(passes)),
                *self._tracker.memory.of().notes(),
            ],
            device=device,
            wait=wait,
        )

    def _notes(self, matrices: Mapping[str, nn.Module | None], *, ran: bool) -> Iterator[Note]:
        """Say what failed, what was not seen, and what is not as it seems."""
        for failure in dict.fromkeys(self._guard.errors):
            text = f"watching a call failed, and what it would have shown is missing: {failure}"
            yield Note(NoteKind.WATCHING_FAILED, text, about=failure)
        for name, lost in private.MISSING.items():
            text = f"torch {torch.__version__} lacks {name}: {lost}"
            yield Note(NoteKind.TORCH_LACKS, text, about=name)
        if self._observer.forced_eager:
            yield Note(NoteKind.RAN_EAGERLY, _FORCED)
        for name, module in matrices.items():
            if any(module is adapted for adapted in self._anatomy.adapted):
                yield Note(NoteKind.ADAPTED_MATRIX, f"{name}: {_ADAPTED}", about=name)
        # Attention after a stage's last block may belong to another part of the model.
        if self._recorder.attention.attends_outside and not self._tracker.has_attention and ran:
            yield Note(NoteKind.OUTSIDE_BLOCKS, _OUTSIDE)
        for family in self._anatomy.left_out:
            if family.is_large:
                text = _LEFT_OUT.format(
                    count=family.count, pattern=family.pattern, reason=family.reason
                )
                yield Note(NoteKind.BLOCKS_LEFT_OUT, text, about=family.pattern)

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
        wanted = (
            name for name in found if name in self._wanted.extra_layers and not elsewhere[name]
        )
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
