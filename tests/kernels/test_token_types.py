import torch

from support.kernels import token_types
from support.samples import normal


def test_without_a_group_the_others_are_left_and_a_type_may_have_one_row():
    rows, ids = normal(9, 2), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    groups = torch.tensor([0, 0, 1, 0, 0, 1, 1, 0, 0])
    left = token_types(rows, ids, groups).without(0)
    whole = token_types(rows[groups == 1], ids[groups == 1])
    assert (left.rows.tolist(), whole.rows.tolist()) == ([1, 2, 0], [1, 2])
    for name, close in (("m", 1e-9), ("scatter", 1e-12)):
        of_both = getattr(left, name)[:2], getattr(whole, name)
        torch.testing.assert_close(*of_both, atol=close, rtol=1e-9)
    torch.testing.assert_close(left.within_variance, whole.within_variance)
