"""Observe the calls of one pass on behalf of a window."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from geomon.capture.anatomy import Anatomy
from geomon.capture.calling.calls import unwatch_calls, watch_calls
from geomon.capture.calling.patches import in_extra_pass, records_gradients
from geomon.capture.guard import Guard
from geomon.capture.modes import unseen
from geomon.capture.pass_recorder import PassRecorder
from geomon.capture.tracker import Tracker
from geomon.capture.wanted import Wanted


class PassObserver:
    """Is notified of the calls of a pass (see `geomon.capture.calling.calls.CallObserver`).

    Args:
        anatomy: Anatomy of the model.
        wanted: The views and layers that are wanted.
        tracker: Decides which calls count.
        recorder: Keeps what the calls show.
        guard: Keeps errors and counts time.
        may_run_eagerly: Whether to run compiled code eagerly if a twin is impossible.

    Attributes:
        forced_eager: Whether the training's compiled code ran eagerly.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        wanted: Wanted,
        tracker: Tracker,
        recorder: PassRecorder,
        guard: Guard,
        *,
        may_run_eagerly: bool,
    ) -> None:
        self._anatomy, self._wanted, self._tracker = anatomy, wanted, tracker
        self._recorder, self._guard = recorder, guard
        self._calls, self._operators = recorder.calls, recorder.operators
        self._may_run_eagerly = may_run_eagerly
        self.forced_eager = False

    def open(self) -> None:
        """Begin to observe calls."""
        self._recorder.watch(self._anatomy)
        if self._wanted.operators:
            self._recorder.attention.guarded = self._guard.guarded
            self._operators.open()
        self._operators.find_compiled(self.modules(), inside=self._wanted.operators)
        watch_calls(self)

    def close(self) -> None:
        """Remove everything that was placed; may be called more than once."""
        self._operators.close()
        unwatch_calls(self)
        self._recorder.forget()

    def timed(self) -> AbstractContextManager[None]:
        """Return a context manager that counts time as taken from the training."""
        return self._guard.timed()

    def modules(self) -> Iterator[nn.Module]:
        """List the modules of the model, which may be compiled in place."""
        above = [module for stack in self._anatomy.stacks for module in stack.above]
        inside = [part for block in self._anatomy.blocks for part in (block.module, *block.parts)]
        for root in above[:1] or inside:  # the outermost one holds all of them
            yield from root.modules()

    def watches(self, module: nn.Module) -> bool:
        """Whether a module's calls are watched."""
        return self._calls.has(module)

    def before_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Handle a call that begins."""
        if self._tracker.is_ignored():
            return
        for action in self._calls.before(module):
            with self._guard.guarded(), unseen():
                action(module, args, kwargs)
        self._operators.turn()

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Handle a call that has returned."""
        if self._tracker.is_ignored():
            return
        for action in self._calls.after(module):
            with self._guard.guarded(), unseen():
                action(module, output)
        self._operators.turn()
        if self._recorder.has_seen_all:
            self._operators.rest()
        else:
            self._operators.go_on()
        self._recorder.has_seen_all = False
        self._rest()

    def seeing(self, module: nn.Module) -> AbstractContextManager[None] | None:
        """Return what shows the operators of a module's call; None if not needed."""
        return self._operators.seeing(module)

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are not seen."""
        return self._operators.suspended()

    def on_failure(self, error: Exception) -> None:
        """Keep an error for the notes."""
        self._guard.keep(error)

    # -- compiled code ---------------------------------------------------------------------------

    def hides(self, module: nn.Module) -> bool:
        """Whether a block, or what runs blocks, has compiled code in it."""
        return self._operators.hides(module)

    def needs_twin(self, module: nn.Module) -> bool:
        """Whether a module's compiled code hides what must be seen."""
        if self._tracker.is_over(with_gradients=records_gradients()):
            return False
        inside = self._wanted.attention and self._tracker.current is not None
        watched = inside or any(map(self._calls.has, module.modules()))
        return watched and not self._tracker.is_ignored()

    def forces_eager(self) -> bool:
        """Whether the training's compiled code must run eagerly because a twin is impossible."""
        self.forced_eager = self._may_run_eagerly
        return self._may_run_eagerly

    def on_compiled_end(self, module: nn.Module, output: Any) -> None:
        """Remember the output of a compiled block."""
        if not self._tracker.is_ignored():
            self._recorder.hand_on(module, output)
        self._rest()

    def _rest(self) -> None:
        """Close early if nothing more can be seen, so the rest runs untouched."""
        if self._wanted.final_norm or in_extra_pass() or self._calls.is_empty:
            return
        over = self._tracker.is_over(with_gradients=True) and not self._tracker.above
        if over and self._tracker.has_attention:
            self.close()
