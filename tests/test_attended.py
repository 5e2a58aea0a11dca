import pytest
import torch

from geomon.attended import AttentionCall, NotUnderstoodError, captured_attention


def call(**kwargs) -> AttentionCall:
    defaults = {
        "query": torch.randn(2, 4, 6, 8), "key": torch.randn(2, 2, 6, 8), "mask": None,
        "sequences": torch.arange(2), "places": torch.arange(6).expand(2, -1), "causal": False,
        "scale": None,
    }  # fmt: skip
    return AttentionCall(**(defaults | kwargs))


def visible(**kwargs) -> torch.Tensor:
    valid = kwargs.pop("valid", None)
    return captured_attention(call(**kwargs), valid)["visible"].expand(2, 4, 6, 6)


LOWER = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 4, 6, 6)


def test_no_mask_sees_all_and_causal_the_past():
    assert visible().all()
    assert torch.equal(visible(causal=True), LOWER)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -65504.0])
def test_additive_masks_hide_what_is_very_negative(lowest):
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~LOWER[0, :1], lowest)
    found = captured_attention(call(mask=mask), None)
    assert torch.equal(found["visible"].expand(2, 4, 6, 6), LOWER)
    assert found["bias"] is None


def test_additive_biases_are_kept():
    slopes = -torch.rand(1, 4, 6, 6) * 20
    found = captured_attention(call(mask=slopes.masked_fill(~LOWER[:1], -torch.inf)), None)
    assert torch.equal(found["visible"].expand(2, 4, 6, 6), LOWER)
    assert torch.equal(found["bias"], torch.where(LOWER[:1], slopes, 0))


def test_boolean_masks_say_where_to_attend():
    mask = torch.rand(2, 1, 6, 6) > 0.5
    assert torch.equal(visible(mask=mask), mask.expand(2, 4, 6, 6))


def test_key_padding_with_a_causal_flag_and_a_sliding_window():
    padding = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = False
    found = visible(mask=padding, causal=True, options={"sliding_window": 2})
    rows, keys = torch.arange(6)[:, None], torch.arange(6)
    expected = (keys <= rows) & (rows - keys < 2)
    assert torch.equal(found[0, 0], expected)
    assert torch.equal(found[1, 0], expected & (keys < 4))


def test_a_mask_with_rows_holds_its_window_already():
    assert torch.equal(visible(mask=LOWER, options={"sliding_window": 1}), LOWER)


def test_queries_that_are_padding_see_nothing():
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, 3:] = False
    found = visible(valid=valid, causal=True)
    assert not found[0, :, 3:].any()
    assert torch.equal(found[1], LOWER[1])


def test_scale_is_as_given_or_by_the_head_width():
    assert captured_attention(call(), None)["scale"] == pytest.approx(8**-0.5)
    assert captured_attention(call(scale=1.0), None)["scale"] == 1.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 50.0}, "soft-capped"),
        ({"s_aux": torch.ones(4)}, "attention sinks"),
        ({"position_bias": torch.ones(1)}, "relative position bias"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(options, reason):
    with pytest.raises(NotUnderstoodError, match=reason):
        captured_attention(call(options=options), None)
    assert captured_attention(call(options=dict.fromkeys(options)), None)


def test_integer_masks_are_refused():
    with pytest.raises(NotUnderstoodError, match="neither boolean nor additive"):
        captured_attention(call(mask=torch.ones(1, 1, 6, 6, dtype=torch.int64)), None)
