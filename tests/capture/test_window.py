"""What a window keeps of a pass, what it leaves behind, and what it says where it sees nothing."""

import copy
import gc
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
from watched import attend_by_hand, blocks_of, look, notes, window

from geomon.capture import Window, find_anatomy
from geomon.capture.anatomy import join_anatomies
from geomon.capture.calling.patches import Patch
from geomon.capture.snapshot import CAPTURED, PassInfo, Snapshot


def assert_same(snapshot: Snapshot, expected: Snapshot) -> None:
    for layer, other in zip(snapshot.layers, expected.layers, strict=True):
        assert layer.missing == other.missing
        assert layer.captured.keys() == other.captured.keys()
        for view, value in other.captured.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(layer.captured[view], value), view


def test_same_rows_at_every_layer_and_by_seed_alone():
    model = PlainDecoder().eval()
    state = torch.random.get_rng_state()
    pictures = []
    for seed in (1, 1, 2):
        with torch.no_grad(), window(model, rows=40, seed=seed) as seen:
            model(batch())
        pictures.append(seen.snapshot())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(*pictures[:2])
    one, other = (picture.layers[1].captured["hidden"] for picture in pictures[1:])
    assert not torch.equal(one, other)
    for layer in pictures[0].layers:
        assert torch.equal(layer.captured["positions"], pictures[0].layers[0].captured["positions"])


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
    def broken(undo):
        raise RuntimeError("no patch here")

    model = PlainDecoder()
    before, expected = fingerprint(model), model(batch())
    monkeypatch.setattr("geomon.capture.calling.calls._calls", Patch(broken))
    with window(model) as opened:
        assert fingerprint(model) == before
        assert torch.equal(model(batch()), expected)
    assert fingerprint(model) == before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no patch here"):
            opened.snapshot()


def test_windows_that_close_in_any_order_see_their_own_model():
    models = [PlainDecoder(), PlainDecoder()]
    before = fingerprint(models[0])
    first, second = map(window, models)
    first.__enter__()
    second.__enter__()
    models[0](batch())
    first.__exit__(None, None, None)
    models[1](batch())
    second.__exit__(None, None, None)
    assert fingerprint(models[0]) == before
    for one in (first, second):
        assert all("query" in layer.captured for layer in one.snapshot().layers[1:])


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


def test_only_the_kept_rows_stay_in_memory():
    model = PlainDecoder(width=256, layers=2)
    with torch.no_grad(), window(model, rows=8) as seen:
        model(batch(64, 64))
    held = [layer.captured["hidden"] for layer in seen.snapshot().layers]
    assert [kept.untyped_storage().nbytes() for kept in held] == [8 * 256 * 4] * 3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("megabytes", [0.1, 0.6])
def test_memory_is_held_by_keeping_fewer_rows_and_said(name, megabytes):
    model = transformer(name)
    with torch.no_grad(), window(model, rows=1024, max_mb=megabytes) as seen:
        model(batch(64, 16))
    snapshot = seen.snapshot()
    assert 16 < snapshot.info.tokens < 1024
    names = ("hidden", "projected_query", "projected_key", "query", "key")
    views = [x.captured[name] for x in snapshot.layers for name in names if name in x.captured]
    assert 0.25e6 * megabytes < sum(4 * view.numel() for view in views) <= megabytes * 1e6
    text = next(n.words() for n in snapshot.info.notes if n.kind == "rows thinned for memory")
    assert text.startswith(f"at most {snapshot.info.tokens} rows instead of 1024 are kept")
    assert "query" in snapshot.layers[1].captured  # attention is seen with fewer rows, too


@pytest.mark.parametrize(
    ("views", "extra", "kept"),
    [
        ({"hidden"}, (), 4),  # of each row: what enters the first of 3 blocks, and leaves each
        ({"hidden"}, ("final_norm",), 5),
        ({"hidden", "last_hidden"}, (), 8),
        ({"hidden", "query"}, (), 16),  # a query and a key of each block, attended and projected
        ({"hidden", "projected_query"}, (), 16),
    ],
)
def test_a_limit_of_memory_counts_all_that_is_kept_of_a_row(views, extra, kept):
    model = PlainDecoder()
    seen = Window(find_anatomy(model), views, rows=10**6, seed=0, max_mb=0.5, extra_layers=extra)
    with torch.no_grad(), seen:
        model(batch(64, 32))
    assert seen.snapshot().info.tokens == int(0.25e6 / (4 * 32 * kept))


def test_a_stage_without_blocks_has_an_empty_snapshot():
    with Window(join_anatomies(()), set(CAPTURED), rows=10, seed=0) as seen:
        PlainDecoder()(batch())
    assert seen.snapshots() == [Snapshot([], PassInfo(0, "", ""))]
    assert seen.snapshot().is_empty


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
        found.append(seen.snapshot())
    assert_same(*found)
    assert not found[0].layers[1].captured["visible"].all()


def test_sampled_queries_and_keys_are_of_the_same_sequences():
    """Each by itself, where nothing rotates: two errors that agree would still attend."""
    model, outputs = PlainDecoder(), []
    model.blocks[1].c_attn.register_forward_hook(lambda module, args, out: outputs.append(out))
    seen = look(model, batch(60, 32), rows=64)
    layer, chosen = seen.snapshot().layers[2], sampled(seen, "", 2)
    query, key, _ = (part.unflatten(-1, (4, 8)) for part in outputs[0].chunk(3, dim=-1))
    assert torch.equal(layer.captured["query"].transpose(1, 2), query[chosen.sequences])
    assert torch.equal(layer.captured["key"].transpose(1, 2), key[chosen.sequences])
    assert torch.equal(layer.captured["projected_query"], query.flatten(0, 1)[chosen.query_rows])
    assert len(chosen.query_rows) == 64


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
    assert_same(seen.snapshot(), plain.snapshot())


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
    anatomy = find_anatomy(model, blocks)
    with torch.no_grad(), Window(anatomy, set(CAPTURED), rows=100, seed=0) as seen:
        model(torch.randn(4, 8, 32))
    told = [text for text in notes(seen) if "not watched" in text]
    assert bool(told) == (blocks is None)
    assert all("2 blocks other.#" in text and "blocks=..." in text for text in told)
