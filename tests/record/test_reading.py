import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record import Reading, Readings
from geomon.record.reading import layers_of, main_stack

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    "twonn/encoder_layer_00": 1.0, "twonn/encoder_layer_01/std": 2.0, "twonn/encoder_mean": 3.0,
    "twonn/encoder_null": 4.0, "twonn/decoder_layer_01": 5.0, "twonn/decoder_mean/n": 6.0,
    "qk_cosine/cross_layer_01/head_2": 7.0, "drift_cosine/decoder_pearson": 8.0,
    "geomon/seconds": 9.0,
}  # fmt: skip


def reading(step: int, **values: float) -> Reading:
    return Reading(step, 1.0, 0.5, "inline", "train", 64, 1, "float32", values or {"a/mean": 1.0})


@given(values=st.dictionaries(st.text(min_size=1), NUMBERS), step=st.integers(0, 2**63 - 1))
def test_a_line_gives_the_reading_back_to_the_last_bit(values, step):
    before = Reading(step, 1.5, 0.1, "probe", "eval", 3, 2, "bfloat16", values, ["a note"])
    line = before.line()
    assert "\n" not in line
    assert Reading.from_json(json.loads(line)) == before


def test_values_that_are_no_numbers_become_null():
    line = reading(0, x=math.nan, y=math.inf, z=1.0).line()
    assert json.loads(line)["values"] == {"x": None, "y": None, "z": 1.0}
    assert math.isnan(Reading.from_json(json.loads(line)).values["x"])


def test_series_are_in_order_and_without_gaps():
    points = ((0, 1.0), (4, math.nan), (2, 3.0))
    run = Readings([], [reading(step, **{"t/mean": value}) for step, value in points])
    assert run.series("t/mean") == ([0, 2], [1.0, 3.0])
    assert run.series("no such tag") == ([], [])


def test_layers_are_found_in_the_tags():
    values = {f"q/layer_{layer:02d}/head_{head}": 1.0 for layer in (2, 1) for head in range(3)}
    one = reading(0, **values)
    assert one.layers("q") == Readings([], [one]).layers("q") == layers_of(values, "q") == [1, 2]
    assert one.layers("other") == []


def readings(values):
    one = Reading(0, 0.0, 0.0, "probe", "eval", 8, 1, "float32", values)
    return Readings([{"model": "T"}], [one])


def test_stacks_are_found_in_the_tags():
    assert readings(VALUES).stacks() == ["encoder", "decoder", "cross"]
    assert readings({"twonn/layer_01": 1.0, "geomon/seconds": 1.0}).stacks() == [""]
    assert readings({}).stacks() == [""]


@pytest.mark.parametrize(
    ("stack", "want"),
    [
        ("encoder", {"twonn/layer_00": 1.0, "twonn/layer_01/std": 2.0, "twonn/mean": 3.0,
                     "twonn/null": 4.0}),
        ("decoder", {"twonn/layer_01": 5.0, "twonn/mean/n": 6.0, "drift_cosine/pearson": 8.0}),
        ("cross", {"qk_cosine/layer_01/head_2": 7.0}),
    ],
)  # fmt: skip
def test_a_stack_has_the_tags_of_a_model_with_one(stack, want):
    selected = readings(VALUES).of_stack(stack)
    assert selected[0].values == want | {"geomon/seconds": 9.0}
    assert selected.runs == [{"model": "T"}]


def test_the_stack_that_predicts_is_shown_first():
    assert readings(VALUES).of_stack()[0].values["twonn/layer_01"] == 5
    assert main_stack(["text_model", "vision_model"]) == "text_model"


def test_a_model_with_one_stack_is_left_as_it_is():
    plain = readings({"twonn/layer_01": 1.0})
    assert plain.of_stack() is plain
    assert plain.of_stack("") is plain
    with pytest.raises(ValueError, match="the model has one stack"):
        plain.of_stack("encoder")
    with pytest.raises(ValueError, match="no stack is called 'x': 'encoder', 'decoder', 'cross'"):
        readings(VALUES).of_stack("x")


@pytest.mark.parametrize(("step", "accepted"), [(2**63 - 1, True), (2**63, False)])
def test_steps_are_numbers_of_64_bits(step, accepted):
    content = json.loads(reading(5).line())
    content["step"] = step
    if accepted:
        assert Reading.from_json(content).step == step
        return
    with pytest.raises(ValueError, match="step"):
        Reading.from_json(content)


def test_what_the_training_logs_stays_with_every_stack():
    values = {
        "twonn/encoder_mean": 1.0, "twonn/decoder_mean": 2.0, "twonn/encoder_layer_01": 1.0,
        "twonn/decoder_layer_01": 2.0, "training/loss": 3.0, "training/encoder_loss": 4.0,
    }  # fmt: skip
    reading = Reading(0, 0.0, 0.0, "inline", "train", 1, 1, "float32", values)
    readings = Readings([], [reading])
    assert readings.stacks() == ["encoder", "decoder"]
    for stack, own in (("encoder", 1.0), ("decoder", 2.0)):
        assert dict(readings.of_stack(stack)[0].values) == {
            "twonn/mean": own, "twonn/layer_01": own, "training/loss": 3.0,
            "training/encoder_loss": 4.0,
        }  # fmt: skip
