"""Storage: where the numbers of a tensor lie."""

from torch import Tensor

from geomon.capture import private


def local_shard(values: Tensor) -> Tensor:
    """Return the part of a sharded tensor that is on this rank, or any other tensor as it is.

    What `torch.func.grad` wraps around a tensor, which has no address, is taken away.

    Args:
        values: A tensor, sharded among ranks or not.
    """
    values = _unwrapped(values)
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


def storage_of(values: Tensor) -> int | None:
    """Return the address of the memory in which a tensor lies; None where it has none.

    Sparse and nested tensors have none, nor have those that are traced.

    Args:
        values: Any tensor.
    """
    try:
        return _unwrapped(values).untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _unwrapped(values: Tensor) -> Tensor:
    while private.is_wrapped_by_grad(values):
        values = private.unwrapped(values)
    return values
