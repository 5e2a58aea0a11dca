"""Decide which parts of a data loader's batch to pass to a model.

A training step splits a batch into inputs and labels. The signature of `forward` says which parts
are inputs.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from geomon.capture.calling.calls import unwrap

# Placeholders for a missing forward: a subclass may train without defining one.
_NOT_WRITTEN = ("_forward_unimplemented", "LightningModule.forward")


def call_of_batch(
    model: nn.Module, around: Sequence[nn.Module], batch: Any
) -> tuple[Callable[[], Any], str]:
    """Make the call of a model, or of a module in it that has a `forward`, on a batch.

    A dict is passed by the names in `forward`, or as one argument if none match. A tuple or list is
    passed up to the number of arguments that `forward` requires, because labels come last. Anything
    else is passed as one argument. The parts that are left out are returned too, in words.
    """
    module = next((one for one in (model, *around) if has_forward(one)), None)
    if module is None:
        raise TypeError(
            f"neither {type(model).__name__} nor the modules around its blocks have a forward() to "
            "call on a batch: give the probe as a function of the model"
        )
    parameters = [*inspect.signature(unwrap(module).forward).parameters.values()]
    if isinstance(batch, Mapping):
        given = _named(parameters, batch)
        rest = [str(name) for name in batch if name not in given]
        if given:
            return functools.partial(module, **given), ", ".join(rest)
    if isinstance(batch, tuple | list):
        count = _count(parameters, len(batch))
        parts = [f"part {number + 1}" for number in range(count, len(batch))]
        words = f"{', '.join(parts)} of {len(batch)}" if parts else ""
        return functools.partial(module, *batch[:count]), words
    return functools.partial(module, batch), ""


def _named(parameters: list[inspect.Parameter], batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the parts of a batch that have the names of parameters."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return batch
    names = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return {name: value for name, value in batch.items() if name in names}


def _count(parameters: list[inspect.Parameter], parts: int) -> int:
    """Return how many parts of a batch these parameters take."""
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return parts
    return max(1, sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters))


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_forward(module: nn.Module) -> bool:
    """Whether a module defines `forward`; a module can be trained without one."""
    return getattr(unwrap(module).forward, "__qualname__", "") not in _NOT_WRITTEN


__all__ = ["call_of_batch", "has_forward"]
