"""Patches: process-wide switches that a window sets and restores.

Several windows may be open at once and close in any order, so each patch knows its holders: the
first applies it, and the last restores the previous value unless somebody else changed it since.
Ctrl-C may strike between any two lines, so the undo is recorded before the change is made, and
undoing twice is safe.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Undo = Callable[[Callable[[], Any]], None]  # records a function that undoes a change


@dataclass
class _Body:
    """Holder of a patch for the body of a `with`."""

    thread: int


class Patch:
    """A process-wide change, made by `apply` for the first holder and undone after the last.

    `apply` receives a function that records how to undo the change.
    """

    def __init__(self, apply: Callable[[Undo], None]) -> None:
        self._apply = apply
        self._holders: list[object] = []
        self._suspensions: list[object] = []
        self._undo: list[Callable[[], Any]] = []
        self._lock = threading.RLock()

    @property
    def holders(self) -> tuple[Any, ...]:
        """All holders, oldest first."""
        return tuple(self._holders)

    def hold(self, holder: object) -> None:
        """Make the change unless it is made, and keep it until this holder releases it."""
        with self._lock:
            self._holders.append(holder)
            self._settle()

    def release(self, *holders: object) -> None:
        """Undo the change if nobody else holds it; unknown holders are ignored."""
        with self._lock:
            released = set(map(id, holders))
            self._holders[:] = [other for other in self._holders if id(other) not in released]
            if not self._holders:
                self._suspensions.clear()
            self._settle()

    @contextmanager
    def held(self, holder: object = None) -> Iterator[None]:
        """Make the change for the body; a holder that may be left by Ctrl-C is released later."""
        holder = holder or _Body(threading.get_ident())
        try:
            self.hold(holder)
            yield
        finally:
            self.release(holder)

    def end_bodies(self) -> None:
        """Release what bodies of this thread hold that Ctrl-C ended early."""
        bodies = [holder for holder in self._holders if isinstance(holder, _Body)]
        self.release(*(body for body in bodies if body.thread == threading.get_ident()))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo the change during the body, regardless of holders."""
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
    """Set an attribute, and restore it on undo if it still has this value.

    Args:
        undo: Records the function that undoes the change.
        holder: The object that has the attribute.
        name: Name of the attribute.
        value: Its new value.
    """
    before = vars(holder)[name]

    def restore() -> None:
        if vars(holder).get(name) is value:
            setattr(holder, name, before)

    undo(restore)
    setattr(holder, name, value)


# -- switches of torch ---------------------------------------------------------------------------


def _force_eager(undo: Undo) -> None:
    """Run compiled functions eagerly, because compiled code may raise under a torch mode."""
    stances: list[Any] = []

    def restore() -> None:
        compiler = getattr(torch._dynamo, "eval_frame", None)
        now = getattr(getattr(compiler, "_stance", None), "stance", _EAGERLY)
        if stances and now == _EAGERLY:  # nobody has set another stance since
            stances[0].__exit__(None, None, None)

    undo(restore)
    stances.append(torch.compiler.set_stance(_EAGERLY))


_EAGERLY = "force_eager"


class _Passes(threading.local):
    """For each pass of the monitor's own that a thread is in, whether training had gradients."""

    def __init__(self) -> None:
        self.own: list[bool] = []


_passes = _Passes()


@contextmanager
def extra_pass_begun() -> Iterator[None]:
    """Mark the body as a pass of the monitor's own, not part of training, in this thread."""
    depth = len(_passes.own)
    try:
        _passes.own.append(torch.is_grad_enabled())
        yield
    finally:
        del _passes.own[depth:]


def end_extra_passes() -> None:
    """Remove marks and switches that Ctrl-C left in this thread."""
    _passes.own.clear()
    for patch in (without_fast_path, run_eagerly):
        patch.end_bodies()


def in_extra_pass() -> bool:
    """Whether this thread is in a pass of the monitor's own."""
    return bool(_passes.own)


def records_gradients() -> bool:
    """Whether the training records gradients here, or did when the current extra pass began."""
    return _passes.own[-1] if in_extra_pass() else torch.is_grad_enabled()


def _forbid_fast_path(undo: Undo) -> None:
    """Disable the fused inference path of `nn.TransformerEncoder`, which calls no inner modules."""
    if torch.backends.mha.get_fastpath_enabled():
        undo(lambda: torch.backends.mha.set_fastpath_enabled(True))
        torch.backends.mha.set_fastpath_enabled(False)


def _make_subclasses(undo: Undo) -> None:
    """Let tensor classes be called: a tensor that a mode has seen cannot become a subclass."""
    importlib.import_module("torch._dynamo")  # any mode imports it, and it reads this name
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
subclasses = Patch(_make_subclasses)  # held by taps, which can be suspended
without_fast_path = Patch(_forbid_fast_path)
