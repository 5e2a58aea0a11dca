"""The ranks of a run, and geomon's own line between them.

The line is a gloo group beside the one that trains: it moves tensors of the host, and never comes
between the collectives of the training. Every method of it is a collective: all ranks call it, in
the same order, whatever they saw.
"""

import io
import logging
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

log = logging.getLogger("geomon")

# How long a rank waits for the others before it goes on alone: what a training waits by default.
TIMEOUT = timedelta(minutes=10)

# Bytes to which a tensor's place in a parcel is aligned: no dtype needs more.
_ALIGNMENT = 16

_Value = TypeVar("_Value")


class RanksLostError(ConnectionError):
    """Another rank did not answer in time, or is gone."""


class Ranks:
    """The ranks of a run, as one of them sees them.

    Args:
        rank: Of this process.
        size: Number of processes.
        group: The line; None where nothing is said between ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @property
    def linked(self) -> bool:
        """Whether there is a line."""
        return self._group is not None

    def part(self) -> None:
        """Give up the line: from here on nothing is said between ranks."""
        self._group = None

    def share(self, value: _Value) -> list[_Value]:
        """What every rank gave, in rank order, on every rank."""
        shared: list[Any] = [None] * self.size
        _answered(dist.all_gather_object, shared, value, group=self._group)
        return shared

    def collect(self, value: _Value) -> list[_Value] | None:
        """What every rank gave, in rank order, on the first rank; None on the others."""
        collected: list[Any] | None = [None] * self.size if self.rank == 0 else None
        _answered(dist.gather_object, value, collected, dst=0, group=self._group)
        return collected

    def hand_out(self, value: _Value) -> _Value:
        """What the first rank gave, on every rank."""
        handed = [value]
        _answered(dist.broadcast_object_list, handed, src=0, group=self._group)
        return handed[0]

    def exchange(self, parcels: Sequence[_Value]) -> list[_Value]:
        """Send each rank its parcel; parcels may hold tensors of any size, which are not pickled.

        Args:
            parcels: One for each rank, this one included.

        Returns:
            What each rank sent to this one, in rank order; tensors are on the host.
        """
        packed = [
            torch.empty(0, dtype=torch.uint8) if rank == self.rank else _pack(parcel)
            for rank, parcel in enumerate(parcels)
        ]
        sizes = torch.tensor([len(part) for part in packed])
        coming = torch.empty_like(sizes)
        _answered(dist.all_to_all_single, coming, sizes, group=self._group)
        received = torch.empty(int(coming.sum()), dtype=torch.uint8)
        _answered(
            dist.all_to_all_single, received, torch.cat(packed), coming.tolist(), sizes.tolist(),
            group=self._group,
        )  # fmt: skip
        return [
            parcels[rank] if rank == self.rank else _unpack(part)
            for rank, part in enumerate(received.split(coming.tolist()))
        ]


def find_ranks() -> Ranks:
    """The ranks that torch.distributed knows of, without a line between them."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


def join_ranks() -> Ranks:
    """The ranks that torch.distributed knows of, with a line between them where there are several.

    A collective: every rank calls it. The line goes away with the groups of the training, when
    `torch.distributed.destroy_process_group` is called. Where none can be made the ranks come back
    without one, and a warning says why.
    """
    ranks = find_ranks()
    if ranks.size == 1:
        return ranks
    try:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="geomon")
    except (RuntimeError, ValueError) as error:
        log.warning(
            "the rows of the ranks are not gathered, the first rank measures its own: no gloo "
            "group could be made, which every rank has to ask for by building its monitor (%s)",
            error,
        )
        return ranks
    return Ranks(ranks.rank, ranks.size, group)


def refusal(model: nn.Module) -> str | None:
    """Why the rows of the ranks cannot be gathered for this model; None where they can.

    Under data parallelism (DDP, FSDP, HSDP) each rank sees tokens of its own. Under tensor
    parallelism ranks see the same tokens and some of the heads each: rows of the one are no rows of
    the other. A parameter is sharded that way where FSDP does not hold it, or more than one
    dimension of its mesh splits it.
    """
    if not dist.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    held = {
        parameter
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            split = sum(not placement.is_replicate() for placement in parameter.placements)
            if split > (parameter in held):
                return f"'{name}' is sharded by tensor parallelism ({parameter.placements})"
    return None


def _answered(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective; every way in which the others fail to answer is one error."""
    try:
        collective(*args, **kwargs)
    except RuntimeError as error:
        raise RanksLostError(str(error).splitlines()[0].split(". ")[0]) from error


# -- parcels: a pickle that leaves tensors out, and their bytes behind it -------------------------


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
        padding = torch.zeros(-size % _ALIGNMENT, dtype=torch.uint8)
        self.pieces += [content.view(torch.uint8), padding]
        self._end = start + size + len(padding)
        return start, size, value.dtype, tuple(value.shape)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, content: Tensor) -> None:
        super().__init__(file)
        self._content = content

    def persistent_load(self, place: Any) -> Tensor:
        start, size, dtype, shape = place
        return self._content[start : start + size].view(dtype).view(shape)


def _pack(parcel: Any) -> Tensor:
    """A parcel as bytes, a multiple of the alignment."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(parcel)
    head = file.getvalue()
    front = len(head).to_bytes(_ALIGNMENT, "little") + head
    front += bytes(-len(front) % _ALIGNMENT)
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8), *packer.pieces])


def _unpack(content: Tensor) -> Any:
    size = int.from_bytes(content[:_ALIGNMENT].numpy().tobytes(), "little")
    head = content[_ALIGNMENT : _ALIGNMENT + size].numpy().tobytes()
    start = _ALIGNMENT + size
    return _Unpacker(io.BytesIO(head), content[start + -start % _ALIGNMENT :]).load()
