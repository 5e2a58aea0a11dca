"""Weights that are made at each access: looked at, and nothing changed by it."""

import copy

import pytest
import torch
from models import PlainDecoder
from torch import nn
from torch.nn.utils import parametrizations

from geomon.capture import find_anatomy
from geomon.capture.weights import has_weight, present_weight, stored_weight


def constrained() -> nn.Linear:
    return parametrizations.spectral_norm(nn.Linear(60, 40).train())


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_weight_that_is_looked_at_does_not_change():
    module = constrained()
    before = state(module)
    assert has_weight(module, "weight")
    assert not has_weight(module, "in_proj_weight")
    assert stored_weight(module) is module.parametrizations.weight.original
    weight = present_weight(module)
    assert same(state(module), before)
    assert module.parametrizations.weight[0].training
    assert torch.equal(weight, copy.deepcopy(module).eval().weight)
    module.weight.sum()  # an access of training's own
    assert not same(state(module), before)


def test_plain_weights_are_themselves():
    module = nn.Linear(6, 4)
    assert stored_weight(module) is present_weight(module) is module.weight
    assert stored_weight(nn.ReLU()) is None
    assert present_weight(nn.Linear(6, 4, bias=False), "bias") is None


def test_flags_come_back_though_the_weight_cannot_be_made():
    class Broken(nn.Module):
        def forward(self, weight):
            if not self.training:
                raise RuntimeError("in eval mode")
            return weight

    module = nn.Linear(6, 4).train()
    nn.utils.parametrize.register_parametrization(module, "weight", Broken())
    with pytest.raises(RuntimeError, match="in eval mode"):
        present_weight(module)
    assert module.parametrizations.weight[0].training


class Factors(nn.Module):
    """A matrix with another one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.first = nn.Linear(base.in_features, 2, bias=False)
        self.second = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.second(self.first(x))


class Copied(nn.Module):
    """A module that is frozen, and the copy of it that is trained in its place."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.trained = copy.deepcopy(original)
        self.original = original.requires_grad_(False)

    def forward(self, x):
        return self.trained(x)


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_is_no_factor_of_an_adapter_and_no_frozen_original(tied):
    def model():
        made = PlainDecoder()
        if tied:
            made.head.weight = made.tokens.weight
        return made

    plain, factored, copied = model(), model(), model()
    factored.requires_grad_(False)
    factored.head = Factors(factored.head)
    copied.requires_grad_(False)
    copied.head = Copied(copied.head)
    copied.head.trained.requires_grad_(True)
    assert find_anatomy(plain).output is plain.head
    assert find_anatomy(plain).adapted == ()
    assert find_anatomy(factored).output is factored.head.base
    assert find_anatomy(factored).adapted == (factored.head.base,)
    factored.head.first = factored.head.second = None  # nothing of its own
    assert find_anatomy(factored).adapted == ()
    factored.head.first = nn.Linear(32, 2)
    factored.head.in_features = 31  # what is around the matrix has other widths: no adapter
    assert find_anatomy(factored).adapted == ()
    assert find_anatomy(copied).output is copied.head.trained
    assert find_anatomy(copied).adapted == ()
