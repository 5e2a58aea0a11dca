"""GeometryMonitor, the Hugging Face callback: Trainer's events, translated into calls of a session.

The Trainer has no event between forward and backward, none when training raises, and none that
hands a callback what would report its values; the comments below say how each is made up for.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack

from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from geomon.monitor import CallbackOptions, CallbackSession, show_callback_options
from geomon.record import Reading, Sink
from geomon.record.sinks import ChartLayout, WandB, post_picture_to_writer
from geomon.show import Pictures

log = logging.getLogger("geomon")


@show_callback_options
class GeometryMonitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watch the geometry of a model's representations while a `transformers.Trainer` trains it.

    `Trainer(model, args, callbacks=[GeometryMonitor()])`: no argument is needed. Curves go to
    whatever the Trainer reports to (`report_to`) and into its `state.log_history`, pictures to
    TensorBoard and W&B, and every reading to `readings.jsonl` in the Trainer's `output_dir`.

    Without `probe` the training forward itself is watched (dropout on, no extra pass): of a step
    with accumulated gradients the first one. With `probe` an extra pass on fixed inputs runs before
    the step, and once more at the end of training: comparable from step to step. The last step is
    always read.

    Args:
    {options}
    """

    def __init__(self, **options: Unpack[CallbackOptions]) -> None:
        self._session = CallbackSession(options, type(self).__name__)

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return self._session.overhead

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **event: Any
    ) -> None:
        """Find the blocks and what reports; the model and its step are as training starts."""
        reports = _Reports(_handler().callbacks, args, state, control, {"model": model, **event})
        sinks: list[Sink] = [reports]
        if self._session.options["pictures"] and reports.show_pictures:
            sinks.append(Pictures(reports.post, affords=self._session.affords))
        self._session.start(model, state.global_step, args.output_dir, sinks)
        if args.n_gpu > 1 and not self._session.probes:
            log.warning(
                "the training forward cannot be watched on copies of the model in threads "
                "(DataParallel): start one process for each GPU, with torchrun, or give probe="
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Probe, or open the window on the step's first forward pass."""
        self._session.probe(state.global_step)
        # Open before the call and not in it: a compiled model must be set to run eagerly from
        # outside, and masks are read as they enter the outermost module.
        if self._session.probes or args.n_gpu > 1:
            return
        window = self._session.open(
            state.global_step, force=state.global_step == state.max_steps - 1
        )
        if window is not None and self._session.monitor is not None:
            around = self._session.monitor.modules_around_blocks()
            window.callback(_ForwardEnd(around, self._session.close).remove)

    def on_substep_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Close the window if the loss was computed without calling the model."""
        self._session.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """The same, where one batch makes a step: the weights are still those that were seen."""
        self._session.close()

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
            self._session.probe(step, last=True)
        if self._session.monitor is not None:
            self._session.monitor.close()


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
        self, callbacks: list[Any], args: Any, state: Any, control: Any, event: dict[str, Any]
    ) -> None:
        self._callbacks = callbacks
        self._training = (args, state, control)
        self._event = event
        self._layout = ChartLayout("train/")
        self._wandb: WandB | None = None
        self._has_wandb = any(isinstance(callback, WandbCallback) for callback in callbacks)
        self._boards = [c for c in callbacks if isinstance(c, TensorBoardCallback)]
        self.show_pictures = bool(self._boards) or self._has_wandb

    def write(self, reading: Reading) -> None:
        args, state, control = self._training
        # A reading may be of an earlier step, put off by the budget or measured in the background.
        then = replace(state, global_step=reading.step)
        # The history is saved as JSON with each checkpoint: a number of another kind ends the run.
        logs = {tag: float(value) for tag, value in reading.charted().items()}
        self._layout.write_once(reading, self._writers())
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": reading.step})
        for callback in self._callbacks:
            if not isinstance(callback, PrinterCallback | ProgressCallback | WandbCallback):
                callback.on_log(args, then, control, logs=dict(logs), **self._event)
        if (sink := self._wandb_sink()) is not None:
            sink.write(reading)

    def post(self, name: str, image: Any, step: int) -> None:
        for writer in self._writers():
            post_picture_to_writer(writer, name, image, step)
        if (sink := self._wandb_sink()) is not None:
            sink.post(name, image, step)

    def close(self) -> None: ...

    def _wandb_sink(self) -> WandB | None:
        """The sink of W&B's run, which the Trainer starts as training begins."""
        if self._wandb is None and self._has_wandb:
            import wandb

            if wandb.run is not None:
                self._wandb = WandB(wandb.run, prefix="train/")
        return self._wandb

    def _writers(self) -> list[Any]:
        """TensorBoard's writers, which the Trainer makes as training begins."""
        return [board.tb_writer for board in self._boards if board.tb_writer is not None]


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


__all__ = ["GeometryMonitor"]
