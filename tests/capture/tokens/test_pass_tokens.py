"""Tokens of a pass: which are padding, and which the last of their sequence, at every layer."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from support.models import PlainDecoder, Running, batch, transformer
from support.watched import blocks_of, look, notes, states_of

LENGTHS = torch.tensor([1, 5, 9, 12, 12, 7])


REAL = torch.arange(12) < LENGTHS[:, None]
HIDES_ONE = REAL & (torch.arange(6) != 3)[:, None]
MASKS = {"right": REAL, "left": REAL.flip(1), "none": torch.ones(6, 12), "all of one": HIDES_ONE}


@pytest.mark.parametrize("side", MASKS)
def test_the_last_token_that_is_no_padding_is_kept_at_every_layer(side):
    model, ids, given = transformer("gpt2"), batch(6, 12), MASKS[side].long()
    states = states_of(model, ids, attention_mask=given, blocks=model.transformer.h)
    kept = given.any(1).nonzero().squeeze(1)
    places = (given * torch.arange(12)).argmax(1)[kept]
    layers = look(model, ids, attention_mask=given).snapshot().layers
    for layer, expected in zip(layers, states, strict=True):
        seen = layer.captured
        assert torch.equal(seen["last_hidden"], expected[kept, places])
        assert torch.equal(seen["last_positions"], places)
        assert torch.equal(seen["last_sequences"], kept)
        assert torch.equal(seen["last_token_ids"], ids[kept, places])
        assert seen["last_precision"] == seen["precision"]
        assert layer.missing == {}


def test_a_last_token_that_was_known_too_late_is_missing_with_the_reason():
    """Attention says so when the rows are kept already."""
    model = blocks_of(lambda q, k, v: attend(q, k, v, attn_mask=REAL[:, None, None, :]))
    layer = look(model, torch.randn(6, 12, 32)).snapshot().layers[1]
    assert len(layer.captured["hidden"]) == int(LENGTHS.sum())
    assert "attention_mask" in layer.missing["last_hidden"]


def test_at_most_as_many_sequences_as_rows_are_kept():
    layer = look(transformer("gpt2"), batch(6, 12), rows=3).snapshot().layers[1]
    assert layer.captured["last_sequences"].tolist() == [0, 2, 4]
    assert len(layer.captured["hidden"]) == 3


def test_layers_without_a_last_token_are_not_asked_or_say_why():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)))
    packed = look(model, torch.randn(20, 8)).snapshot().layers[1]
    assert packed.missing["last_hidden"].endswith("the boundaries between sequences are unknown")
    assert "last" in packed.sources
    maps = look(model, torch.randn(3, 5, 4, 8)).snapshot().layers[1]
    assert "last" not in maps.sources
    unasked = look(model, torch.randn(3, 8), options={"views": {"hidden"}}).snapshot().layers[1]
    for layer in (maps, unasked):
        assert not any(view.startswith("last_") for view in [*layer.captured, *layer.missing])


def flattening(*, length_first: bool) -> nn.Module:
    """Blocks that attend to whole sequences and hand on their tokens as [tokens, width]."""

    def block(m, x, real):
        rows = x.view(*(real.T if length_first else real).shape, 32)
        given = rows.transpose(0, 1) if length_first else rows
        q, k, v = m.qkv(given).unflatten(-1, (12, -1)).transpose(1, 2).chunk(3, dim=1)
        mixed = attend(q, k, v, attn_mask=real[:, None, None, :]).transpose(1, 2).flatten(2)
        return (rows + (mixed.transpose(0, 1) if length_first else mixed)).flatten(0, 1)

    def run(m, ids, attention_mask):
        x = m.embed(ids)
        x = x.transpose(0, 1) if length_first else x
        for each in m.blocks:
            x = each(x, attention_mask.bool())
        return x

    blocks = (Running(block, qkv=nn.Linear(32, 96)) for _ in range(3))
    return Running(run, embed=nn.Embedding(50, 32), blocks=nn.ModuleList(blocks))


@pytest.mark.parametrize("length_first", [False, True])
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_tokens_that_blocks_flatten_keep_their_sequences(side, length_first):
    model, ids, given = flattening(length_first=length_first), batch(6, 12) % 50, MASKS[side].long()
    states = states_of(model, ids, attention_mask=given)
    seen = look(model, ids, attention_mask=given)
    ends = (given * torch.arange(12)).argmax(1)
    for layer, kept in zip(seen.snapshot().layers, states, strict=True):
        views, every = layer.captured, torch.arange(6)
        state = kept.view(12, 6, 32).transpose(0, 1) if length_first else kept.view(6, 12, 32)
        where = views["sequences"], views["positions"]
        assert len(views["hidden"]) == given.sum()
        assert given[where].all()
        assert torch.equal(views["hidden"], state[where])
        assert torch.equal(views["token_ids"], ids[where])
        assert torch.equal(views["last_sequences"].sort().values, every)
        order = views["last_sequences"].argsort()
        assert torch.equal(views["last_positions"][order], ends)
        assert torch.equal(views["last_hidden"][order], state[every, ends])
    assert not any("padding is known only" in text for text in notes(seen))


def told_apart(model: nn.Module, *batches: Any) -> tuple[int, int]:
    """Count the different checksums of tokens and of token ids after passes over batches."""
    found = [look(model, *given).snapshot().info for given in batches]
    again = look(model, *batches[0]).snapshot().info
    assert (again.batch, again.token_ids) == (found[0].batch, found[0].token_ids)
    ids = {info.token_ids for info in found}
    return len({info.batch for info in found}), len(ids - {""})


def test_passes_over_other_tokens_have_other_checksums():
    model, other = PlainDecoder(), batch()
    other[-1, -1] += 1
    assert told_apart(model, (batch(),), (other,), (batch().flip(0),)) == (3, 3)
    model.blocks = model.blocks[:1]  # a model of as many places as states, and no token ids
    model.forward = lambda x: model.blocks[0](x + model.places(torch.arange(32).expand(8, -1)))
    states = torch.randn(8, 32, 32)
    assert told_apart(model, (states,), (states.roll(1, 1),), (2 * states,)) == (3, 0)
