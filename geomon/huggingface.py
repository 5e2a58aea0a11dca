"""GeometryMonitor, the Hugging Face callback: Trainer's events, translated into calls of a session.

The Trainer has no event between forward and backward, none when training raises, and none that
hands a callback what would report its values; the comments below say how each is made up for.
"""

import functools
import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from geomon.monitor import CallbackOptions, CallbackSession, documented
from geomon.record import Sink
from geomon.record.headline import Detail, without_layers
from geomon.record.sinks import LoggerSink
from geomon.record.tags import LOSS
from geomon.show.loggers import BoardPages, WandB

try:
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
    from transformers.integrations import TensorBoardCallback, WandbCallback
except ImportError as error:
    raise ImportError(
        f"the Trainer's callback needs transformers ({error}): pip install 'geomon[huggingface]'"
    ) from error

log = logging.getLogger("geomon")

# Attribute of a function that stands in for a Trainer's own: the object that placed it.
_STAND_IN = "_geomon_stand_in"


# Arguments of the Trainer that stand in the description of a run.
_TELLING = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim",
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed",
)  # fmt: skip


@documented(CallbackOptions)
class GeometryMonitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watch the geometry of a model's representations while a `transformers.Trainer` trains it.

    `Trainer(model, args, callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to
    the loggers that you configured (`report_to`), headline values into `state.log_history` too,
    pictures to TensorBoard and W&B, and every reading to `readings.jsonl` in `output_dir`.

    Without `probe` the training forward itself is watched (dropout on, no extra pass), the first
    one of a step with accumulated gradients. With `probe` an extra pass on fixed inputs runs before
    the step, and once more at the end of training: comparable from step to step. The last step is
    always read.

    `training/loss` of a reading is the loss of its step as the Trainer counts it: the sum of what
    `training_step` returned for its batches, on the first rank. Values that `log` names are the
    last ones under that name in `state.log_history`.

    {options}

    Raises:
        TypeError: An argument has a name that does not exist. A hook is not callable.
        ValueError: A metric reads an unknown view, the schedule never fires, no alert has such a
            name, a number is out of range, or the detail names no metric. When training starts: no
            blocks in the model, a directory that cannot be written.
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)
        self._step: _TrainingStep | None = None  # the step that is going on, if it is read

    def __getstate__(self) -> dict[str, Any]:
        """Leave the Trainer out of copies: it is known during a step alone."""
        return {**vars(self), "_step": None}

    def __repr__(self) -> str:
        return repr(self._session)

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._session.overhead

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Find the blocks and what reports; the model and its step are as training starts."""
        trainer = _caller(Trainer)
        reporting = _reporting_callbacks(trainer)
        detail, pictures = self._session.options["detail"], self._session.options["pictures"]
        event = {"model": model, **event}
        sinks = _sinks_of(reporting, detail, args, state, control, event, pictures=pictures)
        step, folder = state.global_step, _folder_of(trainer, args)
        self._session.start(
            model, step, folder, sinks, lambda: _validation_loader(trainer),
            settings=_settings_of(trainer, args, state), last_step=state.max_steps,
        )  # fmt: skip
        if args.n_gpu > 1 and not self._session.probes:
            log.warning(
                "the training forward cannot be watched on copies of the model in threads "
                "(DataParallel): start one process for each GPU, with torchrun, or give probe="
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Probe, or wait for the step's first forward pass, which is watched."""
        self._forget_step()
        step = state.global_step
        self._session.probe(step)
        trainer = _caller(Trainer)
        if self._session.probes or args.n_gpu > 1:
            if trainer is not None and self._session.lacks_values(step):
                self._step = _TrainingStep(trainer, step)
            return
        last = step == state.max_steps - 1
        wait = functools.partial(self._session.open_at_call, step, force=last)
        if trainer is None:
            wait()
        elif self._session.prepare(step, force=last):
            # No event tells of an exception between here and the forward pass (in another
            # callback, in what a loss does first): till then nothing waits but in the Trainer.
            self._step = _TrainingStep(trainer, step, wait, self._session.discard)

    def on_substep_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Close the window if the loss was computed without calling the model."""
        self._session.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The same, where one batch makes a step: the weights are still those that were seen."""
        self._session.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Log the loss, and end the run before the Trainer may load its best weights."""
        if self._step is not None:
            step, losses = self._step.number, self._step.losses
            self._forget_step()
            self._session.log(step, lambda: self._known_values(state, losses))
        if control.should_training_stop:
            self._end(state)

    def on_save(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The same, where an evaluation has stopped the training."""
        if control.should_training_stop:
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The end, where nothing announced it; what is probed has to be the last weights."""
        self._end(state, last_weights=not args.load_best_model_at_end)

    def _end(self, state: Any, *, last_weights: bool = True) -> None:
        """The last probe, and the last pictures: at `on_train_end` TensorBoard is closed."""
        if last_weights:
            self._session.probe(state.global_step, last=True)
            # No batch is trained on with the last weights: there is no loss.
            self._session.log(state.global_step, lambda: self._known_values(state, ()))
        self._session.finish()

    def _forget_step(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    def _known_values(self, state: Any, losses: Sequence[Any]) -> dict[str, Any]:
        """The last values that the Trainer logged, and the loss of a step from its batches'."""
        known: dict[str, Any] = {}
        wanted = set(self._session.options["log"]) - {LOSS}
        for entry in reversed(state.log_history):
            for name in wanted & entry.keys():
                known[name] = entry[name]
                wanted.remove(name)
            if not wanted:
                break
        if losses:
            known[LOSS] = functools.reduce(operator.add, losses)
        return known


def _folder_of(trainer: Any, args: Any) -> str:
    """The folder of a training; of a trial of a search, the one that gets its checkpoints."""
    trial = getattr(trainer, "_trial", None)
    if trial is not None:
        try:
            return str(trainer._get_output_dir(trial=trial))
        except (AttributeError, TypeError) as error:
            log.warning(
                "the folder of this trial cannot be asked for in this release of transformers, and "
                "all trials have one record: %s",
                error,
            )
    return str(args.output_dir)


def _settings_of(trainer: Any, args: Any, state: Any) -> dict[str, Any]:
    """What tells trainings apart: the usual arguments, and the trial of a search by its number."""
    known = {name: getattr(args, name, None) for name in _TELLING}
    number = getattr(getattr(trainer, "_trial", None), "number", None)
    trial = {} if number is None else {"trial": number}
    return {**known, **trial, **(state.trial_params or {})}


class _TrainingStep:
    """One step of a Trainer: what its batches' losses are, and something done as it begins.

    Until it is removed it stands in for the Trainer's `training_step`.

    Args:
        trainer: The Trainer.
        number: Number of the step.
        before: Called as the step begins, before its first batch.
        after: Called if an exception ends the step.

    Attributes:
        number: Number of the step.
        losses: What `training_step` has returned for the batches of the step.
    """

    def __init__(
        self,
        trainer: Any,
        number: int,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self.number = number
        self.losses: list[Any] = []
        self._trainer = trainer
        self._original = trainer.training_step

        @functools.wraps(self._original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._placed:  # called by another stand-in, which was placed after it
                return self._original(*args, **kwargs)
            try:
                if not self.losses:
                    before()
                loss = self._original(*args, **kwargs)
            except BaseException:
                self.remove()
                after()
                raise
            self.losses.append(loss)
            return loss

        self._inherited = "training_step" not in vars(trainer)
        self._placed = True
        watched.__dict__[_STAND_IN] = self
        trainer.training_step = watched

    def remove(self) -> None:
        """Give the Trainer its own `training_step` back; may be called more than once.

        Stand-ins may be removed in any order: one that lies under another goes with that.
        """
        self._placed = False
        while True:
            present = vars(self._trainer).get("training_step")
            top = getattr(present, _STAND_IN, None)
            if top is None or top._placed:
                return
            if top._inherited:
                del self._trainer.training_step
            else:
                self._trainer.training_step = top._original


def _validation_loader(trainer: Any) -> Any:
    """The loader of the Trainer's evaluation, of the first dataset if there are several."""
    if trainer is None:
        return None
    datasets = trainer.eval_dataset
    # Loaders that accelerate prepares stand in the training's checkpoints: not this one.
    prepared = getattr(trainer.accelerator, "_dataloaders", [])
    before = list(prepared)
    try:
        if isinstance(datasets, Mapping):
            return trainer.get_eval_dataloader(next(iter(datasets))) if datasets else None
        return trainer.get_eval_dataloader()
    except ValueError:
        if datasets is None:
            return None
        raise
    finally:
        prepared[:] = before


def _sinks_of(
    callbacks: Iterable[Any],
    detail: Detail,
    args: Any,
    state: Any,
    control: Any,
    event: dict[str, Any],
    *,
    pictures: bool,
) -> list[Sink]:
    """Sinks that do what `Trainer.log` does: into the history, then to each callback.

    TensorBoard and W&B are written to directly: their callbacks put "train/" before every name.
    """

    def logs_of(values: dict[str, float]) -> dict[str, float]:
        # The history is saved as JSON with each checkpoint: a number of another kind ends the run.
        return {**values, "epoch": state.epoch}

    def remember(values: dict[str, float], step: int) -> None:
        state.log_history.append({**logs_of(values), "step": step})

    def report(callback: Any, values: dict[str, float], step: int) -> None:
        # A reading may be of an earlier step, put off by the budget or measured in the background.
        then = replace(state, global_step=step)
        callback.on_log(args, then, control, logs=logs_of(values), **event)

    def writers(callback: Any) -> list[Any]:
        """TensorBoard's writer, which the Trainer makes as training begins."""
        return [] if callback.tb_writer is None else [callback.tb_writer]

    def draw(callback: Any, values: dict[str, float], step: int) -> None:
        if callback.tb_writer is None:  # it is closed at the end of training: have it opened again
            callback.on_log(args, state, control, logs={}, **event)
        for writer in writers(callback):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

    sinks: list[Sink] = [
        LoggerSink("the Trainer's history", remember, detail=without_layers(detail))
    ]
    for callback in callbacks:
        if isinstance(callback, WandbCallback):
            sinks.append(WandB(by_step=True, detail=detail, pictures=pictures))
            continue
        name = type(callback).__name__
        if isinstance(callback, TensorBoardCallback):
            board = functools.partial(writers, callback)
            to_board = functools.partial(draw, callback)
            sinks.append(BoardPages(name, to_board, board, detail=detail, pictures=pictures))
        else:
            to_callback = functools.partial(report, callback)
            sinks.append(LoggerSink(name, to_callback, detail=detail))
    return sinks


def _reporting_callbacks(trainer: Any) -> list[Any]:
    """The callbacks to which the Trainer reports, but for those that print.

    Hundreds of values would bury the loss in the terminal.
    """
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", None)
    if callbacks is None:
        log.warning(
            "what the Trainer reports to is not found, and gets no readings: they are in the "
            "record and in the Trainer's history"
        )
    printing = PrinterCallback | ProgressCallback
    return [callback for callback in callbacks or () if not isinstance(callback, printing)]


def _caller(kind: type) -> Any:
    """The object of a class that has called an event, or None; transformers passes on neither."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    return None


__all__ = ["GeometryMonitor"]
