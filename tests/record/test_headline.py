"""What charts show of a reading: few values, each of them alive, whatever the size of the model."""

import math

import pytest
import tagged
from tagged import reading_of as reading

from geomon import Logger
from geomon.record import Readings

MOST = 15
TEXTS = tagged.TEXTS | {
    "attention_sink": {"title": "attention on the sink"},
    "drift_norm": {"title": "norm of the mean row"},
    "effective_rank": {"title": "effective rank"},
    "cosine": {"title": "mean cosine between tokens"},
}
NAMES = {
    "twonn", "twonn_low", "twonn_high", "twonn_distinct", "gride_k32", "anisotropy",
    "anisotropy_max", "attention_entropy", "attention_entropy_min", "qk_cosine_size",
    "attention_sink", "drift_norm", "effective_rank", "overhead",
}  # fmt: skip


def charts_of(detail="headline"):
    return tagged.charts_of(Readings([{"metrics": TEXTS}], []), detail)


def shown_over(readings, detail="headline"):
    charts, shown = charts_of(detail), {}
    for each in readings:
        shown |= charts.select(each)
    return shown


def values_of(layers, heads=4):
    """Values of a whole reading by tag, all different."""
    values = {"geomon/overhead": 0.125}
    for number, metric in enumerate(TEXTS, start=1):
        part = "/k32" if metric == "gride" else ""
        for layer in range(1, layers + 1):
            values[f"{metric}/layer_{layer:02d}{part}"] = number + 0.01 * layer
            for head in range(heads if metric in ("qk_cosine", "attention_entropy") else 0):
                sign = -1 if head % 2 else 1
                size = number + 0.01 * layer + 0.001 * head
                values[f"{metric}/layer_{layer:02d}/head_{head}"] = sign * size
        values[f"{metric}/mean{part}"] = number + 0.005 * layers
    return values | {"twonn/mean/margin": 0.25, "anisotropy/layer_00": 100.0}


@pytest.fixture
def last():
    return reading(values_of(2))


@pytest.mark.parametrize("layers", [4, 12, 32])
def test_the_number_of_charts_does_not_grow_with_the_model(layers):
    last = reading(values_of(layers))
    shown = shown_over([last])
    assert set(shown) == {f"geomon/{name}" for name in NAMES}
    assert len(shown) <= MOST
    assert len(shown_over([last], "layers")) > len(TEXTS) * layers


def test_headlines_are_made_of_the_values_of_the_record(last):
    shown, values = shown_over([last]), last.values

    def heads(metric):
        return [
            values[f"{metric}/layer_{layer:02d}/head_{head}"]
            for layer in (1, 2)
            for head in range(4)
        ]

    cosines = heads("qk_cosine")
    expected = {
        **{name: values[f"{name}/mean"] for name in NAMES & TEXTS.keys()},
        "twonn_low": values["twonn/mean"] - 0.25,
        "twonn_high": values["twonn/mean"] + 0.25,
        "gride_k32": values["gride/mean/k32"],
        "anisotropy_max": max(values[f"anisotropy/layer_0{layer}"] for layer in (1, 2)),
        "attention_entropy_min": min(heads("attention_entropy")),
        "qk_cosine_size": sum(map(abs, cosines)) / len(cosines),
        "overhead": 0.125,
    }
    assert shown == pytest.approx({f"geomon/{name}": value for name, value in expected.items()})


def test_with_layers_everything_that_is_charted_is_shown_once():
    trust = {"twonn/layer_01/margin": 0.5, "twonn/layer_01/n": 64.0, "twonn/mean/n": 64.0}
    last = reading({**values_of(2), **trust, "twonn/null": 9.0})
    shown = shown_over([last], "layers")
    copied = {f"{name}/mean" for name in TEXTS.keys() & NAMES} | {"geomon/overhead"}
    copied |= {"gride/mean/k32", "attention_entropy/mean/min"}
    left_out = {tag for tag in last.values if "head_" in tag or tag in copied} | {
        "twonn/layer_01/margin",
        "twonn/layer_01/n",
    }
    assert shown.keys() - shown_over([last]).keys() == (last.values.keys() - left_out)
    assert {"twonn/mean/n", "twonn/null", "qk_cosine/layer_01/max"} <= shown.keys()


def test_other_metrics_take_the_places_that_are_free():
    values = {"variance/mean": 3.0, "attention_entropy/mean": 2.0, "geomon/overhead": 0.5}
    assert shown_over([reading(values)]) == {
        "geomon/variance": 3.0, "geomon/attention_entropy": 2.0, "geomon/overhead": 0.5,
    }  # fmt: skip
    many = {f"mine_{i}/mean": float(i + 1) for i in range(100)}
    assert len(shown_over([reading(many)])) == MOST - 2  # and no overhead or loss on a probe


def test_a_metric_is_shown_by_its_name_where_no_place_is_free(last):
    last = reading({**last.values, "own/mean": 12.5})
    assert "geomon/own" not in shown_over([last])
    shown = shown_over([last], ("own",))
    assert shown.keys() - shown_over([last]).keys() == {"geomon/own"}
    assert shown["geomon/own"] == 12.5


@pytest.mark.parametrize("name", ["step", "seconds"])
def test_no_metric_takes_a_name_that_has_a_meaning(name):
    values = {f"{name}/mean": 1.0, "cosine/mean": 2.0}
    assert shown_over([reading(values)]) == {"geomon/cosine": 2.0}


def test_what_is_not_a_number_is_not_shown():
    values = {"twonn/mean": 5.0, "twonn/mean/margin": math.nan, "anisotropy/mean": math.nan}
    assert shown_over([reading(values)], "layers") == {"geomon/twonn": 5.0, "geomon/seconds": 2.0}
    layout = charts_of().layout(reading(values))["geomon"]
    assert {words: names for words, (_, names) in layout.items()} == {
        "intrinsic dimension, mean over layers": ["geomon/twonn"] * 3,
        "anisotropy, mean over layers": ["geomon/anisotropy"] * 3,
        "anisotropy, largest layer": ["geomon/anisotropy_max"] * 3,
        # Unknown at the first reading.
        "share of the time that geomon takes": ["geomon/overhead"] * 3,
    }


def test_stacks_have_groups_of_their_own_and_the_main_one_has_no_name():
    values = {
        f"twonn/{stack}_{place}": value + len(place)
        for stack, value in (("encoder", 1.0), ("decoder", 2.0))
        for place in ("layer_01", "mean")
    } | {"geomon/overhead": 0.5, "training/loss": 3.0}  # fmt: skip
    expected = {"geomon/twonn": 6.0, "geomon/overhead": 0.5, "geomon/encoder/twonn": 5.0}
    assert shown_over([reading(values)]) == expected
    assert shown_over([reading(values)], "layers") == expected | {
        "twonn/encoder_layer_01": 9.0, "twonn/decoder_layer_01": 10.0, "training/loss": 3.0,
        "geomon/seconds": 2.0,
    }  # fmt: skip
    layout = charts_of("layers").layout(reading(values))
    assert layout["by layer"]["encoder: intrinsic dimension"] == [
        "Multiline", ["twonn/encoder_layer_[0-9]+$", "geomon/encoder/twonn$"],
    ]  # fmt: skip
    assert layout["by layer"]["decoder: intrinsic dimension"] == [
        "Multiline", ["twonn/decoder_layer_[0-9]+$", "geomon/twonn$"],
    ]  # fmt: skip


def test_each_headline_value_has_a_chart_that_tensorboard_does_not_smooth(last):
    charts = charts_of("layers")
    shown, layout = charts.select(last), charts.layout(last)
    assert list(layout) == ["geomon", "by layer"]
    headlines = layout["geomon"]
    assert {kind for kind, _ in headlines.values()} == {"Margin"}
    # TensorBoard draws charts of this kind in reverse order.
    words, (_, names) = [*headlines.items()][-1]
    assert words == "intrinsic dimension, mean over layers, 95 % interval"
    assert names == ["geomon/twonn", "geomon/twonn_low", "geomon/twonn_high"]
    drawn = {name for _, names in headlines.values() for name in names}
    assert drawn == {name for name in shown if name.startswith("geomon/")} - {"geomon/seconds"}
    assert list(charts_of().layout(last)) == ["geomon"]


@pytest.mark.parametrize("detail", ["headline", "layers"])
def test_the_loss_on_the_probe_is_charted_where_there_is_one_and_takes_no_place(last, detail):
    more = reading({**last.values, "training/probe_loss": 2.5})
    assert shown_over([more], detail) == shown_over([last], detail) | {"geomon/probe_loss": 2.5}
    without, found = (charts_of(detail).layout(each)["geomon"] for each in (last, more))
    assert found == without | {"loss on the probe's inputs": ["Margin", ["geomon/probe_loss"] * 3]}


@pytest.mark.parametrize("detail", ["heads", "", None, 3, ("a", 1), [""]])
def test_a_detail_is_one_of_two_words_or_names(detail):
    with pytest.raises(ValueError, match="detail is 'headline', 'layers' or a tuple of names"):
        Logger(lambda values, step: None, detail=detail)
