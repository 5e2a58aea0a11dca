"""A window keeps rows of a pass, leaves nothing behind, and says why it saw nothing."""

import copy
import gc
import itertools
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention as attend

from geomon import describe, measure, select
from geomon.capture import Plans, Window
from support.fingerprint import fingerprint
from support.models import PlainBlock, PlainDecoder, Running, batch, transformer
from support.referee import sampled
from support.watched import attend_by_hand, blocks_of, check_hidden, check_same, look, notes, window

# -- what it leaves behind -------------------------------------------------------------------------


@pytest.mark.parametrize("way_out", [None, KeyboardInterrupt])
def test_nothing_is_left_behind(way_out):
    model = transformer("gpt2")
    before = fingerprint(model)
    with suppress(KeyboardInterrupt), window(model):
        assert torch.backends.mha.get_fastpath_enabled()
        model(batch())
        if way_out is not None:
            raise way_out
    assert fingerprint(model) == before


def no_patch(patch, holder):
    raise RuntimeError("no patch here")


@pytest.mark.parametrize(
    ("name", "instead", "words"),
    [
        ("patches.Patch.hold", no_patch, "no patch here"),
        ("calls.SEES_CALLS", False, "calls modules in a way geomon does not know"),
    ],
)
def test_a_window_that_cannot_be_opened_leaves_nothing_and_ends_no_pass(
    name, instead, words, monkeypatch
):
    model = PlainDecoder()
    before, expected = fingerprint(model), model(batch())
    monkeypatch.setattr(f"geomon.capture.calling.{name}", instead)
    with window(model) as opened:
        assert torch.equal(model(batch()), expected)
    assert fingerprint(model) == before
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            opened.snapshot()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_windows_that_close_in_any_order_see_their_own_model(order):
    models = [PlainDecoder() for _ in range(3)]
    before, windows = fingerprint(models[0]), [*map(window, models)]
    for each in windows:
        each.__enter__()
    for place in order:
        models[place](batch())
        windows[place].__exit__(None, None, None)
        models[place](batch(seed=1))  # which no window sees
    assert fingerprint(models[0]) == before
    for seen, model in zip(windows, models, strict=True):
        assert all("query" in layer.captured for layer in seen.snapshot().layers[1:])
        check_hidden(seen, 0, model.tokens(batch()) + model.places(torch.arange(32)))


@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_window_are_freed_without_the_garbage_collector(fails):
    """A cycle of references would keep the rows of each reading, on the device of the model."""
    model = PlainDecoder()
    gc.collect()
    gc.disable()
    try:
        seen = window(model)
        with suppress(RuntimeError), seen:
            model(batch())
            if fails:
                raise RuntimeError
        kept = weakref.ref(seen)
        del seen
        assert kept() is None
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("known", [False, True])
def test_tensors_of_a_block_are_freed_as_it_ends(known):
    """Otherwise a pass without gradients would need the memory of one with them."""
    model, made, alive = PlainDecoder(layers=2), [], []
    plans = Plans()
    if known:
        with window(model, plans=plans):
            model(batch())
    keep = model.blocks[0].c_attn.register_forward_hook
    keep(lambda module, args, output: made.append(StorageWeakRef(output.untyped_storage())))
    model.blocks[1].ln_1.register_forward_pre_hook(
        lambda module, args: alive.extend(not each.expired() for each in made)
    )
    with window(model, plans=plans) as seen:
        model(batch())
    assert alive == [False]
    assert "projected_query" in seen.snapshot().layers[1].captured


def test_a_hook_that_fails_never_ends_a_run(monkeypatch, failures):
    def broken(*args):
        raise ZeroDivisionError("by design")

    model = PlainDecoder().eval()
    plain = model(batch())
    for name in (
        "recorder.record_call", "first_pass.SeenAttention", "hidden_states.place_of",
        "hidden_states.copy_rows", "hidden_states.spread_indices", "tap.provenance.layout_of",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(f"geomon.capture.{name}", broken)
            with window(model) as seen:
                assert torch.equal(model(batch()), plain)
        assert any("watching a call failed" in text and "by design" in text for text in notes(seen))
        failures.clear()


# -- what it keeps ---------------------------------------------------------------------------------


@torch.no_grad()
def test_tensors_that_a_model_overwrites_after_its_last_block_are_captured_as_they_were():
    """A model that uses the memory of its ids, mask and stream again, as static buffers are."""
    table, found = nn.Embedding(9, 32), []
    for overwrites in (False, True):
        ids = torch.arange(24).view(4, 6) % 9
        mask = torch.tensor([0.0] * 5 + [-1e9]).view(1, 1, 1, 6)
        layers = blocks_of(lambda q, k, v, mask=mask: attend(q, k, v, attn_mask=mask))
        with window(nn.Sequential(table, layers)) as seen:
            x = layers(table(ids))
            for tensor in (ids, mask, x) if overwrites else ():
                tensor.fill_(1)
        found.append(seen)
    check_same(*(seen.snapshot() for seen in found))
    assert not found[0].snapshot().layers[1].captured["visible"].all()


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
    check_same(seen.snapshot(), plain.snapshot())


@torch.no_grad()
def test_outputs_of_heads_are_those_of_the_sampled_queries():
    model, given = PlainDecoder(layers=2), []
    model.blocks[0].c_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with window(model, 16, views={"hidden", "head_outputs"}) as seen:
        model(batch(5, 20))
    call = seen.attentions("")[0].call
    assert call.places.numel() < 100  # not all of them
    rows = given[0].unflatten(-1, (4, 8))[call.sequences[:, None], call.places].double()
    sums, counts = seen.snapshot().layers[1].captured["head_outputs"].T
    torch.testing.assert_close(sums, rows.square().sum((0, 1, 3)))
    assert counts.tolist() == [call.places.numel()] * 4


def test_feature_maps_have_their_channels_as_width_also_if_blocks_change_it():
    blocks = [Running(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(*sizes, 1))
              for sizes in ((4, 6), (6, 9))]  # fmt: skip
    model, states = nn.Sequential(*blocks), [torch.randn(2, 4, 3, 5)]
    with torch.no_grad():
        for block in blocks:
            states.append(block(states[-1]))
        with window(model, blocks=blocks, views={"hidden"}) as seen:
            model(states[0])
    for depth, state in enumerate(states):
        check_hidden(seen, depth, state.movedim(1, -1))


class Sharded(torch.Tensor):
    """Stands for a DTensor: what it holds is elsewhere, and its own part is local."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)[:1]


class Unsummed(Sharded):
    """Stands for a DTensor whose numbers are still to be summed over the ranks."""

    placements = (Partial(),)
    device_mesh = SimpleNamespace(get_coordinate=lambda: (0,), size=lambda dim: 2)


@pytest.mark.parametrize("kind", [Sharded, Unsummed])
def test_the_local_part_of_a_sharded_tensor_is_taken_if_it_is_whole_in_itself(kind):
    def block():
        return Running(
            lambda m, x: m.inner(x.as_subclass(torch.Tensor)).as_subclass(kind),
            inner=nn.Linear(8, 8),
        )

    model, x = nn.Sequential(block(), block()), torch.randn(4, 6, 8)
    with torch.no_grad(), window(model) as seen:
        out = model(x.as_subclass(Sharded) if kind is Sharded else x)
    layers = seen.snapshot().layers
    assert "hidden" in layers[0].captured
    assert notes(seen) == []
    if kind is Unsummed:
        assert all(why(seen, depth).startswith("hidden states are partial") for depth in (1, 2))
        return
    hidden = layers[2].captured["hidden"]
    assert type(hidden) is torch.Tensor
    assert torch.equal(hidden, out.to_local().flatten(0, 1)[sampled(seen, "", 2).rows])


# -- which tensor of several is the stream ---------------------------------------------------------


MASK = torch.ones(12, 12, dtype=torch.bool).tril()
# How a block is given its hidden states; what it returns, of these and of values; the first of it.
ORDERS = {
    "behind tables": (lambda x, angles, bias: ((angles, bias, x), {}), lambda x, v: x, lambda y: y),
    "by name": (
        lambda x, angles, bias: ((), {"angles": angles, "bias": bias, "x": x}),
        lambda x, v: x, lambda y: y,
    ),
    "a tuple": (lambda x, *tables: ((*tables, x), {}), lambda x, v: (v, x), lambda y: y[1]),
    "a mapping": (
        lambda x, *tables: ((*tables, x), {}),
        lambda x, v: {"values": v, "hidden": x}, lambda y: y["hidden"],
    ),
    "a tuple in a tuple": (
        lambda x, *tables: ((((x, None), MASK),), {}),
        lambda x, v: ((x, None), MASK), lambda y: y[0][0],
    ),
    "a dict in a tuple": (
        lambda x, *tables: (((MASK, {"hidden": x}),), {}),
        lambda x, v: (MASK, {"hidden": x}), lambda y: y[1]["hidden"],
    ),
    "a list in a dict": (
        lambda x, *tables: (({"of": [MASK, x]},), {}),
        lambda x, v: {"of": [MASK, x]}, lambda y: y["of"][1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_the_stream_is_found_among_several_tensors(order, sequences):
    gives, returns, first = ORDERS[order]

    def block(m, *given, x=None, **named):
        given = given[-1] if x is None else x
        x = m.inner(given if isinstance(given, torch.Tensor) else first(given))
        return returns(x, x.unflatten(-1, (4, 8)).transpose(1, 2))

    def run(model, x):
        model.states = [x]
        tables = torch.randn(1, x.shape[1], 8), torch.zeros(len(x), 1, 1, x.shape[1])
        for each in model.blocks:
            given, named = gives(x, *tables)
            x = first(each(*given, **named))
            model.states.append(x)
        return x

    model = PlainDecoder(run=run, block=lambda: Running(block, inner=PlainBlock(32, 4, 0.0)))
    seen = look(model, batch(sequences, 12))
    for layer, state in zip(seen.snapshot().layers, model.states, strict=True):
        place = layer.captured["sequences"], layer.captured["positions"]
        assert torch.equal(layer.captured["hidden"], state[place])
    assert notes(seen) == []


def test_several_tensors_of_the_stream_s_shape_are_said():
    def apart(m, x, residual):
        """Hands on the residual together with its own result."""
        return m.inner(x + residual) - residual, x + residual

    blocks = nn.ModuleList(Running(apart, inner=PlainBlock(32, 4, 0.0)) for _ in range(2))
    model = Running(lambda m, x: sum(m.blocks[1](*m.blocks[0](x, x))), blocks=blocks)
    seen = look(model, torch.randn(4, 8, 32))
    assert any("several tensors of the shape" in text for text in notes(seen))


# How a block returns what it was given and what it made; which of the returned is its state.
RETURNS = {
    "all states so far": (lambda given, x: [*given, x], -1, None),
    "the newest first": (lambda given, x: (x, *given), 0, None),
    "a shorter stream first": (lambda given, x: [x[:, :5] + 1, x], 1, "of different lengths"),
    "a context, unchanged": (lambda given, x: [CONTEXT, x], 1, None),
}
CONTEXT = torch.randn(4, 5, 32)


@pytest.mark.parametrize("way", RETURNS)
def test_the_state_is_the_returned_tensor_that_the_block_made(way):
    returns, place, words = RETURNS[way]

    def block(m, given):
        return returns(given, m.inner(given[place]))

    def run(model, x):
        model.states, given = [x], [CONTEXT, x][-1 if place != 1 else 0 :]
        for each in model.blocks:
            given = each(given)
            model.states.append(given[place])
        return given[place]

    model = PlainDecoder(run=run, block=lambda: Running(block, inner=PlainBlock(32, 4, 0.0)))
    seen = look(model, batch(4, 12))
    for depth, state in enumerate(model.states):
        check_hidden(seen, depth, state)
    said = notes(seen)
    assert said == [] if words is None else [words in text for text in said] == [True]


@dataclass
class Output:
    """An output of a class of its own, which no one need know."""

    hidden: torch.Tensor


# Outputs that hold more than tensors, or hide them, and the states in them.
OTHERS = {
    "an iterator": (lambda x: iter((x, x + 1)), next),
    "an object": (Output, lambda output: output.hidden),
    "nothing in a list": (lambda x: [[], x], lambda output: output[1]),
}


@pytest.mark.parametrize("way", OTHERS)
def test_an_output_of_any_class_is_left_to_the_model(way):
    returns, of = OTHERS[way]

    def run(model, x):
        for block in model.blocks:
            x = of(block(x))
        return x

    def block():
        return Running(lambda m, x: returns(m.inner(x)), inner=PlainBlock(32, 4, 0.0))

    model = PlainDecoder(run=run, block=block)
    plain = model(batch(2, 8))
    with window(model) as seen:
        assert torch.equal(model(batch(2, 8)), plain)
    assert notes(seen) == []
    layers = seen.snapshot().layers
    assert ["hidden" in layer.captured for layer in layers[1:]] == [way == "nothing in a list"] * 3
    assert "query" in layers[1].captured


# -- what it says where it sees nothing ------------------------------------------------------------


def why(seen: Window, depth: int = 1) -> str:
    return seen.snapshot().layers[depth].missing["hidden"]


def in_another_thread(model):
    thread = threading.Thread(target=model, args=(batch(),))
    thread.start()
    thread.join()


def with_an_exchanged_block(model):
    model.blocks[0] = copy.deepcopy(model.blocks[0])
    model(batch())


def inside_vmap(model):
    torch.func.vmap(model, randomness="different")(batch()[:, None])


def of_two_tensors():
    def block(m, angles, x):
        return m.inner(x)

    def run(model, x):
        for each in model.blocks:
            x = each(torch.randn(1, x.shape[1], 8), x)
        return x

    return PlainDecoder(run=run, block=lambda: Running(block, inner=PlainBlock(32, 4, 0.0)))


def of_linear_maps():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))


def on_nested_tensors(model):
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    model(torch.nested.nested_tensor(parts, layout=torch.jagged))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("make", "run", "words"),
    [
        (PlainDecoder, lambda model: None, "not run while the window was open"),
        (PlainDecoder, in_another_thread, "in a thread other than"),
        (PlainDecoder, lambda model: copy.deepcopy(model)(batch()), "a copy of the model"),
        (PlainDecoder, with_an_exchanged_block, "may have been replaced"),
        (PlainDecoder, lambda model: model(batch(0, 16)), "a batch without tokens"),
        (PlainDecoder, lambda model: model(batch(2, 0)), "a batch without tokens"),
        (PlainDecoder, inside_vmap, "inside torch.func.vmap"),
        (of_two_tensors, inside_vmap, "inside torch.func.vmap"),
        (of_linear_maps, on_nested_tensors, "nested tensors"),
    ],
)
def test_why_hidden_states_were_not_seen(make, run, words):
    model = make()
    with torch.no_grad(), window(model) as seen:
        run(model)
    assert words in why(seen)
    assert seen.snapshot().is_empty == (words not in ("may have been replaced", "nested tensors"))


@pytest.mark.parametrize("attends", [attend_by_hand, attend])
def test_attention_outside_of_blocks_without_any_is_said(attends):
    parts = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))
    wrong = Running(lambda m, x: m.parts(m.mixer(x)), mixer=blocks_of(attends)[0], parts=parts)
    said = notes(look(wrong, torch.randn(4, 6, 32)))
    assert any("may be the wrong blocks" in text for text in said)
    plain = of_linear_maps()
    with torch.no_grad(), window(plain) as seen:
        plain(torch.randn(4, 8)).softmax(-1)
    assert notes(seen) == []


@pytest.mark.parametrize("blocks", [None, r"(own|other)\.\d+"])
def test_a_large_stack_that_is_not_watched_is_said(blocks):
    def mixing():
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32))

    model = nn.Sequential()
    model.own = nn.Sequential(*(PlainBlock(32, 4, 0.0) for _ in range(2)))
    model.other = nn.Sequential(mixing(), mixing())
    seen = look(model, torch.randn(4, 8, 32), options={"blocks": blocks})
    told = [text for text in notes(seen) if "not watched" in text]
    assert bool(told) == (blocks is None)
    assert all("2 blocks other.#" in text and "blocks=..." in text for text in told)


def direct():
    """Calls `forward` itself, past every hook."""

    def run(model, x):
        for block in model.blocks:
            x = block.forward(x)
        return x

    return PlainDecoder(run=run)


HIDDEN_ALONE = select("variance")
# A model, metrics, and words of the error in turn; none if there is nothing to say.
UNSEEN = [
    (PlainDecoder, None, []),
    (direct, None, ["hidden states at blocks.0 (3 of 3 layers)", "called by .forward() directly",
                    "measure by a probe", "geomon.describe(model)", "blocks="]),
    (lambda: blocks_unseen(2), HIDDEN_ALONE, []),
    (lambda: blocks_unseen(2), select("qk_cosine"), ["as projected at blocks.0 (2 of 2 layers)"]),
    (lambda: blocks_unseen(2), select("attention_entropy", "variance"),
     ["attention at blocks.0 (2 of 2 layers): no attention was seen", "metrics=select(...)"]),
    (lambda: blocks_unseen(1), None, []),  # single layers without a source are no fault
]  # fmt: skip


def blocks_unseen(count: int) -> nn.Module:
    """Attention goes through nothing known."""

    def unseen(m, x):
        return x + (m.q_proj(x) @ m.k_proj(x).mT / 100).exp() @ x / 100

    model = PlainDecoder(layers=2)
    for number in range(count):
        q_proj, k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        model.blocks[number] = Running(unseen, q_proj=q_proj, k_proj=k_proj, num_heads=2)
    return model


@pytest.mark.parametrize(("make", "metrics", "words"), UNSEEN)
def test_views_that_no_layer_shows_are_an_error_with_layer_cause_and_remedy_in_one_line(
    make, metrics, words
):
    asked = {} if metrics is None else {"metrics": metrics}
    if not words:
        assert measure(make(), batch(), **asked)
        return
    with pytest.raises(RuntimeError, match="not seen") as raised:
        measure(make(), batch(), **asked)
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.count("layers)") == 1  # where these are not seen, nothing else can be
    assert ("hidden states" in message) == (make is direct)


def test_only_hidden_states_are_said_to_be_missing_if_they_are_not_seen():
    said = [text for label, text in describe(direct(), batch()).rows if label == "not seen"]
    assert sum(text.count("layers)") for text in said) == 1
