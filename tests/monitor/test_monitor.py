import copy
import errno
import gc
import itertools
import logging
import math
import os
import platform
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forks
from models import PlainDecoder, batch
from torch import nn

from geomon import METRICS, Memory, Monitor, every, measure, read, select
from geomon.capture.snapshot import NotSeenError
from geomon.capture.window import Window
from geomon.distributed import RankGroup
from geomon.metrics import Evaluator
from geomon.monitor.executor import ReadingExecutor


def monitor(model, tmp_path=None, **kwargs):
    defaults = {"tokens": 64, "splits": 2, "metrics": select("variance"), "strict": True}
    return Monitor(model, directory=tmp_path, **(defaults | kwargs))


def train(model, seen, steps=10, start=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(start, start + steps):
        with seen(step):
            loss = model(batch(seed=step)).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_readings_come_at_scheduled_steps_once_and_are_in_the_record_before_they_are_shown(
    tmp_path,
):
    found = []

    class Reader(Memory):
        def write(self, reading):
            super().write(reading)
            found.append([kept.step for kept in read(tmp_path)])

    memory, model = Reader(), PlainDecoder()
    seen = monitor(model, tmp_path, schedule=lambda step: step in (4, 8), sinks=[memory])
    train(model, seen)  # step 0 is read whatever the schedule says
    with seen(9, force=True):
        model(batch())
    seen.close()
    seen.close()
    assert [r.step for r in memory.readings] == [0, 4, 8, 9]
    assert found == [[0], [0, 4], [0, 4, 8], [0, 4, 8, 9]]
    assert dict(read(tmp_path)[1].values) == dict(memory.readings[1].values)


def test_a_training_that_goes_back_in_the_same_process_is_read_from_there_on(tmp_path, caplog):
    """As one does that takes up weights of an earlier step after its loss has jumped."""
    model, memory = PlainDecoder(), Memory()
    seen = monitor(model, tmp_path, schedule=every(2), sinks=[memory])
    train(model, seen, steps=9)
    train(model, seen, steps=7, start=3)
    seen.close()
    record = read(tmp_path)
    assert [r.step for r in memory.readings] == [0, 2, 4, 6, 8, 4, 6, 8]
    assert [r.step for r in record] == [0, 2, 4, 6, 8]
    assert [r.step for r in record.abandoned] == [4, 6, 8]
    assert record.mixed_at is None
    assert [run.get("rewound_to") for run in record.runs] == [None, 3]
    shown_last = [memory.readings[at] for at in (0, 1, 5, 6, 7)]
    for reading, shown in zip(record, shown_last, strict=True):
        assert reading.values["variance/mean"] == shown.values["variance/mean"]
    assert caplog.messages == []


def test_a_schedule_that_raises_is_a_warning_once_and_the_rest_is_read(caplog):
    def fails_at_times(step):
        if step in (2, 3, 5):
            raise LookupError(f"nothing is known of step {step}")
        return step % 2 == 0

    memory, model = Memory(), PlainDecoder()
    options = {
        "schedule": fails_at_times, "sinks": [memory], "strict": False, "metrics": ["max_logit"],
        "checks": lambda step: step == 1 or 1 / (step - 3) > 0,
    }  # fmt: skip
    seen = monitor(model, **options)
    train(model, seen)
    seen.close()
    assert [r.step for r in memory.readings] == [0, 4, 6, 8]
    (said,) = [r.getMessage() for r in caplog.records if "schedule" in r.getMessage()]
    assert "LookupError: nothing is known of step 2" in said
    assert any("checks failed" in message for message in caplog.messages)
    strict = monitor(model, **(options | {"strict": True}))
    with pytest.raises(LookupError):
        train(model, strict)


def test_a_reading_says_what_it_stands_on(tmp_path):
    model = PlainDecoder().train()
    seen = monitor(model, tmp_path, metrics=METRICS)
    with seen(0):
        model(batch())
    seen.probe(1, batch())
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
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": ["blocks.0", "blocks.1", "blocks.2"], "schedule": "within the budget",
        "tokens": 64, "splits": 2, "queries": 1024, "seed": 0, "world_size": 1, "gather": False,
        "mesh": "1 rank", "device": "cpu",
    }  # fmt: skip
    assert run.items() >= described.items()


def test_a_failing_metric_never_ends_a_run(tmp_path, caplog):
    calls = []

    def broken(hidden):
        calls.append(1)
        raise ZeroDivisionError("by design")

    model = PlainDecoder()
    seen = monitor(
        model, tmp_path, strict=False, schedule=every(1),
        metrics=select("variance") | {"broken": broken},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=3)
    readings = read(tmp_path)
    assert len(readings) == 3
    assert all(math.isnan(r.values["broken/layer_01"]) for r in readings)
    assert all(math.isfinite(r.values["variance/layer_01"]) for r in readings)
    assert all("by design" in r.words()[-1] for r in readings)
    assert [r.name for r in caplog.records if "by design" in r.getMessage()] == ["geomon"]
    with pytest.raises(ZeroDivisionError):
        measure(model, batch(), metrics={"broken": broken})


class Dying:
    """A sink that takes readings but for those in between."""

    def __init__(self, *failing):
        self.failing = failing
        self.tried, self.taken, self.closed = [], [], 0

    def write(self, reading):
        self.tried.append(reading.step)
        if reading.step in self.failing:
            raise OSError("gone")
        self.taken.append(reading.step)

    def close(self):
        self.closed += 1
        raise OSError("gone too")


class Together(Memory):
    """A sink that is made of others."""

    def __init__(self, *sinks):
        super().__init__()
        self.sinks = sinks

    def parts(self):
        return self.sinks


def test_a_record_that_cannot_be_written_never_ends_a_run(tmp_path, caplog, monkeypatch):
    memory = Memory()
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False, sinks=[memory], schedule=every(1))

    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, "denied")

    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refused)
            train(model, seen, steps=3, start=2)
        train(model, seen, steps=2, start=5)
        # There is room again: what was shown meanwhile is written first.
        assert [r.step for r in read(tmp_path)] == list(range(7))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refused)
            train(model, seen, steps=1, start=7)
        seen.close()
    assert len([m for m in caplog.messages if "could not be written" in m]) == 1
    assert [r.step for r in memory.readings] == list(range(8))
    assert [r.step for r in read(tmp_path)] == list(range(8))


def test_arrays_stand_beside_the_record_and_what_cannot_be_written_is_said_once(
    tmp_path, caplog, monkeypatch
):
    tried = itertools.count(1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, f"No space left on device {next(tried)}")

    for name, options in (("with", {}), ("without", {"arrays": False})):
        torch.manual_seed(0)
        model = PlainDecoder()
        options |= {"metrics": METRICS, "schedule": every(1), "strict": False}
        seen = monitor(model, tmp_path / name, **options)
        train(model, seen, steps=1)
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", full)
            train(model, seen, steps=2, start=1)
        train(model, seen, steps=1, start=3)
        seen.close()
    assert len([m for m in caplog.messages if "arrays for figures could not be written" in m]) == 1
    readings = read(tmp_path / "with")
    assert sorted(path.name for path in (tmp_path / "with" / "arrays").iterdir()) == [
        "step_000000_inline.npz", "step_000003_inline.npz",
    ]  # fmt: skip
    assert readings.arrays(3)["mean_query/layer_02"].shape == (4, 8)
    assert not (tmp_path / "without" / "arrays").exists()
    for reading, other in zip(readings, read(tmp_path / "without"), strict=True):
        timeless = (
            {t: v for t, v in r.values.items() if "geomon/" not in t} for r in (reading, other)
        )
        np.testing.assert_equal(*timeless)


def test_a_sink_that_fails_is_tried_again_until_it_fails_five_times_in_a_row(tmp_path, caplog):
    dying, other, memory = Dying(*range(20)), Dying(*range(4), *range(5, 9)), Memory()
    model = PlainDecoder()
    seen = monitor(
        model, tmp_path, strict=False, sinks=[Together(dying, other), memory], schedule=every(1)
    )
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=10)
        seen.close()
        seen.close()
    assert dying.tried == [0, 1, 2, 3, 4]
    assert other.taken == [4, 9]
    assert (dying.closed, other.closed) == (0, 1)
    said = [m for m in caplog.messages if "Dying" in m]
    kinds = [word for m in said for word in ("tried again", "left out", "closing") if word in m]
    assert kinds == ["tried again", "left out", "closing"]
    assert [r.step for r in memory.readings] == [r.step for r in read(tmp_path)] == [*range(10)]


@pytest.mark.parametrize(
    "kind", [np.uint8, np.array, torch.tensor, lambda step: torch.tensor([step])]
)
def test_steps_are_whole_numbers_of_any_kind(tmp_path, kind):
    model, memory = PlainDecoder(), Memory()
    seen = monitor(model, tmp_path, schedule=every(2), sinks=[memory])
    for step in range(5):
        with seen(kind(step)):
            model(batch())
    for _ in range(2):
        seen.probe(kind(7), batch())
    assert [r.step for r in read(tmp_path)] == [0, 2, 4, 7]
    assert all(type(reading.step) is int for reading in memory.readings)


@pytest.mark.parametrize(
    ("step", "error"),
    [(1.0, TypeError), (torch.tensor(True), TypeError), ("3", TypeError), (None, TypeError),
     (torch.arange(2), TypeError), (np.int64(-5), ValueError), (2**63, ValueError),
     (10**400, ValueError)],
    ids=repr,
)  # fmt: skip
def test_a_step_that_is_none_is_refused_in_one_line(tmp_path, step, error):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False)
    for enter in (seen, seen.advance, lambda step: seen.probe(step, batch())):
        with pytest.raises(error, match="a step is the number of optimizer updates") as raised:
            enter(step)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 200
    with seen(0):
        model(batch())
    assert [r.step for r in read(tmp_path)] == [0]


@pytest.mark.parametrize("how", ["nothing", "exception aside", "probe"])
def test_a_window_in_which_nothing_ran_records_nothing_and_says_so_once(tmp_path, caplog, how):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False, schedule=every(1))
    with caplog.at_level(logging.WARNING, "geomon"):
        for step in range(4):
            if how == "probe":
                seen.probe(step, lambda model: None)
                continue
            with seen(step):
                if how == "exception aside":
                    model.tokens(batch())  # the embedding alone
    assert (tmp_path / "readings.jsonl").read_text() == ""
    assert len(caplog.messages) == 1
    assert "not run while the window was open" in caplog.messages[0]
    with seen(4):
        model(batch())
    assert [r.step for r in read(tmp_path)] == [4]
    with pytest.raises(NotSeenError), monitor(model, tmp_path / "strict")(0):
        pass


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
    seen = monitor(model, schedule=every(1), **options)
    clock.slow_down(PlainDecoder, "forward", 0.5)
    clock.slow_down(sys.modules[Window.__module__], "watch_calls", 2048.0)
    clock.slow_down(Window, "snapshots", 64.0)
    clock.slow_down(Evaluator, "combine", 1024.0)
    clock.slow_down(Memory, "write", 4096.0)
    clock.slow_down(ReadingExecutor, "submit", 32768.0)  # which waits for readings before
    read_step(model, 0, seen)
    with torch.no_grad():
        model.blocks[0].c_attn.weight *= 1000  # an alert of the second reading
    spent, before = seen.account.spent, clock.taken.copy()
    read_step(model, 1, seen)
    taken = clock.taken - before
    of_reading = {"watch_calls", "snapshots", "metric", "combine"}
    assert set(taken) == of_reading | {"forward", "write", "submit", "call"}
    assert seen.account.spent - spent == taken.total() - of_others
    delay = sum(taken[name] for name in of_reading) + 0.75 - of_others
    assert memory.readings[1].seconds == delay


UNCLOSED = """
import atexit, multiprocessing, sys, time
from pathlib import Path
from models import PlainDecoder, batch
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


@pytest.fixture(scope="module")
def forks():
    forks = Forks("import models, geomon; geomon.Monitor")
    yield forks
    forks.close()


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


def test_a_monitor_that_is_dropped_is_collected_and_what_it_has_read_is_recorded(tmp_path):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, log=("loss",))
    with seen(0):
        model(batch())
    assert not read(tmp_path).readings  # it waits for the loss
    gone = weakref.ref(seen)
    del seen
    gc.collect()
    assert gone() is None
    assert [r.step for r in read(tmp_path)] == [0]


def test_a_program_that_changes_its_folder_has_one_record(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    model = PlainDecoder()
    seen = monitor(model, "run", schedule=every(1))
    for step in range(4):
        if step == 2:
            monkeypatch.chdir(elsewhere)
        with seen(step):
            model(batch())
    seen.close()
    assert [r.step for r in read(tmp_path / "run")] == [0, 1, 2, 3]
    assert list(elsewhere.iterdir()) == []


class Hangs(Memory):
    """Waits until the test is over."""

    def __init__(self, over):
        super().__init__()
        self.over = over

    def write(self, reading):
        super().write(reading)
        if reading.step == 1:
            self.over.wait(60)

    def close(self):
        self.over.wait(60)


def test_a_sink_that_hangs_is_left_out_and_the_training_goes_on(tmp_path, caplog):
    over = threading.Event()
    memory, hanging, last = Memory(), Hangs(over), Hangs(over)
    model = PlainDecoder()
    seen = monitor(
        model, tmp_path, strict=False, sinks=[hanging, memory], schedule=every(1), sink_timeout=0.3
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=4)
        seen.close()
        other = monitor(model, None, strict=False, sinks=[last], sink_timeout=0.3)
        other.close()
    assert time.monotonic() - began < 40
    assert [r.step for r in hanging.readings] == [0, 1]
    assert [r.step for r in memory.readings] == [r.step for r in read(tmp_path)] == [0, 1, 2, 3]
    messages = [m for m in caplog.messages if "takes too long and is left out" in m]
    assert len(messages) == 2
    assert all(m.startswith("Hangs takes too long") for m in messages)
    over.set()


class Cumulative(nn.Module):
    """A block of linear attention, by hand: with projections, and without a softmax."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_heads = 2

    def forward(self, x):
        return x + (self.q_proj(x) @ self.k_proj(x).mT).exp() @ x


def test_what_was_expected_and_is_not_seen_is_a_warning_and_a_strict_one_raises(caplog):
    model, x = nn.Sequential(Cumulative(), Cumulative()), torch.randn(4, 6, 8)
    few = {"metrics": select("variance", "attention_entropy"), "schedule": every(1)}
    with monitor(model, strict=False, **few) as seen:
        for step in range(2):
            seen.probe(step, x)
    (said,) = [text for text in caplog.messages if "not seen in the first pass" in text]
    with pytest.raises(NotSeenError) as raised:
        monitor(model, **few).probe(0, x)
    assert str(raised.value) == said


def test_without_gathering_a_pass_that_fails_on_a_rank_that_records_nothing_is_said(monkeypatch):
    monkeypatch.setattr("geomon.monitor.monitor.find_ranks", lambda: RankGroup(1, 2))

    def fails(model):
        raise OSError("no batch here")

    with pytest.raises(OSError, match="no batch here"):
        monitor(PlainDecoder(), gather=False, probe=fails).probe(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_gathering_every_rank_runs_the_passes_whatever_the_record_holds(
    tmp_path, monkeypatch, rank
):
    import geomon.monitor.monitor as module

    model = PlainDecoder()
    before = monitor(model, tmp_path)
    for step in (0, 3):
        before.probe(step, batch())
    monkeypatch.setattr(module, "find_ranks", lambda: RankGroup(rank, 2))
    passes = []
    resumed = monitor(model, tmp_path, probe=lambda m: passes.append(m(batch())), gather=False)
    for step in (3, 3, 4, 4):  # as with accumulated batches
        with resumed(step, force=True):
            model(batch())
    assert len(passes) == 2
    assert [r.step for r in read(tmp_path)] == ([0, 3, 4] if rank == 0 else [0, 3])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"metrics": {"m": lambda: 0}}, ValueError, "reads no view"),
        ({"metrics": {"a/b": lambda hidden: 0}}, ValueError, "cannot name a metric"),
        ({"metrics": {"training": lambda hidden: 0}}, ValueError, "cannot name a metric"),
        ({"metrics": 3}, TypeError, "metrics must be a dict"),
        ({}, ValueError, "no inputs to probe"),
        ({"metrics": ["twon"]}, ValueError, r"called 'twon' \(did you mean 'twonn'\?\)"),
        ({"model": nn.Linear(3, 3)}, ValueError, "no transformer blocks"),
        ({"directory": Path(__file__) / "x"}, ValueError, "cannot be written"),
    ],
)
def test_bad_arguments_are_refused_when_the_monitor_is_built(wrong, error, message):
    with pytest.raises(error, match=message) as raised:
        Monitor(**{"model": PlainDecoder(), "directory": None} | wrong).probe(0)
    assert "\n" not in str(raised.value)


def test_blocks_that_are_replaced_or_added_between_readings_are_seen():
    model, memory = PlainDecoder(), Memory()
    seen = monitor(model, schedule=every(1), sinks=[memory])
    for step in range(3):
        if step == 1:
            model.blocks[1] = copy.deepcopy(model.blocks[1])
        if step == 2:
            model.blocks.append(copy.deepcopy(model.blocks[1]))
        with seen(step):
            model(batch())
    seen.close()
    layers = [[f"variance/layer_{n:02d}" in r.values for n in range(5)] for r in memory.readings]
    assert layers == [[True] * 4 + [False]] * 2 + [[True] * 5]
    said = [[note for note in r.words() if "since the run began" in note] for r in memory.readings]
    assert list(map(len, said)) == [0, 0, 1]
    assert "4 now, 3 then" in said[2][0]


def test_what_the_budget_left_out_is_said_at_the_end_and_in_each_reading(tmp_path, caplog):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, schedule=every(1), budget=0.001, checks=None)
    train(model, seen, steps=8)
    assert not caplog.messages
    with seen(8, force=True):
        model(batch())
    seen.close()
    assert [(r.step, r.left_out) for r in read(tmp_path)] == [(0, 0), (1, 0), (2, 0), (8, 5)]
    assert caplog.messages == ["the budget left out 5 of 9 readings that were due"]


def test_a_monitor_that_is_entered_without_a_step_says_how_to_give_it(caplog):
    model = PlainDecoder()
    seen = monitor(model)
    for _ in range(3):
        with seen:
            model(batch())
    (said,) = caplog.messages
    assert "`with monitor(step):`" in said
    with monitor(model) as other, other(0):
        model(batch())
    assert len(caplog.messages) == 1


def test_the_first_extra_pass_alone_says_what_cannot_be_put_back(tmp_path):
    seen = monitor(PlainDecoder(), tmp_path)
    for step in range(3):
        seen.probe(step, batch())
    noted = [[note.kind for note in r.notes].count("extra pass") for r in read(tmp_path)]
    assert noted == [1, 0, 0]
