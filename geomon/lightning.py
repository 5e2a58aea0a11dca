"""GeometryMonitor, the Lightning callback: Lightning's events, translated into `monitor(step)`."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import nn

from geomon.metrics.table import METRICS, Metric, check_metrics
from geomon.monitor.monitor import Monitor
from geomon.monitor.options import check_counts
from geomon.monitor.schedule import Schedule, check_schedule, log_spaced
from geomon.record.reading import Reading
from geomon.record.sinks import Sink
from geomon.record.tags import layout
from geomon.show.pictures import Pictures

# What a callback holds of the training that is going on, and no copy of it takes along; the last
# two are Lightning's, methods of the module.
_OF_A_TRAINING = {"_monitor", "_window", "log", "log_dict"}


class GeometryMonitor(L.Callback):
    """Watch the geometry of a model's representations while Lightning trains it.

    `L.Trainer(callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to every logger of
    the trainer, pictures to those that show pictures, and every reading to `readings.jsonl` in the
    first logger's folder.

    Without `probe` the training forward itself is watched (dropout on, no extra pass), between
    `on_train_batch_start` and `on_before_backward`. With `probe` an extra pass on fixed inputs runs
    before the batch, and once more at the end of training: comparable from step to step.

    Of the batches of one step (accumulated gradients) the first is read. Where a batch makes two
    steps (two optimizers) and passes over one that is due, the batch that comes next is read.

    Args:
        metrics: From a name to a function of views.
        schedule: From a step to whether a reading is due; step 0 and the last always are.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches.
        probe: Fixed inputs for the LightningModule's `forward`, or a function of it.
        directory: Where `readings.jsonl` is written; None takes the first logger's folder.
        sinks: Where readings go besides the trainer's loggers.
        budget: Largest share of the training's time that geomon may take; None for no limit.
        gather: With several ranks, whether a reading is that of the rows of all.
        background: Whether rows are measured in a thread while the training goes on; None does so
            on an accelerator.
        max_capture_mb: Largest memory of what one reading keeps of a pass; None for no limit.
        seed: Of the private generator that draws rows.
        strict: Raise what goes wrong in a reading, instead of a warning and a missing value.
        blocks: Overrides the search for the blocks.
        pictures: Whether loggers that show pictures get the profile over depth and the matrices of
            heads by layer, each time the step has doubled.

    Raises:
        ValueError: An unknown view, a schedule that never fires, a number out of range. When
            training starts: no blocks in the model, a directory that cannot be written.
    """

    _monitor: Monitor | None = None
    _window: AbstractContextManager[None] | None = None
    _step = 0  # of the batch that is looked at
    _last = math.inf  # the last step, where its number is known

    def __init__(
        self,
        *,
        metrics: Mapping[str, Metric] = METRICS,
        schedule: Schedule | None = None,
        tokens: int = 4096,
        batches: int = 2,
        probe: Any = None,
        directory: str | os.PathLike[str] | None = None,
        sinks: Sequence[Sink] = (),
        budget: float | None = None,
        gather: bool = True,
        background: bool | None = None,
        max_capture_mb: float | None = None,
        seed: int = 0,
        strict: bool = False,
        blocks: str | Sequence[nn.Module] | None = None,
        pictures: bool = True,
    ) -> None:
        check_counts(tokens=tokens, batches=batches)
        self._schedule = check_schedule(log_spaced() if schedule is None else schedule)
        self._settings: dict[str, Any] = {
            "metrics": check_metrics(metrics), "schedule": self._schedule, "tokens": tokens,
            "batches": batches, "probe": probe, "gather": gather, "budget": budget,
            "background": background, "max_capture_mb": max_capture_mb, "seed": seed,
            "strict": strict, "blocks": blocks,
        }  # fmt: skip
        self._directory = directory
        self._sinks = list(sinks)
        self._pictures = pictures
        self._seen: int | None = None  # step of the last batch that was looked at

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._monitor.overhead if self._monitor is not None else math.nan

    @property
    def state_key(self) -> str:
        """Tells the callbacks of one trainer apart in its checkpoints, by their settings."""
        blocks = self._settings["blocks"]
        return self._generate_state_key(
            **{name: self._settings[name] for name in ("tokens", "batches", "seed")},
            blocks=blocks if isinstance(blocks, str) else None,
            metrics=list(self._settings["metrics"]),
            schedule=getattr(self._schedule, "__qualname__", repr(self._schedule)),
            source="inline" if self._settings["probe"] is None else "probe",
            directory=None if self._directory is None else os.fspath(self._directory),
        )

    def state_dict(self) -> dict[str, Any]:
        """The last step that was looked at; what was measured is in the record."""
        return {"seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the step that `state_dict` names."""
        self._seen = state_dict["seen"]

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: a copy made while training goes on starts with its own training."""
        return {name: value for name, value in vars(self).items() if name not in _OF_A_TRAINING}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the blocks and open the record: on a resume the step is right only from here on."""
        folder = trainer.log_dir  # a collective: every rank asks
        directory = self._directory or Path(folder or trainer.default_root_dir)
        sinks: list[Sink] = [*self._sinks]
        if trainer.loggers:
            sinks.append(_Loggers(trainer))
        posts = [post for logger in trainer.loggers if (post := _post_to(logger))]
        if self._pictures and posts:
            sinks.append(
                Pictures(
                    lambda name, image, step: [p(name, image, step) for p in posts],
                    affords=self._affords,
                )
            )
        self._monitor = Monitor(pl_module, directory=directory, sinks=sinks, **self._settings)
        self._last = trainer.estimated_stepping_batches - 1
        if self._seen is None or self._seen >= trainer.global_step:  # not the run that it was of
            self._seen = trainer.global_step - 1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Probe, or open the window on this batch's forward pass."""
        self._drop()
        if self._monitor is None or not trainer.training or trainer.sanity_checking:
            return
        self._step = trainer.global_step
        # Under a budget what is passed over is put off, and not forced.
        owed = self._settings["budget"] is None and self._is_owed(self._step)
        if self._settings["probe"] is None:
            force = owed or self._is_last(trainer, pl_module)
            self._window = self._monitor(self._step, force=force)
            self._window.__enter__()
        else:
            if self._monitor.due(self._step, source="probe", force=owed):
                self._probe(trainer, self._step)
            self._seen = self._step

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor
    ) -> None:
        """The forward pass is over: close the window and measure."""
        self._shut()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Close the window of a batch that had no backward pass."""
        self._shut()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A batch that the module skipped, with -1, ends the epoch and has no end of its own."""
        self._drop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last reading, and the end."""
        self._drop()
        monitor = self._monitor if self._settings["probe"] is not None else None
        if monitor is not None and monitor.affords_reading():
            self._probe(trainer, trainer.global_step)
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Leave nothing on the model: no other event follows an exception or Ctrl-C."""
        self._shut(exception)
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Whatever the way out was."""
        self._drop()
        self._close()

    def _probe(self, trainer: L.Trainer, step: int) -> None:
        """In the precision that training has, outside of its autocast cache."""
        assert self._monitor is not None
        with trainer.precision_plugin.forward_context():
            self._monitor.probe(step)

    def _affords(self, seconds: float) -> bool:
        return self._monitor is None or self._monitor.affords(seconds)

    def _is_owed(self, step: int) -> bool:
        """Whether a due step was passed over since the last batch: two optimizers step twice."""
        assert self._seen is not None
        return any(map(self._schedule, range(self._seen + 1, step)))

    def _is_last(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether no step comes after this batch's, as far as that can be known beforehand."""
        if pl_module.automatic_optimization:
            return self._step == self._last
        assert self._seen is not None
        last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        stepped = self._step - self._seen  # by the batch before
        return last_batch or 0 < trainer.max_steps <= self._step + stepped

    def _shut(self, error: BaseException | None = None) -> None:
        """Close the window, if one is open; after an error nothing is measured."""
        window, self._window = self._window, None
        if window is not None:
            if error is None:
                self._seen = self._step
            window.__exit__(type(error) if error else None, error, None)

    def _drop(self) -> None:
        """Close a window on which no forward pass was run: there is nothing to measure."""
        self._shut(GeneratorExit())

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


class _Loggers:
    """A sink that writes to each of the trainer's loggers, on the axis that Lightning's use."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._laid_out = False

    def write(self, reading: Reading) -> None:
        if not self._laid_out:
            self._lay_out(reading)
        step = self._place(reading.step)
        for logger in self._trainer.loggers:
            logger.log_metrics(reading.charted(), step=step)

    def close(self) -> None:
        for logger in self._trainer.loggers:
            logger.save()

    def _place(self, step: int) -> int:
        """Where a step is on that axis: several optimizers make several steps of one batch."""
        place: int = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        now = self._trainer.global_step
        # A reading may be of an earlier step, put off by the budget or measured in the background.
        return place if step >= now else round(step * place / now)

    def _lay_out(self, reading: Reading) -> None:
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(layout(reading.charted()))
        self._laid_out = True


def _post_to(logger: Logger) -> Any:
    """A function (name, image, step) that shows a picture in the logger; None where none can be."""
    if isinstance(logger, TensorBoardLogger):
        return lambda name, image, step: logger.experiment.add_image(
            name, image, step, dataformats="HWC"
        )
    if isinstance(logger, WandbLogger):
        return lambda name, image, step: logger.log_image(name, [image])
    return None


__all__ = ["GeometryMonitor"]
