"""Groups of sequences, and sums over their rows; more of them: metrics/test_jackknife.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mathematics import GROUPS, group_sequences, group_sums
from samples import few_examples, generator, normal, seeds


@few_examples
@given(sizes=st.lists(st.integers(1, 30), min_size=8, max_size=60), seed=seeds)
def test_groups_hold_whole_sequences_in_their_order_and_about_as_many_rows(sizes, seed):
    sizes = torch.tensor(sizes)
    numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
    group = group_sequences(numbers)
    assert (group.diff() >= 0).all()
    assert group.unique().tolist() == [*range(GROUPS)]
    assert all(len(group[numbers == number].unique()) == 1 for number in range(len(sizes)))
    # Names and order of the rows do not matter.
    order = torch.randperm(len(group), generator=generator(seed))
    assert torch.equal(group_sequences(7 * numbers[order] - 90), group[order])
    if sizes.max() <= len(group) / GROUPS:
        counts = group.bincount().double()
        assert (counts - len(group) / GROUPS).abs().max() <= sizes.max()


def test_fewer_than_eight_sequences_have_no_groups_and_a_huge_one_is_a_group_like_others():
    assert group_sequences(torch.arange(70) % 7) is None
    assert group_sequences(torch.arange(8)).tolist() == [*range(8)]
    # A sequence is in the group of the row in its middle: of groups of 10 rows, 3 begin at row 9.
    sizes = torch.tensor([9, 3, 8, *[10] * 6])
    group = group_sequences(torch.arange(9).repeat_interleave(sizes))
    assert group.bincount().tolist() == [9, 11, *[10] * 6]
    sizes = torch.tensor([1000, *[2] * 15])
    group = group_sequences(torch.arange(16).repeat_interleave(sizes))
    assert group.bincount().tolist() == [1002, *[4] * 7]


@pytest.mark.parametrize("scale", [1e-320, 1e-250, 1e250])
def test_directions_of_rows_whose_squares_do_not_fit(scale):
    rows, group = normal(40, 2, 5) + 1, torch.arange(40) % 8
    found, want = group_sums(scale * rows, group), group_sums(rows, group)
    close = 1e-12 if scale > 1e-300 else 1e-3  # a subnormal number has few digits
    torch.testing.assert_close(found.directions, want.directions, rtol=close, atol=close)
    assert torch.equal(found.directed, want.directed)


def test_fewer_than_two_directions_have_no_cosine_and_each_row_needs_a_group():
    rows = torch.zeros(5, 2, 3)
    rows[0, 0] = rows[0, 1] = rows[1, 1] = 1
    cosines = group_sums(rows, torch.zeros(5, dtype=torch.int64)).cosine
    assert cosines[0].isnan()
    assert cosines[1].item() == pytest.approx(1)
    with pytest.raises(ValueError, match="a group for each of 5 rows, got 4"):
        group_sums(rows, torch.zeros(4, dtype=torch.int64))
