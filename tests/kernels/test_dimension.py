import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import few_examples, generator, normal, seeds
from scipy.optimize import minimize_scalar
from scipy.spatial import cKDTree
from scipy.special import gammainc

from geomon.kernels.dimension import (
    SCALES,
    gride,
    twonn,
    twonn_censored,
    twonn_of_each,
    twonn_protocols,
)
from geomon.kernels.neighbours import nearest


def pareto(points, dimension, seed=0):
    """The exact model of TwoNN: r1 = 1 and r2 = U^(-1/d)."""
    uniform = torch.rand(points, dtype=torch.float64, generator=generator(seed))
    return torch.stack([torch.ones_like(uniform), uniform ** (-1 / dimension)], dim=1)


def beta(points, dimension, k, seed=0):
    """The exact model of Gride: (r_k / r_2k)^d ~ Beta(k, k); the other columns are not read."""
    share = np.random.RandomState(seed).beta(k, k, size=points)
    distances = torch.ones(points, 2 * k, dtype=torch.float64)
    distances[:, k:] = torch.from_numpy(share ** (-1 / dimension))[:, None]
    return distances


def torus(points, dimension, seed=0):
    """Flat torus in twice the width: known dimension, no boundary, no curvature in the metric."""
    angle = 2 * math.pi * torch.rand(points, dimension, generator=generator(seed))
    return torch.cat([angle.double().cos(), angle.double().sin()], dim=1)


def hyper_ball(points, dimension, seed):
    """hyperBall of scikit-dimension 0.5: uniform in the unit ball."""
    x = np.random.RandomState(seed).normal(size=(points, dimension))
    square = np.sum(x**2, axis=1)
    radius = gammainc(dimension / 2, square / 2) ** (1 / dimension) / np.sqrt(square)
    return torch.from_numpy(x * radius[:, None])


def distances_by_tree(rows, k):
    return torch.from_numpy(cKDTree(rows.numpy()).query(rows.numpy(), k=k + 1)[0][:, 1:])


def twonn_by_least_squares(distances, discard=0.1):
    r1, r2 = distances.double().numpy()[:, :2].T
    valid = (r1 > 0) & np.isfinite(r2)
    mu = np.sort(r2[valid] / r1[valid])
    cumulative = np.arange(1, len(mu) + 1) / len(mu)
    kept = len(mu) - math.ceil(Fraction(str(discard)) * len(mu))
    kept -= kept == len(mu)
    x, y = np.log(mu[:kept]), -np.log(1 - cumulative[:kept])
    return np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]


def gride_by_maximisation(distances, k):
    """The likelihood of Denti et al., with N - 1 for N in front of log d, maximised numerically."""
    near, far = distances.double().numpy()[:, k - 1], distances.double().numpy()[:, 2 * k - 1]
    x = np.log(far / near)

    def loss(d):
        # log(e^(dx) - 1), which overflows as it stands.
        own = (k - 1) * (d * x + np.log(-np.expm1(-d * x))).sum() if k > 1 else 0.0
        return -((len(x) - 1) * math.log(d) + own - d * (2 * k - 1) * x.sum())

    return minimize_scalar(loss, bounds=(1e-3, 300), method="bounded", options={"xatol": 1e-9}).x


@pytest.mark.parametrize("points", [3, 10, 11, 99, 500, 4096])
@pytest.mark.parametrize("discard", [0.0, 0.1, 0.25, 0.8])
def test_twonn_agrees_with_a_least_squares_fit(points, discard):
    distances = pareto(points, 7, seed=points)
    if math.ceil(Fraction(str(discard)) * points) == points:
        assert twonn(distances, discard).isnan()
        return
    want = twonn_by_least_squares(distances, discard)
    assert twonn(distances, discard).item() == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("k", SCALES)
@pytest.mark.parametrize("points", [10, 500, 4096])
@pytest.mark.parametrize("dimension", [0.7, 3, 60])
def test_gride_maximises_the_likelihood(k, points, dimension):
    distances = beta(points, dimension, k, seed=k)
    want = gride_by_maximisation(distances, k)
    assert gride(distances, [k]).item() == pytest.approx(want, rel=1e-6)


def test_standard_deviations_on_the_exact_model_are_those_published():
    draws = [pareto(2000, 10, seed=s) for s in range(600)]
    fit = torch.stack([twonn(draw) for draw in draws])
    likelihood = torch.cat([gride(draw, [1]) for draw in draws])
    early = torch.stack([twonn(draw, discard=0.8) for draw in draws])
    # 600 draws know a standard deviation to 3 %.
    assert fit.std().item() == pytest.approx(0.245, rel=0.1)
    assert likelihood.std().item() == pytest.approx(0.226, rel=0.1)
    assert likelihood.mean().item() == pytest.approx(10, abs=4 * 0.224 / math.sqrt(600))
    assert fit.mean().item() == pytest.approx(10, abs=0.05)
    assert (early.std() / fit.std()).item() == pytest.approx(2.3, rel=0.15)


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_estimators_find_the_dimension_of_a_torus(dimension):
    distances = nearest(torus(4096, dimension, seed=dimension), k=16).distances
    error = 1.1 * dimension / math.sqrt(4096)
    # Neighbours share points, which makes the ratios dependent, and curvature bends the larger k.
    assert abs(twonn(distances).item() - dimension) < 4 * error + 0.02 * dimension
    for estimate in gride(distances, [1, 2, 4, 8]).tolist():
        assert abs(estimate - dimension) < 4 * error + 0.04 * dimension


def test_padded_ball_gives_the_published_digits():
    rows = torch.nn.functional.pad(hyper_ball(300, 5, 0), (0, 5))
    # DADApy fits the slope by iteration and stops 2.7e-12 from the least squares.
    fit = twonn(nearest(rows, k=2).distances)
    assert fit.item() == pytest.approx(4.362176532655348, rel=1e-11)
    got = gride(nearest(rows, k=64).distances)
    assert got[0].item() == pytest.approx(4.113138917297787, rel=1e-12)
    want = [4.1131, 4.6669, 4.3124, 4.3983, 4.2753, 3.8385]
    assert got.tolist() == pytest.approx(want, abs=6e-5)


def test_dimension_under_a_common_mean_where_the_float32_expansion_gives_nan():
    mean = normal(768, seed=1)
    cloud = normal(1000, 10) @ normal(10, 768, seed=2) / math.sqrt(768)
    rows = (cloud + 3000 * mean / mean.norm()).float()
    norms = rows.square().sum(dim=1)
    squared = (norms[:, None] + norms - 2 * rows @ rows.T).clamp(min=0).fill_diagonal_(math.inf)
    naive = squared.sqrt().sort(dim=1).values[:, :2]
    # Squared distances of about 1 under squared norms of 9e6, whose spacing is 1: most r1 are 0.
    assert (naive[:, 0] == 0).double().mean() > 0.5
    want = twonn(distances_by_tree(rows.double(), 2)).item()
    assert want == pytest.approx(9.3, abs=1)
    assert twonn(nearest(rows, k=2).distances).item() == pytest.approx(want, rel=1e-10)


def test_scales_without_enough_neighbours_are_nan_and_the_others_are_not():
    got = gride(beta(100, 4, 5), [1, 2, 4, 5, 6, 8, 32])
    assert got.shape == (7,)
    assert got.dtype == torch.float64
    assert got.isnan().tolist() == [False] * 4 + [True] * 3


def test_ties_count_as_ratios_of_one():
    distances = beta(400, 5, 4)
    distances[:40] = 1
    barely = distances.clone()
    barely[:40, 4:] = 1 + 1e-12
    torch.testing.assert_close(
        gride(distances, [2, 4])[1], gride(barely, [4])[0], rtol=1e-9, atol=0
    )
    torch.testing.assert_close(twonn(distances[:, 3:5]), twonn(barely[:, 3:5]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("discard", [-0.1, 1.0, 1.5, math.nan])
def test_twonn_names_a_share_out_of_range(discard):
    with pytest.raises(ValueError, match=rf"share in \[0, 1\), got {discard}"):
        twonn(pareto(10, 2), discard)


@pytest.mark.parametrize("scales", [[0], [1, -1]])
def test_gride_names_scales_out_of_range(scales):
    with pytest.raises(ValueError, match=r"1 or more, got \[") as caught:
        gride(pareto(10, 2), scales)
    assert str(scales) in str(caught.value)


def replicates(points, dimension, times, seed=0):
    distances = (pareto(points, dimension, seed=seed * times + i) for i in range(times))
    pairs = [[v.item() for v in twonn_censored(sample)] for sample in distances]
    return np.array(pairs).T


def by_maximisation(distances, discard):
    """The likelihood of a sample of which the largest are only known to be beyond the last kept."""
    log_mu = np.sort(np.log((distances[:, 1] / distances[:, 0]).numpy()))
    kept = len(log_mu) - math.ceil(Fraction(str(discard)) * len(log_mu))

    def loss(d):
        density = math.log(d) - (d + 1) * log_mu[:kept]
        beyond = (len(log_mu) - kept) * -d * log_mu[kept - 1]
        return -(density.sum() + beyond)

    d = minimize_scalar(loss, bounds=(1e-3, 300), method="bounded", options={"xatol": 1e-9}).x
    return d * (kept - 1) / kept  # which takes the bias away


@pytest.mark.parametrize("points", [20, 500, 2000])
@pytest.mark.parametrize("discard", [0.0, 0.1, 0.25, 0.8])
@pytest.mark.parametrize("dimension", [0.7, 5, 60])
def test_censored_estimate_maximises_the_likelihood(points, discard, dimension):
    distances = pareto(points, dimension, seed=points)
    want = by_maximisation(distances, discard)
    assert twonn_censored(distances, discard).value.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("points", "dimension"), [(500, 2), (500, 30), (2000, 10)])
def test_estimate_is_unbiased_and_its_interval_covers(points, dimension):
    values, errors = replicates(points, dimension, times=2000)
    kept = int(points * 0.9)
    # Gamma(k, 1/d) below the fraction: the standard deviation is d / sqrt(k - 2) exactly.
    deviation = dimension / math.sqrt(kept - 2)
    assert abs(values.mean() - dimension) < 4 * deviation / math.sqrt(2000)
    assert values.std() == pytest.approx(deviation, rel=0.06)
    assert errors.mean() == pytest.approx(deviation, rel=0.01)
    covered = (np.abs(values - dimension) <= 1.96 * errors).mean()
    assert 0.93 < covered < 0.97
    within_one = (np.abs(values - dimension) <= errors).mean()
    assert within_one == pytest.approx(0.683, abs=0.04)


@pytest.mark.parametrize("discard", [-0.1, 1.0, 2.0, math.nan])
def test_censored_estimate_refuses_a_share_that_is_none(discard):
    with pytest.raises(ValueError, match="discard is a share"):
        twonn_censored(torch.ones(4, 2), discard)


@few_examples
@given(seed=seeds, points=st.integers(1, 60))
def test_protocols_from_one_sort_are_those_of_each_alone(seed, points):
    distances = pareto(points, 5, seed=seed)
    distances[::7] = 0  # points that are left out
    found = twonn_protocols(distances)
    want = (
        twonn(distances, 0.1),
        twonn_censored(distances, 0.1).value,
        twonn(distances, 0),
        twonn(distances, 0.8),
    )
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- several sets at once --


@few_examples
@given(st.integers(1, 5), st.integers(3, 50), st.integers(0, 10**6), st.floats(0, 0.99))
def test_several_sets_are_fitted_as_each_alone(count, size, seed, discard):
    distances = normal(count, size, 2, seed=seed).abs().sort(dim=2).values
    distances[0, : size // 3, 0] = 0  # copies
    found = twonn_of_each(distances, discard)
    expected = torch.stack([twonn(own, discard) for own in distances])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


def test_sets_without_an_answer_and_the_smallest_with_one():
    nan = twonn_of_each(torch.tensor([[[1.0, 2.0], [1.0, 3.0]], [[1.0, 1.0], [0.0, 1.0]]]))
    assert nan.isnan().all()  # two points, and one
    three = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 5.0]])
    for discard in (0.1, 0.5):  # of which one ratio is kept
        assert twonn_of_each(three[None], discard).item() == pytest.approx(twonn(three, discard))
    lattice = twonn_of_each(torch.ones(1, 5, 2))
    assert lattice.item() == math.inf
    with pytest.raises(ValueError, match=r"\[sets, points, k\]"):
        twonn_of_each(torch.ones(2, 5))
