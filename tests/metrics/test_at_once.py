"""Layers that are measured at once give what they give in turn, and nothing else changes."""

import threading
import time
import weakref
from dataclasses import replace

import pytest
import threadpoolctl
import torch
from whole_layer import ROWS, whole_layer

from geomon.capture.snapshot import SOURCES, Layer
from geomon.metrics import METRICS, MORE_METRICS, Evaluator, LayerValues, check_metrics, select
from geomon.metrics.at_once import in_pieces, in_threads, layers_at_once
from geomon.record.columns import tagged

ALL = METRICS | MORE_METRICS


@pytest.fixture(autouse=True)
def four_threads():
    """Four threads for the operations of this thread, whatever the machine has."""
    torch.get_num_threads()  # at the first question torch takes its own setting over
    with threadpoolctl.threadpool_limits(4, user_api="openmp"):
        assert torch.get_num_threads() == 4
        yield


def layers(count=6, width=8):
    generator = torch.Generator().manual_seed(0)
    return [
        Layer(index, f"layer {index}", {"hidden": torch.randn(400, width, generator=generator)})
        for index in range(count)
    ]


def test_every_metric_at_once_is_that_in_turn():
    several = [replace(whole_layer(), index=index) for index in range(3)]
    for layer in several:
        layer.captured["hidden"] = layer.captured["hidden"] * (1 + 0.1 * layer.index)
    evaluator = Evaluator(ALL, 1, strict=True)
    assert evaluator.layers_at_once(several, ROWS) == 3
    at_once = evaluator.evaluate(several, ROWS)
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert evaluator.layers_at_once(several, ROWS) == 1
        in_turn = evaluator.evaluate(several, ROWS)
    assert at_once.notes == in_turn.notes
    assert tagged(at_once.stacks) == pytest.approx(
        tagged(in_turn.stacks), rel=1e-12, abs=1e-12, nan_ok=True
    )


def test_each_item_has_its_share_of_the_threads_and_nobody_else_has_fewer():
    def count(_):
        time.sleep(0.02)
        return threading.current_thread().name, torch.get_num_threads()

    def ask_a_new_thread():
        asked = []
        thread = threading.Thread(target=lambda: asked.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return asked[0], torch.get_num_threads(), torch.__config__.parallel_info()

    before = ask_a_new_thread()
    found = [*in_threads(count, range(6), at_once=2)]
    assert {threads for _, threads in found} == {2}
    assert len({name for name, _ in found}) == 2
    assert {threads for _, threads in in_threads(count, range(6), at_once=4)} == {1}
    assert ask_a_new_thread() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_is_raised_comes_after_those_before_it_and_later_ones_are_not_begun(error, at_once):
    begun, found = [], []

    def fails(item):
        begun.append(item)
        time.sleep(0.02)
        if item == 1:
            raise error("by design")
        return item

    with pytest.raises(error, match="by design"):
        found.extend(in_threads(fails, range(50), at_once))
    assert found == [0]
    assert len(begun) < 10
    assert not [t for t in threading.enumerate() if t.name.startswith("geomon_")]


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_item_is_not_kept_after_its_call(at_once):
    made = [torch.zeros(3) for _ in range(8)]
    alive = [weakref.ref(one) for one in made]
    results = in_threads(lambda one: float(one.sum()), made, at_once)
    del made
    counts = [sum(one() is not None for one in alive) for _ in results]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= at_once


def test_metrics_of_heads_are_measured_apart_from_those_of_hidden_states():
    hidden, *others = Evaluator(METRICS, 1).source_groups
    assert hidden == {
        "hidden",
        "last",
        "weights",
        "routing",
    }  # no metric of these reads the last tokens
    assert others == [{"attention"}, {"projection"}]
    assert Evaluator(ALL, 1).source_groups[0] == {"hidden", "weights", "routing"}
    assert Evaluator(select("qk_cosine"), 1).source_groups == [
        SOURCES - {"projection"},
        {"projection"},
    ]
    own = check_metrics({"both": lambda hidden, projected_query: 0.0})
    both = own | select("attention_entropy")
    assert Evaluator(both, 1).source_groups == [SOURCES - {"attention"}, {"attention"}]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_small_pieces_come_last_and_each_layer_has_all_of_its_own(count):
    several = layers(1) + [replace(whole_layer(), index=n) for n in range(1, count)]
    several[0] = replace(several[0], sources=frozenset({"hidden"}))
    seen = []

    def measure(parts):
        (layer,) = parts
        seen.append((layer.index, "hidden" in layer.captured))
        time.sleep(0.01)
        return LayerValues("", layer.index, None, failed=dict.fromkeys(layer.captured, "seen"))

    quick = {"weights", "routing"}
    apart = [
        frozenset({"hidden", "last", *quick}),
        frozenset({"attention"}),
        frozenset({"projection"}),
    ]
    found = [*in_pieces(measure, [(layer,) for layer in several], apart, 2)]
    assert [values.index for values in found] == [*range(count)]
    assert [values.failed.keys() for values in found] == [one.captured.keys() for one in several]
    assert sorted(seen[:count]) == [(index, True) for index in range(count)]
    assert len(seen) == count + 2 * (count - 1)


def here_or_not(_):
    time.sleep(0.01)
    return threading.current_thread() is threading.main_thread()


def test_no_thread_is_started_whose_stack_is_too_small_for_linear_algebra():
    before = threading.stack_size(2**20 - 2**12)
    try:
        assert all(in_threads(here_or_not, range(4), at_once=2))
        threading.stack_size(2**20)
        assert not any(in_threads(here_or_not, range(4), at_once=2))
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize(("had", "expected"), [(0, {True}), (1, {True}), (3, {False})])
def test_where_threads_cannot_be_had_everything_is_measured_once_all_the_same(
    had, expected, monkeypatch
):
    started = []

    def start(self):
        if len(started) >= had:
            raise RuntimeError("can't start new thread")
        started.append(self)
        begin(self)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    called = []

    def call(item):
        called.append(item)
        return item, here_or_not(item)

    found = [*in_threads(call, range(9), at_once=3)]
    assert [item for item, _ in found] == [*range(9)]
    assert sorted(called) == [*range(9)]
    assert {here for _, here in found} == expected
    assert not [t for t in threading.enumerate() if t.name.startswith("geomon_")]


def test_ctrl_c_while_threads_start_ends_those_that_have_started(monkeypatch):
    begin = threading.Thread.start

    def start(self):
        monkeypatch.undo()
        begin(self)
        monkeypatch.setattr(threading.Thread, "start", interrupted)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        [*in_threads(here_or_not, range(9), at_once=3)]
    assert not [t for t in threading.enumerate() if t.name.startswith("geomon_")]


def test_a_metric_of_ones_own_is_called_here_for_one_layer_after_another():
    seen = []

    def own(hidden):
        seen.append((threading.current_thread(), float(hidden[0, 0])))
        return 0.0

    many = layers()
    metrics = check_metrics(select("cosine") | {"own": own})
    evaluator = Evaluator(metrics, 1, strict=True)
    assert evaluator.layers_at_once(many, 400) == 1
    evaluator.evaluate(many, 400)
    here = threading.current_thread()
    assert seen == [(here, float(layer.captured["hidden"][0, 0])) for layer in many]


@pytest.mark.parametrize(
    ("threads", "rows", "width", "expected"),
    [
        (1, 4096, 128, 1), (2, 4096, 128, 2), (2, 4096, 1024, 2), (2, 4096, 2048, 1),
        (16, 4096, 128, 8), (16, 4096, 4096, 4), (16, 65_536, 1024, 1), (64, 256, 64, 8),
        (4, 4096, 1536, 2),
    ],
)  # fmt: skip
def test_wide_layers_get_several_threads_each(threads, rows, width, expected):
    layer = Layer(0, "layer", {"hidden": torch.empty(1, width)})
    with threadpoolctl.threadpool_limits(threads, user_api="openmp"):
        assert layers_at_once(layer, rows) == expected
