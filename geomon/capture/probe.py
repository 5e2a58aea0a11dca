"""Probe: an extra forward pass on fixed inputs, in eval mode, with nothing changed afterwards."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


def extra_pass(model: nn.Module, inputs: Any, window: AbstractContextManager[Any]) -> None:
    """Run the model on inputs under a window.

    The pass runs without autograd (never in inference mode, which poisons cached rotary tables), in
    eval mode, with the random state forked. Afterwards every module has its own training flag
    again, and parameters that FSDP gathered are sharded again.

    Args:
        model: Any module.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model; tensors are moved to the model's device.
        window: Context manager that is entered around the call of the model alone.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type not in ("cpu", "meta") else []
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.no_grad(),
        _resharded(model),
        _eval_mode(model),
        window,
    ):
        _call(model, _move(inputs, device))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode, and restore each module's own flag: some may be frozen in eval mode."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


@contextmanager
def _resharded(model: nn.Module) -> Iterator[None]:
    """Shard again, afterwards, the parameters that FSDP gathered for the pass.

    FSDP keeps its outermost parameters after a forward pass, for a backward pass that never comes
    here. An optimizer step in between would leave the next forward pass with old weights.
    """
    try:
        yield
    finally:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        for module in model.modules() if fsdp is not None else ():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
            elif isinstance(module, fsdp.FullyShardedDataParallel):
                _reshard_flat(module)


def _reshard_flat(module: Any) -> None:
    """Shard the parameters of one FSDP1 module again, for which FSDP1 has no public function."""
    handle = getattr(module, "_handle", None)
    if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple | list):
        model(*inputs)
    elif callable(inputs) and not isinstance(inputs, torch.Tensor):
        inputs(model)
    else:
        model(inputs)


def _move(inputs: Any, device: torch.device) -> Any:
    """Move every tensor of the inputs to a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: _move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_move(value, device) for value in inputs)
    return inputs
