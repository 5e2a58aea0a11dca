"""A window sees operators below autograd, and replaces nothing of torch for it."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _len_torch_dispatch_stack,
)

from geomon.capture import FirstCall
from support.models import PlainDecoder, Running, batch
from support.watched import Block, check_same, look, notes, window


def queries(seen) -> list[bool]:
    return ["query" in layer.captured for layer in seen.snapshot().layers[1:]]


# -- what is seen ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("attends", [True, False])
def test_a_softmax_that_is_none_is_never_taken_for_the_attention_beside_it(attends):
    def routed(m, x):
        """A softmax over experts before attention, in shape like scores of all tokens."""
        chosen = m.router(x).unflatten(-1, (4, 6)).transpose(1, 2).softmax(-1)
        x = x + chosen.sum(1).sum(-1, keepdim=True)
        return m.inner(x) if attends else m.inner.mlp(x)

    def block():
        inner = Block(functional.scaled_dot_product_attention, 16)
        return Running(routed, router=nn.Linear(16, 24), inner=inner)

    seen = look(nn.Sequential(block(), block()), torch.randn(2, 6, 16))
    assert seen.routes("") == ({"sdpa"} if attends else set())
    assert ("visible" in seen.snapshot().layers[1].captured) == attends


@pytest.mark.parametrize("loss", [functional.softmax, functional.log_softmax])
def test_the_logarithm_of_a_loss_is_no_attention(loss):
    """Blocks without attention, and a loss in the forward pass."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    model = Running(lambda m, x: loss(m.blocks(x), dim=-1).sum(), blocks=blocks)
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
            check_same(seen.snapshot(), expected.snapshot())
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


class Listing(TorchDispatchMode):
    """A mode that lists the operators that it meets."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.met.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_no_mode_of_the_training_meets_an_operator_of_the_window(outside):
    model, ids, alone, met = PlainDecoder(), batch(), Listing(), Listing()
    with alone:
        model(ids).sum().backward()
    seen = window(model)
    model.zero_grad()
    with ExitStack() as stack:
        for mode in (met, seen) if outside else (seen, met):
            stack.enter_context(mode)
        model(ids).sum().backward()
    assert met.met == alone.met
    assert all(queries(seen))


def test_modes_that_a_pass_leaves_open_stay_open():
    model, modes = PlainDecoder(), [Listing(), Listing()]
    before = _get_current_dispatch_mode_stack()

    def opens(module, args):
        for mode in modes:
            mode.__enter__()

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
