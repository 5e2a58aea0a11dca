"""A reading is columns, in memory and in a line; tags are made of them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from geomon.record import FILE_NAME, Reading, Readings, read
from geomon.record.columns import Column, Place, places_of, tagged
from support.readings import reading_of, stacks_of

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SOME = st.lists(NUMBERS, max_size=3)
NAMES = st.text("abk_ é", min_size=1, max_size=4)


def columns_of(parts):
    return st.builds(
        Column, first=st.integers(0, 2), layers=SOME, margin=SOME, heads=st.lists(SOME, max_size=3),
        mean=NUMBERS, mean_margin=NUMBERS, parts=parts,
        whole=st.dictionaries(NAMES, NUMBERS, max_size=2),
    )  # fmt: skip


def read_back(folder, reading: Reading) -> Reading:
    """Write a reading into a record, and read it again."""
    (folder / FILE_NAME).write_text(reading.line() + "\n")
    return read(folder)[0]


COLUMNS = columns_of(st.dictionaries(NAMES, columns_of(st.just({})), max_size=2))


@given(stacks=st.dictionaries(NAMES, st.dictionaries(NAMES, COLUMNS, max_size=2), max_size=2))
def test_a_line_gives_the_columns_back_to_the_last_bit(tmp_path_factory, stacks):
    given = reading_of({}, stacks=stacks)
    assert "\n" not in given.line()
    back = read_back(tmp_path_factory.mktemp("run"), given)
    assert back.stacks == stacks
    assert repr(back.stacks) == repr(stacks)  # the sign of a zero too


def test_a_value_that_is_missing_is_null_in_a_line_and_nan_in_memory(tmp_path):
    nan, inf = math.nan, math.inf
    column = Column(
        layers=[nan, 1.0, inf], margin=[nan, 0.5, 0.5], heads=[[], [nan, 2.0], [1.0]], mean=-inf,
        parts={"n": Column(mean_margin=nan, layers=[nan])}, whole={"null": nan},
    )  # fmt: skip
    given = reading_of({"training/loss": nan, "geomon/overhead": nan}, stacks={"": {"m": column}})
    assert "NaN" not in given.line()
    back = read_back(tmp_path, given)
    assert back.values.keys() == given.values.keys()
    for tag, value in given.values.items():
        found = back.values[tag]
        assert found == value or (not math.isfinite(value) and math.isnan(found))
    assert back.columns["m"].by_layer() == {1: 1.0}
    assert back.columns["m"].by_head() == {(1, 1): 2.0, (2, 0): 1.0}


def test_tags_are_made_of_columns_and_each_finds_its_value():
    values = {
        "qk/encoder_layer_01": 0.0, "qk/encoder_layer_01/margin": 0.5,
        "qk/encoder_layer_01/min": -3.0, "qk/encoder_layer_01/max": 3.0,
        "qk/encoder_layer_01/head_0": -3.0, "qk/encoder_layer_01/head_1": 3.0,
        "qk/encoder_layer_02": 1.0, "qk/encoder_mean": 0.5, "qk/encoder_mean/margin": 0.25,
        "qk/encoder_mean/min": -3.0, "qk/encoder_mean/max": 3.0, "qk/encoder_null": 0.1,
        "qk/encoder_layer_01/n": 9.0, "qk/encoder_layer_02/n": 8.0, "qk/encoder_mean/n": 8.5,
    }  # fmt: skip
    stacks = stacks_of(values)
    assert tagged(stacks) == values
    places = list(places_of("qk", stacks["encoder"]["qk"], "encoder"))
    assert [place.find(stacks) for place in places] == [values[place.tag] for place in places]
    nowhere = [
        Place("", "qk"), Place("encoder", "other"), Place("encoder", "qk", "k1"),
        Place("encoder", "qk", layer=0), Place("encoder", "qk", layer=7, kind="min"),
        Place("encoder", "qk", layer=1, kind="head", head=2),
        Place("encoder", "qk", layer=2, kind="margin"), Place("encoder", "qk", kind="whole"),
    ]  # fmt: skip
    assert all(math.isnan(place.find(stacks)) for place in nowhere)


def test_a_mean_is_missing_where_layers_are_and_absent_where_layer_0_is_the_only_one():
    alone, one = Column(layers=[5.0]), Column(first=1, layers=[5.0])
    assert list(tagged({"": {"a": alone, "b": one}})) == ["a/layer_00", "b/layer_01", "b/mean"]


def test_the_extremes_of_all_heads_leave_layer_0_out():
    heads = {"a/layer_00/head_0": -9.0, "a/layer_01/head_0": 1.0, "a/layer_02/head_0": 2.0}
    values = tagged(stacks_of(heads))
    assert (values["a/mean/min"], values["a/mean/max"]) == (1.0, 2.0)
    assert values["a/layer_00/min"] == -9.0


def test_stacks_are_selected_under_the_tags_of_a_model_with_one():
    places = ("layer_01", "layer_01/n", "mean", "mean/n", "null")
    values = {f"a/{s}_{place}": 1.0 for s in ("encoder", "decoder") for place in places}
    run = Readings([], [reading_of(values | {"training/encoder_loss": 2.0})])
    assert run.stacks() == ["encoder", "decoder"]
    of_run = {"training/encoder_loss", "geomon/seconds"}
    assert run.of_stack("encoder")[0].values.keys() == {f"a/{place}" for place in places} | of_run
    assert run[0].column("a") == run.of_stack("decoder")[0].column("a")


def test_a_line_of_a_large_model_is_short():
    """24 layers with 16 heads and 30 metrics, 8 of heads."""
    values = {
        f"metric_{metric}/layer_{layer:02d}{part}": math.sin(metric + layer + 7 * index)
        for metric in range(30)
        for layer in range(25)
        for index, part in enumerate(
            ["", "/margin", *(f"/head_{head}" for head in range(16) if metric < 8)]
        )
    }
    assert len(reading_of(values).line()) <= 150_000
