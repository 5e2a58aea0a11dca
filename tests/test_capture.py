import gc
import threading

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn
from torch.utils.checkpoint import checkpoint

from geomon.anatomy import find_anatomy
from geomon.capture import Window
from geomon.layer import CAPTURED, Layer

NAMES = ["gpt2", "llama", "mistral", "bert"]


def window(model: nn.Module, rows: int = 100_000, seed: int = 0, **kwargs) -> Window:
    return Window(find_anatomy(model), set(CAPTURED), rows=rows, seed=seed, **kwargs)


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def padded(ids: torch.Tensor, side: str) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    if side == "both":
        mask[2, :5] = 0
    return mask


def rebuilt(layer: Layer) -> torch.Tensor:
    seen = layer.captured
    group = seen["query"].shape[1] // seen["key"].shape[1]
    keys = seen["key"].repeat_interleave(group, dim=1)
    scores = seen["query"] @ keys.transpose(-1, -2) * seen["scale"]
    if seen["bias"] is not None:
        scores = scores + seen["bias"]
    return scores.masked_fill(~seen["visible"], -torch.inf).softmax(dim=-1)


@pytest.mark.parametrize("padding", [None, "right", "both"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_captured_is_what_the_model_computes(name, attention, padding):
    model = transformer(name, attention).eval()
    reference = transformer(name, "eager").eval()
    ids = batch()
    inputs = {"input_ids": ids}
    valid = torch.ones_like(ids)
    if padding:
        valid = inputs["attention_mask"] = padded(ids, padding)
    with torch.no_grad():
        expected = reference(**inputs, output_attentions=True, output_hidden_states=True)
        undisturbed = model(**inputs)[0]
        with window(model) as seen:
            watched = model(**inputs)[0]
    assert torch.equal(watched, undisturbed)
    snapshot = seen.snapshot()
    rows = seen._rows
    assert torch.equal(rows.sort().values, valid.flatten().nonzero().squeeze(1))
    for layer in snapshot.layers:
        assert layer.missing == {}
        assert torch.equal(layer.captured["token_ids"], ids.flatten()[rows])
        assert torch.equal(layer.captured["positions"], rows % ids.shape[1])
        if layer.index < 3:  # what transformers gives last is after the final norm
            states = expected.hidden_states[layer.index].flatten(0, 1)[rows]
            assert torch.allclose(layer.captured["hidden"], states, atol=1e-6)
        if layer.index > 0:
            call = seen._calls[layer.index]
            truth = expected.attentions[layer.index - 1][call.sequences]
            assert torch.equal(call.places, torch.arange(32).expand(8, -1))
            real = layer.captured["visible"].any(-1).expand(truth.shape[:-1])
            assert real.sum() == truth.shape[1] * valid.sum()
            assert (rebuilt(layer) - truth)[real].abs().max() < 1e-5


def test_projections_are_what_the_modules_put_out():
    model = transformer("llama").eval()
    outputs = {}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: outputs.update({name: out}))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    with torch.no_grad(), window(model) as seen:
        model(input_ids=batch())
    for handle in handles:
        handle.remove()
    layer = seen.snapshot().layers[2]
    for which, heads in (("query", 4), ("key", 2)):
        out = outputs[f"model.layers.1.self_attn.{which[0]}_proj"].flatten(0, 1)[seen._rows]
        assert torch.equal(layer.captured[f"projected_{which}"], out.unflatten(-1, (heads, 8)))


def test_fused_projection_equals_attended_where_nothing_rotates():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        model(batch())
    layer = seen.snapshot().layers[1]
    attended = layer.captured["query"].transpose(1, 2).flatten(0, 1)  # all rows, in order
    order = seen._rows.argsort()
    assert torch.equal(layer.captured["projected_query"][order], attended)


def test_plain_torch_encoder_is_seen_in_training_and_in_its_fast_path():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(4, 16, 32)
    for training in (True, False):
        encoder.train(training)
        with torch.no_grad(), window(encoder) as seen:
            encoder(x)
        layers = seen.snapshot().layers
        assert len(layers) == 3
        assert layers[2].captured["visible"].all()
        assert layers[2].captured["hidden"].shape == (64, 32)
        assert any("as attended" in note.text for note in seen.snapshot().notes)
    assert torch.backends.mha.get_fastpath_enabled()


def test_same_rows_at_every_layer_and_by_seed_alone():
    model = PlainDecoder().eval()
    state = torch.random.get_rng_state()
    pictures = []
    for seed in (1, 1, 2):
        with torch.no_grad(), window(model, rows=40, seed=seed) as seen:
            model(batch())
        pictures.append(seen.snapshot().layers)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(pictures[0][1].captured["hidden"], pictures[1][1].captured["hidden"])
    assert not torch.equal(pictures[0][1].captured["hidden"], pictures[2][1].captured["hidden"])
    assert len({layer.captured["hidden"].shape[0] for layer in pictures[0]}) == 1
    for layer in pictures[0][1:]:
        assert torch.equal(layer.captured["positions"], pictures[0][0].captured["positions"])


@pytest.mark.parametrize(("sequences", "length"), [(96, 64), (200, 33), (3, 64), (1, 50)])
def test_sampled_queries_cover_all_positions_alike(sequences, length):
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model, rows=8192) as seen:
        model(batch(sequences, length))
    places = seen._calls[1].places
    assert places.shape[1] == len(set(places[0].tolist()))
    entropy = (places.flatten() + 1.0).log()  # of uniform causal attention
    exact = torch.arange(1, length + 1).log().mean()
    assert entropy.mean() == pytest.approx(exact.item(), abs=0.01)


@pytest.mark.parametrize("way_out", ["end", "exception", "interrupt"])
def test_nothing_is_left_behind(way_out):
    model = transformer("gpt2")
    modeling = __import__("transformers.modeling_utils", fromlist=["AttentionInterface"])
    before = (
        hooks(model), torch.nn.functional.scaled_dot_product_attention,
        modeling.AttentionInterface.get_interface, torch.backends.mha.get_fastpath_enabled(),
        threading.active_count(), torch.get_num_threads(),
        [set(vars(module)) for module in model.modules()],
    )  # fmt: skip
    error = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}.get(way_out)
    opened = window(model)
    if error is None:
        with opened:
            model(batch())
    else:
        with pytest.raises(error), opened:  # noqa: PT012
            model(batch())
            assert hooks(model) > 0
            raise error
    after = (
        hooks(model), torch.nn.functional.scaled_dot_product_attention,
        modeling.AttentionInterface.get_interface, torch.backends.mha.get_fastpath_enabled(),
        threading.active_count(), torch.get_num_threads(),
        [set(vars(module)) for module in model.modules()],
    )  # fmt: skip
    assert after == before


def test_hooks_that_cannot_be_placed_leave_nothing(monkeypatch):
    model = PlainDecoder()

    def refuse(*args, **kwargs):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(model.blocks[2], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no hooks here"), window(model):
        pass
    assert hooks(model) == 0


def test_windows_that_close_in_any_order_restore_attention():
    attend = torch.nn.functional.scaled_dot_product_attention
    models = [PlainDecoder(), PlainDecoder()]
    first, second = window(models[0]), window(models[1])
    first.__enter__()
    second.__enter__()
    models[0](batch())
    models[1](batch())
    first.__exit__(None, None, None)
    models[1](batch())
    second.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert set(first._calls) == set(second._calls) == {1, 2, 3}


def test_recomputation_under_checkpointing_counts_once():
    model = PlainDecoder(dropout=0.1)
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    blocks = list(model.blocks)

    def forward(ids):
        x = model.tokens(ids) + model.places(torch.arange(ids.shape[1]))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    with window(model) as seen:
        loss = forward(batch()).sum()
        kept = {depth: hidden.clone() for depth, hidden in seen._hidden.items()}
        loss.backward()
    assert len(calls) == 2  # forward and recomputation both ran under the open window
    assert seen._running == []
    assert all(torch.equal(seen._hidden[depth], kept[depth]) for depth in kept)


def test_in_place_blocks_do_not_change_what_was_kept():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return x.add_(1.0)

    model = nn.Sequential(InPlace(), InPlace())
    x = torch.zeros(5, 8)
    with torch.no_grad(), Window(find_anatomy(model), {"hidden"}, rows=99, seed=0) as seen:
        model(x)
    assert [layer.captured["hidden"].mean().item() for layer in seen.snapshot().layers] == [0, 1, 2]


def test_rows_that_are_not_finite_are_left_out_and_said():
    model = PlainDecoder().eval()
    with torch.no_grad():
        model.tokens.weight[7] = torch.nan
        ids = batch()
        ids[0] = 7
        ids[1:] = ids[1:].clamp(max=6)
        with window(model) as seen:
            model(ids)
    snapshot = seen.snapshot()
    assert len(snapshot.layers[0].captured["hidden"]) == ids.numel() - ids.shape[1]
    assert len(snapshot.layers[0].captured["token_ids"]) == ids.numel() - ids.shape[1]
    assert any("32 of 256 rows are not finite" in note.text for note in snapshot.notes)


def test_what_was_not_seen_says_why():
    model = PlainDecoder()
    with window(model) as seen:
        pass
    missing = seen.snapshot().layers[1].missing
    assert "not run under the window" in missing["hidden"]

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return (x @ x.transpose(1, 2)).softmax(-1) @ self.inner(x)

    by_hand = nn.Sequential(ByHand(), ByHand())
    with window(by_hand) as seen:
        by_hand(torch.randn(2, 5, 8))
    missing = seen.snapshot().layers[1].missing
    assert "no attention call was seen" in missing["query"]
    assert "no embedding" in missing["token_ids"]


def test_half_precision_is_kept_in_float32_and_named():
    model = transformer("gpt2").to(torch.bfloat16).eval()
    with torch.no_grad(), window(model) as seen:
        model(input_ids=batch())
    snapshot = seen.snapshot()
    assert snapshot.dtype == "bfloat16"
    assert snapshot.layers[1].captured["hidden"].dtype == torch.float32


def test_only_the_kept_rows_stay_in_memory():
    model = PlainDecoder(width=256, layers=2)
    with torch.no_grad(), window(model, rows=8) as seen:
        model(batch(64, 64))
    gc.collect()
    kept = sum(hidden.untyped_storage().nbytes() for hidden in seen._hidden.values())
    assert kept == 3 * 8 * 256 * 4


def test_compiled_models_are_seen_and_not_compiled_again():
    model = PlainDecoder().eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = compiled(batch())
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with window(compiled) as seen:
            compiled(batch())
        again = compiled(batch())
    assert len(seen.snapshot().layers[3].captured["hidden"]) == 256
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert torch.equal(again, expected)
    assert next(b.name for b in find_anatomy(compiled).blocks) == "blocks.0"
