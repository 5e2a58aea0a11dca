"""Contracts that every sink keeps; the tests find the sinks by themselves."""

import inspect
import math

import numpy as np
import pytest
from models import PlainDecoder, batch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import wandb_rows, work_offline

import geomon.record.sinks
from geomon import Monitor, select
from geomon.record import Reading, Sink, read
from geomon.record.headline import Charts
from geomon.record.sinks import (
    ChartLayout,
    LoggerSink,
    Memory,
    TensorBoard,
    WandB,
    post_to_each,
)

CLASSES = [
    found
    for _, found in inspect.getmembers(geomon.record.sinks, inspect.isclass)
    if found.__module__ == "geomon.record.sinks" and found not in (Sink, ChartLayout)
]


class Run:
    """The counting of W&B: what is logged below the counter is dropped."""

    def __init__(self):
        self.rows, self.metrics, self.dropped, self.step, self._row = [], [], [], 0, {}

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row, step=None, commit=None):
        if step is not None and step < self.step:
            self.dropped.append(row)
            return
        if step is not None and step > self.step:
            self.end_row()
            self.step = step
        self._row |= row
        if commit or (commit is None and step is None):
            self.end_row()
            self.step += 1

    def end_row(self):
        if self._row:
            self.rows.append(self._row)
        self._row = {}


def reading(step: int) -> Reading:
    values = {
        "twonn/mean": 0.1 + step, "twonn/layer_01/std": 0.5, "qk/layer_01/head_0": 1.0,
        "qk/layer_01": math.nan,
    }  # fmt: skip
    return Reading(step, 1.0, 0.1, "inline", "train", 8, 1, "float32", values)


def build(kind, tmp_path):
    arguments = {
        TensorBoard: [tmp_path],
        WandB: [Run()],
        Memory: [],
        LoggerSink: ["Logger", lambda values, step: None],
    }
    return kind(*arguments[kind])


@pytest.mark.parametrize("kind", CLASSES)
def test_every_sink_takes_readings_and_closes_twice(kind, tmp_path):
    sink = build(kind, tmp_path)
    assert isinstance(sink, Sink)
    sink.write(reading(0))
    sink.write(reading(1))
    sink.close()
    sink.close()


def test_tensorboard_holds_charted_values_to_the_last_bit(tmp_path):
    sink = TensorBoard(tmp_path)
    for step in (0, 5):
        sink.write(reading(step))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tag = "geomon/twonn"
    assert events.Tags()["tensors"] == ["custom_scalars__config__", tag]
    found = events.Tensors(tag)
    assert [event.step for event in found] == [0, 5]
    assert [event.tensor_proto.double_val[0] for event in found] == [0.1, 5.1]


# How a training logs to W&B itself: the step (or the counter) of its row after a training step.
HABITS = {
    "every step, by number": lambda step: {"step": step},
    "every step, counted": lambda step: {},
    "every fifth step": lambda step: {"step": step} if step % 5 == 4 else None,
    "every epoch of ten": lambda step: {"step": step // 10} if step % 10 == 9 else None,
    "never": lambda step: None,
    "rows in two calls": lambda step: {"commit": step % 2 == 1},
}


def log_as_a_training(run, sink, habit, steps=20):
    for step in range(steps):
        sink.write(reading(step))
        given = HABITS[habit](step)
        if given is not None:
            run.log({f"loss_{step}": float(step)}, **given)
    sink.close()


@pytest.mark.parametrize("habit", HABITS)
def test_nothing_is_lost_that_a_training_logs_to_wandb_itself(habit):
    run = Run()
    log_as_a_training(run, WandB(run), habit)
    run.end_row()
    assert not run.dropped
    kept = {name for row in run.rows for name in row if name.startswith("loss")}
    assert kept == {f"loss_{s}" for s in range(20) if HABITS[habit](s) is not None}
    rows = {row["geomon/step"]: row["geomon/twonn"] for row in run.rows if "geomon/step" in row}
    assert rows == {step: 0.1 + step for step in range(20)}


def test_the_newest_reading_is_shown_first():
    run = Run()
    sink = WandB(run)
    for step in range(5):
        sink.write(reading(step))
    run.log({"loss": 1.0})
    sink.write(reading(5))
    run.log({"loss": 1.0})
    assert [row["geomon/step"] for row in run.rows] == [0, 5]


def test_alone_every_reading_is_a_row_at_once():
    run = Run()
    sink = WandB(run, alone=True)
    sink.write(reading(3))
    assert run.rows == [{"geomon/twonn": 3.1, "geomon/step": 3}]
    assert run.metrics == [("geomon/step", None), ("geomon/twonn", "geomon/step")]


def test_a_run_to_which_nobody_else_logs_is_said_once(caplog):
    sink = WandB(Run())
    with caplog.at_level("WARNING", "geomon"):
        for step in range(20):
            sink.write(reading(step))
    assert [m for m in caplog.messages if "WandB(run, alone=True)" in m] == caplog.messages
    assert len(caplog.messages) == 1


def test_pictures_of_one_step_share_a_row():
    run = Run()
    sink = WandB(run, alone=False)
    sink.write(reading(3))
    for name in ("heads/a", "heads/b"):
        sink.post(name, np.zeros((2, 2, 3), dtype=np.uint8), 3)
    sink.close()
    run.end_row()
    assert [set(row) for row in run.rows] == [
        {"geomon/twonn", "geomon/step"},
        {"heads/a", "heads/b", "geomon/step"},
    ]


@pytest.mark.parametrize("habit", ["every step, by number", "every epoch of ten"])
def test_wandb_offline_has_every_row_of_both(habit, tmp_path, monkeypatch):
    import wandb

    work_offline(monkeypatch, tmp_path)
    run = wandb.init(project="test", dir=str(tmp_path))
    log_as_a_training(run, WandB(run), habit)
    run.log({"last": 1.0}, step=int(run.step))  # what is waiting has not moved the counter
    run.finish()
    rows = wandb_rows(tmp_path)
    names = {name for row in rows for name in row}
    assert {n for n in names if n.startswith("loss_")} == {
        f"loss_{s}" for s in range(20) if HABITS[habit](s) is not None
    }
    assert "last" in names
    assert sorted(int(r["geomon/step"]) for r in rows if "geomon/twonn" in r) == list(range(20))


def test_a_disabled_run_holds_nothing():
    import wandb

    run = wandb.init(project="test", mode="disabled")
    sink = WandB(run)
    log_as_a_training(run, sink, "every step, by number")
    sink.write(reading(30))  # nothing of the training's comes after it
    assert not sink._waiting
    run.finish()


@pytest.mark.parametrize("kind", [TensorBoard, WandB, LoggerSink])
def test_every_sink_shows_as_much_as_it_is_asked_for(kind, tmp_path):
    whole = reading(1)
    whole.values["cosine/layer_01"] = 0.5
    shown = {"geomon/twonn": 1.1, "cosine/layer_01": 0.5}
    given, run = [], Run()
    sink = {
        TensorBoard: lambda: TensorBoard(tmp_path, detail="layers"),
        WandB: lambda: WandB(run, alone=True, detail="layers"),
        LoggerSink: lambda: LoggerSink("L", lambda *row: given.append(row), detail="layers"),
    }[kind]()
    sink.write(whole)
    sink.close()
    if kind is TensorBoard:
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert set(events.Tags()["tensors"]) == {"custom_scalars__config__", *shown}
    else:
        assert (given or run.rows) == ([(shown, 1)] if given else [{**shown, "geomon/step": 1}])


@pytest.mark.parametrize("kind", [TensorBoard, WandB, LoggerSink])
def test_a_detail_that_does_not_exist_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match="detail is 'headline', 'layers' or a tuple of names"):
        kind(*{TensorBoard: [tmp_path], WandB: [], LoggerSink: ["L", max]}[kind], detail="layer")


def test_the_configuration_of_a_wandb_run_describes_the_monitored_one(tmp_path, monkeypatch):
    import wandb

    work_offline(monkeypatch, tmp_path)
    sink = WandB()  # before there is a run
    model = PlainDecoder(layers=1)
    metrics = select("variance")
    with wandb.init(project="test", dir=str(tmp_path), config={"own": 1}) as run:
        monitor = Monitor(model, metrics=metrics, directory=tmp_path, sinks=[sink], strict=True)
        with monitor(0):
            model(batch())
        monitor.close()
        (described,) = read(tmp_path).runs
        found = dict(run.config)
    assert found["own"] == 1
    assert found["geomon"]["metrics"] == described["metrics"]
    assert found["geomon"].keys() == monitor.describe().keys()


def test_memory_is_bounded():
    sink = Memory(most=3)
    for step in range(10):
        sink.write(reading(step))
    assert [r.step for r in sink.readings] == [7, 8, 9]


class Writer:
    def __init__(self):
        self.layouts, self.images = [], []

    def add_custom_scalars(self, charts):
        self.layouts.append(charts)

    def add_image(self, *arguments, **options):
        self.images.append((arguments, options))


def test_the_layout_of_charts_is_written_once_to_every_writer():
    first, second = Writer(), Writer()
    layout = ChartLayout(Charts())
    for step in range(2):
        layout.write_once(reading(step), [first, second])
    assert len(first.layouts) == len(second.layouts) == 1
    charts = [curves for _, curves in first.layouts[0]["geomon"].values()]
    assert charts == [["geomon/twonn$"], ["geomon/overhead$"]]


def test_a_logger_gets_readings_pictures_and_the_layout_once():
    logged, saved, writer = [], [], Writer()

    def log(values, step):
        logged.append((values, step))

    sink = LoggerSink("Board", log, save=lambda: saved.append(1), writers=lambda: [writer])
    for step in range(2):
        sink.write(reading(step))
    sink.post("profile/a", "pixels", 3)
    sink.close()
    assert logged == [({"geomon/twonn": 0.1 + step}, step) for step in range(2)]
    assert len(writer.layouts) == len(saved) == 1
    assert writer.images == [(("profile/a", "pixels", 3), {"dataformats": "HWC"})]
    assert str(sink) == "Board"
    plain = LoggerSink("CSV", log)
    plain.write(reading(2))
    plain.post("profile/a", "pixels", 3)
    plain.close()
    assert not plain.shows_pictures
    assert len(logged) == 3


def test_a_picture_is_posted_to_every_logger_whatever_one_of_them_does():
    def refuse():
        raise OSError("gone")

    writer = Writer()
    broken = LoggerSink("Broken", print, writers=refuse)
    board = LoggerSink("Board", print, writers=lambda: [writer])
    post = post_to_each([Memory(), broken, board])
    with pytest.raises(OSError, match="gone"):
        post("a", "pixels", 0)
    assert len(writer.images) == 1
    assert post_to_each([Memory(), LoggerSink("CSV", print)]) is None


def test_a_layout_that_could_not_be_written_is_written_with_the_next_reading():
    class Failing(Writer):
        def add_custom_scalars(self, charts):
            super().add_custom_scalars(charts)
            if len(self.layouts) == 1:
                raise OSError("gone")

    writer, layout = Failing(), ChartLayout(Charts())
    with pytest.raises(OSError, match="gone"):
        layout.write_once(reading(0), [writer])
    for step in (1, 2):
        layout.write_once(reading(step), [writer])
    assert len(writer.layouts) == 2
