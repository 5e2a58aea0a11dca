"""A batch of a data loader, given to a model: which of its parts the forward pass takes.

A loader gives what a training step takes apart: inputs, and labels that the loss alone reads. The
signature of `forward` says which parts are inputs.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from geomon.capture.calling.calls import unwrap

# Forward methods that stand for none: a subclass may train without one of its own.
_NOT_WRITTEN = ("_forward_unimplemented", "LightningModule.forward")


class BatchCall(NamedTuple):
    """A call of a module on a batch.

    Attributes:
        module: The model, or the module in it that is called because the model has no `forward`.
        args: Positional arguments.
        kwargs: Arguments by name.
        left_out: Which parts of the batch the module is not given, in words; "" for none.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left_out: str = ""


def call_of_batch(model: nn.Module, around: Sequence[nn.Module], batch: Any) -> BatchCall:
    """Make the call of a model on a batch.

    Of a dict those entries are arguments that `forward` names; where it names none, the dict is one
    argument. Of a tuple or a list the first parts are arguments, as many as `forward` requires:
    labels come last. Anything else is one argument.
    """
    module = next((one for one in (model, *around) if has_forward(one)), None)
    if module is None:
        raise TypeError(
            f"{type(model).__name__} and what holds its blocks have no forward() that could be "
            "called on a batch: give the probe as a function of the model"
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
    """Whether a module has a `forward` of its own: one that trains may do without."""
    return getattr(unwrap(module).forward, "__qualname__", "") not in _NOT_WRITTEN


__all__ = ["BatchCall", "call_of_batch", "has_forward"]
