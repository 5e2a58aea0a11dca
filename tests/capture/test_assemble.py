"""Layers and their views, made of what a window kept; what is missing says why."""

import pytest
import torch
from models import PlainDecoder, batch, transformer
from referee import rebuilt, sampled
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import (
    ToContext,
    attend_by_hand,
    by_place,
    check_attention,
    check_hidden,
    look,
    notes,
    scores_of,
    window,
)

from geomon import describe, measure


def test_token_ids_and_positions_belong_to_the_rows_that_are_finite():
    """Compared by their values: a shift leaves the lengths as they are."""
    model, ids = PlainDecoder(), batch()
    with torch.no_grad():
        model.tokens.weight[7] = torch.nan
        ids[0], ids[1:] = 7, ids[1:].clamp(max=6)
        clean = model.tokens(ids) + model.places(torch.arange(ids.shape[1]))
        with window(model) as seen:
            model(ids)
    first = seen.snapshot().layers[0].captured
    rows = sampled(seen, "", 0).rows
    kept = rows[ids.flatten()[rows] != 7]
    assert (len(rows), len(kept)) == (256, 224)
    assert torch.equal(first["token_ids"], ids.flatten()[kept])
    assert torch.equal(first["positions"], kept % ids.shape[1])
    assert torch.equal(first["hidden"], clean.flatten(0, 1)[kept])
    assert any("32 of 256 rows are not finite" in text for text in notes(seen))


def test_half_precision_is_kept_in_float32_and_named():
    snapshot = look(transformer("gpt2").to(torch.bfloat16), batch()).snapshot()
    assert snapshot.info.dtype == "bfloat16"
    assert snapshot.layers[1].captured["hidden"].dtype == torch.float32


def test_attention_that_cannot_be_rebuilt_costs_nothing_else(monkeypatch):
    def broken(*args):
        raise RuntimeError("of shapes, say")

    monkeypatch.setattr("geomon.capture.assemble.read_call", broken)
    layers = look(PlainDecoder(), batch()).snapshot().layers
    assert all("hidden" in layer.captured for layer in layers)
    reasons = {layer.missing["visible"] for layer in layers[1:]}
    assert reasons == {"attention could not be rebuilt: RuntimeError: of shapes, say"}


def test_hidden_states_of_no_token_are_said():
    class Prompted(PlainDecoder):
        def forward(self, ids):
            x = torch.cat([torch.zeros(len(ids), 3, 32), self.tokens(ids)], dim=1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    missing = look(Prompted(), batch()).snapshot().layers[1].missing
    assert set(missing) == {"token_ids", "last_token_ids"}
    assert all("one received fewer" in reason for reason in missing.values())


# -- blocks whose input is not the output of the block before ------------------------------------


class PoolingBlock(nn.Module):
    """A block that flattens its tokens before it projects them, as some do."""

    def __init__(self, *, by_hand: bool, flat: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.num_heads, self.by_hand, self.flat = 4, by_hand, flat

    def forward(self, x, hidden=None):
        rows = self.norm(x)
        fused = self.qkv(rows.flatten(0, 1) if self.flat else rows).view(*x.shape[:2], 96)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in fused.chunk(3, dim=-1))
        self.query, self.key = q, k
        bias = torch.zeros(len(x), 1, 1, x.shape[1])
        if hidden is not None:
            bias = bias.masked_fill(hidden[:, None, None, :], -1e9)
        scores = scores_of(q, k) + bias
        self.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        y = scores.softmax(-1) @ v if self.by_hand else attend(q, k, v, attn_mask=bias)
        return x + y.transpose(1, 2).flatten(2)


class Pooling(nn.Module):
    """Four blocks; half of the tokens are merged in the middle."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PoolingBlock(**options) for _ in range(4))

    def forward(self, x, hidden=None):
        self.states = [x]
        for depth, block in enumerate(self.blocks):
            if depth == 2:
                x = nn.functional.avg_pool1d(x.mT, 2).mT
                hidden = None if hidden is None else hidden[:, ::2]
            x = block(x, hidden)
            self.states.append(x)
        return x


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_a_block_that_is_given_fewer_tokens_is_seen_like_the_others(by_hand, flat, pads):
    model, real = Pooling(by_hand=by_hand, flat=flat), torch.ones(5, 12, dtype=torch.bool)
    if pads:
        real[0, 8:] = real[3, 4:] = False
    seen = look(model, torch.randn(5, 12, 32), ~real)
    for depth, block in enumerate(model.blocks, 1):
        tokens = (real if depth < 3 else real[:, ::2]).flatten().nonzero().squeeze(1)
        chosen = sampled(seen, "", depth)
        for rows in (chosen.rows, chosen.query_rows):
            assert torch.equal(rows.sort().values, tokens)
        check_hidden(seen, depth, model.states[depth])
        check_attention(seen, "", depth, block)


def test_padding_that_is_lost_with_the_length_is_said():
    class Lost(Pooling):
        def forward(self, x, attention_mask=None):
            return super().forward(x, None)

    mask = torch.ones(5, 12)
    mask[0, 8:] = 0
    seen = look(Lost(by_hand=False, flat=False), torch.randn(5, 12, 32), attention_mask=mask)
    said = "hidden states, layer 3, 4: padding is known"
    assert any(text.startswith(said) for text in notes(seen))
    assert len(sampled(seen, "", 2).rows) == 56
    assert len(sampled(seen, "", 3).rows) == 30


# -- several attentions in a block -----------------------------------------------------------------


class TwoAttentions(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn1, self.attn2 = ToContext(**options), ToContext(**options)
        self.ff = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, context=None):
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(x)


class SpaceTime(nn.Module):
    """Attention among the places of each frame, then among the frames of each place."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.space, self.time = ToContext(**options), ToContext(**options)

    def forward(self, x, context=None):
        frames = x.unflatten(1, (3, 3))
        frames = frames + self.space(self.norm1(frames).flatten(0, 1)).unflatten(0, (-1, 3))
        turned = frames.transpose(1, 2)
        turned = turned + self.time(self.norm2(turned).flatten(0, 1)).unflatten(0, (-1, 3))
        return turned.transpose(1, 2).flatten(1, 2)


class Denoiser(nn.Module):
    def __init__(self, kind=TwoAttentions, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer_blocks = nn.ModuleList(kind(**options) for _ in range(3))

    def forward(self, x, context=None, attention_mask=None):
        for block in self.transformer_blocks:
            x = block(x, context)
        return x


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("kind", "first", "second", "keys"),
    [
        (TwoAttentions, "attn1", "attn2", None),
        (TwoAttentions, "attn1", "attn2", 5),
        (TwoAttentions, "attn1", "attn2", 9),
        (SpaceTime, "space", "time", None),
    ],
)
def test_a_second_attention_of_a_block_makes_layers_of_its_own(by_hand, kind, first, second, keys):
    model, x = Denoiser(kind, by_hand=by_hand), torch.randn(4, 9, 32)
    context = None if keys is None else torch.randn(4, keys, 32)
    seen = look(model, x, context)
    layers = by_place(seen.snapshot())
    sides = [(second, depth) for depth in (1, 2, 3)]
    assert [*layers] == [*(("", depth) for depth in range(4)), *sides]
    for stack, depth in layers:
        if depth:
            attention = getattr(model.transformer_blocks[depth - 1], stack or first)
            own = torch.arange(36).view(4, 3, 3).mT.flatten() if stack == "time" else None
            check_attention(seen, stack, depth, attention, own)
    assert layers[second, 2].name == f"transformer_blocks.1.{second}"
    assert layers[second, 2].sources == {"attention", "projection"}
    shown = dict(describe(model, lambda run: run(x, context)).rows)["further attention"]
    assert shown.startswith(f"{second}: ")
    assert ("to keys of another source" in shown) == (keys is not None)
    assert f"{second}: seen as it runs" in dict(describe(model).rows)["further attention"]
    values = measure(model, torch.randn(40, 9, 32))
    each = [values[f"max_logit/{second}_layer_{depth:02d}"] for depth in (1, 2, 3)]
    assert values[f"max_logit/{second}_mean"] == pytest.approx(sum(each) / 3)


def test_padding_of_the_stack_is_not_that_of_keys_of_another_source():
    """As many keys as tokens: only where they come from tells them apart."""
    mask = torch.ones(4, 9)
    mask[1, 5:] = 0
    x, context = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    layers = by_place(look(Denoiser(), x, context, attention_mask=mask).snapshot())
    assert len(layers["", 1].captured["projected_key"]) == 32
    assert len(layers["attn2", 1].captured["projected_query"]) == 32
    assert len(layers["attn2", 1].captured["projected_key"]) == 36


class Unnamed(nn.Module):
    """An attention with a projection under a name of its own."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.rows, self.attend = nn.Linear(32, 96), attend_by_hand if by_hand else attend

    def forward(self, x, context=None):
        q, k, v = self.rows(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Several(nn.Sequential):
    """Adds what each of its attentions makes."""

    def forward(self, x, context=None):
        for module in self:
            x = x + module(x)
        return x


@pytest.mark.parametrize("kinds", [(Unnamed, ToContext), (ToContext, Unnamed)])
def test_a_second_attention_that_cannot_be_told_apart_is_said(kinds):
    model, x = Denoiser(lambda: Several(*(kind() for kind in kinds))), torch.randn(4, 9, 32)
    seen = look(model, x)
    (note,) = notes(seen)[:1]
    assert note.startswith("attention, layer 1, 2, 3: attention is called more than once")
    assert note in [text for label, text in describe(model, x).rows if label == "note"]
    for depth, block in enumerate(model.transformer_blocks, 1):
        found, _ = rebuilt(seen.snapshot().layers[depth])
        truth = block[kinds.index(ToContext)].weights
        torch.testing.assert_close(found, truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("by_hand", [False, True])
def test_of_two_attentions_without_known_projections_the_first_is_measured_and_it_is_said(by_hand):
    kinds = [Unnamed(by_hand=by_hand) for _ in range(2)]
    model, x = Denoiser(lambda: Several(*kinds)), torch.randn(4, 9, 32)
    said = [text for text in notes(look(model, x)) if "called more than once" in text]
    assert [text.partition(":")[0] for text in said] == ["attention, layer 1, 2, 3"]
    alone = look(Denoiser(lambda: Several(kinds[0], nn.Identity())), x)
    assert not any("called more than once" in text for text in notes(alone))


def test_a_second_attention_that_is_not_called_is_said():
    class Skipping(TwoAttentions):
        def forward(self, x, context=None):
            return x + self.attn1(self.norm1(x))

    seen = look(Denoiser(Skipping), torch.randn(4, 9, 32))
    assert {layer.stack for layer in seen.snapshot().layers} == {""}
    said = "attn2: attention, layer 1, 2, 3: it was not seen in this pass: it is left out"
    assert said in notes(seen)


# -- heads that are modules of their own -----------------------------------------------------------


class OneHead(nn.Module):
    """Attends to earlier keys, and to `reach - 1` later ones."""

    reach, sharpness = 1, 1.0

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8, bias=False) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x):
        self.q, self.k, v = self.query(x), self.key(x), self.value(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.reach)
        scores = self.sharpness * scores_of(self.q, self.k).masked_fill(later, -torch.inf)
        self.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        if self.by_hand:
            return scores.softmax(-1) @ v
        scale, is_causal = self.sharpness * 8**-0.5, self.reach == 1
        mask = None if is_causal else ~later
        return attend(self.q, self.k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


class ManyHeads(nn.Module):
    """An attention as tutorials write it; `num_heads` is not what each of its heads has."""

    def __init__(self, by_hand: bool, wide: bool) -> None:
        super().__init__()
        self.num_heads = 4
        self.heads = nn.ModuleList(OneHead(by_hand) for _ in range(4))
        self.mlp = nn.Linear(32, 32 * (8 if wide else 1))

    def forward(self, x):
        made = [head(x) for head in self.heads]
        for name, kept in (("query", "q"), ("key", "k"), ("weights", "weights")):
            setattr(self, name, torch.stack([getattr(head, kept) for head in self.heads], 1))
        return x + torch.cat(made, -1) + self.mlp(x)[..., :32]


@pytest.mark.parametrize("sequences", [1, 4, 12])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_heads_that_are_modules_are_the_heads_of_one_attention(by_hand, wide, sequences):
    model = nn.Sequential(ManyHeads(by_hand, wide), ManyHeads(by_hand, wide))
    seen = look(model, torch.randn(sequences, 12, 32))
    layers = by_place(seen.snapshot())
    assert [*layers] == [("", 0), ("", 1), ("", 2)]
    for depth, block in enumerate(model, 1):
        views = layers["", depth].captured
        torch.testing.assert_close(rebuilt(layers["", depth])[0], block.weights, atol=1e-6, rtol=0)
        rows = views["query_sequences"], slice(None), views["positions"]
        for which in ("query", "key"):
            assert torch.equal(views[f"projected_{which}"], getattr(block, which)[rows])
        assert views["max_logits"].shape == (4,)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("differ", ["masks", "scales"])
def test_heads_that_are_modules_may_hide_other_keys_and_have_one_scale(differ, by_hand):
    model = nn.Sequential(ManyHeads(by_hand, wide=False), ManyHeads(by_hand, wide=False))
    for block in model:
        if differ == "masks":
            block.heads[1].reach, block.heads[3].reach = 3, 2
        else:
            block.heads[1].sharpness = 0.5
    for layer, block in zip(
        look(model, torch.randn(4, 12, 32)).snapshot().layers[1:], model, strict=True
    ):
        if differ == "masks":
            torch.testing.assert_close(rebuilt(layer)[0], block.weights, atol=1e-6, rtol=0)
        else:
            assert "differ in their scale" in layer.missing["query"]
