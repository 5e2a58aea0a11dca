"""A monitor describes a run, accounts for its time, and records it without being closed."""

import gc
import os
import platform
import time
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from importlib.metadata import version

import numpy as np
import pytest
import torch

from geomon import METRICS, Memory, Monitor, every, read, select
from geomon.capture import Window
from geomon.capture.observer import PassObserver
from geomon.distributed import RankGroup
from geomon.metrics import Evaluator, searched_by
from support.models import PlainBlock, PlainDecoder, batch
from support.scenarios import FEW, Watched, step


def test_a_reading_says_what_it_stands_on(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch, metrics=METRICS, splits=2)
    watched.step(0)
    watched.monitor.probe(1, batch())
    inline, probe = read(tmp_path)
    assert (inline.source, inline.mode, inline.tokens) == ("inline", "train", 128)
    assert (probe.source, probe.mode, probe.dtype) == ("probe", "eval", "float32")
    assert probe.values["geomon/seconds"] == probe.seconds > 0
    assert 0 < probe.values["geomon/overhead"] <= 1
    assert "geomon/overhead" not in inline.values  # no training time has passed before the first
    run = read(tmp_path).runs[0]
    assert list(run["metrics"]) == list(METRICS)
    assert all(text["title"] for text in run["metrics"].values())
    described = {
        "geomon": version("geomon"), "python": platform.python_version(),
        "torch": torch.__version__, "model": "PlainDecoder",
        "parameters": sum(parameter.numel() for parameter in watched.model.parameters()),
        "layers": ["blocks.0", "blocks.1", "blocks.2"], "schedule": "every(steps=1)",
        "tokens": 64, "splits": 2, "queries": 1024, "seed": 0, "world_size": 1, "gather": False,
        "mesh": "1 rank", "device": "cpu", "search": searched_by(torch.device("cpu")),
    }  # fmt: skip
    assert run.items() >= described.items()


@pytest.mark.parametrize(
    ("step", "error"),
    [(1.0, TypeError), (torch.tensor(True), TypeError), ("3", TypeError), (None, TypeError),
     (torch.arange(2), TypeError), (np.int64(-5), ValueError), (2**63, ValueError),
     (10**400, ValueError)],
    ids=repr,
)  # fmt: skip
def test_a_step_that_is_none_is_refused_in_one_line(step, error):
    seen = Monitor(PlainDecoder(), directory=None)
    for enter in (seen, seen.advance, lambda step: seen.probe(step, batch())):
        with pytest.raises(error, match="a step is the number of optimizer updates") as raised:
            enter(step)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 200


class Clock:
    """Stands still, but where a test says that something takes time."""

    def __init__(self, monkeypatch):
        self.taken = Counter()  # seconds, by what took them
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(time, "perf_counter", self.taken.total)

    def slow_down(self, holder, name, seconds, within=nullcontext):
        """Let a method take so many seconds more."""
        method = getattr(holder, name)

        def slow(*args, **kwargs):
            with within():
                self.taken[name] += seconds
            return method(*args, **kwargs)

        self._monkeypatch.setattr(holder, name, slow)


def inline(model, step, seen):
    with seen(step):
        model(batch())


def inside_a_charge(model, step, seen):
    """As a callback does, whose calls are charges around the monitor's."""
    with ExitStack() as stack:
        with seen.charge():
            stack.enter_context(seen(step))
        model(batch())
        with seen.charge():
            stack.close()


def paused(model, step, seen):
    with seen(step):
        seen.passes.pause()
        seen.passes.proceed()
        model(batch())


def probe(model, step, seen):
    seen.probe(step, batch())


@pytest.mark.parametrize(
    ("read_step", "of_others", "loss"),
    [
        (inline, 0.75, None),
        (inside_a_charge, 0.75, None),
        (paused, 0.75, None),
        (probe, 0.25, None),  # the pass of a probe is geomon's
        (probe, 0.75, lambda outputs, inputs: 0.0),  # or the validation of the training
    ],
)
def test_every_second_that_geomon_takes_counts_once_and_none_of_the_models(
    read_step, of_others, loss, monkeypatch
):
    """Each piece of a reading takes a time of its own, so that a sum tells what was counted."""
    clock = Clock(monkeypatch)
    model = PlainDecoder()

    def metric(hidden):
        clock.taken["metric"] += 512.0
        return 0.0

    def on_alert(alert):
        clock.taken["call"] += 0.25  # the user's own time
        with seen.charge():  # geomon is called in it
            clock.taken["call"] += 8.0

    memory = Memory()
    options = {
        "metrics": {"m": metric} | select("max_logit"), "sinks": [memory], "probe_loss": loss,
        "alerts": ["logit_growth"], "on_alert": on_alert, "checks": None,
    }  # fmt: skip
    seen = Monitor(model, **FEW | {"directory": None, "strict": True} | options)
    clock.slow_down(PlainDecoder, "forward", 0.5)
    clock.slow_down(PassObserver, "open", 2048.0)
    clock.slow_down(Window, "snapshots", 64.0)
    clock.slow_down(Evaluator, "combine", 1024.0)
    clock.slow_down(Memory, "write", 4096.0)
    read_step(model, 0, seen)
    with torch.no_grad():
        model.blocks[0].c_attn.weight *= 1000  # an alert of the second reading
    spent, before = seen.account.spent, clock.taken.copy()
    read_step(model, 1, seen)
    taken = clock.taken - before
    of_reading = {"open", "snapshots", "metric", "combine"}
    assert set(taken) == of_reading | {"forward", "write", "call"}
    assert seen.account.spent - spent == taken.total() - of_others
    delay = sum(taken[name] for name in of_reading) + 0.75 - of_others
    assert memory.readings[1].seconds == delay


UNCLOSED = """
import atexit, multiprocessing, sys, time
from pathlib import Path
from support.models import PlainBlock, PlainDecoder, batch
from geomon import Memory, Monitor, every
from geomon.metrics import Evaluator

Evaluator.has_own_metrics = False  # the user's are measured in the background too

class Sink(Memory):
    def close(self):
        Path(folder, "closed").touch()

def slow(hidden):
    time.sleep(0.004)
    return hidden.mean()

def main(folder):
    model = PlainDecoder()
    monitor = Monitor(
        model, metrics={"slow": slow}, tokens=64, schedule=every(1), directory=folder,
        background=way != "at exit", sinks=[Sink()],
    )
    for step in range(3):
        with monitor(step):
            model(batch())
    return monitor

way, folder = sys.argv[1:]
if way == "at exit":
    atexit.register(main, folder)
elif way == "child":
    process = multiprocessing.get_context("fork").Process(target=lambda: globals().update(
        kept=main(folder)))
    process.start()
    process.join()
else:
    kept = main(folder)
    if way == "cycle":
        kept.itself = kept
    if way == "exception":
        raise RuntimeError("in the loop")
"""


@pytest.mark.parametrize("way", ["end", "exception", "cycle", "child", "at exit"])
def test_readings_are_recorded_without_close(forks, tmp_path, way):
    program, said = tmp_path / "unclosed.py", tmp_path / "said"
    program.write_text(UNCLOSED)
    with said.open("w") as output:
        process = forks.start(
            str(program), way, tmp_path / "run", environment=os.environ,
            stdout=output.fileno(), stderr=output.fileno(),
        )  # fmt: skip
    code = process.wait(300)
    assert [r.step for r in read(tmp_path / "run")] == [0, 1, 2], said.read_text()
    assert (tmp_path / "run" / "closed").exists() == (way != "at exit")  # it is collected before
    assert code == (way == "exception"), said.read_text()


def test_a_monitor_that_is_dropped_is_collected_and_what_it_has_read_is_recorded(
    tmp_path, monkeypatch
):
    watched = Watched(tmp_path, monkeypatch, log=("loss",))
    watched.step(0)
    assert not read(tmp_path).readings  # it waits for the loss
    gone = weakref.ref(watched.monitor)
    del watched.monitor
    gc.collect()
    assert gone() is None
    assert [reading.step for reading in read(tmp_path)] == [0]


def test_a_program_that_changes_its_folder_has_one_record(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path / "run", monkeypatch, directory="run")
    watched.step(0)
    monkeypatch.chdir(elsewhere)
    watched.step(1)
    assert [reading.step for reading in read(tmp_path / "run")] == [0, 1]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_without_gathering_every_rank_runs_the_passes_whatever_the_record_holds(
    tmp_path, monkeypatch, rank
):
    before, passes = Watched(tmp_path, monkeypatch), []
    for number in (0, 3):
        before.monitor.probe(number, batch())
    resumed = Watched(
        tmp_path, monkeypatch, ranks=lambda: RankGroup(rank, 2), gather=False,
        probe=lambda model: passes.append(model(batch())),
    )  # fmt: skip
    for number in (3, 3, 4, 4):  # as with accumulated batches
        step(number, force=True)(resumed)
    assert len(passes) == 2
    assert [reading.step for reading in read(tmp_path)] == ([0, 3, 4] if rank == 0 else [0, 3])


def test_of_ranks_that_exchange_nothing_the_first_alone_is_due(tmp_path, monkeypatch):
    """The others make the passes of a probe, as a sharded model needs, and measure nothing."""
    for rank in range(2):
        given = {"ranks": lambda rank=rank: RankGroup(rank, 2), "gather": False}
        watched = Watched(None, monkeypatch, schedule=every(1), checks=None, **given)
        watched.monitor.advance(1)
        assert watched.monitor.is_due(1) == watched.monitor.is_due(1, force=True) == (rank == 0)
        assert watched.monitor.is_due(1, source="probe", force=True)
        watched.step(1)
        watched.monitor.probe(2, batch())
        assert watched.shown == [1, 2] * (rank == 0)


class Skipping(PlainBlock):
    """A block whose attention may be skipped."""

    skips = False

    def forward(self, x):
        return x + self.mlp(self.ln_2(x)) if self.skips else super().forward(x)


# Whether attention is skipped at each step, and errors are raised; steps that fail and are read.
PASSES = [
    ((True, True), True, [0, 1], []), ((True, True), False, [], [0, 1]),
    ((False, True), True, [], [0, 1]), ((False, True), False, [], [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("course", "strict", "fails", "reads"), PASSES)
def test_the_first_pass_must_show_all_views_and_later_ones_need_not(
    course, strict, fails, reads, caplog
):
    model, sink = PlainDecoder(block=lambda: Skipping(32, 4, 0.0)), Memory()
    given = {"metrics": select("variance", "attention_entropy"), "schedule": every(1)}
    failed, words = [], "not seen in the first pass that was watched: attention at blocks.0"
    with Monitor(model, directory=None, sinks=[sink], strict=strict, **given) as monitor:
        for step, skips in enumerate(course):
            for block in model.blocks:
                block.skips = skips
            try:
                with torch.no_grad(), monitor(step):
                    model(batch())
            except RuntimeError as error:
                failed.append((step, str(error)[: len(words)]))
    assert failed == [(step, words) for step in fails]
    assert [reading.step for reading in sink.readings] == reads
    warned = [text for text in caplog.messages if text.startswith(words)]
    assert len(warned) == (course[0] and not strict)


@pytest.mark.parametrize("course", [(1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0, 1, 0)])
def test_attention_that_some_passes_skip_is_measured_in_the_others_at_last(course):
    """A pass that does otherwise than the one before it is understood, and the next measured."""
    model, sink = PlainDecoder(block=lambda: Skipping(32, 4, 0.0)), Memory()
    given = {"metrics": select("attention_entropy"), "schedule": every(1), "checks": None}
    with Monitor(model, directory=None, sinks=[sink], **given) as monitor:
        for step, skips in enumerate(course):
            for block in model.blocks:
                block.skips = bool(skips)
            with torch.no_grad(), monitor(step):
                model(batch())
    entropy = torch.tensor([x.column("attention_entropy").layers for x in sink.readings])
    skipped = torch.tensor(course, dtype=torch.bool)
    assert entropy[skipped].isnan().all()
    assert (entropy[-1] > 2).all()
