"""Rows are measured in the background or at once: the same values, in the same order."""

import itertools
import threading
import time
from contextlib import nullcontext

import pytest
import threadpoolctl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from geomon import Monitor, select
from geomon.distributed import RankGroup
from geomon.metrics import Evaluator
from support.models import PlainDecoder, batch
from support.scenarios import Scenario, Watched, check

METRICS = select("cosine", "variance", "twonn", "attention_entropy")
BESIDE = {"metrics": METRICS, "tokens": 256}
OWN = pytest.mark.usefixtures("own_metrics_in_background")


def values_of(watched):
    return [
        {tag: v for tag, v in reading.values.items() if not tag.startswith("geomon/")}
        for reading in watched.memory.readings
    ]


def test_the_background_measures_the_same_in_the_same_order(caplog):
    found = []
    for background in (True, False):
        torch.manual_seed(0)
        options = BESIDE | {"background": background, "splits": 2}
        scenario = Scenario(range(5), range(5), options, ["exact copies of others"])
        found.append(values_of(check(scenario, None, caplog)))
    assert found[0] == found[1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("geomon")]


class Rounded(TorchDispatchMode):
    """A mode that rounds products, as a training in few bits does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        return out.round() if packet in (torch.ops.aten.mm, torch.ops.aten.bmm) else out


def test_rows_are_measured_outside_of_the_modes_of_the_training(monkeypatch):
    watched = Watched(None, monkeypatch, splits=2, seed=0, **BESIDE)
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        for step, mode in ((0, nullcontext()), (0, Rounded())):
            window = watched.monitor(step)
            window.__enter__()
            watched.model(batch())
            with mode:  # that the training is in as its forward pass has ended
                window.__exit__(None, None, None)
            watched.monitor.advance(1)
    one, other = values_of(watched)
    assert one == other


@OWN
def test_two_readings_wait_while_one_is_measured_and_a_third_holds_the_training_up(monkeypatch):
    free, calls = threading.Event(), []

    def waits(hidden):
        calls.append((threading.current_thread().name, free.is_set()))
        free.wait(5)
        return 1.0

    options = {"metrics": {"waits": waits}, "budget": None, "background": True, "strict": True}
    watched = Watched(None, monkeypatch, **options)
    for step in range(3):
        watched.step(step)
    assert not watched.shown
    threading.Timer(0.3, free.set).start()
    watched.step(3)
    assert free.is_set()
    watched.monitor.close()
    assert watched.shown == [0, 1, 2, 3]
    assert {name for name, _ in calls} == {"geomon"}
    assert [was_free for _, was_free in calls].count(False) <= 1  # one after another


@OWN
def test_within_a_budget_no_reading_is_made_while_the_one_before_is_measured(monkeypatch):
    free = threading.Event()
    metrics = {"waits": lambda hidden: float(free.wait(5))}
    watched = Watched(None, monkeypatch, metrics=metrics, budget=0.5, background=True)
    watched.step(0)
    watched.step(1)
    free.set()
    watched.monitor.close()
    assert watched.shown == [0]


def raising(error):
    def raises(hidden, *given, **named):
        raise error

    return raises


def break_across_layers(error):
    return lambda watched: watched.patch.setattr(Evaluator, "combine", raising(error))


BROKEN = {"metrics": {"broken": lambda hidden: 1 / 0}, "strict": True, "background": True}
# Events before six steps, more than may wait; options, warnings, and the error that is raised.
FAILURES = {
    "strict": ([], BROKEN, [], (ZeroDivisionError, "division")),
    "Ctrl-C in a metric": (
        [], {"metrics": {"stops": raising(KeyboardInterrupt())}, "background": True},
        ["KeyboardInterrupt"], None,
    ),
    **{
        f"{error.__name__} across layers": (
            [break_across_layers(error)], BESIDE | {"background": True}, [error.__name__], None
        )
        for error in (KeyboardInterrupt, SystemExit)
    },
}  # fmt: skip


@OWN
@pytest.mark.parametrize("name", FAILURES)
def test_an_error_in_the_background_ends_nothing_and_strict_raises_it(caplog, name):
    events, options, said, raises = FAILURES[name]
    steps = range(1 if raises else 6)
    check(Scenario([*events, *steps], [], options, said, raises=raises), None, caplog)


@OWN
@pytest.mark.parametrize("threads", [0, 1])
def test_if_no_thread_can_be_started_readings_are_measured_here_in_order(threads, monkeypatch):
    def start(self):
        if len(started) >= threads:
            raise RuntimeError("can't start new thread")
        started.append(self)
        begin(self)

    def numbered(hidden):
        if threading.current_thread() in started:
            overtaken.wait(0.1)
        else:
            overtaken.set()
        return float(next(numbers))

    started, begin = [], threading.Thread.start
    overtaken, numbers = threading.Event(), itertools.count()
    monkeypatch.setattr(threading.Thread, "start", start)
    options = {"metrics": {"order": numbered}, "background": True, "strict": True}
    watched = Watched(None, monkeypatch, **options)
    for step in range(5):
        watched.step(step)
        assert threads or watched.shown[-1] == step
    watched.monitor.close()
    assert watched.shown == [0, 1, 2, 3, 4]
    measured = [reading.values["order/mean"] for reading in watched.memory.readings]
    assert measured == sorted(measured)


def test_a_budget_without_gathering_is_refused_on_many_ranks(monkeypatch):
    monkeypatch.setattr("geomon.monitor.setup.find_ranks", lambda: RankGroup(0, 2))
    options = {"directory": None, "budget": 0.01, "gather": False}
    with pytest.raises(ValueError, match="use gather=True, or budget=None"):
        Monitor(PlainDecoder(), probe=batch(), **options)
    Monitor(PlainDecoder(), **options)  # one rank alone watches its training


def cast_of(linear):
    """The copy of a layer's parameter that autocast has made, or has kept."""
    return linear(torch.ones(1, linear.in_features)).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("way", ["at once", "in turn", "in the background", "in another thread"])
def test_casts_that_autocast_keeps_for_the_training_are_kept(monkeypatch, way):
    # The cache is the process's: a second cast is another number in the gradients, and in a region
    # around several steps another weight.
    options = {"metrics": select("cosine", "max_logit"), "background": way == "in the background"}
    watched = Watched(None, monkeypatch, **options)

    def read():
        with watched.monitor(0):
            watched.model(batch())
        watched.monitor.close()

    linear = torch.nn.Linear(3, 4)
    torch.get_num_threads()
    limit = threadpoolctl.threadpool_limits(1 if way == "in turn" else 2, user_api="openmp")
    with limit, torch.autocast("cpu", dtype=torch.bfloat16):
        before = cast_of(linear)
        assert cast_of(linear) is before
        if way == "in another thread":  # of the program's own, where autocast is off
            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            thread.join()
        else:
            read()
        assert cast_of(linear) is before
    assert watched.shown == [0]


def test_a_reading_measured_in_the_background_is_shown_though_no_other_one_is_due(monkeypatch):
    options = BESIDE | {"background": True, "schedule": lambda step: step == 0}
    watched, end = Watched(None, monkeypatch, **options), time.monotonic() + 60
    for step in itertools.count():
        watched.step(step)
        if watched.shown or time.monotonic() > end:
            break
        time.sleep(0.01)
    assert watched.shown == [0]
    watched.monitor.close()
