import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels.moments import drift_norm, mean_square_norm, squares_about_mean, variance

KERNELS = [drift_norm, variance, mean_square_norm]
SHAPES = [(1, 3), (2, 1), (7, 32), (450, 16), (1200, 48), (30, 500)]

small_shapes = st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 10**6))
few_examples = settings(deadline=None, derandomize=True, max_examples=30)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dyadic(*shape, seed=0):
    # Multiples of 2^-10: adding 1e10 to them is exact in float64, so a shift changes no spread.
    return (normal(*shape, seed=seed) * 1024).round() / 1024


def by_exact_sums(hidden):
    """M, V and Q with sums that round once, and V over all pairs: sum |x - y|^2 / (2 n^2)."""
    rows = hidden.double().numpy()
    n = len(rows)
    mean_norm = math.fsum((math.fsum(column) / n) ** 2 for column in rows.T)
    pairs = math.fsum(float(np.square(rows - row).sum()) for row in rows) / (2 * n * n)
    return mean_norm, pairs, math.fsum(np.square(rows).ravel()) / n


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_moments_agree_with_exact_sums_and_all_pairs(tokens, width, offset):
    hidden = normal(tokens, width) + offset
    m, v, q = by_exact_sums(hidden)
    assert drift_norm(hidden).item() == pytest.approx(math.sqrt(m), rel=1e-12)
    assert variance(hidden).item() == pytest.approx(v, rel=1e-11, abs=1e-20)
    assert mean_square_norm(hidden).item() == pytest.approx(q, rel=1e-12)


def test_variance_far_from_the_origin_where_float32_loses_it():
    hidden = (1e4 + normal(600, 64)).float()
    # Q - M in float32: both are 6.4e9, whose spacing is 512; the variance is about 64.
    naive = hidden.square().sum(dim=1).mean() - hidden.mean(dim=0).square().sum()
    want = by_exact_sums(hidden)[1]
    assert abs(naive - want) > 0.5 * want
    assert variance(hidden).item() == pytest.approx(want, rel=1e-10)


def test_variance_at_offset_1e10_in_float64():
    near = dyadic(450, 24)
    far = near + 1e10
    # Q - M in float64: both are 2.4e21, whose spacing is 262144.
    naive = far.square().sum(dim=1).mean() - far.mean(dim=0).square().sum()
    want = variance(near).item()
    assert abs(naive - want) > 0.5 * want
    assert variance(far).item() == pytest.approx(want, rel=1e-10)


def test_moments_in_float16_do_not_overflow():
    hidden = torch.full((500, 8), 300.0, dtype=torch.float16)
    assert hidden.square().isinf().all()
    assert mean_square_norm(hidden).item() == 8 * 300**2
    assert drift_norm(hidden).item() == pytest.approx(300 * math.sqrt(8))
    assert variance(hidden).item() == 0


def test_moments_of_the_corners_of_a_cube_are_known():
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 5) + torch.tensor(
        [3.0, 4.0, 0.0, 0.0, 0.0]
    )
    assert drift_norm(corners).item() == 5
    assert variance(corners).item() == 5
    assert mean_square_norm(corners).item() == 30


def test_moments_of_a_gaussian_are_within_five_standard_errors():
    tokens, width, mean = 4000, 50, 2.0
    hidden = mean + normal(tokens, width, seed=5)
    error = math.sqrt(2 * width / tokens)
    assert abs(variance(hidden).item() - width * (1 - 1 / tokens)) < 5 * error
    m = drift_norm(hidden).item() ** 2 - width * mean**2
    assert abs(m - width / tokens) < 5 * 2 * mean * math.sqrt(width / tokens)


@given(small_shapes, st.sampled_from([0.0, 1.0, 1e3, 1e6]))
@few_examples
def test_mean_and_variance_add_up_to_the_mean_square_norm(shape, offset):
    hidden = normal(*shape[:2], seed=shape[2]) + offset
    total = drift_norm(hidden).square() + variance(hidden)
    torch.testing.assert_close(total, mean_square_norm(hidden), rtol=1e-13, atol=0)


@given(small_shapes)
@few_examples
def test_moments_do_not_change_under_rotation_order_or_copies(shape):
    tokens, width, seed = shape
    hidden = normal(tokens, width, seed=seed) + 1
    rotation = torch.linalg.qr(normal(width, width, seed=seed + 1)).Q
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    for kernel in KERNELS:
        want = kernel(hidden)
        for other in (hidden @ rotation, hidden[order], hidden.repeat(3, 1)):
            torch.testing.assert_close(kernel(other), want, rtol=1e-10, atol=1e-13)


@given(small_shapes, st.sampled_from([2.0**-30, 0.1, -3.0, 1e6]))
@few_examples
def test_moments_follow_the_scale(shape, scale):
    hidden = normal(*shape[:2], seed=shape[2])
    for kernel, power in zip(KERNELS, [1, 2, 2], strict=True):
        want = abs(scale) ** power * kernel(hidden)
        torch.testing.assert_close(kernel(scale * hidden), want, rtol=1e-12, atol=1e-30)


@given(small_shapes)
@few_examples
def test_a_shift_moves_the_mean_and_leaves_the_variance(shape):
    tokens, width, seed = shape
    hidden = dyadic(tokens, width, seed=seed)
    shift = 1024 * dyadic(width, seed=seed + 1)
    torch.testing.assert_close(variance(hidden + shift), variance(hidden), rtol=1e-10, atol=1e-13)
    opposite = hidden - hidden.mean(dim=0) + shift
    torch.testing.assert_close(drift_norm(opposite), shift.norm(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_moments_take_any_floating_dtype_and_leave_it_alone(kernel, dtype):
    hidden = (normal(500, 12) + 2).to(dtype)
    before = hidden.clone()
    got = kernel(hidden)
    assert got.dtype == torch.float64
    assert got.shape == ()
    assert hidden.dtype == dtype
    assert torch.equal(hidden, before)
    torch.testing.assert_close(got, kernel(hidden.double()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 7, 1000])
def test_equal_rows_have_no_variance(dtype, tokens):
    hidden = normal(1, 5).to(dtype).repeat(tokens, 1)
    assert variance(hidden).item() == 0
    torch.testing.assert_close(drift_norm(hidden), hidden[0].double().norm())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "hidden",
    [torch.ones(4), torch.ones(2, 3, 4), torch.ones(0, 3), torch.ones(3, 0), torch.ones(())],
)
def test_moments_name_the_shape_they_cannot_use(kernel, hidden):
    with pytest.raises(ValueError, match="expected") as caught:
        kernel(hidden)
    assert str(list(hidden.shape)) in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_refuse_integers(kernel):
    with pytest.raises(ValueError, match=r"floating-point .* torch.int64 \[3, 2\]"):
        kernel(torch.ones(3, 2, dtype=torch.int64))


@few_examples
@given(shape=small_shapes, offset=st.sampled_from([0.0, 1e10]))
def test_squares_about_the_mean_are_those_of_each_row(shape, offset):
    tokens, width, seed = shape
    rows = dyadic(tokens, width, seed=seed)
    want = (rows - rows.mean(dim=0)).square().sum(dim=1)
    found = squares_about_mean(rows + offset)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.mean(), variance(rows + offset), rtol=1e-14, atol=0)
