"""What charts show of a reading: few values, each of them alive, whatever the size of the model."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import PlainDecoder, batch

from geomon import Memory, Monitor, select
from geomon.record import Reading
from geomon.record.headline import HEADLINES, Charts, check_detail, headline_tag, without_layers

MOST = 15


def read_once(layers, **options):
    """A reading, with an overhead, as every one after the first has."""
    model, memory = PlainDecoder(layers=layers), Memory()
    monitor = Monitor(model, directory=None, sinks=[memory], tokens=128, strict=True, **options)
    with monitor(0):
        model(batch(16, 64))
    monitor.close()
    (first,) = memory.readings
    return reading({**first.values, "geomon/overhead": 0.125})


def reading(values, step=0):
    return Reading(step, 1.0, 0.1, "inline", "train", 8, 1, "float32", values)


def shown_over(readings, detail="headline"):
    charts, shown = Charts(detail), {}
    for each in readings:
        shown |= charts.select(each)
    return shown


@pytest.fixture(scope="module")
def last():
    return read_once(2)


def deepen(last, layers):
    """The reading of a model with more layers: those of the second block, again and again."""
    more = {
        tag.replace("layer_02", f"layer_{layer:02d}"): value + layer
        for tag, value in last.values.items()
        for layer in range(3, layers + 1)
        if "layer_02" in tag
    }
    return reading({**last.values, **more})


@pytest.mark.parametrize("layers", [4, 12, 32])
def test_the_number_of_charts_does_not_grow_with_the_model(last, layers):
    last = deepen(last, layers)
    shown = shown_over([last])
    assert set(shown) == {headline_tag(h.name) for h in HEADLINES if not h.optional}
    assert len(shown) <= MOST
    assert len(shown_over([last], "layers")) > 60 * layers


def test_headlines_are_made_of_the_values_of_the_record(last):
    shown, values = shown_over([last]), last.values
    margin = values["twonn/mean/margin"]
    heads = [
        values[f"qk_cosine/layer_{layer:02d}/head_{head}"] for layer in (1, 2) for head in range(4)
    ]
    entropies = [
        values[f"attention_entropy/layer_{layer:02d}/head_{head}"]
        for layer in (1, 2)
        for head in range(4)
    ]
    expected = {
        "twonn": values["twonn/mean"],
        "twonn_low": values["twonn/mean"] - margin,
        "twonn_high": values["twonn/mean"] + margin,
        "twonn_distinct": values["twonn_distinct/mean"],
        "gride_k32": values["gride/mean/k32"],
        "anisotropy": values["anisotropy/mean"],
        "anisotropy_max": max(values[f"anisotropy/layer_0{layer}"] for layer in (1, 2)),
        "attention_entropy": values["attention_entropy/mean"],
        "attention_entropy_min": min(entropies),
        "qk_cosine_size": sum(map(abs, heads)) / len(heads),
        "attention_sink": values["attention_sink/mean"],
        "drift_norm": values["drift_norm/mean"],
        "effective_rank": values["effective_rank/mean"],
        "overhead": values["geomon/overhead"],
    }
    assert shown == pytest.approx({f"geomon/{name}": value for name, value in expected.items()})


def test_with_layers_everything_that_is_charted_is_shown_once(last):
    shown = shown_over([last], "layers")
    copied = {h.tag for h in HEADLINES if h.tag and not h.optional}
    assert shown.keys() - shown_over([last]).keys() == last.charted().keys() - copied
    assert {last.charted()[tag] for tag in copied} <= set(shown.values())


def test_other_metrics_take_the_places_that_are_free():
    last = read_once(2, metrics=select("variance", "attention_entropy"))
    shown = shown_over([last])
    assert shown.keys() == {
        "geomon/variance", "geomon/attention_entropy", "geomon/attention_entropy_min",
        "geomon/overhead",
    }  # fmt: skip
    assert shown["geomon/variance"] == last.values["variance/mean"]
    many = {f"mine_{i}/mean": float(i + 1) for i in range(100)}
    assert len(shown_over([reading(many)])) <= MOST


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


def test_what_repeats_another_is_shown_from_where_it_differs():
    charts = Charts()
    same = {"twonn/mean": 5.0, "twonn_distinct/mean": 5.0}
    differs = same | {"twonn_distinct/mean": 6.0}
    shown = [charts.select(reading(values)) for values in (same, differs, same)]
    assert [set(found) for found in shown] == [
        {"geomon/twonn"},
        {"geomon/twonn", "geomon/twonn_distinct"},
        {"geomon/twonn", "geomon/twonn_distinct"},
    ]


def test_what_is_not_a_number_is_not_shown():
    values = {"twonn/mean": 5.0, "twonn/mean/margin": math.nan, "anisotropy/mean": math.nan}
    assert shown_over([reading(values)], "layers") == {"geomon/twonn": 5.0}
    assert Charts().layout(reading(values))["geomon"] == {
        "intrinsic dimension: paper's, distinct tokens, scale 32": [
            "Multiline", ["geomon/twonn$"],
        ],
        "anisotropy": ["Multiline", ["geomon/anisotropy$", "geomon/anisotropy_max$"]],
        "overhead": ["Multiline", ["geomon/overhead$"]],  # unknown at the first reading
    }  # fmt: skip


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
    }  # fmt: skip
    layout = Charts("layers").layout(reading(values))
    assert layout["by layer"]["encoder: twonn"] == [
        "Multiline", ["twonn/encoder_layer_[0-9]+$", "geomon/encoder/twonn$"],
    ]  # fmt: skip
    assert layout["by layer"]["decoder: twonn"] == [
        "Multiline", ["twonn/decoder_layer_[0-9]+$", "geomon/twonn$"],
    ]  # fmt: skip


def test_the_layout_opens_on_the_dimension_with_its_interval(last):
    charts = Charts("layers")
    shown, layout = charts.select(last), charts.layout(last)
    assert list(layout) == ["geomon: intrinsic dimension", "geomon", "by layer"]
    first = layout.pop("geomon: intrinsic dimension")
    ends = ["geomon/twonn", "geomon/twonn_low", "geomon/twonn_high"]
    assert list(first.values()) == [["Margin", ends]]
    # TensorBoard draws charts of intervals below all others of their category.
    assert {kind for charts in layout.values() for kind, _ in charts.values()} == {"Multiline"}
    named = [name for _, names in layout["geomon"].values() for name in names]
    drawn = {name.removesuffix("$") for name in named} | set(ends)
    assert drawn == {name for name in shown if name.startswith("geomon/")} - {"geomon/seconds"}
    assert list(Charts().layout(last)) == ["geomon: intrinsic dimension", "geomon"]


TAGS = st.builds(
    "/".join,
    st.tuples(
        st.sampled_from(["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "own"]),
        st.sampled_from(["mean", "layer_00", "layer_01", "encoder_mean", "encoder_layer_01"]),
        st.sampled_from(["", "min", "k32", "margin", "head_0"]),
    ).map(lambda parts: tuple(filter(None, parts))),
)


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(TAGS, st.sampled_from([0.0, 1.0, 2.5, math.nan])), min_size=1, max_size=3
    ),
    st.sampled_from(["headline", "layers", ("own",)]),
)
def test_headlines_never_fail_and_are_part_of_every_detail(contents, detail):
    charts, few = Charts(detail), Charts(without_layers(detail))
    for values in contents:
        shown = charts.select(reading(values))
        assert few.select(reading(values)).items() <= shown.items()
        assert not any(math.isnan(value) for value in shown.values())
        charts.layout(reading(values))


def test_the_page_of_metrics_lists_every_headline_value_in_its_words():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `geomon/")]
    found = [(name.strip("| `"), words.strip(" |")) for name, _, words in rows]
    assert found == [(headline_tag(h.name), h.words) for h in HEADLINES]
    always = sum(not headline.optional for headline in HEADLINES)
    assert f"show {always} headline values" in page


@pytest.mark.parametrize("detail", ["headline", "layers"])
def test_the_loss_on_the_probe_is_charted_where_there_is_one_and_takes_no_place(last, detail):
    loss = {"training/probe_loss": 2.5}
    without, shown = (shown_over([reading(last.values | more)], detail) for more in ({}, loss))
    assert shown == without | {"geomon/probe_loss": 2.5}
    charts = {
        name: layout["geomon"]
        for name, layout in (
            ("without", Charts(detail).layout(last)),
            ("with", Charts(detail).layout(reading(last.values | loss))),
        )
    }
    added = {"loss on the probe": ["Multiline", ["geomon/probe_loss$"]]}
    assert charts["with"] == charts["without"] | added


@pytest.mark.parametrize("detail", ["heads", "", None, 3, ("a", 1), [""]])
def test_a_detail_is_one_of_two_words_or_names(detail):
    with pytest.raises(ValueError, match="detail is 'headline', 'layers' or a tuple of names"):
        check_detail(detail)
