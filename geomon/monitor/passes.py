"""Forward passes that are read: the training's own, and extra ones on the inputs of a probe."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from geomon.capture import (
    HOST,
    Snapshot,
    TensorPlace,
    Window,
    derive_seed,
    explain_missing,
    extra_pass,
    extra_passes,
)
from geomon.distributed import RankGroup
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.held_out import HeldOut
from geomon.monitor.model_blocks import ModelBlocks
from geomon.monitor.options import MonitorOptions
from geomon.monitor.planner import Account
from geomon.monitor.probe_loss import ProbeLoss
from geomon.note import Note
from geomon.note_kinds import NoteKind

_EXTRA = (
    "an extra pass of the model was made: if the model changes anything outside of its modules (a "
    "global list, a generator, a counter), it stays changed"
)


class Passes:
    """Opens windows on the passes of a model, and makes extra passes.

    Args:
        blocks: The blocks of the watched model.
        options: All options of the monitor, checked.
        views: Names of the views that metrics read.
        group: The ranks.
        device: Device that measures the layers.
        in_background: Whether a thread measures them.
        account: Account of the time that windows and extra passes take.
        loss: Computes the loss of extra passes, or None.

    Attributes:
        blocks: The argument.
    """

    def __init__(
        self,
        blocks: ModelBlocks,
        options: MonitorOptions,
        *,
        views: Collection[str],
        group: RankGroup,
        device: MeasuringDevice,
        in_background: bool,
        account: Account,
        loss: ProbeLoss | None,
    ) -> None:
        self.blocks = blocks
        self._options = options
        self._group = group
        self._views = set(views)
        self._device = device
        self._in_background = in_background
        self._account = account
        self._loss = loss
        self._passes_before = extra_passes()  # of this process, before the last window
        self._open: tuple[Window, int] | None = None  # the window that is open, and its step
        self._shard = TensorPlace(group.own.shard, group.own.shards)
        self._is_verified = False  # whether the first pass was looked at for missing views

    @property
    def what_stays_changed(self) -> Note | None:
        """Note on a step that took an extra pass: by a probe, or in addition to compiled code."""
        return Note(NoteKind.EXTRA_PASS, _EXTRA) if extra_passes() > self._passes_before else None

    @property
    def step(self) -> int | None:
        """Step of the window opened last, or None once it is closed for good."""
        return None if self._open is None else self._open[1]

    def open(self, step: int) -> Window:
        """Make a window for the training's own forward pass, to be entered around it.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        rows = self._group.rows_of(self._rows())
        return self._window(step, (step, *self._place()), rows=rows)

    def open_for_check(self, step: int, views: Collection[str], rows: int) -> Window:
        """Make a smaller window for the training's own forward pass on this rank only.

        Compiled code that cannot be copied stays compiled, and the check sees nothing of it. Other
        ranks make no check, so an eager pass here could wait for them forever.
        """
        return self._window(step, (step,), rows=rows, views=views)

    def snapshots(self, window: Window) -> list[Snapshot]:
        """Return what a window has seen of each pass, with its rows where they stay.

        Rows for other ranks are moved to the host. If a thread measures them, it waits for the
        copies (`ReadingJob`).

        Args:
            window: A window whose pass is over.
        """
        device = HOST if self._group.connected else self._device.device
        try:
            return window.snapshots(device, wait=not self._in_background)
        finally:
            window.release()

    def missing_views(self, snapshot: Snapshot) -> str | None:
        """Say what the first pass with a snapshot lacks although it should have it, or None.

        In strict mode, which fails for it, the next pass counts as the first one again.
        """
        if self._is_verified or snapshot.is_empty:
            return None
        missing = explain_missing(snapshot, self._views)
        self._is_verified = missing is None or not self._options["strict"]
        return missing

    def pause(self) -> None:
        """Let the open window see nothing for a while, and leave nothing on the model.

        Rows that it has already seen are measured when its `with` ends, unless it sees more after
        `proceed`.
        """
        if self._open is not None:
            with self._account.charge():
                self._open[0].close()

    def proceed(self) -> None:
        """Let the window that `pause` stopped see calls again."""
        if self._open is not None:
            with self._account.charge():
                self._open[0].__enter__()

    def sweep(self, step: int | None) -> None:
        """Close a window that Ctrl-C left open, half open or half closed.

        Args:
            step: The step whose window may still be open, or None.
        """
        if self._open is None:
            return
        window, opened_at = self._open
        if opened_at != step or not window.settled:
            window.close()
            self._open = None

    def run(self, inputs: Any, step: int) -> list[Snapshot]:
        """Make an extra pass over the inputs of a probe, or over each of its held-out batches.

        Equal inputs give equal rows, so that readings differ only by the weights.

        Args:
            inputs: Inputs of the model, or held-out batches.
            step: Number of optimizer updates already in the weights.
        """
        if isinstance(inputs, HeldOut):
            return self._run_held_out(inputs, step)
        return self._run(inputs, step, (), self._rows(), loss=self._loss)

    def _run(
        self,
        inputs: Any,
        step: int,
        place: tuple[object, ...],
        rows: int,
        *,
        around: Sequence[nn.Module] | None = None,
        windows: int = 1,
        loss: ProbeLoss | None = None,
    ) -> list[Snapshot]:
        """Make one extra pass; in a pipeline, one over all micro-batches."""
        window = self._window(step, place, rows=rows, windows=windows)
        made = extra_pass(
            self.blocks.model.root, inputs, window, around=around, loss=loss,
            given=self.blocks.model.given,
        )  # fmt: skip
        if loss is not None:  # the training asked for this validation, so its time is its own
            self._account.left_out += max(0.0, made.seconds - window.seconds)
        first, *others = self.snapshots(window)
        info = replace(first.info, loss=made.loss)
        if made.left_out:
            text = "the model gets all but {left_out}, which its forward() does not take"
            note = Note(NoteKind.PARTS_OF_BATCH, text, numbers={"left_out": made.left_out})
            info = replace(info, notes=[*info.notes, note])
        return [replace(first, info=info), *others]

    def _run_held_out(self, held_out: HeldOut, step: int) -> list[Snapshot]:
        """Make an extra pass over each held-out batch, taking the batches the first time."""
        model = self.blocks.model.root
        around = (model, *self.blocks.modules_around())
        held_out.settle(model, self._group, self._rows())
        shares = held_out.shares(self._group.rows_of(self._rows()))
        passes = []
        for number, (batch, rows) in enumerate(zip(held_out.batches, shares, strict=True)):
            place = (*self._place(), "batch", number) if number else self._place()
            passes += self._run(
                batch, step, place, rows, around=around, windows=len(shares), loss=self._loss
            )
        return passes

    def _window(
        self,
        step: int,
        place: tuple[object, ...],
        *,
        rows: int,
        windows: int = 1,
        views: Collection[str] | None = None,
    ) -> Window:
        self.blocks.renew()
        self._passes_before = extra_passes()
        most = self._options["max_capture_mb"]
        window = Window(
            self.blocks.anatomy, set(views or self._views), rows=rows,
            seed=derive_seed(self._options["seed"], *place),
            max_mb=None if most is None else most / windows,
            extra_layers=self._options["extra_layers"], place=self._shard,
            micro_batches=self.blocks.model.micro_batches,
            keep_inputs=self._options["on_alert"] is not None, charge=self._account.charge,
            may_run_eagerly=views is None, plans=self.blocks.plans,
        )  # fmt: skip
        self._open = window, step
        return window

    def _place(self) -> tuple[int, ...]:
        """Return what this rank's sampling depends on; the first samples as one process does."""
        return (self._group.data_rank,) if self._group.data_rank else ()

    def _rows(self) -> int:
        """Number of rows of hidden states that a reading keeps, over all splits and ranks."""
        return self._options["tokens"] * self._options["splits"]


__all__ = ["Passes"]
