"""Groups of sequences, and sums over their rows; more of them: metrics/test_jackknife.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.kernels import GROUPS, group_sequences, group_sums
from support.samples import few_examples, generator, normal, seeds


@few_examples
@given(sizes=st.lists(st.integers(1, 30), min_size=8, max_size=60), seed=seeds)
def test_groups_hold_whole_sequences_in_their_order_and_about_as_many_rows(sizes, seed):
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    group = group_sequences(numbers)
    assert (group.diff() >= 0).all()
    assert group.unique().tolist() == [*range(GROUPS)]
    assert len(torch.stack([numbers, group]).unique(dim=1).T) == len(sizes)
    # Names and order of the rows do not matter.
    order = torch.randperm(len(group), generator=generator(seed))
    assert torch.equal(group_sequences(7 * numbers[order] - 90), group[order])
    if max(sizes) <= len(group) / GROUPS:
        assert (group.bincount() - len(group) / GROUPS).abs().max() <= max(sizes)


def test_fewer_than_eight_sequences_have_no_groups():
    assert group_sequences(torch.arange(70) % 7) is None
    assert group_sequences(torch.arange(8)).tolist() == [*range(8)]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        # A sequence is in the group of the row in its middle: of groups of 10 rows, 3 begin at 9.
        ([9, 3, 8, *[10] * 6], [9, 11, *[10] * 6]),
        ([1000, *[2] * 15], [1002, *[4] * 7]),  # a huge one is a group like others
    ],
)
def test_a_sequence_is_in_the_group_of_its_middle(sizes, groups):
    group = group_sequences(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
    assert group.bincount().tolist() == groups


@pytest.mark.parametrize("scale", [1e-320, 1e-250, 1e250])
def test_directions_of_rows_whose_squares_do_not_fit(scale):
    rows, group = normal(40, 2, 5) + 1, torch.arange(40) % 8
    found, want = group_sums(scale * rows, group), group_sums(rows, group)
    close = 1e-12 if scale > 1e-300 else 1e-3  # a subnormal number has few digits
    torch.testing.assert_close(found.directions, want.directions, rtol=close, atol=close)
    assert torch.equal(found.directed, want.directed)


def test_fewer_than_two_directions_have_no_cosine():
    rows = torch.zeros(5, 2, 3)
    rows[0, 0] = rows[0, 1] = rows[1, 1] = 1
    cosines = group_sums(rows, torch.zeros(5, dtype=torch.int64)).cosine
    assert cosines.flatten().tolist() == pytest.approx([math.nan, 1], nan_ok=True)
