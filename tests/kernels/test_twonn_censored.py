import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize_scalar

from geomon.kernels.dimension import (
    Estimate,
    gride,
    twonn,
    twonn_censored,
    twonn_protocols,
)

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def pareto(points, dimension, seed=0):
    """The exact model of TwoNN: r1 = 1 and r2 = U^(-1/d)."""
    uniform = torch.rand(points, dtype=torch.float64, generator=generator(seed))
    return torch.stack([torch.ones_like(uniform), uniform ** (-1 / dimension)], dim=1)


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


def test_nothing_discarded_is_gride_at_scale_one():
    distances = pareto(800, 12)
    got = twonn_censored(distances, discard=0.0)
    assert got.value.item() == pytest.approx(gride(distances, [1]).item(), rel=1e-12)


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


@pytest.mark.parametrize("points", [30, 500])
@pytest.mark.parametrize("discard", [0.0, 0.1, 0.8])
def test_the_denominator_is_gamma_distributed_whatever_is_discarded(points, discard):
    kept, dimension = points - math.ceil(Fraction(str(discard)) * points), 7.0
    pivots = [
        (kept - 1) / twonn_censored(pareto(points, dimension, seed=i), discard).value.item()
        for i in range(1000)
    ]
    fit = stats.kstest(np.array(pivots) * dimension, stats.gamma(kept).cdf)
    assert fit.pvalue > 1e-3


def test_censored_estimate_is_less_noisy_than_the_fit():
    samples = [pareto(500, 10, seed=i) for i in range(600)]
    fits = np.array([twonn(sample).item() for sample in samples])
    censored = np.array([twonn_censored(sample).value.item() for sample in samples])
    assert censored.std() < fits.std()


@pytest.mark.parametrize("points", [500, 4000, 32000])
def test_censored_estimate_converges(points):
    value, error = twonn_censored(pareto(points, 9, seed=points))
    assert abs(value.item() - 9) < 4 * 9 / math.sqrt(0.9 * points)
    assert error.item() == pytest.approx(9 / math.sqrt(0.9 * points), rel=0.15)


def test_what_is_discarded_may_be_anything_larger():
    distances = pareto(1000, 5)
    broken = distances.clone()
    largest = (distances[:, 1]).sort().indices[-100:]
    broken[largest, 1] *= torch.linspace(1, 1e6, 100).double()
    for got, want in zip(twonn_censored(broken), twonn_censored(distances), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@given(seeds, st.integers(3, 200), st.sampled_from([1e-12, 0.1, 3.0, 1e12]))
@few_examples
def test_censored_estimate_does_not_change_with_scale_or_order(seed, points, scale):
    distances = pareto(points, 4, seed=seed)
    order = torch.randperm(points, generator=generator(seed))
    want = twonn_censored(distances)
    for other in (scale * distances, distances[order], torch.cat([distances, distances], dim=1)):
        for got, value in zip(twonn_censored(other), want, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-9, atol=0, equal_nan=True)


@given(seeds, st.floats(0.1, 50))
@few_examples
def test_a_power_of_the_ratios_divides_the_estimate(seed, power):
    distances = pareto(100, 4, seed=seed)
    got, want = twonn_censored(distances**power), twonn_censored(distances)
    torch.testing.assert_close(got.value * power, want.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(got.standard_error * power, want.standard_error, rtol=1e-9, atol=0)


def test_points_on_top_of_each_other_or_without_a_neighbour_are_left_out():
    distances = pareto(300, 6)
    bad = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, math.inf], [math.nan, 1.0]]).double()
    for got, want in zip(
        twonn_censored(torch.cat([bad, distances])), twonn_censored(distances), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("points", [0, 1, 2])
def test_too_few_points_are_nan(points):
    got = twonn_censored(pareto(points, 4))
    assert got.value.isnan()
    assert got.standard_error.isnan()


def test_too_few_points_kept_are_nan():
    assert twonn_censored(pareto(10, 4), discard=0.85).value.isnan()
    assert not twonn_censored(pareto(10, 4), discard=0.75).value.isnan()


def test_ratios_of_one_have_no_finite_dimension():
    got = twonn_censored(torch.ones(10, 2))
    assert got.value.item() == math.inf
    assert got.standard_error.item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_censored_estimate_takes_any_floating_dtype_and_leaves_it_alone(dtype):
    distances = (10 * pareto(200, 6)).to(dtype)
    before = distances.clone()
    got = twonn_censored(distances)
    assert isinstance(got, Estimate)
    assert torch.equal(distances, before)
    for value, want in zip(got, twonn_censored(distances.double()), strict=True):
        assert value.dtype == torch.float64
        assert value.shape == ()
        torch.testing.assert_close(value, want, rtol=0, atol=0)


@pytest.mark.parametrize("distances", [torch.ones(4), torch.ones(4, 1), torch.ones(4, 2, 2)])
def test_censored_estimate_names_the_shape_it_cannot_use(distances):
    with pytest.raises(ValueError, match="expected distances") as caught:
        twonn_censored(distances)
    assert str(list(distances.shape)) in str(caught.value)


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
