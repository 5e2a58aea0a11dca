"""Pack Python objects that contain tensors into bytes, without pickling the tensors."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

# Alignment of tensors in a parcel, in bytes: no data type needs more.
_ALIGNMENT = 16


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.pieces: list[Tensor] = []
        self._end = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        content = value.detach().cpu().contiguous().flatten()
        start, size = self._end, content.numel() * content.element_size()
        padding = torch.zeros(-size % _ALIGNMENT, dtype=torch.uint8, device="cpu")
        self.pieces += [content.view(torch.uint8), padding]
        self._end = start + size + len(padding)
        return start, size, value.dtype, value.shape


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, content: Tensor) -> None:
        super().__init__(file)
        self._content = content

    def persistent_load(self, position: Any) -> Tensor:
        start, size, dtype, shape = position
        return self._content[start : start + size].view(dtype).view(shape)


def pack(parcel: Any) -> Tensor:
    """Turn a parcel into uint8 [bytes]: a pickle without its tensors, followed by their bytes."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(parcel)
    head = file.getvalue()
    front = len(head).to_bytes(_ALIGNMENT, "little") + head
    front += bytes(-len(front) % _ALIGNMENT)
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8), *packer.pieces])


def unpack(content: Tensor) -> Any:
    """Restore a parcel from the bytes that `pack` made."""
    size = int.from_bytes(content[:_ALIGNMENT].numpy().tobytes(), "little")
    head = content[_ALIGNMENT : _ALIGNMENT + size].numpy().tobytes()
    start = _ALIGNMENT + size
    return _Unpacker(io.BytesIO(head), content[start + -start % _ALIGNMENT :]).load()
