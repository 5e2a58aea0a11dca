"""The part of a model that a rank has, and its rows of a DTensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from geomon.capture.shards import ShardingError, slice_of
from geomon.distributed import RankGroup
from geomon.distributed.mesh import find_place


def places(ranks: RankGroup, folder: Path) -> None:
    """Ranks find those with which they share out weights, and none with tokens of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = (ranks.rank // 2 * 2, ranks.rank // 2 * 2 + 1)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def shared() -> nn.Module:
        return parallelize_module(made(), mesh["tp"], plan)

    assert find_place([made()]).is_whole
    for model in (
        shared(),
        fully_shard(shared(), mesh=mesh["dp"]),
        replicate(shared(), mesh=mesh["dp"]),
        nn.parallel.DistributedDataParallel(shared(), device_mesh=mesh["dp"]),
    ):
        place = find_place([model])
        assert (place.tensor, place.tensor_name, place.shard) == (own, "tp", ranks.rank % 2)
        assert place.part() == f"shard {ranks.rank % 2} of 2 of the weights"
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model in (fully_shard(made(), mesh=mesh["dp"]), fully_shard(made(), mesh=named)):
        assert find_place([model]).is_whole
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(FSDPModule, "_get_fsdp_state")  # some releases of torch hide it
            assert find_place([model]).is_whole
    # Experts are shared out among ranks that have other tokens.
    experts = made()
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    experts.register_parameter(
        "experts", nn.Parameter(distribute_tensor(torch.zeros(4, 3, 3), everyone, [Shard(0)]))
    )
    assert find_place([nn.Sequential(fully_shard(made(), mesh=mesh["dp"]), experts)]).is_whole


def slices(ranks: RankGroup, folder: Path) -> None:
    """Each rank finds its own rows of a DTensor, even if ranks have different numbers of rows."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    hidden = torch.arange(60.0).view(6, 10, 1).expand(6, 10, 8).contiguous()
    rows = torch.tensor([3, 9, 10, 31, 42, 59])
    for dim in range(2):
        values = distribute_tensor(hidden, mesh, [Shard(dim)])
        found, places_here = slice_of(values).inside(rows)
        here = values.to_local()[..., 0].flatten()[places_here]
        assert torch.equal(here, rows[found].float())
        everywhere: list[Any] = [None] * ranks.size
        dist.all_gather_object(everywhere, found.tolist())
        assert sorted(place for own in everywhere for place in own) == [*range(len(rows))]
    with pytest.raises(ShardingError, match="along their width"):
        slice_of(distribute_tensor(hidden, mesh, [Shard(2)]))
    with pytest.raises(ShardingError, match="not summed yet"):
        slice_of(DTensor.from_local(hidden, mesh, [Partial()]))
