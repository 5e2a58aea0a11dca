"""What several processes do together: run as a program by `test_group.py`, once on each rank.

A small decoder with a padding mask, ragged batches, and the readings of one process on the rows of
all ranks, put together here by hand. Each rank checks what it has found; the readings are those of
the first one. Lightning and transformers are imported where they are needed.
"""

import _thread
import contextlib
import gc
import itertools
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from geomon import METRICS, Memory, Reading, every, measure, read, select
from geomon.capture import Window, derive_seed, find_anatomy
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    join_ranks,
    merge_layers,
)
from geomon.metrics import Evaluator
from support.measuring import watching
from support.models import VOCABULARY, PlainBlock, PlainDecoder, batch
from support.on_ranks import run_here, write_down
from support.scenario_list import SCENARIOS
from support.scenarios import Scenario, Watched, check, step

LAYERS, LENGTH = 3, 24
FEW = select("variance", "twonn", "within_variance", "attention_entropy", "qk_cosine")
MORE = select("effective_rank_last", "local_dimension")
MEAN_OF_IDS = {"ids": lambda token_ids: token_ids.double().mean()}
STEPS = 4


class Decoder(PlainDecoder):
    """Takes a padding mask."""

    def __init__(self, layers: int = LAYERS, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(16, layers, 2, LENGTH, dropout)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, :]
        seen = seen | torch.eye(length, dtype=torch.bool)  # no row of a softmax is empty
        x = self.tokens(ids) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, seen[:, None])
        return self.head(x)


def ragged(rank: int, step: int = 0, empty: int | None = None) -> tuple[Tensor, Tensor]:
    """A batch of a rank's own size, length and padding; of padding alone for the empty rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sequences, length = 2 + rank % 3, LENGTH - 6 * (rank % 2)
    ids = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (sequences,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    return ids, mask & (rank != empty)


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(
        model(ids, attention_mask=mask).flatten(0, 1), ids.flatten(), reduction="none"
    )
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


# -- one process on the rows of all ranks ----------------------------------------------------------


def one_process(model, batches, metrics, *, step, tokens, most=1):
    """Values of one process that holds the rows that each rank drew."""
    size, rows = len(batches), tokens * most
    snapshots = []
    for rank, (ids, mask) in enumerate(batches):
        own = rows // size + (rank < rows % size)
        seed = derive_seed(0, step, rank) if rank else derive_seed(0, step)
        with Window(
            find_anatomy(model), Evaluator(metrics, most).views, rows=own, seed=seed
        ) as window:
            model(ids, attention_mask=mask)
        snapshots.append(window.snapshot())
    # How parts are put together is held against a layer that was cut, in test_merge.py.
    layers = [merge_layers(parts) for parts in zip(*(s.layers for s in snapshots), strict=True)]
    evaluated = Evaluator(metrics, most).evaluate(layers, tokens).stacks
    return measured(Reading(0, 0.0, 0.0, "inline", "", 0, 1, "", evaluated))


def measured(reading) -> dict[str, float]:
    others = ("geomon/", "training/", "update_size/", "unmoved/")  # the last two take two looks
    return {tag: value for tag, value in reading.values.items() if not tag.startswith(others)}


def assert_same(values: dict[str, float], others: dict[str, float], within: float = 0) -> None:
    """Hold values against others, up to a share of these."""
    assert values.keys() == others.keys()
    for tag, value in values.items():
        other = others[tag]
        alike = abs(value - other) <= within * max(abs(other), 1e-3)
        assert alike or (math.isnan(value) and math.isnan(other)), (tag, value, other)


def losses(memory: Memory) -> list[float]:
    return [reading.values["training/loss"] for reading in memory.readings]


def words(memory: Memory) -> list[str]:
    return [note for reading in memory.readings for note in reading.words()]


def steps(memory: Memory) -> list[int]:
    return [reading.step for reading in memory.readings]


# -- what is checked on several ranks --------------------------------------------------------------


monitor_of = partial(watching, metrics=FEW, tokens=32)


def ragged_readings(ranks: RankGroup, folder: Path) -> None:
    """Every metric on ragged batches, all their rows or some; one rank with nothing but padding."""
    for tokens, empty in ((400, None), (24, None), (400, ranks.size - 1), (400, 0)):
        model = Decoder()
        monitor, memory = monitor_of(model, metrics=METRICS, tokens=tokens, splits=2)
        ids, mask = ragged(ranks.rank, empty=empty)
        with monitor(0):
            model(ids, attention_mask=mask)
        if ranks.rank:
            continue
        (reading,) = memory.readings
        batches = [ragged(rank, empty=empty) for rank in range(ranks.size)]
        found = measured(reading)
        expected = one_process(model, batches, METRICS, step=0, tokens=tokens, most=2)
        if tokens == 24 and ranks.size == 4:  # of the attention some sequences, as one would
            found, expected = (
                {tag: v for tag, v in values.items() if not tag.startswith("attention")}
                for values in (found, expected)
            )
        assert sum(map(math.isfinite, found.values())) > 250
        assert_same(found, expected)
        assert reading.tokens == rows_of_all(batches, 2 * tokens)


def same_tokens(ranks: RankGroup, folder: Path) -> None:
    """All ranks are given one batch, as those of a pipeline are: the first is read, and said."""
    model, (ids, mask) = Decoder(), ragged(0)
    monitor, memory = monitor_of(model, tokens=400)
    with monitor(0):
        model(ids, attention_mask=mask)
    if ranks.rank == 0:
        expected = one_process(model, [ragged(0)], FEW, step=0, tokens=400)
        assert_same(measured(memory.readings[0]), expected)
        (note,) = [note for note in words(memory) if "had the same tokens as rank 0" in note]
        assert ("and 2 other ranks alike" in note) == (ranks.size == 4)


def rows_of_all(batches, rows: int) -> int:
    size = len(batches)
    shares = [rows // size + (rank < rows % size) for rank in range(size)]
    return sum(min(own, int(mask.sum())) for own, (_, mask) in zip(shares, batches, strict=True))


def split_batch(ranks: RankGroup, folder: Path) -> None:
    """A batch that is split over ranks is read as one process reads it whole."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
    model, values, arrays = Decoder(), [], []
    for alone, given in ((False, ids.chunk(ranks.size)[ranks.rank]), (True, ids)):
        if alone and ranks.rank:
            return
        at = folder / f"split over {ranks.size}, {alone}"
        options = {"metrics": METRICS | MORE, "tokens": 400, "splits": 1, "gather": not alone}
        monitor, memory = monitor_of(model, directory=at, **options)
        with monitor(0):
            model(given, attention_mask=torch.ones_like(given, dtype=torch.bool))
        if ranks.rank == 0:
            values.append(measured(memory.readings[0]))
            arrays.append(read(at).arrays(0))
    # Rows are drawn in another order: rounding, and no more; some margins are computed in float32.
    # Of equal rows the first stands for all, and with the order the half in which it is.
    split, whole = values
    margins = {tag for tag in whole if tag.endswith("/margin")}
    near = {tag for tag in margins if tag.startswith(("twonn", "gride", "local_dimension"))}
    assert split.keys() == whole.keys()
    for tags, bound in ((whole.keys() - margins, 1e-9), (margins - near, 1e-3)):
        assert_same(*({tag: run[tag] for tag in tags} for run in (split, whole)), within=bound)
    assert arrays[0].keys() == arrays[1].keys()
    means = [tag for tag in arrays[0] if tag.startswith("mean_")]  # others hold a part of the rows
    assert len(means) >= 2 * LAYERS
    for tag in means:
        assert arrays[0][tag] == pytest.approx(arrays[1][tag], rel=1e-4, abs=1e-5, nan_ok=True), tag


def probes(ranks: RankGroup, folder: Path) -> None:
    """Fixed inputs are the first rank's; other ranks' would be copies, or are said to differ."""
    model = Decoder(dropout=0.3)
    ids, mask = ragged(0)
    inputs = {"ids": ids, "attention_mask": mask}
    monitor, memory = monitor_of(model, metrics=METRICS, probe=inputs)
    with monitor(0):
        pass
    monitor.probe(1, dict(zip(("ids", "attention_mask"), ragged(ranks.rank), strict=True)))
    alone = measure(model, inputs, metrics=METRICS, tokens=32)  # on every rank, and no collective
    if ranks.rank:
        return
    one, other = map(measured, memory.readings)
    assert_same(one, alone)
    assert_same(other, alone)
    assert [note for note in words(memory) if "different inputs" in note] == [
        "the ranks probe with different inputs: rank 0's were measured"
    ]


# -- runs as those of one process, of which the first rank has the readings ------------------------


class Heard(logging.Handler):
    """What geomon says on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.clear = self.messages.clear
        logging.getLogger("geomon").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def second_rank_fails(hidden: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("by design")
    return hidden.mean()


def broken_window(self, device=None, *, wait=True):
    raise OSError("no window here")


def without_window(step: int, rank: int):
    """Run a step whose window fails on a rank."""

    def event(watched: Watched) -> None:
        if dist.get_rank() == rank:
            watched.patch.setattr(Window, "snapshots", broken_window)
        watched.step(step)
        watched.patch.undo()

    return event


def unwatched(watched: Watched) -> None:
    watched.model(batch())


def waste(watched: Watched) -> None:
    """By its own clock the second rank would read each step."""
    watched.monitor.account.charged -= 1e9 * (dist.get_rank() == 1)


# Scenarios with ranks of their own, with an error of one rank alone, and with rows that all have.
ALONE = {name for name, each in SCENARIOS.items() if "ranks" in each.options}
ALONE |= {"a strict metric that fails", "fewer rows than were asked for"}
FRAGILE = {"metrics": select("variance") | {"fragile": second_rank_fails}}


def runs_of(rank: int, size: int) -> dict[str, Scenario]:
    """Scenarios of this rank, most of them those of one process."""
    odd, last, second = rank == 1, size - 1, every(2)
    return {name: each for name, each in SCENARIOS.items() if name not in ALONE} | {
        "a metric fails at the layers of one rank": Scenario(
            range(2), range(2), FRAGILE, ["by design"]
        ),
        "strict, and a metric fails": Scenario(
            [0], [], FRAGILE | {"strict": True},
            raises=(RankFailedError, "by design") if rank < 2 else None,
        ),
        "a window fails on one rank": Scenario(  # not tried again by those that saw no fault
            [0, without_window(1, last), without_window(2, last), 2, 3, 4], [0, 3, 4],
            said=[f"a reading failed and is left out: rank {last}: OSError: no window here"],
        ),
        "other layers": Scenario(  # said when the monitors are built
            [0], [0], {"model": lambda: PlainDecoder(layers=LAYERS + odd), "tokens": 256},
            ["rank 1 was built with other layers than rank 0"], {"tokens": [256]},
        ),
        "another schedule": Scenario(
            range(7), [0, 2, 4, 6], {"schedule": every(3) if odd else second},
            ["rank 1 was built with schedule="],
        ),
        # That rank owes it and is ahead at step 3, where it waits; they meet at step 4.
        "a rank misses a window": Scenario(
            [0, 1, unwatched if odd else 2, *range(3, 7)], [0, 4, 6], {"schedule": second},
            ["rank 1 reads step 3 but rank 0 reads step 2"],
        ),
        "a budget, of which the first rank decides": Scenario(
            [0, waste, *range(1, 8), step(8, force=True)], [0, 8],
            {"budget": 0.001, "checks": None}, ["the budget left out 7 of 9"],
            {"left_out": [0, 7]},
        ),
        "nothing is gathered, and no rank waits": Scenario(
            range(2 * (rank == 0)), range(2), {"gather": False, "tokens": 256},
            found={"tokens": [256] * 2},
        ),
    }  # fmt: skip


def scenarios(ranks: RankGroup, folder: Path) -> None:
    heard, first = Heard(), ranks.rank == 0
    for name, scenario in runs_of(ranks.rank, ranks.size).items():
        dist.barrier()
        place = folder / f"{name} {ranks.size}".replace("/", "")
        options = {"first_batch": 100 * ranks.rank, "directory": place}
        print(name, file=sys.stderr)
        own = replace(scenario, options=options | scenario.options)
        watched = check(own, folder, heard, is_first=first)
        for reading in watched.memory.readings if scenario.options is FRAGILE else ():
            for layer in range(LAYERS + 1):
                fails = math.isnan(reading.values[f"fragile/layer_{layer:02d}"])
                assert fails == (layer % ranks.size == 1)
                assert math.isfinite(reading.values[f"variance/layer_{layer:02d}"])


def resumed(ranks: RankGroup, folder: Path) -> None:
    """Goes on in the same folder, two steps back, as from a checkpoint."""
    first = {1: 10, 2: 0, 4: 5}[ranks.size]
    events, options = range(max(0, first - 2), first + 5), {"first_batch": 100 * ranks.rank}
    check(
        Scenario(events, events, options, read=range(first + 5)), folder / "resumed", Heard(),
        is_first=ranks.rank == 0,
    )  # fmt: skip


# -- strategies ------------------------------------------------------------------------------------


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


def nowhere(step: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


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
    # FSDP1, and probes, on four ranks are no different from two, and slow.
    for name, wrap in [*STRATEGIES.items()][: 4 if ranks.size == 2 else 2]:
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


# -- ranks that are lost ---------------------------------------------------------------------------


def lost(ranks: RankGroup, folder: Path) -> None:
    """The second rank sleeps through a reading, later it dies; the first goes on with its own.

    It sleeps until the first has given it up: how long that takes is the machine's affair.
    """

    def sleep(watched: Watched) -> None:
        while ranks.rank and not (folder / "given up").exists():
            time.sleep(0.05)

    def die(watched: Watched) -> None:
        if ranks.rank:
            write_down("lost", "lost", folder)
            os._exit(0)

    def give_up(watched: Watched) -> None:
        (folder / "given up").touch()

    said = [f"rank {rank} lost the other ranks" for rank in range(2)]
    options = {"tokens": 512, "rank_timeout": 4, "first_batch": 100 * ranks.rank}
    for fault in (sleep, die):  # the reading that was under way is left out
        scenario = Scenario(
            [0, 1, fault, 2, give_up, 3], [0, 1, 3], options, [said[0], "only 256 rows"],
            {"tokens": [512, 512, 256]}, elsewhere=said[1:],
        )  # fmt: skip
        check(scenario, folder / fault.__name__, Heard(), is_first=ranks.rank == 0)


def told(ranks: RankGroup, folder: Path) -> None:
    """One rank of four is gone; a rank that does not hear of it itself is told by the others."""
    gc.disable()  # which might end by chance what is to end at once
    group = join_ranks(timeout=60)
    if ranks.rank == 3:
        write_down("told", "told", folder)
        os._exit(0)
    began = time.perf_counter()
    with pytest.raises(RanksLostError):
        group.all_gather(0)
    group.disconnect()
    (folder / f"told {ranks.rank}").touch()
    while len([*folder.glob("told [0-9]")]) < 3 and time.perf_counter() - began < 30:
        time.sleep(0.05)  # ranks that end would tell the others too
    assert time.perf_counter() - began < 30


def interrupted(ranks: RankGroup, folder: Path) -> None:
    """Ctrl-C while the other rank does not answer: it is not waited for."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, memory = monitor_of(model, strict=False, rank_timeout=1000)
    done = folder / "interrupted"
    while ranks.rank and not done.exists():
        time.sleep(0.1)
    if ranks.rank:
        return
    # A process that was started in the background of a shell ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt), monitor(0):
        model(ids, attention_mask=mask)
    with monitor(1):  # goes on alone
        model(ids, attention_mask=mask)
    assert steps(memory) == [1]
    assert not any(module._forward_hooks for module in model.modules())
    done.touch()


# -- through Lightning -----------------------------------------------------------------------------


def lightning(ranks: RankGroup, folder: Path) -> None:
    """DDP and FSDP2 (ModelParallelStrategy), accumulated batches."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from support.loops import ROWS, Learner, Validated, in_lightning

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
    """What the page on many ranks says of Lightning is run: weights that ranks share out."""
    import lightning as L
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.utils.data import DataLoader

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

    page = (Path(__file__).parents[2] / "docs" / "many_ranks.md").read_text()
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


# -- through the Trainer ---------------------------------------------------------------------------


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


TOGETHER = (ragged_readings, same_tokens, split_batch, probes, scenarios, strategies)
# Programs, by what is done in them one after another.
PROGRAMS = {
    "together": TOGETHER,
    **{each.__name__: (each,) for each in (resumed, lost, told, interrupted, lightning, trainer)},
}


if __name__ == "__main__":
    name = sys.argv[1]
    run_here(
        PROGRAMS[name], name, Path(sys.argv[2]), by_itself=name in ("lightning", "trainer"),
        ends=name not in ("lost", "told"),
    )  # fmt: skip
