"""Models in DDP, FSDP2 or FSDP1, with accumulated gradients, and probed anywhere in a step."""

import contextlib
import itertools
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from geomon import select
from geomon.distributed import RankGroup
from support.measuring import nowhere
from support.models import PlainBlock
from support.ranks.one_process import (
    FEW,
    LAYERS,
    Decoder,
    assert_same,
    loss_of,
    measured,
    monitor_of,
    one_process,
    ragged,
    steps,
)

STEPS = 2


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


fsdp1 = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
STRATEGIES = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": fsdp2,
    "fsdp1": partial(fsdp1, auto_wrap_policy=ModuleWrapPolicy({PlainBlock})),
    "fsdp1 in one": fsdp1,  # one flat parameter: of most blocks a rank holds nothing
}


def train(model: nn.Module, rank: int, size: int, around=nowhere, probe=nowhere) -> list[Tensor]:
    """Two batches to a step, the first under no_sync; at the last one rank has only padding.

    Returns the losses, and this rank's part of the weights in the end.
    """
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, places = [], itertools.count()
    for number in range(STEPS):
        empty = size - 1 if number == STEPS - 1 else None
        for part in range(2):
            probe(next(places))
            with no_sync(model, part == 0):
                with around(number):
                    loss = loss_of(model, *ragged(rank, number + 50 * part, empty))
                probe(next(places))
                loss.backward()
            losses.append(loss.detach())
        probe(next(places))
        optimizer.step()
        probe(next(places))
        optimizer.zero_grad()
    return [*losses, *local(model)]


def no_sync(model: nn.Module, on: bool):
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not on)
        return contextlib.nullcontext()
    return model.no_sync() if on else contextlib.nullcontext()


def strategies(ranks: RankGroup, folder: Path) -> None:
    """Trained alone, watched, and probed anywhere in a step; first and last readings by hand."""
    begin: dict[str, float] = {}
    inputs = dict(zip(("ids", "attention_mask"), ragged(0), strict=True))
    # On four ranks the others, and probes, are no different from two, and slow.
    for name in STRATEGIES if ranks.size == 2 else ["fsdp2"]:
        wrap = STRATEGIES[name]
        alone = train(wrap(Decoder(dropout=0.2)), ranks.rank, ranks.size)
        if ranks.size == 2:
            model = wrap(Decoder(dropout=0.2))
            monitor, probed = monitor_of(model, metrics=select("variance"))
            probe = partial(monitor.probe, inputs=inputs)
            found = train(model, ranks.rank, ranks.size, probe=probe)
            assert all(map(torch.equal, found, alone)), name
            assert ranks.rank or len(probed.readings) == 6 * STEPS
        model = wrap(Decoder(dropout=0.2))
        tokens = 75 * ranks.size  # so many that no sequence of queries is left out
        monitor, memory = monitor_of(model, tokens=tokens)
        assert all(map(torch.equal, train(model, ranks.rank, ranks.size, monitor), alone)), name
        model.eval()
        ids, mask = ragged(ranks.rank)
        with monitor(STEPS), torch.no_grad():
            model(ids, attention_mask=mask)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if ranks.rank:
            continue
        assert steps(memory) == list(range(STEPS + 1)), name
        assert monitor.describe()["layers"] == [f"blocks.{index}" for index in range(LAYERS)], name
        whole = Decoder().eval()
        whole.load_state_dict(state)
        batches = [ragged(rank) for rank in range(ranks.size)]
        expected = one_process(whole, batches, FEW, step=STEPS, tokens=tokens)
        assert_same(measured(memory.readings[-1]), expected)
        begin = begin or measured(memory.readings[0])
        assert_same(measured(memory.readings[0]), begin)


def local(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in model.parameters()]
