"""A torch mode that sees the operators of a window's thread.

It works below autograd and replaces nothing: each operator runs as it was called.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from geomon.capture import private
from geomon.capture.tap.operators import ROUTES, kind_of, on_this_rank, op_of
from geomon.capture.tap.outputs import Shown
from geomon.capture.tap.plan import Known, Learner
from geomon.capture.tap.provenance import Provenance
from geomon.capture.tap.stream import Stream
from geomon.failures import failures

Sight = Provenance | Stream | None


class TapObserver(Protocol):
    """An object that is notified of attention; none of its errors reach the model."""

    def on_fused(self, route: str, given: dict[str, Any]) -> None:
        """Handle a call of a fused attention operator."""

    def on_fused_output(self, route: str, given: dict[str, Any], result: Any) -> None:
        """Handle what such a call has returned, if the block's plan is being made."""

    def on_softmax(self, scores: Tensor, dim: int, *, logarithm: bool) -> None:
        """Handle a softmax."""

    def on_choice(self, scores: Tensor, chosen: Tensor) -> None:
        """Handle a choice of the largest entries (`topk`)."""

    def on_head_outputs(self, shown: Shown) -> None:
        """Handle the outputs of heads, which are being projected."""

    def on_failure(self, error: Exception) -> None:
        """Handle one of geomon's own errors, raised while looking at a call."""


class Tap(dispatch.TorchDispatchMode):
    """Notifies an observer of the attention in its thread.

    Attributes:
        is_open: Whether the operators of a body are seen now.
        sight: The plan along which a block runs, or what follows its tensors, or None.
    """

    supports_higher_order_operators = True  # flex attention

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code runs eagerly meanwhile, so that operators need no guard of its own."""
        return False

    def __init__(self, observer: TapObserver) -> None:
        super().__init__()
        self._observer: TapObserver | None = observer
        self._thread = threading.get_ident()
        self.is_open = False
        self._bodies = 0
        self.sight: Known | Sight = None

    @property
    def _is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """See the operators of the body, in the thread that made the tap; bodies may be nested.

        The mode stays inside the call that it is opened for, because code around the call (compiled
        code, for example) saves and restores the state of torch's dispatcher.
        """
        if self._observer is None or not self._is_in_thread:
            yield
            return
        try:
            self._bodies += 1
            self.go_on()
            yield
        finally:
            self._bodies -= 1
            if not self._bodies:
                self._leave()

    def rest(self) -> None:
        """Observe nothing until `go_on` is called or another body begins.

        It also removes the mode if Ctrl-C left it after all bodies have ended.
        """
        if self.is_open and self._is_in_thread:
            self._leave()

    def go_on(self) -> None:
        """See the rest of a body again after `rest`."""
        if self._bodies and not self.is_open and self._observer is not None and self._is_in_thread:
            self._enter()

    def _enter(self) -> None:
        self.is_open = True
        self.__enter__()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Remove the mode for a while, because compiled code runs compiled only without modes."""
        if not self.is_open or not self._is_in_thread:
            yield
            return
        try:
            self._leave()
            yield
        finally:
            self._enter()

    def close(self) -> None:
        """See nothing more; may be called more than once, inside a body and after Ctrl-C."""
        self._observer = self.sight = None

    def _leave(self) -> None:
        """Remove the mode from the stack, even from below modes that Ctrl-C left there."""
        top, pop, push = private.top_mode, private.pop_mode, private.push_mode
        if top is None or pop is None or push is None:
            self.is_open = False
            self.__exit__(None, None, None)
            return
        above: list[Any] = []
        while (mode := top()) is not None and mode is not self:
            above.append(pop())
        if mode is self:
            pop()
        for other in reversed(above):
            push(other)
        self.is_open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and show it to the observer if it belongs to attention."""
        kwargs = kwargs or {}
        # Recomputation in a backward pass was seen before.
        if self._observer is None or private.graph_task() != -1:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode, composite operators arrive undecomposed
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        sight = self.sight
        if isinstance(sight, Known):
            return self._run_known(sight, func, args, kwargs)
        self._try(self._before, sight, func, types, args, kwargs)
        result = func(*args, **kwargs)
        self._try(self._after, sight, func, types, args, kwargs, result)
        return result

    def _run_known(
        self, known: Known, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator of a block whose plan is known."""
        step = None
        try:
            step = known.next(func, args, kwargs)
        except failures() as error:
            known.departed = True
            if self._observer is not None:
                self._observer.on_failure(error)
        if step is None:
            return func(*args, **kwargs)
        self._try(self._show, func, args, kwargs)
        result = func(*args, **kwargs)
        self._try(known.keep, step, args, result)
        self._try(self._show_outputs, known)
        self._try(self._show_result, func, args, result)
        return result

    def _try(self, act: Callable[..., None], *given: Any) -> None:
        """Call a function of geomon's own, whose errors the observer is told."""
        try:
            act(*given)
        except failures() as error:
            if self._observer is not None:
                self._observer.on_failure(error)

    def _before(
        self, sight: Sight, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Follow an operator that is about to run."""
        kind = kind_of(func)
        if isinstance(sight, Learner):
            sight.begin(func, args, kwargs)
        if sight is not None and kind.writes:
            own = on_this_rank(args, {}) if types else args
            given = kind.by_name(own, kwargs)
            written = [given[each] for each in kind.writes if each in given]
            sight.before_write(kind.name, written, own)
        self._show(func, args, kwargs)

    def _after(
        self,
        sight: Sight,
        func: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Follow an operator that has run."""
        kind = kind_of(func)
        self._show_result(func, args, result)
        if self._observer is not None and isinstance(sight, Learner) and kind.role in ROUTES:
            self._observer.on_fused_output(kind.role, kind.by_name(args, kwargs), result)
        if sight is not None:  # follow this rank's parts of DTensors
            sight.follow(op_of(func, types, args, kwargs, result))
        if isinstance(sight, Learner):
            self._show_outputs(sight)

    def _show(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show a call of attention that is about to run."""
        kind = kind_of(func)
        if self._observer is None:
            return
        if kind.role == "softmax":
            self._observer.on_softmax(args[0], args[1], logarithm=kind.name == "_log_softmax")
        elif kind.role in ROUTES:
            self._observer.on_fused(kind.role, kind.by_name(args, kwargs))

    def _show_outputs(self, sight: Learner | Known) -> None:
        """Show the outputs of heads that the operator projected."""
        for shown in sight.take_shown():
            if self._observer is not None:
                self._observer.on_head_outputs(shown)

    def _show_result(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Show a choice that was made."""
        if self._observer is not None and kind_of(func).role == "choice":
            self._observer.on_choice(args[0], result[1])
