import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from geomon import every, select
from geomon.capture import extra_pass
from support.measuring import nowhere, train, watching
from support.models import transformer
from support.plain_models import CausalSelfAttention, language_model


class Noisy(TorchDispatchMode):
    """A mode that adds noise to every product, as a training of a noisy device does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        product = function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm")
        return out + 1e-3 * torch.randn_like(out) if product else out


class NoisyFunctions(TorchFunctionMode):
    """The same of functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        names = ("matmul", "__matmul__", "bmm", "linear", "scaled_dot_product_attention", "einsum")
        product = getattr(function, "__name__", "") in names
        return out + 1e-3 * torch.randn_like(out) if product else out


WAYS = {
    "inline": lambda ids: {"checks": every(1)},  # which are made in between
    "probe": lambda ids: {"probe": ids[:4]},
}


def trained(mode, *, by_hand, watched=None):
    """Weights and random state after some steps in a mode."""
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (8, 12))
    model = language_model(CausalSelfAttention, "eager" if by_hand else "sdpa")
    monitor = nowhere
    if watched:
        metrics = select("attention_entropy", "variance")
        options = {"metrics": metrics, "schedule": every(4), **WAYS[watched](ids)}
        monitor, memory = watching(model, **options)
    with mode:
        train(model, lambda step: functional.cross_entropy(model(ids).mT, ids), range(5), monitor)
    if watched:
        monitor.close()
        assert memory.readings[-1].step == 4
        assert "attention_entropy/layer_01" in memory.readings[-1].values
    return [*model.parameters(), torch.get_rng_state()]


@functools.cache
def trained_alone(mode, *, by_hand):
    return trained(mode(), by_hand=by_hand)


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "fused"])
@pytest.mark.parametrize("watched", WAYS)
@pytest.mark.parametrize("mode", [Noisy, NoisyFunctions, lambda: torch.device("cpu")])
def test_a_mode_that_changes_products_makes_the_same_weights(mode, watched, by_hand):
    found = trained(mode(), by_hand=by_hand, watched=watched)
    assert all(map(torch.equal, trained_alone(mode, by_hand=by_hand), found))


@functools.cache
def operations(*, by_hand, watched=None):
    """Count the floating-point operations of a training."""
    with FlopCounterMode(display=False) as counter:
        trained(contextlib.nullcontext(), by_hand=by_hand, watched=watched)
    return counter.get_total_flops()


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "fused"])
@pytest.mark.parametrize("watched", WAYS)
def test_operators_beside_the_training_are_not_counted(watched, by_hand):
    assert operations(by_hand=by_hand, watched=watched) == operations(by_hand=by_hand) > 0


class Operators(TorchDispatchMode):
    """A mode that lists what it meets."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.met.append(function)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same of functions."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.met.append(function)
        return function(*args, **(kwargs or {}))


MODELS = {
    "by hand": lambda: language_model(CausalSelfAttention, "eager"),
    "GPT-2": lambda: transformer("gpt2"),
}
LOOKS = {
    "reading": lambda ids: {"background": False},
    "reading in the background": lambda ids: {"background": True},
    "check": lambda ids: {"schedule": every(9), "checks": every(1)},
    "probe": lambda ids: {"probe": ids[:4]},
    "probe of batches": lambda ids: {"probe": iter([ids[:4], ids[4:]]), "schedule": every(2)},
}


@functools.cache
def met_in_steps(mode, model, look=None):
    """List the operators that a mode around each whole step meets."""
    torch.manual_seed(0)
    model, ids, met = MODELS[model](), torch.randint(0, 20, (8, 12)), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    monitor = None
    if look:
        options = {"log": ["loss"], "on_alert": print} | LOOKS[look](ids)
        monitor, memory = watching(
            model, metrics=select("attention_entropy", "variance"), **options
        )
    for step in range(3):
        with mode() as counting, monitor(step) if monitor else contextlib.nullcontext():
            output = model(ids)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = functional.cross_entropy(logits.mT, ids)
            if monitor:
                monitor.log(step, loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        met.append(counting.met)
    if monitor:
        monitor.close()
        assert memory.readings[0].training["loss"] == pytest.approx(loss.item(), rel=0.5)
    return met


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", [Operators, Functions])
def test_a_mode_around_a_watched_step_meets_what_the_training_calls(mode, model, look):
    assert met_in_steps(mode, model, look) == met_in_steps(mode, model)


def test_an_extra_pass_keeps_the_default_device_and_functions_of_subclasses():
    seen = []

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    def run(model):
        assert torch.ones(2).device.type == "meta"
        one = torch.eye(2, device="cpu")
        assert torch.equal(one @ one, one)
        one.as_subclass(Named) + 1
        assert seen

    outer, inner = NoisyFunctions(), NoisyFunctions()
    with outer, torch.device("meta"), inner, Noisy():
        before = torch.overrides._get_current_function_mode_stack()
        extra_pass(nn.Linear(2, 2), run, contextlib.nullcontext())
        assert torch.overrides._get_current_function_mode_stack() == before
        with pytest.raises(ZeroDivisionError):
            extra_pass(nn.Linear(2, 2), lambda model: 1 / 0, contextlib.nullcontext())
        assert torch.overrides._get_current_function_mode_stack() == before
