"""Ctrl-C while a reading is measured and written, and a process that is forked meanwhile."""

import gc
import os

import pytest
import torch

from geomon import Memory, Monitor, every, read, select
from support.fingerprint import fingerprint
from support.mishaps import Interrupting, StopError, files, handled, press_ctrl_c, send_a_signal
from support.models import PlainDecoder, batch
from support.scenarios import OF_PROCESS

# Files that a reading goes through, from its first measured layer to its line in the record.
PARTS = files(
    "monitor/monitor.py", "monitor/outbox.py", "monitor/completion.py", "monitor/run_alerts.py",
    "monitor/run_writer.py", "monitor/hooks.py", "monitor/executor.py", "monitor/jobs.py",
    "monitor/layer_queue.py", "monitor/sinks.py", "monitor/warnings.py", "record/jsonl.py",
    "metrics/at_once.py",
)  # fmt: skip
MOVES = ("executor.py", "outbox.py", "completion.py", "run_writer.py", "jsonl.py")


@pytest.fixture
def receiving():
    with handled():
        yield


def go_on_after_ctrl_c(folder, at, strike=press_ctrl_c):
    """Train a step or two, the first interrupted at a line; returns what was reached."""
    torch.manual_seed(0)
    interrupting = Interrupting(PARTS, at, strike)

    def begins(hidden):
        if not interrupting.lines:
            interrupting.begin()
        return 0.0

    model = PlainDecoder(width=8, layers=1, heads=2)
    monitor = Monitor(
        model, metrics={"begins": begins} | select("variance"), tokens=16, schedule=every(1),
        directory=folder, sinks=[Memory()], background=False,
    )  # fmt: skip
    came = 0
    for step in range(1 + at % 2):
        try:
            with monitor(step), torch.no_grad():
                model(batch(1, 4, seed=step))
        except (KeyboardInterrupt, StopError):
            assert step == 0
            came += 1
        finally:
            interrupting.end()
    monitor.close()
    assert came == (at > 0), interrupting.lines[-1]
    return interrupting.lines


# A file whose `with` was interrupted as it began is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("strike", [press_ctrl_c, send_a_signal])
def test_ctrl_c_or_a_signal_at_any_line_is_the_loops_and_loses_and_doubles_no_reading(
    tmp_path, receiving, strike
):
    lines = go_on_after_ctrl_c(tmp_path / "whole", -1)
    last = {line: at for at, line in enumerate(lines, 1)}
    assert {name for name, _ in last} == PARTS
    assert len(last) > 100
    # All lines of those where a reading goes from one place to another, and some of the others.
    some = [at for (name, _), at in sorted(last.items()) if name.endswith(MOVES)]
    some += sorted(set(last.values()) - set(some))[::12]
    for at in some:
        folder = tmp_path / str(at)
        reached = go_on_after_ctrl_c(folder, at, strike)
        assert [r.step for r in read(folder)] == [0, 1][: 1 + at % 2], reached[-1]
    gc.collect()


def test_ctrl_c_as_a_reading_is_recorded_keeps_back_no_alert(tmp_path):
    model, alerts, rank = PlainDecoder(width=8, layers=1, heads=2), [], {0: 20.0}
    monitor = Monitor(
        model, metrics={"effective_rank": lambda hidden: rank.get(monitor.planner.step, 1.05)},
        alerts=["rank_collapse"], on_alert=alerts.append, tokens=16, schedule=every(1),
        directory=tmp_path, background=False, checks=None,
    )  # fmt: skip

    def train(step):
        with monitor(step), torch.no_grad():
            model(batch(1, 4, seed=step))

    train(0)
    with pytest.raises(KeyboardInterrupt), Interrupting(files("record/jsonl.py"), 1):
        train(1)
    assert alerts == []
    train(2)
    monitor.close()
    assert [alert.step for alert in alerts] == [1]
    assert [reading.step for reading in read(tmp_path)] == [0, 1, 2]


# Files whose code runs in the training's forward pass.
WATCHING = files(
    "capture/guard.py", "capture/observer.py", "capture/operator_watch.py",
    "capture/pass_recorder.py", "capture/watched_calls.py", "capture/tap/mode.py",
    "capture/calling/calls.py",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_a_line_of_a_watched_pass_is_the_loops_and_leaves_the_model_as_it_was(
    receiving,
):
    model = PlainDecoder(width=8, layers=1, heads=2)
    before = fingerprint(model)

    def watch(at):
        interrupting = Interrupting(WATCHING, at, send_a_signal)
        given = {"metrics": select("attention_entropy"), "tokens": 16, "directory": None}
        with Monitor(model, **given) as monitor:
            try:
                with monitor(0), torch.no_grad(), interrupting:
                    model(batch(1, 4))
            except StopError:
                came.append(at)
            finally:
                interrupting.end()
        return interrupting.lines

    came = []
    watch(-1)  # what it finds out is kept for the next
    lines = watch(-1)
    last = {line: at for at, line in enumerate(lines, 1)}
    assert {name for name, _ in last} == WATCHING
    for at in sorted(
        {*sorted(last.values())[::8], *(n for (f, _), n in last.items() if "mode" in f)}
    ):
        watch(at)
        assert came.pop() == at, lines[at - 1]
        left = fingerprint(model)
        assert {name for name in OF_PROCESS if left[name] != before[name]} == set(), lines[at - 1]
        assert not any(map(sum, left["hooks"]))


class Number:
    def item(self):
        send_a_signal()


class Sinking(Memory):
    def __init__(self, *, at):
        super().__init__()
        self.at = at

    def __str__(self):
        return "a sink"

    def _strike(self, verb):
        if verb == self.at:
            self.at = None
            send_a_signal()

    def describe(self, description):
        self._strike("describe")

    def write(self, reading):
        self._strike("write")

    def close(self):
        self._strike("close")


def once(function=lambda *given: 1.0):
    """A function of the user's that gets a signal the first time."""
    left = [send_a_signal]

    def own(*given, **named):
        if left:
            left.pop()()
        return function(*given)

    return own


def metric_of(hidden):
    return float(hidden.square().mean())


def metric_once():
    own = once(metric_of)

    def metric(hidden):
        return own(hidden)

    return metric


def loader():
    send_a_signal()
    yield batch(8, 4)


PLACES = {
    "a metric": lambda: {"metrics": {"own": metric_once()}},
    "a metric, in the background": lambda: {"metrics": {"own": metric_once()}, "background": True},
    **{f"{verb} of a sink": lambda verb=verb: {"sinks": [Sinking(at=verb)]}
       for verb in ("describe", "write", "close")},
    "a value that is logged": lambda: {"log": ("loss",)},
    "the loss of a probe": lambda: {"probe": batch(8, 4), "probe_loss": once()},
    "a loader": lambda: {"probe": loader()},
    "a probe": lambda: {"probe": once(lambda model: model(batch(8, 4)))},
}  # fmt: skip


@pytest.fixture
def without_collections():
    """Collect no garbage: Python drops what a handler raises in callbacks of the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("name", PLACES)
def test_an_error_of_a_signal_handler_goes_on_to_the_loop(tmp_path, caplog, receiving, name):
    """It does so wherever the signal strikes, and afterwards readings are made as before."""
    options = {"metrics": {"own": metric_of}, "tokens": 16, "schedule": 1} | PLACES[name]()
    model = PlainDecoder(width=8, layers=1, heads=2)
    monitor, came = Monitor(model, directory=tmp_path, **options), 0
    for step in range(3):
        try:
            with monitor(step), torch.no_grad():
                model(batch(8, 4))
                monitor.log(loss=Number() if "log" in options and not came else 1.0)
        except StopError:
            came += 1
    try:
        monitor.close()
    except StopError:
        came += 1
        monitor.close()
    assert came == 1
    if name != "a loader":  # which has ended
        assert [reading.step for reading in read(tmp_path)][-2:] == [1, 2]
        assert "failed" not in caplog.text


@pytest.mark.parametrize("error", [ValueError, TimeoutError, OSError])
def test_an_error_that_no_handler_raised_is_a_warning_as_before(tmp_path, caplog, error):
    def fail(hidden):
        raise error("of the metric")

    model = PlainDecoder(width=8, layers=1, heads=2)
    monitor = Monitor(model, directory=tmp_path, metrics={"own": fail}, tokens=16)
    with monitor, monitor(0), torch.no_grad():
        model(batch(8, 4))
    assert "of the metric" in caplog.text


FORKED = """
import os, signal, threading, time, torch
from support.models import PlainDecoder, batch
from geomon import Memory, Monitor, every
from geomon.metrics import Evaluator

Evaluator.has_own_metrics = False  # the user's are measured in the background too
begun = threading.Event()

def slow(hidden):
    if not begun.is_set():
        begun.set()
        time.sleep(0.5)
    return hidden.mean()

torch.set_num_threads(1)
model, memory = PlainDecoder(), Memory()
monitor = Monitor(
    model, metrics={"slow": slow}, tokens=64, schedule=every(1), directory=None, sinks=[memory],
    background=True,
)

def train(steps):
    for step in steps:
        with monitor(step), torch.no_grad():
            model(batch())
    monitor.close()
    return [reading.step for reading in memory.readings]

with monitor(0), torch.no_grad():
    model(batch())
begun.wait()  # the other thread sleeps, and holds no lock of a library that the child needs
child = os.fork()
if child == 0:
    signal.alarm(60)  # what hangs is ended
    os._exit(0 if train(range(10, 16)) == [*range(10, 16)] else 1)
assert os.waitpid(child, 0)[1] == 0
assert train(range(1, 3)) == [0, 1, 2]
"""


FORKED_INSIDE = """
import os, sys, torch
from support.models import PlainDecoder, batch
from geomon import Monitor, every, read

class Sink:
    def __init__(self):
        self.calls = []
    def write(self, reading):
        self.calls.append(reading.step)
    def close(self):
        self.calls.append("closed")

torch.set_num_threads(1)
model, sink = PlainDecoder(), Sink()
probe = batch() if sys.argv[2] == "probe" else None
with Monitor(
    model, tokens=64, schedule=every(1), directory=sys.argv[1], sinks=[sink], probe=probe,
    background=False, budget=None, log=("loss",),
) as monitor:
    for step in range(2):
        with monitor(step), torch.no_grad():
            model(batch())
            if step:
                child = os.fork()
        monitor.log(loss=1.0)
if child == 0:
    os._exit(0 if sink.calls == [0] else 1)
assert os.waitpid(child, 0)[1] == 0
assert sink.calls == [0, 1, "closed"], sink.calls
assert [reading.step for reading in read(sys.argv[1])] == [0, 1]
"""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(FORKED, []), (FORKED_INSIDE, ["run", "inline"]), (FORKED_INSIDE, ["run", "probe"])],
)
def test_a_fork_leaves_its_parents_readings_to_it(forks, tmp_path, code, arguments):
    program = tmp_path / "forked.py"
    program.write_text(code)
    arguments = [str(tmp_path / each) if each == "run" else each for each in arguments]
    process = forks.start(str(program), *arguments, environment=os.environ, stdout=1, stderr=2)
    assert process.wait(120) == 0
