"""GeometryMonitor, the Lightning callback: Lightning's events, translated for a session.

Lightning comes as two packages with the same events, `lightning` and `pytorch_lightning`. The
trainers and loggers of both are served, and one of the two is enough.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Unpack

import torch

from geomon.monitor import CallbackOptions, CallbackSession, documented
from geomon.record import Sink
from geomon.record.headline import Detail, without_layers
from geomon.record.sinks import LoggerSink
from geomon.record.tags import LOSS
from geomon.show.loggers import BoardPages, WandB

_PACKAGES = ("lightning", "pytorch_lightning")

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger
else:
    try:
        L = importlib.import_module(next(filter(find_spec, _PACKAGES), _PACKAGES[0]))
    except ImportError as error:
        raise ImportError(
            f"the Lightning callback needs lightning ({error}): pip install 'geomon[lightning]'"
        ) from error


@documented(CallbackOptions)
class GeometryMonitor(L.Callback):
    """Watch the geometry of a model's representations while Lightning trains it.

    `L.Trainer(callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to every logger of
    the trainer, pictures to those that show them, readings to `readings.jsonl` beside them.
    On one rank the headline values are in `trainer.callback_metrics` too, for EarlyStopping and
    ModelCheckpoint: `monitor="geomon/twonn"`.

    Without `probe` the training forward itself is watched (dropout on, no extra pass), the first
    batch of a step with accumulated gradients. With `probe` an extra pass on fixed inputs runs
    before the batch, and once more at the end of training. The last step is always read.

    `training/loss` of a reading is the loss that `training_step` returned for the batch that was
    read, on the first rank. If it returned none, it is the value logged as "loss", or NaN.

    {options}

    Raises:
        TypeError: An argument has a name that does not exist. A hook is not callable.
        ValueError: A metric reads an unknown view, the schedule never fires, no alert has such a
            name, a number is out of range, or the detail names no metric. When training starts: no
            blocks in the model, a directory that cannot be written.
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)
        self._last_step: float  # the last step of the run; infinity where it is not known
        self._began: tuple[int, int]  # the last batch: its step, and where the loggers have it

    def __repr__(self) -> str:
        return repr(self._session)

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._session.overhead

    @property
    def state_key(self) -> str:
        """Tells the callbacks of one trainer apart in its checkpoints, by their options."""
        return f"{type(self).__qualname__}{self._session.summary()!r}"

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

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Find the blocks and open the record: on a resume the step is right only from here on."""
        folder = _folder_of(trainer)
        detail, pictures = self._session.options["detail"], self._session.options["pictures"]
        sinks = [
            _sink_of(logger, self._axis_step, detail, pictures=pictures)
            for logger in trainer.loggers
        ]
        if trainer.world_size == 1:  # readings are the first rank's, and all ranks decide alike
            sinks.append(_metrics_of(trainer, without_layers(detail)))
        step, steps = trainer.global_step, trainer.estimated_stepping_batches
        self._session.start(
            pl_module, step, folder, sinks, lambda: _validation_loaders(trainer),
            settings=getattr(pl_module, "_hparams", {}),  # `hparams` would make them
            last_step=None if math.isinf(steps) else int(steps),
        )  # fmt: skip
        self._last_step = steps - 1

    def on_train_batch_start(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Probe, or open the window on this batch's forward pass."""
        self._note_place(trainer, pl_module, in_batch=True)
        self._probe(trainer)
        if not self._session.probes:
            self._session.open(trainer.global_step, force=self._is_last(trainer, pl_module))

    def on_before_backward(self, *event: Any) -> None:
        """The forward pass is over: close the window and measure."""
        self._session.close()

    def on_train_batch_end(
        self,
        trainer: "L.Trainer",
        pl_module: "L.LightningModule",
        outputs: Any,
        *event: Any,
        **more: Any,
    ) -> None:
        """Close the window of a batch that had no backward pass, and take the batch's loss."""
        self._session.close()
        step, _ = self._began
        self._session.log(step, lambda: self._known_values(trainer, pl_module, outputs))

    def on_train_epoch_end(self, *event: Any) -> None:
        """A batch that the module skipped, with -1, ends the epoch and has no end of its own."""
        self._session.discard()

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """The last reading, and the end."""
        self._note_place(trainer, pl_module)
        self._probe(trainer, last=True)
        step, _ = self._began  # no batch is trained on with the last weights: there is no loss
        self._session.log(step, lambda: {**trainer.callback_metrics, LOSS: None})
        self._session.finish()

    def on_exception(self, *event: Any) -> None:
        """No other event follows an exception or Ctrl-C: leave nothing on the model."""
        self._session.finish()

    def _probe(self, trainer: "L.Trainer", *, last: bool = False) -> None:
        """In the precision that training has, outside of its autocast cache."""
        around = trainer.precision_plugin.forward_context
        self._session.probe(trainer.global_step, last=last, around=around)

    def _known_values(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any
    ) -> dict[str, Any]:
        """What the trainer logs, and the loss that the module gave for the batch that has ended."""
        loss = outputs.get(LOSS) if isinstance(outputs, Mapping) else outputs
        if loss is None or len(self._session.logged) > 1:
            known: dict[str, Any] = dict(trainer.callback_metrics)
        else:
            known = {}
        if loss is not None:
            # Lightning divides it where gradients are accumulated.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            known[LOSS] = loss * parts
        return known

    def _note_place(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", *, in_batch: bool = False
    ) -> None:
        """Note the step, and where Lightning's loggers have it: two optimizers step twice there."""
        step = place = trainer.global_step
        if not pl_module.automatic_optimization:
            place = trainer.fit_loop.total_batch_idx + (not in_batch)
        self._began = step, place

    def _axis_step(self, step: int) -> int:
        """Where a step is on the axis of Lightning's loggers, which count batches."""
        present, batches = self._began
        # A reading may be of an earlier step, measured in the background.
        return round(step * batches / present) if present else 0

    def _is_last(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> bool:
        """Whether no step comes after this batch's, as far as that can be known beforehand."""
        step, last_seen = trainer.global_step, self._session.last_seen
        if pl_module.automatic_optimization or last_seen is None:
            return step == self._last_step
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        return is_last or 0 < trainer.max_steps <= 2 * step - last_seen  # as many steps again


def _folder_of(trainer: "L.Trainer") -> str:
    """The folder of the first logger's run, which is also that of its checkpoints."""
    logger = trainer.logger
    folder = getattr(logger, "log_dir", None)
    if logger is None:
        folder = trainer.default_root_dir
    elif not isinstance(folder, str):  # the loggers whose run is a number or a name elsewhere
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = logger.save_dir or trainer.default_root_dir
        folder = os.path.join(root, str(logger.name), version)
    return str(trainer.strategy.broadcast(folder))  # a collective: every rank asks


def _validation_loaders(trainer: "L.Trainer") -> Any:
    """The loaders of the validation, which may not have been set up when training starts.

    Raises:
        ValueError: They have not been set up, and this release of Lightning hides them.
    """
    loaders = trainer.val_dataloaders
    if loaders is not None:
        return loaders
    try:  # there is no public name for what is not set up
        source = trainer.fit_loop.epoch_loop.val_loop._data_source
        return source.dataloader() if source.is_defined() else None
    except AttributeError as error:
        raise ValueError(
            "probe='validation' cannot find the validation data of this release of Lightning "
            f"before a validation has run ({error}): give the loader, probe=loader, or leave "
            "num_sanity_val_steps above 0"
        ) from error


def _metrics_of(trainer: "L.Trainer", detail: Detail) -> Sink:
    """The sink that keeps the newest values where EarlyStopping and ModelCheckpoint find them."""

    def log(values: dict[str, float], step: int) -> None:
        trainer.callback_metrics.update(
            {
                name: torch.tensor(value, dtype=torch.float32, device="cpu")
                for name, value in values.items()
            }
        )

    return LoggerSink("the trainer's callback_metrics", log, detail=detail)


def _sink_of(
    logger: "Logger", axis_step: Callable[[int], int], detail: Detail, *, pictures: bool
) -> Sink:
    """The sink that writes to one of the trainer's loggers, at a place for each step."""
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
    """Whether a logger is of a class of Lightning, in either of its packages."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in _PACKAGES
        for kind in type(logger).__mro__
    )
