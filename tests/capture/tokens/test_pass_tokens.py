"""The last token of each sequence: which row it is, however padding is known."""

import pytest
import torch
from models import batch, transformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import ToContext, blocks_of, look

LENGTHS = torch.tensor([12, 5, 9, 12, 1, 7])


def mask_of(side: str) -> Tensor:
    real = torch.arange(12) < LENGTHS[:, None]
    return real if side == "right" else real.flip(1)


@pytest.mark.parametrize("side", ["right", "left", None])
def test_the_last_token_that_is_no_padding_is_kept_at_every_layer(side):
    model, ids, states = transformer("gpt2"), batch(6, 12), []
    model.transformer.h[0].register_forward_pre_hook(lambda m, args: states.append(args[0]))
    for block in model.transformer.h:
        block.register_forward_hook(
            lambda m, args, out: states.append(out if isinstance(out, Tensor) else out[0])
        )
    given = {} if side is None else {"attention_mask": mask_of(side).long()}
    places = torch.full((6,), 11) if side != "right" else LENGTHS - 1
    layers = look(model, ids, **given).snapshot().layers
    for layer, expected in zip(layers, states[:4], strict=True):
        seen = layer.captured
        assert torch.equal(seen["last_hidden"], expected[torch.arange(6), places])
        assert torch.equal(seen["last_positions"], places)
        assert torch.equal(seen["last_sequences"], torch.arange(6))
        assert torch.equal(seen["last_token_ids"], ids[torch.arange(6), places])
        assert seen["last_precision"] == seen["precision"]
        assert layer.missing == {}


def test_a_sequence_of_padding_alone_has_no_last_token():
    mask = mask_of("right").long()
    mask[3] = 0
    model, ids = transformer("gpt2"), batch(6, 12)
    seen = look(model, ids, attention_mask=mask).snapshot().layers[2].captured
    assert seen["last_sequences"].tolist() == [0, 1, 2, 4, 5]


def test_where_the_last_token_was_known_too_late_it_is_missing_with_the_reason():
    """Attention says so when the rows are kept already."""
    real = mask_of("right")
    model = blocks_of(lambda q, k, v: attend(q, k, v, attn_mask=real[:, None, None, :]))
    layer = look(model, torch.randn(6, 12, 32)).snapshot().layers[1]
    assert len(layer.captured["hidden"]) == int(LENGTHS.sum())
    assert "attention_mask" in layer.missing["last_hidden"]


def test_at_most_as_many_sequences_as_rows_are_kept():
    layer = look(transformer("gpt2"), batch(6, 12), rows=3).snapshot().layers[1]
    assert layer.captured["last_sequences"].tolist() == [0, 2, 4]
    assert len(layer.captured["hidden"]) == 3


def test_what_has_no_last_token_is_not_asked_or_says_why():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)))
    packed = look(model, torch.randn(20, 8)).snapshot().layers[1]
    assert packed.missing["last_hidden"].endswith("the boundaries between sequences are unknown")
    assert "last" in packed.sources
    maps = look(model, torch.randn(3, 5, 4, 8)).snapshot().layers[1]
    assert "last" not in maps.sources
    assert not any(view.startswith("last_") for view in [*maps.captured, *maps.missing])


def test_a_window_that_is_not_asked_keeps_no_last_tokens():
    seen = look(transformer("gpt2"), batch(6, 12), options={"views": {"hidden"}})
    assert not any(view.startswith("last_") for view in seen.snapshot().layers[1].captured)


class ToContexts(nn.Module):
    """Blocks that attend to a context of another length alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(ToContext() for _ in range(2))

    def forward(self, ids, context):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x, context)
        return x


def test_projected_keys_of_a_context_have_its_sequences():
    model, ids, context = ToContexts(), torch.randint(64, (3, 6)), torch.randn(3, 10, 32)
    views = look(model, ids, context=context).snapshot().layers[1].captured
    made = model.blocks[0].to_k(context).flatten(0, 1)
    same = (views["projected_key"].flatten(1)[:, None] == made).all(2)
    assert same.sum(1).tolist() == [1] * 30
    assert views["key_sequences"].tolist() == (same.long().argmax(1) // 10).tolist()
    assert sorted(views["query_sequences"].tolist()) == [n for n in range(3) for _ in range(6)]
