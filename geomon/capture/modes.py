"""Hide geomon's operators from the training's own torch modes.

A mode that counts or changes operators, or stores what a checkpointed block computes, must not meet
operators that the training did not call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from geomon.capture import private


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the operators of the body from all torch modes and tensor subclasses."""
    taken: list[Any] = []  # faster than torch's own way, and a pass enters this 200 times
    inside = private.leave_transforms() if private.transforms() else _NOTHING
    with private.without_functions(), inside, _untaken_hidden():
        try:
            _take_operators(taken)
            yield
        finally:
            _put_back(private.push_mode, taken)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run an extra pass of the model outside the training's modes, which would count or change it.

    Functions of tensor subclasses stay active, because weights may be subclasses, and so does the
    default device, where the model may make tensors.
    """
    pop, push = private.pop_function_mode, private.push_function_mode
    operators: list[Any] = []
    functions: list[Any] = []
    with _untaken_hidden():
        try:
            _take_operators(operators)
            while private.function_modes() > 0:
                functions.append(pop())
            kept = [mode for mode in functions if isinstance(mode, private.device_mode)]
            _put_back(push, kept)
            yield
        finally:
            try:
                while private.function_modes() > 0:
                    pop()
                _put_back(push, functions)
            finally:
                _put_back(private.push_mode, operators)


_NOTHING = nullcontext()


def _untaken_hidden() -> AbstractContextManager[None]:
    """Return a context manager that hides the modes that `_take_operators` cannot take."""
    known = private.top_mode and private.pop_mode and private.push_mode
    return _NOTHING if known and not private.traced_modes() else private.hide_modes()


def _take_operators(taken: list[Any]) -> None:
    """Take the modes that see operators from their stack."""
    top, pop = private.top_mode, private.pop_mode
    if top is not None and pop is not None and private.push_mode is not None:
        while top() is not None:
            taken.append(pop())


def _put_back(push: Any, modes: list[Any]) -> None:
    """Put modes back, last one first, even if Ctrl-C comes in between."""
    try:
        while modes:
            push(modes.pop())
    finally:
        while modes:
            push(modes.pop())
