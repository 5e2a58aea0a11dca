"""What pages of a run that goes on keep of it, and when they draw."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import alert_of, reading_of

from geomon.show.loggers.history import RunDrawer, RunHistory


def reading(step, notes=(), **values):
    values = {"twonn/mean": 5.0, "geomon/overhead": 0.1, **values}
    return reading_of(values, step, "probe", notes)


class Drawer(RunDrawer):
    """Notes what it draws: a number of parts at each reading."""

    def __init__(self, parts=1):
        super().__init__(first_cost=2.0)
        self.drawn, self.fails, self.parts = [], None, parts

    def _draw(self, readings, reading):
        for number in range(self.parts):
            yield partial(self.draw, (reading.step, number))

    def draw(self, part):
        self.drawn.append(part)
        if self.fails is not None:
            raise self.fails


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
    assert kept.columns.keys() == {"twonn"}
    assert (kept.column("twonn").mean, kept.column("twonn").whole) == (5.0, {"null": 60.0})
    assert history.last.values["qk_dot/layer_01"] == 1.0


def test_a_reading_with_an_alert_is_kept_wherever_it_comes():
    history = RunHistory()
    for step in range(100):
        history.add(reading(step, [alert_of("rank_collapse", "x")] if step == 97 else ["a note"]))
    history.add(reading(101))
    assert 97 in [kept.step for kept in history.readings()]


def test_it_draws_at_first_then_each_time_the_step_has_doubled_and_once_at_the_end():
    drawer = Drawer()
    for step in (0, 1, 2, 8, 15, 17, 33, 34, 40, 68, 70):
        drawer.write(reading(step))
    drawer.close()
    drawer.close()
    assert [step for step, _ in drawer.drawn] == [0, 17, 34, 68, 70]


def test_a_drawing_that_failed_is_made_again_when_the_step_has_doubled():
    drawer = Drawer()
    drawer.fails = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        drawer.write(reading(16))
    drawer.write(reading(20))
    with pytest.raises(OSError, match="gone"):
        drawer.write(reading(32))
    assert [step for step, _ in drawer.drawn] == [16, 32]
    Drawer().close()  # nothing was written


def test_a_part_that_fails_keeps_no_other_back():
    drawer = Drawer(parts=3)
    drawer.fails = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        drawer.write(reading(16))
    assert len(drawer.drawn) == 3


class Slow(Drawer):
    """Takes a second for each part."""

    now = 0.0

    def draw(self, part):
        super().draw(part)
        Slow.now += 1.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", 0.03)
    monkeypatch.setattr("geomon.show.loggers.history.time.perf_counter", lambda: Slow.now)
    monkeypatch.setattr(Slow, "now", 0.0)


def test_drawings_take_a_small_share_of_the_run_but_the_last_one_is_made(clock):
    drawer = Slow()  # 2 s are expected of the first part
    for step in range(0, 200, 2):
        Slow.now = max(Slow.now, step)
        drawer.write(reading(step))
    assert [step for step, _ in drawer.drawn] == [68, 136]
    drawer.close()
    assert drawer.drawn[-1] == (198, 0)


@given(times=st.lists(st.floats(0.0, 500.0), min_size=1, max_size=30), parts=st.integers(1, 9))
@settings(deadline=None)
def test_whatever_the_times_the_share_holds_and_the_end_is_whole(times, parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geomon.show.loggers.history.SHARE", 0.03)
        patch.setattr("geomon.show.loggers.history.time.perf_counter", lambda: Slow.now)
        patch.setattr(Slow, "now", 0.0)
        drawer = Slow(parts=parts)
        for number, passed in enumerate(times):
            Slow.now += passed
            before = len(drawer.drawn)
            drawer.write(reading(2**number))
            assert len(drawer.drawn) == before or len(drawer.drawn) <= 0.03 * Slow.now
        drawer.close()
    last = 2 ** (len(times) - 1)
    assert [number for step, number in drawer.drawn if step == last][-parts:] == [*range(parts)]
