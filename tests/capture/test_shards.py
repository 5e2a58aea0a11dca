"""Shards, by tensors of indices that torch.chunk cuts; what is a DTensor here has no ranks."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
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
from support.models import Running
from support.watched import look, states_of


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


def part_of_the_sequence(shard: int, dim: int, attend) -> nn.Module:
    """One of two ranks that share hidden states along a dimension, as plain tensors.

    Each block has what the other rank would send, and attends to the whole sequence.
    """

    def block(m, x):
        every = torch.cat([m.sent, x] if shard else [x, m.sent], dim=dim).transpose(0, 1 - dim)
        q, k, v = m.qkv(every).unflatten(-1, (12, -1)).transpose(1, 2).chunk(3, dim=1)
        m.query, mixed = q, attend(q, k, v).transpose(1, 2).flatten(2).transpose(0, 1 - dim)
        return x + mixed.chunk(2, dim=dim)[shard]

    def run(m, given):
        x = m.embed(given) if given.ndim == 2 else given
        x = x.transpose(0, 1 - dim)
        x = x.chunk(2, dim=dim)[shard]
        for each in m.blocks:
            x = each(x)
        return x

    torch.manual_seed(0)
    shape = (3, 6, 32) if dim else (6, 3, 32)
    blocks = (Running(block, qkv=nn.Linear(32, 96), sent=torch.randn(shape)) for _ in range(3))
    return Running(run, embed=nn.Embedding(50, 32), blocks=nn.ModuleList(blocks))


def fused(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


def by_hand(q, k, v):
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


@pytest.mark.parametrize("attend", [fused, by_hand])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("shown_by", ["token ids", "attention"])
def test_plain_tensors_that_ranks_share_are_placed_in_the_whole_sequence(
    shown_by, shard, dim, attend
):
    model, by_ids = part_of_the_sequence(shard, dim, attend), shown_by == "token ids"
    given = torch.arange(36).view(3, 12) * 7 % 50 if by_ids else torch.randn(3, 12, 32)
    states = states_of(model, given)
    seen = look(model, given, options={"place": TensorPlace(shard, 2)})
    first, *layers = seen.snapshot().layers
    assert ("hidden" in first.captured) == by_ids
    assert by_ids or "ranks share the sequence" in first.missing["hidden"]
    for layer, kept in zip([first] * by_ids + layers, states[not by_ids :], strict=True):
        views, state = layer.captured, kept.transpose(0, 1 - dim)
        where = views["sequences"], views["positions"] - 6 * shard
        assert layer.part.start == ((0, 6 * shard) if dim else (6 * shard, 0))
        assert len(views["hidden"]) == 18
        assert torch.equal(views["hidden"], state[where])
        assert not by_ids or torch.equal(views["token_ids"], given[:, 6 * shard :][where])
        if layer is not first:
            assert torch.equal(views["query"], model.blocks[layer.index - 1].query)
            assert len(views["projected_query"]) == (36 if by_ids or layer.index > 1 else 18)
        if not by_ids and dim == 0:  # the order of dimensions is known too late
            assert layer.missing["last_hidden"].startswith("it became known only after the pass")
            continue
        ends = views["last_sequences"]  # which the second rank has
        assert ends.sort().values.tolist() == [0, 1, 2] * shard
        assert torch.equal(views["last_hidden"], state[ends, -1])


def test_the_rows_of_all_ranks_are_those_of_the_whole_sequence():
    given = torch.arange(36).view(3, 12)
    seen = [
        look(part_of_the_sequence(shard, 1, fused), given, rows=20,
             options={"place": TensorPlace(shard, 2)}).snapshot()
        for shard in (0, 1)
    ]  # fmt: skip
    parts = [snapshot.layers[2] for snapshot in seen]
    numbers = torch.cat([layer.part.rows for layer in parts])
    assert numbers.sort().values.tolist() == [*range(20)]
    assert not any(set(one) & set(two) for one, two in [[x.part.rows.tolist() for x in parts]])


def test_ranks_that_know_nothing_of_each_other_know_the_same_tokens_by_their_ids():
    """Each has fewer hidden states than ids: they are a part of them."""
    given, found = torch.arange(36).view(3, 12), set[str]()
    for shard in (0, 1):
        for ids in (given, given.flip(0)):
            found.add(look(part_of_the_sequence(shard, 1, fused), ids).snapshot().info.batch)
    assert len(found) == 2
