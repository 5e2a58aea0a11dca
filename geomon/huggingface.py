"""GeometryMonitor, the Hugging Face callback: Trainer's events, translated into `monitor(step)`.

The Trainer has no event between forward and backward, none when training raises, and none that
hands a callback what would report its values; the comments below say how each is made up for.
"""

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from geomon.capture.anatomy.blocks import find_anatomy
from geomon.metrics.table import METRICS, Metric, check_metrics
from geomon.monitor.monitor import Monitor
from geomon.monitor.options import check_counts
from geomon.monitor.schedule import Schedule, check_schedule
from geomon.record.reading import Reading
from geomon.record.sinks import Sink
from geomon.record.tags import layout
from geomon.show.pictures import Pictures

log = logging.getLogger("geomon")

_SHOWS_PICTURES = (TensorBoardCallback, WandbCallback)

# What a callback holds of the training that is going on, and no copy of it takes along.
_OF_A_TRAINING = {"_monitor", "_window", "_forward_end", "_callable"}


class GeometryMonitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watch the geometry of a model's representations while a `transformers.Trainer` trains it.

    `Trainer(model, args, callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to
    whatever the Trainer reports to (`report_to`) and into its `state.log_history`, pictures to
    TensorBoard and W&B, and every reading to `readings.jsonl` in the Trainer's `output_dir`.

    Without `probe` the training forward itself is watched (dropout on, no extra pass): of a step
    with accumulated gradients the first one. With `probe` an extra pass on fixed inputs runs before
    the step, and once more at the end of training: comparable from step to step.

    Args:
        metrics: From a name to a function of views.
        schedule: From a step to whether a reading is due; step 0 and the last always are.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches.
        probe: Fixed inputs for the model, or a function of it.
        directory: Where `readings.jsonl` is written; None takes the Trainer's `output_dir`.
        sinks: Where readings go besides what the Trainer reports to.
        budget: Largest share of the training's time that geomon may take; None for no limit.
        gather: With several ranks, whether a reading is that of the rows of all.
        background: Whether rows are measured in a thread while the training goes on; None does so
            on an accelerator.
        max_capture_mb: Largest memory of what one reading keeps of a pass; None for no limit.
        seed: Of the private generator that draws rows.
        strict: Raise what goes wrong in a reading, instead of a warning and a missing value.
        blocks: Overrides the search for the blocks.
        pictures: Whether TensorBoard and W&B get the profile over depth and the matrices of heads
            by layer, each time the step has doubled.

    Raises:
        ValueError: An unknown view, a schedule that never fires, a number out of range. When
            training starts: no blocks in the model, a directory that cannot be written.
    """

    _monitor: Monitor | None = None
    _window: AbstractContextManager[None] | None = None
    _forward_end: "_ForwardEnd | None" = None
    _callable: tuple[nn.Module, ...] = ()  # modules one of which is called for the loss
    _last = math.inf  # the last step

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
        if schedule is not None:
            check_schedule(schedule)
        self._settings: dict[str, Any] = {
            "metrics": check_metrics(metrics), "schedule": schedule, "tokens": tokens,
            "batches": batches, "probe": probe, "gather": gather, "budget": budget,
            "background": background, "max_capture_mb": max_capture_mb, "seed": seed,
            "strict": strict, "blocks": blocks,
        }  # fmt: skip
        self._directory = directory
        self._sinks = list(sinks)
        self._pictures = pictures

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._monitor.overhead if self._monitor is not None else math.nan

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: a copy made while training goes on starts with its own training."""
        return {name: value for name, value in vars(self).items() if name not in _OF_A_TRAINING}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Find the blocks and what reports; the model and its step are as training starts."""
        self._drop()
        callbacks = _handler().callbacks
        sinks: list[Sink] = [*self._sinks]
        sinks.append(_Reports(callbacks, args, state, control, {"model": model, **event}))
        if self._pictures and any(isinstance(callback, _SHOWS_PICTURES) for callback in callbacks):
            post = functools.partial(_post, callbacks)
            sinks.append(Pictures(post, affords=self._affords))
        directory = self._directory or args.output_dir
        self._monitor = Monitor(model, directory=directory, sinks=sinks, **self._settings)
        self._last = state.max_steps - 1
        self._callable = ()
        if self._settings["probe"] is not None:
            return
        if args.n_gpu > 1:
            log.warning(
                "the training forward cannot be watched on copies of the model in threads "
                "(DataParallel): start one process for each GPU, with torchrun, or give probe="
            )
        else:
            self._callable = _around_blocks(model, self._settings["blocks"])

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Probe, or open the window on the step's first forward pass."""
        self._probe(state.global_step)
        if self._monitor is not None and self._callable:
            force = state.global_step == self._last
            if self._monitor.due(state.global_step, force=force):
                # Open before the call and not in it: a compiled model must be told to run eagerly
                # from outside, and masks are read as they enter the outermost module.
                self._window = self._monitor(state.global_step, force=force)
                self._window.__enter__()
                self._forward_end = _ForwardEnd(self._callable, self._shut)

    def on_substep_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Close the window if the loss was computed without calling the model."""
        self._shut()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The same, where one batch makes a step: the weights are still those that were seen."""
        self._shut()

    def on_step_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The end, before the Trainer may load the best weights in place of the last."""
        if control.should_training_stop:
            self._end(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The same, where an evaluation has stopped the training."""
        if control.should_training_stop:
            self._end(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The end, where nothing announced it; what is probed has to be the last weights."""
        self._end(None if args.load_best_model_at_end else state.global_step)

    def _end(self, step: int | None) -> None:
        """The last probe, and the last pictures: at `on_train_end` TensorBoard is closed."""
        if step is not None:
            self._probe(step, force=True)
        if self._monitor is not None:
            self._monitor.close()

    def _affords(self, seconds: float) -> bool:
        return self._monitor is None or self._monitor.affords(seconds)

    def _probe(self, step: int, *, force: bool = False) -> None:
        """Read the fixed inputs, if there are any and a reading is due."""
        if self._monitor is None or self._settings["probe"] is None:
            return
        if force and not self._monitor.affords_reading():
            return
        if self._monitor.due(step, source="probe", force=force):
            self._monitor.probe(step)

    def _shut(self, error: BaseException | None = None) -> None:
        """Close the window, if one is open; after an error nothing is measured."""
        window, self._window = self._window, None
        end, self._forward_end = self._forward_end, None
        if end is not None:
            end.remove()
        if window is not None:
            window.__exit__(type(error) if error else None, error, None)

    def _drop(self) -> None:
        """Close a window on which no forward pass was run: there is nothing to measure."""
        self._shut(GeneratorExit())


def _around_blocks(
    model: nn.Module, blocks: str | Sequence[nn.Module] | None
) -> tuple[nn.Module, ...]:
    """The model and what holds its blocks: some trainers call a part of it for their loss."""
    found = find_anatomy(model, blocks).blocks
    inside = {module for block in found for module in block.module.modules()}
    return tuple(
        module
        for module in model.modules()
        if module not in inside and not inside.isdisjoint(module.modules())
    )


class _ForwardEnd:
    """Says when the outermost call of some modules ends, whatever ends it.

    For that time it stands in for their `forward`. A forward hook would be skipped by Ctrl-C, even
    one registered with `always_call`, and what it should close would stay for ever.
    """

    def __init__(
        self, modules: Iterable[nn.Module], then: Callable[[BaseException | None], None]
    ) -> None:
        self._then = then
        self._placed = ExitStack()
        for module in modules:
            self._stand_in(module)

    def remove(self) -> None:
        """Give each module its own `forward` back; may be called more than once."""
        self._placed.close()

    def _stand_in(self, module: nn.Module) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.remove()  # the first that is called is the outermost
            try:
                output = forward(*args, **kwargs)
            except BaseException as error:
                self._then(error)
                raise
            self._then(None)
            return output

        if "forward" in vars(module):  # mixed precision puts one there
            self._placed.callback(setattr, module, "forward", forward)
        else:
            self._placed.callback(delattr, module, "forward")
        module.forward = watched


class _Reports:
    """A sink that does what `Trainer.log` does: into the history, then to each callback.

    But for those that print: hundreds of values would bury the loss in the terminal.
    """

    def __init__(
        self, callbacks: list[Any], args: Any, state: Any, control: Any, event: Mapping[str, Any]
    ) -> None:
        self._callbacks = callbacks
        self._of_training = (args, state, control)
        self._event = event
        self._laid_out = False

    def write(self, reading: Reading) -> None:
        args, state, control = self._of_training
        # A reading may be of an earlier step, put off by the budget or measured in the background.
        then = replace(state, global_step=reading.step)
        # The history is saved as JSON with each checkpoint: a number of another kind ends the run.
        logs = {tag: float(value) for tag, value in reading.charted().items()}
        if not self._laid_out:
            self._lay_out(logs)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": reading.step})
        for callback in self._callbacks:
            if not isinstance(callback, PrinterCallback | ProgressCallback):
                callback.on_log(args, then, control, logs=dict(logs), **self._event)

    def close(self) -> None: ...

    def _lay_out(self, logs: Mapping[str, float]) -> None:
        self._laid_out = True
        charts = {
            f"train/{title}": [kind, [f"train/{pattern}" for pattern in patterns]]
            for title, (kind, patterns) in layout(logs)["geomon"].items()
        }
        for writer in _writers(self._callbacks):
            writer.add_custom_scalars({"geomon": charts})


def _handler() -> Any:
    """The handler that is calling a callback's event.

    It knows the callbacks that report, and transformers passes it to none: it is found among those
    who call.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    raise RuntimeError("GeometryMonitor's events are the Trainer's to call: Trainer(callbacks=...)")


def _writers(callbacks: Iterable[Any]) -> list[Any]:
    """TensorBoard's writers."""
    boards = [callback for callback in callbacks if isinstance(callback, TensorBoardCallback)]
    return [board.tb_writer for board in boards if board.tb_writer is not None]


def _post(callbacks: Iterable[Any], name: str, image: Any, step: int) -> None:
    """Show a picture wherever the Trainer reports to something that shows pictures."""
    for writer in _writers(callbacks):
        writer.add_image(name, image, step, dataformats="HWC")
    if any(isinstance(callback, WandbCallback) for callback in callbacks):
        import wandb

        if wandb.run is not None:
            wandb.log({name: wandb.Image(image), "train/global_step": step})


__all__ = ["GeometryMonitor"]
