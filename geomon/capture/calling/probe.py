"""Probe: an extra forward pass on fixed inputs, in eval mode, that leaves nothing changed."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from geomon.capture.calling.batch import call_of_batch
from geomon.capture.calling.patches import extra_pass_begun, without_fast_path
from geomon.capture.modes import without_modes
from geomon.capture.snapshot import MeanLoss
from geomon.capture.unchanged import left_unchanged


class ExtraPass(NamedTuple):
    """Result of an extra pass, apart from what the window kept.

    Attributes:
        left_out: Parts of a batch that the model did not receive, in words; "" if none.
        loss: Loss of the pass, or None if none was requested.
        seconds: Time of the model's call and of the loss, including the window's own time.
    """

    left_out: str
    loss: MeanLoss | None
    seconds: float


def extra_pass(
    model: nn.Module,
    inputs: Any,
    window: AbstractContextManager[Any],
    *,
    around: Sequence[nn.Module] | None = None,
    loss: Callable[[Any, Any], MeanLoss] | None = None,
    given: Any = None,
) -> ExtraPass:
    """Run the model on inputs under a window.

    The pass runs without autograd (never in inference mode, which poisons cached rotary tables) and
    in eval mode. Torch modes of the training do not see it, whether they count operators
    (`FlopCounterMode`) or change them. Afterwards the model is as it was (see
    `geomon.capture.unchanged`).

    Args:
        model: Any module.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model. Tensors are moved to the model's device.
        window: Context manager that is entered around the call of the model only.
        around: If the inputs are a batch of a data loader (see `capture.calling.batch`), the model
            and the modules in it that hold blocks, outermost first. Defaults to None, for plain
            inputs.
        loss: Function of the model's output and of the inputs on its device, called after the
            window closes. Defaults to None, for no loss.
        given: Argument for a function passed as inputs. Defaults to the model.

    Raises:
        TypeError: If nothing in the model can be called on a batch.
        ValueError: If the model cannot run an extra pass (see `left_unchanged`).
    """
    device = next((p.device for p in model.parameters()), "cpu")
    with without_modes(), extra_pass_begun(), without_fast_path.held(), left_unchanged(model):
        model.eval()
        moved = _move(inputs, device)
        given = model if given is None else given
        call: Callable[[], Any] = functools.partial(_call, model, moved, given)
        left_out = ""
        if around is not None and not _is_function(moved):
            call, left_out = call_of_batch(model, around, moved)
        began = time.perf_counter()
        with window:
            outputs = call()
        found = None if loss is None else loss(outputs, moved)
        seconds = time.perf_counter() - began
        return ExtraPass(left_out, found, seconds)


def _call(model: nn.Module, inputs: Any, given: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return inputs(given) if _is_function(inputs) else model(inputs)


def _is_function(inputs: Any) -> bool:
    return callable(inputs) and not isinstance(inputs, torch.Tensor)


def _move(inputs: Any, device: torch.device | str) -> Any:
    """Move every tensor of the inputs to a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: _move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_move(value, device) for value in inputs)
    return inputs
