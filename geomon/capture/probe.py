"""Probe: an extra forward pass on fixed inputs, in eval mode, with nothing changed afterwards."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from geomon.capture.batch import call_of_batch
from geomon.capture.patches import extra_pass_begun
from geomon.capture.unchanged import left_unchanged, refuse_lazy


def extra_pass(
    model: nn.Module,
    inputs: Any,
    window: AbstractContextManager[Any],
    *,
    around: Sequence[nn.Module] | None = None,
) -> str:
    """Run the model on inputs under a window.

    The pass runs without autograd (never in inference mode, which poisons cached rotary tables), in
    eval mode, with the random state forked. Afterwards every module has its own training flag and
    its own buffers again (see `geomon.capture.unchanged`).

    Args:
        model: Any module.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model; tensors are moved to the model's device.
        window: Context manager that is entered around the call of the model alone.
        around: Where the inputs are a batch of a data loader (see `geomon.capture.batch`), the
            model and the modules in it that hold blocks, outermost first; None for plain inputs.

    Returns:
        Which parts of a batch the model was not given, in words; "" for none.

    Raises:
        TypeError: Nothing in the model can be called on a batch.
        ValueError: The model has parameters without values.
    """
    refuse_lazy(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with extra_pass_begun(), left_unchanged(model):
        model.eval()
        moved = _move(inputs, device)
        if around is None or _is_function(moved):
            with window:
                _call(model, moved)
            return ""
        call = call_of_batch(model, around, moved)
        with window:
            call.module(*call.args, **call.kwargs)
        return call.left_out


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple | list):
        model(*inputs)
    elif _is_function(inputs):
        inputs(model)
    else:
        model(inputs)


def _is_function(inputs: Any) -> bool:
    return callable(inputs) and not isinstance(inputs, torch.Tensor)


def _move(inputs: Any, device: torch.device) -> Any:
    """Move every tensor of the inputs to a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: _move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_move(value, device) for value in inputs)
    return inputs
