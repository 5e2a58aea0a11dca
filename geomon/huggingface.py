"""GeometryMonitor, the Hugging Face callback: translates the Trainer's events into session calls.

Events give access neither to the Trainer nor to its reporting, and none announces an exception. So
readings go to the services in `report_to` through the services' own functions, and the loss is the
one that the model returned in the pass that was read.
"""

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

from geomon.advice import lacks, to_install
from geomon.monitor import CallbackOptions, CallbackSession, documented
from geomon.record import LOSS, Detail, LoggerSink, Sink
from geomon.show import MLflow, TensorBoard, WandB

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"the Trainer's callback needs transformers ({error}): {to_install('huggingface')}"
    ) from error

log = logging.getLogger("geomon")

# Folder of geomon's event files, inside the Trainer's: TensorBoard reads the files of a folder one
# after another, and would miss later events of the Trainer.
_BOARD = "geomon"


@documented(CallbackOptions)
class GeometryMonitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watch the geometry of a model's representations while a `transformers.Trainer` trains it.

    `Trainer(model, args, callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to
    the services that you configured (`report_to`), pictures to TensorBoard, W&B and MLflow, and
    every reading to `readings.jsonl` in `output_dir`. Other callbacks are not affected, and
    `state.log_history` stays the Trainer's own.

    Without `probe`, the training forward itself is watched (dropout on, no extra pass); if
    gradients are accumulated, the first one of a step. With `probe`, an extra pass on fixed inputs
    runs before the step, and once more at the end of training, so that readings are comparable
    from step to step. The last step is always read. `probe="validation"` keeps the first batches
    of the training's first evaluation, and reads them from then on: nothing is drawn from your
    loaders.

    `training/loss` of a reading is the loss that the model returned in the pass that was read, on
    the first rank. If it returned none, or a probe was read, it is the last "loss" in
    `state.log_history`, which also gives the values that `log` names.

    {options}

    Raises:
        TypeError: If an argument does not exist, or a hook is not callable.
        ValueError: If a metric reads an unknown view, the schedule never fires, an alert does not
            exist, a number is out of range, or the detail names no metric. When training starts, if
            the model has no blocks, or the directory cannot be written.
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)
        self._loss: Any = None  # loss of the pass that was read at this step
        self._evaluates = False  # whether the Trainer is making an evaluation of its own
        self._hook: Any = None  # waits for the evaluation's next batch

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the current step from copies."""
        return {**vars(self), "_loss": None, "_hook": None}

    def __repr__(self) -> str:
        return repr(self._session)

    def __getattr__(self, name: str) -> Any:
        """Tell another trainer, which asks for its events, which class it needs."""
        raise lacks(
            self, name, trainer="transformers.Trainer", other="Lightning", needs="geomon.lightning"
        )

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._session.overhead

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Find the blocks; only now are the model and its step as training starts."""
        self._session.finish()
        first, detail = state.is_world_process_zero, self._session.options["detail"]
        pictures = self._session.options["pictures"]
        self._session.start(
            model, state.global_step, _folder_of(args, state),
            _sinks_of(args, detail, pictures=pictures) if first else (),
            last_step=state.max_steps,
            validates=args.eval_strategy != "no" or args.eval_on_start,
        )  # fmt: skip
        self._expect_evaluation(model, due=args.eval_on_start)
        if args.n_gpu > 1 and not self._session.probes:
            log.warning(
                "the training forward cannot be watched on copies of the model in threads "
                "(DataParallel): start one process for each GPU, with torchrun, or pass probe="
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Probe, or wait for the step's first forward pass to watch it."""
        self._expect_evaluation(None, due=False)
        step = state.global_step
        self._session.watch_rate(step, event.get("optimizer"))
        self._session.probe(step)
        if not self._session.probes and args.n_gpu <= 1:
            last = step == state.max_steps - 1

            def see(given: Mapping[str, Any], output: Any) -> None:
                self._loss = _loss_of(given, output, args)

            self._session.open_at_call(step, force=last, seen=see)

    def on_substep_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Close the window if the loss was computed without calling the model."""
        self._session.close()

    # If a step has a single batch, the weights are still the ones that were seen.
    on_pre_optimizer_step = on_substep_end

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Log the loss, and end the run before the Trainer may load its best weights."""
        self._session.log(state.global_step - 1, lambda: self._known_values(state, self._loss))
        self.on_epoch_end(args, state, control, model)
        self.on_save(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **event: Any) -> None:
        """Look at the loss that the Trainer logs, of the steps since it logged one before."""
        self._session.watch_loss(state.global_step - 1, (logs or {}).get(LOSS))

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Prepare for an evaluation, which may come next."""
        self._expect_evaluation(model, due=control.should_evaluate)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Keep the next batch of an evaluation if it belongs to the training."""
        self._expect_evaluation(model, due=self._evaluates)

    def on_evaluate(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """From now on, read the batches kept from this evaluation."""
        self._expect_evaluation(None, due=False)
        self.on_save(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """End the run if it is stopping, for example because of an evaluation."""
        if control.should_training_stop and not self._session.waits:
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """End the run if nothing announced it; probe only if the weights are still the last."""
        self._end(state, last_weights=not args.load_best_model_at_end)

    def _end(self, state: Any, *, last_weights: bool = True) -> None:
        """Read the probe a last time, without a loss, as no batch is trained with these weights."""
        if last_weights:
            self._session.probe(state.global_step, last=True)
            known = {**self._known_values(state, None), LOSS: None}
            self._session.log(state.global_step, lambda: known)
        self._session.finish()

    def _expect_evaluation(self, model: Any, *, due: bool) -> None:
        """Keep the batch of the model's next call if an evaluation is due, or stop waiting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        held_out = self._session.held_out
        if due and not self._evaluates:
            held_out.begin()
        if not due:
            held_out.end()
        self._evaluates = due

        def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hook.remove()  # before the call, so that nothing remains whatever happens
            held_out.offer(kwargs or args)

        if due and model is not None and held_out.takes:
            hook = self._hook = model.register_forward_pre_hook(take, with_kwargs=True)

    def _known_values(self, state: Any, loss: Any) -> dict[str, Any]:
        """Return the last values that the Trainer logged, and the loss of the pass just read."""
        known = {name: value for entry in state.log_history for name, value in entry.items()}
        return known if loss is None else {**known, LOSS: loss}


def _folder_of(args: Any, state: Any) -> str:
    """Return the folder of a training; every trial of a search has a folder of its own."""
    folder = str(args.output_dir)
    if not state.is_hyper_param_search:
        return folder
    if state.trial_name is not None:
        return os.path.join(folder, state.trial_name)
    trials = (os.path.join(folder, f"run-{number}") for number in itertools.count())
    return next(trial for trial in trials if not os.path.exists(f"{trial}/readings.jsonl"))


def _loss_of(given: Mapping[str, Any], output: Any, args: Any) -> Any:
    """Return the loss that a model returned, as the mean over its batch, or None."""
    loss = output.get(LOSS) if isinstance(output, Mapping) else getattr(output, LOSS, None)
    if loss is None or given.get("num_items_in_batch") is None:
        return None if loss is None else loss.detach()
    # The model divided a sum by the tokens of all accumulated batches, perhaps of all ranks.
    ranks = args.world_size if args.average_tokens_across_devices else 1
    return loss.detach() * args.gradient_accumulation_steps * ranks


def _sinks_of(args: Any, detail: Detail, *, pictures: bool) -> list[Sink]:
    """Make sinks for the services that the Trainer reports to."""
    shown: dict[str, Any] = {"detail": detail, "pictures": pictures}
    sinks: list[Sink] = []
    for name in args.report_to:
        if name == "tensorboard":
            sinks.append(TensorBoard(_board_of(args), **shown))
        elif name == "wandb":
            sinks.append(WandB(by_step=True, **shown))
        elif name in ("mlflow", "dagshub"):
            sinks.append(MLflow(**shown))
        elif name in _LOGS:
            sinks.append(LoggerSink(name, _LOGS[name](import_module(name)), detail=detail))
        else:
            log.warning(
                "geomon cannot write to %r, named in report_to: the record holds every value, and "
                "sinks=[geomon.Logger(function)] sends values to a function of yours",
                name,
            )
    return sinks


# For each service, the function of its module that takes values and their step.
_LOGS: dict[str, Callable[[Any], Callable[[dict[str, float], int], object]]] = {
    "comet_ml": lambda comet: (
        lambda values, step: comet.get_running_experiment().log_metrics(values, step=step)
    ),
    "swanlab": lambda swanlab: lambda values, step: swanlab.log(values, step=step),
    "trackio": lambda trackio: (
        lambda values, step: trackio.log({**values, "train/global_step": step})
    ),
}


def _board_of(args: Any) -> Path:
    """Return a folder inside the one where this process writes event files for the Trainer."""
    root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir, "runs"))
    root = root.expanduser()
    files = root.rglob(f"events.out.tfevents.*.{os.getpid()}.*")
    others = (file for file in files if _BOARD not in file.relative_to(root).parts)
    made = {file.parent: file.stat().st_mtime_ns for file in others}
    return max(made, key=lambda folder: made[folder], default=root) / _BOARD


__all__ = ["GeometryMonitor"]
