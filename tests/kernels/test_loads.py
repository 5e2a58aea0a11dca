"""Evenness of loads: closed forms, and what changes nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geomon.kernels.loads import expert_load

COUNTS = st.lists(st.integers(0, 10_000), min_size=1, max_size=64).filter(any)


@given(COUNTS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_order_and_number_of_tokens_change_nothing_and_the_value_is_a_share(counts, times, chance):
    found = float(expert_load(torch.tensor(counts).double()))
    assert 0.01 <= found <= 1 + 1e-12
    other = [times * count for count in counts]
    chance.shuffle(other)
    assert float(expert_load(torch.tensor(other).double())) == pytest.approx(found)


@pytest.mark.parametrize("experts", [2, 4, 64])
def test_even_loads_give_one_and_each_lost_expert_divides(experts):
    even = torch.full((experts,), 300.0)
    assert float(expert_load(even)) == pytest.approx(1)
    before = 1.0
    for lost in range(1, min(experts, 3)):
        even[-lost] = 0
        others = experts - lost
        wanted = (experts / others) ** (others / experts) * 0.01 ** (lost / experts)
        assert float(expert_load(even)) == pytest.approx(wanted)
        assert wanted < before
        before = wanted


def test_without_tokens_there_is_no_value():
    assert math.isnan(float(expert_load(torch.zeros(4))))
