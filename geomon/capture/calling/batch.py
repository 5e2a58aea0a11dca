"""Decide which parts of a data loader's batch to pass to a model.

A training step splits a batch into inputs and labels. The signature of `forward` says which parts
are inputs.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from geomon.capture.calling.calls import unwrap

# Placeholders for a missing forward: a subclass may train without defining one.
_NOT_WRITTEN = ("_forward_unimplemented", "LightningModule.forward")


class BatchCall(NamedTuple):
    """A call of a module on a batch.

    Attributes:
        module: The model, or the module inside it that is called because the model has no
            `forward`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        left_out: Parts of the batch that the module does not receive, in words; "" if none.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left_out: str = ""


def call_of_batch(model: nn.Module, around: Sequence[nn.Module], batch: Any) -> BatchCall:
    """Make the call of a model on a batch.

    A dict is passed by the names in `forward`, or as one argument if none match. A tuple or list is
    passed up to the number of arguments that `forward` requires, because labels come last. Anything
    else is passed as one argument.
    """
    module = next((one for one in (model, *around) if has_forward(one)), None)
    if module is None:
        raise TypeError(
            f"neither {type(model).__name__} nor the modules around its blocks have a forward() to "
            "call on a batch: give the probe as a function of the model"
        )
    parameters = inspect.signature(unwrap(module).forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
        given = {name: value for name, value in batch.items() if takes_all or name in names}
        if not given:
            return BatchCall(module, (batch,), {})
        rest = [str(name) for name in batch if name not in given]
        return BatchCall(module, (), given, ", ".join(rest))
    if isinstance(batch, tuple | list):
        required = [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty]
        starred = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        count = len(batch) if starred else max(1, len(required))
        rest = [f"part {number + 1}" for number in range(count, len(batch))]
        words = f"{', '.join(rest)} of {len(batch)}" if rest else ""
        return BatchCall(module, tuple(batch[:count]), {}, words)
    return BatchCall(module, (batch,), {})


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_forward(module: nn.Module) -> bool:
    """Whether a module defines `forward`; a module can be trained without one."""
    return getattr(unwrap(module).forward, "__qualname__", "") not in _NOT_WRITTEN


__all__ = ["BatchCall", "call_of_batch", "has_forward"]
