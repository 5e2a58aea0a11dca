from tagged import TEXTS, reading_of

from geomon.analysis import curve_of, mean_abs_over_heads
from geomon.record import Readings
from geomon.show.terminal.runs import offered, places_of

NAMES = [
    "own/mean", "gride/mean/k1", "gride/mean/k32", "gride/layer_01/k32", "twonn/mean",
    "twonn/mean/margin", "twonn/layer_01/n", "twonn/null", "qk_cosine/layer_01/head_0",
    "qk_cosine/layer_01", "training/loss", "geomon/overhead", "anisotropy/layer_01",
    "attention_entropy/mean", "odd/mean/a", "odd/mean/b", "odd/mean/std",
]  # fmt: skip


def test_what_can_be_drawn_is_listed_by_its_title_what_charts_show_first():
    run = Readings([{"metrics": TEXTS}], [reading_of(dict.fromkeys(NAMES, 1.0))])
    found = offered(run)
    assert {tag: each.label for tag, each in found.items()} == {
        "twonn/mean": "intrinsic dimension",
        "gride/mean/k32": "intrinsic dimension by scale, scale 32",
        "anisotropy/mean": "anisotropy",
        "attention_entropy/mean": "attention entropy (nats)",
        "qk_cosine/mean": "cosine of mean query and mean key",
        "own/mean": "own",
        "odd/mean/a": "odd, a",
        "odd/mean/b": "odd, b",
        "training/loss": "training loss",
        "geomon/overhead": "share of the time that geomon takes",
    }
    places = {tag: places_of(each, run) for tag, each in found.items()}
    assert places["anisotropy/mean"] == {"layer 1": 1}
    assert places["gride/mean/k32"] == {"mean over layers": None, "layer 1": 1}
    assert places["qk_cosine/mean"] == {"size, mean over heads": None, "layer 1": 1}
    assert places["training/loss"] == {}


def test_each_has_the_curve_of_its_mean_and_of_its_layers(make_readings):
    readings = make_readings()
    found = offered(readings)
    assert found["twonn/mean"].curve(readings) == curve_of(readings, "twonn")
    assert found["gride/mean/k32"].curve(readings) == curve_of(readings, "gride", part="k32")
    assert found["qk_cosine/mean"].curve(readings) == mean_abs_over_heads(readings, "qk_cosine")
    third = curve_of(readings, "anisotropy", layer=3)
    assert found["anisotropy/mean"].curve(readings, 3) == third
    assert len(third) == 9
    assert found["geomon/overhead"].curve(readings).values[0] == 0.9
