"""Storage: where the numbers of a tensor lie."""

from typing import Any

import torch
from torch import Tensor

from geomon.capture import private


def local_shard(values: Tensor) -> Tensor:
    """Return the part of a sharded tensor that is on this rank, or any other tensor as it is.

    What `torch.func.grad` wraps around a tensor, which has no address, is taken away. The result of
    a collective that is under way is waited for.
    """
    values = _inner(values)
    wait: Any = getattr(values, "trigger_wait", None)
    return values if wait is None else wait()


def storage_of(values: Tensor) -> int | None:
    """Return the address of the memory in which a tensor lies; None if it has none.

    Sparse and nested tensors have none, nor have those that are traced.
    """
    if values.is_nested:  # of which one layout has a storage, and neither sizes nor strides
        return None
    try:
        return followed_part(values).untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def followed_part(values: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank, whatever is wrapped around it."""
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
