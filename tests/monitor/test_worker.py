"""Rows are measured in a process of its own: the same values, and nothing is left behind."""

import copy
import operator
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from geomon import read, select
from geomon.metrics import Metric
from geomon.monitor import executor, worker
from geomon.monitor.worker import Worker, WorkerError
from support.scenarios import Watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

METRICS = select("cosine", "variance", "twonn", "anisotropy", "attention_entropy", "max_logit")
IN_PROCESS = {"metrics": METRICS, "tokens": 256, "background": "process", "budget": None}


def workers_of(training):
    """Processes that measure for a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if worker.PROGRAM in words and str(training) in words:
                found.append(int(folder.name))
    return found


def end_of(find, *, within=30.0):
    """Wait until nothing is found any more; returns what is left."""
    end = time.monotonic() + within
    while (left := find()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not workers_of(os.getpid())


def named_files(process):
    """Files that a process has open and that have a name, so that they might be left."""
    links = {os.readlink(one) for one in Path(f"/proc/{process}/fd").iterdir()}
    return {link for link in links if Path(link).exists()} - {os.devnull}


def wait_for(watched):
    """Wait until what was begun is measured."""
    end_of(lambda: watched.monitor._executor.busy)


def values_of(watched):
    return [
        {tag: v for tag, v in reading.values.items() if not tag.startswith("geomon/")}
        for reading in watched.memory.readings
    ]


def notes_of(watched):
    return [[note.words() for note in r.notes] for r in watched.memory.readings]


# -- values ----------------------------------------------------------------------------------------


@contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def rounded_products():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def other_type():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SETTINGS = (one_thread, rounded_products, deterministic, other_type)


def test_the_process_measures_the_same_to_the_bit_whatever_the_training_sets(monkeypatch, caplog):
    found = []
    for background in ("process", "thread"):
        torch.manual_seed(0)
        watched = Watched(None, monkeypatch, **IN_PROCESS | {"background": background, "splits": 2})
        watched.step(0)
        for step, setting in enumerate(SETTINGS, 1):
            wait_for(watched)
            with setting():
                watched.step(step)
                wait_for(watched)
        processes = workers_of(os.getpid())
        assert len(processes) == (background == "process")
        assert not [file for process in processes for file in named_files(process)]
        watched.monitor.close()
        found.append((values_of(watched), notes_of(watched)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1 + len(SETTINGS)
    assert not [text for text in caplog.messages if "process" in text]


def test_tensors_keep_their_numbers_types_and_strides():
    rows = torch.arange(24.0).view(4, 6)
    whole = [
        rows, rows.T, rows[0].expand(3, 6), rows.bool(), rows.bfloat16(), rows.half()[1],
        rows.long(), rows.sum(), rows.double().requires_grad_(),
    ]  # fmt: skip
    others = [rows[:, ::2], rows[:0], torch.nn.Parameter(rows), rows.to_sparse().coalesce()]
    process = Worker()
    try:
        found = process.call(copy.copy, whole + others)
        strides = [process.call(operator.methodcaller("stride"), one) for one in whole]
        with pytest.raises(WorkerError, match=r"^ZeroDivisionError: division by zero$"):
            process.call(operator.truediv, 1, 0)
        assert process.has_failed
        assert not process.is_ready()
    finally:
        process.close()
    for one, other in zip(whole + others, found, strict=True):
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        assert torch.equal(other.to_dense(), one.to_dense())
    assert strides == [one.stride() for one in whole]


# -- failures --------------------------------------------------------------------------------------


def refuse(*given, **named):
    raise OSError("none is left")


def fail_to_start(patch):
    patch.setattr(worker.subprocess, "Popen", refuse)


def lack_memory(patch):
    patch.setattr(worker.os, "memfd_create", refuse)


def be_another_program(patch):
    patch.setattr(worker.multiprocessing.spawn, "get_executable", lambda: "/bin/false")


def end_at_once(patch):
    patch.setattr(worker, "PROGRAM", "/nowhere/program.py")


def be_killed(patch):
    def send(running, *message):
        os.kill(running.process.pid, signal.SIGSTOP)  # so that it cannot answer before
        threading.Timer(0.1, running.process.kill).start()
        return call(running, *message)

    call = worker._call
    patch.setattr(worker, "_call", send)


def ours(hidden):
    return hidden.sum()


ours.__module__ = "__main__"  # as in the script that is run


def sum_by(function):
    return {"sum": Metric(function, METRICS["cosine"].text)}


NOTHING_LEFT = "OSError: none is left"
# Metrics, what happens, before which step, and why a process does not measure it.
FAILURES = {
    "cannot start": (METRICS, fail_to_start, 0, NOTHING_LEFT),
    "no memory to share": (METRICS, lack_memory, 0, NOTHING_LEFT),
    "no interpreter": (METRICS, be_another_program, 0, "/bin/false is not an interpreter"),
    "ends at once": (METRICS, end_at_once, 0, "the process ended with status 2"),
    "killed": (METRICS, be_killed, 1, "the process ended by signal 9"),
    "a metric without a name": (sum_by(lambda hidden: hidden.sum()), None, 0, "pickle"),
    "a metric of the program": (sum_by(ours), None, 0, "in the program"),
}  # fmt: skip


def measured(metrics, background, patch, event=None, at=None):
    """Values and notes of three readings, with an event before one of them."""
    torch.manual_seed(0)
    options = IN_PROCESS | {"metrics": metrics, "background": background, "strict": True}
    watched = Watched(None, patch, **options)
    with patch.context() as changes:
        for step in range(3):
            if step == at and event is not None:
                event(changes)
            watched.step(step)
            wait_for(watched)
    assert not workers_of(os.getpid())
    watched.monitor.close()
    assert watched.shown == [0, 1, 2]
    return values_of(watched), notes_of(watched)


@pytest.fixture(scope="module")
def measured_by_a_thread():
    """The same of a thread, which is asked for the metrics of most failures once."""
    known = {}

    def measured_once(metrics, patch):
        if id(metrics) not in known:
            known[id(metrics)] = measured(metrics, "thread", patch)
        return known[id(metrics)]

    return measured_once


@pytest.mark.usefixtures("own_metrics_in_background")
@pytest.mark.parametrize("name", FAILURES)
def test_if_no_process_can_measure_a_thread_does_and_says_so_once(
    name, measured_by_a_thread, monkeypatch, caplog
):
    metrics, event, at, why = FAILURES[name]
    values, notes = measured(metrics, "process", monkeypatch, event, at)
    others, without = measured_by_a_thread(metrics, monkeypatch)
    assert values == others
    [said] = [note for note in notes[at] if note not in without[at]]
    assert why in said
    notes[at].remove(said)
    assert notes == without
    assert [said] == [text for text in caplog.messages if "process" in text]


@pytest.mark.parametrize(("start", "is_used"), [(0.0, True), (1e9, False)])
def test_a_process_is_started_once_threads_took_as_long_and_never_waited_for(
    start, is_used, monkeypatch
):
    monkeypatch.setattr(executor, "_START", start)
    watched = Watched(None, monkeypatch, **IN_PROCESS | {"background": True})
    calls, call = [], worker._call
    monkeypatch.setattr(worker, "_call", lambda *given: calls.append(given) or call(*given))
    watched.step(0)
    wait_for(watched)
    assert bool(workers_of(os.getpid())) == is_used
    assert not calls  # it is still starting
    process = watched.monitor._executor._worker
    end_of(lambda: is_used and not process.is_ready(), within=120)
    watched.step(1)
    wait_for(watched)
    watched.monitor.close()
    assert bool(calls) == is_used
    assert watched.shown == [0, 1]
    assert not [said for said in notes_of(watched)[1] if "process" in said]


# -- ends ------------------------------------------------------------------------------------------

# Reads in a process of its own, and forks a child that has all descriptors, or trains on as well.
_PROGRAM = """
import os, sys, time
import torch
from support.models import PlainDecoder, batch
from geomon import Monitor, every, select

way, folder = sys.argv[1:]
model = PlainDecoder()
monitor = Monitor(
    model, metrics=select("variance", "cosine"), tokens=64, schedule=every(1), directory=folder,
    background="process", budget=None,
)

def train(steps):
    for step in steps:
        with monitor(step), torch.no_grad():
            model(batch())

train(range(2))
while monitor._executor.busy:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    if way != "SIGKILL":
        # as if the parent was just looking whether the process runs
        monitor._executor._worker._running.process._waitpid_lock.acquire()
        monitor.advance(2)
    time.sleep(600)
train(range(2, 4))
print(child, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    if way == "Ctrl-C":
        train(range(4, 6))
"""


@pytest.mark.parametrize(
    ("way", "number", "code", "steps"),
    [
        ("SIGKILL", signal.SIGKILL, -9, 2),
        ("end", signal.SIGINT, 0, 4),
        ("Ctrl-C", signal.SIGINT, 0, 6),
    ],
)
def test_the_process_ends_with_the_training_and_not_before(
    way, number, code, steps, forks, tmp_path
):
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text(_PROGRAM)
    with said.open("w") as output:
        training = forks.start(
            str(program), way, tmp_path / "run", environment=os.environ, stdout=output.fileno(),
            stderr=2,
        )  # fmt: skip
    end_of(lambda: not said.read_text().endswith("\n"), within=120)
    child, [process] = int(said.read_text()), workers_of(training.pid)
    try:
        if way == "Ctrl-C":  # which a scheduler may send to all
            os.kill(process, number)
            os.kill(process, signal.SIGTERM)
        os.kill(training.pid, number)
        assert training.wait(120) == code
        assert not end_of(lambda: workers_of(training.pid))
    finally:
        os.kill(child, signal.SIGKILL)
    readings = read(tmp_path / "run")
    assert [reading.step for reading in readings] == [*range(len(readings))]
    assert len(readings) >= steps
    assert not [note for reading in readings for note in reading.notes if "thread" in note.kind]
