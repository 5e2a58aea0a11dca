"""A window's captures become layers and their views; a missing view says why."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.testing import assert_close

from geomon.distributed import merge_layers
from support.models import PlainDecoder, Running, batch, transformer
from support.referee import sampled
from support.specimens import built
from support.watched import (
    check_attention,
    check_hidden,
    look,
    notes,
    scores_of,
    states_of,
    window,
)
from support.zoo import ZOO


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

    monkeypatch.setattr("geomon.capture.head_views.read_calls", broken)
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


def in_batch_order(layer):
    """Views of a layer with its tokens, or the last ones, in the order of the batch."""
    views = layer.captured
    places = 100 * views["sequences"] + views["positions"]
    orders = {len(x): x.argsort() for x in (views["last_sequences"], places)}
    return {
        name: value[orders[len(value)]]
        if isinstance(value, torch.Tensor) and value.ndim and len(value) in orders
        else value
        for name, value in views.items()
    }


def test_the_views_of_two_halves_of_a_batch_are_joined_to_those_of_all():
    model, ids = built(ZOO["Mixtral (experts)"], "sdpa"), batch(5, 7) % 50
    snapshots = [
        look(model, input_ids=part, use_cache=False).snapshot() for part in (ids, ids[:3], ids[3:])
    ]
    for whole, *halves in zip(*(each.layers for each in snapshots), strict=True):
        joined = merge_layers(halves)
        assert joined.missing == whole.missing
        assert_close(in_batch_order(joined), in_batch_order(whole))
