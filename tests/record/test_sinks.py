"""Contracts that every sink keeps; the tests find the sinks by themselves."""

import inspect
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import geomon.record.sinks
from geomon.record import Reading, Sink
from geomon.record.sinks import ChartLayout, Memory, TensorBoard, WandB, post_picture_to_writer

CLASSES = [
    found
    for _, found in inspect.getmembers(geomon.record.sinks, inspect.isclass)
    if found.__module__ == "geomon.record.sinks" and found not in (Sink, ChartLayout)
]


class Run:
    def __init__(self):
        self.rows, self.metrics = [], []

    def define_metric(self, name):
        self.metrics.append(name)

    def log(self, row):
        self.rows.append(row)


def reading(step: int) -> Reading:
    values = {
        "twonn/mean": 0.1 + step, "twonn/layer_01/std": 0.5, "qk/layer_01/head_0": 1.0,
        "qk/layer_01": math.nan,
    }  # fmt: skip
    return Reading(step, 1.0, 0.1, "inline", "train", 8, 1, "float32", values)


def build(kind, tmp_path):
    return kind(*{TensorBoard: [tmp_path], WandB: [Run()], Memory: []}[kind])


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
    tag = "twonn/mean"
    assert events.Tags()["tensors"] == ["custom_scalars__config__", tag]
    found = events.Tensors(tag)
    assert [event.step for event in found] == [0, 5]
    assert [event.tensor_proto.double_val[0] for event in found] == [0.1, 5.1]


def test_wandb_gets_one_row_for_each_reading_with_its_step():
    run = Run()
    sink = WandB(run)
    sink.write(reading(3))
    assert run.metrics == ["geomon/step"]
    assert run.rows == [{"twonn/mean": 3.1, "geomon/step": 3}]


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
    layout = ChartLayout()
    for step in range(2):
        layout.write_once(reading(step), [first, second])
    title, chart = "intrinsic dimension, mean over layers", ["twonn/mean$", "gride/mean/k32$"]
    assert len(first.layouts) == len(second.layouts) == 1
    assert first.layouts[0]["geomon"][title] == ["Multiline", chart]
    prefixed = Writer()
    ChartLayout("train/").write_once(reading(0), [prefixed])
    assert prefixed.layouts[0]["geomon"][f"train/{title}"] == [
        "Multiline", [f"train/{pattern}" for pattern in chart],
    ]  # fmt: skip


def test_a_picture_is_posted_with_its_channels_last():
    writer = Writer()
    post_picture_to_writer(writer, "profile/a", "pixels", 3)
    assert writer.images == [(("profile/a", "pixels", 3), {"dataformats": "HWC"})]
