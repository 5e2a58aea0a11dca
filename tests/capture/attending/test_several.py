"""Blocks of several attentions: each makes layers of its own, or it is said."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from geomon import describe, measure
from support.models import Running
from support.referee import rebuilt
from support.watched import (
    ToContext,
    attend_by_hand,
    by_place,
    check_attention,
    check_projected,
    look,
    notes,
    scores_of,
)


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
def test_the_first_of_two_attentions_without_known_projections_is_measured_with_a_note(by_hand):
    kinds, x = [unnamed(by_hand=by_hand) for _ in range(2)], torch.randn(4, 9, 32)
    for second, is_said in ((kinds[1], True), (nn.Identity(), False)):
        seen = look(denoiser(lambda second=second: several(kinds[0], second)), x)
        said = [text for text in notes(seen) if "called more than once" in text]
        assert [text.partition(":")[0] for text in said] == (
            ["attention, layer 1, 2, 3"] if is_said else []
        )


def test_a_second_attention_that_is_not_called_is_said():
    skipping = denoiser(lambda: pair(lambda m, x, context=None: x + m.attn1(m.norm1(x))))
    seen = look(skipping, torch.randn(4, 9, 32))
    assert {layer.stack for layer in seen.snapshot().layers} == {""}
    said = "attn2: attention, layer 1, 2, 3: it was not seen in this pass: it is left out"
    assert said in notes(seen)
    seen = look(skipping, torch.randn(4, 9, 32), options={"views": ["hidden"]})
    assert notes(seen) == []  # it was not asked for


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
