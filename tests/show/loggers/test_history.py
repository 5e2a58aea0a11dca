"""What pages of a run that goes on keep of it, and when they draw."""

import math
from dataclasses import replace

import pytest

from geomon.record import Reading
from geomon.show.loggers.history import RunDrawer, RunHistory


def reading(step, notes=(), **values):
    values = {"twonn/mean": 5.0, "geomon/overhead": 0.1, **values}
    return Reading(step, 1.0, 0.1, "probe", "eval", 64, 1, "float32", values, list(notes))


class Drawer(RunDrawer):
    def __init__(self, affords=lambda seconds: True):
        super().__init__(affords=affords, first_cost=2.0)
        self.drawn, self.fails = [], False

    def _draw(self, readings, reading, *, fresh, last):
        self.drawn.append((reading.step, fresh, last))
        if self.fails:
            raise OSError("gone")


def test_memory_grows_with_the_logarithm_of_the_run():
    history = RunHistory()
    for step in range(300):
        history.add(reading(step))
    steps = [kept.step for kept in history.readings()]
    assert steps[:9] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert steps[-1] == 299
    assert len(steps) < 5 * math.log2(300)


def test_only_what_is_drawn_is_kept_but_the_last_reading_is_whole():
    history = RunHistory()
    history.add(reading(3, **{"qk_dot/layer_01": 1.0, "twonn/null": 60.0}))
    (kept,) = history.readings()
    assert kept.values == {"twonn/mean": 5.0, "twonn/null": 60.0}
    assert history.last.values["qk_dot/layer_01"] == 1.0


def test_a_reading_with_an_alert_is_kept_wherever_it_comes():
    history = RunHistory()
    for step in range(100):
        history.add(reading(step, ["alert: rank collapse: x"] if step == 97 else ["a note"]))
    history.add(reading(101))
    assert 97 in [kept.step for kept in history.readings()]


def test_of_several_stacks_the_main_one_is_kept():
    history = RunHistory()
    values = {"twonn/encoder_layer_01": 1.0, "twonn/decoder_layer_01": 2.0}
    history.add(replace(reading(0), values=values))
    assert history.readings()[0].values == {"twonn/layer_01": 2.0}


def test_it_draws_at_first_then_each_time_the_step_has_doubled_and_once_at_the_end():
    drawer = Drawer()
    for step in (0, 1, 2, 8, 15, 17, 33, 34, 40, 68, 70):
        drawer.write(reading(step))
    drawer.close()
    drawer.close()
    expected = [(0, True, False), (17, True, False), (34, True, False), (68, True, False)]
    assert drawer.drawn == [*expected, (70, True, True)]


def test_a_last_reading_that_was_drawn_is_not_new():
    drawer = Drawer()
    drawer.write(reading(0))
    drawer.close()
    assert drawer.drawn == [(0, True, False), (0, False, True)]


def test_what_it_cannot_afford_is_drawn_later():
    asked = []

    def affords(seconds):
        asked.append(seconds)
        return len(asked) > 2

    drawer = Drawer(affords)
    for step in (0, 1, 2, 3):
        drawer.write(reading(step))
    assert drawer.drawn == [(2, True, False)]
    assert asked == [2.0, 2.0, 2.0]


def test_a_drawing_that_failed_is_made_again_when_the_step_has_doubled():
    drawer = Drawer()
    drawer.fails = True
    with pytest.raises(OSError, match="gone"):
        drawer.write(reading(16))
    drawer.write(reading(20))
    with pytest.raises(OSError, match="gone"):
        drawer.write(reading(32))
    assert [step for step, _, _ in drawer.drawn] == [16, 32]
    Drawer().close()  # nothing was written


def test_drawings_take_a_small_share_of_the_run_but_the_last_one_is_made(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", 0.03)
    monkeypatch.setattr("geomon.show.loggers.history.time.perf_counter", lambda: now[0])

    class Slow(Drawer):
        def _draw(self, readings, reading, *, fresh, last):
            super()._draw(readings, reading, fresh=fresh, last=last)
            now[0] += 1.0

    drawer = Slow()  # 2 s are expected of the first drawing
    for step in range(0, 200, 2):
        now[0] = max(now[0], step)
        drawer.write(reading(step))
    assert [step for step, _, _ in drawer.drawn] == [68, 136]
    drawer.close()
    assert drawer.drawn[-1] == (198, True, True)
