import itertools
import threading
import time

import models
import pytest
import threadpoolctl
import torch
from measuring import watching

from geomon import Monitor, select
from geomon.metrics import Evaluator

METRICS = select("cosine", "variance", "twonn", "attention_entropy")


def run(steps, **settings):
    """Readings of an untrained model that changes a little from step to step."""
    torch.manual_seed(0)
    model = models.PlainDecoder()
    monitor, memory = watching(model, **({"metrics": METRICS, "splits": 2} | settings))
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
    *_, (_, _, behind) = run(5, background=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("geomon")]
    *_, (_, _, at_once) = run(5, background=False)
    assert [reading.step for reading in behind] == list(range(5))
    assert measured(behind) == measured(at_once)


@pytest.mark.usefixtures("own_metrics_in_background")
def test_two_readings_wait_while_one_is_measured_and_a_third_holds_the_training_up():
    free, calls, model = threading.Event(), [], models.PlainDecoder()

    def waits(hidden):
        calls.append((threading.current_thread().name, free.is_set()))
        free.wait(5)
        return 1.0

    options = {"metrics": {"waits": waits}, "budget": None, "background": True}
    monitor, memory = watching(model, **options)
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
    assert {name for name, _ in calls} == {"geomon"}
    assert [was_free for _, was_free in calls].count(False) <= 1  # one after another


@pytest.mark.usefixtures("own_metrics_in_background")
def test_within_a_budget_no_reading_is_made_while_the_one_before_is_measured():
    free, model = threading.Event(), models.PlainDecoder()
    metrics = {"waits": lambda hidden: float(free.wait(5))}
    monitor, memory = watching(model, metrics=metrics, budget=0.5, background=True)
    for step in range(2):
        with monitor(step):
            model(models.batch())
    free.set()
    monitor.close()
    assert [reading.step for reading in memory.readings] == [0]


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
@pytest.mark.parametrize("background", [True, False])
def test_strict_raises_what_failed_wherever_it_is_measured(background):
    with pytest.raises(ValueError, match="broken on purpose"):
        list(run(3, background=background, metrics={"broken": fails_at_once}))


def test_a_budget_without_gathering_is_refused_on_many_ranks(monkeypatch):
    import geomon.monitor.monitor as module
    from geomon.distributed import RankGroup

    monkeypatch.setattr(module, "find_ranks", lambda: RankGroup(0, 2))
    options = {"directory": None, "budget": 0.01, "gather": False}
    with pytest.raises(ValueError, match="use gather=True, or budget=None"):
        Monitor(models.PlainDecoder(), probe=models.batch(), **options)
    Monitor(models.PlainDecoder(), **options)  # one rank alone watches its training


@pytest.mark.usefixtures("own_metrics_in_background")
@pytest.mark.parametrize(
    ("place", "error"),
    [("metric", KeyboardInterrupt), ("across layers", KeyboardInterrupt),
     ("across layers", SystemExit)],
)  # fmt: skip
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
    # A metric that exits costs its own values alone.
    assert len(readings) == 6 * ((place, error) == ("metric", SystemExit))
    said = [r for r in caplog.records if error.__name__ in r.getMessage()]
    assert len(said) == 1


def cast_of(linear):
    """The copy of a layer's parameter that autocast has made, or has kept."""
    return linear(torch.ones(1, linear.in_features)).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("way", ["at once", "in turn", "in the background", "in another thread"])
def test_casts_that_autocast_keeps_for_the_training_are_kept(way):
    # The cache is the process's: a second cast is another number in the gradients, and in a region
    # around several steps another weight.
    model, metrics = models.PlainDecoder(), select("cosine", "max_logit")
    in_background = way == "in the background"
    monitor, memory = watching(model, metrics=metrics, background=in_background)

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


def test_what_was_measured_in_the_background_is_shown_though_no_other_reading_is_due():
    model = models.PlainDecoder()
    options = {"metrics": METRICS, "splits": 2, "background": True}
    monitor, memory = watching(model, **options, schedule=lambda step: step == 0)
    end = time.monotonic() + 60
    for step in itertools.count():
        with monitor(step):
            model(models.batch())
        if memory.readings or time.monotonic() > end:
            break
        time.sleep(0.01)
    assert [reading.step for reading in memory.readings] == [0]
    monitor.close()
