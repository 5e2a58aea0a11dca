"""Session that the callbacks of all training frameworks share.

A callback only translates its framework's events into calls of a `CallbackSession`.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn

from geomon.capture import FirstCall
from geomon.monitor.held_out import HeldOut
from geomon.monitor.monitor import Monitor
from geomon.monitor.options import (
    VALIDATION,
    CallbackOptions,
    MonitorOptions,
    check_callback_options,
    declared,
)
from geomon.record import LOSS, Sink, printable, text_of, with_noun

# Function of the keyword arguments of the model's call, and of its output.
Seen = Callable[[Mapping[str, Any], Any], object]


class CallbackSession:
    """The trainings of one callback, one after another; before the first, every call does nothing.

    A copy or a pickle of a session has only its options, and starts with its own training.

    Args:
        options: The options passed to the callback.
        owner: Name of the callback's class, for messages.

    Attributes:
        options: All options of the callback, checked.
        monitor: Monitor of the current training; None before training.
        held_out: Receives the batches of the trainer's validation, if those are read.

    Raises:
        TypeError: If an option does not exist.
        ValueError: If a metric reads an unknown view, the schedule never fires, or a number is out
            of range.
    """

    def __init__(self, options: CallbackOptions, owner: str) -> None:
        self.options = check_callback_options(options, owner)
        self.monitor: Monitor | None = None
        self.held_out = self._new_held_out()
        self._step = 0  # the training's present step
        self._owner = owner
        self._window: ExitStack | None = None
        self._first_call: FirstCall | None = None  # waits for the forward pass

    @property
    def probes(self) -> bool:
        """Whether extra passes read fixed inputs, instead of watching the training forward."""
        return self.options["probe"] is not None

    @property
    def waits(self) -> bool:
        """Whether the trainer must make a validation before anything can be read."""
        return self._reads_validation and not self.held_out.is_ready

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the values that every reading holds in addition to the metrics."""
        return LOSS, *self.options["log"]

    @property
    def overhead(self) -> float:
        """Share of the training's wall time that geomon took; NaN before training."""
        return math.nan if self.monitor is None else self.monitor.overhead

    def __repr__(self) -> str:
        """Show the callback with its main options, or its monitor during training."""
        if self.monitor is not None:
            return self._owner + repr(self.monitor).removeprefix("Monitor")
        given = self.options
        probed = f"probe={text_of(given['probe'])}" if self.probes else "the training forward"
        parts = [
            with_noun(len(given["metrics"]), "metric"),
            f"schedule={text_of(given['schedule'])}",
            with_noun(given["tokens"], "token"),
            probed if len(probed) < 80 else f"probe={type(given['probe']).__name__}",
        ]
        return printable(f"{self._owner}({', '.join(parts)})")

    def start(
        self,
        model: nn.Module,
        step: int,
        directory: str | os.PathLike[str],
        sinks: Sequence[Sink],
        *,
        last_step: int | None = None,
        validates: bool = True,
    ) -> None:
        """Start watching the model of a training.

        Args:
            model: The model that is trained.
            step: Number of optimizer updates already in the weights.
            directory: Folder of the record if the options name none. The current directory means
                the default folder of a `Monitor`.
            sinks: Sinks that get readings, in addition to the record and the sinks of the options.
            last_step: The last step of the training. Defaults to None, for unknown.
            validates: Whether the trainer validates during the training. Defaults to True.

        Raises:
            ValueError: If the model has no blocks, the directory cannot be written, or validation
                batches are to be read but there are none.
        """
        self.discard()
        if self._reads_validation and not validates:
            raise ValueError(
                f"{self._owner}(probe='{VALIDATION}') reads the batches of the trainer's own "
                "validation, but it makes none: give the trainer validation data, or pass a loader "
                "here, probe=loader"
            )
        shown = ("pictures", "detail")  # options for the callback's own displays
        options = {name: value for name, value in self.options.items() if name not in shown}
        elsewhere = os.path.realpath(directory) != os.path.realpath(os.curdir)
        options["directory"] = options["directory"] or (
            directory if elsewhere else declared(MonitorOptions)["directory"].default
        )
        if self._reads_validation:
            options["probe"] = self.held_out
        options["log"] = self.logged
        self.monitor = Monitor(model, **options)  # type: ignore[arg-type]
        self.monitor.add_loggers(sinks)
        self.monitor.expect_end(last_step)
        self._step = step

    def open(self, step: int, *, force: bool = False) -> None:
        """Open a window on the next forward pass if a reading is due.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Whether to read regardless of schedule and budget. Defaults to False.
        """
        if self._is_due(step, force=force):
            self._open_or_proceed(step, force=force)

    def open_at_call(
        self, step: int, *, force: bool = False, seen: Seen = lambda arguments, output: None
    ) -> None:
        """Open a window on the next call of the model, and close it when the call ends.

        The window closes however the call ends, and nothing is open before. After a call without
        gradients, the window waits, without touching the model, for a call with gradients, which
        then counts instead.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Whether to read regardless of schedule and budget. Defaults to False.
            seen: Called with the keyword arguments of the call, and its output. Defaults to a
                function that does nothing.
        """
        if not self._is_due(step, force=force) or self.monitor is None:
            return
        monitor = self.monitor

        def show(*call: Any) -> None:
            failed = "what the model returned cannot be read"
            with monitor.charge():
                monitor.warnings.attempt(lambda: seen(*call), failed, once=True)

        with self.monitor.charge():
            self._first_call = _SeenCall(
                self.monitor.passes.blocks.modules_around(),
                before=lambda: self._open_or_proceed(step, force=force),
                after=self.close,
                between=self.monitor.passes.pause,
            )
            self._first_call.seen = show
            self._first_call.begin()

    def _is_due(self, step: int, *, force: bool) -> bool:
        """Move to a step; return whether to watch its forward pass."""
        if self.monitor is None:
            return False
        self.discard()
        self._step = step
        self.monitor.advance(step)
        return self.monitor.is_due(step, force=force)

    def _open_or_proceed(self, step: int, *, force: bool) -> None:
        """Open the window of the step, or let the open one see calls again."""
        assert self.monitor is not None
        if self._window is not None:
            self.monitor.passes.proceed()
            return
        with ExitStack() as stack:
            stack.enter_context(self.monitor(step, force=force))
            self._window = stack.pop_all()

    def close(self, error: BaseException | None = None) -> None:
        """Close the window, if one is open, and measure what it has seen.

        Args:
            error: Error that ended the forward pass; then nothing is measured. Defaults to None.
        """
        call = self._first_call
        if call is not None:
            call.end()
            self._first_call = None  # only now, because Ctrl-C may come in between
            if error is None and not call.came:  # a window says what was not seen
                self.open(self._step, force=True)
        window, self._window = self._window, None
        if window is not None:
            window.__exit__(type(error) if error else None, error, None)

    def discard(self) -> None:
        """Close a window without a forward pass, so that there is nothing to measure."""
        self.close(GeneratorExit())

    def probe(
        self,
        step: int,
        *,
        last: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Read the fixed inputs, if there are any and a reading is due.

        Args:
            step: Number of optimizer updates already in the weights.
            last: Whether this is the last reading of the run, which is made in any case. Defaults
                to False.
            around: Makes a context manager for the extra pass, such as the framework's precision.
        """
        if self.monitor is None or not self.probes:
            return
        self.monitor.advance(step)
        if self.waits:
            if last:
                self.monitor.warnings.warn(
                    f"the training made no validation, so probe='{VALIDATION}' read nothing"
                )
        elif self.monitor.is_due(step, source="probe", force=last):
            with around():
                self.monitor.probe(step)

    def log(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        """Put the values of `logged` into the reading of a step, if there is one.

        Args:
            step: Number of optimizer updates already in the weights.
            values: Returns the training's values by name; called only for a step that was read.
        """
        if self.monitor is None or not self.monitor.lacks_values(step):
            return
        known: dict[str, Any] = {}
        self.monitor.warnings.attempt(
            lambda: known.update(values()),
            "what the training logs cannot be read and is missing",
            once=True,
        )
        self.monitor.log(step, **{name: known.get(name) for name in self.logged})

    def watch_loss(self, step: int, loss: Any) -> None:
        """Raise an alert if the loss of any step jumps or is not finite.

        Args:
            step: Number of optimizer updates already in the weights.
            loss: A number, a tensor with one element, or None.
        """
        if self.monitor is not None:
            self.monitor.watch_loss(step, loss)

    def watch_rate(self, step: int, optimizer: Any) -> None:
        """Note the learning rate of an optimizer at a step.

        Args:
            step: Number of optimizer updates already in the weights.
            optimizer: The optimizer; anything else is passed over.
        """
        groups = getattr(optimizer, "param_groups", None)
        if self.monitor is not None and groups:
            self.monitor.watch_rate(step, groups[0].get("lr"))

    def finish(self) -> None:
        """End the training and leave nothing on the model; may be called more than once."""
        self.discard()
        if self.monitor is not None:
            self.monitor.close()
        self.held_out = self._new_held_out()

    @property
    def _reads_validation(self) -> bool:
        return isinstance(self.options["probe"], str)

    def _new_held_out(self) -> HeldOut:
        """Make a new collector for the batches of the next training's validation."""
        rows = self.options["tokens"] * self.options["splits"]
        return HeldOut(rows=rows if self._reads_validation else 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallbackSession, (self.options, self._owner)


class _SeenCall(FirstCall):
    """A first call that shows its arguments and its output."""

    seen: Seen

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and show it."""
        output = super().run(module, args, kwargs)
        self.seen(kwargs, output)
        return output


__all__ = ["CallbackSession"]
