"""Loads of experts: closed forms, and what changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geomon.kernels.loads import expert_loads

COUNTS = st.lists(st.integers(0, 10_000), min_size=1, max_size=64).filter(any)


@given(COUNTS, st.integers(1, 9))
def test_a_load_is_the_share_of_an_expert_times_their_number(counts, times):
    found = expert_loads(torch.tensor(counts).double())
    wanted = [max(len(counts) * count / sum(counts), 0.01) for count in counts]
    assert found.tolist() == pytest.approx(wanted)
    other = expert_loads(torch.tensor([times * count for count in counts[::-1]]).double())
    assert other.flip(0).tolist() == pytest.approx(wanted)


def test_without_tokens_there_is_no_load():
    assert expert_loads(torch.zeros(4)).isnan().all()
