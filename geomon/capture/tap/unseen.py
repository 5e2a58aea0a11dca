"""Unseen: what geomon computes beside a training is no business of the training's own modes.

A mode that counts operations, that changes them, or that keeps what a checkpointed block computes,
must not meet operators that the training did not call.
"""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from geomon.capture import private


def unseen() -> AbstractContextManager[None]:
    """Keep the operators of the body from all modes of torch, and from tensor subclasses."""
    return _Unseen()


class _Unseen:
    """Takes the modes of this thread away; written out, as it is entered 200 times in a pass."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None
        self._functions: Any = None
        self._modes: list[Any] = []

    def __enter__(self) -> None:
        self._functions = private.without_functions()
        self._functions.__enter__()
        try:
            top, pop = private.top_mode, private.pop_mode
            takes = top is not None and pop is not None and private.push_mode is not None
            if takes and not (private.transforms() or private.traced_modes()):
                assert top is not None and pop is not None
                while top() is not None:
                    self._modes.append(pop())
                return
            with ExitStack() as stack:
                if private.transforms():
                    stack.enter_context(private.leave_transforms())
                stack.enter_context(private.hide_modes())
                self._stack = stack.pop_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stack is not None:
            self._stack.close()
        while self._modes:
            assert private.push_mode is not None
            private.push_mode(self._modes[-1])
            self._modes.pop()
        self._functions.__exit__(kind, error, trace)
