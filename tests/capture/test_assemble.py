"""Layers and their views, made of what a window kept; what is missing says why."""

import pytest
import torch
from models import PlainDecoder, Running, batch, transformer
from referee import rebuilt, sampled
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import (
    ToContext,
    attend_by_hand,
    by_place,
    check_attention,
    check_hidden,
    check_projected,
    look,
    notes,
    scores_of,
    states_of,
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
    def prompted(model, ids):
        return torch.cat([torch.zeros(len(ids), 3, 32), model.tokens(ids)], dim=1)

    missing = look(PlainDecoder(embed=prompted), batch()).snapshot().layers[1].missing
    assert set(missing) == {"token_ids", "last_token_ids"}
    assert all("one received fewer" in reason for reason in missing.values())


# -- blocks whose input is not the output of the block before ------------------------------------


def pooling(*, by_hand: bool, flat: bool) -> nn.Module:
    """Four blocks; half of the tokens are merged in the middle.

    Args:
        by_hand: Whether attention is written out.
        flat: Whether a block flattens its tokens before it projects them, as some do.
    """

    def block(m, x, hidden):
        rows = m.norm(x)
        fused = m.qkv(rows.flatten(0, 1) if flat else rows).view(*x.shape[:2], 96)
        m.query, m.key, v = fused.unflatten(-1, (12, -1)).transpose(1, 2).chunk(3, dim=1)
        bias = hidden[:, None, None] * -1e9
        scores = scores_of(m.query, m.key) + bias
        m.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        y = scores.softmax(-1) @ v if by_hand else attend(m.query, m.key, v, attn_mask=bias)
        return x + y.transpose(1, 2).flatten(2)

    def run(m, x, hidden=None, **ignored):
        hidden = torch.zeros(x.shape[:2], dtype=torch.bool) if hidden is None else hidden
        for depth, each in enumerate(m.blocks):
            if depth == 2:
                x, hidden = nn.functional.avg_pool1d(x.mT, 2).mT, hidden[:, ::2]
            x = each(x, hidden)
        return x

    blocks = (
        Running(block, num_heads=4, norm=nn.LayerNorm(32), qkv=nn.Linear(32, 96)) for _ in range(4)
    )
    return Running(run, blocks=nn.ModuleList(blocks))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_a_block_that_is_given_fewer_tokens_is_seen_like_the_others(by_hand, flat, pads):
    model, real = pooling(by_hand=by_hand, flat=flat), torch.ones(5, 12, dtype=torch.bool)
    if pads:
        real[0, 8:] = real[3, 4:] = False
    x = torch.randn(5, 12, 32)
    states, seen = states_of(model, x, ~real), look(model, x, ~real)
    for depth, block in enumerate(model.blocks, 1):
        tokens = (real if depth < 3 else real[:, ::2]).flatten().nonzero().squeeze(1)
        chosen = sampled(seen, "", depth)
        for rows in (chosen.rows, chosen.query_rows):
            assert torch.equal(rows.sort().values, tokens)
        check_hidden(seen, depth, states[depth])
        check_attention(seen, "", depth, block)


def test_padding_that_is_lost_with_the_length_is_said():
    mask = torch.ones(5, 12)
    mask[0, 8:] = 0
    model = pooling(by_hand=False, flat=False)
    seen = look(model, torch.randn(5, 12, 32), attention_mask=mask)
    said = "hidden states, layer 3, 4: padding is known"
    assert any(text.startswith(said) for text in notes(seen))
    assert [len(sampled(seen, "", depth).rows) for depth in (2, 3)] == [56, 30]


# -- several attentions in a block -----------------------------------------------------------------


def two_attentions(m, x, context=None):
    x = x + m.attn1(m.norm1(x))
    return x + m.ff(x + m.attn2(m.norm2(x), context))


def space_time(m, x, context=None):
    """Attention among the places of each frame, then among the frames of each place."""
    frames = x.unflatten(1, (3, 3))
    frames = frames + m.attn1(m.norm1(frames).flatten(0, 1)).unflatten(0, (-1, 3))
    turned = frames.transpose(1, 2)
    turned = turned + m.attn2(m.norm2(turned).flatten(0, 1)).unflatten(0, (-1, 3))
    return turned.transpose(1, 2).flatten(1, 2)


def denoiser(block) -> nn.Module:
    def run(m, x, context=None, attention_mask=None):
        for each in m.transformer_blocks:
            x = each(x, context)
        return x

    torch.manual_seed(0)
    return Running(run, transformer_blocks=nn.ModuleList(block() for _ in range(3)))


def pair(run=two_attentions, *, by_hand=False) -> nn.Module:
    """A block of two attentions."""
    first, second = (ToContext(by_hand=by_hand) for _ in range(2))
    norms = {"norm1": nn.LayerNorm(32), "norm2": nn.LayerNorm(32)}
    return Running(run, attn1=first, attn2=second, ff=nn.Linear(32, 32), **norms)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("run", "keys"),
    [(two_attentions, None), (two_attentions, 5), (two_attentions, 9), (space_time, None)],
)
def test_a_second_attention_of_a_block_makes_layers_of_its_own(by_hand, run, keys):
    model, x = denoiser(lambda: pair(run, by_hand=by_hand)), torch.randn(4, 9, 32)
    context = None if keys is None else torch.randn(4, keys, 32)
    seen = look(model, x, context)
    layers = by_place(seen.snapshot())
    sides = [("attn2", depth) for depth in (1, 2, 3)]
    assert [*layers] == [*(("", depth) for depth in range(4)), *sides]
    for stack, depth in [*layers][1:]:
        attention = getattr(model.transformer_blocks[depth - 1], stack or "attn1")
        turned = run is space_time and stack
        own = torch.arange(36).view(4, 3, 3).mT.flatten() if turned else None
        check_attention(seen, stack, depth, attention, own)
    assert layers["attn2", 2].name == "transformer_blocks.1.attn2"
    assert layers["attn2", 2].sources == {"attention", "projection"}
    shown = dict(describe(model, lambda run: run(x, context)).rows)["further attention"]
    assert shown.startswith("attn2: ")
    assert ("to keys of another source" in shown) == (keys is not None)
    assert "attn2: seen as it runs" in dict(describe(model).rows)["further attention"]
    values = measure(model, torch.randn(40, 9, 32))
    each = [values[f"max_logit/attn2_layer_{depth:02d}"] for depth in (1, 2, 3)]
    assert values["max_logit/attn2_mean"] == pytest.approx(sum(each) / 3)


def test_padding_of_the_stack_is_not_that_of_keys_of_another_source():
    """As many keys as tokens: only where they come from tells them apart."""
    mask = torch.ones(4, 9)
    mask[1, 5:] = 0
    x, context = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    layers = by_place(look(denoiser(pair), x, context, attention_mask=mask).snapshot())
    assert len(layers["", 1].captured["projected_key"]) == 32
    assert len(layers["attn2", 1].captured["projected_query"]) == 32
    assert len(layers["attn2", 1].captured["projected_key"]) == 36


def unnamed(*, by_hand: bool = False) -> nn.Module:
    """An attention with a projection under a name of its own."""
    function = attend_by_hand if by_hand else attend

    def run(m, x):
        q, k, v = m.rows(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
        return function(q, k, v).transpose(1, 2).flatten(2)

    return Running(run, rows=nn.Linear(32, 96))


def several(*attentions: nn.Module) -> nn.Module:
    """Adds what each of its attentions makes."""

    def run(m, x, context=None):
        for each in m.each:
            x = x + each(x)
        return x

    return Running(run, each=nn.ModuleList(attentions))


@pytest.mark.parametrize("kinds", [(unnamed, ToContext), (ToContext, unnamed)])
def test_a_second_attention_that_cannot_be_told_apart_is_said(kinds):
    model, x = denoiser(lambda: several(*(kind() for kind in kinds))), torch.randn(4, 9, 32)
    seen = look(model, x)
    (note,) = notes(seen)[:1]
    assert note.startswith("attention, layer 1, 2, 3: attention is called more than once")
    assert note in [text for label, text in describe(model, x).rows if label == "note"]
    for depth, block in enumerate(model.transformer_blocks, 1):
        found, _ = rebuilt(seen.snapshot().layers[depth])
        truth = block.each[kinds.index(ToContext)].weights
        torch.testing.assert_close(found, truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("by_hand", [False, True])
def test_of_two_attentions_without_known_projections_the_first_is_measured_and_it_is_said(by_hand):
    kinds, x = [unnamed(by_hand=by_hand) for _ in range(2)], torch.randn(4, 9, 32)
    for second, is_said in ((kinds[1], True), (nn.Identity(), False)):
        seen = look(denoiser(lambda second=second: several(kinds[0], second)), x)
        said = [text for text in notes(seen) if "called more than once" in text]
        assert [text.partition(":")[0] for text in said] == ["attention, layer 1, 2, 3"] * is_said


def test_a_second_attention_that_is_not_called_is_said():
    skipping = denoiser(lambda: pair(lambda m, x, context=None: x + m.attn1(m.norm1(x))))
    seen = look(skipping, torch.randn(4, 9, 32))
    assert {layer.stack for layer in seen.snapshot().layers} == {""}
    said = "attn2: attention, layer 1, 2, 3: it was not seen in this pass: it is left out"
    assert said in notes(seen)


# -- heads that are modules of their own -----------------------------------------------------------


def one_head(*, by_hand: bool, reach: int = 1, sharpness: float = 1.0) -> nn.Module:
    """Attends to earlier keys, and to `reach - 1` later ones."""

    def run(m, x):
        m.q, m.k, v = m.query(x), m.key(x), m.value(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(reach)
        scores = sharpness * scores_of(m.q, m.k).masked_fill(later, -torch.inf)
        m.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        if by_hand:
            return scores.softmax(-1) @ v
        mask = {"is_causal": True} if reach == 1 else {"attn_mask": ~later}
        return attend(m.q, m.k, v, scale=sharpness * 8**-0.5, **mask)

    made = {name: nn.Linear(32, 8, bias=False) for name in ("query", "key", "value")}
    return Running(run, **made)


def many_heads(*heads: nn.Module, wide: bool = False) -> nn.Module:
    """An attention as tutorials write it; `num_heads` is not what each of its heads has."""

    def run(m, x):
        made = torch.cat([head(x) for head in m.heads], -1)
        for name, kept in (("query", "q"), ("key", "k"), ("weights", "weights")):
            setattr(m, name, torch.stack([getattr(head, kept) for head in m.heads], 1))
        return x + made + m.mlp(x)[..., :32]

    mlp = nn.Linear(32, 32 * (8 if wide else 1))
    return Running(run, num_heads=4, heads=nn.ModuleList(heads), mlp=mlp)


@pytest.mark.parametrize("sequences", [1, 4, 12])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("reaches", [(1, 1, 1, 1), (1, 3, 1, 2)])
def test_heads_that_are_modules_are_the_heads_of_one_attention(by_hand, wide, sequences, reaches):
    model = nn.Sequential(
        *(many_heads(*(one_head(by_hand=by_hand, reach=n) for n in reaches), wide=wide)
          for _ in range(2))
    )  # fmt: skip
    layers = by_place(look(model, torch.randn(sequences, 12, 32)).snapshot())
    assert [*layers] == [("", 0), ("", 1), ("", 2)]
    for depth, block in enumerate(model, 1):
        found, _ = rebuilt(layers["", depth])
        torch.testing.assert_close(found, block.weights, atol=1e-6, rtol=0)
        check_projected(layers["", depth], block)
        assert layers["", depth].captured["max_logits"].shape == (4,)


@pytest.mark.parametrize("by_hand", [False, True])
def test_heads_that_are_modules_have_one_scale(by_hand):
    model = nn.Sequential(
        *(many_heads(*(one_head(by_hand=by_hand, sharpness=n) for n in (1.0, 0.5, 1.0, 1.0)))
          for _ in range(2))
    )  # fmt: skip
    for layer in look(model, torch.randn(4, 12, 32)).snapshot().layers[1:]:
        assert "differ in their scale" in layer.missing["query"]
