"""GeometryMonitor, the Lightning callback: Lightning's events, translated for a session."""

import math
from typing import Any, Unpack

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from geomon.monitor import CallbackOptions, CallbackSession, show_callback_options
from geomon.record import Reading, Sink
from geomon.record.sinks import ChartLayout, WandB, post_picture_to_writer
from geomon.show import Pictures


@show_callback_options
class GeometryMonitor(L.Callback):
    """Watch the geometry of a model's representations while Lightning trains it.

    `L.Trainer(callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to every logger of
    the trainer, pictures to those that show them, readings to `readings.jsonl` in the log folder.

    Without `probe` the training forward itself is watched (dropout on, no extra pass): of a step
    with accumulated gradients the first batch. With `probe` an extra pass on fixed inputs runs
    before the batch, and once more at the end of training. The last step is always read.

    Args:
    {options}
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)
        self._last_step = math.inf  # the last step of the run, where its number is known

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._session.overhead

    @property
    def state_key(self) -> str:
        """Tells the callbacks of one trainer apart in its checkpoints, by their options."""
        return self._generate_state_key(**self._session.summary())

    def state_dict(self) -> dict[str, Any]:
        """The last step that was watched; what was measured is in the record."""
        return {"seen": self._session.last_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the step that the state names."""
        self._session.last_seen = state_dict["seen"]

    def __getstate__(self) -> dict[str, Any]:
        """No copy takes along the module's methods, which Lightning places on its callbacks."""
        return {
            name: value for name, value in vars(self).items() if name not in ("log", "log_dict")
        }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the blocks and open the record: on a resume the step is right only from here on."""
        folder = trainer.log_dir or trainer.default_root_dir  # a collective: every rank asks
        loggers = _Loggers(trainer)
        sinks: list[Sink] = [loggers] if trainer.loggers else []
        if self._session.options["pictures"] and loggers.show_pictures:
            sinks.append(Pictures(loggers.post, affords=self._session.affords))
        self._session.start(pl_module, trainer.global_step, folder, sinks)
        self._last_step = trainer.estimated_stepping_batches - 1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Probe, or open the window on this batch's forward pass."""
        self._session.discard()
        if trainer.training and not trainer.sanity_checking:
            self._probe(trainer)
            if not self._session.probes:
                self._session.open(trainer.global_step, force=self._is_last(trainer, pl_module))

    def on_before_backward(self, *event: Any) -> None:
        """The forward pass is over: close the window and measure."""
        self._session.close()

    def on_train_batch_end(self, *event: Any, **more: Any) -> None:
        """Close the window of a batch that had no backward pass."""
        self._session.close()

    def on_train_epoch_end(self, *event: Any) -> None:
        """A batch that the module skipped, with -1, ends the epoch and has no end of its own."""
        self._session.discard()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last reading, and the end."""
        self._session.discard()
        self._probe(trainer, last=True)
        self._session.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """No other event follows an exception or Ctrl-C: leave nothing on the model."""
        self._session.close(exception)
        self._session.finish()

    def teardown(self, *event: Any, **more: Any) -> None:
        """Leave nothing on the model, whatever the way out was."""
        self._session.finish()

    def _probe(self, trainer: L.Trainer, *, last: bool = False) -> None:
        """In the precision that training has, outside of its autocast cache."""
        around = trainer.precision_plugin.forward_context
        self._session.probe(trainer.global_step, last=last, around=around)

    def _is_last(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether no step comes after this batch's, as far as that can be known beforehand."""
        step, last_seen = trainer.global_step, self._session.last_seen
        if pl_module.automatic_optimization or last_seen is None:
            return step == self._last_step
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        return is_last or 0 < trainer.max_steps <= 2 * step - last_seen  # as many steps again


class _Loggers:
    """A sink that writes to each of the trainer's loggers, on the axis that Lightning's use."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._layout = ChartLayout()
        self._plain = [x for x in trainer.loggers if not isinstance(x, WandbLogger)]
        self._boards = [x.experiment for x in self._plain if isinstance(x, TensorBoardLogger)]
        runs = [x.experiment for x in trainer.loggers if isinstance(x, WandbLogger)]
        self._wandb = [WandB(run) for run in runs]
        self.show_pictures = bool(self._boards or self._wandb)

    def write(self, reading: Reading) -> None:
        step = self._axis_step(reading.step)
        self._layout.write_once(reading, self._boards)
        for logger in self._plain:
            logger.log_metrics(reading.charted(), step=step)
        for sink in self._wandb:
            sink.write(reading)

    def post(self, name: str, image: Any, step: int) -> None:
        for writer in self._boards:
            post_picture_to_writer(writer, name, image, step)
        for sink in self._wandb:
            sink.post(name, image, step)

    def close(self) -> None:
        for logger in self._trainer.loggers:
            logger.save()

    def _axis_step(self, step: int) -> int:
        """Where a step is on that axis: several optimizers make several steps of one batch."""
        batches: int = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        now = self._trainer.global_step
        # A reading may be of an earlier step, put off by the budget or measured in the background.
        return batches if step >= now else round(step * batches / now)
