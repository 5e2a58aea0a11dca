"""Unseen: what geomon computes beside a training is no business of the training's own modes.

A mode that counts operations, or that keeps what a checkpointed block computes, must not meet
operators that the training did not call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils import _python_dispatch as dispatch

# Private names of torch, asked for once: without the first, modes of the training see these
# operators; without the second, they become a part of what `torch.func` transforms.
_hide_modes = getattr(dispatch, "_disable_current_modes", None)
_leave_transforms = getattr(torch._C, "_DisableFuncTorch", None)
HIDES_MODES = _hide_modes is not None


@contextmanager
def unseen() -> Iterator[None]:
    """Keep the operators of the body from all modes of torch, and from tensor subclasses."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if _leave_transforms is not None and torch._C._functorch.peek_interpreter_stack():
            stack.enter_context(_leave_transforms())
        if _hide_modes is not None:
            stack.enter_context(_hide_modes())
        yield
