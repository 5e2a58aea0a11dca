"""Growth of the norm and direction of the addition, by their definitions and closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import definitions as by_book
from support.kernels import norm_growth, residual_cosine, row_additions
from support.samples import few_examples, normal, seeds


def both(before, hidden):
    additions = row_additions(before, hidden)
    return norm_growth(additions).item(), residual_cosine(additions).item()


@pytest.mark.parametrize("factor", [0.5, 1.5, -2.0])
def test_a_multiple_of_the_rows_has_its_factor_and_the_direction_of_the_rows(factor):
    x = normal(40, 6)
    expected = pytest.approx((abs(factor), 1.0 if factor > 1 else -1.0))
    assert both(x, factor * x) == expected


def test_an_update_of_the_same_size_at_a_right_angle_grows_by_the_root_of_two():
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    assert both(x, x + x.flip(1)) != pytest.approx((2**0.5, 1.0))
    assert both(x, x + torch.tensor([[0.0, 3.0], [2.0, 0.0]])) == pytest.approx((2**0.5, 0.0))


@few_examples
@given(seeds, st.sampled_from([1e-12, 1.0, 1e12]))
def test_neither_a_rotation_nor_a_common_factor_nor_the_order_matters(seed, factor):
    before, addition = normal(30, 5, seed=seed), normal(30, 5, seed=seed + 1)
    turn = torch.linalg.qr(normal(5, 5, seed=seed + 2)).Q
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    expected = pytest.approx(both(before, before + addition), rel=1e-5, abs=1e-6)
    turned, after = factor * before @ turn, factor * (before + addition) @ turn
    assert both(turned[order], after[order]) == expected


@pytest.mark.parametrize("addition", [1.0, 1 / 128])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_small_updates_of_large_rows_keep_their_direction(offset, addition):
    """Products of rows lose it in float32: |x - b|^2 = |x|^2 - 2 x b + |b|^2."""
    before = (normal(64, 32).float() + offset).mul(1024).round().div(1024)
    hidden = before + (addition * normal(64, 32, seed=1).float()).mul(1024).round().div(1024)
    found = by_book.of_updates(before.double().numpy(), hidden.double().numpy())
    assert both(before, hidden) == pytest.approx([*found.values()], rel=1e-5, abs=1e-6)
    products = [(a * b).sum(dim=1) for a, b in ((before, before), (before, hidden), (hidden,) * 2)]
    length = (products[2] - 2 * products[1] + products[0]).clamp(min=0).sqrt()
    naive = ((products[1] - products[0]) / products[0].sqrt() / length).nanmean().item()
    fails = offset > 0 and addition < 1
    assert (naive == pytest.approx(found["residual_cosine"], abs=1e-3)) != fails


def test_rows_of_zero_and_rows_that_stay_have_no_direction():
    before = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    hidden = torch.tensor([[1.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    assert both(before, hidden)[1] == 1.0
    assert both(before[:2], hidden[:2])[1] != both(before[:2], hidden[:2])[1]  # NaN
    with pytest.raises(ValueError, match=r"the same rows one layer before, \[3, 2\], got \[2, 2\]"):
        row_additions(before[:2], hidden)
