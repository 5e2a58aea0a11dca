"""Patches: switches of the process that a window sets, and gives back.

Several windows may be open at once and close in any order, so each patch knows its holders: the
first one applies it, the last one restores what was there before, unless somebody else has changed
it since. Ctrl-C may come between any two of these lines: what undoes a change is noted before the
change is made, and everything can be undone twice.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Undo = Callable[[Callable[[], Any]], None]  # takes note of what undoes a change


@dataclass(eq=False)
class _Body:
    """What holds a patch for the body of a `with`."""

    thread: int


class Patch:
    """A change of the process that is made for its first holder and undone for its last.

    Args:
        apply: Makes the change; it is given a function that takes note of what undoes it.
    """

    def __init__(self, apply: Callable[[Undo], None]) -> None:
        self._apply = apply
        self._holders: list[object] = []
        self._suspensions: list[object] = []
        self._undo: list[Callable[[], Any]] = []
        self._lock = threading.RLock()

    @property
    def holders(self) -> tuple[Any, ...]:
        """All objects that hold the patch, in the order in which they came."""
        return tuple(self._holders)

    def hold(self, holder: object) -> None:
        """Make the change, if it is not made yet, and keep it until the holder releases it.

        Args:
            holder: Any object.
        """
        with self._lock:
            self._holders.append(holder)
            self._settle()

    def release(self, holder: object) -> None:
        """Undo the change if nobody else holds it; an object that does not hold it changes nothing.

        Args:
            holder: The object.
        """
        with self._lock:
            self._holders[:] = [other for other in self._holders if other is not holder]
            if not self._holders:
                self._suspensions.clear()
            self._settle()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the change for the body."""
        holder = _Body(threading.get_ident())
        try:
            self.hold(holder)
            yield
        finally:
            self.release(holder)

    def end_bodies(self) -> None:
        """Undo the change for the bodies of this thread that Ctrl-C has left without their end."""
        for holder in self.holders:
            if isinstance(holder, _Body) and holder.thread == threading.get_ident():
                self.release(holder)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo the change for a while, whoever holds it."""
        token = object()
        try:
            with self._lock:
                self._suspensions.append(token)
                self._settle()
            yield
        finally:
            with self._lock:
                self._suspensions[:] = [other for other in self._suspensions if other is not token]
                self._settle()

    def _settle(self) -> None:
        if self._suspensions or not self._holders:
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
        elif not self._undo:
            self._apply(self._undo.append)


def replace(undo: Undo, holder: Any, name: str, value: Any) -> None:
    """Set an attribute until that is undone, if it is still this value then.

    Args:
        undo: Takes note of what undoes the change.
        holder: The object that has the attribute.
        name: Name of the attribute.
        value: Its value.
    """
    before = vars(holder)[name]

    def restore() -> None:
        if vars(holder).get(name) is value:
            setattr(holder, name, before)

    undo(restore)
    setattr(holder, name, value)


# -- switches of torch ---------------------------------------------------------------------------


def _force_eager(undo: Undo) -> None:
    """Run compiled functions eagerly: with a mode of torch around it, compiled code may raise."""
    stances: list[Any] = []

    def restore() -> None:
        compiler = getattr(torch._dynamo, "eval_frame", None)
        now = getattr(getattr(compiler, "_stance", None), "stance", _EAGERLY)
        if stances and now == _EAGERLY:  # nobody has set another one since
            stances[0].__exit__(None, None, None)

    undo(restore)
    stances.append(torch.compiler.set_stance(_EAGERLY))


_EAGERLY = "force_eager"


@dataclass(eq=False)
class _ExtraPass:
    """A pass of the monitor's own."""

    records_gradients: bool  # the training, where the pass begins


_local = threading.local()


def _passes() -> list[_ExtraPass]:
    """Passes of the monitor's own that this thread is in."""
    passes: list[_ExtraPass] = vars(_local).setdefault("passes", [])
    return passes


@contextmanager
def extra_pass_begun() -> Iterator[None]:
    """Mark what this thread runs as a pass of the monitor's own, which is no part of training."""
    own, passes = _ExtraPass(torch.is_grad_enabled()), _passes()
    try:
        passes.append(own)
        yield
    finally:
        passes[:] = [other for other in passes if other is not own]


def end_extra_passes() -> None:
    """Take away marks and switches that Ctrl-C has left in this thread."""
    _passes().clear()
    without_fast_path.end_bodies()


def in_extra_pass() -> bool:
    """Whether this thread is running a pass of the monitor's own."""
    return bool(_passes())


def records_gradients() -> bool:
    """Whether the training records gradients here, or where the extra pass that runs has begun."""
    return _passes()[-1].records_gradients if in_extra_pass() else torch.is_grad_enabled()


def _forbid_fast_path(undo: Undo) -> None:
    """Keep `nn.TransformerEncoder` from its fused inference path, which calls no module inside."""
    if torch.backends.mha.get_fastpath_enabled():
        undo(lambda: torch.backends.mha.set_fastpath_enabled(True))
        torch.backends.mha.set_fastpath_enabled(False)


def _make_subclasses(undo: Undo) -> None:
    """Let classes of tensors be called: what a mode has seen cannot become one of a subclass."""
    importlib.import_module("torch._dynamo")  # which any mode does, and which looks at this name
    plain: Any = torch._C.TensorBase.__new__

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for window in subclasses.holders:
                stack.enter_context(window.suspended())
            return plain(kind, *args, **kwargs)

    def restore() -> None:
        if vars(Tensor).get("__new__") is placed:
            del Tensor.__new__

    placed = staticmethod(make)
    if "__new__" not in vars(Tensor):
        undo(restore)
        type.__setattr__(Tensor, "__new__", placed)


run_eagerly = Patch(_force_eager)
subclasses = Patch(_make_subclasses)  # held by what sees operators, and can be suspended
without_fast_path = Patch(_forbid_fast_path)
