"""Hide geomon's operators from the training's own torch modes.

A mode that counts or changes operators, or stores what a checkpointed block computes, must not meet
operators that the training did not call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from geomon.capture import private


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the operators of the body from all torch modes and tensor subclasses."""
    with private.without_functions():
        inside = private.leave_transforms() if private.transforms() else nullcontext()
        with inside, _without_operators():
            yield


@contextmanager
def _without_operators() -> Iterator[None]:
    """Remove the modes that see operators."""
    top, pop, push = private.top_mode, private.pop_mode, private.push_mode
    if top is None or pop is None or push is None or private.traced_modes():
        with private.hide_modes():
            yield
        return
    taken: list[Any] = []  # faster than torch's own way, and a pass enters this 200 times
    try:
        while top() is not None:
            taken.append(pop())
        yield
    finally:
        _put_back(push, taken)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run an extra pass of the model outside the training's modes, which would count or change it.

    Functions of tensor subclasses stay active, because weights may be subclasses, and so does the
    default device, where the model may make tensors.
    """
    pop, push = private.pop_function_mode, private.push_function_mode
    taken: list[Any] = []
    with _without_operators():
        try:
            while private.function_modes() > 0:
                taken.append(pop())
            kept = [mode for mode in taken if isinstance(mode, private.device_mode)]
            _put_back(push, kept)
            yield
        finally:
            while private.function_modes() > 0:
                pop()
            _put_back(push, taken)


def _put_back(push: Callable[[Any], Any], modes: list[Any]) -> None:
    """Put modes back, last one first, even if Ctrl-C comes in between."""
    try:
        while modes:
            push(modes.pop())
    finally:
        while modes:
            push(modes.pop())
