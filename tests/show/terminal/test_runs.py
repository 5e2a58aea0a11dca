from tagged import TEXTS, reading_of

from geomon.analysis import curve_of, mean_abs_over_heads
from geomon.record import Readings
from geomon.show.terminal.runs import quantities_of

NAMES = [
    "own/mean", "gride/mean/k1", "gride/mean/k32", "gride/layer_01/k32", "twonn/mean",
    "twonn/mean/margin", "twonn/layer_01/n", "twonn/null", "qk_cosine/layer_01/head_0",
    "qk_cosine/layer_01", "training/loss", "geomon/overhead", "anisotropy/layer_01",
    "attention_entropy/mean", "odd/mean/a", "odd/mean/b", "odd/mean/std",
]  # fmt: skip


def test_what_can_be_drawn_is_listed_by_its_title_what_charts_show_first():
    run = Readings([{"metrics": TEXTS}], [reading_of(dict.fromkeys(NAMES, 1.0))])
    quantities = quantities_of(run)
    assert {name: quantity.label for name, quantity in quantities.items()} == {
        "twonn": "intrinsic dimension",
        "gride/k32": "intrinsic dimension by scale, scale 32",
        "anisotropy": "anisotropy",
        "attention_entropy": "attention entropy (nats)",
        "qk_cosine": "cosine of mean query and mean key",
        "own": "own",
        "odd/a": "odd, a",
        "odd/b": "odd, b",
        "training/loss": "training loss",
        "geomon/overhead": "geomon's share of the time",
    }
    assert quantities["anisotropy"].places == {"layer 1": 1}
    assert quantities["gride/k32"].places == {"mean over layers": None, "layer 1": 1}
    assert quantities["qk_cosine"].places == {"size, mean over heads": None, "layer 1": 1}
    assert quantities["training/loss"].places == {}


def test_each_has_the_curve_of_its_mean_and_of_its_layers(make_readings):
    readings = make_readings()
    found = quantities_of(readings)
    assert found["twonn"].curve(readings, None) == curve_of(readings, "twonn")
    assert found["gride/k32"].curve(readings, None) == curve_of(readings, "gride", part="k32")
    assert found["qk_cosine"].curve(readings, None) == mean_abs_over_heads(readings, "qk_cosine")
    third = curve_of(readings, "anisotropy", layer=3)
    assert found["anisotropy"].curve(readings, 3) == third
    assert len(third) == 9
    assert found["geomon/overhead"].curve(readings, None).values[0] == 0.9
