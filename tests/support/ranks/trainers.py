"""Trainings by Lightning and by the Trainer on two ranks, which initialise torch.distributed.

Lightning and transformers are imported inside functions: a machine may have only one of them.
"""

import contextlib
import math
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from geomon import Memory, every, read
from geomon.distributed import RankGroup
from support.ranks.one_process import FEW, assert_same, losses, measured, steps
from support.ranks.strategies import local

MEAN_OF_IDS = {"ids": lambda token_ids: token_ids.double().mean()}


def lightning(ranks: RankGroup, folder: Path) -> None:
    """DDP and FSDP2 (ModelParallelStrategy), accumulated batches."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from support.loops import ROWS, Learner, Validated, in_lightning

    # Lightning was imported before this process had a rank.
    rank_zero_only.rank = int(os.environ["RANK"])

    class Sharded(Validated):
        def configure_model(self) -> None:
            net = self.learner.net
            for module in (*net.blocks, net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def fit(options, kind, strategy, name):
        module = kind(Learner())
        in_lightning(
            module.learner, options, folder / name, module=module, held_out=ROWS[:40], steps=3,
            accumulate=2, num_sanity_val_steps=1, val_check_interval=4, strategy=strategy,
            devices=2,
        )  # fmt: skip
        seen = [*map(torch.tensor, (module.validated, module.learner.losses))]
        return [*(parameter.clone() for parameter in local(module)), *seen]

    of_ddp: dict[str, Memory] = {}
    for name, kind, strategy in (
        ("ddp", Validated, DDPStrategy),
        ("fsdp2", Sharded,
         partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)),
    ):  # fmt: skip
        plain = fit(None, kind, strategy(), name)
        # The sanity check has a batch for each rank. From a loader, ranks take turns.
        for source, probe, rows in (
            ("inline", None, 0), ("validation", "validation", 16), ("probe", ROWS[:8], 0),
            ("loader", DataLoader(ROWS, batch_size=8), 32),
        )[: 4 if name == "ddp" else 2]:  # fmt: skip
            memory = Memory()
            options = {
                "metrics": MEAN_OF_IDS if rows else FEW, "tokens": 1024 if rows else 150,
                "schedule": every(1), "strict": True, "probe": probe, "sinks": [memory],
            }  # fmt: skip
            found = fit(options, kind, strategy(), f"{name}_{source}")
            assert all(map(torch.equal, found, plain)), (name, source)
            if int(os.environ["RANK"]):
                assert not memory.readings
                continue
            assert steps(memory) == [0, 1, 2, *([] if source == "inline" else [3])]
            for reading in memory.readings if rows else ():
                assert reading.tokens == ROWS[:rows].numel()
                mean = float(ROWS[:rows].double().mean())
                assert math.isclose(reading.values["ids/layer_01"], mean)
            same = of_ddp.setdefault(source, memory)  # the same under FSDP2
            assert losses(memory)[:3] == pytest.approx(losses(same)[:3], rel=1e-6)
            assert memory.readings[0].tokens == same.readings[0].tokens
            assert_same(measured(memory.readings[0]), measured(same.readings[0]))
    _run_page(folder)


def _run_page(folder: Path) -> None:
    """Run the page on many ranks: its block on Lightning with sharded weights."""
    import lightning as L
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from benchmarks import mesh_models

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.net = mesh_models.Decoder("Llama", 2)
            plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
            plan |= {"attention.out": RowwiseParallel()}
            for block in self.net.blocks.values():
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)

        def training_step(self, ids, index):
            return mesh_models.loss_of(self.net(ids), ids)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    page = (Path(__file__).parents[3] / "docs" / "many_ranks.md").read_text()
    (block,) = [x for x in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "lightning" in x]
    at = folder / "page"
    at.mkdir(exist_ok=True)
    batches = [mesh_models.batch_of(0, step) for step in range(3)]
    with contextlib.chdir(at):
        exec(
            compile(block, "many_ranks.md", "exec"),
            {"module": Module(), "loader": DataLoader(batches, batch_size=None)},
        )
    if int(os.environ["RANK"]) == 0:
        (path,) = at.rglob("readings.jsonl")
        readings = list(read(path.parent))
        assert [reading.step for reading in readings] == [0, 2]
        heads = {tag for tag in readings[0].values if tag.startswith("max_logit/layer_02/head_")}
        assert len(heads) == mesh_models.SMALL.heads


def trainer(ranks: RankGroup, folder: Path) -> None:
    """DDP, as torchrun starts it: the evaluation is each rank's share."""
    from support.loops import ROWS, Learner, in_huggingface

    memory, found, held_out = Memory(), [], ROWS[:32]
    options = {
        "metrics": MEAN_OF_IDS, "tokens": 1024, "schedule": every(2), "strict": True,
        "sinks": [memory], "probe": "validation",
        "probe_loss": lambda outputs, batch: outputs["loss"],
    }  # fmt: skip
    for name, watched in (("plain", None), ("run", options)):
        learner = Learner()
        trains = in_huggingface(
            learner, watched, folder / name, steps=4, held_out=held_out, ddp_backend="gloo",
            eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        evaluated = [e["eval_loss"] for e in trains.state.log_history if "eval_loss" in e]
        numbers = map(torch.tensor, (evaluated, learner.losses))
        found.append([*learner.parameters(), *numbers])
    assert all(map(torch.equal, *found))
    assert len(evaluated) == 2
    assert steps(memory) == ([] if int(os.environ["RANK"]) else [2, 4])  # first evaluated, then 2
    # Both ranks' batches, at the steps at which the Trainer evaluates them too.
    for reading, loss in zip(memory.readings, evaluated, strict=False):
        assert reading.tokens == held_out.numel()
        assert math.isclose(reading.values["ids/layer_01"], float(held_out.double().mean()))
        assert math.isclose(reading.values["training/probe_loss"], loss, rel_tol=1e-5)
