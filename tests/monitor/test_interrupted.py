"""Ctrl-C while a reading is measured and written, and a process that is forked meanwhile."""

import gc
import os

import pytest
import torch
from interrupting import Interrupting, files
from models import PlainDecoder, batch

from geomon import Memory, Monitor, every, read, select

# What a reading goes through from the first layer that is measured to its line in the record.
PARTS = files(
    "monitor/monitor.py", "monitor/outbox.py", "monitor/executor.py", "monitor/jobs.py",
    "monitor/sinks.py", "monitor/warnings.py", "record/jsonl.py", "metrics/at_once.py",
)  # fmt: skip
MOVES = ("executor.py", "outbox.py", "jsonl.py")


def go_on_after_ctrl_c(folder, at):
    """Train a step or two, the first interrupted at a line; returns what was reached."""
    torch.manual_seed(0)
    interrupting = Interrupting(PARTS, at)

    def begins(hidden):
        if not interrupting.lines:
            interrupting.begin()
        return 0.0

    model = PlainDecoder(width=8, layers=1, heads=2)
    monitor = Monitor(
        model, metrics={"begins": begins} | select("variance"), tokens=16, schedule=every(1),
        directory=folder, sinks=[Memory()], background=False,
    )  # fmt: skip
    for step in range(1 + at % 2):
        try:
            with monitor(step), torch.no_grad():
                model(batch(1, 4, seed=step))
        except KeyboardInterrupt:
            assert step == 0
        finally:
            interrupting.end()
    monitor.close()
    return interrupting.lines


# A file whose `with` was interrupted as it began is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_loses_no_reading_and_doubles_none(tmp_path):
    lines = go_on_after_ctrl_c(tmp_path / "whole", -1)
    last = {line: at for at, line in enumerate(lines, 1)}
    assert {name for name, _ in last} == PARTS
    assert len(last) > 100
    # All lines of those where a reading goes from one place to another, and some of the others.
    some = [at for (name, _), at in sorted(last.items()) if name.endswith(MOVES)]
    some += sorted(set(last.values()) - set(some))[::12]
    for at in some:
        folder = tmp_path / str(at)
        reached = go_on_after_ctrl_c(folder, at)
        assert [r.step for r in read(folder)] == [0, 1][: 1 + at % 2], reached[-1]
    gc.collect()


FORKED = """
import os, signal, threading, time, torch
from models import PlainDecoder, batch
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
from models import PlainDecoder, batch
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
