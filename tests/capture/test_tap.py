"""What a window sees below autograd, and that nothing of torch is replaced for it."""

import threading
from contextlib import ExitStack

import pytest
import torch
from models import PlainDecoder, batch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _len_torch_dispatch_stack,
)
from watched import Block, attend_by_hand, blocks_of, look, notes, window

from geomon.capture import FirstCall


def queries(seen) -> list[bool]:
    return ["query" in layer.captured for layer in seen.snapshot().layers[1:]]


# -- what is seen ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [attend_by_hand, functional.scaled_dot_product_attention])
def test_keys_that_were_repeated_are_given_once(attend):
    def repeating(q, k, v):
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
        return attend(q, k, v)

    model = blocks_of(repeating, key_heads=2)
    seen = look(model, torch.randn(2, 6, 32))
    assert torch.equal(seen.snapshot().layers[1].captured["key"], model[0].attention.key)


@pytest.mark.parametrize("route", ["fused", "with dropout", "inference"])
def test_queries_and_keys_are_the_same_however_torch_attends(route):
    model = PlainDecoder(dropout=0.2 if route == "with dropout" else 0.0)
    layers = []
    for own in (True, False):
        model.train(own and route == "with dropout")
        with torch.inference_mode(own and route == "inference"), window(model) as seen:
            model(batch())
        layers.append(seen.snapshot().layers[1].captured)
    for view in ("query", "key", "scale"):
        torch.testing.assert_close(layers[0][view], layers[1][view])
    assert torch.equal(*(views["visible"].expand(views["query"].shape[0], 4, -1, -1)
                         for views in layers))  # fmt: skip


def test_zeros_that_widen_heads_are_no_part_of_queries_and_keys():
    """As torch does on an accelerator: heads are padded to a multiple of 8."""

    def padded(q, k, v):
        wide = (functional.pad(x, (0, 4)) for x in (q, k, v))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(*wide, scale=0.5)[0][..., :4]

    model = blocks_of(padded, 16)
    found = look(model, torch.randn(2, 6, 16)).snapshot().layers[1].captured
    assert torch.equal(found["query"], model[0].attention.query)
    assert torch.equal(found["key"], model[0].attention.key)
    assert found["scale"] == 0.5


@pytest.mark.parametrize("attends", [True, False])
def test_a_softmax_that_is_none_is_never_taken_for_the_attention_beside_it(attends):
    class Routed(Block):
        """A softmax over experts before its attention, in shape like scores of all tokens."""

        def __init__(self) -> None:
            super().__init__(functional.scaled_dot_product_attention, 16)
            self.router = nn.Linear(16, 24)

        def forward(self, x):
            chosen = self.router(x).unflatten(-1, (4, 6)).transpose(1, 2).softmax(-1)
            x = x + chosen.sum(1).sum(-1, keepdim=True)
            return super().forward(x) if attends else self.mlp(x)

    seen = look(nn.Sequential(Routed(), Routed()), torch.randn(2, 6, 16))
    assert seen.routes("") == ({"sdpa"} if attends else set())
    assert ("visible" in seen.snapshot().layers[1].captured) == attends


class Losing(nn.Module):
    """Blocks without attention, and a loss in the forward pass."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
        self.loss = loss

    def forward(self, x):
        return self.loss(self.blocks(x), dim=-1).sum()


@pytest.mark.parametrize("loss", [functional.softmax, functional.log_softmax])
def test_the_logarithm_of_a_loss_is_no_attention(loss):
    model = Losing(loss)
    with window(model) as seen:
        model(torch.randn(2, 3, 4)).backward()
    said = any("outside the watched blocks" in text for text in notes(seen))
    assert said == (loss is functional.softmax)


# -- what others do meanwhile ---------------------------------------------------------------------


def test_a_second_thread_may_call_the_model_and_counts_for_nothing():
    model, ids, failures = PlainDecoder(), batch(), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: None)
    stop = threading.Event()

    def evaluates():
        try:
            with torch.no_grad():
                while not stop.is_set():
                    model(ids.flip(0))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=evaluates, daemon=True)
    expected = window(model)
    with expected:
        model(ids)
    thread.start()
    try:
        for _ in range(10):
            with window(model) as seen:
                model(ids)
            pairs = zip(seen.snapshot().layers, expected.snapshot().layers, strict=True)
            assert all(torch.equal(a.captured["hidden"], b.captured["hidden"]) for a, b in pairs)
    finally:
        stop.set()
        thread.join(timeout=60)
    assert failures == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_is_called_and_made_in_a_window():
    model, x = PlainDecoder(), torch.randn(2, 3)
    small = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    scripted = torch.jit.script(small)
    first = FirstCall((model,), lambda: None, lambda error: None, lambda: None)
    first.begin()
    try:
        with window(model) as seen:
            assert torch.equal(scripted(x), small(x))
            assert torch.equal(torch.jit.script(small)(x), small(x))
            assert torch.equal(torch.jit.trace(small, x)(x), small(x))
            torch.jit.trace(model, batch(), check_trace=False)
            model(batch())
    finally:
        first.end()
    assert all(queries(seen))
    assert not any("watching a call failed" in text for text in notes(seen))


@pytest.mark.parametrize("outside", [True, False])
def test_no_mode_of_the_training_meets_an_operator_of_the_window(outside):
    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met.append(func)
            return func(*args, **(kwargs or {}))

    model, ids, met = PlainDecoder(), batch(), []
    with Listing():
        model(ids).sum().backward()
    alone, seen = met[:], window(model)
    model.zero_grad()
    met.clear()
    with ExitStack() as stack:
        for mode in (Listing(), seen) if outside else (seen, Listing()):
            stack.enter_context(mode)
        model(ids).sum().backward()
    assert met == alone
    assert all(queries(seen))


def test_modes_that_a_pass_leaves_open_stay_open():
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def opens(module, args):
        for mode in modes:
            mode.__enter__()

    model, modes, before = (
        PlainDecoder(),
        [Passing(), Passing()],
        _get_current_dispatch_mode_stack(),
    )
    model.blocks[0].register_forward_pre_hook(opens)
    with window(model) as seen:
        model(batch())
        assert _get_current_dispatch_mode_stack() == [*before, *modes]
    assert all(queries(seen))
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == before


def test_a_compiled_function_around_the_model_runs_as_compiled_and_what_it_hides_is_said():
    graphs = []
    model, before = PlainDecoder(), _len_torch_dispatch_stack()
    step = torch.compile(
        lambda ids: model(ids).sum(),
        backend=lambda graph, inputs: graphs.append(graph) or graph.forward,
    )
    for _ in range(2):
        with window(model) as seen:
            watched = step(batch())
        assert torch.equal(step(batch()), watched)
        assert _len_torch_dispatch_stack() == before
        assert "compiled in a way that hides it" in seen.snapshot().layers[1].missing["hidden"]
    assert len(graphs) == 1
