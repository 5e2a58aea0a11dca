"""Every sink shows each reading once, each alert, pictures at their times; and texts.

W&B, which counts rows, has a file of its own.
"""

import gc
import math
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geomon import Logger, MLflow, Reading, Sink, TensorBoard
from geomon.note import Note
from geomon.show import Pictures
from geomon.show.loggers.parts import FIRST_SHARE, SHARE
from support.loggers import LOGGERS, SINKS, Shown, events_of
from support.readings import TEXTS, raised_of, reading_of

STEPS = (0, 200, 256)
WORDS = "rank collapse (layer 2): look there (geomon alerts rank_collapse)"
CARDS = {
    "1 Intrinsic dimension", "2 anisotropy over depth", "4 anisotropy by layer",
    "5 attention entropy by layer", "6 cosine of mean query and mean key by head",
    "7 attention entropy by head", "9 anisotropy over depth",
}  # fmt: skip


@pytest.fixture
def readings(make_readings, monkeypatch):
    """Three readings, and pictures that are not drawn: approved pages hold how they look."""
    monkeypatch.setattr("geomon.show.figures.card", lambda panel: panel)
    image = np.zeros((8, 8, 3), np.uint8)
    monkeypatch.setattr("geomon.show.figures.as_image", lambda panel: image)
    return make_readings(STEPS, layers=2, heads=2)


@pytest.fixture
def make_sink(tmp_path, monkeypatch):
    """Make a sink by name, and a function that tells what it has shown.

    Few machines have MLflow and trackio, which are replaced by stand-ins.
    """

    def make(name, folder="run", **options):
        return SINKS[name](tmp_path / folder, monkeypatch, **options)

    return make


def run_through(sink, readings):
    """Write a run with an alert, as a monitor does."""
    assert isinstance(sink, Sink)
    if hasattr(sink, "describe"):
        sink.describe({"model": "Decoder", "metrics": TEXTS})
    for each in readings:
        if each.step == STEPS[-1] and hasattr(sink, "alert"):
            sink.alert(raised_of("rank_collapse", 230))
        sink.write(each)
    sink.close()
    sink.close()


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_has_every_reading_and_alert_once_and_the_pictures(name, readings, make_sink):
    options, before = {"detail": ["anisotropy"]} if name in LOGGERS else {}, threading.enumerate()
    sink, shown = make_sink(name, **options)
    assert name not in LOGGERS or str(sink) == name
    run_through(sink, readings)
    assert set(threading.enumerate()) <= set(before)  # no file is open that waits for more
    found = shown()
    values = [(step, pytest.approx(row["geomon/twonn"])) for step, row in found.rows]
    assert values == [(each.step, each.column("twonn").mean) for each in readings]
    assert [(step, words.replace("\\", "")) for step, words in found.alerts] == [(230, WORDS)]
    assert name not in LOGGERS or found.counts == [(230, 1)]
    whole = [(card, step) for step in STEPS for card in CARDS] if name in LOGGERS else []
    pictures = [(card.replace("-", " "), step) for card, step in found.pictures]
    assert sorted(card for card in pictures if card[1] == STEPS[-1]) == sorted(whole[-len(CARDS) :])
    assert len({*pictures}) == len(pictures)
    assert {step for _, step in pictures} == {step for _, step in whole}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_detail_adds_layers_and_pictures_can_be_left_out(name, readings, make_sink, tmp_path):
    sink, shown = make_sink(name, detail="layers", pictures=False)
    run_through(sink, readings)
    assert all("anisotropy/layer_01" in {tag.lstrip("~") for tag in row} for _, row in shown().rows)
    assert shown().pictures == []
    with pytest.raises(ValueError, match="detail must be 'headline', 'layers' or a tuple of names"):
        make_sink(name, "new", detail="layer")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", LOGGERS)
def test_each_part_shows_its_own_without_the_others(name, readings, make_sink):
    """A monitor calls the parts one by one, and goes on without one that fails."""
    sink, shown = make_sink(name)
    run_through(sink, readings)
    whole, of_parts = shown(), Shown([], [], [], [])
    assert [str(part) for part in sink.parts()].count(name) <= 1  # a message says which one fails
    for number in range(len(sink.parts())):
        one, of_one = make_sink(name, f"part {number}")
        part = one.parts()[number]
        run_through(part, readings)
        one.close()
        for found, own in zip(of_parts, of_one(), strict=True):
            found.extend(own)
    steps, of_whole = ([step for step, _ in each.rows] for each in (of_parts, whole))
    assert steps == of_whole
    assert of_parts.alerts == whole.alerts
    assert of_parts.counts == whole.counts == [(230, 1)]
    assert sorted(of_parts.pictures) == sorted(whole.pictures)


def test_many_values_are_handed_to_mlflow_in_batches_and_it_needs_a_run(make_sink, monkeypatch):
    sink, shown = make_sink("MLflow", detail="layers", pictures=False)
    sink.write(reading_of({f"own_{number}/mean": 1.0 for number in range(1500)}, 16))
    ((step, row),) = shown().rows
    assert (step, len(row)) == (16, 1501)
    for options in ({"run_id": "active", "active": "another"}, {"run_id": None}):
        sink, shown = make_sink("MLflow", pictures=False, **options)
        run_through(sink, [reading_of({"twonn/mean": 3.0}, 8)])
        assert [step for step, _ in shown().rows] == [8]  # of the run that was asked for
    mlflow = type("mlflow", (), {"active_run": lambda: None})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(ValueError, match=r"no MLflow run is active: call mlflow\.start_run"):
        MLflow()


# -- when pictures are drawn -----------------------------------------------------------------------


class Clock:
    """A clock in seconds that stands still unless a test or a picture moves it."""

    now = 7000.0


@pytest.fixture
def clock(monkeypatch):
    """The clock of pictures that are not drawn, within the shares of the time that users have."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("geomon.show.loggers.parts.FIRST_SHARE", FIRST_SHARE)
    monkeypatch.setattr("geomon.show.loggers.parts.SHARE", SHARE)
    monkeypatch.setattr("geomon.show.figures.card", lambda panel: panel)
    monkeypatch.setattr("geomon.show.figures.as_image", lambda panel: panel)
    return clock


class Drawn:
    """Pictures; each takes some seconds of a clock.

    Attributes:
        posted: Step, number and panel of each picture.
        fails: Whether posting a picture fails. Defaults to False.
    """

    def __init__(self, clock, *, seconds=0.0):
        self.posted, self.clock, self.seconds, self.fails = [], clock, seconds, False
        self.sink = Pictures(self.post)

    def post(self, name, panel, step):
        self.posted.append((step, int(name[0]), panel))
        self.clock.now += self.seconds
        if self.fails:
            raise OSError("gone")

    def write(self, step, *, cards=1):
        """Write a reading; one card of it is drawn, or three."""
        values = {"twonn/mean": 0.1 + step}
        values |= {f"anisotropy/layer_{n:02d}": 0.5 for n in range(3 * (cards > 1))}
        self.sink.write(reading_of(values, step))

    @property
    def places(self):
        return [(step, card) for step, card, _ in self.posted]


# Seconds of a drawing; cards; steps, with the second of each; which step and card is drawn.
TIMES = {
    "at first, each time the step has doubled, and at the end": (
        0.0, 1, [(1e6 * step, step) for step in (0, 1, 2, 8, 15, 17, 33, 34, 40, 68, 70)],
        [(step, 1) for step in (0, 17, 34, 68, 70)],
    ),
    "a small share of the run, and the last one": (
        1.0, 1, [(step, step) for step in range(0, 1000, 10)],
        [(step, 1) for step in (0, 210, 420, 840, 990)],
    ),
    # 3 % of 67 s is the second card's second, and the first's; then 0.5 %, where it has stopped.
    "each once in 3 % of the time, and then in 0.5 %": (
        1.0, 3, [(n, n) for n in (1, 66, 68, 99, 101, 134, 334, 336, 536, 736, 900)],
        [(1, 1), (68, 1), (101, 2), (134, 4), (336, 1), (536, 2), (736, 4),
         *((900, card) for card in (1, 2, 4))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMES)
def test_pictures_are_drawn_when_there_is_time(name, clock):
    seconds, cards, times, places = TIMES[name]
    drawn = Drawn(clock, seconds=seconds)
    drawn.sink.close()  # nothing was written
    for passed, step in times:
        clock.now = 7000.0 + passed
        drawn.write(step, cards=cards)
    drawn.sink.close()
    drawn.sink.close()
    assert drawn.places == places


def test_it_draws_with_the_reading_after_an_alert_and_one_after_the_last_at_the_end(clock):
    drawn = Drawn(clock)
    for step in (0, 16, 17):
        drawn.write(step)
    drawn.sink.alert(raised_of("rank_collapse", 18))
    for step in (18, 19, 40, 41):
        drawn.write(step)
    drawn.sink.close()
    drawn.sink.alert(raised_of("rank_collapse", 43))
    drawn.sink.close()
    alerts = [[], [], [18], [18], [18], [18, 43]]
    assert [step for step, *_ in drawn.posted] == [0, 16, 18, 40, 41, 41]
    assert [[at for at, _ in panel.alerts] for *_, panel in drawn.posted] == alerts
    empty = Drawn(clock)
    empty.sink.alert(raised_of("rank_collapse", 18))
    empty.sink.close()  # without a reading there is nothing to draw
    assert not empty.posted


def test_a_card_that_fails_keeps_no_other_back_and_is_drawn_again_as_the_step_doubles(clock):
    drawn = Drawn(clock)
    drawn.fails = True
    for step in (16, 32):
        with pytest.raises(OSError, match="gone"):
            drawn.write(step, cards=3)
        drawn.write(step + 4, cards=3)
    assert drawn.places == [(step, card) for step in (16, 32) for card in (1, 2, 4)]


@given(st.lists(st.floats(0.0, 3e3), min_size=1, max_size=30))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_share_of_time_holds_and_the_last_drawing_is_whole(clock, times):
    drawn, began = Drawn(clock, seconds=1.0), clock.now
    for number, passed in enumerate(times):
        clock.now += passed
        before = len(drawn.posted)
        drawn.write(2**number, cards=3)
        most = max(1, int(0.03 * (clock.now - began)))  # the first is drawn at once
        assert len(drawn.posted) in (before, *range(most + 1))
    drawn.sink.close()
    last = 2 ** (len(times) - 1)
    assert drawn.places[-3:] == [(last, card) for card in (1, 2, 4)]


def alive():
    gc.collect()
    return sum(isinstance(each, Reading) for each in gc.get_objects())


def test_memory_grows_with_the_logarithm_of_the_run(clock):
    drawn, before = Drawn(clock), alive()
    for step in range(300):
        drawn.write(step)
    drawn.posted.clear()
    assert alive() - before < 5 * math.log2(300)
    drawn.sink.close()
    ((_, _, panel),) = drawn.posted
    assert panel.lines[0].x == [
        *range(7), 8, 10, 12, 15, 18, 22, 26, 31, 37, 44, 52, 62, 73, 86, 102, 121, 143, 169, 199,
        235, 277, 299,
    ]  # fmt: skip


# -- TensorBoard -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_alerts_and_new_notes_are_text_at_their_steps(tmp_path):
    sink = TensorBoard(tmp_path, pictures=False)
    healthy = {"twonn": {"title": "dimension", "healthy": "3 to 5"}, "cosine": {"title": "cosine"}}
    sink.describe({"a_b": "c|d", "metrics": healthy})
    copies = [Note("copies", f"{share} % of the rows are copies") for share in (58, 57)]
    for step, notes in ((0, [copies[0], "b"]), (1, [copies[1]]), (7, ["a third *note*, a_b"])):
        if step == 1:  # nobody waits for the end of a run
            assert events_of(tmp_path)["~geomon/twonn"] == [(0, 3.0)]
        if step == 7:
            sink.alert(raised_of("rank_collapse", 5, "rank_collapse (layer 2): down to 1.2"))
            at_once = events_of(tmp_path)["~geomon/0 alerts"]
        sink.write(reading_of({"twonn/mean": 3.0}, step, notes=notes))
    assert at_once == [(5, rb"- rank\_collapse (layer 2): down to 1.2")]
    sink.close()
    found = events_of(tmp_path)
    # The first words of the run wait for nothing.
    assert [step for step, _ in found["~geomon/1 the run in words"]] == [0, 7]
    table = b"|  |  |\n|---|---|\n| a\\_b | c\\|d |\n| metrics | 2: twonn, cosine |\n"
    assert found["~geomon/4 model and options"] == [(0, table)]
    assert found["~geomon/2 what is healthy"] == [(0, b"- dimension: 3 to 5")]
    assert found["~geomon/3 notes"] == [
        (0, b"- 58 % of the rows are copies\n- b"), (7, rb"- a third \*note\*, a\_b"),
    ]  # fmt: skip


def test_the_run_in_words_is_told_at_first_as_it_doubles_and_at_the_end(make_readings, tmp_path):
    sink = TensorBoard(tmp_path, pictures=False)
    sink.describe({"metrics": TEXTS})
    for each in make_readings():
        sink.write(each)
    sink.close()
    words = events_of(tmp_path)["~geomon/1 the run in words"]
    assert [step for step, _ in words] == [0, 16, 32, 64, 128, 256, 512, 1024, 1500]
    last = words[-1][1].decode()
    assert last.startswith("|  | start | peak or low | now | trend |\n|---|---|---|---|---|\n")
    row = "| intrinsic dimension | 2.5 ± 0.1 | peak 7.4 ± 0.1 at step 256 | 5.3 ± 0.1 | comp"
    assert row in last
    assert all("Where to look" in text.decode() for _, text in words)


def test_functions_are_enough_for_a_logger_and_values_are_saved_last(readings):
    rows, pictures, saved = [], [], []
    run_through(Logger(lambda values, step: rows.append(step)), readings)
    assert rows == [*STEPS[:2], 230, STEPS[2]]  # also the number of alerts
    sink = Logger(
        lambda values, step: None, picture=lambda *given: pictures.append(given),
        save=lambda: saved.append(len(pictures)),
    )  # fmt: skip
    run_through(sink, readings)
    assert saved[-1] == len(pictures) > 0
