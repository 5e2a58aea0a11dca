"""The last token of each sequence: which row it is, however padding is known."""

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import Tensor, nn

from geomon.capture import Window, find_anatomy
from geomon.capture.snapshot import CAPTURED, Snapshot, explain_missing

LENGTHS = torch.tensor([12, 5, 9, 12, 1, 7])


def look(model: nn.Module, *inputs: Tensor, rows: int = 1000, **given: Tensor) -> Snapshot:
    model.eval()
    with torch.no_grad(), Window(find_anatomy(model), set(CAPTURED), rows=rows, seed=0) as seen:
        model(*inputs, **given)
    return seen.snapshot()


def mask_of(side: str) -> Tensor:
    real = torch.arange(12) < LENGTHS[:, None]
    return real if side == "right" else real.flip(1)


def states_of(model: nn.Module, ids: Tensor, **given: Tensor) -> list[Tensor]:
    """Hidden states of every layer, by hooks."""
    found: list[Tensor] = []
    blocks = find_anatomy(model).blocks
    handles = [b.module.register_forward_hook(lambda m, a, out: found.append(out)) for b in blocks]
    handles.append(
        blocks[0].module.register_forward_pre_hook(lambda m, args: found.insert(0, args[0]))
    )
    with torch.no_grad():
        model.eval()(ids, **given)
    for handle in handles:
        handle.remove()
    return [out[0] if isinstance(out, tuple) else out for out in found]


@pytest.mark.parametrize("side", ["right", "left", None])
def test_the_last_token_that_is_no_padding_is_kept_at_every_layer(side):
    model, ids = transformer("gpt2"), batch(6, 12)
    given = {} if side is None else {"attention_mask": mask_of(side).long()}
    places = torch.full((6,), 11) if side != "right" else LENGTHS - 1
    states = states_of(model, ids, **given)
    layers = look(model, ids, **given).layers
    assert len(layers) == len(states) == 4
    for layer, expected in zip(layers, states, strict=True):
        seen = layer.captured
        rows = expected[torch.arange(6), places]
        torch.testing.assert_close(seen["last_hidden"], rows, rtol=0, atol=1e-6)
        assert torch.equal(seen["last_positions"], places)
        assert torch.equal(seen["last_sequences"], torch.arange(6))
        assert torch.equal(seen["last_token_ids"], ids[torch.arange(6), places])
        assert seen["last_precision"] == seen["precision"]
        assert layer.missing == {}


def test_a_sequence_of_padding_alone_has_no_last_token():
    mask = mask_of("right").long()
    mask[3] = 0
    layer = look(transformer("gpt2"), batch(6, 12), attention_mask=mask).layers[2]
    assert layer.captured["last_sequences"].tolist() == [0, 1, 2, 4, 5]
    empty = look(transformer("gpt2"), batch(6, 12), attention_mask=0 * mask).layers[2]
    assert empty.captured["last_hidden"].shape == (0, 32)


def test_length_first_hidden_states_have_their_last_tokens():
    class Model(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens = nn.Embedding(50, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(self.tokens(ids), src_key_padding_mask=padding)

    ids, padding = batch(6, 12), ~mask_of("right")
    one = look(Model(True), ids, padding).layers[2].captured
    other = look(Model(False), ids.T, padding).layers[2].captured
    order = other["last_sequences"].argsort()
    assert torch.equal(other["last_sequences"][order], one["last_sequences"])
    assert torch.equal(other["last_positions"][order], LENGTHS - 1)
    torch.testing.assert_close(other["last_hidden"][order], one["last_hidden"])


class Hiding(PlainDecoder):
    """Attention hides padding that no argument names."""

    def __init__(self, real: Tensor) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = self._forward_of(block, real)

    def _forward_of(self, block: nn.Module, real: Tensor):
        def forward(x: Tensor) -> Tensor:
            q, k, v = (
                part.unflatten(-1, (block.n_head, -1)).transpose(1, 2)
                for part in block.c_attn(block.ln_1(x)).chunk(3, dim=-1)
            )
            y = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=real[:, None, None, :]
            )
            x = x + block.c_proj(y.transpose(1, 2).flatten(2))
            return x + block.mlp(block.ln_2(x))

        return forward


def test_where_the_last_token_was_known_too_late_it_is_missing_with_the_reason():
    """Attention says so when the rows are kept already."""
    real = mask_of("right")
    model = Hiding(real)
    snapshot = look(model, batch(6, 12))
    layer = snapshot.layers[1]
    assert len(layer.captured["hidden"]) == int(LENGTHS.sum())
    assert "last_hidden" not in layer.captured
    assert "attention_mask" in layer.missing["last_hidden"]
    explained = explain_missing(snapshot, {"last_hidden"})
    assert "hidden states of the last tokens" in explained
    assert explain_missing(snapshot, {"hidden"}) is None


def test_at_most_as_many_sequences_as_rows_are_kept():
    layer = look(transformer("gpt2"), batch(6, 12), rows=3).layers[1]
    assert layer.captured["last_sequences"].tolist() == [0, 2, 4]
    assert len(layer.captured["hidden"]) == 3


def test_what_has_no_last_token_is_not_asked_or_says_why():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in "ab"
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    packed = look(Packed(), torch.randn(20, 8)).layers[1]
    assert "where one sequence ends" in packed.missing["last_hidden"]
    assert "last" in packed.sources
    maps = look(Packed(), torch.randn(3, 5, 4, 8)).layers[1]
    assert "last" not in maps.sources
    assert not any(view.startswith("last_") for view in [*maps.captured, *maps.missing])


def test_a_window_that_is_not_asked_keeps_no_last_tokens():
    model = transformer("gpt2").eval()
    with torch.no_grad(), Window(find_anatomy(model), {"hidden"}, rows=9, seed=0) as seen:
        model(batch(6, 12))
    assert not any(view.startswith("last_") for view in seen.snapshot().layers[1].captured)
