import pytest
import torch
from mathematics import token_types
from samples import normal


def test_a_type_in_a_hundred_thousand_rows_is_in_the_fit_and_one_in_more_is_not():
    ids = torch.arange(4).repeat_interleave(torch.tensor([9, 10, 100_000, 100_001]))
    fit = token_types(normal(len(ids), 1), ids).norm_variance_slope()
    assert (fit.types.item(), fit.coverage.item()) == (2, pytest.approx(100_010 / len(ids)))
    assert fit.slope.isnan()  # of two types
    assert fit.r_squared.isnan()
    alike = token_types(torch.zeros(40, 3), torch.arange(40) % 4).norm_variance_slope()
    assert alike.slope.isnan()


@pytest.mark.parametrize("ids", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4)])
def test_token_ids_that_do_not_fit_the_rows_are_named(ids):
    with pytest.raises(ValueError, match="a token id for each of 4 rows") as caught:
        token_types(torch.ones(4, 2), ids)
    assert f"{ids.dtype} {list(ids.shape)}" in str(caught.value)


def test_without_a_group_the_others_are_left_and_a_type_may_have_one_row():
    rows, ids = normal(9, 2), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    groups = torch.tensor([0, 0, 1, 0, 0, 1, 1, 0, 0])
    left = token_types(rows, ids, groups).without(0)
    whole = token_types(rows[groups == 1], ids[groups == 1])
    assert left.rows.tolist() == [1, 2, 0]
    assert whole.rows.tolist() == [1, 2]
    torch.testing.assert_close(left.m[:2], whole.m)
    torch.testing.assert_close(left.scatter[:2], whole.scatter, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(left.within_variance, whole.within_variance)


def test_moments_of_types_that_are_not_known_by_group_say_so():
    with pytest.raises(ValueError, match="pass groups"):
        token_types(normal(9, 2), torch.arange(9) % 3).without(0)
