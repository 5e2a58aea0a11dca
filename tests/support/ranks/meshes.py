"""Ranks that share one model by tensor, pipeline and sequence parallelism.

The models, and one process on hidden states that are gathered by hand, are those of the benchmark
that tries all meshes. Each rank checks what it has found; the first one has the readings.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.mesh_models import (
    SMALL,
    Decoder,
    MeshSpec,
    Training,
    batch_of,
    loss_of,
)
from benchmarks.meshes import largest_difference, run_cell
from geomon import Memory, Monitor, describe, every, measure, read, select
from geomon.distributed import RankGroup
from support.measuring import watching
from support.ranks.launch import write_down
from support.ranks.one_process import measured

HEADS, KEY_HEADS, HEAD_WIDTH = SMALL.heads, SMALL.key_heads, SMALL.head_width
FEW = select("variance", "twonn", "within_variance", "attention_entropy", "qk_cosine", "max_logit")
TWO_STAGES = MeshSpec(pipeline=2, tensor=2, schedule="interleaved", hidden="DTensor")
CELLS = (
    (MeshSpec(data=2, tensor=2, wrap="FSDP2", hidden="sequence"), "Llama", 0.1),
    (MeshSpec(data=2, pipeline=2, wrap="DDP", schedule="1F1B"), "Llama", 0.1),
    (TWO_STAGES, "GPT", 0.0),
    (MeshSpec(tensor=4), "Llama", 0.0),
)
PAGE = (Path(__file__).parents[3] / "docs" / "many_ranks.md").read_text()
# Values of the last digits of a forward pass that is shared out, in one that is not.
ROUNDING = 1e-4


monitor_of = partial(watching, metrics=FEW, tokens=96, budget=None)


def values(memory: Memory) -> dict[str, float]:
    return measured(memory.readings[-1])


def notes(memory: Memory) -> str:
    return "\n".join(memory.readings[-1].words())


# -- four ranks ------------------------------------------------------------------------------------


def cells(ranks: RankGroup, folder: Path) -> None:
    """Values of each layer and head equal one process's; the training is not changed."""
    for spec, family, dropout in CELLS:
        found = run_cell(spec, family, dropout, FEW, steps=2)
        if found is not None:
            assert found.identical, spec
            assert found.by_hand == 0, (spec, found)
            assert dropout or found.rounding < ROUNDING, (spec, found)
            assert found.values > 50


class Chosen(nn.Module):
    """Attention with all key heads on every rank: it uses those that its query heads need."""

    def __init__(self, of: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.out = of.wq, of.wk, of.wv, of.out
        first, count = rank * KEY_HEADS // size, max(1, KEY_HEADS // size)
        self.keys = slice(first, first + count)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for made in (self.wq(x), self.wk(x), self.wv(x))
        )
        k, v = k[:, self.keys], v[:, self.keys]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class OverDTensors(nn.Module):
    """Attention by hand, of DTensors from the projections to the output."""

    def __init__(self, of: nn.Module, along: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wq, self.out = of.wq, of.out
        self.wk, self.wv = (nn.Linear(*reversed(of.wq.weight.shape)) for _ in range(2))
        self.along = along

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made.view(*made.shape[:2], -1, HEAD_WIDTH).transpose(1, 2)
            for made in (self.wq(x), self.wk(x), self.wv(x))
        )
        if self.along is not None:  # as context parallelism shares them out
            q = q.redistribute(placements=[Shard(self.along)])
            k, v = (made.redistribute(placements=[Replicate()]) for made in (k, v))
        scores = q @ k.transpose(-2, -1) * HEAD_WIDTH**-0.5
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        if isinstance(scores, DTensor):
            hidden = DTensor.from_local(hidden, scores.device_mesh, [Replicate()])
        y = (scores + hidden).softmax(dim=-1) @ v
        if self.along is not None:
            y = y.redistribute(placements=[Shard(1)])
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def other_attentions(ranks: RankGroup, folder: Path) -> None:
    """Key heads that several ranks have count once; heads of DTensors are read, sequences not."""
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))
    ids = batch_of(0, 0)
    out = {"attention.out": RowwiseParallel()}
    over = ColwiseParallel(use_local_output=False)
    all_over = {f"attention.{name}": over for name in ("wq", "wk", "wv")} | out
    for here, whole, plan in (
        (
            partial(Chosen, rank=ranks.rank, size=ranks.size), partial(Chosen, rank=0, size=1),
            {"attention.wq": ColwiseParallel()} | out,
        ),
        (OverDTensors, OverDTensors, all_over),
        (partial(OverDTensors, along=2), OverDTensors, all_over),
    ):  # fmt: skip
        along = here is not OverDTensors and whole is OverDTensors
        model, alone = Decoder("Llama", 2), Decoder("Llama", 2)
        for block, same in zip(model.blocks.values(), alone.blocks.values(), strict=True):
            block.attention, same.attention = here(block.attention), whole(same.attention)
            parallelize_module(block, mesh, plan)
        monitor, memory = monitor_of(model, strict=not along)
        with monitor(0):
            model(ids)
        if ranks.rank:
            continue
        expects, expected = monitor_of(alone, gather=False)
        with expects(0):
            alone(ids)
        if along:
            assert "on several ranks (context parallelism)" in notes(memory)
            tag = "variance/layer_02"
            assert values(memory)[tag] == pytest.approx(values(expected)[tag])
        else:
            assert largest_difference(values(memory), values(expected)) < ROUNDING


def page(ranks: RankGroup, folder: Path) -> None:
    """The code of the page on many ranks runs, with a loss that stays sharded."""
    loop, of_pipeline, _, of_transformers = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    ids = batch_of(0, 0)
    names: dict[str, Any] = {"batches": [(ids, ids)] * 2}

    def shared_at_the_ends(part: Decoder) -> None:
        mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))
        logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        table = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(part, mesh, {"tokens": table, "head": logits})

    training = Training(MeshSpec(tensor=4), "Llama", 0.0, shared_at_the_ends)
    names |= {"model": training.watched, "optimizer": training.optimizer}
    with loss_parallel():
        _run_block(loop, names | {"loss_of": loss_of}, folder / "loop")
    training = Training(MeshSpec(pipeline=4, schedule="1F1B"), "GPT", 0.0)
    names |= {"schedule": training.watched, "optimizer": training.optimizer}
    names |= {"is_first_stage": ranks.rank == 0, "is_last_stage": ranks.rank == 3}
    _run_block(of_pipeline, names, folder / "pipeline")
    for name, family, layers in (("loop", "Llama", 2), ("pipeline", "GPT", 4)):
        if ranks.rank == 0:
            model = Decoder(family, layers)
            expects, expected = monitor_of(model, gather=False, tokens=4096)
            with expects(0):
                model(ids)
            (first,) = read(folder / name / "runs" / "first")
            found = measured(first)
            # In another order of the rows another one of equal rows stands for them in margins.
            alone = {tag: x for tag, x in values(expected).items() if not tag.endswith("margin")}
            assert largest_difference({tag: found[tag] for tag in alone}, alone) < ROUNDING
            assert first.tokens == ids.numel()
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=60, num_attention_heads=4, **sizes)
    if ranks.rank == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "saved")
    dist.barrier()
    given = {"folder": folder / "saved", "batches": [ids]}
    _run_block(of_transformers, given, folder / "transformers")
    if ranks.rank == 0:
        (reading,) = read(folder / "transformers" / "runs" / "first")
        assert "max_logit/layer_02/head_3" in measured(reading)


def _run_block(block: str, names: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        exec(compile(block, "many_ranks.md", "exec"), {**names})


def probes(ranks: RankGroup, folder: Path) -> None:
    """Extra passes read what one process does, and leave the training as it is."""
    for spec in (
        MeshSpec(data=2, tensor=2, wrap="FSDP2"),
        MeshSpec(pipeline=2, tensor=2, schedule="GPipe"),
    ):
        ends = []
        for watched in (False, True):
            training = Training(spec, "GPT", 0.1)
            training.seed()
            monitor, memory = monitor_of(training.watched)
            inputs = batch_of(0, 9)
            probe: Any = inputs
            if spec.schedule:
                probe = partial(_run_probe, training, inputs)
                with pytest.raises(ValueError, match="a function that runs one pass"):
                    monitor.probe(0, inputs)
            losses = []
            for step in range(2):
                if watched:
                    monitor.probe(step, probe)
                losses += training.step(step)
            ends.append((losses, training.state(), torch.get_rng_state()))
        (losses, weights, random), (others, same, also) = ends
        assert losses == others
        assert all(map(torch.equal, weights, same))
        assert torch.equal(random, also)
        if ranks.rank == 0:
            assert memory.readings[0].mode == "eval"
            if not spec.schedule:
                alone = measure(Decoder("GPT", 2), inputs, metrics=FEW, tokens=96)
                first = measured(memory.readings[0])
                assert largest_difference(first, alone) < ROUNDING
            else:
                assert len(values(memory)) > 50
                assert memory.readings[0].tokens == 96


def _run_probe(training: Training, inputs: Tensor, schedule: Any) -> None:
    assert schedule is training.watched
    training.run(inputs, "eval")


def parts(ranks: RankGroup, folder: Path) -> None:
    """Notes name the part of a rank that reads alone, and tokens that do not belong together."""
    training = Training(TWO_STAGES, "Llama", 0.0)
    page = str(describe(training.watched))
    first, second = ranks.rank // 2, ranks.rank // 2 + 2
    assert "4 ranks: 2 pipeline (4 stages) x 2 tensor (tp)" in page
    part = f"stages {first} and {second} of 4 (from 0), shard {ranks.rank % 2} of 2 of the weights"
    assert f"{ranks.rank}: {part}" in page
    seen = str(describe(training.watched, partial(_run_probe, training, batch_of(0, 0))))
    assert f"hidden states from place (0, {8 * (ranks.rank % 2)}) on" in " ".join(seen.split())
    assert "4 heads of several ranks" in seen
    # No rank has the whole model, which a check looks at.
    monitor, _ = monitor_of(training.watched, schedule=every(100), checks=1)
    monitor.advance(1)
    assert not monitor.is_due(1)
    monitor, memory = monitor_of(training.watched, gather=False)
    training.step(0, partial(monitor, 0))
    if ranks.rank == 0:
        assert f"the part of the model on rank 0 is measured: {part}" in notes(memory)
        assert {tag.split("/")[1] for tag in values(memory) if "layer_" in tag} == {
            "layer_00", "layer_01", "layer_02",
        }  # fmt: skip
    # Ranks that share one model are given other tokens.
    shared = Training(MeshSpec(tensor=4), "GPT", 0.0)
    monitor, memory = monitor_of(shared.watched)
    with monitor(0):
        shared.watched(batch_of(ranks.rank, 0))
    if ranks.rank == 0:
        assert "rank 1 received other tokens than rank 0" in notes(memory)


# -- two ranks -------------------------------------------------------------------------------------


def slow(ranks: RankGroup, folder: Path) -> None:
    """A rank that is late for a reading is given up; the training ends as it would without."""
    spec = MeshSpec(pipeline=2, schedule="1F1B")
    plain = Training(spec, "Llama", 0.1)
    plain.seed()
    losses = [loss for step in range(3) for loss in plain.step(step)]
    training = Training(spec, "Llama", 0.1)
    monitor, memory = monitor_of(training.watched, strict=False, rank_timeout=1.5)
    training.seed()

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with monitor(step):
            yield
            if step == 1 and ranks.rank == 1:
                time.sleep(2.5)

    found = [loss for step in range(3) for loss in training.step(step, partial(around, step))]
    assert found == losses
    assert all(map(torch.equal, training.state(), plain.state()))
    if ranks.rank == 0:
        assert [reading.step for reading in memory.readings] == [0, 2]
        assert "the part of the model on rank 0 is measured" in notes(memory)
    dist.barrier()


def dies(ranks: RankGroup, folder: Path) -> None:
    """A rank that is lost ends the training as it would without, and no reading waits for it."""
    training = Training(MeshSpec(tensor=2, hidden="sequence"), "GPT", 0.0)
    monitor, memory = monitor_of(training.watched, strict=False, rank_timeout=1000)
    training.step(0, partial(monitor, 0))
    if ranks.rank == 1:
        write_down(dies, folder)
        os._exit(0)
    with pytest.raises(RuntimeError, match="gloo"):
        _go_on(training, monitor)
    monitor.close()
    assert [reading.step for reading in memory.readings] == [0]
    assert sum(len(module._forward_hooks) for module in training.parts[0].modules()) < 20


def _go_on(training: Training, monitor: Monitor) -> None:
    for step in (1, 2):
        training.step(step, partial(monitor, step))
