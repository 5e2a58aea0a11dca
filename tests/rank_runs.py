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
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import run_here, write_down
from torch import Tensor, nn

from geomon import METRICS, Memory, Monitor, Reading, every, measure, read, select
from geomon.capture import Window, derive_seed, find_anatomy
from geomon.distributed import RankFailedError, RankGroup, RanksLostError, join_ranks
from geomon.metrics import Evaluator

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 40, 16, 2, 3, 24
FEW = select("variance", "twonn", "within_variance", "attention_entropy", "qk_cosine")
MORE = select("effective_rank_last", "local_dimension")
MEAN_OF_IDS = {"ids": lambda token_ids: token_ids.double().mean()}
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


def padded(sequences: int) -> tuple[Tensor, Tensor]:
    """The rows of a loader, of one length with their padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=generator)
    lengths = torch.randint(6, LENGTH, (sequences, 1), generator=generator)
    return ids, torch.arange(LENGTH) < lengths


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(
        model(ids, attention_mask=mask).flatten(0, 1), ids.flatten(), reduction="none"
    )
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


# -- one process on the rows of all ranks ----------------------------------------------------------


def filled(values: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(values, (0, columns - values.shape[-1], 0, rows - values.shape[-2]))


def joined(parts: list) -> Any:
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
    evaluated = Evaluator(metrics, most).evaluate(layers, tokens).stacks
    return measured(Reading(0, 0.0, 0.0, "inline", "", 0, 1, "", evaluated))


def measured(reading) -> dict[str, float]:
    of_run = ("geomon/", "training/")
    return {tag: value for tag, value in reading.values.items() if not tag.startswith(of_run)}


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


def monitor_of(model, directory=None, **kwargs):
    memory = Memory()
    settings = {"metrics": FEW, "tokens": 32, "schedule": every(1), "strict": True} | kwargs
    return Monitor(model, directory=directory, sinks=[memory], **settings), memory


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
        monitor, memory = monitor_of(model, at, **options)
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


def not_gathered(ranks: RankGroup, folder: Path) -> None:
    """gather=False says nothing between ranks: the first one builds and reads with no other."""
    if ranks.rank:
        return
    model = Decoder()
    monitor, memory = monitor_of(model, folder / "not_gathered", gather=False)
    for step in range(2):
        with monitor(step):
            model(ragged(0)[0], attention_mask=ragged(0)[1])
    expected = one_process(model, [ragged(0)], FEW, step=0, tokens=32)
    assert steps(memory) == [0, 1]
    assert_same(measured(memory.readings[0]), expected)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("geomon").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def failures(ranks: RankGroup, folder: Path) -> None:
    """A metric that fails at one rank's layers, a window that fails on one rank, other layers."""
    heard, last = Heard(), ranks.size - 1
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
        if step in (1, 2) and ranks.rank == last:
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
    raised = contextlib.nullcontext() if ranks.rank > 1 else pytest.raises(RankFailedError)
    with raised, strict(0):
        model(ids, attention_mask=mask)
    if ranks.rank:
        assert heard.messages == []
        return
    assert steps(memory) == [0, 3, 4]  # 1 and 2 had no window on one rank
    for reading in memory.readings:
        for layer in range(LAYERS + 1):
            fails = layer % ranks.size == 1  # the second rank's layers
            assert math.isnan(reading.values[f"fragile/layer_{layer:02d}"]) == fails
            assert math.isfinite(reading.values[f"variance/layer_{layer:02d}"])
        assert any("by design" in note for note in reading.words())
    said = [m for m in heard.messages if "left out" in m and "padding" not in m]
    assert said == [f"a reading failed and is left out: rank {last}: OSError: no window here"]
    # Other layers are found when the monitors are built: the first rank reads its own rows.
    assert len(none.readings) == 1
    assert any("rank 1 was built with other layers than rank 0" in m for m in heard.messages)


def broken_window(self, device=None, *, wait=True):
    raise OSError("no window here")


def resumed(ranks: RankGroup, folder: Path) -> None:
    """Goes on in the same folder, two steps back, as from a checkpoint."""
    first = {1: 10, 2: 0, 4: 5}[ranks.size]
    model = Decoder()
    monitor, _ = monitor_of(model, folder / "resumed", budget=None)
    ids, mask = ragged(ranks.rank)
    for step in range(max(0, first - 2), first + 5):
        monitor.advance(step)
        assert monitor.is_due(step)  # what an earlier start has read is read again
        with monitor(step):
            model(ids, attention_mask=mask)


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


def nowhere(step: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def train(model: nn.Module, rank: int, size: int, around=nowhere, probe=nowhere) -> list[Tensor]:
    """Two batches to a step, the first under no_sync; at the last one rank has only padding.

    Returns the losses, and this rank's part of the weights in the end.
    """
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, places = [], itertools.count()
    for step in range(STEPS):
        empty = size - 1 if step == STEPS - 1 else None
        for part in range(2):
            probe(next(places))
            with no_sync(model, part == 0):
                with around(step):
                    loss = loss_of(model, *ragged(rank, step + 50 * part, empty))
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


def whole_state(model: nn.Module) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


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
        monitor, memory = monitor_of(model, tokens=150)
        assert all(map(torch.equal, train(model, ranks.rank, ranks.size, monitor), alone)), name
        model.eval()
        ids, mask = ragged(ranks.rank)
        with monitor(STEPS), torch.no_grad():
            model(ids, attention_mask=mask)
        state = whole_state(model)
        if ranks.rank:
            continue
        assert steps(memory) == list(range(STEPS + 1)), name
        assert monitor.describe()["layers"] == [f"blocks.{index}" for index in range(LAYERS)], name
        whole = Decoder().eval()
        whole.load_state_dict(state)
        batches = [ragged(rank) for rank in range(ranks.size)]
        expected = one_process(whole, batches, FEW, step=STEPS, tokens=150)
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
    heard = Heard()
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    for name in ("asleep", "dead"):
        monitor, memory = monitor_of(model, folder / name, strict=False, tokens=60, rank_timeout=4)
        began = time.perf_counter()
        for step in range(4):
            if step == 2 and ranks.rank == 1:
                if name == "dead":
                    return
                while not (folder / "given up").exists():
                    time.sleep(0.05)
            with monitor(step):
                model(ids, attention_mask=mask)
            if step == 2 and ranks.rank == 0:
                (folder / "given up").touch()
        monitor.close()
        if ranks.rank == 0:
            assert steps(memory) == [0, 1, 3]  # the reading that was under way is left out
            own = min(60, int(mask.sum()))
            assert [reading.tokens == own for reading in memory.readings] == [False, False, True]
            # Of the ten minutes that are allowed where nobody says.
            assert time.perf_counter() - began < 60
        (message,) = [m for m in heard.messages if f"rank {ranks.rank} lost the other ranks" in m]
        assert "rank 0 continues with its own" in message
        assert ranks.rank == 0 or not memory.readings
        heard.messages.clear()


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


# -- ranks that do not keep step -------------------------------------------------------------------


def irregular(ranks: RankGroup, folder: Path) -> None:
    """The second rank misses a window, or has another schedule; slow it is in both."""
    heard = Heard()
    for name in ("misses", "schedule"):
        model, (ids, mask) = Decoder(), ragged(ranks.rank)
        odd = ranks.rank == 1
        monitor, memory = monitor_of(
            model, folder / name, schedule=every(3 if name == "schedule" and odd else 2),
            tokens=30, strict=False, rank_timeout=20,
        )  # fmt: skip
        waited = [0.0]
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
        assert max(waited) < 15
        dist.barrier()
        if odd:
            assert not memory.readings
        elif name == "misses":
            # A window that one rank missed costs that reading. That rank owes it and is ahead at
            # step 3, where it waits; they meet at step 4.
            assert steps(memory) == [0, 4, 6]
            (message,) = [m for m in heard.messages if "a reading failed" in m]
            assert "rank 1 reads step 3 but rank 0 reads step 2" in message
            assert max(waited) > 1  # the other rank is slow at step 4
        else:
            # Options are compared when the monitors are built: then nothing is exchanged.
            assert steps(memory) == [0, 2, 4, 6]
            (note,) = {note for note in words(memory) if "not gathered" in note}
            assert "rank 1 was built with schedule=" in note


def budgeted(ranks: RankGroup, folder: Path) -> None:
    """With a budget the first rank decides, and all do as it says."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, memory = monitor_of(
        model, folder / "budgeted", schedule=every(1), checks=None, budget="5%"
    )
    passes = []
    for step in range(400):
        with monitor(step):
            if monitor.passes.step == step:
                passes.append(step)
            model(ids, attention_mask=mask)
        if ranks.rank == 1:  # whose own clock would decide otherwise
            monitor.account.charged += 1.0
    monitor.close()
    every_rank = [None] * ranks.size
    dist.all_gather_object(every_rank, passes)
    assert every_rank == [passes] * ranks.size
    assert passes[:3] == list(range(3))
    assert len(passes) < 200
    assert steps(memory) == ([] if ranks.rank else passes)
    assert ranks.rank or len(passes) == 3 or monitor.overhead < 0.06


def interrupted(ranks: RankGroup, folder: Path) -> None:
    """Ctrl-C while the other rank does not answer: it is not waited for."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, _ = monitor_of(model, strict=False, rank_timeout=25)
    done = folder / "interrupted"
    if ranks.rank == 1:
        for _ in range(250):  # as long as the first rank would wait
            if done.exists():
                break
            time.sleep(0.1)
        return
    # A process that was started in the background of a shell ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), monitor(0):
        model(ids, attention_mask=mask)
    assert time.perf_counter() - began < 20  # of 25
    with monitor(1):  # goes on alone
        model(ids, attention_mask=mask)
    assert not any(module._forward_hooks for module in model.modules())
    done.touch()


# -- through Lightning -----------------------------------------------------------------------------


def lightning(ranks: RankGroup, folder: Path) -> None:
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

    ids, mask = padded(26)
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

    sharded = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    of_ddp: dict[str, Memory] = {}
    for name, strategy in (("ddp", DDPStrategy), ("fsdp2", sharded)):
        plain = fit(strategy(), [])
        # The sanity check has a batch for each rank. From a loader, ranks take turns.
        for source, rows in (
            ("inline", None), ("probe", None), ("validation", slice(6)), ("loader", slice(24)),
        ):  # fmt: skip
            if name == "fsdp2" and source in ("probe", "loader"):
                continue  # as under DDP
            inputs = dict(zip(("ids", "attention_mask"), ragged(0), strict=True))
            probe = {"inline": None, "probe": inputs, "loader": data}.get(source, source)
            memory = Memory()
            monitor = GeometryMonitor(
                metrics=FEW if rows is None else MEAN_OF_IDS, tokens=150 if rows is None else 1000,
                schedule=every(1), strict=True, directory=folder / f"{name}_{source}", probe=probe,
                sinks=[memory],
            )  # fmt: skip
            assert all(map(torch.equal, fit(strategy(), [monitor]), plain)), (name, source)
            if int(os.environ["RANK"]):
                assert not memory.readings
                continue
            assert steps(memory) == [0, 1, 2, *([] if source == "inline" else [3])]
            if rows is not None:
                kept = ids[rows][mask[rows]].double()
                for reading in memory.readings:
                    assert reading.tokens == len(kept)
                    assert math.isclose(reading.values["ids/layer_01"], float(kept.mean()))
                assert losses(memory)[:3] == losses(of_ddp["inline"])  # the same under FSDP2
                continue
            same = of_ddp.setdefault(source, memory)
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

    page = (Path(__file__).parent.parent / "docs" / "many_ranks.md").read_text()
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

    ids, mask = padded(24)
    rows = [
        {"ids": one, "attention_mask": other, "labels": one}
        for one, other in zip(ids, mask, strict=True)
    ]
    found = []
    for name in ("plain", "validation"):
        memory, seen = Memory(), []
        monitor = GeometryMonitor(
            metrics=MEAN_OF_IDS, tokens=1000, schedule=every(2), strict=True, sinks=[memory],
            probe="validation", probe_loss=lambda outputs, batch: outputs["loss"],
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
        evaluated = [e["eval_loss"] for e in trains.state.log_history if "eval_loss" in e]
        found.append([*trains.model.parameters(), *seen, *map(torch.tensor, evaluated)])
    assert all(map(torch.equal, *found))
    assert len(evaluated) == 2
    if int(os.environ["RANK"]):
        assert not memory.readings
        return
    assert steps(memory) == [2, 4]  # the first evaluation comes before step 2
    kept = ids[mask].double()
    for reading in memory.readings:
        assert reading.tokens == len(kept)
        assert math.isclose(reading.values["ids/layer_01"], float(kept.mean()))
    # Both ranks' batches, at the steps at which the Trainer evaluates them too.
    probed = [reading.values["training/probe_loss"] for reading in memory.readings]
    assert all(map(partial(math.isclose, rel_tol=1e-5), probed, evaluated))


TOGETHER = (
    ragged_readings, same_tokens, split_batch, probes, not_gathered, failures, resumed, strategies,
)  # fmt: skip
# Programs, by what is done in them one after another.
PROGRAMS = {
    "together": TOGETHER,
    **{each.__name__: (each,) for each in (lost, told, irregular, budgeted, interrupted)},
    **{each.__name__: (each,) for each in (lightning, trainer)},
}


if __name__ == "__main__":
    name = sys.argv[1]
    run_here(
        PROGRAMS[name], name, Path(sys.argv[2]), by_itself=name in ("lightning", "trainer"),
        ends=name not in ("lost", "told"),
    )  # fmt: skip
