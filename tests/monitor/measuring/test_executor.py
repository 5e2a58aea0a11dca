import logging
import random
import threading
import time

import models
import pytest
import threadpoolctl
import torch

from geomon import Memory, Monitor, select
from geomon.metrics import Evaluator
from geomon.monitor.measuring.jobs import ReadingJob

METRICS = select("cosine", "variance", "twonn", "attention_entropy")


def run(steps=12, model=None, clock=None, **settings):
    """Readings of an untrained model that changes a little from step to step."""
    torch.manual_seed(0)
    model = model or models.PlainDecoder()
    memory = Memory()
    monitor = Monitor(
        model, metrics=settings.pop("metrics", METRICS), directory=None, sinks=[memory],
        tokens=settings.pop("tokens", 64), strict=settings.pop("strict", True),
        schedule=lambda step: True, **settings,
    )  # fmt: skip
    if clock is not None:
        monitor._budget._clock = clock
    for step in range(steps):
        with monitor(step):
            model(models.batch(seed=step))
        with torch.no_grad():
            model.head.weight.mul_(1.01)
            model.blocks[0].c_attn.weight.mul_(1.01)
        yield step, monitor, memory.readings
    monitor.close()
    yield steps, monitor, memory.readings


def measured(readings):
    return [{t: v for t, v in r.values.items() if not t.startswith("geomon/")} for r in readings]


def test_the_background_measures_the_same_in_the_same_order_and_leaves_no_thread():
    *_, (_, _, behind) = run(background=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("geomon")]
    *_, (_, _, at_once) = run(background=False)
    assert [reading.step for reading in behind] == list(range(12))
    assert measured(behind) == measured(at_once)


@pytest.mark.usefixtures("own_metrics_in_background")
def test_two_readings_wait_while_one_is_measured_and_a_third_holds_the_training_up():
    free, memory, model = threading.Event(), Memory(), models.PlainDecoder()

    def waits(hidden):
        free.wait(5)
        return 1.0

    monitor = Monitor(
        model, metrics={"waits": waits}, tokens=64, directory=None, sinks=[memory], budget=None,
        schedule=lambda step: True, background=True,
    )  # fmt: skip
    for step in range(3):
        with monitor(step):
            model(models.batch())
    assert not memory.readings
    threading.Timer(0.3, free.set).start()
    with monitor(3):
        model(models.batch())
    assert free.is_set()
    monitor.close()
    assert [reading.step for reading in memory.readings] == [0, 1, 2, 3]


def test_sinks_are_written_by_the_thread_that_trains():
    writers = set()

    class Sink(Memory):
        def write(self, reading):
            writers.add(threading.current_thread())

    model = models.PlainDecoder()
    monitor = Monitor(model, metrics=METRICS, directory=None, sinks=[Sink()], background=True)
    with monitor(0):
        model(models.batch())
    monitor.close()
    assert writers == {threading.main_thread()}


def test_a_metric_of_ones_own_is_measured_by_the_thread_that_trains():
    threads = set()

    def of_its_thread(hidden):
        threads.add(threading.current_thread())
        return 1.0

    list(run(2, background=True, metrics=METRICS | {"own": of_its_thread}))
    assert threads == {threading.main_thread()}


def fails_at_once(hidden):
    raise ValueError("broken on purpose")


@pytest.mark.usefixtures("own_metrics_in_background")
def test_a_failure_in_the_background_is_a_warning_and_a_missing_value(caplog):
    metrics = METRICS | {"broken": fails_at_once}
    with caplog.at_level(logging.WARNING, "geomon"):
        *_, (_, _, readings) = run(3, background=True, metrics=metrics, strict=False)
    assert len(readings) == 3
    assert readings[2].values["broken/mean"] != readings[2].values["broken/mean"]
    assert len([r for r in caplog.records if "broken on purpose" in r.message]) == 1
    *_, (_, _, readings) = run(2, background=True, strict=False)
    assert len(readings) == 2


@pytest.mark.usefixtures("own_metrics_in_background")
def test_strict_raises_what_failed_in_the_background():
    with pytest.raises(ValueError, match="broken on purpose"):
        list(run(3, background=True, metrics={"broken": fails_at_once}))


class Clock:
    """A second passes with each step."""

    now = 0.0

    def __call__(self):
        return self.now


class Stopwatch:
    """Stands for the clock that costs are taken with: a machine may take any time for anything.

    Up to `longest` seconds pass with each look at it, and as many as a metric says.
    """

    def __init__(self, longest):
        self.now, self.longest = 0.0, longest
        self.chance = random.Random(0)

    def __call__(self):
        self.now += self.longest * self.chance.random()
        return self.now


def run_on_budget(share, steps=400, **settings):
    clock = Clock()
    for step, monitor, readings in run(steps, clock=clock, budget=share, **settings):
        clock.now = step + 1.0
        yield step, monitor, readings


@pytest.mark.parametrize("source", ["inline", "probe"])
def test_a_budget_is_held_and_what_is_due_is_put_off(source, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", Stopwatch(4e-4))
    probe = {"probe": models.batch()} if source == "probe" else {}
    shares = []
    for step, monitor, seen in run_on_budget(0.002, steps=200, tokens=128, **probe):
        readings = seen
        if 30 < step < 200:
            shares.append(monitor.overhead)
    assert max(shares) <= 0.002
    assert 2 <= len(readings) < 190
    assert readings[0].step == 0
    steps = [reading.step for reading in readings]
    assert steps == sorted(set(steps))


def test_layers_that_are_measured_at_once_are_paid_together(monkeypatch):
    class Spent(ReadingJob):
        def measure_next(self, count=1):
            counts.append(count)
            return super().measure_next(count)

    counts = []
    monkeypatch.setattr("geomon.monitor.monitor.ReadingJob", Spent)
    torch.get_num_threads()
    with threadpoolctl.threadpool_limits(2, user_api="openmp"):
        *_, (_, _, readings) = run(1)
        assert counts == [4]  # all at once, where there is no budget
        counts.clear()
        *_, (_, _, limited) = run_on_budget(0.9, steps=30)
    assert set(counts) == {2}
    assert measured(limited)[0] == pytest.approx(measured(readings)[0], nan_ok=True)


def test_what_is_under_way_is_finished_at_the_end(caplog):
    *_, (_, _, readings) = run_on_budget(1e-6, steps=5)
    assert [reading.step for reading in readings] == [0]
    # A loop of one's own does not say which step is its last: it is told how to read that.
    assert (
        len([r for r in caplog.records if "nothing could be read after step 0" in r.message]) == 1
    )
    assert readings[0].values["cosine/mean"] == pytest.approx(
        list(run(1))[-1][2][0].values["cosine/mean"]
    )


def test_a_forced_reading_is_made_whatever_the_budget(caplog):
    runs = run_on_budget(1e-6, steps=5)
    for step, monitor, readings in runs:
        if step == 2:
            monitor.probe(step, models.batch())
            assert [(r.step, r.source) for r in readings] == [(0, "inline")]
    assert [(r.step, r.source) for r in readings] == [(0, "inline"), (2, "probe")]
    assert "after step 0" not in caplog.text


def test_rows_are_thinned_and_said(monkeypatch):
    stopwatch = Stopwatch(1e-6)
    monkeypatch.setattr(time, "perf_counter", stopwatch)

    def slow(hidden):
        stopwatch.now += len(hidden) * 1e-6
        return hidden.mean()

    # Four layers of 2,000 rows take 8 ms, and a hundred steps of a second allow 5.
    sizes = {"tokens": 2000, "batches": 1, "metrics": {"slow": slow}}
    model, memory, clock = models.PlainDecoder(), Memory(), Clock()
    monitor = Monitor(
        model, directory=None, sinks=[memory], budget=5e-5, schedule=lambda step: step == 0, **sizes
    )
    monitor._budget._clock = clock
    with monitor(0):
        model(models.batch(sequences=64))
    for step in range(1, 100_000):
        clock.now = float(step)
        monitor.advance(step)
        if memory.readings:
            break
    first = memory.readings[0]
    assert first.step == 0
    assert first.tokens < 2000
    said = f"{first.tokens} rows in a batch instead of 2000, to stay within the budget"
    assert said in first.words()


def test_a_budget_without_gathering_is_refused_on_many_ranks(monkeypatch):
    import geomon.monitor.monitor as module
    from geomon.distributed import RankGroup

    monkeypatch.setattr(module, "find_ranks", lambda: RankGroup(0, 2))
    with pytest.raises(ValueError, match="use gather=True, or budget=None"):
        Monitor(models.PlainDecoder(), directory=None, budget=0.01, gather=False)


def test_a_due_step_that_training_jumps_over_is_read_at_the_next():
    model, memory = models.PlainDecoder(), Memory()
    monitor = Monitor(
        model, metrics=METRICS, directory=None, sinks=[memory], schedule=lambda s: s % 5 == 0
    )
    for step in range(0, 22, 2):
        with monitor(step):
            model(models.batch())
    assert [reading.step for reading in memory.readings] == [0, 6, 10, 16, 20]


def test_nothing_is_said_of_what_no_metric_reads():
    *_, (_, _, readings) = run(1, metrics=select("cosine", "attention_entropy"), batches=1)
    assert readings[0].words() == []


def test_who_asks_twice_about_a_step_that_is_owed_gets_the_same_answer():
    model, memory = models.PlainDecoder(), Memory()
    monitor = Monitor(
        model, metrics=METRICS, directory=None, sinks=[memory], schedule=lambda s: s % 5 == 0
    )
    for step in (0, 4, 6, 7):
        monitor.advance(step)
        if monitor.is_due(step):  # as the callback for the Trainer does
            with monitor(step):
                model(models.batch())
    assert [reading.step for reading in memory.readings] == [0, 6]


@pytest.mark.usefixtures("own_metrics_in_background")
@pytest.mark.parametrize("place", ["metric", "across layers"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_raised_in_the_background_ends_nothing(caplog, monkeypatch, place, error):
    def interrupted(*args, **kwargs):
        raise error

    metrics = METRICS
    if place == "metric":
        metrics = METRICS | {"interrupted": lambda hidden: interrupted()}
    else:
        monkeypatch.setattr(Evaluator, "combine", interrupted)
    *_, (steps, _, readings) = run(6, background=True, metrics=metrics, strict=False)
    assert steps == 6  # more than wait in the background
    assert not readings
    said = [r for r in caplog.records if error.__name__ in r.getMessage()]
    assert len(said) == 1


def cast_of(linear):
    """The copy of a layer's parameter that autocast has made, or has kept."""
    return linear(torch.ones(1, linear.in_features)).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("way", ["at once", "in turn", "in the background", "in another thread"])
def test_casts_that_autocast_keeps_for_the_training_are_kept(way):
    # The cache is the process's: a second cast is another number in the gradients, and in a region
    # around several steps another weight.
    metrics = select("cosine", "max_logit")
    model, memory = models.PlainDecoder(), Memory()
    monitor = Monitor(
        model, metrics=metrics, directory=None, sinks=[memory], strict=True,
        background=way == "in the background",
    )  # fmt: skip

    def read():
        with monitor(0):
            model(models.batch())
        monitor.close()

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
    assert len(memory.readings) == 1
