"""Values that a plain loop logs stand in the reading of their step, and cost nothing elsewhere."""

import gc
import json
import logging
import math
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from fingerprint import random_state
from measuring import watching
from models import PlainDecoder, batch

from geomon import every, read


def started(directory=None, **options):
    model = PlainDecoder()
    monitor, memory = watching(model, directory=directory, **{"schedule": every(2), **options})
    return monitor, model, memory


def logged(reading):
    return {tag: v for tag, v in reading.values.items() if tag.startswith("training/")}


@pytest.mark.parametrize("probe", [None, batch(seed=7)], ids=["inline", "probe"])
@pytest.mark.parametrize("place", ["before", "inside", "after", "advance"])
def test_a_value_is_in_the_reading_of_its_step(tmp_path, place, probe):
    option = {"log": ("loss",)} if place == "after" else {}
    monitor, model, memory = started(tmp_path, probe=probe, **option)
    for step in range(5):
        if place == "before":
            monitor.log(step, loss=torch.tensor(10.0 + step))
        if place == "advance":
            monitor.advance(step)
            monitor.log(loss=10.0 + step)
        with monitor(step):
            loss = model(batch()).mean() * 0 + 10.0 + step
            if place == "inside":
                monitor.log(loss=loss)
        if place == "after":
            monitor.log(loss=loss)
            assert len(memory.readings) == step // 2 + 1  # it waits no longer
    monitor.close()
    expected = {step: {"training/loss": 10.0 + step} for step in (0, 2, 4)}
    assert {r.step: logged(r) for r in memory.readings} == expected
    assert {r.step: logged(r) for r in read(tmp_path)} == expected


def test_a_reading_without_its_value_is_recorded_at_the_next_step_and_at_the_end(caplog):
    monitor, model, memory = started(log=("loss", "once", "never"))
    with monitor(0):
        model(batch())
    assert not memory.readings
    monitor.advance(1)
    assert [r.step for r in memory.readings] == [0]
    with monitor(2):
        model(batch())
    monitor.log(loss=2.0, once=1.0)
    assert len(memory.readings) == 1
    monitor.close()
    assert [logged(r)["training/loss"] for r in memory.readings][1] == 2.0
    assert all(math.isnan(logged(r)["training/never"]) for r in memory.readings)
    assert math.isnan(logged(memory.readings[0])["training/loss"])
    said = [text for text in caplog.messages if "nothing was logged" in text]
    assert len(said) == 1
    assert "'never'" in said[0]
    assert "'loss'" not in said[0]
    assert "'once'" not in said[0]


def test_a_reading_that_fails_waits_for_no_value():
    def fails(hidden):
        raise ValueError("on purpose")

    monitor, model, _ = started(metrics={"fails": fails}, log=("loss",))
    with pytest.raises(ValueError, match="on purpose"), monitor(0):
        model(batch())


def test_a_value_that_comes_late_is_said_once_and_waited_for_from_then_on(caplog):
    monitor, model, memory = started()
    for step in range(5):
        with monitor(step):
            loss = model(batch()).mean().detach() * 0 + step
        monitor.log(loss=loss)
        monitor.log(**{"a/": 1.0})  # which is no name, early or late
    assert [logged(r) for r in memory.readings] == [
        {}, {"training/loss": 2.0}, {"training/loss": 4.0}
    ]  # fmt: skip
    said = [text for text in caplog.messages if "'loss'" in text]
    assert len(said) == 1
    assert said[0].startswith("'loss' of step 0 came after its reading was recorded")
    assert "log=('loss',)" in said[0]


def test_of_accumulated_batches_the_value_of_the_first_is_recorded_and_no_other_is_late(caplog):
    monitor, model, memory = started()
    for step in range(3):
        for part in range(3):
            with monitor(step):
                model(batch())
                monitor.log(loss=10.0 * step + part)
    assert [logged(r)["training/loss"] for r in memory.readings] == [0.0, 20.0]
    assert caplog.messages == []


@pytest.mark.usefixtures("own_metrics_in_background")
def test_with_a_background_the_value_is_of_the_step_that_was_read():
    go = threading.Event()

    def slow(hidden):
        assert go.wait(60)
        return hidden.norm()

    monitor, model, memory = started(
        background=True, metrics={"slow": slow}, schedule=every(1), log=("loss",)
    )
    running = torch.zeros(())
    for step in range(3):
        with monitor(step):
            model(batch())
        running += 1.0  # in place, as running sums are
        monitor.log(loss=running)
    assert not memory.readings
    go.set()
    monitor.close()
    assert [(r.step, logged(r)) for r in memory.readings] == [
        (step, {"training/loss": step + 1.0}) for step in range(3)
    ]


class Watched(torch.Tensor):
    """A loss that says when the host waits for it."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_steps_that_are_not_due_do_nothing_with_a_value(monkeypatch):
    monkeypatch.setattr(Watched, "asked", [])
    monitor, model, memory = started()
    loss = torch.tensor(1.0).as_subclass(Watched)
    for step in range(4):
        with monitor(step):
            model(batch())
            Watched.asked.clear()
            monitor.log(loss=loss)
            if step % 2:
                assert Watched.asked == []
            else:
                assert Watched.asked
                assert not {"item", "__float__"} & set(Watched.asked)
    monitor.log(loss=loss)  # after the `with` of a step that was not due
    assert Watched.asked == []
    assert [logged(r) for r in memory.readings] == [{"training/loss": 1.0}] * 2


def test_nothing_of_the_graph_is_kept_and_no_random_number_is_drawn():
    monitor, model, memory = started(log=("loss", "other"))
    before = random_state()
    with monitor(0):
        output = model(batch())
        loss = output.square().mean()  # its graph holds the output
    graph = weakref.ref(output)
    monitor.log(loss=loss)
    del loss, output
    gc.collect()
    assert graph() is None
    monitor.close()
    assert logged(memory.readings[0])["training/loss"] > 0
    assert random_state() == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(3, dtype=torch.int64), 3.0),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (np.float32(0.5), 0.5),
        (np.array([4.0]), 4.0),
        (True, 1.0),
        (float("nan"), math.nan),
        (torch.tensor(float("nan")), math.nan),
        (None, math.nan),
    ],
)
def test_a_number_of_any_kind_is_a_value(tmp_path, caplog, value, expected):
    monitor, model, memory = started(tmp_path)
    with monitor(0):
        model(batch())
        monitor.log(value=value)
    monitor.close()
    assert logged(memory.readings[0]) == pytest.approx({"training/value": expected}, nan_ok=True)
    assert caplog.messages == []
    line = json.loads((tmp_path / "readings.jsonl").read_text().splitlines()[-1])
    assert line["training"]["value"] == (None if math.isnan(expected) else expected)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.zeros(2, 3), "got a tensor of shape [2, 3]"), (torch.zeros(0), "of shape [0]"),
        (torch.tensor(1j), "cannot be converted"), (np.zeros(3), "got ndarray"),
        ("2.5", "got text"), ([1.0], "got list"), (object(), "got object"),
    ],
    ids=["tensor", "empty", "complex", "array", "text", "list", "object"],
)  # fmt: skip
def test_a_value_that_is_no_number_is_one_warning(caplog, wrong, words):
    monitor, model, memory = started()
    for step in (0, 2):
        with monitor(step):
            model(batch())
            monitor.log(loss=wrong, fine=1.0)
    for reading in memory.readings:
        assert math.isnan(logged(reading)["training/loss"])
        assert logged(reading)["training/fine"] == 1.0
        assert not math.isnan(reading.values["variance/mean"])
    said = [text for text in caplog.messages if "'loss'" in text]
    assert len(said) == len(caplog.messages) == 1
    assert "cannot be read" in said[0]
    assert words in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize("name", ["", "/", "a/", " a", "a\nb", "a//b"])
def test_a_name_that_is_none_is_refused_in_the_options_and_a_warning_in_a_run(caplog, name):
    with pytest.raises(ValueError, match="cannot name a value") as error:
        started(log=(name,))
    assert "\n" not in str(error.value)
    monitor, model, memory = started()
    with caplog.at_level(logging.WARNING, "geomon"), monitor(0):
        model(batch())
        monitor.log(**{name: 1.0, "mean": 2.0, "encoder_layer_01": 3.0})
    assert logged(memory.readings[0]) == {"training/mean": 2.0, "training/encoder_layer_01": 3.0}
    (said,) = [text for text in caplog.messages if "cannot name a value" in text]
    assert said.startswith(f"the value logged as {name!r} at step 0 cannot be read")


def test_before_the_first_step_a_value_needs_its_step():
    monitor, _, _ = started()
    with pytest.raises(ValueError, match=r"log\(step, loss=loss\)"):
        monitor.log(loss=1.0)
