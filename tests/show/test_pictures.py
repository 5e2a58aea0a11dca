import math
import sys

import numpy as np
import pytest

from geomon.record import Sink
from geomon.show import Pictures


@pytest.fixture
def posted():
    return []


@pytest.fixture
def pictures(posted):
    return Pictures(lambda name, image, step: posted.append((name, image, step)))


def test_draws_each_time_the_step_has_doubled_and_at_the_end(make_readings, pictures, posted):
    steps = (0, 1, 2, 3, 4, 5, 6, 7)
    for reading in make_readings(steps, layers=2, heads=2):
        pictures.write(reading)
    assert [step for name, _, step in posted if name == "profile/anisotropy"] == [0, 1, 2, 4]
    pictures.close()
    assert [step for name, _, step in posted if name == "profile/anisotropy"] == [0, 1, 2, 4, 7]
    count = len(posted)
    pictures.close()
    assert len(posted) == count


def test_posts_the_profile_and_each_metric_of_heads(make_readings, pictures, posted):
    pictures.write(make_readings((0,))[0])
    names = [name for name, _, _ in posted]
    assert names == ["profile/anisotropy", "heads/qk_cosine", "heads/attention_entropy"]
    for _, image, _ in posted:
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.std() > 5


def test_a_last_reading_already_drawn_is_not_drawn_again(make_readings, pictures, posted):
    pictures.write(make_readings((0,))[0])
    count = len(posted)
    pictures.close()
    assert len(posted) == count


def test_what_is_missing_is_not_posted(make_readings, pictures, posted):
    pictures.write(make_readings((0,), without=["anisotropy", "qk_cosine"])[0])
    assert [name for name, _, _ in posted] == ["heads/attention_entropy"]
    Pictures(lambda *_: pytest.fail("nothing was written")).close()


def test_memory_grows_with_the_logarithm_of_the_run(make_readings, posted):
    pictures = Pictures(lambda *_: None, metrics=())
    steps = range(300)
    curves = {"twonn/mean": [1.0] * 300} | {
        name: [1.0] * 300
        for name in ("twonn_distinct/mean", "gride/mean/k1", "gride/mean/k32")
    } | {name: [1.0] * 300 for name in ("attention_entropy/mean", "geomon/overhead")}  # fmt: skip
    for reading in make_readings(steps, curves=curves, layers=2, heads=1):
        pictures.write(reading)
    kept = pictures._curves
    assert [reading.step for reading in kept][:9] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert len(kept) < 5 * math.log2(300)
    assert len(pictures._drawn) == 2 + int(math.log2(300))
    assert "geomon/overhead" not in kept[-1].values
    assert "twonn/mean" in kept[-1].values


def test_the_whole_run_in_one_figure_comes_first(make_readings, pictures, posted):
    for reading in make_readings((0, 1, 8, 16, 32), layers=2, heads=2):
        pictures.write(reading)
    shown = [(name, step) for name, _, step in posted if name.startswith("Overview")]
    assert shown == [("Overview/geometry", 16), ("Overview/geometry", 32)]
    assert min(name for name, _, _ in posted) == "Overview/geometry"


def test_it_is_a_sink(pictures):
    assert isinstance(pictures, Sink)


def test_without_matplotlib_it_says_what_to_install(make_readings, pictures, monkeypatch):
    import geomon.show

    monkeypatch.delattr(geomon.show, "figures", raising=False)
    for name in [name for name in sys.modules if name.startswith("geomon.show.figures")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'geomon\[figures\]'"):
        pictures.write(make_readings((0,))[0])


def test_a_picture_that_is_not_taken_keeps_no_other_from_being_posted(make_readings):
    posted = []

    def post(name, image, step):
        posted.append(name)
        if len(posted) == 1:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Pictures(post).write(make_readings((16,))[0])
    assert len(posted) == 4
    assert len(set(posted)) == 4
