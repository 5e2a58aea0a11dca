"""Values that a plain loop logs stand in the reading of their step, and cost nothing elsewhere."""

import gc
import json
import math
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch

from geomon import every
from support.fingerprint import random_state
from support.models import batch
from support.scenarios import EXTRA, Scenario, Watched, advance, check, log, step

SECOND = {"schedule": every(2)}
LATE = "'loss' of step 0 came after its reading was recorded"
# Places at which the loss of a step can be logged.
PLACES = {
    "before": lambda s: [log(s, loss=torch.tensor(10.0 + s)), step(s)],
    "inside": lambda s: [step(s, loss=10.0 + s)],
    "after advance": lambda s: [advance(s), log(loss=10.0 + s), step(s)],
    "after": lambda s: [step(s), log(loss=10.0 + s)],
}
NUMBERS = {
    "a tensor of one": (torch.tensor([[2.5]]), 2.5),
    "an integer": (torch.tensor(3, dtype=torch.int64), 3.0),
    "bfloat16 with a graph": (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
    "of numpy": (np.float32(0.5), 0.5),
    "an array": (np.array([4.0]), 4.0),
    "a truth": (True, 1.0),
    "not a number": (float("nan"), None),
    "a tensor that is not a number": (torch.tensor(float("nan")), None),
    "none": (None, None),
}
WRONG = {
    "a tensor": (torch.zeros(2, 3), "got a tensor of shape [2, 3]"),
    "empty": (torch.zeros(0), "of shape [0]"),
    "complex": (torch.tensor(1j), "cannot be converted"),
    "three": (np.zeros(3), "got ndarray"),
    "text": ("2.5", "got text"),
    "a list": ([1.0], "got list"),
    "an object": (object(), "got object"),
}


def loss_of(values):
    return {"logged": [{"loss": value} for value in values]}


def each(place, *steps):
    return [event for number in steps for event in PLACES[place](number)]


SCENARIOS = {
    **{
        f"{place}, {source}": Scenario(
            each(place, *range(5)), [0, 2, 4],
            SECOND | {"probe": probe} | ({"log": ("loss",)} if place == "after" else {}),
            [] if probe is None else [EXTRA], loss_of([10.0, 12.0, 14.0]),
        )
        for place in PLACES
        for source, probe in (("inline", None), ("probe", batch(seed=7)))
    },
    **{
        f"a number: {name}": Scenario(
            [step(0, value=value)], [0], found={"logged": [{"value": number}]}
        )
        for name, (value, number) in NUMBERS.items()
    },
    **{
        f"no number: {name}": Scenario(
            [step(0, loss=value, fine=1.0), step(1, loss=value, fine=1.0)], [0, 1],
            said=[words],
            found={"logged": [{"loss": None, "fine": 1.0}] * 2, "finite": [["variance"]] * 2},
        )
        for name, (value, words) in WRONG.items()
    },
    **{
        f"no name: {name!r}": Scenario(
            [step(0, **{name: 1.0, "mean": 2.0, "encoder_layer_01": 3.0})], [0],
            said=[f"the value logged as {name!r} at step 0 cannot be read"],
            found={"logged": [{"mean": 2.0, "encoder_layer_01": 3.0}]},
        )
        for name in ("", "/", "a/", " a", "a\nb", "a//b")
    },
    "of accumulated batches the first": Scenario(
        [step(s, loss=10.0 * s + part) for s in range(3) for part in range(3)], [0, 2], SECOND,
        found=loss_of([0.0, 20.0]),
    ),
    "a value that comes late is waited for from then on": Scenario(
        [event for s in range(5) for event in (step(s), log(loss=float(s)), log(**{"a/": 1.0}))],
        [0, 2, 4], SECOND, [LATE, "'a/' of step 0 came after"],
        {"logged": [{}, {"loss": 2.0}, {"loss": 4.0}]},
    ),
    "names that never come": Scenario(
        [0, 1, 2, log(loss=2.0, once=1.0)], [0, 2], SECOND | {"log": ("loss", "once", "never")},
        ["log= asks for 'never', but nothing was logged"],
        {"logged": [dict.fromkeys(("loss", "once", "never")),
                    {"loss": 2.0, "once": 1.0, "never": None}]},
    ),
    "a reading that fails waits for none": Scenario(
        [0], [], {"metrics": {"fails": lambda hidden: 1 / 0}, "log": ("loss",), "strict": True},
        raises=(ZeroDivisionError, "division"),
    ),
    "before the first step a value needs its step": Scenario(
        [log(loss=1.0)], [], raises=(ValueError, r"log\(step, loss=loss\)"), read=[],
        said=["the monitor was given no step"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_value_stands_in_the_reading_of_its_step(tmp_path, caplog, name):
    watched = check(SCENARIOS[name], tmp_path, caplog)
    if name.startswith("a number"):
        line = json.loads((tmp_path / "readings.jsonl").read_text().splitlines()[-1])
        assert [line["training"]] == watched.logged


def test_a_reading_waits_no_longer_than_for_its_values_or_the_next_step(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch, log=("loss", "once"))
    found = []
    for event in (step(0), log(loss=1.0), log(once=1.0), step(1), advance(2), step(2)):
        event(watched)
        found.append(len(watched.shown))
    assert found == [0, 0, 1, 1, 2, 2]
    watched.monitor.close()
    assert watched.shown == [0, 1, 2]


@pytest.mark.usefixtures("own_metrics_in_background")
def test_with_a_background_the_value_is_of_the_step_that_was_read(tmp_path, monkeypatch):
    go, running = threading.Event(), torch.zeros(())

    def slow(hidden):
        assert go.wait(60)
        return hidden.norm()

    options = {"background": True, "metrics": {"slow": slow}, "log": ("loss",)}
    watched = Watched(tmp_path, monkeypatch, **options)
    for number in range(3):
        watched.step(number)
        running += 1.0  # in place, as running sums are
        watched.monitor.log(loss=running)
    assert not watched.shown
    go.set()
    watched.monitor.close()
    assert watched.logged == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]


class Asked(torch.Tensor):
    """A loss that says when the host waits for it."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_steps_that_are_not_due_do_nothing_with_a_value(tmp_path, monkeypatch):
    watched, loss = Watched(None, monkeypatch, **SECOND), torch.tensor(1.0).as_subclass(Asked)
    for number in (0, 1, 2, 3):
        with watched.monitor(number):
            watched.model(batch())
            Asked.asked.clear()
            watched.monitor.log(loss=loss)
            assert bool(Asked.asked) == (number % 2 == 0)
            assert not {"item", "__float__"} & set(Asked.asked)
    watched.monitor.log(loss=loss)  # after the `with` of a step that was not due
    assert Asked.asked == []
    assert watched.logged == [{"loss": 1.0}] * 2


def test_nothing_of_the_graph_is_kept_and_no_random_number_is_drawn(monkeypatch):
    watched, before = Watched(None, monkeypatch, log=("loss", "other")), random_state()
    with watched.monitor(0):
        output = watched.model(batch())
        loss = output.square().mean()  # its graph holds the output
    graph = weakref.ref(output)
    watched.monitor.log(loss=loss)
    del loss, output
    gc.collect()
    assert graph() is None
    watched.monitor.close()
    assert math.isfinite(watched.logged[0]["loss"])
    assert random_state() == before
