"""Storage: the memory that a tensor uses, on the host or on a device."""

from typing import Any

import torch
from torch import Tensor

from geomon.capture import private
from geomon.failures import failures

Shape = tuple[int, ...]  # of a tensor, often without its width


def local_shard(values: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or any other tensor as it is.

    Wrappers of `torch.func.grad`, which have no address, are removed. The result of a pending
    collective is waited for.
    """
    values = _inner(values)
    wait: Any = getattr(values, "trigger_wait", None)
    return values if wait is None else wait()


def storage_of(values: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none (sparse, nested, traced)."""
    if values.is_nested:  # one layout of them has a storage, but neither sizes nor strides
        return None
    try:
        return followed_part(values).untyped_storage().data_ptr() or None
    except failures(NotImplementedError, RuntimeError):
        return None


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy numbers of the host to a device, behind its queued work and without waiting for it."""
    return values.to(device, non_blocking=True)


def followed_part(values: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without any wrapper."""
    if type(values) is Tensor and not private.is_wrapped_by_grad(values):  # nearly always
        return values
    inner: Any = _inner(values)
    return inner.elem if hasattr(inner, "trigger_wait") else inner


def _inner(values: Tensor) -> Tensor:
    while private.is_wrapped_by_grad(values):
        values = private.unwrapped(values)
    to_local: Any = getattr(values, "to_local", None)
    if to_local is None:
        return values
    with torch.no_grad():
        local: Tensor = to_local()
    return local
