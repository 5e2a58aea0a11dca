"""The largest logit, over all rows: held against all scores in float64."""

import math
from collections import Counter

import pytest
import torch
from accelerator import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from watched import blocks_of, scores_of, window

import geomon
from geomon.capture.attending import max_logit
from geomon.capture.attending.attention import Arguments
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.max_logit import max_logits_of_call, over_rows
from geomon.capture.attending.rules import FlexRule, PlaceRule


def given_by(query, key, mask=None, **changes) -> Arguments:
    return read_sdpa({"query": query, "key": key, "attn_mask": mask})._replace(**changes)


def reference(query, key, visible, scale, bias=None, softcap=None) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    return scores.masked_fill(~visible, -torch.inf).amax(dim=(0, 2, 3))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(*(st.integers(1, size) for size in (3, 2, 2, 19, 19))),
    kind=st.sampled_from(["none", "bool", "additive", "bias", "by key", "causal flag", "window"]),
    scale=st.sampled_from([8**-0.5, 8**-0.5, -0.7, 0.0]),
    softcap=st.sampled_from([None, 2.0]),
    padded=st.booleans(),
    block=st.sampled_from([1, 50, 1 << 22]),
    fewest=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_the_largest_of_all_scores(
    seed, shape, kind, scale, softcap, padded, block, fewest, dtype
):
    sequences, key_heads, group, queries, keys = shape
    heads = key_heads * group
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator).to(dtype)

    query, key = normal(sequences, heads, queries, 8), normal(sequences, key_heads, keys, 8)
    bias = normal(1, heads, queries, keys) if kind == "bias" else torch.zeros(())
    rows, order = torch.arange(queries)[:, None], torch.arange(keys)
    visible = torch.ones(sequences, 1, queries, keys, dtype=torch.bool)
    mask, options = None, {"softcap": softcap, "scale": scale}
    if kind in ("bool", "additive", "bias"):
        visible = torch.rand(sequences, 1, queries, keys, generator=generator) > 0.4
        mask = visible if kind == "bool" else torch.where(visible, bias, -1e9)
    elif kind == "by key":
        mask = torch.rand(sequences, 1, 1, keys, generator=generator) > 0.4
        visible = mask.expand(-1, -1, queries, -1)
    elif queries > 1 and kind != "none":
        options["causal"] = kind != "window"
        visible = (order <= rows).expand_as(visible)
        if kind == "window":
            options["rule"] = PlaceRule(keys, query.device, 2, 0)
            visible = visible & (rows - order < 3)
    valid = torch.rand(sequences, queries, generator=generator) > 0.3 if padded else None
    if valid is not None:
        visible = visible & valid[:, None, :, None]
    arguments = given_by(query, key, mask, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(max_logit, "_BLOCK_ON_HOST", block)
        patch.setattr(max_logit, "_FEWEST_QUERIES", fewest)
        found = over_rows(max_logits_of_call(arguments), valid)
    expected = reference(query, key, visible, scale, bias, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fewest", [1, 4])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_of_packed_sequences_none_sees_another(monkeypatch, causal, window, fewest):
    monkeypatch.setattr(max_logit, "_FEWEST_QUERIES", fewest)
    lengths = [5, 1, 12, 6]
    query, key = torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
    summed = torch.tensor([0, *lengths]).cumsum(dim=0)
    left, right = None if window is None else window - 1, 0 if causal else None
    rule = PlaceRule(24, key.device, left, right, ends=(summed, summed))
    given = given_by(query, key, rule=rule)
    visible = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    visible = visible.tril() if causal else visible
    visible = visible if window is None else visible.triu(1 - window)
    found = over_rows(max_logits_of_call(given), None)
    expected = reference(query, key, visible, 8**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_under_a_rule_it_is_that_of_the_pairs_that_the_rule_allows(monkeypatch, block):
    monkeypatch.setattr(max_logit, "_BLOCK_ON_HOST", block)
    query, key = torch.randn(3, 4, 9, 8), torch.randn(3, 2, 9, 8)
    visible = torch.rand(3, 4, 9, 9) > 0.7
    rule = FlexRule(9, key.device, lambda b, h, q, k: visible[b, h, q, k], 4)
    given = given_by(query, key, rule=rule)
    found = over_rows(max_logits_of_call(given), None)
    expected = reference(query, key, visible, 8**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_row_that_sees_no_key_has_none_whatever_the_cap(softcap):
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask[..., 1, :] = False
    rows = torch.ones(1, 1, 3, 4)
    found = max_logits_of_call(given_by(rows, rows, mask, softcap=softcap))
    assert (found == -torch.inf).tolist() == [[[False, True, False]]]


def test_rows_without_any_key_have_none():
    found = max_logits_of_call(given_by(torch.ones(2, 4, 3, 8), torch.ones(2, 4, 0, 8)))
    assert torch.equal(found, torch.full((2, 4, 3), -torch.inf))


def causal(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return scores_of(q, k).masked_fill(~lower, -1e9).softmax(dim=-1) @ v


def in_parts(q, k, v):
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    parts = torch.arange(q.shape[2]).chunk(2)
    given = ((q[:, :, rows], k, v, lower[rows]) for rows in parts)
    return torch.cat([scaled_dot_product_attention(*each) for each in given], dim=2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", [by_hand, causal, in_parts])
def test_a_reading_has_the_logit_of_a_row_that_is_not_sampled(way, grad):
    """One query in a hundred sequences has a logit that is far larger."""
    model, x = blocks_of(way, 16), torch.randn(100, 12, 16)
    x[77, 5] *= 40
    with torch.set_grad_enabled(grad):
        alone = model(x)
        with window(model, rows=36) as seen:
            assert torch.equal(model(x), alone)
    lower = torch.ones(12, 12, dtype=torch.bool).tril()
    for layer, block in zip(seen.snapshot().layers[1:], model, strict=True):
        own, found = block.attention, layer.captured["max_logits"]
        top = reference(own.query.detach(), own.key.detach(), lower, own.size**-0.5)
        assert not found.requires_grad
        torch.testing.assert_close(found.double(), top, rtol=1e-5, atol=1e-5)
        assert found.max() > 100
    values = geomon.measure(model, x, metrics=geomon.select("max_logit"), tokens=36)
    assert values["max_logit/layer_02/max"] == pytest.approx(float(top.max()), rel=1e-5)


def test_it_is_computed_only_where_it_is_asked_for(monkeypatch):
    def fail(*arguments):
        raise AssertionError("was computed")

    monkeypatch.setattr("geomon.capture.recorder.max_logits_of_call", fail)
    values = geomon.measure(
        blocks_of(causal, 16), torch.randn(4, 6, 16), metrics=geomon.select("attention_entropy")
    )
    assert math.isfinite(values["attention_entropy/mean"])


def test_under_autocast_it_is_that_of_the_queries_as_they_are():
    torch.manual_seed(0)
    query, key = (torch.randn(2, 2, 9, 8).bfloat16() for _ in range(2))
    arguments = given_by(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        found = over_rows(max_logits_of_call(arguments), None)
    expected = reference(query, key, torch.ones(1, dtype=torch.bool), 8**-0.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduced_precision_of_products_does_not_enter_it(dtype):
    """On a device that rounds float32 products to TF32, as the user's settings can have it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 16, 32, generator=generator).to(dtype) for _ in range(2))
    plain = given_by(query, key)
    expected = max_logits_of_call(plain)
    with Accelerator() as accelerator:
        on_device = given_by(*map(accelerator.put, (query, key)))
        found = max_logits_of_call(on_device).cpu()
        assert not accelerator.waits - Counter({"_to_copy": 1})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
