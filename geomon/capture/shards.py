"""Shards: which part of a tensor is on this rank, if ranks share one pass."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.storage import Shape
from geomon.capture.weights import stored_weight


class TensorPlace(NamedTuple):
    """Place of this rank among those that share the weights of its blocks.

    Attributes:
        shard: Index of its shard, from 0.
        shards: Number of shards; 1 if the weights are whole.
    """

    shard: int = 0
    shards: int = 1


WHOLE = TensorPlace()


class Slice(NamedTuple):
    """Location of this rank's rows in the whole tensor.

    Attributes:
        shape: Shape of the whole, without the width.
        start: First index of the part, by dimension.
        size: Shape of the part.
    """

    shape: Shape
    start: Shape
    size: Shape

    @property
    def is_whole(self) -> bool:
        """Whether all rows are on this rank."""
        return self.shape == self.size

    def inside(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of some rows are on this rank.

        Args:
            rows: Flat indices into the whole.

        Returns:
            Indices into `rows` of those that are here, and their flat indices in the part.
        """
        if self.is_whole:
            return torch.arange(len(rows), dtype=torch.int64, device="cpu"), rows
        inside = torch.ones_like(rows, dtype=torch.bool)
        flat = torch.zeros_like(rows)
        sides = zip(torch.unravel_index(rows, self.shape), self.start, self.size, strict=True)
        for index, start, size in sides:
            inside &= (index >= start) & (index < start + size)
            flat = flat * size + index - start
        places = inside.nonzero().squeeze(1)
        return places, flat[places]


def whole(shape: Sequence[int]) -> Slice:
    """Return the slice of a tensor that is whole on this rank.

    Args:
        shape: Shape of the tensor, without the width.
    """
    return Slice(tuple(shape), (0,) * len(shape), tuple(shape))


def sharded_along(dim: int, part: Shape, place: TensorPlace) -> Slice:
    """Return the slice of a tensor that is split evenly along a dimension."""
    shape, start = list(part), [0] * len(part)
    shape[dim], start[dim] = part[dim] * place.shards, part[dim] * place.shard
    return Slice(tuple(shape), tuple(start), part)


class ShardingError(ValueError):
    """A sharded tensor cannot be read by rows; the message says why."""


def is_sharded(values: Any) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(values, "placements")


def slice_of(values: Tensor) -> Slice:
    """Locate this rank's rows of a DTensor in the whole."""
    sharded: Any = values
    starts, sizes = _local(sharded)
    if sizes[-1] != values.shape[-1]:
        raise ShardingError("hidden states are sharded along their width")
    if any(placement.is_partial() for placement in sharded.placements):
        raise ShardingError("hidden states are partial: the ranks' values are not summed yet")
    return Slice(tuple(values.shape[:-1]), starts[:-1], sizes[:-1])


def starts_of(values: Tensor) -> Shape:
    """Return the first index of this rank's part of a DTensor, by dimension."""
    return _local(values)[0]


def sharded_dims(values: Tensor) -> set[int]:
    """List the dimensions along which a tensor is split; empty for a plain tensor."""
    if not is_sharded(values):
        return set()
    _, sizes = _local(values)
    return {dim for dim, size in enumerate(sizes) if size != values.shape[dim]}


def first_feature(module: nn.Module) -> int:
    """Return the index, among the features of all ranks, of the first one that a module makes."""
    weight = stored_weight(module)
    if weight is None or not is_sharded(weight):
        return 0
    starts = starts_of(weight)
    transposed = hasattr(module, "nf")  # transformers' Conv1D
    return starts[1 if transposed and len(starts) > 1 else 0]


def _local(values: Any) -> tuple[Shape, Shape]:
    """Return the first index and the size of the local part of a DTensor, by dimension.

    Shards are cut as by `torch.chunk`. For strided shards the first index is as in an even cut,
    which keeps their order.
    """
    starts, sizes = [0] * values.ndim, list(values.shape)
    coordinate = values.device_mesh.get_coordinate()
    for dim, placement in enumerate(values.placements):
        along = getattr(placement, "dim", None)
        if along is None or coordinate is None:
            continue
        along %= values.ndim
        chunk = math.ceil(sizes[along] / values.device_mesh.size(dim))
        before = min(chunk * coordinate[dim], sizes[along])
        starts[along] += before
        sizes[along] = min(chunk, sizes[along] - before)
    return tuple(starts), tuple(sizes)
