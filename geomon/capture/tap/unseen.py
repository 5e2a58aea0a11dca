"""Unseen: what geomon computes beside a training is no business of the training's own modes.

A mode that counts operations, or that keeps what a checkpointed block computes, must not meet
operators that the training did not call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from geomon.capture import private


@contextmanager
def unseen() -> Iterator[None]:
    """Keep the operators of the body from all modes of torch, and from tensor subclasses."""
    with ExitStack() as stack:
        stack.enter_context(private.without_functions())
        if private.transforms():
            stack.enter_context(private.leave_transforms())
        stack.enter_context(private.hide_modes())
        yield
