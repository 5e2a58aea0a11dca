"""Modes: what geomon computes beside a training is no business of the training's own modes.

A mode that counts operations, that changes them, or that keeps what a checkpointed block computes,
must not meet operators that the training did not call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

from geomon.capture import private


def unseen() -> AbstractContextManager[None]:
    """Keep the operators of the body from all modes of torch, and from tensor subclasses."""
    return _Unseen()


@contextmanager
def without_modes() -> Iterator[None]:
    """Run an extra pass of the model outside the training's modes, which would count or change it.

    Functions of tensor subclasses stay, which weights of the model may be, and so does the default
    device, on which the model may make tensors.
    """
    pop, push = private.pop_function_mode, private.push_function_mode
    taken: list[Any] = []
    with private.hide_modes():
        try:
            while private.function_modes() > 0:
                taken.append(pop())
            for mode in reversed([mode for mode in taken if isinstance(mode, private.device_mode)]):
                push(mode)
            yield
        finally:
            while private.function_modes() > 0:
                pop()
            while taken:
                push(taken.pop())


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
                assert top is not None
                assert pop is not None
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
