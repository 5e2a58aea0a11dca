"""Checkpoints of a run, and its end after some minutes, to be resumed."""

import time
from pathlib import Path
from typing import Any

import lightning as L


class Slice(L.Callback):
    """Save a checkpoint every so many steps, at the last step, and when the time is over.

    All checkpoints are of the middle of the epoch: Lightning's own at the end of a fit would say
    that the epoch is complete, and no step would follow.

    Args:
        checkpoint: Its file, the same each time.
        every: Steps between checkpoints.
        deadline: When to end, in seconds of `time.monotonic`; None for the last step.
    """

    def __init__(self, checkpoint: Path, *, every: int, deadline: float | None = None) -> None:
        self._checkpoint, self._every, self._deadline = checkpoint, every, deadline
        self._began = time.monotonic()
        self.first = self.last = 0  # steps
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note where the slice begins."""
        self.first = self.last = trainer.global_step
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save, and stop, if it is time."""
        self.last = trainer.global_step
        now = time.monotonic()
        self.seconds = now - self._began
        over = self._deadline is not None and now >= self._deadline
        if self._deadline is not None and trainer.world_size > 1:
            over = trainer.strategy.reduce_boolean_decision(over, all=False)
        if over or self.last % self._every == 0 or self.last == trainer.max_steps:
            trainer.save_checkpoint(self._checkpoint)
        if over:
            trainer.should_stop = True
