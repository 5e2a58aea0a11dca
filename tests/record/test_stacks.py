import pytest

from geomon.record.reading import Reading, Readings
from geomon.record.stacks import main_stack, of_stack, stacks_of

VALUES = {
    "twonn/encoder_layer_00": 1.0, "twonn/encoder_layer_01/std": 2.0, "twonn/encoder_mean": 3.0,
    "twonn/encoder_null": 4.0, "twonn/decoder_layer_01": 5.0, "twonn/decoder_mean/n": 6.0,
    "qk_cosine/cross_layer_01/head_2": 7.0, "drift_cosine/decoder_pearson": 8.0,
    "geomon/seconds": 9.0,
}  # fmt: skip


def readings(values):
    one = Reading(0, 0.0, 0.0, "probe", "eval", 8, 1, "float32", values)
    return Readings([{"model": "T"}], [one])


def test_stacks_are_found_in_the_tags():
    assert stacks_of(readings(VALUES)) == ["encoder", "decoder", "cross"]
    assert stacks_of(readings({"twonn/layer_01": 1.0, "geomon/seconds": 1.0})) == [""]
    assert stacks_of(readings({})) == [""]


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
    seen = of_stack(readings(VALUES), stack)
    assert seen[0].values == want | {"geomon/seconds": 9.0}
    assert seen.runs == [{"model": "T"}]


def test_the_stack_that_predicts_is_shown_first():
    assert of_stack(readings(VALUES))[0].values["twonn/layer_01"] == 5
    assert main_stack(["text_model", "vision_model"]) == "text_model"


def test_a_model_with_one_stack_is_left_as_it_is():
    plain = readings({"twonn/layer_01": 1.0})
    assert of_stack(plain) is plain
    assert of_stack(plain, "") is plain
    with pytest.raises(ValueError, match="the model has one stack"):
        of_stack(plain, "encoder")
    with pytest.raises(ValueError, match="no stack is called 'x': 'encoder', 'decoder', 'cross'"):
        of_stack(readings(VALUES), "x")
