import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels.moments import drift_norm, mean_square_norm, variance
from geomon.kernels.streaming import Moments, merge, moments_of

few_examples = settings(deadline=None, derandomize=True, max_examples=30)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, rtol=1e-9, atol=0.0):
    assert a.count == b.count
    torch.testing.assert_close(a.mean, b.mean, rtol=rtol, atol=atol)
    torch.testing.assert_close(a.scatter, b.scatter, rtol=rtol, atol=atol)


def same(a, b):
    assert a.count == b.count
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.scatter, b.scatter)


def merged_at_random(parts, seed):
    """Two parts drawn at random become one, until one is left: any tree, in any order."""
    draw, parts = random.Random(seed), list(parts)
    while len(parts) > 1:
        a = parts.pop(draw.randrange(len(parts)))
        b = parts.pop(draw.randrange(len(parts)))
        parts.append(merge(a, b))
    return parts[0]


def cuts(tokens, parts, seed):
    """Ragged sizes, many of them 0, that add up to `tokens`."""
    draw = random.Random(seed)
    ends = sorted(draw.randrange(tokens + 1) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]


@pytest.mark.parametrize("order", ["random", "one by one", "backwards"])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6])
def test_a_thousand_merges_equal_the_whole(order, offset):
    tokens, width = 3000, 16
    # Multiples of 2^-10: the offset changes no spread, so that the whole is known at any offset.
    near = (normal(tokens, width) * 1024).round() / 1024
    # A trend, so that the parts have different means.
    near = near + torch.arange(tokens, dtype=torch.float64)[:, None].div(1024)
    parts = [moments_of(part) for part in (near + offset).split(cuts(tokens, 1001, seed=1))]
    assert any(part.count == 0 for part in parts)
    if order == "random":
        whole = merged_at_random(parts, seed=2)
    else:
        whole = parts.pop(0 if order == "one by one" else -1)
        for part in parts if order == "one by one" else parts[::-1]:
            whole = merge(whole, part)
    assert whole.count == tokens
    exact = torch.from_numpy(np.array([math.fsum(column) / tokens for column in near.T.tolist()]))
    scatter = math.fsum((near - exact).square().ravel().tolist())
    assert whole.scatter.item() == pytest.approx(scatter, rel=1e-9)
    torch.testing.assert_close(whole.mean, exact + offset, rtol=1e-12, atol=1e-12)
    assert whole.variance.item() == pytest.approx(scatter / tokens, rel=1e-9)


def test_sums_of_squares_in_a_stream_lose_the_variance_that_merges_keep():
    near = (normal(2000, 8) * 1024).round() / 1024
    far = near + 1e8
    total = torch.zeros(8, dtype=torch.float64)
    square = torch.zeros((), dtype=torch.float64)
    for part in far.split(20):
        total, square = total + part.sum(dim=0), square + part.square().sum()
    want = variance(near).item()
    assert abs(square / 2000 - (total / 2000).square().sum() - want).item() > 0.05 * want
    whole = merged_at_random([moments_of(part) for part in far.split(20)], seed=3)
    assert whole.variance.item() == pytest.approx(want, rel=1e-9)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 12), st.integers(0, 10**6))
@few_examples
def test_any_cut_in_any_order_gives_the_kernels_values(tokens, width, parts, seed):
    rows = normal(tokens, width, seed=seed) + 3
    whole = merged_at_random(
        [moments_of(part) for part in rows.split(cuts(tokens, parts, seed))], seed
    )
    tight = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(whole.m, drift_norm(rows).square(), **tight)
    torch.testing.assert_close(whole.variance, variance(rows), **tight)
    torch.testing.assert_close(whole.mean_square, mean_square_norm(rows), **tight)
    torch.testing.assert_close(whole.m + whole.variance, whole.mean_square, rtol=1e-15, atol=0)


@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(0, 10**6))
@few_examples
def test_merges_are_associative_and_commutative(sizes, seed):
    a, b, c = (moments_of(10 * i + normal(size, 4, seed=seed + i)) for i, size in enumerate(sizes))
    close(merge(merge(a, b), c), merge(a, merge(b, c)), rtol=1e-11, atol=1e-12)
    close(merge(a, b), merge(b, a), rtol=1e-12, atol=1e-13)


def test_a_part_without_rows_is_neutral():
    part, none = moments_of(normal(7, 3) + 1e6), moments_of(torch.empty(0, 3))
    same(merge(part, none), part)
    same(merge(none, part), part)
    same(merge(none, none), none)
    assert none.count == 0
    assert none.m.isnan()
    assert none.variance.isnan()
    assert none.mean_square.isnan()


def test_equal_rows_have_no_scatter_however_they_are_merged():
    rows = normal(1, 5).repeat(300, 1)
    whole = merged_at_random([moments_of(part) for part in rows.split(7)], seed=0)
    assert whole.scatter.item() < 1e-28


def test_one_row_has_itself_as_mean():
    row = normal(1, 5)
    part = moments_of(row)
    assert torch.equal(part.mean, row[0])
    assert part.scatter.item() == part.variance.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_moments_of_takes_any_floating_dtype_and_leaves_it_alone(dtype):
    rows = (300 * normal(500, 8)).to(dtype)
    before = rows.clone()
    part = moments_of(rows)
    assert part.mean.dtype == part.scatter.dtype == torch.float64
    assert part.m.shape == part.variance.shape == part.mean_square.shape == ()
    assert torch.equal(rows, before)
    same(part, moments_of(rows.double()))


def test_merge_leaves_its_parts_alone():
    a, b = moments_of(normal(5, 3)), moments_of(normal(6, 3, seed=1))
    before = [
        dataclasses.replace(p, mean=p.mean.clone(), scatter=p.scatter.clone()) for p in (a, b)
    ]
    merge(a, b)
    for part, old in zip((a, b), before, strict=True):
        same(part, old)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.count = 7


@pytest.mark.parametrize("rows", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(3, 0)])
def test_moments_of_names_the_shape_it_cannot_use(rows):
    with pytest.raises(ValueError, match="expected") as caught:
        moments_of(rows)
    assert str(list(rows.shape)) in str(caught.value)


def test_moments_of_refuses_integers():
    with pytest.raises(ValueError, match=r"floating-point .* torch.int64 \[3, 2\]"):
        moments_of(torch.ones(3, 2, dtype=torch.int64))


def test_merge_names_the_widths_that_differ():
    with pytest.raises(ValueError, match=r"one width, got \[3\] and \[4\]"):
        merge(moments_of(torch.ones(2, 3)), moments_of(torch.ones(2, 4)))
    assert isinstance(merge(moments_of(torch.ones(2, 3)), moments_of(torch.ones(1, 3))), Moments)
