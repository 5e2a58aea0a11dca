"""Every reading comes to every sink once, whatever others do."""

import queue
import signal
import threading
import time

import pytest

from geomon import Memory
from support.models import batch
from support.scenarios import Scenario, Watched, check


class Taker(Memory):
    """A sink that does something at readings of some steps.

    Attributes:
        tried, taken: Steps of the readings that it was given, and that it took.
        told: Names of its methods as they are called; threads that call it.
    """

    def __init__(self, act=lambda: None, at=(), closes=lambda: None, describes=lambda: None):
        super().__init__()
        self.act, self.at, self.closes, self.describes = act, at, closes, describes
        self.tried, self.taken, self.told, self.threads = [], [], [], set()

    def describe(self, description):
        self.told.append("described")
        self.describes()

    def write(self, reading):
        self.threads.add(threading.current_thread())
        self.tried.append(reading.step)
        if reading.step in self.at:
            self.act()
        self.taken.append(reading.step)

    def close(self):
        self.told.append("closed")
        self.closes()


class Together(Memory):
    """A sink that is made of others."""

    def __init__(self, *sinks):
        super().__init__()
        self.sinks = sinks

    def parts(self):
        return self.sinks


def gone():
    raise OSError("gone")


def hang():
    time.sleep(1.0)


def too_late():
    raise TimeoutError("of its own")


AGAIN = "Taker failed and is tried again with the next readings; the record goes on: OSError: gone"
LEFT = "Taker failed at 5 readings in a row and is left out from here on"
CLOSING, SLOW = "closing Taker failed: OSError: gone", "Taker takes too long and is left out"
# A sink, the steps that it is tried with and those it takes, whether it is closed, and warnings.
SINKS = {
    "takes all": (Taker, range(10), range(10), True, []),
    "fails always": (lambda: Taker(gone, range(20)), range(5), [], False, [AGAIN, LEFT]),
    "fails at times, and as it is closed": (
        lambda: Taker(gone, [*range(4), *range(5, 9)], closes=gone), range(10), [4, 9], True,
        [AGAIN, CLOSING],
    ),
    "does not take the description": (
        lambda: Taker(describes=gone), range(10), range(10), True, ["did not take the description"]
    ),
    "raises a timeout of its own": (
        lambda: Taker(too_late, [3]), range(10), [0, 1, 2, *range(4, 10)], True,
        ["tried again with the next readings; the record goes on: TimeoutError: of its own"],
    ),
    "hangs": (lambda: Taker(hang, [1]), [0, 1], [0], False, [f"{SLOW} from here on: it takes mo"]),
    "hangs as it is closed": (lambda: Taker(closes=hang), range(10), range(10), True, [SLOW]),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_holds_up_neither_the_training_nor_other_sinks(tmp_path, caplog, name):
    make, tried, taken, closes, said = SINKS[name]
    sink, other = make(), Taker()
    limit = 0.3 if "hangs" in name else 600
    options = {"sinks": [Together(sink, other)], "sink_timeout": limit}
    check(Scenario(range(10), range(10), options, said), tmp_path, caplog)
    assert sink.tried == list(tried)
    assert sink.taken[: len(taken)] == list(taken)
    assert sink.told == ["described"] + ["closed"] * closes
    assert other.taken == list(range(10))
    assert other.told == ["described", "closed"]
    threads = [*sink.threads, *other.threads]
    assert threading.current_thread() not in threads
    assert all(thread.daemon for thread in threads)  # a program may end meanwhile
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_if_no_thread_can_be_started_sinks_are_called_here(tmp_path, caplog, monkeypatch, error):
    def start(thread):
        if "geomon" in thread.name:
            raise error
        begin(thread)

    sink, begin = Taker(), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    check(Scenario(range(3), range(3), {"sinks": [sink]}), tmp_path, caplog)
    assert sink.taken == [0, 1, 2]
    assert sink.threads == {threading.current_thread()}


class Striking(queue.SimpleQueue):
    """Ctrl-C comes between the call of a sink and the wait for it."""

    def put(self, call):
        super().put(call)
        if call is not None:
            raise KeyboardInterrupt


@pytest.mark.parametrize("calls", [queue.SimpleQueue, Striking])
def test_ctrl_c_is_not_held_up_by_a_sink_and_the_next_reading_is_shown(
    tmp_path, monkeypatch, calls
):
    go_on, number = threading.Event(), threading.main_thread().ident

    def interrupt():
        if calls is not Striking:
            go_on.wait(0.3)  # a signal just before the wait would be seen when that is over
            signal.pthread_kill(number, signal.SIGINT)
        go_on.wait(60)

    sink = Taker(interrupt, [1])
    watched = Watched(tmp_path, monkeypatch, sinks=[sink])
    watched.step(0)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        monkeypatch.setattr(queue, "SimpleQueue", calls)
        with pytest.raises(KeyboardInterrupt):
            watched.step(1)
    finally:
        signal.signal(signal.SIGINT, handler)
        monkeypatch.setattr(queue, "SimpleQueue", Striking.__base__)
    assert time.monotonic() - began < 25
    go_on.set()
    with watched.monitor(2):
        watched.model(batch())
    watched.monitor.close()
    assert sink.tried == [0, 1, 2]
    assert [reading.step for reading in watched.record] == [0, 1, 2]
