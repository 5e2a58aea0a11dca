import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record import FILE_NAME, Follower, Reading, Readings, Record, columns, read
from geomon.record.columns import SHORT_FROM, Values, layout_of, parse_json

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.builds(
    "{}/{}layer_{}{}".format,
    st.sampled_from(["twonn", "qk_cosine", "", "odd name"]),
    st.sampled_from(["", "encoder_", "a_b_"]),
    st.sampled_from(["00", "01", "7", "123"]),
    st.sampled_from(["", "/", "/std", "/head_0", "/head_12", "/a/b"]),
)


def reading(values, step=0, notes=()):
    return Reading(step, 1.5, 0.1, "probe", "eval", 3, 2, "bfloat16", values, [*notes])


@pytest.fixture
def short(monkeypatch):
    """All lines have the short form."""
    monkeypatch.setattr(columns, "SHORT_FROM", 1)


def large(layers=24, heads=16, metrics=8):
    parts = ["", "/margin", *(f"/head_{head}" for head in range(heads))]
    return {
        f"metric_{metric}/layer_{layer:02d}{part}": math.sin(metric + layer + 7 * index)
        for metric in range(metrics)
        for layer in range(1, layers + 1)
        for index, part in enumerate(parts)
    } | {"metric_0/mean": 0.1, "geomon/seconds": 3.0}


@given(values=st.dictionaries(NAMES | st.text(min_size=1), NUMBERS))
def test_a_short_line_gives_the_reading_back_to_the_last_bit(values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "SHORT_FROM", 1)
        line = reading(values).line()
    assert "\n" not in line
    back = Reading.from_json(json.loads(line))
    assert back == reading(values)
    assert [math.copysign(1, back.values[tag]) for tag in values] == [
        math.copysign(1, value) for value in values.values()
    ]


def test_lines_of_large_readings_are_short_and_those_of_small_ones_plain():
    values = large()
    line = reading(values).line()
    plain = json.dumps({"values": values})
    assert len(line) < len(plain) / 3
    assert json.loads(line)["values"] == {"metric_0/mean": 0.1, "geomon/seconds": 3.0}
    small = dict(list(values.items())[: columns.SHORT_FROM - 1])
    assert json.loads(reading(small).line())["values"] == small
    assert "packed" not in json.loads(reading(small).line())


def test_a_short_line_keeps_missing_values_missing(short):
    values = {
        "a/layer_01": math.nan,
        "a/layer_02": math.inf,
        "a/layer_03": 1.0,
        "a/mean": -math.inf,
    }
    back = Reading.from_json(json.loads(reading(values).line())).values
    assert [math.isnan(back[tag]) for tag in values] == [True, True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: None, "'packed' is None, expected an object"),
        (lambda packed: packed | {"tags": 5}, "the tags of 'packed' are 5, expected lists"),
        (lambda packed: packed | {"tags": [[["a"], ["layer_01"]]]}, "a block of 'packed' is"),
        (lambda packed: packed | {"tags": [[["a"], ["b"], ["c"] * 4]]}, "it has two values of"),
        (lambda packed: packed | {"tags": [[["x"] * 9999] * 3]}, "expected 8 for each of"),
        (lambda packed: packed | {"crc32": packed["crc32"] ^ 1}, "has another checksum"),
        (lambda packed: packed | {"crc32": True}, "expected text and a number"),
        (lambda packed: packed | {"float64": packed["float64"][1:]}, "no text in base64"),
        (lambda packed: packed | {"float64": packed["float64"][4:]}, "has 29 bytes, expected 8"),
        (lambda packed: packed | {"float64": "é"}, "no text in base64"),
    ],
)
def test_a_short_form_that_is_wrong_is_refused(short, change, message):
    content = json.loads(reading({f"a/layer_0{n}": float(n) for n in range(4)}).line())
    content["packed"] = change(content["packed"])
    with pytest.raises(ValueError, match=message):
        Reading.from_json(content)


def test_infinity_and_a_tag_that_stands_twice_are_refused(short):
    import base64
    import struct
    import zlib

    content = json.loads(reading({"a/layer_01": 1.0}).line())
    data = struct.pack("<d", math.inf)
    endless = {"float64": base64.b64encode(data).decode(), "crc32": zlib.crc32(data)}
    with pytest.raises(ValueError, match="infinity"):
        Reading.from_json(content | {"packed": content["packed"] | endless})
    with pytest.raises(ValueError, match="two values of one tag"):
        Reading.from_json(content | {"values": {"a/layer_01": 2.0}})


def test_a_record_of_both_forms_is_read_followed_and_gone_on_with(tmp_path, monkeypatch):
    written = []
    follower = Follower(tmp_path)
    for step in range(6):
        monkeypatch.setattr(columns, "SHORT_FROM", 1 if step % 2 else 10_000)
        record = Record(tmp_path)  # a run that is taken up again at every step
        assert record.begin(step, {}) == {(each.step, each.source) for each in written}
        values = {f"a/layer_{n:02d}/head_{h}": step + n + h / 7 for n in range(3) for h in range(2)}
        written.append(reading(values | {"a/mean": float(step)}, step))
        record.write(written[-1])
        record.close()
        assert follower.look() == written[-1:]
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert sum("packed" in line for line in lines) == 3
    assert read(tmp_path).readings == written == follower.readings


@pytest.mark.parametrize("short_from", [1, 10_000])
def test_readings_of_the_same_tags_share_them(short_from, tmp_path, monkeypatch):
    """What a reading takes in memory is 8 bytes for each value."""
    monkeypatch.setattr(columns, "SHORT_FROM", short_from)
    lines = [reading(large(2, 2, 2), step).line() for step in range(3)]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    run = read(tmp_path)
    layouts = {id(each.values.layout) for each in run}
    assert len(layouts) == len({id(each.values.layout) for each in run.of_stack()}) == 1
    assert all(each.values.array.nbytes == 8 * len(each.values) for each in run)


def test_stacks_are_selected_in_the_short_form_as_in_the_plain_one(short):
    values = {
        f"a/{stack}_{place}": float(n)
        for n, (stack, place) in enumerate(
            (stack, place)
            for stack in ("encoder", "decoder")
            for place in ("layer_01", "layer_01/head_0", "mean")
        )
    }
    back = Readings([], [Reading.from_json(json.loads(reading(values).line()))])
    assert back.stacks() == ["encoder", "decoder"]
    assert back.of_stack("encoder")[0].values == {
        "a/layer_01": 0.0, "a/layer_01/head_0": 1.0, "a/mean": 2.0
    }  # fmt: skip


def test_values_are_a_mapping_like_any_other():
    plain = {"a/mean": 1.0, "b/mean": math.nan, "c": 0.1}
    values = Values.of(plain)
    assert Values.of(values) is values
    assert list(values) == list(values.keys()) == list(plain)
    assert values.get("no") is None
    assert (values.get("no", 5), "no" in values, "c" in values, len(values)) == (5, False, True, 3)
    with pytest.raises(KeyError, match="no"):
        values["no"]
    assert {**values}["c"] == 0.1
    assert type(values["c"]) is float
    only = Values.of({"c": 0.1})
    assert only == {"c": 0.1}
    assert only == {"c": 0.1}
    assert only != {"c": 0.2}
    assert pickle.loads(pickle.dumps(only)) == only
    assert layout_of(("a",)) is layout_of(("a",))


@pytest.mark.parametrize("short_from", [1, 10_000])
def test_the_table_has_a_row_for_each_reading_and_a_column_for_each_tag(short_from, monkeypatch):
    monkeypatch.setattr(columns, "SHORT_FROM", short_from)
    rows = [{"a/layer_01": 1.0, "a/layer_02": 2.0}, {"a/layer_02": 3.0}, {"x": 1.0}]
    run = Readings([], [Reading.from_json(json.loads(reading(row).line())) for row in rows])
    names = ["a/layer_02", "x", "a/layer_01", "no"]
    nan = math.nan
    expected = [[2, nan, 1, nan], [3, nan, nan, nan], [nan, 1, nan, nan]]
    np.testing.assert_array_equal(run.table(names), expected)
    assert run.table([]).shape == (3, 0)
    assert Readings([], []).table(names).shape == (0, 4)


def test_a_line_is_parsed_alike_with_and_without_its_numbers_cut_out():
    run = {f"cosine/layer_{n:02d}": n / 7 for n in range(SHORT_FROM)} | {"twonn/mean": 2.0}
    line = reading(run, notes=['a "float64": "b"}}']).line().encode()
    content = parse_json(line)
    assert isinstance(content["packed"]["float64"], bytes)
    whole = json.loads(line)
    assert content["packed"].pop("float64").decode() == whole["packed"].pop("float64")
    assert content == whole
    assert dict(Reading.from_json(parse_json(line)).values) == run


@pytest.mark.parametrize(
    "line",
    [
        '{"packed": {"float64": "AA\\/A", "tags": []}, "step": 1}',
        '{"packed": {"float64": "AA\\/A"}}',
        '{"packed": 1, "other": {"float64": "AAAA"}}',
        '{"other": {"float64": "AAAA"}}',
        '[{"a": {"float64": "AAAA"}}',
        '{"packed": {"float64": "AAAA"}} more',
        '{"packed": {"float64": "AAAA',
    ],
)
def test_what_is_no_line_in_the_short_form_is_parsed_as_json_is(line):
    try:
        expected = json.loads(line)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            parse_json(line.encode())
        return
    found = parse_json(line.encode())
    if isinstance(found.get("packed"), dict) and isinstance(found["packed"]["float64"], bytes):
        found["packed"]["float64"] = found["packed"]["float64"].decode()
    assert found == expected
