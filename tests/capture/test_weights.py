"""Weights are read as they are, without computing them for the training."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from geomon.capture.weights import (
    Norms,
    WeightNorms,
    has_weight,
    present_weight,
    said,
    stored_weight,
    to_numbers,
)
from support.models import Running


class Property(nn.Module):
    """A module whose weight is computed at each access."""

    asked = 0

    @property
    def weight(self):
        type(self).asked += 1
        return torch.ones(2, 2)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * (2 if self.training else 3)


def doubled():
    return parametrize.register_parametrization(nn.Linear(2, 2), "weight", Doubled())


def test_what_a_module_or_config_says_is_none_if_it_is_missing_or_an_error():
    class Refusing:
        name = "an own name"

        @property
        def differs(self):
            raise RuntimeError

    assert said(Refusing(), "name") == "an own name"
    assert said(Refusing(), "differs") is None
    assert said(Refusing(), "unheard_of") is None


def test_the_stored_weight_is_the_one_parameter_behind_a_weight():
    plain, made = nn.Linear(2, 2), doubled()
    assert stored_weight(plain) is plain.weight
    assert stored_weight(plain, "bias") is plain.bias
    assert stored_weight(made) is made.parametrizations.weight.original
    assert stored_weight(parametrizations.weight_norm(nn.Linear(2, 2))) is None  # of two
    assert stored_weight(nn.ReLU()) is None
    assert stored_weight(Running(len, weight="no tensor")) is None
    assert stored_weight(Property()) is None
    assert Property.asked == 0
    given = [has_weight(module, "weight") for module in (plain, made, nn.ReLU())]
    assert given == [True, True, False]
    assert not has_weight(plain, "scale")


def test_the_present_weight_is_that_of_an_evaluation_and_the_flags_stay():
    made, plain = doubled(), nn.Linear(2, 2)
    original = made.parametrizations.weight.original
    for mode in (True, False):
        made.train(mode)
        found = present_weight(made)
        assert torch.equal(found, original * 3)
        assert not found.requires_grad
        assert all(module.training is mode for module in made.modules())
    assert present_weight(plain) is plain.weight
    assert present_weight(plain, "bias") is plain.bias
    assert present_weight(nn.ReLU()) is None


def norms_of(block):
    found = WeightNorms([block]).of(block)
    return None if found is None else to_numbers([found])[0]


def filled(*sizes, dtype=torch.float32):
    """A weight whose Frobenius norm is the root of its number of entries."""
    return nn.Parameter(torch.ones(sizes).to(dtype), requires_grad=False)


def holding(**weights):
    return Running(len, **weights)


# Weights of a block, and their norms by name.
BLOCKS = {
    "a matrix": ({"up": holding(weight=filled(2, 8))}, {"up": 4}),
    "of its own": ({"up": filled(2, 8)}, {"up": 4}),
    "called otherwise": ({"up": holding(table=filled(3, 3))}, {"up.table": 3}),
    "of more dimensions": ({"up": holding(weight=filled(2, 2, 4))}, {"up": 4}),
    "a vector": ({"up": holding(weight=filled(4))}, None),
    "half precision": ({"up": holding(weight=filled(3, 3, dtype=torch.half))}, {"up": 3}),
    "double precision": ({"up": holding(weight=filled(3, 3, dtype=torch.double))}, {"up": 3}),
    "integers": (
        {"up": holding(weight=filled(3, 3, dtype=torch.int32)), "down": filled(2, 2)}, {"down": 2}
    ),
    "of eight bits": (
        {"up": holding(weight=filled(3, 3, dtype=torch.float8_e5m2)), "down": filled(2, 2)},
        {"down": 2},
    ),
    "in a list": (
        {"all": nn.ModuleList(holding(up=holding(weight=filled(2, 8))) for _ in range(4))},
        {"all.up": 8},
    ),
    "in lists of a list": (
        {"all": nn.ModuleList(nn.ModuleList(holding(weight=filled(2, 2)) for _ in range(2))
                              for _ in range(2))},
        {"all": 4},
    ),
    "in a sequence": (
        {"all": nn.Sequential(*(holding(weight=filled(2, 2)) for _ in range(2)))},
        {"all.0": 2, "all.1": 2},
    ),
    "computed": ({"up": doubled()}, ...),
    "of another device": (
        {"up": holding(weight=filled(2, 2).to("meta")), "down": filled(2, 2)}, {"down": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_matrices_of_a_block_have_their_norms_by_name(name):
    weights, expected = BLOCKS[name]
    block = holding(**weights)
    if expected is ...:
        expected = {"up": float(block.up.parametrizations.weight.original.detach().norm() * 3)}
    for _ in range(2):  # as found, and as known from before
        found = norms_of(block)
        assert found == (expected and pytest.approx(expected, rel=1e-6))


def test_weights_of_all_blocks_are_read_as_the_first_of_them_is_called():
    blocks = [holding(up=holding(weight=filled(2, 2))) for _ in range(3)]
    for block in blocks:
        norms_of(block)  # known from now on
    reads = WeightNorms(blocks)

    def norm(number):
        return to_numbers([reads.of(blocks[number])])[0]["up"]

    def grow():
        for block in blocks:
            block.up.weight += 1

    assert norm(1) == 2
    grow()
    assert norm(0) == 2  # of the same pass
    assert norm(1) == 4  # another one
    grow()
    assert (norm(0), norm(2)) == (4, 4)
    assert norm(2) == 6


def test_numbers_are_those_of_each_block_by_name():
    one = Norms(("up", "down"), torch.tensor([1.0, 2.0]))
    other = Norms(("up",), torch.tensor([3.0]))
    assert to_numbers([one, other, one]) == [
        {"up": 1.0, "down": 2.0}, {"up": 3.0}, {"up": 1.0, "down": 2.0}
    ]  # fmt: skip
    assert to_numbers([]) == []
