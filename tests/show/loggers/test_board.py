"""Pages of TensorBoard, as a plain loop has them: values, layout, pictures and text."""

import numpy as np
import pytest
from models import PlainDecoder, batch
from tagged import alert_of, reading_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from geomon import Monitor, TensorBoard, select
from geomon.note import Note
from geomon.show.loggers.board import BoardPages, BoardText


def reading(step, notes=(), **values):
    values = {"twonn/mean": 0.1 + step, **values}
    return reading_of(values, step, "inline", notes)


def events_of(folder):
    events = EventAccumulator(str(folder), {"images": 0, "tensors": 0})
    events.Reload()
    return events


def texts_of(folder, name):
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events_of(folder).Tensors(f"~geomon/{name}/text_summary")
    ]


class Writer:
    def __init__(self):
        self.texts, self.images, self.layouts = [], [], []

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def add_image(self, name, image, step, **options):
        self.images.append((name, step, options))

    def add_custom_scalars(self, layout):
        self.layouts.append(layout)


def test_it_holds_charted_values_in_single_precision(tmp_path):
    sink = TensorBoard(tmp_path, pictures=False)
    for step in (0, 5):
        sink.write(reading(step))
    sink.close()
    sink.close()
    found = events_of(tmp_path).Tensors("~geomon/twonn")
    assert [event.step for event in found] == [0, 5]
    values = [event.tensor_proto.float_val[0] for event in found]
    assert values == [np.float32(0.1), np.float32(5.1)]


def test_a_detail_that_does_not_exist_is_refused_before_a_file_is_made(tmp_path):
    with pytest.raises(ValueError, match="detail is 'headline', 'layers' or a tuple of names"):
        TensorBoard(tmp_path, detail="layer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pictures", [True, False])
def test_a_plain_loop_has_the_pages_of_the_callbacks(tmp_path, pictures):
    model = PlainDecoder(layers=2)
    sink = TensorBoard(tmp_path, pictures=pictures)
    metrics = select("twonn", "anisotropy", "attention_entropy", "attention_entropy_normalised")
    monitor = Monitor(
        model, metrics=metrics, directory=None, sinks=[sink], tokens=128, strict=True,
        schedule=lambda step: True,
    )  # fmt: skip
    for step in (0, 16):
        with monitor(step):
            model(batch(16, 64))
    monitor.close()
    found = events_of(tmp_path).Tags()
    (layout,) = events_of(tmp_path).Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    assert [category.title for category in charts.category][-1] == "geomon"
    images = {name.partition("/")[2].partition(" ")[0] for name in found["images"]}
    assert images == ({*"123457"} if pictures else set())
    texts = {name for name in found["tensors"] if name.endswith("text_summary")}
    assert {f"~geomon/{name}/text_summary" for name in (
        "1 the run in words", "4 model and options",
    )} <= texts  # fmt: skip
    ((step, table),) = texts_of(tmp_path, "4 model and options")
    assert step == 0
    assert "| model | PlainDecoder |" in table


def test_alerts_and_new_notes_are_text_at_their_steps():
    writer = Writer()
    text = BoardText(lambda: [writer])
    alert = alert_of("rank_collapse", "rank collapse (layer 2): down to 1.2")
    text.write(reading(0, [Note("copies", "58% of the rows are copies"), "another"]))
    text.write(reading(1, [Note("copies", "57% of the rows are copies"), alert]))
    text.write(reading(2, ["a third *note*, a_b"]))
    text.close()
    found = [(name, words, step) for name, words, step in writer.texts if name[8] != "1"]
    assert found == [
        ("~geomon/3 notes", "- 58% of the rows are copies\n- another", 0),
        ("~geomon/2 alerts", "- rank collapse (layer 2): down to 1.2", 1),
        ("~geomon/3 notes", r"- a third \*note\*, a\_b", 2),
    ]


def test_the_run_in_words_is_told_at_first_as_it_doubles_and_at_the_end(make_readings):
    writer = Writer()
    text = BoardText(lambda: [writer])
    for each in make_readings():
        text.write(each)
    text.close()
    words = [(step, words) for name, words, step in writer.texts if "in words" in name]
    assert [step for step, _ in words] == [0, 16, 32, 64, 128, 256, 512, 1024, 1500]
    assert "compressing since step 256, 28 % below its peak 7.4" in words[-1][1]
    assert all("Where to look" in text for _, text in words)


def test_a_page_that_fails_leaves_the_others_as_they_are(make_readings):
    class Broken(Writer):
        def add_text(self, *arguments):
            raise OSError("full")

    writer, logged = Broken(), []
    pages = BoardPages("Board", lambda *row: logged.append(row), lambda: [writer])
    with pytest.raises(ExceptionGroup, match="Board failed in part: OSError: full") as raised:
        pages.write(make_readings((16,))[0])
    assert [str(error) for error in raised.value.exceptions] == ["full"]
    assert len(logged) == len(writer.layouts) == 1
    assert len(writer.images) > 3
