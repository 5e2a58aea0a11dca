"""Attention that is written out by hand, and softmaxes that are none."""

import math

import pytest
import torch
from referee import rebuilt
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend_by_function
from watched import HEADS, Attention, blocks_of, look, scores_of

from geomon.capture.attending.attention import NotUnderstoodError
from geomon.capture.attending.by_hand import (
    AttentionHints,
    arrange_scores,
    is_second_softmax,
    record_softmax,
)
from geomon.capture.snapshot import Layer
from geomon.capture.tap import Product
from geomon.capture.tokens.sampling import RowSampler


def recorded(scores, dim=-1, *, made=True):
    # Its factors cannot be queries and keys.
    made_of = Product(torch.zeros(scores.numel(), 1), torch.zeros(1, 1))
    products = [made_of] if made else []
    known = AttentionHints((2, 6), 24)
    return record_softmax(RowSampler(100, 0), scores, dim, known, products)[0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 4, 6, 6), (2, 4)),
        ((2, 4, 6, 9), (2, 4)),  # against the keys of another stack
        ((8, 6, 6), (2, 4)),  # sequences and heads in one dimension
        ((8, 6, 9), (2, 4)),
        ((2, 6, 6), (2, 1)),  # one head
        ((2, 6, 9), (2, 1)),
        ((4, 2, 3, 3), (4, 2)),  # windows of the sequences
        ((2, 2, 2, 6, 6), (2, 4)),  # heads in groups
        ((2, 2, 4, 3, 3), (4, 4)),  # windows in a dimension of their own
        ((12, 9), None),
        ((2, 0, 6, 6), None),
    ],
)
def test_scores_are_arranged_by_their_sizes(shape, expected):
    scores = torch.randn(shape)
    call = recorded(scores)
    if expected is None:
        assert call is None
        return
    assert call.scores.shape[:2] == expected
    assert torch.equal(call.scores.flatten(), scores.flatten())


@pytest.mark.parametrize("shape", [(4, 6, 15), (4, 2, 3, 15), (2, 2, 6, 15), (24, 15)])
def test_sequences_and_heads_may_stand_in_more_than_two_dimensions_or_in_one(shape):
    scores = torch.randn(*shape, 7)
    found = arrange_scores(scores, -1, AttentionHints((4, 15), 32))
    assert torch.equal(found, scores.reshape(4, 6, 15, 7))


@pytest.mark.parametrize(
    ("entered", "fits"),
    [((6,), True), ((1, 6), True), ((2, 3), False), ((7,), False)],
)
def test_scores_of_two_dimensions_are_of_one_head_and_one_sequence(entered, fits):
    scores = torch.randn(6, 9)
    found = arrange_scores(scores, -1, AttentionHints(entered, 32))
    assert torch.equal(found, scores[None, None]) if fits else found is None


@pytest.mark.parametrize("shape", [(4, 5, 7), (3, 6, 6)])
def test_sequences_and_heads_in_one_dimension_have_to_fit_the_tokens(shape):
    assert arrange_scores(torch.randn(shape), -1, AttentionHints((2, 6), 32)) is None


@pytest.mark.parametrize("shape", [(2, 6, 4, 9), (2, 4, 5, 6), (3, 5, 7), (2, 2, 3, 5, 6)])
def test_products_that_cannot_be_arranged_are_refused(shape):
    with pytest.raises(NotUnderstoodError, match=r"sequences, heads and queries$") as error:
        recorded(torch.randn(shape))
    assert f"with shape {list(shape)} over dimension -1" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2, 4, 6, 8), -1),
        ((8, 6, 9), -1),
        ((2, 4, 6, 6), -2),  # heads as wide as there are keys, by their share of the hidden states
        ((8, 6, 6), 1),
    ],
)
def test_without_a_product_what_are_no_keys_are_features(shape, dim):
    with pytest.raises(NotUnderstoodError, match=r"features \(linear attention\)"):
        recorded(torch.randn(shape), dim, made=False)


def test_without_a_product_scores_of_all_tokens_count():
    assert recorded(torch.randn(2, 2, 6, 6), made=False) is not None
    assert recorded(torch.randn(2, 6, 9), made=False) is None  # a router's
    assert recorded(torch.randn(12, 6), made=False) is None
    assert recorded(torch.randn(3, 5, 7), made=False) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_softmax_of_nested_tensors_is_passed_over():
    parts = torch.nested.nested_tensor([torch.randn(4, 3, 3), torch.randn(4, 5, 5)])
    assert recorded(parts) is None


def test_keys_of_no_known_projection_are_those_of_all_heads():
    query, key = torch.randn(8, 6, 8), torch.randn(8, 6, 8)
    scores, known = (query @ key.mT).unflatten(0, (2, 4)), AttentionHints((2, 6), 32)
    call, _ = record_softmax(RowSampler(100, 0), scores, -1, known, [Product(query, key.mT)])
    assert all(map(torch.equal, call.made_of, (x.unflatten(0, (2, 4)) for x in (query, key))))


def test_a_second_softmax_of_an_attention_is_recognised():
    first = torch.randn(2, 4, 6, 3)
    call = recorded(first)
    assert is_second_softmax(call, torch.randn(2, 4, 3, 3), -1)
    assert is_second_softmax(call, torch.randn(2, 4, 3, 6), 3)
    assert is_second_softmax(call, first, 2)  # over both dimensions
    assert not is_second_softmax(call, first, 3)  # the same once more
    assert not is_second_softmax(call, torch.randn(12, 8), -1)  # a router's
    assert not is_second_softmax(call, torch.randn(2, 4, 3, 6), 1)


# -- whole models ------------------------------------------------------------------------------

LENGTH = 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def layers_of(model: nn.Module, x: torch.Tensor) -> list[Layer]:
    return look(model, x).snapshot().layers[1:]


def over_query_features(q, k, v):
    return q.softmax(dim=-1) @ (k.transpose(-1, -2) @ v)


def over_key_features(q, k, v):
    return q @ (k.softmax(dim=-1).transpose(-1, -2) @ v)


def over_features_of_a_product(q, k, v):
    return (q @ (k.transpose(-1, -2) @ v)).square().softmax(dim=-1)


def positive(q, k, v):
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v)


@pytest.mark.parametrize("head_width", [16, LENGTH], ids=["", "as wide as long"])
@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (over_query_features, "features (linear attention)"),
        (over_key_features, "features (linear attention)"),
        (over_features_of_a_product, "is not rebuilt here: a softmax over "),
        (positive, "linear attention has none"),
    ],
)
def test_linear_attention_has_no_weights(attend, why, head_width):
    width = HEADS * head_width
    for layer in layers_of(blocks_of(attend, width), torch.randn(2, LENGTH, width)):
        assert "visible" not in layer.captured
        assert "scores" not in layer.captured
        assert why in layer.missing["visible"]
        assert "projected_query" not in layer.captured
        assert "not traced back" in layer.missing["projected_query"]


def grouped(q, k, v):
    q, k, v = q.unflatten(1, (2, 2)), k.unflatten(1, (2, 2)), v.unflatten(1, (2, 2))
    weights = torch.einsum("bgrid,bgrjd->bgrij", q, k).div(math.sqrt(q.shape[-1]))
    return (weights.masked_fill(~CAUSAL, -1e9).softmax(-1) @ v).flatten(1, 2)


def transposed(q, k, v):
    scores = scores_of(k, q).masked_fill(~CAUSAL.T, -1e9)
    return scores.softmax(dim=-2).transpose(-1, -2) @ v


def heads_last(q, k, v):
    scores = torch.einsum("bhid,bhjd->bihj", q, k).div(math.sqrt(q.shape[-1]))
    weights = scores.masked_fill(~CAUSAL[:, None], -1e9).softmax(-1)
    return torch.einsum("bihj,bhjd->bhid", weights, v)


def folded(q, k, v):
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5).masked_fill_(~CAUSAL, -1e9)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))


def by_logarithm(q, k, v):
    return scores_of(q, k).masked_fill(~CAUSAL, -1e9).log_softmax(-1).exp() @ v


BY_HAND = {
    "groups": grouped,
    "transposed": transposed,
    "folded": folded,
    "logarithm": by_logarithm,
}


def assert_causal(layer: Layer, attention: Attention) -> None:
    """Hold the weights, the mask and the largest scores against those of queries and keys."""
    q, k = attention.query.double(), attention.key.double()
    visible = layer.captured["visible"]
    assert torch.equal(visible, CAUSAL.expand_as(visible))
    scores = scores_of(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    scores = scores.masked_fill(~CAUSAL, -torch.inf)
    assert torch.allclose(rebuilt(layer)[0].double(), scores.softmax(-1), atol=1e-6)
    largest = layer.captured["max_logits"].double()
    torch.testing.assert_close(largest, scores.amax(dim=(0, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_width", [16, LENGTH], ids=["", "as wide as long"])
@pytest.mark.parametrize("way", BY_HAND)
def test_attention_by_hand_of_any_shape_has_the_weights_of_the_model(way, head_width):
    width = HEADS * head_width
    model = blocks_of(BY_HAND[way], width)
    for layer, block in zip(layers_of(model, torch.randn(2, LENGTH, width)), model, strict=True):
        assert_causal(layer, block.attention)
        torch.testing.assert_close(layer.captured["query"], block.attention.query)
        torch.testing.assert_close(layer.captured["key"], block.attention.key)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * torch.tensor([[[[0.3]]], [[[0.3]]]]),
        lambda x: (x * 0.3j).imag.contiguous(),
        lambda x: 3 * torch.tanh(x / 10),
    ],
)
def test_a_scale_that_was_not_seen_is_in_what_is_added_to_the_products(change):
    def changed(q, k, v):
        return change(q @ k.mT).softmax(-1) @ v

    model = blocks_of(changed)
    for layer, block in zip(layers_of(model, torch.randn(2, LENGTH, 32)), model, strict=True):
        seen, attention = layer.captured, block.attention
        torch.testing.assert_close(seen["query"], attention.query)
        torch.testing.assert_close(seen["key"], attention.key)
        products = attention.query @ attention.key.mT
        expected = change(products)
        made = seen["scale"] * products + seen["bias"]
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        assert seen["visible"].all()


BIAS = 0.02 * torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))

# What is done to products before their softmax.
CHANGES = {
    "scaled": lambda x: x / 4 * 1.2,
    "scaled in place": lambda x: x.mul_(0.6).div_(2),
    "by a tensor of one number": lambda x: x * torch.tensor(0.3, dtype=torch.float64),
    "copied": lambda x: (x * 0.3 + BIAS).clone(),
    "of another type": lambda x: (x * 0.3 + BIAS).double(),
    "into a buffer": lambda x: torch.empty(x.shape).copy_(x * 0.3 + BIAS),
    "added": lambda x: x * 0.3 + BIAS,
    "added in place": lambda x: (x * 0.3).add_(BIAS),
    "subtracted": lambda x: x * 0.3 - BIAS,
    "filled": lambda x: (x * 0.3 + BIAS).masked_fill(~CAUSAL, -1e9),
    "chosen": lambda x: torch.where(CAUSAL, x * 0.3 + BIAS, -1e9),
    "no less": lambda x: torch.maximum(x * 0.3 + BIAS, torch.tensor(-1e4)),
    "joined": lambda x: torch.cat([x * 0.3, torch.zeros(*x.shape[:-1], 1)], dim=-1),
    "padded": lambda x: nn.functional.pad(x * 0.3, (0, 1)),
    "picked": lambda x: (x * 0.3 + BIAS)[:, torch.arange(HEADS)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_scores_keep_their_scale_whatever_is_added_to_them(change):
    def changed(q, k, v):
        return CHANGES[change](q @ k.mT).softmax(-1).float()[..., :LENGTH] @ v

    for layer in layers_of(blocks_of(changed), torch.randn(2, LENGTH, 32)):
        assert layer.captured["scale"] == 0.3


def test_the_scale_is_found_where_the_product_or_its_factors_are_made_with_it():
    def with_a_summand(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(BIAS, q, k.mT, alpha=0.3)
        return (scores.softmax(-1) @ v).unflatten(0, (-1, HEADS))

    def of_scaled_factors(q, k, v):
        return ((q * 0.3**0.5) @ (k * 0.3**0.5).mT + BIAS).softmax(-1) @ v

    for attend in (with_a_summand, of_scaled_factors):
        model = blocks_of(attend)
        layer = layers_of(model, torch.randn(2, LENGTH, 32))[0]
        assert layer.captured["scale"] == pytest.approx(0.3, rel=1e-12)
        torch.testing.assert_close(layer.captured["query"], model[0].attention.query)


def grouped_query(q, k, v):
    return attend_by_function(q, k, v, attn_mask=CAUSAL, enable_gqa=True)


def folded_by_function(q, k, v):
    given = (x.flatten(0, 1) for x in (q, k, v))
    return attend_by_function(*given, attn_mask=CAUSAL).unflatten(0, (-1, HEADS))


def grouped_by_function(q, k, v):
    q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
    return attend_by_function(q, k, v, is_causal=True).flatten(1, 2)


@pytest.mark.parametrize("attend", [grouped_query, folded_by_function, grouped_by_function])
def test_attention_by_function_of_any_shape_has_the_weights_of_the_model(attend):
    model = blocks_of(attend, 64, key_heads=2 if attend is grouped_query else None)
    for layer, block in zip(layers_of(model, torch.randn(2, LENGTH, 64)), model, strict=True):
        assert_causal(layer, block.attention)


class WideHeads(nn.Module):
    """Heads that are wider than the hidden states shared out among them, in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(32, 3 * HEADS * 24, bias=False), HEADS
        self.out = nn.Linear(HEADS * 24, 32)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, 24)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out((scores_of(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_heads_wider_than_their_share_of_the_hidden_states():
    torch.manual_seed(0)
    model, x = nn.Sequential(WideHeads(), WideHeads()), torch.randn(3, 20, 32)
    made = model[0].qkv(x).detach().flatten(0, 1)[:, : 2 * HEADS * 24]
    query, key = made.unflatten(1, (2, HEADS, 24)).unbind(1)
    layer = layers_of(model, x)[0]
    for name, rows in (("projected_query", query), ("projected_key", key)):
        found = layer.captured[name]
        assert torch.allclose(found.double().sum(0), rows.double().sum(0), atol=1e-5)
        assert found.shape == rows.shape


class Maps(nn.Module):
    """Queries and keys that convolutions make of feature maps; keys of every other place."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Conv2d(16, 16, 3, padding=1)
        self.to_kv = nn.Conv2d(16, 32, 2, stride=2)

    def forward(self, x):
        k, v = self.to_kv(x).chunk(2, dim=1)
        q, k, v = (
            y.unflatten(1, (HEADS, -1)).flatten(3).transpose(2, 3) for y in (self.to_q(x), k, v)
        )
        mixed = scores_of(q, k).softmax(-1) @ v
        return x + mixed.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])


def test_projections_of_feature_maps_have_their_width_in_the_channels():
    torch.manual_seed(0)
    model, x = nn.Sequential(Maps(), Maps()), torch.randn(3, 16, 6, 6)
    query = model[0].to_q(x).detach().movedim(1, -1).reshape(-1, HEADS, 4)
    key = model[0].to_kv(x).detach()[:, :16].movedim(1, -1).reshape(-1, HEADS, 4)
    layer = layers_of(model, x)[0]
    for name, rows in (("projected_query", query), ("projected_key", key)):
        found = layer.captured[name]
        assert found.shape == rows.shape
        assert torch.allclose(found.double().sum(0), rows.double().sum(0), atol=1e-5)
    assert layer.captured["visible"].shape == (3, 1, 36, 9)


def test_scores_of_unknown_order_are_missed_with_the_reason():
    model = blocks_of(heads_last)
    for layer in layers_of(model, torch.randn(2, LENGTH, 32)):
        assert "sequences, heads and queries" in layer.missing["visible"]
