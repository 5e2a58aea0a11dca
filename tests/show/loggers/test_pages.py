"""Pages of loggers: TensorBoard, functions, MLflow and trackio; what is drawn, and when."""

import math
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import PlainDecoder, batch
from msgspec.structs import replace
from shown import course_of
from tagged import TEXTS, raised_of, reading_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from geomon import Logger, MLflow, Monitor, TensorBoard, Trackio, select
from geomon.note import Note
from geomon.record import Sink
from geomon.record.sinks import parts_of
from geomon.show import Pictures
from geomon.show.loggers.board import BoardPages, BoardText
from geomon.show.loggers.history import SHARE, RunDrawer, RunHistory

CARDS = [
    "1 Intrinsic dimension", "2 anisotropy over depth", "3 intrinsic dimension by layer",
    "4 anisotropy by layer", "5 attention entropy by layer",
    "6 cosine of mean query and mean key by head", "7 attention entropy by head",
]  # fmt: skip


def reading(step, notes=(), **values):
    values = {"twonn/mean": 0.1 + step, "geomon/overhead": 0.1, **values}
    return reading_of(values, step, "inline", notes)


# -- what is kept of a run, and when it is drawn ---------------------------------------------------


def test_memory_grows_with_the_logarithm_of_the_run_and_alerts_are_kept():
    history = RunHistory()
    for step in range(300):
        history.add(reading(step, ["a note"], **{"qk_dot/layer_01": 1.0, "twonn/null": 60.0}))
    history.raised.append(raised_of("rank_collapse", 197))
    kept = history.readings()
    assert kept.alerts == history.raised
    steps = [each.step for each in kept]
    assert steps[:9] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert steps[-1] == 299
    assert len(steps) < 5 * math.log2(300)
    assert kept[-1].columns.keys() == {"twonn"}  # what is drawn
    assert kept[-1].column("twonn").whole == {"null": 60.0}


class Drawer(RunDrawer):
    """Notes what it draws: a number of parts at each reading."""

    def __init__(self, parts=1, seconds=0.0):
        super().__init__("drawing", first_cost=2.0)
        self.drawn, self.fails, self.parts, self.seconds = [], None, parts, seconds

    def _draw(self, readings, step):
        for number in range(self.parts):
            yield partial(self.draw, (step, number))

    def draw(self, part):
        self.drawn.append(part)
        Clock.now += self.seconds
        if self.fails is not None:
            raise self.fails


class Clock:
    BEGAN = 7000.0
    now = BEGAN


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", SHARE)
    monkeypatch.setattr("geomon.show.loggers.history.time.perf_counter", lambda: Clock.now)
    monkeypatch.setattr(Clock, "now", Clock.BEGAN)


def test_it_draws_at_first_then_each_time_the_step_has_doubled_and_once_at_the_end():
    drawer = Drawer()
    for step in (0, 1, 2, 8, 15, 17, 33, 34, 40, 68, 70):
        drawer.write(reading(step))
    drawer.close()
    drawer.close()
    assert [step for step, _ in drawer.drawn] == [0, 17, 34, 68, 70]
    Drawer().close()  # nothing was written


def test_it_draws_with_the_reading_after_an_alert_and_one_after_the_last_at_the_end():
    drawer, seen = Drawer(), []
    drawer._draw = lambda readings, step: iter([lambda: seen.append((step, readings.alerts))])
    alerts = [raised_of("rank_collapse", step) for step in (18, 43)]
    for step in (0, 16, 17):
        drawer.write(reading(step))
    drawer.alert(replace(alerts[0], courses=(course_of("a", 18),)))
    for step in (18, 19, 40, 41):
        drawer.write(reading(step))
    drawer.close()
    drawer.alert(alerts[1])
    drawer.close()
    assert [step for step, _ in seen] == [0, 16, 18, 40, 41, 41]
    assert [found for _, found in seen[1:]] == [[], alerts[:1], alerts[:1], alerts[:1], alerts]
    empty = Drawer()
    empty.alert(alerts[0])
    empty.close()  # without a reading there is nothing to draw
    assert not empty.drawn


def test_a_part_that_fails_keeps_no_other_back_and_is_made_again_as_the_step_doubles():
    drawer = Drawer(parts=2)
    drawer.fails = OSError("gone")
    for step in (16, 20, 32):
        if step == 20:
            drawer.write(reading(step))
            continue
        with pytest.raises(OSError, match="gone"):
            drawer.write(reading(step))
    assert drawer.drawn == [(16, 0), (16, 1), (32, 0), (32, 1)]


def test_drawings_take_a_small_share_of_the_run_but_the_last_one_is_made(clock):
    drawer = Drawer(seconds=1.0)  # 2 s are expected of the first part
    for step in range(0, 1000, 10):  # a second each
        Clock.now = Clock.BEGAN + step
        drawer.write(reading(step))
    assert [step for step, _ in drawer.drawn] == [0, 400, 800]
    drawer.close()
    assert drawer.drawn[-1] == (990, 0)


@given(times=st.lists(st.floats(0.0, 3e3), min_size=1, max_size=30), parts=st.integers(1, 9))
@settings(deadline=None)
def test_whatever_the_times_the_share_holds_and_the_end_is_whole(times, parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geomon.show.loggers.history.SHARE", SHARE)
        patch.setattr("geomon.show.loggers.history.time.perf_counter", lambda: Clock.now)
        patch.setattr(Clock, "now", Clock.BEGAN)
        drawer = Drawer(parts=parts, seconds=1.0)
        for number, passed in enumerate(times):
            Clock.now += passed
            before = len(drawer.drawn)
            drawer.write(reading(2**number))
            most = max(1, int(0.005 * (Clock.now - Clock.BEGAN)))  # the first is drawn at once
            assert len(drawer.drawn) in (before, *range(most + 1))
        drawer.close()
    last = 2 ** (len(times) - 1)
    assert [number for step, number in drawer.drawn if step == last][-parts:] == [*range(parts)]


def test_the_first_picture_comes_with_the_first_reading_and_the_next_when_there_is_time(clock):
    drawer = Drawer(parts=2, seconds=1.0)
    for passed in (1, 399, 401):  # 0.5 % of 400 is the second part's second, and the first's
        Clock.now = Clock.BEGAN + passed
        drawer.write(reading(passed))
    assert drawer.drawn == [(1, 0), (401, 0)]


def test_cards_come_as_the_step_doubles(make_readings):
    posted = []
    pictures = Pictures(lambda *given: posted.append(given))
    pictures.describe({"metrics": TEXTS})
    curves = {f"twonn/layer_{layer:02d}": [5.0] * 9 for layer in range(3)}
    for each in make_readings((0, 1, 16, 31), curves=curves, layers=2, heads=2):
        pictures.write(each)
    pictures.close()
    assert [(name, step) for name, _, step in posted] == [
        (name, step) for step in (0, 16, 31) for name in CARDS
    ]
    for _, image, _ in posted:
        assert (image.dtype, image.ndim) == (np.uint8, 3)
        assert image.std() > 5
    count = len(posted)
    pictures.close()
    assert len(posted) == count


# -- TensorBoard -----------------------------------------------------------------------------------


def events_of(folder):
    events = EventAccumulator(str(folder), {"images": 0, "tensors": 0})
    events.Reload()
    return events


class Writer:
    def __init__(self):
        self.texts, self.images, self.layouts, self.flushed = [], [], [], 0

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def add_image(self, name, image, step, **options):
        self.images.append((name, step, options))

    def add_custom_scalars(self, layout):
        self.layouts.append(layout)

    def flush(self):
        self.flushed = len(self.texts)


@pytest.mark.parametrize("options", [{}, {"pictures": False}])
def test_a_plain_loop_has_the_pages_of_the_callbacks(tmp_path, options):
    model, before = PlainDecoder(layers=2), {*threading.enumerate()}
    sink = TensorBoard(tmp_path, **options)
    assert str(sink) == "TensorBoard"
    metrics = select("twonn", "anisotropy", "attention_entropy", "attention_entropy_normalised")
    monitor = Monitor(
        model, metrics=metrics, directory=None, sinks=[sink], tokens=128, strict=True,
        schedule=lambda step: True,
    )  # fmt: skip
    for step in (0, 1):
        with monitor(step):
            model(batch(16, 64))
    monitor.close()
    assert not {*threading.enumerate()} - before  # no file is open that waits for more
    events = events_of(tmp_path)
    found = events.Tensors("~geomon/twonn")
    assert [event.step for event in found] == [0, 1]
    assert all(event.tensor_proto.dtype == 1 for event in found)  # single precision
    (layout,) = events.Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    assert [category.title for category in charts.category][-1] == "geomon"
    names = events.Tags()
    images = {name.partition("/")[2].partition(" ")[0] for name in names["images"]}
    assert images == (set() if options else {*"123457"})
    # The last words come as the sink is closed, before the files are.
    words = events.Tensors("~geomon/1 the run in words/text_summary")
    assert [event.step for event in words] == [0, 1]
    (table,) = events.Tensors("~geomon/4 model and options/text_summary")
    assert table.step == 0
    assert "| model | PlainDecoder |" in table.tensor_proto.string_val[0].decode()


def test_a_detail_that_does_not_exist_is_refused_before_a_file_is_made(tmp_path):
    for make in (partial(TensorBoard, tmp_path), partial(Logger, print)):
        with pytest.raises(ValueError, match="detail must be 'headline', 'layers' or a"):
            make(detail="layer")
    assert not list(tmp_path.iterdir())


def test_alerts_and_new_notes_are_text_at_their_steps(clock):
    writer = Writer()
    text = BoardText(lambda: [writer], name="Board")
    healthy = {"twonn": {"title": "dimension", "healthy": "3 to 5"}, "cosine": {"title": "cosine"}}
    text.describe({"a_b": "c|d", "metrics": healthy})
    text.write(reading(0, [Note("copies", "58 % of the rows are copies"), "another"]))
    text.write(reading(1, [Note("copies", "57 % of the rows are copies")]))
    text.alert(raised_of("rank_collapse", 5, "rank_collapse (layer 2): down to 1.2"))
    assert writer.flushed == len(writer.texts)  # it is shown at once
    text.write(reading(7, ["a third *note*, a_b"]))
    text.close()
    # The first words of the run wait for nothing.
    assert [step for name, _, step in writer.texts if name[8] == "1"] == [0, 7]
    assert [each for each in writer.texts if each[0][8] != "1"] == [
        (
            "~geomon/4 model and options",
            "| | |\n|---|---|\n| a\\_b | c\\|d |\n| metrics | 2: twonn, cosine |\n",
            0,
        ),
        ("~geomon/2 what is healthy", "- dimension: 3 to 5", 0),
        ("~geomon/3 notes", "- 58 % of the rows are copies\n- another", 0),
        ("~geomon/0 alerts", r"- rank\_collapse (layer 2): down to 1.2", 5),
        ("~geomon/3 notes", r"- a third \*note\*, a\_b", 7),
    ]


def test_the_run_in_words_is_told_at_first_as_it_doubles_and_at_the_end(make_readings):
    writer = Writer()
    text = BoardText(lambda: [writer], name="Board")
    text.describe({"metrics": TEXTS})
    for each in make_readings():
        text.write(each)
    text.close()
    words = [(step, words) for name, words, step in writer.texts if "in words" in name]
    assert [step for step, _ in words] == [0, 16, 32, 64, 128, 256, 512, 1024, 1500]
    assert "- intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, comp" in words[-1][1]
    assert all("Where to look" in text for _, text in words)


def test_a_page_that_fails_leaves_the_others_as_they_are(make_readings):
    class Broken(Writer):
        def add_text(self, *arguments):
            raise OSError("full")

    writer, logged = Broken(), []
    pages = BoardPages(
        "Board", lambda *row: logged.append(row), lambda: [writer], detail=["anisotropy"]
    )
    failed = []
    for part in parts_of([pages]):  # as a monitor calls them
        try:
            part.write(make_readings((16,))[0])
        except OSError:
            failed.append(str(part))
    assert failed == ["writing text for Board"]
    assert len(logged) == len(writer.layouts) == 1
    assert writer.images[-1][0] == "~geomon/9 anisotropy over depth"


# -- functions, MLflow and trackio -----------------------------------------------------------------

WORDS = "rank collapse (layer 2): look there (geomon alerts rank_collapse)"


def run_through(sink, make_readings):
    """Write a run with an alert, as a monitor does; returns its readings."""
    readings = make_readings((0, 200, 256), layers=2, heads=2)
    sink.describe({"model": "Decoder", "metrics": TEXTS})
    for each in readings:
        if each.step == 256:
            sink.alert(raised_of("rank_collapse", 230))
        sink.write(each)
    sink.close()
    sink.close()
    return readings


def test_functions_get_values_pictures_and_alerts(make_readings):
    rows, pictures, alerts, last = [], [], [], []
    sink = Logger(
        lambda values, step: rows.append((step, values)),
        picture=lambda name, image, step: pictures.append(name),
        alert=lambda *alert: alerts.append(alert),
        save=lambda: last.append(len(pictures)),
        name="Aim",
        detail=["anisotropy"],
    )
    assert isinstance(sink, Sink)
    assert [*map(str, (sink, *sink.parts()))] == [
        "Aim", "Aim", "sending alerts to Aim", "drawing pictures for Aim",
    ]  # fmt: skip
    readings = run_through(sink, make_readings)
    assert [step for step, _ in rows] == [each.step for each in readings]
    assert rows[-1][1]["geomon/twonn"] == 3.3
    assert alerts == [("geomon: rank collapse", WORDS, 230)]
    assert set(pictures) == {*CARDS, "9 anisotropy over depth"} - {CARDS[2]}
    assert last[0] == len(pictures)  # values are saved when all has been logged
    rows.clear()
    run_through(Logger(lambda values, step: rows.append(step)), make_readings)
    assert rows == [0, 200, 256]


@pytest.mark.parametrize(("given", "used"), [(None, "active"), ("mine", "mine")])
def test_mlflow_logs_to_the_run_that_is_given_or_active(given, used, monkeypatch):
    """By a stand-in for mlflow, which few machines have."""
    rows, images, tags = [], [], []
    client = SimpleNamespace(
        log_batch=lambda run_id, metrics: rows.append((run_id, metrics)),
        log_image=lambda run_id, image, key, step: images.append((run_id, image.ndim, key, step)),
        set_tag=lambda *tag: tags.append(tag),
    )
    active = SimpleNamespace(info=SimpleNamespace(run_id="active"))
    mlflow = SimpleNamespace(active_run=lambda: active, MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    entities = SimpleNamespace(Metric=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr("geomon.show.loggers.others.time.time", lambda: 12.3456)
    values = {f"own_{number}/mean": 1.0 for number in range(1500)}
    last = reading(16, **values)
    for pictures in ({"pictures": False}, {}):
        assert not images
        sink = MLflow(given, detail="layers", **pictures)
        sink.write(last)
        sink.alert(raised_of("rank_collapse", 18))
    assert str(sink) == "MLflow"
    assert [(run_id, len(metrics)) for run_id, metrics in rows[2:]] == [(used, 1000), (used, 503)]
    assert ("geomon/twonn", 16.1, 12345, 16) in rows[0][1]
    assert images == [(used, 3, "geomon/1 Intrinsic dimension", 16)]
    assert tags[1:] == [(used, "geomon: rank collapse", f"Step 18: {WORDS}")]


def test_mlflow_without_a_run_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: None))
    with pytest.raises(ValueError, match=r"no MLflow run is active: call mlflow\.start_run"):
        MLflow()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_has_every_value_the_pictures_and_the_alert(make_readings, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy")  # which mlflow-skinny comes without
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no MLflow run is active: call mlflow.start_run"):
        MLflow()
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "art").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        readings = run_through(MLflow(detail="layers"), make_readings)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "geomon/twonn")
    assert [(each.step, each.value) for each in history] == [
        (each.step, each.column("twonn").mean) for each in readings
    ]
    assert client.get_metric_history(run.info.run_id, "anisotropy/layer_01")
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["geomon: rank collapse"] == f"Step 230: {WORDS}"
    images = [path.name for path in tmp_path.rglob("*.png")]
    assert any("ntrinsic dimension" in name for name in images)


def test_trackio_has_every_value_the_pictures_and_the_alert(make_readings, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="test", name="a", auto_log_cpu=False, auto_log_gpu=False)
    readings = run_through(Trackio(run), make_readings)
    trackio.finish()
    (found,) = trackio.Api().runs("test")
    rows = trackio.SQLiteStorage.get_logs("test", found.name)
    values = {row["step"]: row["geomon/twonn"] for row in rows if "geomon/twonn" in row}
    assert values == {each.step: each.column("twonn").mean for each in readings}
    assert any("geomon/1 Intrinsic dimension" in row for row in rows)
    (alert,) = trackio.Api().alerts("test")
    assert (alert["title"], alert["text"], alert["step"]) == ("geomon: rank collapse", WORDS, 230)


@pytest.mark.parametrize("options", [{}, {"pictures": False}])
def test_trackio_gets_values_the_alert_and_pictures_where_they_are_wanted(options, monkeypatch):
    """By a stand-in for trackio, which few machines have."""
    rows, alerts = [], []
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Image=lambda image: image.ndim))
    run = SimpleNamespace(
        log=lambda values, step: rows.append((step, values)),
        alert=lambda title, text, step: alerts.append((title, text, step)),
    )
    sink = Trackio(run, **options)
    assert str(sink) == "trackio"
    sink.write(reading(16))
    sink.alert(raised_of("rank_collapse", 18))
    (step, values), *pictures = rows
    assert (step, values["geomon/twonn"]) == (16, 16.1)
    assert pictures == ([] if options else [(16, {"geomon/1 Intrinsic dimension": 3})])
    assert alerts == [("geomon: rank collapse", WORDS, 18)]
