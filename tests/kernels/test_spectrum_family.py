import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import svds

from geomon.kernels import spectrum as module
from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    leading_share,
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


@pytest.fixture
def narrow(monkeypatch):
    """Lanczos for narrow rows too, which otherwise go through the full spectrum."""
    monkeypatch.setattr(module, "_SMALL_SIDE", 12)


def is_krylov(rows):
    """Whether Lanczos converged by itself."""
    centred = rows.double() - rows.double().mean(dim=0)
    tall = centred if centred.shape[1] <= centred.shape[0] else centred.T
    return module._leading_eigenvalue(tall) is not None


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


@pytest.mark.parametrize(("tokens", "width"), [(1000, 800), (800, 1000), (1200, 900)])
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_leading_share_agrees_with_the_full_spectrum(tokens, width, decay):
    # decay 0 is isotropic noise, whose top eigenvalues are about 1e-3 apart.
    hidden = normal(tokens, width, seed=width) * torch.arange(1.0, width + 1) ** -decay + 5
    assert is_krylov(hidden)
    want = anisotropy(spectrum(hidden)).item()
    assert leading_share(hidden).item() == pytest.approx(want, rel=1e-9)


def test_leading_share_agrees_with_scipy():
    hidden = normal(1000, 850, seed=2) * torch.linspace(1, 3, 850)
    centred = (hidden - hidden.mean(dim=0)).numpy()
    top = svds(centred, k=1, return_singular_vectors=False, rng=np.random.default_rng(0))[0]
    want = top**2 / (centred**2).sum()
    assert leading_share(hidden).item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("crowd", [2, 5, 12])
def test_leading_share_with_top_eigenvalues_that_almost_agree(gap, crowd, narrow):
    # More of them than vectors in a block, evenly spaced: none may be taken for the first.
    lambdas = torch.cat(
        [2 * (1 - gap * torch.arange(crowd, dtype=torch.float64)), torch.linspace(1.5, 0.1, 188)]
    )
    for seed in range(3):
        hidden = with_spectrum(500, lambdas, seed=seed)
        want = anisotropy(spectrum(hidden)).item()
        assert leading_share(hidden).item() == pytest.approx(want, rel=1e-8)


@given(st.integers(0, 10**6), st.integers(13, 90), st.integers(13, 90), st.floats(0, 2))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_leading_share_of_any_rows(seed, tokens, width, decay):
    hidden = normal(tokens, width, seed=seed) * torch.arange(1.0, width + 1) ** -decay
    hidden = hidden + 100 * normal(width, seed=seed + 1)
    want = anisotropy(spectrum(hidden)).item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SMALL_SIDE", 12)
        got = leading_share(hidden).item()
    assert got == pytest.approx(want, rel=1e-8)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 9])
def test_leading_share_of_rows_of_low_rank(rank, narrow):
    # The Krylov space is soon exhausted.
    hidden = normal(120, rank) @ normal(rank, 90, seed=1) + 3
    want = anisotropy(spectrum(hidden)).item()
    assert leading_share(hidden).item() == pytest.approx(want, rel=1e-10)


def test_leading_share_where_lanczos_gives_up_is_that_of_the_full_spectrum(monkeypatch):
    monkeypatch.setattr(module, "_SMALL_SIDE", 12)
    monkeypatch.setattr(module, "_TOLERANCE", -1.0)
    hidden = normal(60, 40)
    assert not is_krylov(hidden)
    torch.testing.assert_close(leading_share(hidden), anisotropy(spectrum(hidden)))


def test_leading_share_far_from_the_origin(narrow):
    near = (normal(500, 60) * 1024).round() / 1024
    torch.testing.assert_close(leading_share(near + 1e10), leading_share(near), rtol=1e-8, atol=0)


def test_leading_share_with_massive_rows():
    quiet, direction = normal(2032, 768), normal(768, seed=1)
    massive = (1000 * direction / direction.norm()).expand(16, -1)
    assert leading_share(torch.cat([quiet, massive])).item() == pytest.approx(0.911, abs=1e-3)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 5), (2, 1), (2, 3), (5, 1), (3, 900)])
def test_leading_share_of_tiny_shapes(tokens, width):
    hidden = normal(tokens, width)
    want = anisotropy(spectrum(hidden))
    torch.testing.assert_close(leading_share(hidden), want, equal_nan=True)


@pytest.mark.parametrize(("tokens", "width"), [(1, 4), (7, 3), (900, 800)])
def test_leading_share_of_equal_rows_is_nan(tokens, width):
    assert leading_share(normal(1, width).repeat(tokens, 1)).isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("tokens", "width"), [(9, 4), (900, 800)])
def test_leading_share_of_rows_that_are_not_finite_is_nan(bad, tokens, width):
    hidden = normal(tokens, width)
    hidden[3, 1] = bad
    assert leading_share(hidden).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_leading_share_takes_any_floating_dtype_and_leaves_it_alone(dtype, narrow):
    hidden = (100 * normal(80, 40)).to(dtype)
    before = hidden.clone()
    got = leading_share(hidden)
    assert got.dtype == torch.float64
    assert torch.equal(hidden, before)
    torch.testing.assert_close(got, anisotropy(spectrum(hidden)), rtol=1e-9, atol=0)


def test_leading_share_is_repeatable_and_leaves_the_global_generator_alone(narrow):
    hidden, before = normal(200, 100), torch.get_rng_state()
    assert leading_share(hidden).item() == leading_share(hidden).item()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("hidden", [torch.ones(4), torch.ones(0, 3), torch.ones(3, 0)])
def test_leading_share_names_the_shape_it_cannot_use(hidden):
    with pytest.raises(ValueError, match="expected") as caught:
        leading_share(hidden)
    assert str(list(hidden.shape)) in str(caught.value)


def test_rankme_as_reptrix_codes_it_comes_from_the_same_spectrum():
    # There every share of the variance has 1e-7 added to it, which is worth 0.4 here.
    torch.manual_seed(0)
    shares = spectrum(torch.randn(1000, 1024))
    shares = shares / shares.sum()
    added = shares + 1e-7
    assert (-(added * added.log()).sum()).exp().item() == pytest.approx(613.4726, abs=1e-4)
    assert effective_rank(shares).item() == pytest.approx(613.0542, abs=1e-4)


def test_leading_share_of_a_sphere_that_one_vector_exhausts(monkeypatch):
    """All eigenvalues are equal: whatever Lanczos starts from is an eigenvector."""
    monkeypatch.setattr(module, "_SMALL_SIDE", 12)
    width = 36
    turned = torch.linalg.qr(
        torch.randn(width, width, generator=torch.Generator().manual_seed(0)).double()
    ).Q
    rows = torch.cat([turned, -turned])
    assert leading_share(rows).item() == pytest.approx(1 / width, rel=1e-9)


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
