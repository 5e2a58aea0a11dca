"""Calls are seen without anything on the model; the model's own names and copies are its own."""

import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geomon import measure, select
from geomon.capture import FirstCall
from support.measuring import watching
from support.models import PlainDecoder, batch, transformer
from support.watched import look, notes, window

FEW = select("variance", "attention_entropy", "qk_cosine")
NAMES = ("mask", "module_", "step", "layer", "args", "kwargs", "model", "output", "function")


def test_columns_of_the_batch_may_have_any_name():
    """transformers passes what it does not know on to every module and attention call."""
    model = transformer("llama").train()
    inputs = {"input_ids": batch()} | {name: torch.zeros(3) for name in NAMES}
    expected = model(**inputs).logits
    with window(model) as seen:
        assert torch.equal(model(**inputs).logits, expected)
    assert all("query" in layer.captured for layer in seen.snapshot().layers[1:])
    assert not notes(seen)
    assert measure(model, inputs, tokens=64) == pytest.approx(
        measure(model, {"input_ids": batch()}, tokens=64), nan_ok=True
    )


def test_the_arguments_are_seen_as_the_modules_own_hooks_leave_them():
    model, ids = PlainDecoder(), batch()
    plain = look(model, ids).snapshot().layers
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block.register_forward_hook(lambda module, args, output: output * 3)
    entered, left = (layer.captured["hidden"] for layer in look(model, ids).snapshot().layers[:2])
    assert torch.equal(entered, 2 * plain[0].captured["hidden"])
    assert not torch.equal(left, plain[1].captured["hidden"])


def test_keywords_are_seen_as_the_modules_own_hooks_leave_them():
    def by_keyword(model, x):
        for block in model.blocks:
            x = block(x=x)
        return x

    model = PlainDecoder(run=by_keyword)
    expected = look(model, batch()).snapshot().layers
    model.blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"x": kwargs["x"] * 2}), with_kwargs=True
    )
    model.blocks[0].register_forward_pre_hook(lambda module, args: None)
    found = look(model, batch()).snapshot().layers
    assert torch.equal(found[0].captured["hidden"], 2 * expected[0].captured["hidden"])
    assert torch.equal(found[0].captured["token_ids"], expected[0].captured["token_ids"])
    assert all("query" in layer.captured for layer in found[1:])


def test_a_hook_that_is_pickled_as_a_call_begins_does_nothing():
    model, kept = PlainDecoder(), []
    model.blocks[0].register_forward_pre_hook(
        lambda module, args: kept.append(pickle.dumps([*module._forward_pre_hooks.values()][-1]))
    )
    with window(model) as seen:
        model(batch())
    assert not notes(seen)
    assert pickle.loads(kept[0])(model.blocks[0], ()) is None


def test_a_forward_meets_no_other_hooks_than_those_of_its_module():
    model, counts = PlainDecoder(), []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: None)
    forward = block.forward
    hooks = block._forward_pre_hooks, block._forward_pre_hooks_with_kwargs
    block.forward = lambda *args: counts.append([*map(len, hooks)]) or forward(*args)
    with window(model):
        model(batch())
    assert counts == [[1, 0]]
    block.register_forward_pre_hook(lambda module, args: 1 / 0)
    with window(model):
        with pytest.raises(ZeroDivisionError):
            model(batch())
        assert [*map(len, hooks)] == [2, 0]


# -- the first call that counts ------------------------------------------------------------------


@pytest.mark.parametrize("source", ["probe", "inline"])
def test_parameters_without_values_end_nothing_and_are_said_once(caplog, source):
    def lazy():
        return PlainDecoder(head=nn.LazyLinear(50))

    torch.manual_seed(0)
    plain = lazy()
    torch.manual_seed(0)
    model, probe = lazy(), batch() if source == "probe" else None
    monitor, memory = watching(model, metrics=FEW, probe=probe, strict=False)
    for step in range(3):
        torch.manual_seed(step)  # the first forward draws the values
        with monitor(step):
            out = model(batch())
        torch.manual_seed(step)
        assert torch.equal(out, plain(batch()))
    monitor.close()
    assert [r.step for r in memory.readings] == ([1, 2] if source == "probe" else [0, 1, 2])
    said = [record for record in caplog.records if "no values yet" in record.getMessage()]
    assert len(said) == (source == "probe")
    with pytest.raises(ValueError, match=r"head.weight has no values yet"):
        measure(lazy(), batch())


@pytest.mark.parametrize("around", [False, True])
def test_calls_that_a_cuda_graph_captures_are_left_alone(around, monkeypatch, caplog):
    """A capture of a whole step, or of a call in it, fails if the host waits for anything."""
    model, captures, published = PlainDecoder(), False, []
    monitor, memory = watching(model, metrics=FEW, log=["loss"], strict=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    for step in range(3):
        captures = step == 1 and around
        with monitor(step):
            captures = step == 1
            model(batch())
            if captures:
                monitor.log(0, loss=1.0)  # for which the first reading waits
            published.append(len(memory.readings))
        captures = False
    monitor.close()
    assert published == [0, not around, 1]
    assert [reading.step for reading in memory.readings] == [0, 2]
    assert ("captured in a CUDA graph" in caplog.text) != around


@pytest.fixture
def awaited():
    """A `FirstCall`, its module, and the list of calls that were made."""
    block, told = nn.Linear(3, 3), []
    first = FirstCall(
        (block,), lambda: told.append("before"), told.append, lambda: told.append("between")
    )
    first.begin()
    yield first, block, told
    first.end()


def test_a_recomputation_is_not_the_first_call_that_is_waited_for(awaited):
    first, block, told = awaited
    first.end()
    kept = checkpoint(block, torch.ones(2, 3, requires_grad=True), use_reentrant=False)
    first.begin()
    kept.sum().backward()  # runs the block again
    assert told == []
    block(torch.ones(2, 3))
    assert told == ["before", None]


def test_a_call_with_gradients_goes_before_earlier_ones_without(awaited):
    first, block, told = awaited
    with torch.no_grad():
        for _ in range(3):  # of these the first counts until a better one comes
            block(torch.ones(2, 3))
    assert first.came
    assert told == ["before", "between"]
    for _ in range(2):
        block(torch.ones(2, 3))
    assert told == ["before", "between", "before", None]


def test_a_call_without_gradients_that_fails_is_the_end(awaited):
    _, block, told = awaited
    with torch.no_grad(), pytest.raises(RuntimeError):
        block(torch.ones(2, 4))
    block(torch.ones(2, 3))
    assert [type(one) for one in told] == [str, RuntimeError]


def test_calls_in_other_threads_are_not_waited_for(awaited):
    first, block, told = awaited
    thread = threading.Thread(target=block, args=(torch.ones(2, 3),))
    thread.start()
    thread.join()
    assert (told, first.came) == ([], False)
    block(torch.ones(2, 3))
    assert told == ["before", None]


def test_a_call_of_a_wrapper_of_the_module_counts_once(awaited):
    first, block, told = awaited
    wrapper = torch.compile(block, backend="eager")
    values = torch.ones(2, 3)
    assert torch.equal(wrapper(values), nn.functional.linear(values, block.weight, block.bias))
    assert first.came
    assert told == ["before", None]


def test_calls_of_other_modules_are_not_waited_for(awaited):
    first, block, told = awaited
    nn.Sequential(nn.Linear(3, 3))(torch.ones(2, 3))
    assert (told, first.came) == ([], False)
    assert nn.Sequential(nn.Identity(), block)(torch.ones(2, 3)).shape == (2, 3)
    assert told == ["before", None]
