"""Layers and their views, made of what a window kept; what is missing says why."""

import itertools

import pytest
import torch
from models import PlainDecoder, batch, transformer
from referee import rebuilt, sampled
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import ToContext, attend_by_hand, by_place, look, notes, scores_of, window

from geomon import describe, measure
from geomon.capture.snapshot import Layer


def assert_attention(layer: Layer, truth: Tensor) -> None:
    torch.testing.assert_close(rebuilt(layer)[0], truth, atol=1e-6, rtol=0)


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


def test_blocks_without_attention_are_asked_for_hidden_states_alone():
    model = PlainDecoder()
    model.blocks.insert(1, nn.Sequential(nn.Linear(32, 32)))
    layers = look(model, batch()).snapshot().layers
    assert layers[2].sources == {"hidden", "last"}
    assert layers[2].missing == {}
    assert "query" in layers[3].captured


@pytest.mark.parametrize("virtual", [0, 3])
def test_hidden_states_of_no_token_are_said(virtual):
    class Prompted(PlainDecoder):
        def forward(self, ids):
            x = torch.cat([torch.zeros(len(ids), virtual, 32), self.tokens(ids)], dim=1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    missing = look(Prompted(), batch()).snapshot().layers[1].missing
    assert set(missing) == ({"token_ids", "last_token_ids"} if virtual else set())
    assert all("one was given fewer" in reason for reason in missing.values())


# -- feature maps ------------------------------------------------------------------------------


class Step(nn.Module):
    """A convolution; a linear layer in it makes its width one of its sizes."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, width, 3, stride=stride, padding=1)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = self.conv(x)
        return x + self.linear(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("widths", [(4, 8, 8), (16, 8, 8), (6, 12, 24)])
def test_feature_maps_are_rows_of_channels_whatever_their_size(widths, stride):
    model = nn.Sequential(*(Step(a, b, stride) for a, b in itertools.pairwise(widths))).eval()
    images = torch.randn(5, widths[0], 8, 8)
    with torch.no_grad():
        expected = [images, model[0](images), model(images)]
        with window(model, rows=100) as seen:
            model(images)
    for layer, maps in zip(seen.snapshot().layers, expected, strict=True):
        rows = sampled(seen, "", layer.index).rows
        assert len(rows) == min(100, maps[:, 0].numel())
        assert torch.equal(layer.captured["hidden"], maps.movedim(1, 3).flatten(0, 2)[rows])
        assert torch.equal(layer.captured["positions"], rows % maps[0, 0].numel())
        assert layer.sources == {"hidden"}


# -- blocks whose input is not the output of the block before ------------------------------------


class PoolingBlock(nn.Module):
    """A block that flattens its tokens before it projects them, as some do."""

    def __init__(self, *, by_hand: bool, flat: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.num_heads, self.by_hand, self.flat = 4, by_hand, flat

    def forward(self, x, hidden=None):
        rows = self.norm(x)
        self.fused = self.qkv(rows.flatten(0, 1) if self.flat else rows).view(*x.shape[:2], 96)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.fused.chunk(3, dim=-1))
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
    for layer in seen.snapshot().layers[1:]:
        depth, block = layer.index, model.blocks[layer.index - 1]
        valid = real if depth < 3 else real[:, ::2]
        chosen, tokens = sampled(seen, "", depth), valid.flatten().nonzero().squeeze(1)
        for rows in (chosen.rows, chosen.query_rows):
            assert torch.equal(rows.sort().values, tokens)
        assert torch.equal(layer.captured["hidden"], model.states[depth].flatten(0, 1)[chosen.rows])
        query, key, _ = (
            block.fused.flatten(0, 1)[chosen.query_rows].unflatten(-1, (12, 8)).split(4, 1)
        )
        assert torch.equal(layer.captured["projected_query"], query)
        assert torch.equal(layer.captured["projected_key"], key)
        found, kept = rebuilt(layer)
        assert torch.equal(kept, valid[:, None].expand_as(kept))
        truth = block.weights[chosen.sequences]
        torch.testing.assert_close(found[kept], truth[kept], atol=1e-6, rtol=0)


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


class Windowed(nn.Module):
    """Attention inside windows, which are a dimension of their own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv = heads, nn.Linear(32, 96)

    def forward(self, x):
        parts = self.qkv(x).unflatten(1, (-1, 4)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = parts.permute(3, 0, 4, 1, 2, 5)
        return x + attend_by_hand(q, k, v).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_of_five_dimensions_is_seen_or_refused_in_words(heads):
    seen = look(nn.Sequential(Windowed(heads), Windowed(heads)), torch.randn(3, 16, 32))
    for layer in seen.snapshot().layers[1:]:
        assert layer.captured["hidden"].shape == (48, 32)
        reasons = [layer.missing.get(view, "") for view in ("visible", "projected_query")]
        assert not any("Error" in reason for reason in reasons)


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
@pytest.mark.parametrize("keys", [None, 5, 9])
def test_a_second_attention_of_a_block_makes_layers_of_its_own(by_hand, keys):
    model, x = Denoiser(by_hand=by_hand), torch.randn(4, 9, 32)
    context = None if keys is None else torch.randn(4, keys, 32)
    seen = look(model, x, context)
    layers = by_place(seen.snapshot())
    sides = [("attn2", depth) for depth in (1, 2, 3)]
    assert [*layers] == [*(("", depth) for depth in range(4)), *sides]
    for (stack, depth), layer in layers.items():
        if depth == 0:
            continue
        module = getattr(model.transformer_blocks[depth - 1], stack or "attn1")
        chosen = sampled(seen, stack, depth)
        assert_attention(layer, module.weights[chosen.sequences])
        for which, rows in (("query", chosen.query_rows), ("key", chosen.key_rows)):
            expected = getattr(module, which).transpose(1, 2).flatten(0, 1)
            assert len(rows) == len(expected)
            assert torch.equal(layer.captured[f"projected_{which}"], expected[rows])
    assert layers["attn2", 2].name == "transformer_blocks.1.attn2"
    assert layers["attn2", 2].sources == {"attention", "projection"}
    shown = dict(describe(model, lambda run: run(x, context)).rows)["further attention"]
    assert shown.startswith("attn2: ")
    assert ("to keys of another source" in shown) == (keys is not None)
    assert "attn2: 4 heads of width 8" in dict(describe(model).rows)["further attention"]
    values = measure(model, torch.randn(40, 9, 32))
    each = [values[f"max_logit/attn2_layer_{depth:02d}"] for depth in (1, 2, 3)]
    assert values["max_logit/attn2_mean"] == pytest.approx(sum(each) / 3)


def test_padding_of_the_stack_is_not_that_of_keys_of_another_source():
    """As many keys as tokens: only where they come from tells them apart."""
    mask = torch.ones(4, 9)
    mask[1, 5:] = 0
    x, context = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    layers = by_place(look(Denoiser(), x, context, attention_mask=mask).snapshot())
    assert len(layers["", 1].captured["projected_key"]) == 32
    assert len(layers["attn2", 1].captured["projected_query"]) == 32
    assert len(layers["attn2", 1].captured["projected_key"]) == 36


class SpaceTime(nn.Module):
    """Attention among the places of each frame, then among the frames of each place."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.space, self.time = ToContext(**options), ToContext(**options)

    def forward(self, x, context=None):
        frames = x.unflatten(1, (3, 4))
        frames = frames + self.space(self.norm1(frames).flatten(0, 1)).unflatten(0, (-1, 3))
        turned = frames.transpose(1, 2)
        turned = turned + self.time(self.norm2(turned).flatten(0, 1)).unflatten(0, (-1, 4))
        return turned.transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("by_hand", [False, True])
def test_attention_in_space_and_in_time_are_apart(by_hand):
    model = Denoiser(SpaceTime, by_hand=by_hand)
    seen = look(model, torch.randn(5, 12, 32))
    layers = by_place(seen.snapshot())
    for stack, name, shape in (("", "space", (15, 4, 4, 4)), ("time", "time", (20, 4, 3, 3))):
        for depth in (1, 2, 3):
            layer = layers[stack, depth]
            module = getattr(model.transformer_blocks[depth - 1], name)
            assert module.weights.shape == shape
            assert_attention(layer, module.weights)
            rows = sampled(seen, stack, depth).query_rows
            query = module.query.transpose(1, 2).flatten(0, 1)[rows]
            assert torch.equal(layer.captured["projected_query"], query)


class Unnamed(nn.Module):
    """Attentions with projections under a name of their own."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(32, 96) for _ in range(count))

    def forward(self, x, context=None):
        made = torch.zeros(1)
        for row in self.rows:
            q, k, v = row(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
            made = made + attend(q, k, v).transpose(1, 2).flatten(2)
        return made


class Several(nn.Sequential):
    """Adds what each of its attentions makes."""

    def forward(self, x, context=None):
        for module in self:
            x = x + module(x)
        return x


@pytest.mark.parametrize("order", ["unnamed first", "unnamed last", "both unnamed"])
def test_a_second_attention_that_cannot_be_told_apart_is_said(order):
    def kind():
        parts = [Unnamed(), ToContext()][:: 1 if order == "unnamed first" else -1]
        return Unnamed(2) if order == "both unnamed" else Several(*parts)

    model, x = Denoiser(kind), torch.randn(4, 9, 32)
    seen = look(model, x)
    (note,) = notes(seen)[:1]
    assert note.startswith("attention, layer 1, 2, 3: it is called more than once")
    assert note in [text for label, text in describe(model, x).rows if label == "note"]
    for layer in seen.snapshot().layers[1:] if order != "both unnamed" else ():
        (known,) = (m for m in model.transformer_blocks[layer.index - 1] if hasattr(m, "weights"))
        assert_attention(layer, known.weights)


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
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8, bias=False) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x):
        self.q, self.k, v = self.query(x), self.key(x), self.value(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores_of(self.q, self.k).masked_fill(later, -torch.inf)
        self.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return scores.softmax(-1) @ v if self.by_hand else attend(self.q, self.k, v, is_causal=True)


class ManyHeads(nn.Module):
    """An attention as tutorials write it; `num_heads` is not what each of its heads has."""

    def __init__(self, by_hand: bool, wide: bool) -> None:
        super().__init__()
        self.num_heads = 4
        self.heads = nn.ModuleList(OneHead(by_hand) for _ in range(4))
        self.mlp = nn.Linear(32, 32 * (8 if wide else 1))

    def forward(self, x):
        return x + torch.cat([head(x) for head in self.heads], -1) + self.mlp(x)[..., :32]


@pytest.mark.parametrize("sequences", [1, 4, 12])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_heads_that_are_modules_are_the_heads_of_one_attention(by_hand, wide, sequences):
    model = nn.Sequential(ManyHeads(by_hand, wide), ManyHeads(by_hand, wide))
    snapshot = look(model, torch.randn(sequences, 12, 32)).snapshot()
    assert [*by_place(snapshot)] == [("", 0), ("", 1), ("", 2)]
    for layer in snapshot.layers[1:]:
        views, heads = layer.captured, model[layer.index - 1].heads
        assert_attention(layer, torch.stack([head.weights for head in heads], 1))
        rows = views["query_sequences"], views["positions"]
        for view, name in (("projected_query", "q"), ("projected_key", "k")):
            each = torch.stack([getattr(head, name) for head in heads], 2)
            assert torch.equal(views[view], each[rows])
        assert views["max_logits"].shape == (4,)
