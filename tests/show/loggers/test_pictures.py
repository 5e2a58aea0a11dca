import sys

import numpy as np
import pytest
from tagged import TEXTS

from geomon.show import Pictures

DIMENSION, PROFILE, LAYERS, HEADS = (
    "1 intrinsic dimension",
    "2 anisotropy over depth",
    [
        "3 intrinsic dimension by layer",
        "4 anisotropy by layer",
        "5 attention entropy by layer",
    ],
    [
        "6 cosine of mean query and mean key by head",
        "7 attention entropy by head",
    ],
)
TWONN = {f"twonn/layer_{layer:02d}": [5.0] * 9 for layer in range(3)}


@pytest.fixture
def posted():
    return []


@pytest.fixture
def pictures(posted):
    made = Pictures(lambda name, image, step: posted.append((name, image, step)))
    made.describe({"metrics": TEXTS})
    return made


def test_cards_come_as_the_step_doubles(make_readings, pictures, posted):
    steps = (0, 4, 16, 20, 40)
    curves = {"twonn/mean": [3.0] * 5} | {tag: row[:5] for tag, row in TWONN.items()}
    for reading in make_readings(steps, curves=curves, layers=2, heads=2):
        pictures.write(reading)
    pictures.close()
    cards = [DIMENSION, PROFILE, *LAYERS, *HEADS]
    assert [(name, step) for name, _, step in posted] == [
        *((name, 0) for name in cards),
        *((name, 16) for name in cards),
        *((name, 40) for name in cards),
    ]
    count = len(posted)
    pictures.close()
    assert len(posted) == count
    for _, image, _ in posted:
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.std() > 5
    names = {name for name, _, _ in posted}
    assert sorted(names) == [DIMENSION, PROFILE, *LAYERS, *HEADS]  # as loggers show them


def test_what_is_missing_is_not_posted(make_readings, pictures, posted):
    pictures.write(
        make_readings(
            (0,), without=["anisotropy", "qk_cosine", "twonn", "twonn_distinct", "gride"]
        )[0]
    )
    assert [name for name, _, _ in posted] == [LAYERS[2], HEADS[1]]
    Pictures(lambda *_: pytest.fail("nothing was written")).close()


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
