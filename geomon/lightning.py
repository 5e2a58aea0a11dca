"""GeometryMonitor, the Lightning callback: translates Lightning's events into session calls.

Lightning comes as two packages with the same events, `lightning` and `pytorch_lightning`. Trainers
and loggers of both are supported, and either one is enough.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Unpack

import torch

from geomon.advice import lacks, to_install
from geomon.monitor import CallbackOptions, CallbackSession, documented
from geomon.record import LOSS, Detail, LoggerSink, Sink, without_layers
from geomon.show import BoardPages, WandB

_PACKAGES = ("lightning", "pytorch_lightning")
_STATE = "geomon"  # key of the newest headline values in checkpoints

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger
else:
    try:
        L = importlib.import_module(next(filter(find_spec, _PACKAGES), _PACKAGES[0]))
    except ImportError as error:
        raise ImportError(
            f"the Lightning callback needs lightning ({error}): {to_install('lightning')}"
        ) from error


@documented(CallbackOptions)
class GeometryMonitor(L.Callback):
    """Watch the geometry of a model's representations while Lightning trains it.

    `L.Trainer(callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to every logger of
    the trainer, pictures to those that show them, readings to `readings.jsonl` in the same folder.
    On one rank, the headline values are also in `trainer.callback_metrics`, for EarlyStopping and
    ModelCheckpoint: `monitor="geomon/twonn"`. Checkpoints hold the newest values. A second monitor
    in one trainer needs a folder of its own, `directory=`.

    Without `probe`, the training forward itself is watched (dropout on, no extra pass); if
    gradients are accumulated, the first batch of a step. With `probe`, an extra pass on fixed
    inputs runs before the batch, and once more at the end of training. The last step is always
    read. `probe="validation"` keeps the first batches of the first validation, or of the sanity
    check before it, and reads them from then on: nothing is drawn from your loaders.

    `training/loss` of a reading is the loss that `training_step` returned for the batch that was
    read, on the first rank. If it returned none, it is the value logged as "loss", or NaN.

    {options}

    Raises:
        TypeError: If an argument does not exist, or a hook is not callable.
        ValueError: If a metric reads an unknown view, the schedule never fires, an alert does not
            exist, a number is out of range, or the detail names no metric. When training starts, if
            the model has no blocks, or the directory cannot be written.
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)
        self._newest: dict[str, float] = {}  # headline values of the last reading
        self._last_step: float  # the last step of the run, or infinity if unknown
        self._began: tuple[int, int]  # step of the last batch, and its place on the loggers' axis

    def __repr__(self) -> str:
        return repr(self._session)

    def __getattr__(self, name: str) -> Any:
        """Tell another trainer, which asks for its events, which class it needs."""
        raise lacks(
            self,
            name,
            trainer="Lightning",
            other="transformers.Trainer",
            needs="geomon.huggingface",
        )

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took, in the process that trained.

        NaN before training, and in a process that spawned others to train (the record has the
        value).
        """
        return self._session.overhead

    def on_save_checkpoint(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Store the newest headline values, for callbacks that stop or save by them."""
        checkpoint.setdefault(_STATE, {}).update(self._newest)

    def on_load_checkpoint(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Restore the headline values of the last reading before the checkpoint."""
        self._newest = dict(checkpoint.get(_STATE, {}))

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the module's methods, which Lightning places on its callbacks, from copies."""
        return {
            name: value for name, value in vars(self).items() if name not in ("log", "log_dict")
        }

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        """Start afresh, before checkpoints are loaded and before the sanity check."""
        if stage == "fit":
            self._session.finish()
            self._newest = {}

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Find the blocks and open the record; on a resume, the step is right only from here on."""
        folder = _folder_of(trainer)
        detail, pictures = self._session.options["detail"], self._session.options["pictures"]
        sinks = [
            _sink_of(logger, self._axis_step, detail, pictures=pictures)
            for logger in trainer.loggers
        ]
        if trainer.world_size == 1:  # only the first rank has readings, but all ranks must decide
            publish = functools.partial(self._publish, trainer)
            publish(self._newest)
            place = "the trainer's callback_metrics"
            sinks.append(LoggerSink(place, publish, detail=without_layers(detail)))
        step, steps = trainer.global_step, trainer.estimated_stepping_batches
        self._session.start(
            pl_module, step, folder, sinks,
            last_step=None if math.isinf(steps) else int(steps),
            validates=trainer.enable_validation,
        )  # fmt: skip
        self._last_step = steps - 1

    def on_validation_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Begin to collect batches of a training's validation or its sanity check."""
        if trainer.state.fn == "fit":
            self._session.held_out.begin()

    def on_validation_batch_start(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Keep a batch of the first loader if it is wanted."""
        if dataloader_idx == 0:
            self._session.held_out.offer(batch)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """From now on, read the batches kept from this validation."""
        self._session.held_out.end()

    def on_train_batch_start(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Probe, or open the window on this batch's forward pass."""
        self._note_place(trainer, pl_module, in_batch=True)
        if len(trainer.optimizers) == 1:
            self._session.watch_rate(trainer.global_step, trainer.optimizers[0])
        self._probe(trainer)
        if not self._session.probes:
            self._session.open(trainer.global_step, force=self._is_last(trainer, pl_module))

    def on_before_backward(self, *event: Any) -> None:
        """Close the window after the forward pass, and measure."""
        self._session.close()

    def on_train_batch_end(
        self,
        trainer: "L.Trainer",
        pl_module: "L.LightningModule",
        outputs: Any,
        *event: Any,
        **more: Any,
    ) -> None:
        """Close the window of a batch without a backward pass, and log the batch's loss."""
        self._session.close()
        step, _ = self._began
        self._session.watch_loss(step, _loss_of(outputs))
        self._session.log(step, lambda: self._known_values(trainer, pl_module, outputs))

    def on_train_epoch_end(self, *event: Any) -> None:
        """Discard the window of a batch that the module skipped with -1, without an end event."""
        self._session.discard()

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Make the last reading, and end the run."""
        self._note_place(trainer, pl_module)
        self._probe(trainer, last=True)
        step, _ = self._began  # no batch is trained with the last weights, so there is no loss
        self._session.log(step, lambda: {**trainer.callback_metrics, LOSS: None})
        self._session.finish()

    def on_exception(self, *event: Any) -> None:
        """Leave nothing on the model, because no event follows an exception or Ctrl-C."""
        self._session.finish()

    def _probe(self, trainer: "L.Trainer", *, last: bool = False) -> None:
        """Read the probe in the training's precision, outside of its autocast cache."""
        around = trainer.precision_plugin.forward_context
        self._session.probe(trainer.global_step, last=last, around=around)

    def _known_values(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any
    ) -> dict[str, Any]:
        """Return what the trainer logs, and the module's loss for the batch that has ended."""
        loss = _loss_of(outputs)
        wanted = loss is None or len(self._session.logged) > 1
        known: dict[str, Any] = dict(trainer.callback_metrics) if wanted else {}
        if loss is not None:
            # Lightning divides the loss if gradients are accumulated.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            known[LOSS] = loss * parts
        return known

    def _note_place(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", *, in_batch: bool = False
    ) -> None:
        """Remember the step and its place on the loggers' axis, where two optimizers step twice."""
        step = place = trainer.global_step
        if not pl_module.automatic_optimization:
            place = trainer.fit_loop.total_batch_idx + (not in_batch)
        self._began = step, place

    def _axis_step(self, step: int) -> int:
        """Convert a step to the axis of Lightning's loggers, which count batches."""
        present, batches = self._began
        # The reading may belong to an earlier step and have been measured in the background.
        return round(step * batches / present) if present else 0

    def _is_last(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> bool:
        """Whether this batch's step is the last one, as far as that is known beforehand."""
        step, batches = self._began
        if pl_module.automatic_optimization:
            return step == self._last_step
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        steps = step // max(batches, 1)  # steps per batch
        return is_last or 0 < trainer.max_steps <= step + steps

    def _publish(self, trainer: "L.Trainer", values: dict[str, float], step: int = 0) -> None:
        """Put the newest values into the metrics that EarlyStopping and ModelCheckpoint read."""
        self._newest = {**self._newest, **values}
        trainer.callback_metrics.update(
            {name: torch.tensor(value, device="cpu") for name, value in values.items()}
        )


def _folder_of(trainer: "L.Trainer") -> str:
    """Return the folder of the first logger's run, which also holds its checkpoints."""
    logger = trainer.logger
    folder = getattr(logger, "log_dir", None)
    if logger is None:
        folder = trainer.default_root_dir
    elif not isinstance(folder, str):  # loggers whose run is a number or a name elsewhere
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = logger.save_dir or trainer.default_root_dir
        folder = os.path.join(root, str(logger.name), version)
    return str(trainer.strategy.broadcast(folder))  # a collective, which every rank calls


def _loss_of(outputs: Any) -> Any:
    """Return the loss of a batch from what its training step returned, or None."""
    return outputs.get(LOSS) if isinstance(outputs, Mapping) else outputs


def _sink_of(
    logger: "Logger", axis_step: Callable[[int], int], detail: Detail, *, pictures: bool
) -> Sink:
    """Make the sink for one of the trainer's loggers, with steps converted to its axis."""
    shown: Any = logger
    if _is_logger(logger, "WandbLogger"):
        return WandB(shown.experiment, by_step=True, detail=detail, pictures=pictures)

    def log(values: dict[str, float], step: int) -> None:
        logger.log_metrics(values, step=axis_step(step))

    name = type(logger).__name__
    if not _is_logger(logger, "TensorBoardLogger"):
        return LoggerSink(name, log, detail=detail, save=logger.save)
    return BoardPages(
        name, log, lambda: [shown.experiment], detail=detail, pictures=pictures, save=logger.save
    )


def _is_logger(logger: object, name: str) -> bool:
    """Whether a logger has a class of Lightning, in either of its packages."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in _PACKAGES
        for kind in type(logger).__mro__
    )
