"""Memory apart from the heap, for copies that outlive the tensors around them.

Rows are copied between the activations of a forward pass and live on after these are freed. In the
heap they would lie in its holes and split them, so that the next step needs a larger one. Pages are
large here, because small ones would cost more than the copies.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from geomon.failures import ignored

# Bytes of a chunk, from which a tensor of the host gets a place in one. Shorter copies stay in the
# heap. Memory of a chunk is used only as far as it is written.
_CHUNK, _LEAST = 1 << 26, 1 << 18
_ALIGNED = 64  # bytes


class _Chunk(threading.local):
    """The chunk that is being filled; each thread has its own.

    Tensors keep it alive. It is returned to the system with the last of them.
    """

    memory: weakref.ref[mmap.mmap] | None = None
    filled = 0  # bytes


_chunk = _Chunk()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, apart from the heap if it is long and on the host."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type == "cpu" and size >= _LEAST:
        with ignored(OSError, AttributeError):  # a limit on memory, or another platform
            memory, start = _place(size)
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(*shape)
    return torch.empty(shape, dtype=dtype, device=device)


def keep(values: Tensor) -> Tensor:
    """Return a tensor that was just made; if it is long and on the host, a copy apart."""
    if values.device.type != "cpu" or values.nbytes < _LEAST:
        return values
    return empty(values.shape, values.dtype, values.device).copy_(values)


def convert(values: Tensor) -> Tensor:
    """Convert a tensor to float32; one that is float32 is returned as it is."""
    return values if values.dtype == torch.float32 else keep(values.float())


def select(values: Tensor, places: Tensor) -> Tensor:
    """Copy entries of the first dimension, like `values[places]` with its strides.

    Args:
        values: Any tensor.
        places: Integers, [entries]; on the same device if the tensor is a matrix.
    """
    strides = values.stride()[1:]
    is_plain = type(values) is Tensor and not values.requires_grad and 0 not in strides
    if values.device.type != "cpu" or not is_plain:
        return values.index_select(0, places) if values.ndim == 2 else values[places]
    order = sorted(range(1, values.ndim), key=lambda dim: -strides[dim - 1])
    turned = values.permute(0, *order)
    found = empty((len(places), *turned.shape[1:]), values.dtype, values.device)
    torch.index_select(turned, 0, places, out=found)
    return found.permute(0, *(1 + order.index(dim) for dim in range(1, values.ndim)))


def _place(size: int) -> tuple[mmap.mmap, int]:
    """Find a place in a chunk: its memory, and the first byte."""
    memory = None if _chunk.memory is None else _chunk.memory()
    if memory is None or len(memory) - _chunk.filled < size:
        memory = mmap.mmap(-1, max(_CHUNK, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with ignored(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        _chunk.memory, _chunk.filled = weakref.ref(memory), 0
    start = _chunk.filled
    _chunk.filled += -(-size // _ALIGNED) * _ALIGNED
    return memory, start
