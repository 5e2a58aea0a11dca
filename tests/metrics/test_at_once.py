"""Layers that are measured at once give what they give in turn, and nothing else changes."""

import contextlib
import threading
import time
from dataclasses import replace
from itertools import chain, repeat

import pytest
import threadpoolctl
import torch

from geomon.metrics import METRICS, MORE_METRICS, Evaluator, check_metrics, select
from support.measuring import Layer, tagged
from support.whole_layer import ROWS, whole_layer

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


class Seen:
    """A metric that keeps in which threads it was called, of how many each, for which layers."""

    def __init__(self, fails=None):
        self.threads, self.numbers, self.layers, self.fails = set(), set(), [], fails

    def __call__(self, hidden):
        self.threads.add(threading.current_thread())
        self.numbers.add(torch.get_num_threads())
        self.layers.append(layer := int(hidden[0, 0]))
        time.sleep(0.01)
        if self.fails is not None and layer == 1:
            raise self.fails
        return hidden.mean()

    def measure(self, count=9, rows=400):
        """Measure layers; each is known by its first number."""
        some = layers(count)
        for layer in some:
            layer.captured["hidden"][0, 0] = layer.index
        evaluator = Evaluator(check_metrics({"seen": self}), 1, strict=True, has_margins=False)
        return [values.index for values in evaluator.measure_layers(some, rows)]


def none_is_left():
    return not [each for each in threading.enumerate() if each.name.startswith("geomon")]


def test_every_metric_at_once_is_that_in_turn():
    several = [replace(whole_layer(), index=index) for index in range(2)]
    for layer in several:
        layer.captured["hidden"] = layer.captured["hidden"] * (1 + 0.1 * layer.index)
    evaluator = Evaluator(ALL, 1, strict=True)
    assert evaluator.layers_at_once(several, ROWS) == 2
    at_once = evaluator.evaluate(several, ROWS)
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert evaluator.layers_at_once(several, ROWS) == 1
        in_turn = evaluator.evaluate(several, ROWS)
    assert at_once.notes == in_turn.notes
    assert tagged(at_once.stacks) == pytest.approx(
        tagged(in_turn.stacks), rel=1e-12, abs=1e-12, nan_ok=True
    )


def test_a_metric_of_ones_own_is_called_here_for_one_layer_after_another():
    seen = Seen()
    assert seen.measure() == seen.layers == [*range(9)]
    assert seen.threads == {threading.current_thread()}
    assert seen.numbers == {4}


# A user's metric stands for those of geomon, which are measured beside the training.
in_threads = pytest.mark.usefixtures("own_metrics_in_background")


@in_threads
def test_each_layer_has_its_share_of_the_threads_and_nobody_else_has_fewer():
    def ask_a_new_thread():
        asked = []
        thread = threading.Thread(target=lambda: asked.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return asked, torch.get_num_threads(), torch.__config__.parallel_info()

    before = ask_a_new_thread()
    two, many = Seen(), Seen()
    assert two.measure(2) == [0, 1]
    assert (len(two.threads), two.numbers) == (2, {2})
    assert many.measure() == sorted(many.layers) == [*range(9)]
    assert (len(many.threads), many.numbers) == (4, {1})
    assert threading.current_thread() not in many.threads
    assert ask_a_new_thread() == before
    assert none_is_left()


@in_threads
@pytest.mark.parametrize("error", [ValueError("by design"), KeyboardInterrupt("by design")])
def test_an_error_ends_the_threads_and_later_layers_are_not_begun(error):
    seen = Seen(error)
    with pytest.raises(type(error), match="by design"):
        seen.measure(50)
    assert len(seen.layers) < 20
    assert none_is_left()


@in_threads
@pytest.mark.parametrize(("size", "is_here"), [(2**20 - 2**12, True), (2**20, False)])
def test_no_thread_is_started_whose_stack_is_too_small_for_linear_algebra(size, is_here):
    before, seen = threading.stack_size(size), Seen()
    try:
        seen.measure()
    finally:
        threading.stack_size(before)
    assert (threading.current_thread() in seen.threads) == is_here


def refuse(thread):
    raise RuntimeError("can't start new thread")


def interrupted(thread):
    raise KeyboardInterrupt


@in_threads
@pytest.mark.parametrize(
    ("had", "then", "raised"),
    [(0, refuse, None), (1, refuse, None), (4, refuse, None), (1, interrupted, KeyboardInterrupt)],
)
def test_everything_is_measured_once_if_threads_cannot_start_unless_by_ctrl_c(
    had, then, raised, monkeypatch
):
    seen, starts = Seen(), chain([threading.Thread.start] * had, repeat(then))

    def start(thread):
        next(starts)(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        assert seen.measure() == sorted(seen.layers) == [*range(9)]
        assert (seen.threads == {threading.current_thread()}) == (had < 4)
    assert none_is_left()


@pytest.mark.parametrize(
    ("threads", "rows", "width", "expected"),
    [
        (1, 4096, 128, 1), (2, 4096, 128, 2), (2, 4096, 1024, 2), (2, 4096, 2048, 1),
        (16, 4096, 128, 8), (16, 4096, 4096, 4), (16, 65_536, 1024, 1), (64, 256, 64, 8),
        (4, 4096, 1536, 2),
    ],
)  # fmt: skip
def test_wide_layers_get_several_threads_each(threads, rows, width, expected):
    evaluator = Evaluator(select("cosine"), 1)
    with threadpoolctl.threadpool_limits(threads, user_api="openmp"):
        assert evaluator.layers_at_once(layers(9, width), rows) == expected
