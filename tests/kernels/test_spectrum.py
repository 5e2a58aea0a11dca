import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import few_examples, normal

from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    participation_ratio,
    power_law,
    principal_axes,
    spectrum,
)

SHAPES = [(2, 2), (7, 32), (32, 7), (300, 16), (500, 64), (64, 500), (1200, 48), (600, 259)]


def by_singular_values(hidden):
    rows = hidden.double().numpy()
    singular = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    return torch.from_numpy(singular**2 / len(rows))


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_spectrum_agrees_with_singular_values(tokens, width):
    hidden = normal(tokens, width) * torch.linspace(0.1, 3, width)
    got, want = spectrum(hidden), by_singular_values(hidden)
    assert got.shape == (min(tokens, width),)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13 * want[0].item())
    assert (got.diff() <= 0).all()


def test_spectrum_far_from_the_origin_where_a_float32_covariance_turns_negative():
    hidden = (10 + 0.01 * normal(1000, 256)).float()
    # E[x x'] - m m' in float32: a good part of the 256 eigenvalues comes out below 0.
    mean = hidden.mean(dim=0)
    naive = torch.linalg.eigvalsh(hidden.T @ hidden / len(hidden) - torch.outer(mean, mean))
    assert (naive < 0).sum() > 20
    got, want = spectrum(hidden), by_singular_values(hidden)
    assert got.min() > 0
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_spectrum_of_points_on_the_axes_is_known():
    lengths = torch.tensor([5.0, 3.0, 2.0, 0.5], dtype=torch.float64)
    hidden = torch.cat([torch.diag(lengths), -torch.diag(lengths)])
    torch.testing.assert_close(spectrum(hidden), lengths.square() / 4)
    torch.testing.assert_close(anisotropy(spectrum(hidden)).item(), 25 / 38.25)


# -- variance along the eigenvectors by group of sequences --


def grouped(tokens, groups=8):
    return torch.arange(tokens) * groups // tokens


def smooth(tokens, width, seed=0):
    """Rows of a decaying spectrum whose groups are shifted a little, as sequences are."""
    own = 0.3 * normal(8, width, seed=seed + 1)[grouped(tokens)]
    return (normal(tokens, width, seed=seed) + own) * torch.arange(1, width + 1) ** -0.5


@pytest.mark.parametrize(
    ("tokens", "width", "close"),
    [(500, 64, 1e-9), (64, 500, 1e-9), (1040, 300, 1e-9), (1200, 1100, 1e-5), (1100, 1200, 1e-5)],
)
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_axes_have_the_eigenvalues_of_the_spectrum_and_their_groups_sum_to_them(
    tokens, width, close, offset
):
    hidden, group = (smooth(tokens, width) * 1024).round() / 1024 + offset, grouped(tokens)
    axes, want = principal_axes(hidden, group, 8), spectrum(hidden)
    largest = want[0].item()
    torch.testing.assert_close(axes.eigenvalues, want, rtol=close, atol=close * largest)
    assert (axes.eigenvalues.diff() <= 0).all()
    assert torch.equal(axes.counts, group.bincount().double())
    whole = axes.squares.sum(dim=0) / tokens
    # Coordinates are computed in float32, or in eigenvectors of float32.
    torch.testing.assert_close(whole, axes.eigenvalues, rtol=1e-5, atol=1e-6 * largest)
    trace = (hidden - hidden.mean(dim=0)).square().sum(dim=1)
    by_group = torch.stack([trace[group == number].sum() for number in range(8)])
    torch.testing.assert_close(axes.squares.sum(dim=1), by_group, rtol=1e-5, atol=0)


RANKS = [anisotropy, effective_rank, participation_ratio]


def descending(values):
    return torch.tensor(values, dtype=torch.float64).sort(descending=True).values


def with_spectrum(tokens, lambdas, seed=0):
    """Rows whose covariance has exactly these eigenvalues, turned at random."""
    width = len(lambdas)
    noise = normal(tokens, width, seed=seed)
    left = torch.linalg.qr(noise - noise.mean(dim=0)).Q
    turn = torch.linalg.qr(normal(width, width, seed=seed + 1)).Q
    return (left * (tokens * torch.as_tensor(lambdas, dtype=torch.float64)).sqrt()) @ turn


@pytest.mark.parametrize("kernel", RANKS[1:])
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


@pytest.mark.parametrize("kernel", [*RANKS, power_law])
@pytest.mark.parametrize("lambdas", [torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_ranks_name_the_shape_they_cannot_use(kernel, lambdas):
    with pytest.raises(ValueError, match=r"expected eigenvalues \[rank\]") as caught:
        kernel(lambdas)
    assert str(list(lambdas.shape)) in str(caught.value)


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
    # Eigenvalues computed elsewhere come in any order, and below 0 by rounding.
    other = torch.cat([torch.tensor([-1e-20]).double(), values.flip(0)])
    assert power_law(other).alpha.item() == pytest.approx(fit.alpha.item(), rel=1e-9)
    assert effective_rank(other).item() == pytest.approx(effective_rank(values).item())


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
