from types import SimpleNamespace

import pytest
import torch

from geomon.capture.attending.attention import (
    NotUnderstoodError,
    read_arguments,
    read_call,
    record_call,
)
from geomon.capture.tokens.sampling import RowSampler

LOWER = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 4, 6, 6)


def views(mask=None, valid=None, route="interface", module=None, keys=6, **options):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, keys, 8)
    call = record_call(RowSampler(100, 0), read_arguments(route, module, query, key, mask, options))
    assert torch.equal(call.given.query, query)  # all that there is, in order
    assert torch.equal(call.given.key, key)
    return read_call(call, valid)


def visible(**kwargs) -> torch.Tensor:
    return views(**kwargs)["visible"].expand(2, 4, 6, 6)


def test_no_mask_sees_all_and_causal_the_past():
    assert visible().all()
    assert torch.equal(visible(is_causal=True), LOWER)
    assert torch.equal(visible(module=SimpleNamespace(is_causal=True)), LOWER)
    assert visible(module=SimpleNamespace(is_causal=True), is_causal=False).all()


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -65504.0])
def test_additive_masks_hide_what_is_very_negative(lowest):
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~LOWER[0, :1], lowest)
    found = views(mask=mask)
    assert torch.equal(found["visible"].expand(2, 4, 6, 6), LOWER)
    assert found["bias"] is None


def test_of_a_mask_for_more_keys_the_first_count():
    for mask in (LOWER, torch.zeros(2, 1, 6, 6).masked_fill(~LOWER[:, :1], -torch.inf)):
        wider = torch.cat([mask, mask[..., :3]], dim=3)
        assert torch.equal(visible(mask=wider), LOWER)
        for route, other in (("sdpa", wider), ("interface", mask[..., :4])):
            with pytest.raises(NotUnderstoodError, match=r"mask is for [49] keys, and there are 6"):
                views(mask=other, route=route)


def test_additive_biases_are_kept():
    slopes = -torch.rand(1, 4, 6, 6) * 20
    found = views(mask=slopes.masked_fill(~LOWER[:1], -torch.inf))
    assert torch.equal(found["visible"].expand(2, 4, 6, 6), LOWER)
    assert torch.equal(found["bias"], torch.where(LOWER[:1], slopes, 0).expand(2, 4, 6, 6))


def test_a_position_bias_is_added_to_what_the_mask_adds():
    bias, slopes = torch.randn(1, 4, 6, 6), -torch.rand(2, 1, 1, 6)
    found = views(mask=slopes, position_bias=bias, is_causal=True)
    assert torch.equal(found["bias"], bias + slopes)
    assert found["visible"].all()  # whoever gives a mask puts what is causal into it
    alone = views(position_bias=bias.masked_fill(~LOWER[:1], -torch.inf))
    assert torch.equal(alone["visible"].expand(2, 4, 6, 6), LOWER)


def test_boolean_masks_say_where_to_attend():
    mask = torch.rand(2, 1, 6, 6) > 0.5
    assert torch.equal(visible(mask=mask), mask.expand(2, 4, 6, 6))


def test_key_padding_with_a_causal_flag_and_a_sliding_window():
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, 4:] = False
    found = visible(mask=padding, is_causal=True, sliding_window=2)
    rows, keys = torch.arange(6)[:, None], torch.arange(6)
    expected = (keys <= rows) & (rows - keys < 2)
    assert torch.equal(found[0, 0], expected)
    assert torch.equal(found[1, 0], expected & (keys < 4))


def test_a_mask_with_rows_holds_its_window_already():
    assert torch.equal(visible(mask=LOWER, sliding_window=1), LOWER)


def test_queries_that_are_padding_see_nothing():
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, 3:] = False
    found = visible(valid=valid, is_causal=True)
    assert not found[0, :, 3:].any()
    assert torch.equal(found[1], LOWER[1])


def test_scale_softcap_and_sinks_are_as_given():
    assert views()["scale"] == pytest.approx(8**-0.5)
    assert views(scaling=1.0)["scale"] == 1.0
    assert views(route="sdpa", scale=0.5)["scale"] == 0.5
    assert (views()["softcap"], views()["sink"]) == (None, None)
    found = views(softcap=50.0, s_aux=torch.arange(4.0))
    assert found["softcap"] == 50.0
    assert found["sink"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mask": torch.ones(1, 1, 6, 6, dtype=torch.int64)}, "neither boolean nor additive"),
        ({"mask": SimpleNamespace()}, "the mask is a SimpleNamespace, and neither a tensor"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "sequences are packed"),
        ({"s_aux": torch.ones(3)}, "3 learned sinks for 4 heads"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(given, reason):
    with pytest.raises(NotUnderstoodError, match=reason):
        views(**given)


def test_nested_and_odd_queries_are_refused():
    for query in (torch.randn(2, 6, 8), None):
        with pytest.raises(NotUnderstoodError, match="no plain tensor of four dimensions"):
            read_arguments("sdpa", None, query, query, None, {})


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seqlens"])
def test_lengths_of_several_rows_are_refused_under_either_name(name):
    with pytest.raises(NotUnderstoodError, match="sequences are packed without padding"):
        views(**{name: torch.tensor([0, 6])})
    assert views(**{name: None})["query"] is not None


def packed(implementation, mask=None, **options) -> torch.Tensor:
    """What is visible in one row of six tokens, for an attention of transformers."""
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=implementation))
    query = torch.randn(1, 4, 6, 8)
    options = {"is_causal": True} | options
    given = read_arguments("interface", module, query, query, mask, options)
    found = read_call(record_call(RowSampler(100, 0), given), None)["visible"]
    return found.expand(1, 1, 6, 6)[0, 0]


SUMMED = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
OWN = torch.block_diag(*(torch.ones(n, n) for n in (2, 3, 1))).bool()


@pytest.mark.parametrize(
    "options",
    [
        {"cu_seq_lens_q": SUMMED, "cu_seq_lens_k": SUMMED},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 0]])},
    ],
)
def test_a_kernel_for_sequences_of_any_length_sees_each_alone(options):
    assert torch.equal(packed("flash_attention_2", **options), OWN.tril())
    assert torch.equal(packed("flash_attention_2", **options, is_causal=False), OWN)
    near = packed("flash_attention_2", **options, sliding_window=2)
    assert torch.equal(near, OWN.tril() & torch.ones(6, 6, dtype=torch.bool).triu(-1))
    for name in ("sdpa", "eager"):  # they see no more than the mask
        assert torch.equal(packed(name, **options), LOWER[0, 0])
        assert torch.equal(packed(name, OWN[None, None], **options), OWN)


def test_positions_of_one_sequence_divide_nothing():
    positions = torch.arange(3, 9)[None]
    assert torch.equal(packed("flash_attention_2", position_ids=positions), LOWER[0, 0])
    for other in (torch.arange(6), torch.zeros(2, 6)):  # no positions of the row
        assert torch.equal(packed("flash_attention_2", position_ids=other), LOWER[0, 0])


def ruled(rule, **options) -> torch.Tensor:
    """What is visible of two sequences under a mask with a rule, in four heads."""
    query = torch.randn(2, 4, 6, 8)
    options = {"is_causal": True, "sliding_window": 2} | options
    mask = SimpleNamespace(mask_mod=rule, kv_num_blocks=torch.zeros(2, 4, 1))
    given = read_arguments("interface", None, query, query, mask, options)
    found = read_call(record_call(RowSampler(100, 0), given), None)["visible"]
    return found.expand(2, 4, 6, 6)


def test_a_rule_says_what_is_visible_whatever_flags_say():
    own = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert torch.equal(ruled(lambda b, h, q, k: q >= k), LOWER)
    found = ruled(lambda b, h, q, k: (q >= k) & (own[b, q] == own[b, k]))
    assert torch.equal(found[:, 0], LOWER[:, 0] & (own[:, :, None] == own[:, None]))
    heads = ruled(lambda b, h, q, k: (q - k < h + 1) & (q >= k))
    assert [int(heads[0, head].sum()) for head in range(4)] == [6, 11, 15, 18]


def test_a_rule_that_takes_one_pair_at_a_time_is_refused():
    with pytest.raises(NotUnderstoodError, match="cannot be asked of many places at once"):
        ruled(lambda b, h, q, k: q >= k if bool(q > 2) else q == k)
