"""What a window keeps of a pass, what it leaves behind, and what it says where it sees nothing."""

import copy
import gc
import itertools
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from fingerprint import fingerprint
from models import PlainBlock, PlainDecoder, batch, transformer
from referee import sampled
from torch import nn
from torch.distributed.tensor import Partial
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import attend_by_hand, blocks_of, check_hidden, look, notes, window

from geomon import describe, measure, select
from geomon.capture import Window

# -- what it leaves behind -------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("way_out", [None, KeyboardInterrupt])
def test_nothing_is_left_behind(way_out, fast):
    model, switch = transformer("gpt2"), torch.backends.mha
    was = switch.get_fastpath_enabled()
    switch.set_fastpath_enabled(fast)
    try:
        before = fingerprint(model)
        with suppress(KeyboardInterrupt), window(model):
            assert switch.get_fastpath_enabled() == fast
            model(batch())
            if way_out is not None:
                raise way_out
        assert fingerprint(model) == before
    finally:
        switch.set_fastpath_enabled(was)


def test_a_window_that_cannot_be_opened_leaves_nothing_and_ends_no_pass(monkeypatch):
    def broken(patch, holder):
        raise RuntimeError("no patch here")

    model = PlainDecoder()
    before, expected = fingerprint(model), model(batch())
    monkeypatch.setattr("geomon.capture.calling.patches.Patch.hold", broken)
    with window(model) as opened:
        assert fingerprint(model) == before
        assert torch.equal(model(batch()), expected)
    assert fingerprint(model) == before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no patch here"):
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
def test_what_a_window_keeps_is_freed_without_the_garbage_collector(fails):
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


def test_a_hook_that_fails_never_ends_a_run(monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("by design")

    model = PlainDecoder().eval()
    plain = model(batch())
    for name in (
        "recorder.record_call", "first_pass.SeenAttention", "hidden_states.first_tensor",
        "hidden_states.copy_rows", "hidden_states.spread_indices", "tap.provenance.layout_of",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(f"geomon.capture.{name}", broken)
            with window(model) as seen:
                assert torch.equal(model(batch()), plain)
        assert any("watching a call failed" in text and "by design" in text for text in notes(seen))


# -- what it keeps ---------------------------------------------------------------------------------


def assert_same(one: Window, other: Window) -> None:
    for layer, expected in zip(one.snapshot().layers, other.snapshot().layers, strict=True):
        assert layer.missing == expected.missing
        assert layer.captured.keys() == expected.captured.keys()
        for view, value in expected.captured.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(layer.captured[view], value), view


class Overwriting(nn.Module):
    """A decoder that uses the memory of its ids, mask and stream again, as static buffers are."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()
        self.layers = blocks_of(lambda q, k, v: attend(q, k, v, attn_mask=self.mask))
        self.embedding, self.overwrites = nn.Embedding(9, 32), overwrites

    def forward(self, ids):
        self.mask = torch.tensor([0.0] * 5 + [-1e9]).view(1, 1, 1, 6)
        x = self.layers(self.embedding(ids))
        for tensor in (ids, self.mask, x) if self.overwrites else ():
            tensor.fill_(1)
        return x


@torch.no_grad()
def test_what_a_model_overwrites_after_its_last_block_is_captured_as_it_was():
    found = []
    for overwrites in (False, True):
        ids, model = torch.arange(24).view(4, 6) % 9, Overwriting(overwrites=overwrites)
        with window(model) as seen:
            model(ids)
        found.append(seen)
    assert_same(*found)
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
    assert_same(seen, plain)


class Sharded(torch.Tensor):
    """Stands for a DTensor: what it holds is elsewhere, and its own part is local."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)[:1]


def test_the_local_part_of_a_sharded_tensor_is_taken():
    class Sharding(nn.Sequential):
        def forward(self, x):
            return super().forward(x.as_subclass(torch.Tensor)).as_subclass(Sharded)

    model = nn.Sequential(Sharding(nn.Linear(8, 8)), Sharding(nn.Linear(8, 8)))
    with torch.no_grad(), window(model) as seen:
        out = model(torch.randn(4, 6, 8).as_subclass(Sharded))
    hidden = seen.snapshot().layers[2].captured["hidden"]
    assert type(hidden) is torch.Tensor
    assert torch.equal(hidden, out.to_local().flatten(0, 1)[sampled(seen, "", 2).rows])


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
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Ordered(way) for _ in range(3))

    def forward(self, ids):
        x = self.tokens(ids)
        self.states = [x]
        angles, bias = torch.randn(1, ids.shape[1], 8), torch.zeros(len(ids), 1, 1, ids.shape[1])
        for block in self.blocks:
            named = block.way == "named"
            y = block(angles=angles, bias=bias, x=x) if named else block(angles, bias, x)
            x = y["hidden"] if block.way == "mapping" else y[1] if block.way == "tuple" else y
            self.states.append(x)
        return x


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("way", ["plain", "named", "tuple", "mapping"])
def test_the_stream_is_found_among_several_tensors(way, sequences):
    model = Ordering(way)
    seen = look(model, torch.randint(0, 50, (sequences, 12)))
    for layer, state in zip(seen.snapshot().layers, model.states, strict=True):
        place = layer.captured["sequences"], layer.captured["positions"]
        assert torch.equal(layer.captured["hidden"], state[place])


def test_several_tensors_of_the_stream_s_shape_are_said():
    class Apart(PlainBlock):
        """A block that hands on its residual beside what it has made."""

        def forward(self, x, residual):
            return super().forward(x + residual) - residual, x + residual

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Apart(32, 4, 0.0) for _ in range(2))

        def forward(self, x):
            return sum(self.blocks[1](*self.blocks[0](x, x)))

    seen = look(Model(), torch.randn(4, 8, 32))
    assert any("several tensors of the shape" in text for text in notes(seen))


# -- what it says where it sees nothing ------------------------------------------------------------


def why(seen: Window, depth: int = 1) -> str:
    return seen.snapshot().layers[depth].missing["hidden"]


def in_another_thread(model):
    thread = threading.Thread(target=model, args=(batch(),))
    thread.start()
    thread.join()


def as_a_copy(model):
    copy.deepcopy(model)(batch())


def with_an_exchanged_block(model):
    model.blocks[0] = copy.deepcopy(model.blocks[0])
    model(batch())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda model: None, "not run while the window was open"),
        (in_another_thread, "in a thread other than"),
        (as_a_copy, "a copy of the model"),
        (with_an_exchanged_block, "may have been replaced"),
        (lambda model: model(batch(0, 16)), "a batch without tokens"),
        (lambda model: model(batch(2, 0)), "a batch without tokens"),
        (
            lambda model: torch.func.vmap(model, randomness="different")(batch()[:, None]),
            "inside torch.func.vmap",
        ),
    ],
)
def test_why_hidden_states_were_not_seen(run, words):
    model = PlainDecoder()
    with torch.no_grad(), window(model) as seen:
        run(model)
    assert words in why(seen)
    assert seen.snapshot().is_empty == (words != "may have been replaced")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_block_of_several_tensors_inside_vmap_is_refused_with_the_reason():
    model = Ordering("plain").eval()
    with torch.no_grad(), window(model) as seen:
        torch.func.vmap(model, randomness="different")(batch()[:, None])
    assert "inside torch.func.vmap" in why(seen)
    assert notes(seen) == []


class Unsummed(Sharded):
    """Stands for a DTensor whose numbers are still to be summed over the ranks."""

    placements = (Partial(),)
    device_mesh = SimpleNamespace(get_coordinate=lambda: (0,), size=lambda dim: 2)


def test_hidden_states_that_are_still_to_be_summed_are_refused_with_the_reason():
    class Unsumming(nn.Sequential):
        def forward(self, x):
            return super().forward(x.as_subclass(torch.Tensor)).as_subclass(Unsummed)

    model = nn.Sequential(*(Unsumming(nn.Linear(8, 8)) for _ in range(2)))
    with torch.no_grad(), window(model) as seen:
        model(torch.randn(4, 6, 8))
    assert "hidden" in seen.snapshot().layers[0].captured
    for depth in (1, 2):
        assert why(seen, depth).startswith("hidden states are partial")
    assert notes(seen) == []


def test_nested_tensors_are_refused_with_the_reason():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    parts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with torch.no_grad(), window(model) as seen:
        model(parts)
    assert "nested tensors" in why(seen)


@pytest.mark.parametrize("by_hand", [True, False])
def test_attention_outside_of_blocks_without_any_is_said(by_hand):
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = blocks_of(attend_by_hand if by_hand else attend)[0]
            self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))

        def forward(self, x):
            return self.parts(self.mixer(x))

    assert any(
        "may be the wrong blocks" in text for text in notes(look(Wrong(), torch.randn(4, 6, 32)))
    )
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    with torch.no_grad(), window(plain) as seen:
        plain(torch.randn(4, 8)).softmax(-1)
    assert notes(seen) == []


@pytest.mark.parametrize("blocks", [None, r"(own|other)\.\d+"])
def test_a_large_stack_that_is_not_watched_is_said(blocks):
    class Mixing(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.LayerNorm(32), nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32))

    model = nn.Sequential()
    model.own = nn.Sequential(*(PlainBlock(32, 4, 0.0) for _ in range(2)))
    model.other = nn.Sequential(Mixing(), Mixing())
    seen = look(model, torch.randn(4, 8, 32), options={"blocks": blocks})
    told = [text for text in notes(seen) if "not watched" in text]
    assert bool(told) == (blocks is None)
    assert all("2 blocks other.#" in text and "blocks=..." in text for text in told)


class Direct(PlainDecoder):
    """Calls `forward` itself, past every hook."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block.forward(x)
        return x


class Unseen(nn.Module):
    """Attention that goes through nothing known."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.num_heads = 2

    def forward(self, x):
        return x + (self.q_proj(x) @ self.k_proj(x).mT / 100).exp() @ x / 100


HIDDEN_ALONE = select("variance")
# A model, metrics, and words of the error in turn; none if there is nothing to say.
UNSEEN = [
    (PlainDecoder, None, []),
    (Direct, None, ["hidden states at blocks.0 (3 of 3 layers)", "called by .forward() directly",
                    "measure by a probe", "geomon.describe(model)", "blocks="]),
    (lambda: blocks_unseen(2), HIDDEN_ALONE, []),
    (lambda: blocks_unseen(2), select("qk_cosine"), ["as projected at blocks.0 (2 of 2 layers)"]),
    (lambda: blocks_unseen(2), select("attention_entropy", "variance"),
     ["attention at blocks.0 (2 of 2 layers): no attention was seen", "metrics=select(...)"]),
    (lambda: blocks_unseen(1), None, []),  # single layers without a source are no fault
]  # fmt: skip


def blocks_unseen(count: int) -> nn.Module:
    model = PlainDecoder(layers=2)
    for number in range(count):
        model.blocks[number] = Unseen()
    return model


@pytest.mark.parametrize(("make", "metrics", "words"), UNSEEN)
def test_what_no_layer_shows_is_an_error_with_layer_cause_and_remedy_in_one_line(
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
    assert ("hidden states" in message) == (make is Direct)


def test_of_layers_whose_hidden_states_are_not_seen_nothing_else_is_said_to_be_missing():
    said = [text for label, text in describe(Direct(), batch()).rows if label == "not seen"]
    assert sum(text.count("layers)") for text in said) == 1
