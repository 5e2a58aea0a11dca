"""Shards, by tensors of indices that torch.chunk cuts; what is a DTensor here has no ranks."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Partial, Replicate, Shard

from geomon.capture.shards import (
    WHOLE,
    ShardingError,
    Slice,
    TensorPlace,
    first_feature,
    is_sharded,
    sharded_along,
    sharded_dims,
    slice_of,
    starts_of,
    whole,
)
from geomon.capture.storage import followed_part, local_shard


class Placed(torch.Tensor):
    """Stands for a DTensor."""


def sharded(shape, placements, mesh, coordinate):
    sizes = SimpleNamespace(get_coordinate=lambda: coordinate, size=lambda dim: mesh[dim])
    return SimpleNamespace(shape=shape, ndim=len(shape), placements=placements, device_mesh=sizes)


def cut(values, placements, mesh, coordinate):
    """The part of a rank, as torch.chunk cuts along each dimension of the mesh."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = values.chunk(mesh[dim], placement.dim)
            at = coordinate[dim]
            values = parts[at] if at < len(parts) else values.narrow(placement.dim, 0, 0)
    return values


LAYOUTS = [
    ((6, 10, 8), (Shard(1),), (2,)),
    ((6, 10, 8), (Shard(1),), (4,)),  # 3, 3, 3, 1
    ((5, 3, 8), (Shard(1),), (4,)),  # 1, 1, 1, 0
    ((6, 10, 8), (Shard(0), Shard(1)), (2, 2)),
    ((6, 10, 8), (Replicate(), Shard(-2)), (2, 3)),
    ((6, 12, 8), (Shard(1), Shard(1)), (2, 3)),
]


@pytest.mark.parametrize(("shape", "placements", "mesh"), LAYOUTS)
def test_every_rank_finds_its_own_rows_among_those_of_all(shape, placements, mesh):
    every = torch.arange(math.prod(shape[:-1])).view(shape[:-1])  # the number of each row
    rows = torch.tensor([0, 7, 3, 14, every.numel() - 1, 5])
    for coordinate in itertools.product(*map(range, mesh)):
        found = slice_of(sharded(shape, placements, mesh, coordinate))
        rowwise = [Shard(p.dim % 3) if isinstance(p, Shard) else p for p in placements]
        mine = cut(every, rowwise, mesh, coordinate)
        assert (found.shape, found.size) == (shape[:-1], tuple(mine.shape))
        places, flat = found.inside(rows)
        assert mine.flatten()[flat].tolist() == rows[places].tolist()
        expected = [n for n, row in enumerate(rows) if row in mine]
        assert places.tolist() == expected


def test_a_tensor_that_is_whole_has_all_rows():
    found = whole([2, 5])
    assert found == Slice((2, 5), (0, 0), (2, 5))
    assert found.is_whole
    places, flat = found.inside(torch.tensor([9, 0, 4]))
    assert (places.tolist(), flat.tolist()) == ([0, 1, 2], [9, 0, 4])


@pytest.mark.parametrize(
    ("dim", "shape", "starts"),
    [(0, (12, 6), [(0, 0), (4, 0), (8, 0)]), (1, (4, 18), [(0, 0), (0, 6), (0, 12)])],
)
def test_even_shares_lie_one_after_another(dim, shape, starts):
    found = [sharded_along(dim, (4, 6), TensorPlace(shard, 3)) for shard in range(3)]
    assert found == [Slice(shape, start, (4, 6)) for start in starts]
    assert not any(each.is_whole for each in found)
    assert sharded_along(dim, (4, 6), WHOLE) == whole((4, 6))


@pytest.mark.parametrize(
    ("placements", "words"),
    [((Shard(2),), "sharded along their width"), ((Partial(),), "partial: the ranks' values")],
)
def test_tensors_that_cannot_be_read_by_rows_are_refused(placements, words):
    with pytest.raises(ShardingError, match=words):
        slice_of(sharded((4, 6, 8), placements, (2,), (1,)))


def test_dimensions_that_are_shared_out_are_listed_and_plain_tensors_have_none():
    values = sharded((4, 6, 8), (Shard(1), Replicate()), (2, 2), (1, 0))
    assert is_sharded(values)
    assert (sharded_dims(values), starts_of(values)) == ({1}, (0, 3, 0))
    assert sharded_dims(torch.ones(2, 3)) == set()
    assert not is_sharded(torch.ones(2))
    outside = sharded((4, 6, 8), (Shard(1),), (2,), None)  # a rank that is not in the mesh
    assert sharded_dims(outside) == set()


def projecting(*of_weight, **attributes):
    weight = torch.empty(of_weight[0]).as_subclass(Placed)
    vars(weight).update(vars(sharded(*of_weight)))
    return SimpleNamespace(weight=weight, **attributes)


@pytest.mark.parametrize(
    ("module", "feature"),
    [
        (projecting((12, 4), (Shard(0),), (3,), (2,)), 8),
        (projecting((4, 12), (Shard(1),), (3,), (1,), nf=12), 4),
        (projecting((12,), (Shard(0),), (3,), (1,), nf=12), 4),
        (torch.nn.Linear(2, 2), 0),
        (torch.nn.ReLU(), 0),
    ],
)
def test_the_first_feature_of_a_projection_is_that_of_its_rows_or_of_its_columns(module, feature):
    assert first_feature(module) == feature


def test_a_collective_is_waited_for_only_where_its_numbers_are_wanted():
    inner = torch.ones(2)
    underway = AsyncCollectiveTensor(inner)
    assert followed_part(underway) is inner
    assert not underway.completed
    found = local_shard(underway)
    assert underway.completed
    assert torch.equal(found, inner)
