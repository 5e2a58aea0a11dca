"""What several processes do together: run as a program by `test_group.py`, once on each rank.

A small decoder with a padding mask, ragged batches, and the readings of one process on the rows of
all ranks, put together here by hand. Lightning and transformers are imported where they are needed.
"""

import _thread
import contextlib
import copy
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from geomon import METRICS, Memory, Monitor, every, measure, select
from geomon.capture import Window, derive_seed, find_anatomy
from geomon.capture.snapshot import Layer, PassInfo, Snapshot
from geomon.distributed import RankFailedError, RankGroup, find_ranks, join_ranks
from geomon.metrics import Evaluator
from geomon.monitor.measuring.device import MeasuringDevice
from geomon.monitor.measuring.jobs import ReadingJob
from geomon.record.columns import tagged

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 40, 16, 2, 3, 24
FEW = select("variance", "twonn", "within_variance", "attention_entropy", "qk_cosine")
MORE = select("neighbour_overlap", "effective_rank_last", "local_dimension")
IN_TIME = select("neighbour_overlap_in_time")
STEPS = 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            projection(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + y
        return x + F.dropout(self.mlp(x).tanh(), self.dropout, self.training)


class Decoder(nn.Module):
    def __init__(self, layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

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


def filled(values: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(values, (0, columns - values.shape[-1], 0, rows - values.shape[-2]))


def joined(parts: list[Layer]) -> Layer:
    """By hand: rows in rank order, sequences padded to the longest."""
    views = {
        name: torch.cat([part.captured[name] for part in parts])
        for name in ("hidden", "token_ids", "positions", "projected_query", "projected_key")
        if name in parts[0].captured
    }
    for name in ("sequences", "query_sequences", "key_sequences"):
        if name in parts[0].captured:
            numbers, found = 0, []
            for part in parts:
                own = part.captured[name]
                found.append(own + numbers)
                numbers += int(own.max()) + 1 if len(own) else 0
            views[name] = torch.cat(found)
    if "query" in parts[0].captured:
        queries = max(part.captured["query"].shape[2] for part in parts)
        keys = max(part.captured["key"].shape[2] for part in parts)
        width = parts[0].captured["query"].shape[3]
        views["query"] = torch.cat([filled(p.captured["query"], queries, width) for p in parts])
        views["key"] = torch.cat([filled(p.captured["key"], keys, width) for p in parts])
        views["visible"] = torch.cat([filled(p.captured["visible"], queries, keys) for p in parts])
    if "max_logits" in parts[0].captured:
        tops = torch.stack([part.captured["max_logits"] for part in parts])
        views["max_logits"] = tops[~tops.isnan().any(dim=1)].amax(dim=0)  # an empty rank has none
    return replace(parts[0], captured={**parts[0].captured, **views})


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
    layers = [joined(list(parts)) for parts in zip(*(s.layers for s in snapshots), strict=True)]
    return tagged(Evaluator(metrics, most).evaluate(layers, tokens).stacks)


def measured(reading) -> dict[str, float]:
    return tagged(reading.stacks)


def facts(memory: Memory) -> dict:
    """What a sink was given, in plain values."""
    readings = [*memory.readings]
    return {
        "steps": [r.step for r in readings], "tokens": [r.tokens for r in readings],
        "values": [measured(r) for r in readings], "notes": [r.words() for r in readings],
        "losses": [r.values.get("training/loss") for r in readings],
        "probed": [r.values.get("training/probe_loss") for r in readings],
    }  # fmt: skip


# -- what is checked on several ranks --------------------------------------------------------------


def monitor_of(model, directory=None, **kwargs):
    memory = Memory()
    settings = {"metrics": FEW, "tokens": 32, "schedule": every(1), "strict": True} | kwargs
    return Monitor(model, directory=directory, sinks=[memory], **settings), memory


def ragged_readings(ranks: RankGroup, folder: Path) -> dict:
    """Every metric on ragged batches, all their rows or some; one rank with nothing but padding."""
    found = {}
    for name, tokens, empty in (
        ("all rows", 400, None),
        ("some rows", 24, None),
        ("an empty rank", 400, ranks.size - 1),
        ("an empty first rank", 400, 0),
    ):
        model = Decoder()
        monitor, memory = monitor_of(model, metrics=METRICS, tokens=tokens, batches=2)
        ids, mask = ragged(ranks.rank, empty=empty)
        with monitor(0):
            model(ids, attention_mask=mask)
        if ranks.rank == 0:
            batches = [ragged(rank, empty=empty) for rank in range(ranks.size)]
            reading = memory.readings[0]
            found[name] = {
                "gathered": measured(reading), "tokens": reading.tokens,
                "rows of all": rows_of_all(batches, 2 * tokens),
                "one process": one_process(model, batches, METRICS, step=0, tokens=tokens, most=2),
            }  # fmt: skip
    return found


def same_tokens(ranks: RankGroup, folder: Path) -> dict:
    """All ranks are given one batch, as those of a pipeline are."""
    model, (ids, mask) = Decoder(), ragged(0)
    monitor, memory = monitor_of(model, tokens=400)
    with monitor(0):
        model(ids, attention_mask=mask)
    if ranks.rank:
        return {}
    expected = one_process(model, [ragged(0)], FEW, step=0, tokens=400)
    (reading,) = memory.readings
    return {"gathered": measured(reading), "one process": expected, "notes": reading.words()}


def rows_of_all(batches, rows: int) -> int:
    size = len(batches)
    shares = [rows // size + (rank < rows % size) for rank in range(size)]
    return sum(min(own, int(mask.sum())) for own, (_, mask) in zip(shares, batches, strict=True))


def same_rows(ranks: RankGroup, folder: Path) -> dict:
    """The same rows in the same order, whatever the number of ranks; and the same batch, split."""
    generator = torch.Generator().manual_seed(5)
    rows = 2 * 48
    layers = []
    for index in range(6):
        hidden = torch.randn(rows, WIDTH, generator=generator)
        ids = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        cut = slice(ranks.rank * rows // ranks.size, (ranks.rank + 1) * rows // ranks.size)
        views = {"hidden": hidden, "token_ids": ids, "positions": torch.arange(rows)}
        views |= {"last_hidden": hidden.flip(0), "last_sequences": torch.arange(rows)}
        captured = {name: value[cut] for name, value in views.items()} | {"precision": 1e-7}
        sources = frozenset({"hidden", "last"})
        layers.append(Layer(index, f"layer {index}", captured, sources=sources))
    seen = Snapshot(layers, PassInfo(len(layers[0].captured["hidden"]), "train", "float32"))
    model = Decoder()
    job = ReadingJob(
        0, "inline", [seen], join_ranks(),
        Evaluator(METRICS | MORE, 2, strict=True, keeps_arrays=True),
        rows=48, seconds=0.0, place=MeasuringDevice("cpu", model),
    )  # fmt: skip
    while not job.complete:
        job.measure_next()
    job.finish()
    result = job.result()
    arrays = {tag: array.tolist() for tag, array in job.arrays.items()}
    ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
    own = ids.chunk(ranks.size)[ranks.rank]
    monitor, memory = monitor_of(model, metrics=METRICS, tokens=400, batches=1)
    with monitor(0):
        model(own, attention_mask=torch.ones_like(own, dtype=torch.bool))
    split = measured(memory.readings[0]) if ranks.rank == 0 else None
    rows = None if result is None else measured(result)
    return {"rows": rows, "batch": split, "arrays": arrays}


def probes(ranks: RankGroup, folder: Path) -> dict:
    """Fixed inputs are the first rank's; other ranks' would be copies, or are said to differ."""
    model = Decoder(dropout=0.3)
    ids, mask = ragged(0)
    inputs = {"ids": ids, "attention_mask": mask}
    monitor, memory = monitor_of(model, metrics=METRICS | IN_TIME, probe=inputs)
    with monitor(0):
        pass
    own = dict(zip(("ids", "attention_mask"), ragged(ranks.rank), strict=True))
    monitor.probe(1, own)
    one, other = ([measured(r) for r in memory.readings] + [{}, {}])[:2]
    alone = measure(model, inputs, metrics=METRICS, tokens=32)  # on every rank, and no collective
    with torch.no_grad():
        model.blocks[1].mlp.weight.add_(0.5 * torch.eye(WIDTH))
    monitor.probe(4)
    later = measured(memory.readings[-1]) if memory.readings else {}
    notes = [note for reading in memory.readings for note in reading.words()]
    return {"probe": one, "own": other, "later": later, "alone": alone, "notes": notes}


def not_gathered(ranks: RankGroup, folder: Path) -> dict:
    """gather=False says nothing between ranks: the first one builds and reads with no other."""
    if ranks.rank:
        return {}
    model = Decoder()
    monitor, memory = monitor_of(model, folder / "not_gathered", gather=False)
    for step in range(2):
        with monitor(step):
            model(ragged(0)[0], attention_mask=ragged(0)[1])
    expected = one_process(model, [ragged(0)], FEW, step=0, tokens=32)
    return {"readings": [measured(r) for r in memory.readings], "one process": expected}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("geomon").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def failures(ranks: RankGroup, folder: Path) -> dict:
    """A metric that fails at one rank's layers, a window that fails on one rank, other layers."""
    heard = Heard()
    model = Decoder()
    ids, mask = ragged(ranks.rank)

    def second_rank_fails(hidden: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("by design")
        return hidden.mean()

    metrics = FEW | {"fragile": second_rank_fails}
    monitor, memory = monitor_of(model, folder / "failures", metrics=metrics, strict=False)
    snapshots = Window.snapshots
    for step in range(5):
        if step in (1, 2) and ranks.rank == ranks.size - 1:
            Window.snapshots = broken_window
        with monitor(step):
            model(ids, attention_mask=mask)
        Window.snapshots = snapshots
        if step == 2:
            with monitor(step):  # not tried again by those that saw no fault
                model(ids, attention_mask=mask)
    uneven = Decoder(layers=LAYERS + (ranks.rank == 1))
    others, none = monitor_of(uneven, strict=False)
    with others(0):
        uneven(ids, attention_mask=mask)
    strict, _ = monitor_of(model, metrics=metrics, strict=True)
    raised = ""
    try:
        with strict(0):
            model(ids, attention_mask=mask)
    except RankFailedError as error:
        raised = str(error)
    found = {"messages": list(heard.messages), "uneven": len(none.readings), "raised": raised}
    return facts(memory) | found


def broken_window(self, device=None):
    raise OSError("no window here")


def resumed(ranks: RankGroup, folder: Path) -> dict:
    """Goes on in the same folder, two steps back, as from a checkpoint."""
    first = {1: 10, 2: 0, 4: 5}[ranks.size]
    model = Decoder()
    monitor, _ = monitor_of(model, folder / "resumed", budget=None)
    passes = []
    ids, mask = ragged(ranks.rank)
    for step in range(max(0, first - 2), first + 5):
        monitor.advance(step)
        passes.append(monitor.is_due(step))
        with monitor(step):
            model(ids, attention_mask=mask)
    return {"passes": passes}


# -- strategies ------------------------------------------------------------------------------------


def plain_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip


def fsdp1_in_one(model: nn.Module) -> nn.Module:
    """All weights are one flat parameter: of most blocks a rank holds nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


STRATEGIES = {"ddp": plain_ddp, "fsdp2": fsdp2, "fsdp1": fsdp1, "fsdp1 in one": fsdp1_in_one}


def train(model: nn.Module, rank: int, size: int, around) -> list[float]:
    """Two batches to a step, the first under no_sync; at the last one rank has only padding."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        empty = size - 1 if step == STEPS - 1 else None
        for part in range(2):
            with no_sync(model, part == 0):
                with around(step):
                    loss = loss_of(model, *ragged(rank, step + 50 * part, empty))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def no_sync(model: nn.Module, on: bool):
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not on)
        return contextlib.nullcontext()
    return model.no_sync() if on else contextlib.nullcontext()


def whole_state(model: nn.Module) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def strategies(ranks: RankGroup, folder: Path) -> dict:
    """Trained with and without a monitor; readings of the first and the last weights."""
    found = {}
    for name, wrap in STRATEGIES.items():
        plain = wrap(Decoder(dropout=0.2))
        losses = train(plain, ranks.rank, ranks.size, lambda step: contextlib.nullcontext())
        before = [copy.deepcopy(p) for p in local(plain)]
        model = wrap(Decoder(dropout=0.2))
        monitor, memory = monitor_of(model, tokens=150)
        watched = train(model, ranks.rank, ranks.size, monitor)
        model.eval()
        same = all(map(torch.equal, local(model), before)) and watched == losses
        ids, mask = ragged(ranks.rank)
        with monitor(STEPS), torch.no_grad():
            model(ids, attention_mask=mask)
        state = whole_state(model)
        found[name] = {"bit-identical": same} | facts(memory)
        if ranks.rank == 0:
            alone = Decoder().eval()
            alone.load_state_dict(state)
            batches = [ragged(rank) for rank in range(ranks.size)]
            found[name] |= {
                "gathered": measured(memory.readings[-1]),
                "one process": one_process(alone, batches, FEW, step=STEPS, tokens=150),
                "layers": monitor.describe()["layers"],
            }
    return found


def probed_anywhere(ranks: RankGroup, folder: Path) -> dict:
    """Extra passes at any point of a step leave the training as it is, also what FSDP gathered."""
    if ranks.size > 2:  # no different from two, and slow
        return {}
    inputs = dict(zip(("ids", "attention_mask"), ragged(0), strict=True))
    found = {}
    for name, wrap in STRATEGIES.items():
        runs = []
        for probed in (False, True):
            torch.manual_seed(ranks.rank)
            model = wrap(Decoder(dropout=0.2))
            monitor, memory = monitor_of(model, metrics=select("variance"))
            probe = partial(monitor.probe, inputs=inputs) if probed else lambda step: None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                probe(4 * step)
                loss = loss_of(model, *ragged(ranks.rank, step))
                probe(4 * step + 1)
                loss.backward()
                probe(4 * step + 2)
                optimizer.step()
                probe(4 * step + 3)
                optimizer.zero_grad()
                losses.append(loss.item())
            runs.append((losses, [p.clone() for p in local(model)]))
        (losses, weights), (others, same) = runs
        found[name] = losses == others and all(map(torch.equal, weights, same))
        found[f"{name} readings"] = len(memory.readings)
    return found


def local(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in model.parameters()]


# -- ranks that are lost ---------------------------------------------------------------------------


def lost(ranks: RankGroup, folder: Path) -> dict:
    """The second rank sleeps through a reading, later it dies; the first goes on with its own.

    It sleeps until the first has given it up: how long that takes is the machine's affair.
    """
    heard, found = Heard(), {}
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    for name in ("asleep", "dead"):
        monitor, memory = monitor_of(model, folder / name, strict=False, tokens=60, rank_timeout=4)
        began = time.perf_counter()
        for step in range(4):
            if step == 2 and ranks.rank == 1:
                if name == "dead":
                    torch.save({"lost": found}, folder / "lost_2_1.pt")
                    os._exit(0)
                while not (folder / "given up").exists():
                    time.sleep(0.05)
            with monitor(step):
                model(ids, attention_mask=mask)
            if step == 2 and ranks.rank == 0:
                (folder / "given up").touch()
        monitor.close()
        found[name] = facts(memory) | {
            "own rows": [r.tokens == min(60, int(mask.sum())) for r in memory.readings],
            "seconds": time.perf_counter() - began,
            "messages": list(heard.messages),
        }
        heard.messages.clear()
    return found


# -- ranks that do not keep step -------------------------------------------------------------------


def irregular(ranks: RankGroup, folder: Path) -> dict:
    """The second rank misses a window, or has another schedule; slow it is in both."""
    found = {}
    heard = Heard()
    for name in ("misses", "schedule"):
        model, (ids, mask) = Decoder(), ragged(ranks.rank)
        odd = ranks.rank == 1
        monitor, memory = monitor_of(
            model, folder / name, schedule=every(3 if name == "schedule" and odd else 2),
            tokens=30, strict=False, rank_timeout=20,
        )  # fmt: skip
        waited = []
        for step in range(7):
            if odd and step == 4:
                time.sleep(1.5)
            if name == "misses" and odd and step == 2:
                model(ids, attention_mask=mask)
                continue
            began = time.perf_counter()
            with monitor(step):
                model(ids, attention_mask=mask)
            waited.append(time.perf_counter() - began)
        monitor.close()
        found[name] = facts(memory) | {"waited": max(waited), "messages": list(heard.messages)}
        heard.messages.clear()
        dist.barrier()
    return found


def budgeted(ranks: RankGroup, folder: Path) -> dict:
    """By default the ranks have a budget: the first one decides, and all do as it says."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, memory = monitor_of(model, folder / "budgeted", schedule=every(1))
    passes = []
    for step in range(1000):
        with monitor(step):
            passes.append(monitor.passes.step == step)
            model(ids, attention_mask=mask)
        if ranks.rank == 1:  # whose own clock would decide otherwise
            monitor.budget.spend(1.0)
    monitor.close()
    seen = [step for step, one in enumerate(passes) if one]
    return facts(memory) | {"passes": seen, "overhead": monitor.overhead}


def interrupted(ranks: RankGroup, folder: Path) -> dict:
    """Ctrl-C while the other rank does not answer: it is not waited for."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, _ = monitor_of(model, strict=False, rank_timeout=25)
    done = folder / "interrupted"
    if ranks.rank == 1:
        for _ in range(250):  # as long as the first rank would wait
            if done.exists():
                break
            time.sleep(0.1)
        return {}
    # A process that was started in the background of a shell ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.perf_counter()
    try:
        with monitor(0):
            model(ids, attention_mask=mask)
    except KeyboardInterrupt:
        taken = time.perf_counter() - began
        with monitor(1):  # goes on alone
            model(ids, attention_mask=mask)
        done.touch()
        return {"seconds": taken, "hooks": sum(len(m._forward_hooks) for m in model.modules())}
    return {}


# -- through Lightning -----------------------------------------------------------------------------


def lightning(ranks: RankGroup, folder: Path) -> dict:
    """DDP and FSDP2 (ModelParallelStrategy), accumulated batches."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from geomon.lightning import GeometryMonitor

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Decoder(dropout=0.2)
            self.validated = []

        def configure_model(self) -> None:
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                from torch.distributed.fsdp import fully_shard

                for module in (*self.net.blocks, self.net):
                    fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def forward(self, ids, attention_mask):
            return self.net(ids, attention_mask=attention_mask)

        def training_step(self, batch, index):
            return loss_of(self.net, *batch)

        def validation_step(self, batch, index):
            self.validated.append(batch[0].clone())
            self.log("loss of validation", loss_of(self.net, *batch), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (26, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(6, LENGTH, (26, 1), generator=generator)
    data = DataLoader(TensorDataset(ids, mask), batch_size=3)

    def fit(strategy, callbacks):
        module = Module()
        torch.manual_seed(int(os.environ["RANK"]))
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=2, default_root_dir=folder,
            num_sanity_val_steps=1, val_check_interval=2,
        )  # fmt: skip
        trainer.fit(module, data, data)
        seen = [*module.validated, *trainer.callback_metrics.values()]
        return [*(parameter.clone() for parameter in local(module)), *seen]

    found = {}
    sharded = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    for name, strategy in (("ddp", DDPStrategy), ("fsdp2", sharded)):
        plain = fit(strategy(), [])
        for source in ("inline", "probe", "validation", "loader"):
            if name == "fsdp2" and source == "loader":
                continue  # as under DDP
            inputs = dict(zip(("ids", "attention_mask"), ragged(0), strict=True))
            held_out = source in ("validation", "loader")
            probe = {"probe": inputs, "validation": source, "loader": data}.get(source)
            metrics = {"ids": lambda token_ids: token_ids.double().mean()} if held_out else FEW
            memory = Memory()
            monitor = GeometryMonitor(
                metrics=metrics, tokens=1000 if held_out else 150, schedule=every(1), strict=True,
                directory=folder / f"{name}_{source}", probe=probe, sinks=[memory],
            )  # fmt: skip
            watched = fit(strategy(), [monitor])
            same = all(map(torch.equal, watched, plain))
            found[f"{name} {source}"] = facts(memory) | {"bit-identical": same}
    # The ranks that are given the same batches share them out, and read as many each.
    for name, rows in (("validation", slice(None)), ("loader", slice(24))):
        kept = ids[rows][mask[rows]].double()
        found[f"tokens of {name}"] = len(kept), float(kept.mean())
    return found


# -- through the Trainer ---------------------------------------------------------------------------


def trainer(ranks: RankGroup, folder: Path) -> dict:
    """DDP, as torchrun starts it: the evaluation is each rank's share."""
    from transformers import Trainer, TrainingArguments

    from geomon.huggingface import GeometryMonitor

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Decoder(dropout=0.2)

        def forward(self, ids, attention_mask, labels=None):
            loss = loss_of(self.net, ids, attention_mask)
            return {"loss": loss, "logits": torch.zeros(len(ids), 1)}

    class Counts(Trainer):
        def training_step(self, *args, **kwargs):
            seen.append(super().training_step(*args, **kwargs).clone())
            return seen[-1]

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (24, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(6, LENGTH, (24, 1), generator=generator)
    rows = [
        {"ids": one, "attention_mask": other, "labels": one}
        for one, other in zip(ids, mask, strict=True)
    ]
    found = {}
    for name in ("plain", "validation"):
        memory, seen = Memory(), []
        monitor = GeometryMonitor(
            metrics={"ids": lambda token_ids: token_ids.double().mean()}, tokens=1000,
            schedule=every(2), strict=True, sinks=[memory], probe="validation",
            probe_loss=lambda outputs, batch: outputs["loss"],
        )  # fmt: skip
        trains = Counts(
            WithLoss(),
            TrainingArguments(
                str(folder / name), max_steps=4, use_cpu=True, ddp_backend="gloo",
                per_device_train_batch_size=3, per_device_eval_batch_size=3, eval_strategy="steps",
                eval_steps=2, save_strategy="no", report_to="none", disable_tqdm=True,
                dataloader_pin_memory=False, logging_strategy="no",
            ),
            train_dataset=rows, eval_dataset=rows, callbacks=[monitor] * (name != "plain"),
        )  # fmt: skip
        trains.train()
        found[name] = facts(memory) | {
            "end": [parameter.detach().clone() for parameter in trains.model.parameters()],
            "evaluated": [e["eval_loss"] for e in trains.state.log_history if "eval_loss" in e],
            "trained": [float(loss) for loss in seen],
        }
    kept = ids[mask].double()
    found["tokens of validation"] = len(kept), float(kept.mean())
    return found


TOGETHER = {
    function.__name__: function
    for function in (
        ragged_readings, same_tokens, same_rows, probes, not_gathered, failures, resumed,
        strategies, probed_anywhere,
    )
}  # fmt: skip


ALONE = {"same_rows": same_rows}


def main(which: str, folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1 and which not in ("lightning", "trainer"):  # which do it themselves
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    functions = {"together": TOGETHER, "alone": ALONE}.get(which) or {which: globals()[which]}
    found = {}
    for name, function in functions.items():
        began = time.perf_counter()
        found[name] = function(find_ranks(), folder)
        print(f"rank {rank}: {name}, {time.perf_counter() - began:.1f} s", file=sys.stderr)
    torch.save(found, folder / f"{which}_{size}_{rank}.pt")
    if dist.is_initialized() and which != "lost":
        dist.destroy_process_group()
    os._exit(0)  # a broken group is not waited for


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
