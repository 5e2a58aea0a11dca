"""What of a run can be drawn over training, by its tag."""

from tagged import TEXTS, reading_of

from geomon.analysis import curve_of
from geomon.analysis.curves import mean_abs_over_heads
from geomon.analysis.quantities import quantities_of
from geomon.record import Readings

NAMES = [
    "own/mean", "gride/mean/k1", "gride/mean/k32", "gride/layer_01/k32", "twonn/mean",
    "twonn/mean/margin", "twonn/layer_01/n", "twonn/null", "qk_cosine/layer_01/head_0",
    "qk_cosine/layer_01", "training/loss", "training/lr", "geomon/overhead", "anisotropy/layer_01",
    "attention_entropy/mean", "odd/mean/a", "odd/mean/std",
]  # fmt: skip


def test_what_can_be_drawn_is_listed_by_its_title_what_charts_show_first():
    run = Readings([{"metrics": TEXTS}], [reading_of(dict.fromkeys(NAMES, 1.0))])
    found = quantities_of(run)
    charted = {
        "twonn/mean": ("Intrinsic dimension", "mean over layers"),
        "gride/mean/k32": ("Intrinsic dimension", "by scale, scale 32, mean over layers"),
        "anisotropy/mean": ("anisotropy", "mean over layers"),
        "anisotropy_max": ("anisotropy", "largest layer"),
        "attention_entropy/mean": ("attention entropy (nats)", "mean over layers"),
        "qk_cosine_size": ("cosine of mean query and mean key", "mean size over heads"),
        "training/loss": ("Training loss", "Training loss"),
    }
    others = {
        "gride/mean/k1": "intrinsic dimension by scale, scale 1",
        "twonn/mean/n": "intrinsic dimension, rows",
        "qk_cosine/mean": "cosine of mean query and mean key",
        "own/mean": "own",
        "odd/mean/a": "odd, a",
        "training/lr": "Training lr",
        "geomon/overhead": "Share of the time that geomon takes",
    }
    places = list(found)
    assert {*places[: len(charted)]} == charted.keys()
    assert {tag: (found[tag].chart, found[tag].name) for tag in charted} == charted
    assert {tag: found[tag].label for tag in places[len(charted) :]} == others
    assert found["attention_entropy/mean"].label == "attention entropy (nats)"
    assert found["own/mean"].words == "own, mean over layers"
    assert found["geomon/overhead"].words == found["geomon/overhead"].title


def test_each_has_the_curve_of_its_mean_and_of_its_layers(make_readings):
    readings = make_readings()
    found = quantities_of(readings)
    assert found["twonn/mean"].curve(readings) == curve_of(readings, "twonn")
    assert found["gride/mean/k32"].curve(readings) == curve_of(readings, "gride", part="k32")
    assert found["qk_cosine_size"].curve(readings) == mean_abs_over_heads(readings, "qk_cosine")
    third = curve_of(readings, "anisotropy", layer=3)
    assert found["anisotropy/mean"].curve(readings, 3) == third
    assert len(third) == 9
    assert found["geomon/overhead"].curve(readings).values[0] == 0.9
