import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    participation_ratio,
    power_law,
    spectrum,
)

RANKS = [effective_rank, participation_ratio]

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
eigenvalues = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda v: max(v) > 1e-3)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def descending(values):
    return torch.tensor(values, dtype=torch.float64).sort(descending=True).values


def with_spectrum(tokens, lambdas, seed=0):
    """Rows whose covariance has exactly these eigenvalues, turned at random."""
    width = len(lambdas)
    noise = normal(tokens, width, seed=seed)
    left = torch.linalg.qr(noise - noise.mean(dim=0)).Q
    turn = torch.linalg.qr(normal(width, width, seed=seed + 1)).Q
    return (left * (tokens * torch.as_tensor(lambdas, dtype=torch.float64)).sqrt()) @ turn


def test_eigenvalues_may_come_in_any_order_and_just_below_0():
    """As `torch.linalg.eigvalsh` gives them of a covariance in float32."""
    rows = (normal(400, 40) @ normal(40, 128, seed=1)).float()
    found = torch.linalg.eigvalsh(torch.cov(rows.T))
    assert found[0] < 0
    want = spectrum(rows)
    for kernel in (anisotropy, effective_rank, participation_ratio):
        assert kernel(found).item() == pytest.approx(kernel(want).item(), rel=1e-4)
    law = 3 * torch.arange(1, 129, dtype=torch.float64) ** -1.5
    assert power_law(law.flip(0)) == power_law(law)


@pytest.mark.parametrize("kernel", RANKS)
@pytest.mark.parametrize("rank", [1, 2, 17, 768])
def test_equal_eigenvalues_count_themselves(kernel, rank):
    padded = torch.cat([torch.full((rank,), 0.3), torch.zeros(50)])
    assert kernel(padded).item() == pytest.approx(rank, rel=1e-12)


def test_ranks_of_a_geometric_spectrum_in_closed_form():
    r = 0.9
    lambdas = r ** torch.arange(2000, dtype=torch.float64)
    assert participation_ratio(lambdas).item() == pytest.approx((1 + r) / (1 - r), rel=1e-12)
    entropy = -math.log(1 - r) - r * math.log(r) / (1 - r)
    assert effective_rank(lambdas).item() == pytest.approx(math.exp(entropy), rel=1e-12)


def test_effective_rank_is_of_the_eigenvalues_and_not_of_the_singular_values():
    hidden = normal(400, 30) * torch.linspace(0.1, 3, 30)
    singular = np.linalg.svd((hidden - hidden.mean(dim=0)).numpy(), compute_uv=False)
    p = singular**2 / (singular**2).sum()
    assert effective_rank(spectrum(hidden)).item() == pytest.approx(
        math.exp(-(p * np.log(p)).sum()), rel=1e-10
    )
    q = singular / singular.sum()
    assert math.exp(-(q * np.log(q)).sum()) > 1.1 * effective_rank(spectrum(hidden)).item()


def test_participation_ratio_is_the_trace_squared_over_the_squared_norm_of_the_covariance():
    hidden = normal(300, 20) * torch.linspace(0.5, 2, 20)
    covariance = np.cov(hidden.numpy(), rowvar=False, bias=True)
    want = np.trace(covariance) ** 2 / (covariance**2).sum()
    assert participation_ratio(spectrum(hidden)).item() == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize(("tokens", "width"), [(500, 100), (200, 600)])
def test_participation_ratio_of_an_isotropic_sample(tokens, width):
    got = participation_ratio(spectrum(normal(tokens, width))).item()
    assert got == pytest.approx(tokens * width / (tokens + width), rel=0.02)


@given(eigenvalues)
@few_examples
def test_the_ranks_are_in_order_and_bounded(values):
    lambdas = descending(values)
    ratio, effective = (kernel(lambdas).item() for kernel in RANKS[::-1])
    assert 1 - 1e-12 <= 1 / anisotropy(lambdas) <= ratio * (1 + 1e-12)
    assert ratio <= effective * (1 + 1e-12)
    assert effective <= (lambdas > 0).sum() * (1 + 1e-12)


@given(eigenvalues, st.sampled_from([1e-200, 2.0**-30, 0.1, 1e6, 1e200]))
@few_examples
def test_the_ranks_do_not_change_with_the_scale(values, scale):
    lambdas = descending(values)
    for kernel in RANKS:
        torch.testing.assert_close(kernel(scale * lambdas), kernel(lambdas), rtol=1e-10, atol=0)


@given(eigenvalues)
@few_examples
def test_effective_rank_and_participation_ratio_multiply_under_copies(values):
    lambdas = descending(values)
    copied = lambdas.repeat_interleave(3)
    for kernel in RANKS:
        torch.testing.assert_close(kernel(copied), 3 * kernel(lambdas), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kernel", RANKS)
def test_ranks_of_no_variance_are_nan(kernel):
    assert kernel(torch.zeros(4)).isnan()


@pytest.mark.parametrize("kernel", RANKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ranks_take_any_floating_dtype_and_leave_it_alone(kernel, dtype):
    # The sum of these overflows in float16.
    lambdas = torch.tensor([60000.0, 60000.0, 30000.0]).to(dtype)
    before = lambdas.clone()
    got = kernel(lambdas)
    assert got.dtype == torch.float64
    assert got.shape == ()
    assert torch.equal(lambdas, before)
    torch.testing.assert_close(got, kernel(lambdas.double()), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", RANKS)
@pytest.mark.parametrize("lambdas", [torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_ranks_name_the_shape_they_cannot_use(kernel, lambdas):
    with pytest.raises(ValueError, match=r"expected eigenvalues \[rank\]") as caught:
        kernel(lambdas)
    assert str(list(lambdas.shape)) in str(caught.value)


def test_rankme_as_reptrix_codes_it_comes_from_the_same_spectrum():
    # There every share of the variance has 1e-7 added to it, which is worth 0.4 here.
    torch.manual_seed(0)
    shares = spectrum(torch.randn(1000, 1024))
    shares = shares / shares.sum()
    added = shares + 1e-7
    assert (-(added * added.log()).sum()).exp().item() == pytest.approx(613.4726, abs=1e-4)
    assert effective_rank(shares).item() == pytest.approx(613.0542, abs=1e-4)


# -- power law -------------------------------------------------------------------------------------


def fitted_by_numpy(values, first, last):
    """Weighted least squares with weights 1 / rank, by a solver for rows scaled by their roots."""
    rank = np.arange(first, last + 1)
    root = rank**-0.5
    design = np.stack([np.log(rank), np.ones(len(rank))], axis=1) * root[:, None]
    y = np.log(np.asarray(values)[first - 1 : last])
    (slope, offset), *_ = np.linalg.lstsq(design, y * root, rcond=None)
    left = np.average((y - slope * np.log(rank) - offset) ** 2, weights=1 / rank)
    mean = np.average(y, weights=1 / rank)
    return -slope, 1 - left / np.average((y - mean) ** 2, weights=1 / rank)


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([128, 400, 60, 24]), st.floats(0.1, 3))
def test_the_power_law_is_the_weighted_fit_over_ranks_11_to_100(seed, width, alpha):
    noise = 0.1 * normal(width, seed=seed)
    values = (-alpha * torch.arange(1, width + 1).double().log() + noise).exp()
    values = values.sort(descending=True).values
    fit = power_law(values)
    last = {128: 100, 400: 100, 60: 48, 24: 19}[width]
    expected = fitted_by_numpy(values, 11, last)
    assert fit.alpha.item() == pytest.approx(expected[0], rel=1e-9)
    assert fit.r_squared.item() == pytest.approx(expected[1], rel=1e-9)
    scaled = power_law(values * 1e-30)
    assert scaled.alpha.item() == pytest.approx(fit.alpha.item(), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_rows_of_a_power_law_give_its_exponent_also_far_from_the_origin(alpha):
    lambdas = np.arange(1, 129.0) ** -alpha
    rows = with_spectrum(600, lambdas) + 1e3
    fit = power_law(spectrum(rows))
    assert fit.alpha.item() == pytest.approx(alpha, rel=1e-6)
    assert fit.r_squared.item() == pytest.approx(1, abs=1e-9)
    # In float32 the tail of a covariance about the origin is rounding.
    naive = torch.linalg.eigvalsh((rows.float().T @ rows.float()) / 600 - 1e6).flip(0).clamp(min=0)
    assert not abs(power_law(naive.double()).alpha.item() / alpha - 1) < 0.05


def test_directions_without_variance_are_no_part_of_the_law():
    """A norm takes one direction away, few rows take many: rounding there is no tail."""
    lambdas = np.arange(1, 65.0) ** -1.0
    rows = torch.cat([with_spectrum(300, lambdas), torch.zeros(300, 90)], dim=1)
    turned = rows @ torch.linalg.qr(normal(154, 154, seed=5)).Q
    fit = power_law(spectrum(turned))
    assert fit.alpha.item() == pytest.approx(1, rel=1e-6)


def test_where_there_is_no_power_law():
    assert all(value.isnan() for value in power_law(descending(range(1, 19))))
    assert power_law(descending(range(1, 20))).alpha.isfinite()  # ranks 11 to 15
    flat = power_law(torch.ones(200))
    assert flat.alpha.item() == pytest.approx(0, abs=1e-12)
    assert power_law(torch.zeros(200)).alpha.isnan()
    with pytest.raises(ValueError, match="counted from 1"):
        power_law(torch.ones(200), first=0)
    with pytest.raises(ValueError, match="eigenvalues"):
        power_law(torch.ones(2, 200))
