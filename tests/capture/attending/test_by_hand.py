"""Attention that is written out by hand, and softmaxes that are none."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from geomon.capture.attending.attention import NotUnderstoodError
from geomon.capture.attending.by_hand import (
    arrange_scores,
    is_second_softmax,
    record_softmax,
)
from geomon.capture.tap import Product
from geomon.capture.tokens.sampling import RowSampler
from support.models import Running
from support.watched import HEADS, blocks_of, look, scores_of

LENGTH = 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def layers_of(model: nn.Module, x: torch.Tensor) -> list:
    return look(model, x).snapshot().layers[1:]


def positive(q, k, v):
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
    return q @ (k.mT @ v)


FEATURES = "features (linear attention)"
LINEAR = [
    (lambda q, k, v: q.softmax(dim=-1) @ (k.mT @ v), FEATURES),
    (lambda q, k, v: q @ (k.softmax(dim=-1).mT @ v), FEATURES),
    (
        lambda q, k, v: (q @ (k.mT @ v)).square().softmax(dim=-1),
        "not rebuilt here: a softmax ",
    ),
    (positive, "linear attention has none"),
]
# Features attend to one another.
TRANSPOSED = [
    lambda q, k, v: ((q.mT @ k * q.shape[-1] ** -0.5).softmax(-1) @ v.mT).mT,
    lambda q, k, v: (
        ((3 * F.normalize(q.mT, dim=-1) @ F.normalize(k, dim=-2)).softmax(-1) @ v.mT).mT
    ),
    lambda q, k, v: ((k.mT @ q).softmax(-2).mT @ v.mT).mT,
]


@pytest.mark.parametrize("head_width", [16, LENGTH], ids=["", "as wide as long"])
@pytest.mark.parametrize(("attend", "why"), LINEAR)
def test_linear_attention_has_no_weights(attend, why, head_width):
    width = HEADS * head_width
    for layer in layers_of(blocks_of(attend, width), torch.randn(2, LENGTH, width)):
        assert not {"visible", "scores", "projected_query"} & layer.captured.keys()
        assert why in layer.missing["visible"]
        assert "not traced back" in layer.missing["projected_query"]


@pytest.mark.parametrize("head_width", [16, LENGTH], ids=["", "as wide as long"])
@pytest.mark.parametrize("attend", TRANSPOSED)
def test_attention_among_features_is_not_taken_for_that_among_tokens(attend, head_width):
    width = HEADS * head_width
    for layer in layers_of(blocks_of(attend, width), torch.randn(3, LENGTH, width)):
        assert not {"visible", "scores", "query"} & layer.captured.keys()
        assert "softmax" in layer.missing["visible"]


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

# Changes of products before their softmax.
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


# From queries and keys to scores.
SCORES = {
    **{name: lambda q, k, change=change: change(q @ k.mT) for name, change in CHANGES.items()},
    "added by the operator of the product": lambda q, k: torch.baddbmm(
        BIAS, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.3
    ).unflatten(0, (-1, HEADS)),
    "of scaled factors": lambda q, k: (q * 0.3**0.5) @ (k * 0.3**0.5).mT + BIAS,
}


@pytest.mark.parametrize("way", SCORES)
def test_scores_keep_their_scale_whatever_is_added_to_them(way):
    model = blocks_of(lambda q, k, v: SCORES[way](q, k).softmax(-1).float()[..., :LENGTH] @ v)
    for layer, block in zip(layers_of(model, torch.randn(2, LENGTH, 32)), model, strict=True):
        assert layer.captured["scale"] == pytest.approx(0.3, rel=1e-12)
        torch.testing.assert_close(layer.captured["query"], block.attention.query)


def mapped(m, x):
    """Queries and keys that convolutions make of feature maps; keys of every other place."""
    k, v = m.to_kv(x).chunk(2, dim=1)
    q, k, v = (y.unflatten(1, (HEADS, -1)).flatten(3).transpose(2, 3) for y in (m.to_q(x), k, v))
    mixed = scores_of(q, k).softmax(-1) @ v
    return x + mixed.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])


def test_projections_of_feature_maps_have_their_width_in_the_channels():
    def block():
        to_q, to_kv = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 2, stride=2)
        return Running(mapped, num_heads=HEADS, to_q=to_q, to_kv=to_kv)

    model, x = nn.Sequential(block(), block()), torch.randn(3, 16, 6, 6)
    query = model[0].to_q(x).detach().movedim(1, -1).reshape(-1, HEADS, 4)
    key = model[0].to_kv(x).detach()[:, :16].movedim(1, -1).reshape(-1, HEADS, 4)
    layer = layers_of(model, x)[0]
    for name, rows in (("projected_query", query), ("projected_key", key)):
        found = layer.captured[name]
        assert found.shape == rows.shape
        assert torch.allclose(found.double().sum(0), rows.double().sum(0), atol=1e-5)
    assert layer.captured["visible"].shape == (3, 1, 36, 9)


def windowed(x):
    """Two windows of each sequence, which stand before the heads."""
    return x.unflatten(2, (2, -1)).transpose(1, 2)


def test_windows_of_a_sequence_count_as_sequences():
    def attend(*given):
        q, k, v = map(windowed, given)
        return (scores_of(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2, 3)

    model = blocks_of(attend)
    for layer, block in zip(layers_of(model, torch.randn(3, LENGTH, 32)), model, strict=True):
        for which in ("query", "key"):
            expected = windowed(getattr(block.attention, which)).flatten(0, 1)
            torch.testing.assert_close(layer.captured[which], expected)


def heads_last(q, k, v):
    scores = torch.einsum("bhid,bhjd->bihj", q, k).div(math.sqrt(q.shape[-1]))
    weights = scores.masked_fill(~CAUSAL[:, None], -1e9).softmax(-1)
    return torch.einsum("bihj,bhjd->bhid", weights, v)


ORDER = "sequences, heads and queries"
UNARRANGED = [
    (heads_last, ORDER),
    (lambda q, k, v: (q[:, :, :5] @ k.mT).softmax(-1).sum(2, keepdim=True) @ v + v, ORDER),
    # A router, whose softmax is none of attention.
    (lambda q, k, v: k.flatten(1, 2)[:, : 3 * LENGTH].softmax(-1).sum() + v, "linear attention"),
    # A softmax without any query.
    (lambda q, k, v: (q.flatten(0, 1)[:, :0] @ k.flatten(0, 1).mT).softmax(-1).sum() + v, "none"),
]


@pytest.mark.parametrize(("attend", "why"), UNARRANGED)
def test_scores_that_cannot_be_arranged_are_missed_with_the_reason(attend, why):
    for layer in layers_of(blocks_of(attend), torch.randn(2, LENGTH, 32)):
        assert why in layer.missing["visible"]


# -- two orders that both fit ----------------------------------------------------------------------


def queries_first(change):
    """Scores as [sequences, queries, heads, keys]."""

    def attend(q, k, v):
        scores = change(torch.einsum("bhid,bhjd->bihj", q, k) * q.shape[-1] ** -0.5)
        return torch.einsum("bihj,bhjd->bhid", scores.softmax(-1), v)

    return attend


def heads_first(change):
    """Scores as [heads x sequences, queries, keys], or [heads, sequences, queries, keys]."""

    def attend(*given):
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in given)
        mixed = change(scores_of(q, k), given[0].shape[1]).softmax(-1).flatten(0, -3) @ v
        return mixed.unflatten(0, (given[0].shape[1], -1)).transpose(0, 1)

    return attend


# Orders of heads and queries that both fit if there are as many heads as tokens.
ORDERS = {
    "as they are": lambda x: x,
    "masked": lambda x: x.masked_fill(~CAUSAL[:, None], -torch.inf),
    "contiguous": lambda x: (x + 0).contiguous(),
    "with a bias of each head": lambda x: x + torch.linspace(-3, 3, 8)[:, None] * CAUSAL[:, None],
    "of half precision": lambda x: x.bfloat16().float(),
    "by a temperature of each head": lambda x: x * torch.linspace(0.5, 2, 8)[:, None],
}


@pytest.mark.parametrize("heads", [LENGTH, 2 * LENGTH, HEADS])
@pytest.mark.parametrize("way", ORDERS)
def test_queries_before_heads_are_never_taken_for_heads(way, heads):
    change = ORDERS[way] if heads == LENGTH else torch.clone
    model = blocks_of(queries_first(change), 64, heads=heads)
    for layer in layers_of(model, torch.randn(3, LENGTH, 64)):
        assert "scores" not in layer.captured
        assert ORDER in layer.missing["visible"]


@pytest.mark.parametrize("first", ["heads", "queries"])
@pytest.mark.parametrize("groups", [2, LENGTH])
def test_grouped_heads_before_queries_are_told_from_queries_before_grouped_heads(groups, first):
    """Scores as [sequences, key heads, groups, queries, keys], with as many groups as tokens."""
    order = "bhgij" if first == "heads" else "bihgj"

    def attend(q, k, v):
        q = q.unflatten(1, (2, groups))
        weights = torch.einsum(f"bhgid,bhjd->{order}", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum(f"{order},bhjd->bhgid", weights, v).flatten(1, 2)

    model = blocks_of(attend, 64, heads=2 * groups, key_heads=2)
    seen = layers_of(model, torch.randn(3, LENGTH, 64))
    for layer, block in zip(seen, model, strict=True):
        if first == "queries":
            assert ORDER in layer.missing["visible"]
            continue
        torch.testing.assert_close(layer.captured["query"], block.attention.query)
        torch.testing.assert_close(layer.captured["key"], block.attention.key)


@pytest.mark.parametrize("sequences", [1, 3, LENGTH])
@pytest.mark.parametrize("way", [*CHANGES, *ORDERS])
def test_as_many_heads_as_tokens_are_heads(way, sequences):
    def changed(x):
        if way in ORDERS:  # which are written for queries before heads
            return ORDERS[way](0.3 * x.transpose(1, 2)).transpose(1, 2)
        return (x * 0.3)[:, torch.arange(LENGTH)] if way == "picked" else CHANGES[way](x)

    model = blocks_of(
        lambda q, k, v: changed(q @ k.mT).softmax(-1).float()[..., :LENGTH] @ v, 64, heads=LENGTH
    )
    seen = layers_of(model, torch.randn(sequences, LENGTH, 64))
    for layer, block in zip(seen, model, strict=True):
        if way == "with a bias of each head" and sequences == 1:  # much larger than the products
            assert ORDER in layer.missing["query"]
            continue
        torch.testing.assert_close(layer.captured["query"], block.attention.query)
        torch.testing.assert_close(layer.captured["key"], block.attention.key)


@pytest.mark.parametrize("sequences", [1, 3, HEADS])
@pytest.mark.parametrize("folded", [True, False])
def test_heads_before_sequences_are_said_unless_one_of_them_is_alone(sequences, folded):
    def change(scores, heads):
        return scores if folded else scores.unflatten(0, (heads, -1))

    model = blocks_of(heads_first(change))
    for layer, block in zip(
        layers_of(model, torch.randn(sequences, LENGTH, 32)), model, strict=True
    ):
        if sequences > 1:
            assert re.search(f"heads before the sequences|{ORDER}", layer.missing["visible"])
        elif folded:
            torch.testing.assert_close(layer.captured["query"], block.attention.query)


@pytest.mark.parametrize("sequences", [3, HEADS])
def test_sequences_before_heads_are_sequences_when_folded(sequences):
    def attend(*given):
        q, k, v = (x.flatten(0, 1) for x in given)
        return (scores_of(q, k).softmax(-1) @ v).unflatten(0, (-1, HEADS))

    model = blocks_of(attend)
    seen = layers_of(model, torch.randn(sequences, LENGTH, 32))
    for layer, block in zip(seen, model, strict=True):
        torch.testing.assert_close(layer.captured["query"], block.attention.query)


def test_tokens_of_two_kinds_have_projections_of_their_own():
    """As the tokens of a text and of an image, which attend to one another."""

    def run(m, x):
        def heads(name):
            kinds = getattr(m, f"{name}_proj")(x[:, :3]), getattr(m, f"{name}_other")(x[:, 3:])
            made = torch.cat(kinds, dim=1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return made.flatten(0, 1)

        q, k, v = map(heads, "qkv")
        mixed = scores_of(q, k).softmax(-1) @ v
        m.query, m.key = (made.view(len(x), HEADS, LENGTH, -1) for made in (q, k))
        return x + mixed.view(m.query.shape).transpose(1, 2).flatten(2)

    def block():
        kinds = itertools.product("qkv", ("proj", "other"))
        made = {f"{name}_{kind}": nn.Linear(32, 32) for name, kind in kinds}
        return Running(run, num_heads=HEADS, **made)

    model = nn.Sequential(block(), block())
    for layer, own in zip(layers_of(model, torch.randn(3, LENGTH, 32)), model, strict=True):
        for which in ("query", "key"):
            expected = getattr(own, which)
            torch.testing.assert_close(layer.captured[which], expected)
            found = layer.captured[f"projected_{which}"]
            assert len(found) == 3 * LENGTH
            assert torch.equal(
                found,
                expected[layer.captured[f"{which}_sequences"], :, layer.captured["positions"]],
            )


MIX = torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS, generator=torch.Generator().manual_seed(0))
# Scores that no known product has become.
OTHERS = {
    "mixed over heads": lambda q, k: torch.einsum("hg,bhij->bgij", MIX, scores_of(q, k)),
    "mixed by a layer": lambda q, k: F.linear(scores_of(q, k).movedim(1, -1), MIX).movedim(-1, 1),
    "distances": lambda q, k: -torch.cdist(q, k),
    "additive": lambda q, k: torch.tanh(q[:, :, :, None] + k[:, :, None]) @ torch.ones(16),
    "sums of products": lambda q, k: (q[:, :, :, None] * k[:, :, None]).sum(-1),
}


@pytest.mark.parametrize("way", OTHERS)
def test_scores_of_each_query_and_key_are_attention_though_no_product_was_seen(way):
    model = blocks_of(lambda q, k, v: OTHERS[way](q, k).softmax(-1) @ v, 64)
    for layer, block in zip(layers_of(model, torch.randn(3, LENGTH, 64)), model, strict=True):
        expected = OTHERS[way](block.attention.query, block.attention.key)
        torch.testing.assert_close(layer.captured["scores"], expected)


# -- softmaxes of what weights have made -----------------------------------------------------------

# From hidden states [sequences, tokens, width] and a router to what a softmax over dim is taken of.
ROUTERS = {
    "a router": (lambda m, x: m.router(x), -1),
    "without bias": (lambda m, x: x @ m.router.weight.T, -1),
    "of several layers": (lambda m, x: m.router(torch.relu(m.mlp(x))), -1),
    "of cosines": (
        lambda m, x: F.normalize(x, dim=-1) @ F.normalize(m.router.weight, dim=-1).T / 0.1, -1
    ),
    "with noise": (lambda m, x: m.router(x) + torch.linspace(0, 1, LENGTH), -1),
    "in double precision": (lambda m, x: m.router(x).double(), -1),
    "with some hidden": (lambda m, x: m.router(x).masked_fill(torch.arange(LENGTH) > 5, -1e9), -1),
    "of heads": (lambda m, x: m.router(x).unflatten(-1, (2, -1)).repeat(1, 1, 1, 2), -1),
    "of slots over tokens": (lambda m, x: m.router(x), 1),
    "of slots": (lambda m, x: m.router(x).mT, -1),
}  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("kind", ["sigmoid", "linear", "none"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_softmax_over_experts_is_no_attention(router, kind, sequences):
    """As many experts as tokens, in a block whose attention takes no softmax."""
    make, dim = ROUTERS[router]

    def run(m, x):
        q, k, v = (
            made(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for made in (m.q_proj, m.k_proj, m.v_proj)
        )
        if kind != "none":
            weights = (q @ k.mT).sigmoid() if kind == "sigmoid" else q.exp() @ k.exp().mT
            x = x + (weights.tril() @ v).transpose(1, 2).flatten(2)
        routed = make(m, m.norm(x)).softmax(dim).float()
        return x + routed.topk(2, dim=-1).values.flatten(2).sum(-1, keepdim=True)

    def block():
        made = {f"{name}_proj": nn.Linear(32, 32) for name in "qkv"}
        return Running(
            run, norm=nn.LayerNorm(32), router=nn.Linear(32, LENGTH), mlp=nn.Linear(32, 32),
            num_heads=HEADS, **made,
        )  # fmt: skip

    torch.manual_seed(0)
    model, x = nn.Sequential(block(), block()), torch.randn(sequences, LENGTH, 32)
    for layer in layers_of(model, x):
        assert not {"visible", "scores", "max_logits"} & layer.captured.keys()
        assert "softmax" in layer.missing["visible"]


def largest(m, x):
    """Weights of the two largest experts of each token, by a softmax over all of them."""
    top = m.router(m.norm(x)).topk(2, dim=-1)
    scores = torch.full((*x.shape[:-1], LENGTH), -torch.inf)
    chosen = scores.scatter(-1, top.indices, top.values).softmax(-1)
    return x * (1 + chosen.amax(-1, keepdim=True))


def attending(m, x):
    q, k, v = (
        made(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for made in (m.q_proj, m.k_proj, m.v_proj)
    )
    m.query = q
    return x + (scores_of(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


def beside(*runs):
    def run(m, x):
        for each in runs:
            x = each(m, x)
        return x

    def block():
        made = {f"{name}_proj": nn.Linear(32, 32) for name in "qkv"}
        router = nn.Linear(32, LENGTH)
        return Running(run, norm=nn.LayerNorm(32), router=router, num_heads=HEADS, **made)

    return nn.Sequential(block(), block())


def test_a_softmax_that_mixes_no_values_is_no_attention():
    """Also if it is not seen that its scores were projected."""
    for layer in layers_of(beside(largest), torch.randn(3, LENGTH, 32)):
        assert not {"visible", "scores", "max_logits"} & layer.captured.keys()
        assert "experts" in layer.missing["visible"]


@pytest.mark.parametrize(
    "runs",
    [(largest, attending), (attending, largest)],
    ids=["router first", "attention first"],
)
def test_attention_is_seen_beside_a_router_of_as_many_experts_as_tokens(runs):
    model = beside(*runs)
    for layer, block in zip(layers_of(model, torch.randn(3, LENGTH, 32)), model, strict=True):
        torch.testing.assert_close(layer.captured["query"], block.query)


# -- which dimension is which ----------------------------------------------------------------------

# Shape of scores, dimension of their keys, shape of the tokens; sequences, heads, queries, keys.
ARRANGED = [
    ((2, 4, 6, 7), 3, (2, 6), (2, 4, 6, 7)),
    ((2, 4, 6, 7), -1, (2, 6), (2, 4, 6, 7)),
    ((2, 4, 7, 6), 2, (2, 6), (2, 4, 6, 7)),
    ((7, 2, 4, 6), 0, (2, 6), (2, 4, 6, 7)),
    ((2, 4, 6, 7), 3, (12,), (2, 4, 6, 7)),
    ((2, 4, 6, 7), 3, (3, 6), None),
    ((2, 3, 5, 6, 7), 4, (2, 6), (2, 15, 6, 7)),  # groups of heads
    ((2, 3, 5, 6, 7), 4, (2, 18), (6, 5, 6, 7)),  # windows of a sequence
    ((2, 3, 5, 6, 7), 4, (2, 30), None),
    ((2, 3, 2, 5, 6, 7), 5, (2, 6), None),
    ((8, 6, 7), 2, (2, 6), (2, 4, 6, 7)),  # sequences and heads in one dimension
    ((8, 7, 6), 1, (2, 6), (2, 4, 6, 7)),
    ((9, 6, 7), 2, (2, 6), None),
    ((8, 6, 7), 2, (13,), None),
    ((6, 7), 1, (1, 6), (1, 1, 6, 7)),
    ((7, 6), 0, (6,), (1, 1, 6, 7)),
    ((6, 7), 1, (2, 3), None),
    ((6, 7), 1, (1, 5), None),
    ((2, 4, 0, 7), 3, (2, 0), None),
    ((0, 4, 6, 7), 3, (0, 6), None),
]


@pytest.mark.parametrize(("shape", "dim", "of_tokens", "sizes"), ARRANGED)
def test_sequences_times_queries_are_the_tokens(shape, dim, of_tokens, sizes):
    scores = torch.randn(shape)
    found = arrange_scores(scores, dim, of_tokens)
    if sizes is None:
        assert found is None
    else:
        assert torch.equal(found, scores.movedim(dim, -1).reshape(sizes))


SCORED = torch.randn(2, 4, 6, 6)


def recorded(scores, *, width: int = 32, dim: int = -1, products=(), **options):
    """Record a softmax of scores among 12 tokens; return the call and what made its factors."""
    hidden = (2, 6, width)
    return record_softmax(RowSampler(100, 0), scores, dim, hidden, products, **options)


def test_a_softmax_over_other_dimensions_is_a_further_one():
    call, made = recorded(SCORED)
    assert made == (None, None)
    assert not is_second_softmax(call, SCORED, 3)
    assert not is_second_softmax(call, SCORED, -1)
    assert is_second_softmax(call, SCORED, 2)
    assert is_second_softmax(call, SCORED.clone(), 3)
    assert is_second_softmax(call, SCORED[:, :, :, :2], 3)
    for other in (SCORED[:1], SCORED[:, :3], SCORED[0]):
        assert not is_second_softmax(call, other, -1)
    for dim in (0, 1, -4, -3):
        assert not is_second_softmax(call, SCORED, dim)


FEATURES_OR = (
    "a softmax over {keys} numbers was seen, but they are not known to be products of queries with "
    "all keys: they may be features (linear attention), chunks of keys or experts"
)


@pytest.mark.parametrize(
    ("scores", "width", "keys"),
    [
        (torch.randn(2, 4, 6, 5), 32, 5),  # not every token
        (torch.randn(2, 4, 6, 7), 32, 7),
        (SCORED, 24, 6),  # as many as features of a head
        (torch.randn(2, 3, 4, 5), 32, 5),  # no order fits
        (torch.randn(3, 3, 4, 5, 6), 32, 6),
    ],
)
def test_scores_of_no_known_product_may_be_of_features(scores, width, keys):
    with pytest.raises(NotUnderstoodError) as raised:
        recorded(scores, width=width)
    assert str(raised.value) == FEATURES_OR.format(keys=keys)


@pytest.mark.parametrize(
    "scores",
    [
        torch.randn(2, 6, 5),  # a router, of one head
        torch.randn(2, 6),
        torch.randn(3, 4, 5),
        torch.randn(3, 4, 0, 5),
    ],
)
def test_a_softmax_that_fits_no_attention_is_passed_over(scores):
    assert recorded(scores) == (None, (None, None))


def test_scores_of_each_query_and_key_are_recorded_without_any_product():
    call, _ = recorded(SCORED)
    assert torch.equal(call.scores, SCORED)
    assert (call.shape, call.heads, call.doubtful, call.scale) == ((2, 6), 4, False, None)
    assert recorded(torch.randn(2, 6, 6))[0].heads == 1


@pytest.mark.parametrize("turned", [False, True])
def test_scores_that_are_columns_of_a_projection_are_no_attention(turned):
    def find_columns(rows):
        """Projections of tokens have them, [..., heads, tokens, columns], or turned."""
        whole = SCORED.mT if turned else SCORED
        return "columns" if torch.equal(rows, whole) else None

    with pytest.raises(NotUnderstoodError, match="a softmax over 6 numbers"):
        recorded(SCORED, find_columns=find_columns)


def product(query, key, factor=1.0):
    return Product(query.flatten(0, 1), key.flatten(0, 1).mT, factor)


@pytest.mark.parametrize(("width", "doubtful"), [(32, False), (24, True)])
def test_factors_of_scores_are_recorded_without_what_they_were_multiplied_by(width, doubtful):
    query, key = torch.randn(2, 4, 6, width // 4), torch.randn(2, 4, 6, width // 4)
    scaled = [product(query * 0.3, key * 0.3, 0.3)]
    scores = 0.09 * 2 * query @ key.mT
    call, made = recorded(scores, width=width, products=scaled, scale=2.0)
    assert (call.doubtful, made) == (doubtful, (None, None))
    assert call.scale == pytest.approx(0.18)
    for found, expected in zip(call.made_of, (query, key), strict=True):
        torch.testing.assert_close(found, expected)
    unscaled, _ = recorded(scores, width=width, products=[product(query, key)], scale=None)
    assert unscaled.scale is None
    assert torch.equal(unscaled.made_of[0], query)


def test_the_sum_of_several_products_has_no_factors():
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    call, made = recorded(2 * query @ key.mT, products=[product(query, key)] * 2, scale=1.0)
    assert (call.made_of, made) == (None, (None, None))
    assert call.why_unknown == (
        "attention is written out by hand: its scores are the sum of 2 products, and it is not "
        "clear which of them multiplies queries and keys"
    )


def columns_of(given):
    """Columns of a projection of some tensor, the same for all tokens."""
    projections = [SimpleNamespace(given=given)]
    return SimpleNamespace(projections=projections, pattern=SimpleNamespace(which=[0]), repeats=1)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ([(1, 1), (1, None)], 0),
        ([(1, 2), (1, 1)], 1),  # keys are made from another tensor, such as positions
        ([(None, 1), (2, 2)], 1),
        ([(1, 1), (2, 2)], None),
        ([(1, 2), (None, None)], None),
    ],
)
def test_of_several_products_that_of_one_tensor_has_the_columns(given, chosen):
    factors = [[torch.randn(2, 4, 6, 8) for _ in pair] for pair in given]
    found = [[None if x is None else columns_of(x) for x in pair] for pair in given]

    def find_columns(heads):
        for pair, columns in zip(factors, found, strict=True):
            for factor, each in zip(pair, columns, strict=True):
                if torch.equal(heads, factor):
                    return each
        return None

    products = [product(query, key) for query, key in factors]
    call, made = recorded(SCORED, products=products, scale=1.0, find_columns=find_columns)
    assert call.made_of is None
    assert [*made] == ([None, None] if chosen is None else found[chosen])


def test_what_made_the_scores_of_several_products_is_missing_and_their_attention_is_not():
    model = blocks_of(lambda q, k, v: (scores_of(q, k) + scores_of(k, q)).softmax(-1) @ v)
    for layer in layers_of(model, torch.randn(3, LENGTH, 32)):
        assert "visible" in layer.captured
        for view in ("query", "key", "bias", "scale", "softcap", "sink"):
            assert "the sum of 2 products" in layer.missing[view]


def test_products_of_another_size_did_not_become_the_scores():
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5, 8)
    other, sink = product(query, key[:, :, :4]), product(query, key)
    call, _ = recorded(SCORED, products=[other], scale=1.0)
    assert call.made_of is None
    call, _ = recorded(torch.randn(2, 4, 6, 6), products=[other, sink], scale=1.0)
    assert "sum of 2 products" in call.why_unknown
    call, _ = recorded(torch.randn(2, 4, 6, 6), products=[sink], scale=1.0)
    assert torch.equal(call.made_of[1], key)
