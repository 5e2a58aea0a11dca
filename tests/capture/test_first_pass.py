"""Which calls of a stack's blocks make its layers."""

import pytest
import torch
from models import PlainDecoder, batch, transformer
from plain_models import both
from referee import sampled
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched import (
    Attention,
    ToContext,
    attend_by_hand,
    by_place,
    check_attention,
    check_hidden,
    look,
    notes,
    window,
)

from geomon import describe
from geomon.capture import find_anatomy


def in_order(layer) -> list[torch.Tensor]:
    """Hidden states, token ids and attended queries, in the order of the batch."""
    seen = layer.captured
    order = (1000 * seen["sequences"] + seen["positions"]).argsort()
    attended = [seen["query"], seen["visible"]] if layer.index else []
    return [seen["hidden"][order], seen["token_ids"][order], *attended]


def test_a_stack_that_was_not_run_is_left_out_and_said():
    model = both().eval()
    with torch.no_grad(), window(model) as seen:
        model.encoder(torch.randn(4, 9, 32))
    assert {layer.stack for layer in seen.snapshot().layers} == {"encoder"}
    assert any("'decoder' did not run" in text for text in notes(seen))


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
    check_hidden(seen, 4, out)
    assert not torch.equal(layers[4].captured["query"], layers[3].captured["query"])


@pytest.mark.parametrize("chunks", [1, 2])
def test_blocks_that_are_run_again_on_other_rows_are_said(chunks):
    class Chunked(PlainDecoder):
        def forward(self, ids):
            for part in self.tokens(ids).chunk(chunks, dim=1):
                x = part
                for block in [*self.blocks, *self.blocks]:
                    x = block(x)
            return x

    texts = notes(look(Chunked(), batch()))
    assert any("called again on something other" in text for text in texts) == (chunks == 2)


@pytest.mark.parametrize("order", ["without first", "with first", "without alone"])
def test_the_first_pass_counts_and_one_with_gradients_before_those_without(order):
    model = transformer("gpt2").eval()
    mask = torch.ones(8, 32, dtype=torch.int64)
    mask[1, 20:] = 0
    inputs = {"input_ids": batch(seed=1), "attention_mask": mask}
    other = {"input_ids": batch(3, 12, seed=2)}  # generated, scored: of another shape
    with window(model) as alone:
        model(**(other if order == "without alone" else inputs))
    passes = {"without first": [other, other, inputs], "with first": [inputs, other]}
    again = {"input_ids": batch(3, 12, seed=3)}
    with window(model) as seen:
        for given in passes.get(order, [other, again]):
            with torch.set_grad_enabled(given is inputs):
                model(**given)
    for layer, expected in zip(seen.snapshot().layers, alone.snapshot().layers, strict=True):
        assert layer.missing == expected.missing == {}
        for one, another in zip(in_order(layer), in_order(expected), strict=True):
            assert torch.equal(one, another)


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
    rows = sampled(seen, "", 2).rows
    assert torch.equal(layers[2].captured["token_ids"], batch().flatten()[rows])


def test_blocks_that_the_training_step_runs_itself_count_once_each():
    model, outputs = PlainDecoder().eval(), []
    with torch.no_grad(), window(model) as seen:
        for seed in (0, 1):
            x = model.tokens(batch(seed=seed))
            for block in model.blocks:
                x = block(x)
            outputs.append(x)
    check_hidden(seen, 3, outputs[0])
    rows = sampled(seen, "", 3).rows
    assert torch.equal(seen.snapshot().layers[3].captured["token_ids"], batch().flatten()[rows])


def test_a_dropped_layer_says_so_and_the_others_keep_their_depth():
    class Dropping(PlainDecoder):
        def forward(self, ids):
            return self.blocks[2](self.blocks[0](self.tokens(ids)))

    layers = look(Dropping(), batch()).snapshot().layers
    assert [layer.index for layer in layers if "hidden" in layer.captured] == [0, 1, 3]
    assert "not run in this pass although others did" in layers[2].missing["hidden"]
    assert "not run in this pass although others did" in layers[2].missing["query"]


# -- recomputation -----------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["called", "run by hand"])
def test_recomputation_changes_neither_the_layers_nor_what_they_hold(owner):
    """The recomputation gives other states than the pass did, so that it cannot pass for it."""
    model, calls = PlainDecoder(), []

    class Turned(nn.Module):
        """A block that gives something else each time it is called."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            calls.append(1)
            return self.inner(x) + len(calls)

    model.blocks = nn.ModuleList(Turned(block) for block in model.blocks)

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
    for layer, other in zip(before, seen.snapshot().layers, strict=True):
        assert layer.name == other.name
        assert layer.captured.keys() == other.captured.keys()
        for view in {"hidden", "query", "key", "projected_query"} & layer.captured.keys():
            assert torch.equal(layer.captured[view], other.captured[view])


# -- blocks that are lists of sublayers ----------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_of_lists_of_sublayers_what_enters_each_is_a_layer(parts):
    """With a second part of the sequences, a second round: it gives the first no layer."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([Attention(attend_by_hand, 32), nn.Sequential(nn.Linear(32, 32))])
                for _ in range(2)
            )

        def forward(self, x):
            self.states = []
            for part in x.chunk(parts, dim=1):
                self.states.append(part)
                y = part
                for attention, feed_forward in self.layers:
                    y = attention(y) + y
                    y = feed_forward(y) + y
                    self.states.append(y)
            return y

    model = Pairs()
    seen = look(model, torch.randn(4, 6, 32))
    layers = seen.snapshot().layers
    assert len(layers) == 1 + 2 * parts
    for depth, state in ((0, 0), (1, 1), (3, 4))[: parts + 1]:
        check_hidden(seen, depth, model.states[state])
    assert all("query" in layer.captured for layer in layers[1:])
    for depth in (2, 4)[:parts]:
        assert "the last layer enters none" in layers[depth].missing["hidden"]


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class Gate(nn.Module):
    """A residual with more parameters than a sublayer, as gated recurrent units are."""

    def __init__(self):
        super().__init__()
        self.unit = nn.GRUCell(32, 32)

    def forward(self, x, residual):
        return self.unit(x.flatten(0, 1), residual.flatten(0, 1)).view(x.shape)


class Lists(nn.Module):
    """Sublayers in lists, as x-transformers has them: "a" attends, "c" to a context, "f" does not.

    A norm comes before the sublayer or after the sum.
    """

    def __init__(self, kinds: str, *, before: bool, residual: type = Residual) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.layers = kinds, nn.ModuleList()
        for kind in kinds:
            norms = [nn.LayerNorm(32), None] if before else [None, nn.LayerNorm(32)]
            wide = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            sublayer = nn.Sequential(wide) if kind == "f" else ToContext(by_hand=True)
            self.layers.append(nn.ModuleList([nn.ModuleList(norms), sublayer, residual()]))

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
        ("acfacf", [0, 3, 6], [0, 3]),
        ("fafaf", [0, 3, 5], [1, 3]),
        ("affaff", [0, 3, 6], [0, 3]),
    ],
)
@pytest.mark.parametrize("residual", [Residual, Gate])
def test_of_lists_with_a_residual_the_sum_is_the_layer(kinds, ends, attending, before, residual):
    model = Lists(kinds, before=before, residual=residual)
    x, context = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    seen = look(model, x, context)
    layers = by_place(seen.snapshot())
    side = [("attention_2", d) for d in range(1, len(ends))] if "c" in kinds else []
    assert [*layers] == [*(("", d) for d in range(len(ends))), *side]
    for stack, depth in layers:
        if not stack:
            check_hidden(seen, depth, model.states[ends[depth]])
        if depth:
            attention = model.layers[attending[depth - 1] + bool(stack)][1]
            check_attention(seen, stack, depth, attention)
    assert notes(seen) == []


def test_lists_with_a_residual_are_described():
    shown = dict(describe(Lists("afaf", before=True)).rows)
    assert shown["blocks"] == "layers.0 to layers.2, each with the lists of sublayers behind it"
    assert shown["Q, K projected"] == "0.1.to_q and 0.1.to_k"
    with pytest.raises(ValueError, match="which is never called"):
        find_anatomy(Lists("afaf", before=True), r"layers\.\d+")
    model = Lists("afaf", before=True)
    with pytest.raises(ValueError, match="which is never called"):
        find_anatomy(model, list(model.layers))
