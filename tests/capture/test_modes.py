import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from geomon import Monitor, every
from geomon.capture import extra_pass


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


class Block(nn.Module):
    def __init__(self, *, by_hand):
        super().__init__()
        self.by_hand = by_hand
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        parts = (p(self.norm(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        if self.by_hand:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            attended = (q @ k.mT / 8**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        else:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(x).relu()


class Model(nn.Module):
    def __init__(self, *, by_hand):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.ModuleList(Block(by_hand=by_hand) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def train(mode, tmp_path, *, by_hand, watched=None):
    """Train 25 steps in a mode; return the weights, the random state and the steps looked at."""
    torch.manual_seed(0)
    model, ids = Model(by_hand=by_hand), torch.randint(0, 20, (8, 12))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = None
    if watched == "probe":
        monitor = Monitor(model, directory=tmp_path, schedule=every(10), probe=ids[:4])
    elif watched:  # checks are made in between
        monitor = Monitor(model, directory=tmp_path, schedule=every(10), checks=every(1))
    with mode:
        for step in range(25):
            with monitor(step) if monitor else contextlib.nullcontext():
                loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if monitor:
        monitor.close()
        assert monitor.latest.step == 20
        assert "attention_entropy/layer_01" in monitor.latest.values
        assert not any("failed" in str(note) for note in monitor.latest.notes)
    return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "fused"])
@pytest.mark.parametrize("watched", ["inline", "probe"])
@pytest.mark.parametrize("mode", [Noisy, NoisyFunctions, lambda: torch.device("cpu")])
def test_a_mode_that_changes_products_makes_the_same_weights(mode, watched, by_hand, tmp_path):
    plain, state = train(mode(), tmp_path, by_hand=by_hand)
    weights, other = train(mode(), tmp_path, by_hand=by_hand, watched=watched)
    assert all(map(torch.equal, plain, weights))
    assert torch.equal(state, other)


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "fused"])
@pytest.mark.parametrize("watched", ["inline", "probe"])
def test_what_is_computed_beside_the_training_is_not_counted(watched, by_hand, tmp_path):
    counts = []
    for each in (None, watched):
        with FlopCounterMode(display=False) as counter:
            train(contextlib.nullcontext(), tmp_path, by_hand=by_hand, watched=each)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


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
