"""The calls of a stack's blocks that make its layers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geomon import describe
from geomon.capture import find_anatomy
from support.models import PlainDecoder, Running, batch, run_blocks, transformer
from support.plain_models import both
from support.referee import sampled
from support.watched import (
    Attention,
    ToContext,
    attend_by_hand,
    by_place,
    check_attention,
    check_hidden,
    in_order,
    look,
    notes,
    window,
)


def test_a_stack_that_was_not_run_is_left_out_and_said():
    model = both().eval()
    with torch.no_grad(), window(model) as seen:
        model.encoder(torch.randn(4, 9, 32))
    assert {layer.stack for layer in seen.snapshot().layers} == {"encoder"}
    assert any("'decoder' did not run" in text for text in notes(seen))


def test_one_block_called_again_and_again_is_a_layer_for_each_call():
    def again(model, x):
        for _ in range(4):
            x = model.blocks[0](x)
        return x

    model, x = Running(again, blocks=PlainDecoder(layers=1).blocks).eval(), torch.randn(8, 16, 32)
    with torch.no_grad(), window(model) as seen:
        out = model(x)
        model(x + 1)
    layers = seen.snapshot().layers
    assert [layer.index for layer in layers] == [0, 1, 2, 3, 4]
    assert [layer.name for layer in layers[1:3]] == ["blocks.0, call 1", "blocks.0, call 2"]
    check_hidden(seen, 4, out)
    assert not torch.equal(layers[4].captured["query"], layers[3].captured["query"])


def repeats(part: str) -> nn.Module:
    """Runs its two blocks three times; they may be in a part of it that nobody calls."""

    def run(model, ids):
        x = model.tokens(ids)
        model.states = [x]
        for _ in range(3):
            x = x + model.tokens(ids)
            for block in getattr(model, "part", model).blocks:
                x = block(x)
                model.states.append(x)
        return x

    blocks, tokens = PlainDecoder(layers=2).blocks, nn.Embedding(50, 32)
    if part == "of the model":
        return Running(run, blocks=blocks, tokens=tokens)
    holder = nn.Module() if part == "without forward" else Running(run_blocks)
    holder.blocks = blocks
    return Running(run, part=holder, tokens=tokens)


PARTS = ["of the model", "without forward", "with forward"]


@pytest.mark.parametrize("views", [["hidden"], None], ids=["hidden states", "all views"])
@pytest.mark.parametrize("part", PARTS)
def test_each_call_of_looped_blocks_is_a_layer_whatever_holds_them(part, views):
    model = repeats(part).eval()
    options = {} if views is None else {"views": views}
    with torch.no_grad(), window(model, **options) as seen:
        model(batch())
        states = model.states
        model(batch(seed=1))  # a pass of its own, which does not count
    layers = seen.snapshot().layers
    assert [layer.index for layer in layers] == [*range(7)]
    assert layers[3].name.endswith("blocks.0, call 3")
    for depth in range(1, 7):
        check_hidden(seen, depth, states[depth])


@pytest.mark.parametrize("part", PARTS)
def test_calls_of_looped_blocks_are_layers_in_a_module_that_is_not_called_itself(part):
    """A training step calls a part of the module that is watched."""
    inner = repeats(part)
    outer = Running(lambda m, ids: m.inner(ids).sum(), inner=inner)
    with torch.no_grad(), window(outer.eval()) as seen:
        outer.inner(batch())
        states = inner.states
        outer.inner(batch(seed=1))  # a pass of its own, which does not count
    assert len(seen.snapshot().layers) == 7
    for depth in range(1, 7):
        check_hidden(seen, depth, states[depth])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_called_module_that_loops_over_blocks_is_their_owner(part, times):
    inner = repeats(part)

    def run(m, ids):
        m.inner(ids)
        return m.inner(ids + 1) if times == 2 else m.inner.states[-1]

    seen = look(Running(run, inner=inner), batch() % 40)
    assert len(seen.snapshot().layers) == 7
    assert any("the blocks ran 2 times" in text for text in notes(seen)) == (times == 2)


@pytest.mark.parametrize("part", PARTS)
def test_looped_blocks_that_failed_give_way_to_the_next_pass_and_so_do_those_without_gradients(
    part,
):
    model = repeats(part).eval()
    blocks = getattr(model, "part", model).blocks
    handle = blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with window(model, views=["hidden"]) as seen:
        with pytest.raises(ZeroDivisionError):
            model(batch(4, 16))
        handle.remove()
        with torch.no_grad():
            model(batch(seed=1))
        model(batch())
    assert len(seen.snapshot().layers) == 7
    for depth in range(1, 7):
        check_hidden(seen, depth, model.states[depth])


@pytest.mark.parametrize("chunks", [1, 2])
def test_blocks_that_are_run_again_on_other_rows_are_said(chunks):
    def chunked(model, x):
        parts = [run_blocks(model, run_blocks(model, part)) for part in x.chunk(chunks, dim=1)]
        return parts[-1]

    texts = notes(look(PlainDecoder(run=chunked), batch()))
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
        views = ["hidden", "token_ids", *(["projected_query"] if layer.index else [])]
        for one, another in zip(in_order(layer, *views), in_order(expected, *views), strict=True):
            assert torch.equal(one, another)
        if layer.index:
            assert torch.equal(layer.captured["query"], expected.captured["query"])


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
            outputs.append(run_blocks(model, model.tokens(batch(seed=seed))))
    check_hidden(seen, 3, outputs[0])
    rows = sampled(seen, "", 3).rows
    assert torch.equal(seen.snapshot().layers[3].captured["token_ids"], batch().flatten()[rows])


def test_a_dropped_layer_says_so_and_the_others_keep_their_depth():
    model = PlainDecoder(run=lambda model, x: model.blocks[2](model.blocks[0](x)))
    layers = look(model, batch()).snapshot().layers
    assert [layer.index for layer in layers if "hidden" in layer.captured] == [0, 1, 3]
    assert "not run in this pass although others did" in layers[2].missing["hidden"]
    assert "not run in this pass although others did" in layers[2].missing["query"]


def test_stacks_that_are_called_one_after_another_are_all_seen():
    """A translator may call its encoder and its decoder, and nobody the model around them."""
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    with torch.no_grad(), window(model) as seen:
        memory = model.encoder(torch.randn(4, 9, 32))
        model.decoder(torch.randn(4, 7, 32), memory)
    layers = by_place(seen.snapshot())
    for stack in ("encoder", "decoder"):
        assert all("hidden" in layers[stack, depth].captured for depth in range(3))


# -- recomputation -----------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["called", "run by hand"])
def test_recomputation_changes_neither_the_layers_nor_what_they_hold(owner):
    """The recomputation gives other states than the pass did, so that it cannot pass for it."""
    calls = []

    def turned(m, x):
        """Gives something else each time it is called."""
        calls.append(1)
        return m.inner(x) + len(calls)

    def recomputed(model, x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, determinism_check="none")
        return x

    model = PlainDecoder(
        run=recomputed, block=lambda: Running(turned, inner=PlainDecoder(layers=1).blocks[0])
    )
    with window(model) as seen:
        out = (model if owner == "called" else model.forward)(batch())
        before = seen.snapshot().layers
        assert len(calls) == 3
        out.sum().backward()
    assert len(calls) == 6  # forward and recomputation both ran under the open window
    for layer, other in zip(before, seen.snapshot().layers, strict=True):
        assert (layer.name, layer.captured.keys()) == (other.name, other.captured.keys())
        for view in {"hidden", "query", "key", "projected_query"} & layer.captured.keys():
            assert torch.equal(layer.captured[view], other.captured[view])


# -- blocks that are lists of sublayers ----------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_the_input_of_each_list_of_sublayers_is_a_layer(parts):
    """With a second part of the sequences, a second round: it gives the first no layer."""

    def run(m, x):
        m.states = []
        for part in x.chunk(parts, dim=1):
            y = part
            m.states.append(y)
            for attention, feed_forward in m.layers:
                y = attention(y) + y
                y = feed_forward(y) + y
                m.states.append(y)
        return y

    def pair():
        feed_forward = nn.Sequential(nn.Linear(32, 32))
        return nn.ModuleList([Attention(attend_by_hand, 32), feed_forward])

    model = Running(run, layers=nn.ModuleList([pair(), pair()]))
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


def lists(kinds: str, *, before: bool = True, joins=Residual) -> nn.Module:
    """Sublayers in lists, as x-transformers has them: "a" attends, "c" to a context, "f" does not.

    A norm comes before the sublayer or after the sum.
    """

    def run(m, x, context=None):
        m.states = [x]
        for kind, ((pre, post), sublayer, join) in zip(kinds, m.layers, strict=True):
            y = x if pre is None else pre(x)
            x = join(sublayer(y, context) if kind == "c" else sublayer(y), x)
            x = x if post is None else post(x)
            m.states.append(x)
        return x

    def sublayer(kind):
        wide = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        inner = nn.Sequential(wide) if kind == "f" else ToContext(by_hand=True)
        norms = nn.ModuleList([nn.LayerNorm(32), None][:: 1 if before else -1])
        return nn.ModuleList([norms, inner, joins()])

    torch.manual_seed(0)
    return Running(run, layers=nn.ModuleList(map(sublayer, kinds)))


@pytest.mark.parametrize("before", [True, False], ids=["norm before", "norm after"])
@pytest.mark.parametrize(
    ("kinds", "ends", "attending"),
    [
        ("acfacf", [0, 3, 6], [0, 3]),
        ("fafaf", [0, 3, 5], [1, 3]),
        ("affaff", [0, 3, 6], [0, 3]),
    ],
)
@pytest.mark.parametrize("joins", [Residual, Gate])
def test_the_sum_is_the_layer_of_lists_with_a_residual(kinds, ends, attending, before, joins):
    model = lists(kinds, before=before, joins=joins)
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
    model = lists("afaf")
    shown = dict(describe(model).rows)
    assert shown["blocks"] == "layers.0 to layers.2, each with the lists of sublayers behind it"
    assert shown["Q, K projected"] == "0.1.to_q and 0.1.to_k"
    for blocks in (r"layers\.\d+", list(model.layers)):
        with pytest.raises(ValueError, match="which is never called"):
            find_anatomy(model, blocks)
