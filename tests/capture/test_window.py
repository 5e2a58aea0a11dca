import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from fingerprint import fingerprint
from models import PlainBlock, PlainDecoder, batch, transformer
from plain_models import CausalSelfAttention, language_model
from referee import sampled
from specimens import built, inputs_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO

from geomon import describe, measure
from geomon.capture import Window, assemble, find_anatomy
from geomon.capture.calling.patches import Patch
from geomon.capture.snapshot import CAPTURED, Layer
from geomon.metrics.views import LayerViews

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


# The zoo of test_architectures.py has many more; these are the four ways to say a mask.
@pytest.mark.parametrize("padding", [None, "both"])
@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "sdpa") for name in NAMES), ("mistral", "eager")]
)
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
    rows = sampled(seen, "", 0).rows
    assert torch.equal(rows.sort().values, valid.flatten().nonzero().squeeze(1))
    for layer in snapshot.layers:
        assert layer.missing == {}
        assert torch.equal(sampled(seen, "", layer.index).rows, rows)
        assert torch.equal(layer.captured["token_ids"], ids.flatten()[rows])
        assert torch.equal(layer.captured["positions"], rows % ids.shape[1])
        if layer.index < 3:  # what transformers gives last is after the final norm
            states = expected.hidden_states[layer.index].flatten(0, 1)[rows]
            assert torch.allclose(layer.captured["hidden"], states, atol=1e-6)
        if layer.index > 0:
            chosen = sampled(seen, "", layer.index)
            truth = expected.attentions[layer.index - 1][chosen.sequences]
            assert torch.equal(chosen.places, torch.arange(32).expand(8, -1))
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
        rows = sampled(seen, "", 2).query_rows
        out = outputs[f"model.layers.1.self_attn.{which[0]}_proj"].flatten(0, 1)[rows]
        assert torch.equal(layer.captured[f"projected_{which}"], out.unflatten(-1, (heads, 8)))


def test_fused_projection_equals_attended_where_nothing_rotates():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        model(batch())
    layer = seen.snapshot().layers[1]
    attended = layer.captured["query"].transpose(1, 2).flatten(0, 1)  # all rows, in order
    order = sampled(seen, "", 1).query_rows.argsort()
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
        assert layers[2].captured["projected_query"].shape == (64, 4, 8)
        attended = layers[2].captured["query"].transpose(1, 2).flatten(0, 1)
        order = sampled(seen, "", 2).query_rows.argsort()
        assert torch.allclose(layers[2].captured["projected_query"][order], attended, atol=1e-5)
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
    places = sampled(seen, "", 1).places
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
        [set(vars(module)) for module in model.modules()], nn.Module.__call__,
    )  # fmt: skip
    error = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}.get(way_out)
    opened = window(model)
    if error is None:
        with opened:
            model(batch())
    else:
        with pytest.raises(error), opened:  # noqa: PT012
            model(batch())
            raise error
    after = (
        hooks(model), torch.nn.functional.scaled_dot_product_attention,
        modeling.AttentionInterface.get_interface, torch.backends.mha.get_fastpath_enabled(),
        threading.active_count(), torch.get_num_threads(),
        [set(vars(module)) for module in model.modules()], nn.Module.__call__,
    )  # fmt: skip
    assert after == before


@pytest.mark.parametrize("patch", ["without_fast_path"])
def test_a_window_that_cannot_be_opened_leaves_nothing_and_ends_no_pass(monkeypatch, patch):
    from geomon.capture import window as module

    def broken(undo):
        raise RuntimeError("no patch here")

    model = PlainDecoder()
    before, expected = fingerprint(model), model(batch())
    monkeypatch.setattr(module, patch, Patch(broken))
    opened = window(model)
    with opened:
        assert fingerprint(model) == before
        assert torch.equal(model(batch()), expected)
    assert fingerprint(model) == before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no patch here"):
            opened.snapshot()


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
    for one in (first, second):
        assert all(sampled(one, "", depth).places is not None for depth in (1, 2, 3))


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
        before = seen.snapshot().layers
        loss.backward()
    assert len(calls) == 2  # forward and recomputation both ran under the open window
    for layer, other in zip(before, seen.snapshot().layers, strict=True):
        assert torch.equal(layer.captured["hidden"], other.captured["hidden"])
    assert len(seen.snapshot().layers) == 4


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
    assert any("32 of 256 rows are not finite" in note.words() for note in snapshot.info.notes)


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
    layer = seen.snapshot().layers[1]
    assert layer.captured["query"].shape == layer.captured["key"].shape == (2, 1, 5, 8)
    assert layer.captured["scale"] == 1
    assert layer.captured["projected_query"].shape == (10, 1, 8)  # as attended
    assert "no embedding" in layer.missing["token_ids"]


def test_attention_that_cannot_be_rebuilt_costs_nothing_else(monkeypatch):
    def broken(*args):
        raise RuntimeError("of shapes, say")

    monkeypatch.setattr(assemble, "read_call", broken)
    model = PlainDecoder()
    with window(model) as seen:
        model(batch())
    layers = seen.snapshot().layers
    assert all("hidden" in layer.captured for layer in layers)
    reasons = {layer.missing["visible"] for layer in layers[1:]}
    assert reasons == {"attention could not be rebuilt: RuntimeError: of shapes, say"}


def test_half_precision_is_kept_in_float32_and_named():
    model = transformer("gpt2").to(torch.bfloat16).eval()
    with torch.no_grad(), window(model) as seen:
        model(input_ids=batch())
    snapshot = seen.snapshot()
    assert snapshot.info.dtype == "bfloat16"
    assert snapshot.layers[1].captured["hidden"].dtype == torch.float32


def test_only_the_kept_rows_stay_in_memory():
    model = PlainDecoder(width=256, layers=2)
    with torch.no_grad(), window(model, rows=8) as seen:
        model(batch(64, 64))
    gc.collect()
    stack_pass = seen._passes[0]
    held = [stack_pass.entered, *(call.hidden for call in stack_pass.block_calls)]
    assert sum(kept.values.untyped_storage().nbytes() for kept in held) == 3 * 8 * 256 * 4


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


# -- stacks ------------------------------------------------------------------------------------


def by_place(snapshot) -> dict[tuple[str, int], Layer]:
    return {(layer.stack, layer.index): layer for layer in snapshot.layers}


def both() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 2, 3, 64, dropout=0.0, batch_first=True).eval()


def test_encoder_and_decoder_are_apart_and_cross_attention_has_layers():
    model, source, target = both(), torch.randn(4, 9, 32), torch.randn(4, 6, 32)
    padding = torch.zeros(4, 9, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad(), window(model) as seen:
        model(
            source, target, src_key_padding_mask=padding, memory_key_padding_mask=padding,
            tgt_key_padding_mask=torch.zeros(4, 6, dtype=torch.bool),
        )  # fmt: skip
    layers = by_place(seen.snapshot())
    depths = [("encoder", 2), ("decoder", 3)]
    assert [*layers] == [
        *((name, depth) for name, count in depths for depth in range(count + 1)),
        *(("cross", depth) for depth in (1, 2, 3)),
    ]
    assert layers["encoder", 1].captured["hidden"].shape == (32, 32)  # 4 of 36 are padding
    assert layers["decoder", 1].captured["hidden"].shape == (24, 32)
    assert layers["decoder", 0].sources == {"hidden", "last"}
    cross = layers["cross", 2]
    assert cross.sources == {"attention", "projection"}
    assert cross.name == "decoder.layers.1.multihead_attn"
    assert cross.captured["query"].shape == (4, 4, 6, 8)
    assert cross.captured["key"].shape == (4, 4, 9, 8)
    assert not cross.captured["visible"][1, ..., 5:].any()
    assert cross.captured["projected_query"].shape == (24, 4, 8)
    assert cross.captured["projected_key"].shape == (32, 4, 8)  # of tokens that are no padding
    keys = cross.captured["key"].transpose(1, 2).flatten(0, 1)[sampled(seen, "cross", 2).key_rows]
    assert torch.allclose(cross.captured["projected_key"], keys, atol=1e-5)


def test_a_stack_that_was_not_run_is_left_out_and_said():
    model = both()
    with torch.no_grad(), window(model) as seen:
        model.encoder(torch.randn(4, 9, 32))
    snapshot = seen.snapshot()
    assert {layer.stack for layer in snapshot.layers} == {"encoder"}
    assert any("'decoder' were not run" in note.words() for note in snapshot.info.notes)


def test_one_block_called_again_and_again_is_a_layer_for_each_call():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = PlainDecoder(layers=1).blocks

        def forward(self, x):
            for _ in range(4):
                x = self.blocks[0](x)
            return x

    model, x = Shared().eval(), torch.randn(8, 16, 32)
    with torch.no_grad(), window(model) as seen:
        out = model(x)
        model(x + 1)
    layers = seen.snapshot().layers
    assert [layer.index for layer in layers] == [0, 1, 2, 3, 4]
    assert [layer.name for layer in layers[1:3]] == ["blocks.0, call 1", "blocks.0, call 2"]
    rows = sampled(seen, "", 4).rows
    assert torch.equal(layers[4].captured["hidden"], out.flatten(0, 1)[rows])
    assert not torch.equal(layers[4].captured["query"], layers[3].captured["query"])


@pytest.mark.parametrize("chunks", [1, 2])
def test_blocks_that_are_run_again_on_other_rows_are_said(chunks):
    class Chunked(PlainDecoder):
        def forward(self, ids):
            parts = []
            for part in self.tokens(ids).chunk(chunks, dim=1):
                x = part
                for block in [*self.blocks, *self.blocks]:
                    x = block(x)
                parts.append(x)
            return torch.cat(parts, dim=1)

    model = Chunked().eval()
    with torch.no_grad(), window(model) as seen:
        model(batch())
    texts = [note.words() for note in seen.snapshot().info.notes]
    assert any("called again on something else" in text for text in texts) == (chunks == 2)


def test_a_second_pass_in_the_window_counts_for_nothing():
    model = PlainDecoder().eval()
    pictures = []
    for again in (False, True):
        with torch.no_grad(), window(model) as seen:
            model(batch(seed=1))
            if again:
                model(batch(seed=2))
                model(batch(4, 16, seed=3))
        pictures.append(seen.snapshot())
    for one, other in zip(*(picture.layers for picture in pictures), strict=True):
        assert one.captured.keys() == other.captured.keys()
        for view in ("hidden", "token_ids", *(("query", "projected_key") if one.index else ())):
            assert torch.equal(one.captured[view], other.captured[view])


def in_order(layer: Layer) -> list[torch.Tensor]:
    """Hidden states, token ids and attended queries, in the order of the batch."""
    seen = layer.captured
    order = (1000 * seen["sequences"] + seen["positions"]).argsort()
    attended = [seen["query"], seen["visible"]] if layer.index else []
    return [seen["hidden"][order], seen["token_ids"][order], *attended]


@pytest.mark.parametrize("order", ["without first", "with first", "without alone"])
def test_a_pass_with_gradients_goes_before_one_without(order):
    model = transformer("gpt2").eval()
    inputs = {"input_ids": batch(seed=1), "attention_mask": padded(batch(), "right")}
    other = {"input_ids": batch(3, 12, seed=2)}  # generated, scored: of another shape
    with window(model) as alone:
        model(**(other if order == "without alone" else inputs))
    passes = {"without first": [other, other, inputs], "with first": [inputs, other]}
    with window(model) as seen:
        for given in passes.get(order, [other, other]):
            with torch.set_grad_enabled(given is inputs):
                model(**given)
    for layer, expected in zip(seen.snapshot().layers, alone.snapshot().layers, strict=True):
        assert layer.missing == expected.missing == {}
        for one, another in zip(in_order(layer), in_order(expected), strict=True):
            assert torch.equal(one, another)


def test_of_two_stacks_each_has_its_pass_with_gradients():
    name = "T5 (position bias)"
    model, inputs = built(ZOO[name], "sdpa").eval(), inputs_of(ZOO[name], padded=True)
    with window(model) as alone:
        model(**inputs)
    with window(model) as seen:
        with torch.no_grad():
            model(**{argument: value[:1] for argument, value in inputs.items()})
        model(**inputs)
    layers = seen.snapshot().layers
    assert {"encoder", "decoder"} <= {layer.stack for layer in layers}
    for layer, expected in zip(layers, alone.snapshot().layers, strict=True):
        assert layer.missing == expected.missing
        if "hidden" in expected.captured:
            one, another = (
                each.captured["hidden"].norm(dim=1).sort() for each in (layer, expected)
            )
            assert torch.equal(one.values, another.values)


def test_a_pass_that_failed_gives_way_to_the_next():
    model = PlainDecoder().eval()
    handle = model.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), window(model) as seen:
        with pytest.raises(ZeroDivisionError):
            model(batch(4, 16))
        handle.remove()
        model(batch())
    layers = seen.snapshot().layers
    assert [len(layer.captured["hidden"]) for layer in layers] == [256] * 4
    assert torch.equal(
        layers[2].captured["token_ids"], batch().flatten()[sampled(seen, "", 2).rows]
    )


def test_blocks_that_the_training_step_runs_itself_count_once_each():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        outputs = []
        for seed in (0, 1):
            x = model.tokens(batch(seed=seed))
            for block in model.blocks:
                x = block(x)
            outputs.append(x)
    layer = seen.snapshot().layers[3]
    assert torch.equal(
        layer.captured["hidden"], outputs[0].flatten(0, 1)[sampled(seen, "", 3).rows]
    )
    assert torch.equal(layer.captured["token_ids"], batch().flatten()[sampled(seen, "", 3).rows])


def test_a_dropped_layer_says_so_and_the_others_keep_their_depth():
    class Dropping(PlainDecoder):
        def forward(self, ids):
            x = self.tokens(ids)
            for block in (self.blocks[0], self.blocks[2]):
                x = block(x)
            return x

    model = Dropping().eval()
    with torch.no_grad(), window(model) as seen:
        model(batch())
    layers = seen.snapshot().layers
    assert [layer.index for layer in layers if "hidden" in layer.captured] == [0, 1, 3]
    assert "not run in this pass, as others were" in layers[2].missing["hidden"]
    assert "not run in this pass, as others were" in layers[2].missing["query"]


# -- hidden states of other stacks -------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, width, 3, stride=width // into, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def test_feature_maps_are_rows_of_channels_whatever_their_size():
    torch.manual_seed(0)
    model = nn.Sequential(Convolution(4, 4), Convolution(4, 8), Convolution(8, 8)).eval()
    images = torch.randn(5, 4, 8, 8)
    outputs = [images]
    for block in model:
        outputs.append(block(outputs[-1]).detach())
    with torch.no_grad(), window(model, rows=100) as seen:
        model(images)
    snapshot = seen.snapshot()
    assert snapshot.info.tokens == 100
    for layer, maps in zip(snapshot.layers, outputs, strict=True):
        rows = sampled(seen, "", layer.index).rows
        assert torch.equal(layer.captured["hidden"], maps.movedim(1, 3).flatten(0, 2)[rows])
        assert torch.equal(layer.captured["positions"], rows % maps[0, 0].numel())
        assert layer.sources == {"hidden"}
    assert torch.equal(sampled(seen, "", 0).rows, sampled(seen, "", 1).rows)
    assert torch.equal(sampled(seen, "", 2).rows, sampled(seen, "", 3).rows)
    assert len(sampled(seen, "", 2).rows) == 80


@pytest.mark.parametrize("widths", [(4, 8, 8), (16, 8, 8), (6, 12, 24), (8, 8, 8)])
def test_what_enters_a_block_that_changes_the_channels_is_rows_of_channels(widths):
    class Step(nn.Module):
        def __init__(self, into: int, width: int) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(into, width, 1), nn.Linear(width, width)

        def forward(self, x):
            x = self.conv(x)
            return x + self.linear(x.movedim(1, -1)).movedim(-1, 1)

    model = nn.Sequential(*(Step(a, b) for a, b in itertools.pairwise(widths))).eval()
    images = torch.randn(3, widths[0], 8, 5)
    with torch.no_grad():
        expected = [images, model[0](images), model(images)]
        with window(model) as seen:
            model(images)
    for layer, maps in zip(seen.snapshot().layers, expected, strict=True):
        rows = sampled(seen, "", layer.index).rows
        assert torch.equal(layer.captured["hidden"], maps.movedim(1, 3).flatten(0, 2)[rows])


@pytest.mark.parametrize("by_hand", [True, False])
def test_attention_outside_of_blocks_without_any_is_said(by_hand):
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Attending(by_hand=by_hand)
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

        def forward(self, x):
            x = self.mixer(x)
            for part in self.parts:
                x = x + part(x)
            return x

    model = Wrong().eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 6, 32))
    assert any("may be the wrong blocks" in note.words() for note in seen.snapshot().info.notes)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    with torch.no_grad(), window(plain) as seen:
        plain(torch.randn(4, 8)).softmax(-1)
    assert seen.snapshot().info.notes == []


def test_blocks_without_attention_are_asked_for_hidden_states_alone():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(32, 32)

        def forward(self, x):
            return x + self.mix(x)

    model = PlainDecoder()
    model.blocks.insert(1, Mixing())
    with torch.no_grad(), window(model) as seen:
        model(batch())
    layers = seen.snapshot().layers
    assert layers[2].sources == {"hidden", "last"}
    assert layers[2].missing == {}
    assert "query" in layers[3].captured


def test_length_first_hidden_states_keep_their_positions_and_padding():
    torch.manual_seed(0)
    ids = batch(4, 12)
    padding = torch.zeros(4, 12, dtype=torch.bool)
    padding[1, 7:] = True

    class Model(nn.Module):
        def __init__(self, batch_first) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens = nn.Embedding(50, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids, padding):
            return self.encoder(self.tokens(ids), src_key_padding_mask=padding)

    pictures = []
    for batch_first in (True, False):
        model = Model(batch_first).eval()
        with torch.no_grad(), window(model) as seen:
            model(ids if batch_first else ids.T, padding)
        layer = seen.snapshot().layers[2]
        order = (layer.captured["token_ids"] * 100 + layer.captured["positions"]).argsort(
            stable=True
        )
        pictures.append({view: layer.captured[view][order] for view in ("token_ids", "positions")})
        assert len(layer.captured["hidden"]) == 43
        assert layer.captured["visible"][:, 0].any(-1).sum() == 43
    for view in ("token_ids", "positions"):
        assert torch.equal(pictures[0][view], pictures[1][view])


# -- attention by hand -------------------------------------------------------------------------


class ByHand(PlainBlock):
    """The same block with attention written out."""

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = soften(scores.masked_fill(later, -torch.inf)) @ v
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


SOFTENERS = {
    "method": lambda scores: scores.softmax(-1),
    "function": lambda scores: nn.functional.softmax(scores, dim=-1),
    "torch": lambda scores: torch.softmax(scores, 3),
    "module": nn.Softmax(dim=-1),
    "keywords": lambda scores: torch.softmax(input=scores, dim=-1, dtype=torch.float32),
}
soften = SOFTENERS["method"]


@pytest.mark.parametrize("way", SOFTENERS)
def test_attention_by_hand_has_the_entropy_of_the_same_attention_by_function(way, monkeypatch):
    monkeypatch.setitem(globals(), "soften", SOFTENERS[way])
    fused, by_hand = PlainDecoder().eval(), PlainDecoder().eval()
    by_hand.blocks = nn.ModuleList(ByHand(32, 4, 0.0) for _ in range(3))
    by_hand.load_state_dict(fused.state_dict())
    found = []
    for model in (fused, by_hand):
        with torch.no_grad():
            plain = model(batch())
            with window(model) as seen:
                assert torch.equal(model(batch()), plain)
        found.append(seen.snapshot().layers[2])
    expected, layer = found
    assert "scores" not in expected.captured
    assert torch.allclose(
        LayerViews(layer)["attention"].entropy, LayerViews(expected)["attention"].entropy, atol=1e-5
    )
    for view in ("projected_query", "projected_key"):
        assert torch.allclose(layer.captured[view], expected.captured[view], atol=1e-6)
    for view in ("query", "key"):
        assert torch.allclose(layer.captured[view], expected.captured[view], atol=1e-5)
    assert layer.captured["scale"] == pytest.approx(expected.captured["scale"], rel=1e-12)
    assert layer.captured["bias"] is None


def test_attention_that_gives_its_weights_away_is_seen_at_the_softmax():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.weights = None

        def forward(self, x):
            y, self.weights = self.attention(x, x, x, average_attn_weights=False)
            return x + y

    model = nn.Sequential(Block(), Block()).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(3, 7, 32))
    layer = seen.snapshot().layers[2]
    assert torch.allclose(rebuilt(layer), model[1].weights, atol=1e-6)
    assert layer.captured["projected_query"].shape == (21, 4, 8)
    assert seen.routes("") == {"softmax"}


# -- what a window does not disturb, and what disturbs it --------------------------------------


def test_copies_made_under_the_window_are_not_watched():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        model(batch())
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        outputs = [m(batch(seed=5)) for m in (model, twin, again)]
        seconds = seen.seconds
        twin(batch())
        assert seen.seconds == seconds
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert hooks(model) == 0


def test_blocks_in_another_thread_are_not_seen_and_said():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        thread = threading.Thread(target=lambda: model(batch()))
        thread.start()
        thread.join()
    assert "in another thread" in seen.snapshot().layers[1].missing["hidden"]


def test_nested_tensors_are_refused_with_the_reason():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x)

    model = nn.Sequential(Plain(), Plain())
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with torch.no_grad(), window(model) as seen:
        model(parts)
    assert "nested tensors" in seen.snapshot().layers[1].missing["hidden"]


def test_padding_is_found_where_it_is_given_by_place():
    class Masked(PlainDecoder):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

    model, ids = Masked().eval(), batch()
    mask = padded(ids, "right")
    for given in (mask, mask.bool(), mask.float(), (1.0 - mask) * -1e9):
        with torch.no_grad(), window(model) as seen:
            model(ids, given)
        rows = sampled(seen, "", 1).rows
        assert torch.equal(rows.sort().values, mask.flatten().nonzero().squeeze(1))
        assert any(
            "padding, 5% of the tokens" in note.words() for note in seen.snapshot().info.notes
        )


class Sharded(torch.Tensor):
    """Stands for a DTensor: what it holds is elsewhere, and its own part is local."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)[:1]


def test_the_local_part_of_a_sharded_tensor_is_taken_and_said():
    class Sharding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x.as_subclass(torch.Tensor)).as_subclass(Sharded)

    model = nn.Sequential(Sharding(), Sharding())
    with torch.no_grad(), window(model) as seen:
        out = model(torch.randn(4, 6, 8).as_subclass(Sharded))
    snapshot = seen.snapshot()
    hidden = snapshot.layers[2].captured["hidden"]
    assert type(hidden) is torch.Tensor
    assert torch.equal(hidden, out.to_local().flatten(0, 1)[sampled(seen, "", 2).rows])
    assert any(
        "this rank's part of a sharded tensor" in note.words() for note in snapshot.info.notes
    )


def test_of_lists_of_sublayers_what_enters_each_is_a_layer():
    class Attention(PlainBlock):
        def forward(self, x):
            q, k, v = (
                part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
            )
            return self.c_proj(
                nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            )

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([Attention(32, 4, 0.0), nn.Sequential(nn.Linear(32, 32), nn.GELU())])
                for _ in range(3)
            )

        def forward(self, x):
            self.states = [x]
            for attention, feed_forward in self.layers:
                x = attention(x) + x
                x = feed_forward(x) + x
                self.states.append(x)
            return x

    model = Pairs().eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 6, 32))
    layers = seen.snapshot().layers
    for layer in layers[:3]:
        rows = sampled(seen, "", layer.index).rows
        expected = model.states[layer.index].flatten(0, 1)[rows]
        assert torch.equal(layer.captured["hidden"], expected)
    assert all("query" in layer.captured for layer in layers[1:])
    assert "the last one enters none" in layers[3].missing["hidden"]


def test_of_lists_of_sublayers_a_second_round_gives_the_first_no_layer():
    """The rows of another chunk enter the first block, and not what the last block gave."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([Attending(by_hand=False), nn.Sequential(nn.Linear(32, 32))])
                for _ in range(2)
            )

        def forward(self, x):
            self.states = []
            for part in x.chunk(2, dim=1):
                self.states.append(part)
                y = part
                for attention, feed_forward in self.layers:
                    y = attention(y) + y
                    y = feed_forward(y) + y
                    self.states.append(y)
            return y

    model = Pair().eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 6, 32))
    layers = seen.snapshot().layers
    assert len(layers) == 5
    for depth, state in ((0, 0), (1, 1), (3, 4)):
        rows = sampled(seen, "", depth).rows
        expected = model.states[state].flatten(0, 1)[rows]
        assert torch.equal(layers[depth].captured["hidden"], expected)
    for depth in (2, 4):
        assert "the last one enters none" in layers[depth].missing["hidden"]


def test_a_hook_that_fails_never_ends_a_run(monkeypatch):
    from geomon.capture import recorder
    from geomon.capture import window as capture

    def broken(*args):
        raise ZeroDivisionError("by design")

    model = PlainDecoder().eval()
    with torch.no_grad():
        plain = model(batch())
        of_window = [(capture, x) for x in ("first_tensor", "copy_rows", "spread_indices")]
        for module, name in [(recorder, "record_call"), *of_window]:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, broken)
                with window(model) as seen:
                    assert torch.equal(model(batch()), plain)
            notes = [note.words() for note in seen.snapshot().info.notes]
            assert any("a hook failed" in note and "by design" in note for note in notes)


def test_a_softmax_before_the_attention_call_gives_way_to_it():
    class Gated(PlainBlock):
        def forward(self, x):
            length = x.shape[1]
            gate = torch.zeros(x.shape[0], self.n_head, length, length).softmax(-1)
            return super().forward(x) + 0 * gate.sum()

    model = nn.Sequential(Gated(32, 4, 0.0), Gated(32, 4, 0.0))
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(2, 6, 32))
    layer = seen.snapshot().layers[1]
    assert seen.routes("") == {"sdpa"}
    assert layer.captured["query"].shape == (2, 4, 6, 8)
    assert "scores" not in layer.captured


def kept_bytes(snapshot):
    names = ("hidden", "projected_query", "projected_key", "query", "key", "scores", "bias")
    return sum(
        4 * layer.captured[name].numel()
        for layer in snapshot.layers
        for name in names
        if isinstance(layer.captured.get(name), torch.Tensor)
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("megabytes", [0.1, 0.3, 0.6])
def test_memory_is_held_by_keeping_fewer_rows_and_said(name, megabytes):
    model, ids = transformer(name), batch(64, 16)
    with torch.no_grad(), window(model, rows=1024, max_mb=None) as seen:
        model(ids)
    assert kept_bytes(seen.snapshot()) > 1e6
    with torch.no_grad(), window(model, rows=1024, max_mb=megabytes) as seen:
        model(ids)
    snapshot = seen.snapshot()
    assert 16 < snapshot.info.tokens < 1024
    assert 0.25 * megabytes * 1e6 < kept_bytes(snapshot) <= megabytes * 1e6
    text = next(n.words() for n in snapshot.info.notes if n.kind == "rows thinned for memory")
    assert text.startswith(f"at most {snapshot.info.tokens} rows instead of 1024 are kept")
    assert "query" in snapshot.layers[1].captured  # attention is seen with fewer rows, too


def test_however_little_memory_is_allowed_some_rows_are_kept():
    model = transformer("gpt2")
    with torch.no_grad(), window(model, rows=200, max_mb=1e-9) as seen:
        model(batch())
    assert seen.snapshot().info.tokens == 16


# -- fewer rows than the batch has -----------------------------------------------------------------


def uneven(sequences: int, length: int) -> torch.Tensor:
    """A padding mask in which no two neighbouring sequences are of one length."""
    lengths = length - (5 * torch.arange(sequences)) % (length - 3)
    return (torch.arange(length) < lengths[:, None]).long()


# Of 60 sequences of 32 tokens: 1 sequence, 2 of them whole, and 50 of which 21 queries each.
@pytest.mark.parametrize(("rows", "some", "each"), [(20, 1, 32), (64, 2, 32), (1600, 50, 21)])
@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "sdpa") for name in NAMES), ("mistral", "eager")]
)
def test_sampled_sequences_and_queries_are_those_of_the_model(name, attention, rows, some, each):
    model = transformer(name, attention).eval()
    inputs = {"input_ids": batch(60, 32), "attention_mask": uneven(60, 32)}
    with torch.no_grad():
        expected = transformer(name, "eager").eval()(**inputs, output_attentions=True)
        with window(model, rows=rows, seed=3) as seen:
            model(**inputs)
    for layer in seen.snapshot().layers[1:]:
        chosen = sampled(seen, "", layer.index)
        assert chosen.places.shape == (some, each)
        assert len(set(chosen.sequences.tolist())) == some
        assert chosen.sequences.tolist() != list(range(some))
        places = chosen.places[:, None, :, None].expand(-1, 4, -1, 32)
        truth = expected.attentions[layer.index - 1][chosen.sequences].gather(2, places)
        valid = inputs["attention_mask"][chosen.sequences].gather(1, chosen.places).bool()
        real = layer.captured["visible"].any(-1).expand(truth.shape[:-1])
        assert torch.equal(real, valid[:, None].expand_as(real))
        assert (rebuilt(layer) - truth)[real].abs().max() < 1e-5


@pytest.mark.parametrize(("rows", "some", "each"), [(64, 2, 32), (1600, 50, 21)])
def test_sampled_scores_of_attention_by_hand_are_those_of_the_model(rows, some, each):
    torch.manual_seed(0)
    model = language_model(CausalSelfAttention, "eager").eval()
    with torch.no_grad(), window(model, rows=rows, seed=3) as seen:
        model(batch(60, 32))
    for layer in seen.snapshot().layers[1:]:
        chosen = sampled(seen, "", layer.index)
        assert chosen.places.shape == (some, each)
        places = chosen.places[:, None, :, None].expand(-1, 4, -1, 32)
        attention = model.transformer.h[layer.index - 1].attn
        truth = attention.probabilities[chosen.sequences].gather(2, places)
        found = rebuilt(layer)
        torch.testing.assert_close(found, truth, atol=1e-6, rtol=0)


def test_sampled_queries_and_keys_are_of_the_same_sequences():
    """Each by itself, where nothing rotates: two errors that agree would still attend."""
    model = PlainDecoder().eval()
    outputs = {}
    handle = model.blocks[1].c_attn.register_forward_hook(lambda m, a, out: outputs.update(x=out))
    with torch.no_grad(), window(model, rows=64, seed=3) as seen:
        model(batch(60, 32))
    handle.remove()
    layer, chosen = seen.snapshot().layers[2], sampled(seen, "", 2)
    query, key, _ = (part.unflatten(-1, (4, 8)) for part in outputs["x"].chunk(3, dim=-1))
    assert torch.equal(layer.captured["query"].transpose(1, 2), query[chosen.sequences])
    assert torch.equal(layer.captured["key"].transpose(1, 2), key[chosen.sequences])
    flat = query.flatten(0, 1)[chosen.query_rows]
    assert torch.equal(layer.captured["projected_query"], flat)
    assert len(chosen.query_rows) == 64


def test_token_ids_and_positions_belong_to_the_rows_that_are_finite():
    """Compared by their values: a shift leaves the lengths as they are."""
    model = PlainDecoder().eval()
    ids = batch()
    with torch.no_grad():
        model.tokens.weight[7] = torch.nan
        clean = model.tokens(ids) + model.places(torch.arange(ids.shape[1]))
        with window(model) as seen:
            model(ids)
    first = seen.snapshot().layers[0]
    rows = sampled(seen, "", 0).rows
    kept = rows[ids.flatten()[rows] != 7]
    assert 0 < len(kept) < len(rows)
    assert torch.equal(first.captured["token_ids"], ids.flatten()[kept])
    assert torch.equal(first.captured["positions"], kept % ids.shape[1])
    assert torch.equal(first.captured["hidden"], clean.flatten(0, 1)[kept])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("way_out", ["end", "exception"])
def test_the_fast_path_is_as_it_was_whichever_way_that_is(fast, way_out):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        model = PlainDecoder()
        if way_out == "end":
            with window(model):
                assert not torch.backends.mha.get_fastpath_enabled()
                model(batch())
        else:
            with pytest.raises(RuntimeError, match="in the pass"), window(model):
                raise RuntimeError("in the pass")
        assert torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("owner", ["called", "run by hand"])
def test_recomputation_changes_neither_the_layers_nor_what_they_hold(owner):
    """The recomputation gives other states than the pass did, so that it cannot pass for it."""
    model = PlainDecoder()
    calls = []

    class Turned(nn.Module):
        """A block that gives something else each time it is called."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            calls.append(1)
            return self.inner(x) + len(calls)

    inner = list(model.blocks)
    model.blocks = nn.ModuleList(Turned(block) for block in inner)

    def forward(ids):
        x = model.tokens(ids) + model.places(torch.arange(ids.shape[1]))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, determinism_check="none")
        return model.head(x)

    if owner == "called":
        model.forward = forward
        forward = model
    with window(model) as seen:
        loss = forward(batch()).sum()
        before = seen.snapshot().layers
        assert len(calls) == 3
        loss.backward()
    assert len(calls) == 6  # forward and recomputation both ran under the open window
    after = seen.snapshot().layers
    assert [layer.name for layer in after] == [layer.name for layer in before]
    assert len(after) == 4
    for layer, other in zip(before, after, strict=True):
        assert layer.captured.keys() == other.captured.keys()
        assert torch.equal(layer.captured["hidden"], other.captured["hidden"])
        for view in ("query", "key", "projected_query"):
            if view in layer.captured:
                assert torch.equal(layer.captured[view], other.captured[view])


def test_a_recomputation_alone_is_no_pass():
    """The forward pass was before the window: what the backward pass runs again does not count."""
    model = PlainDecoder()
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    x = model.tokens(batch()) + model.places(torch.arange(32))
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    with window(model) as seen:
        model.head(x).sum().backward()
    assert len(calls) == 2
    for layer in seen.snapshot().layers:
        assert layer.captured == {}
        assert "not run under the window" in next(iter(layer.missing.values()))


# -- blocks whose input is not the output of the block before --------------------------------------


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
        self.fused = fused.detach()
        bias = torch.zeros(len(x), 1, 1, x.shape[1])
        if hidden is not None:
            bias = bias.masked_fill(hidden[:, None, None, :], -1e9)
        scores = q @ k.mT / 8**0.5 + bias
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        self.probabilities = (weights / weights.sum(-1, keepdim=True)).detach()
        if self.by_hand:
            y = scores.softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
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
    model, x = Pooling(by_hand=by_hand, flat=flat).eval(), torch.randn(5, 12, 32)
    real = torch.ones(5, 12, dtype=torch.bool)
    if pads:
        real[0, 8:] = real[3, 4:] = False
    with torch.no_grad():
        plain = model(x, ~real)
        with window(model) as seen:
            assert torch.equal(model(x, ~real), plain)
    snapshot = seen.snapshot()
    for layer in snapshot.layers[1:]:
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
        found = rebuilt(layer)
        kept = valid[:, None, :, None].expand_as(found)
        assert torch.equal(layer.captured["visible"].any(-1, keepdim=True).expand_as(found), kept)
        torch.testing.assert_close(
            found[kept], block.probabilities[chosen.sequences][kept], atol=1e-6, rtol=0
        )


def test_the_mean_counts_the_layers_of_merged_tokens():
    model, x = Pooling(by_hand=True, flat=False).eval(), torch.randn(40, 12, 32)
    values = measure(model, x)
    for metric in ("attention_entropy", "qk_dot", "twonn"):
        layers = [values[f"{metric}/layer_{depth:02d}"] for depth in (1, 2, 3, 4)]
        assert values[f"{metric}/mean"] == pytest.approx(sum(layers) / 4)


def test_padding_that_is_lost_with_the_length_is_said():
    class Lost(Pooling):
        def forward(self, x, attention_mask=None):
            return super().forward(x, None)

    model = Lost(by_hand=False, flat=False).eval()
    mask = torch.ones(5, 12)
    mask[0, 8:] = 0
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(5, 12, 32), attention_mask=mask)
    texts = [note.words() for note in seen.snapshot().info.notes]
    assert any(text.startswith("hidden states, layer 3, 4: padding is known") for text in texts)
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
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return x + y.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_of_five_dimensions_is_seen_or_refused_in_words(heads):
    model = nn.Sequential(Windowed(heads), Windowed(heads)).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(3, 16, 32))
    snapshot = seen.snapshot()
    assert not any("failed" in note.words() for note in snapshot.info.notes)
    for layer in snapshot.layers[1:]:
        assert layer.captured["hidden"].shape == (48, 32)
        reasons = [layer.missing.get(view, "") for view in ("visible", "projected_query")]
        assert not any("Error" in reason for reason in reasons)


# -- several attentions in a block -----------------------------------------------------------------


class Attending(nn.Module):
    """Attention with projections and an output in a list, as diffusers has it."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = 4, by_hand
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.0)])

    def forward(self, x, context=None):
        context = x if context is None else context
        self.rows = self.to_q(x).detach(), self.to_k(context).detach()
        q, k, v = (
            project(given).unflatten(-1, (4, -1)).transpose(1, 2)
            for project, given in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        self.weights = (q @ k.mT / 8**0.5).exp().detach()
        self.weights /= self.weights.sum(-1, keepdim=True)
        if self.by_hand:
            y = (q @ k.mT / 8**0.5).softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out[1](self.to_out[0](y.transpose(1, 2).flatten(2)))


class TwoAttentions(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn1, self.attn2 = Attending(**options), Attending(**options)
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

    def forward(self, x, context=None):
        for block in self.transformer_blocks:
            x = block(x, context)
        return x


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("keys", [None, 5, 9])
def test_a_second_attention_of_a_block_makes_layers_of_its_own(by_hand, keys):
    model, x = Denoiser(by_hand=by_hand).eval(), torch.randn(4, 9, 32)
    context = None if keys is None else torch.randn(4, keys, 32)
    with torch.no_grad():
        plain = model(x, context)
        with window(model) as seen:
            assert torch.equal(model(x, context), plain)
    layers = by_place(seen.snapshot())
    stacks = [("", 0), *(("", d) for d in (1, 2, 3)), *(("attn2", d) for d in (1, 2, 3))]
    assert [*layers] == stacks
    for (stack, depth), layer in layers.items():
        if depth == 0:
            continue
        module = getattr(model.transformer_blocks[depth - 1], stack or "attn1")
        chosen = sampled(seen, stack, depth)
        found = rebuilt(layer)
        truth = module.weights[chosen.sequences]
        torch.testing.assert_close(found, truth, atol=1e-6, rtol=0)
        for which, rows, indices in zip(
            ("query", "key"), module.rows, (chosen.query_rows, chosen.key_rows), strict=True
        ):
            expected = rows.flatten(0, 1)[indices].unflatten(-1, (4, 8))
            assert len(indices) == rows[..., 0].numel()
            assert torch.equal(layer.captured[f"projected_{which}"], expected)
    assert layers["attn2", 2].name == "transformer_blocks.1.attn2"
    assert layers["attn2", 2].sources == {"attention", "projection"}
    assert seen.attends_elsewhere("", "attn2") == (keys is not None)
    shown = dict(describe(model, lambda run: run(x, context)).rows)["further attention"]
    assert shown.startswith("attn2: ")
    assert ("to keys of another source" in shown) == (keys is not None)
    assert "attn2: 4 heads of width 8" in dict(describe(model).rows)["further attention"]
    values = measure(model, torch.randn(40, 9, 32))
    each = [values[f"max_logit/attn2_layer_{depth:02d}"] for depth in (1, 2, 3)]
    assert values["max_logit/attn2_mean"] == pytest.approx(sum(each) / 3)


def test_padding_of_the_stack_is_not_that_of_keys_of_another_source():
    """As many keys as tokens: only where they come from tells them apart."""
    model, x, context = Denoiser(by_hand=False).eval(), torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    mask = torch.ones(4, 9)
    mask[1, 5:] = 0

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x, context, attention_mask):
            return self.inner(x, context)

    outer = Masked().eval()
    with torch.no_grad(), window(outer) as seen:
        outer(x, context, mask)
    layers = by_place(seen.snapshot())
    assert len(layers["", 1].captured["projected_key"]) == 32
    assert len(layers["attn2", 1].captured["projected_query"]) == 32
    assert len(layers["attn2", 1].captured["projected_key"]) == 36


class SpaceTime(nn.Module):
    """Attention among the places of each frame, then among the frames of each place."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.space, self.time = Attending(**options), Attending(**options)

    def forward(self, x, context=None):
        frames = x.unflatten(1, (3, 4))
        frames = frames + self.space(self.norm1(frames).flatten(0, 1)).unflatten(0, (-1, 3))
        turned = frames.transpose(1, 2)
        turned = turned + self.time(self.norm2(turned).flatten(0, 1)).unflatten(0, (-1, 4))
        return turned.transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("by_hand", [False, True])
def test_attention_in_space_and_in_time_are_apart(by_hand):
    model = Denoiser(SpaceTime, by_hand=by_hand).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(5, 12, 32))
    layers = by_place(seen.snapshot())
    for stack, name, shape in (("", "space", (15, 4, 4, 4)), ("time", "time", (20, 4, 3, 3))):
        for depth in (1, 2, 3):
            layer = layers[stack, depth]
            module = getattr(model.transformer_blocks[depth - 1], name)
            found = rebuilt(layer)
            assert found.shape == shape
            torch.testing.assert_close(found, module.weights, atol=1e-6, rtol=0)
            query = module.rows[0].flatten(0, 1)[sampled(seen, stack, depth).query_rows]
            assert torch.equal(layer.captured["projected_query"], query.unflatten(-1, (4, 8)))


def test_a_second_attention_that_cannot_be_told_apart_is_said():
    class Unnamed(nn.Module):
        """Projections under names of its own, and two attentions in one module."""

        def __init__(self) -> None:
            super().__init__()
            self.rows, self.columns = nn.Linear(32, 96), nn.Linear(32, 96)

        def forward(self, x, context=None):
            for projection in (self.rows, self.columns):
                q, k, v = projection(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
                y = nn.functional.scaled_dot_product_attention(q, k, v)
                x = x + y.transpose(1, 2).flatten(2)
            return x

    model = Denoiser(Unnamed).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 9, 32))
    (note,) = seen.snapshot().info.notes[:1]
    assert note.words().startswith("attention, layer 1, 2, 3: it is called more than once")
    shown = [text for label, text in describe(model, torch.randn(4, 9, 32)).rows if label == "note"]
    assert note.words() in shown


@pytest.mark.parametrize("first", [True, False])
def test_attention_of_unknown_names_is_not_taken_for_that_of_known_ones(first):
    class Unnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.rows(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).flatten(2)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.mixing = Attending(by_hand=False), Unnamed()

        def forward(self, x, context=None):
            for module in (self.mixing, self.known) if first else (self.known, self.mixing):
                x = x + module(x)
            return x

    model = Denoiser(Both).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 9, 32))
    snapshot = seen.snapshot()
    for layer in snapshot.layers[1:]:
        module = model.transformer_blocks[layer.index - 1].known
        torch.testing.assert_close(rebuilt(layer), module.weights, atol=1e-6, rtol=0)
    assert snapshot.info.notes[0].words().startswith("attention, layer 1, 2, 3: it is called more")


def test_a_second_attention_that_is_not_called_is_said():
    class Skipping(TwoAttentions):
        def forward(self, x, context=None):
            return x + self.attn1(self.norm1(x))

    model = Denoiser(Skipping, by_hand=False).eval()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 9, 32))
    snapshot = seen.snapshot()
    assert {layer.stack for layer in snapshot.layers} == {""}
    texts = [note.words() for note in snapshot.info.notes]
    assert "attn2: attention, layer 1, 2, 3: it was not seen in this pass: it is left out" in texts


# -- lists of norms, sublayer and residual ---------------------------------------------------------


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        return self.ff(x)


class Lists(nn.Module):
    """Sublayers in lists, as x-transformers has them: "a" attends, "c" to a context, "f" does not.

    A norm comes before the sublayer or after the sum.
    """

    def __init__(self, kinds: str, *, before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.ModuleList([nn.LayerNorm(32), None] if before else [None, nn.LayerNorm(32)]),
                    FeedForward() if kind == "f" else Attending(by_hand=True),
                    Residual(),
                ]
            )
            for kind in kinds
        )

    def forward(self, x, context=None):
        self.states = [x]
        for kind, ((pre, post), sublayer, residual) in zip(self.kinds, self.layers, strict=True):
            y = x if pre is None else pre(x)
            y = sublayer(y, context) if kind == "c" else sublayer(y)
            x = residual(y, x)
            x = x if post is None else post(x)
            self.states.append(x)
        return x


@pytest.mark.parametrize("before", [True, False], ids=["norm before", "norm after"])
@pytest.mark.parametrize(
    ("kinds", "ends", "attending"),
    [
        ("afafaf", [0, 2, 4, 6], [0, 2, 4]),
        ("acfacf", [0, 3, 6], [0, 3]),
        ("fafaf", [0, 3, 5], [1, 3]),
        ("affaff", [0, 3, 6], [0, 3]),
    ],
)
def test_of_lists_with_a_residual_the_sum_is_the_layer(kinds, ends, attending, before):
    model, x = Lists(kinds, before=before).eval(), torch.randn(4, 9, 32)
    context = torch.randn(4, 9, 32)
    with torch.no_grad():
        plain, clean = model(x, context), fingerprint(model)
        with window(model) as seen:
            assert torch.equal(model(x, context), plain)
            states = model.states
            model(x + 1, context)  # a second pass counts for nothing
        assert fingerprint(model) == clean
    layers = by_place(seen.snapshot())
    side = [("attention_2", d) for d in range(1, len(ends))] if "c" in kinds else []
    assert [*layers] == [*(("", d) for d in range(len(ends))), *side]
    for (stack, depth), layer in layers.items():
        rows = sampled(seen, stack, depth).rows
        if not stack:
            assert torch.equal(layer.captured["hidden"], states[ends[depth]].flatten(0, 1)[rows])
        if depth:
            model(x, context)  # the second pass has overwritten what the modules keep
            module = model.layers[attending[depth - 1] + bool(stack)][1]
            found = rebuilt(layer)
            torch.testing.assert_close(found, module.weights, atol=1e-6, rtol=0)
            query = module.rows[0].flatten(0, 1)[sampled(seen, stack, depth).query_rows]
            assert torch.equal(layer.captured["projected_query"], query.unflatten(-1, (4, 8)))
    assert seen.snapshot().info.notes == []


def test_lists_with_a_residual_are_described():
    shown = dict(describe(Lists("afaf", before=True)).rows)
    assert shown["blocks"] == "layers.0 to layers.2, each with the lists of sublayers behind it"
    assert shown["Q, K projected"] == "0.1.to_q and 0.1.to_k"
    with pytest.raises(ValueError, match="which is never called"):
        find_anatomy(Lists("afaf", before=True), r"layers\.\d+")


@pytest.mark.parametrize("end", ["normal", "exception"])
def test_what_a_window_keeps_is_freed_without_the_garbage_collector(end):
    """A cycle of references would keep the rows of each reading, on the device of the model."""
    model = PlainDecoder()
    gc.collect()
    gc.disable()
    try:
        seen = window(model)
        try:
            with seen:
                model(batch())
                if end == "exception":
                    raise RuntimeError
        except RuntimeError:
            pass
        kept = weakref.ref(seen)
        del seen
        assert kept() is None
    finally:
        gc.enable()


class Overwriting(nn.Module):
    """A decoder that uses the memory of its ids, masks and streams again, as static buffers are."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(9, 8), nn.ModuleList(map(Masked, range(2)))
        self.overwrites = overwrites

    def forward(self, ids):
        mask = torch.tensor([0.0] * 5 + [-1e9]).view(1, 1, 1, 6)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        if self.overwrites:
            for tensor in (ids, mask, x):
                tensor.fill_(1)
        return x


class Masked(nn.Module):
    def __init__(self, number) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, mask):
        q, k, v = (
            part(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + mixed.transpose(1, 2).flatten(2)


@torch.no_grad()
def test_what_a_model_overwrites_after_its_last_block_is_captured_as_it_was():
    found = []
    for overwrites in (False, True):
        model = Overwriting(overwrites=overwrites)
        ids = torch.arange(24).view(4, 6) % 9
        with window(model) as seen:
            model(ids)
        if overwrites:
            ids.fill_(2)
        found.append(seen.snapshot().layers)
    for kept, other in zip(*found, strict=True):
        assert {"token_ids", "hidden"} <= kept.captured.keys() == other.captured.keys()
        for name, value in kept.captured.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(other.captured[name], value), name
    assert not found[0][1].captured["visible"].all()


@pytest.mark.parametrize("shape", [(0, 16), (2, 0)])
def test_a_batch_without_tokens_does_not_count(shape):
    """A rank is given one where its data run out."""
    model = PlainDecoder()
    with torch.no_grad(), window(model) as seen:
        model(torch.zeros(shape, dtype=torch.int64))
    snapshot = seen.snapshot()
    assert snapshot.is_empty
    assert "a batch without tokens" in snapshot.layers[1].missing["hidden"]


def test_a_pass_inside_grad_is_seen_as_any_other():
    """`torch.func.grad` wraps tensors that have no address."""
    model, ids = PlainDecoder(), batch()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(given, tokens):
        return torch.func.functional_call(model, given, (tokens,)).logsumexp(-1).mean()

    with window(model) as plain:
        loss(parameters, ids)
    with window(model) as seen:
        torch.func.grad(loss)(parameters, ids)
    pairs = zip(seen.snapshot().layers, plain.snapshot().layers, strict=True)
    for layer, expected in pairs:
        assert (layer.captured.keys(), layer.missing) == (expected.captured.keys(), {})
        for view, value in expected.captured.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(layer.captured[view], value)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_pass_inside_vmap_is_refused_in_words():
    model = PlainDecoder()
    with window(model) as seen:
        torch.func.vmap(model, randomness="different")(batch()[:, None])
    snapshot = seen.snapshot()
    assert snapshot.is_empty
    assert "inside torch.func.vmap" in snapshot.layers[1].missing["hidden"]


def test_what_the_monitor_was_not_built_for_is_named_among_the_causes():
    model = PlainDecoder()
    with torch.no_grad(), window(model) as seen:
        copy.deepcopy(model)(batch())
    assert "a copy of the model" in seen.snapshot().layers[1].missing["hidden"]
    with torch.no_grad(), window(model) as seen:
        model.blocks[1] = copy.deepcopy(model.blocks[1])
        model(batch())
    assert "were replaced" in seen.snapshot().layers[2].missing["hidden"]


class Merging(nn.Module):
    """Adds to the weights of an attention for the time of its call, and passes attributes on."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Parameter(torch.randn(inner.in_proj_weight.shape))
        self.num_heads, self.batch_first = inner.num_heads, inner.batch_first
        self._qkv_same_embed_dim = True

    @property
    def in_proj_weight(self):
        return self.inner.in_proj_weight

    @property
    def in_proj_bias(self):
        return self.inner.in_proj_bias

    def forward(self, *args, **kwargs):
        weight = self.inner.in_proj_weight
        del self.inner.in_proj_weight
        self.inner.in_proj_weight = weight + self.more
        try:
            return self.inner(*args, **kwargs)
        finally:
            del self.inner.in_proj_weight
            self.inner.in_proj_weight = weight


def test_weights_that_are_merged_for_a_call_are_those_that_project():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2,
        enable_nested_tensor=False,
    )  # fmt: skip
    x = torch.randn(4, 8, 16)
    merged = copy.deepcopy(model)
    for layer, plain in zip(model.layers, merged.layers, strict=True):
        layer.self_attn = Merging(layer.self_attn)
        plain.self_attn.in_proj_weight.data += layer.self_attn.more.detach()
    pictures = []
    for each in (model, merged):
        with window(each) as seen:
            each(x)
        pictures.append(seen.snapshot().layers)
    for one, other in zip(*pictures, strict=True):
        for view in ("projected_query", "projected_key") if one.index else ():
            torch.testing.assert_close(one.captured[view], other.captured[view])


@pytest.mark.parametrize("virtual", [0, 3])
def test_hidden_states_of_no_token_are_said(virtual):
    class Prompted(PlainDecoder):
        def forward(self, ids):
            x = torch.cat([torch.zeros(len(ids), virtual, 32), self.tokens(ids)], dim=1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Prompted()
    with torch.no_grad(), window(model) as seen:
        model(batch())
    missing = seen.snapshot().layers[1].missing
    assert set(missing) == ({"token_ids", "last_token_ids"} if virtual else set())
    assert all("one was given fewer" in reason for reason in missing.values())


# -- which tensor of several is the stream ---------------------------------------------------------


class Ordered(PlainBlock):
    """A block that takes tables before its hidden states and returns other tensors before them."""

    def __init__(self, way: str) -> None:
        super().__init__(32, 4, 0.0)
        self.way = way

    def forward(self, angles, bias, x):
        y = super().forward(x)
        values = y.unflatten(-1, (4, 8)).transpose(1, 2)
        if self.way == "mapping":
            return {"values": values, "hidden": y}
        return (values, y) if self.way == "tuple" else y


class Ordering(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Ordered(way) for _ in range(3))

    def forward(self, ids):
        x = self.tokens(ids)
        self.states = [x]
        angles, bias = torch.randn(1, ids.shape[1], 8), torch.zeros(len(ids), 1, 1, ids.shape[1])
        for block in self.blocks:
            y = (
                block(angles=angles, bias=bias, x=x)
                if block.way == "named"
                else block(angles, bias, x)
            )
            x = y["hidden"] if block.way == "mapping" else y[1] if block.way == "tuple" else y
            self.states.append(x)
        return x


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("way", ["plain", "named", "tuple", "mapping"])
def test_the_stream_is_found_among_several_tensors(way, sequences):
    model, ids = Ordering(way), torch.randint(0, 50, (sequences, 12))
    with torch.no_grad(), window(model) as seen:
        model(ids)
    layers = seen.snapshot().layers
    for layer, state in zip(layers, model.states, strict=True):
        place = layer.captured["sequences"], layer.captured["positions"]
        assert torch.equal(layer.captured["hidden"], state[place])


class Apart(PlainBlock):
    """A block that hands on its residual beside what it has made."""

    def forward(self, x, residual=None):
        residual = x if residual is None else x + residual
        return super().forward(residual) - residual, residual


def test_several_tensors_of_the_stream_s_shape_are_said():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Apart(32, 4, 0.0) for _ in range(2))

        def forward(self, x):
            residual = None
            for block in self.blocks:
                x, residual = block(x, residual)
            return x + residual

    model = Model()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 8, 32))
    assert any(
        "several tensors of the shape" in note.words() for note in seen.snapshot().info.notes
    )


# -- heads that are modules of their own -----------------------------------------------------------


class OneHead(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8, bias=False) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x):
        self.q, self.k = self.query(x), self.key(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (self.q @ self.k.mT * 8**-0.5).masked_fill(later, -torch.inf)
        self.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        if self.by_hand:
            return scores.softmax(-1) @ self.value(x)
        return nn.functional.scaled_dot_product_attention(
            self.q, self.k, self.value(x), is_causal=True
        )


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
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(ManyHeads(by_hand, wide) for _ in range(2))

        def forward(self, x):
            self.states = [x]
            for layer in self.layers:
                self.states.append(layer(self.states[-1]))
            return self.states[-1]

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(sequences, 12, 32))
    snapshot = seen.snapshot()
    assert [(layer.stack, layer.index) for layer in snapshot.layers] == [("", 0), ("", 1), ("", 2)]
    for layer in snapshot.layers[1:]:
        views, heads = layer.captured, model.layers[layer.index - 1].heads
        place = views["sequences"], views["positions"]
        assert torch.equal(views["hidden"], model.states[layer.index][place])
        found = rebuilt(layer)
        expected = torch.stack([head.weights for head in heads], 1)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        rows = views["query_sequences"], views["positions"]
        for view, name in (("projected_query", "q"), ("projected_key", "k")):
            each = torch.stack([getattr(head, name) for head in heads], 2)
            assert torch.equal(views[view], each[rows])
        assert views["max_logits"].shape == (4,)
    values = measure(model, torch.randn(12, 12, 32))
    assert {f"attention_entropy/layer_01/head_{head}" for head in range(4)} <= values.keys()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.inner = nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32))

    def forward(self, x):
        return x + self.inner(self.norm(x))


@pytest.mark.parametrize("blocks", [None, r"(own|other)\.\d+"])
def test_a_large_stack_that_is_not_watched_is_said(blocks):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.ModuleList(PlainBlock(32, 4, 0.0) for _ in range(2))
            self.other = nn.ModuleList(Mixing() for _ in range(2))

        def forward(self, x):
            for block in [*self.own, *self.other]:
                x = block(x)
            return x

    model = Model()
    anatomy = find_anatomy(model, blocks)
    with torch.no_grad(), Window(anatomy, set(CAPTURED), rows=100, seed=0) as seen:
        model(torch.randn(4, 8, 32))
    told = [note.words() for note in seen.snapshot().info.notes if "not watched" in note.words()]
    assert bool(told) == (blocks is None)
    assert all("2 blocks other.#" in text and "blocks=..." in text for text in told)
