import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.spatial import cKDTree
from scipy.special import gammainc

from geomon.kernels.dimension import SCALES, gride, twonn, twonn_censored
from geomon.kernels.neighbours import nearest, unique_rows

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


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


def hyper_sphere(points, dimension, seed):
    """hyperSphere of scikit-dimension 0.5: uniform on the unit sphere in width dimension + 1."""
    x = np.random.RandomState(seed).randn(points, dimension + 1)
    return torch.from_numpy(x / np.linalg.norm(x, axis=1)[:, None])


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


@pytest.mark.parametrize("k", [2, 8, 32])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_gride_maximises_the_likelihood_of_ratios_that_follow_no_dimension(k, spread):
    distances = torch.ones(450, 2 * k, dtype=torch.float64)
    distances[:, k:] = (spread * normal(450, 1)).exp().clamp(max=500).exp()
    want = gride_by_maximisation(distances, k)
    assert gride(distances, [k]).item() == pytest.approx(want, rel=1e-6)


def test_gride_at_scale_one_is_the_mean_of_the_log_ratios():
    distances = pareto(800, 12)
    log_mu = (distances[:, 1] / distances[:, 0]).log()
    torch.testing.assert_close(gride(distances, [1])[0], 799 / log_mu.sum())


@pytest.mark.parametrize("dimension", [1, 5, 30])
def test_estimators_recover_the_dimension_of_evenly_spread_quantiles(dimension):
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    distances = torch.stack([torch.ones_like(uniform), uniform ** (-1 / dimension)], dim=1)
    assert twonn(distances).item() == pytest.approx(dimension, rel=1e-3)
    assert gride(distances, [1]).item() == pytest.approx(dimension, rel=1e-3)


@pytest.mark.parametrize("dimension", [2, 10, 50])
def test_error_of_twonn_on_the_exact_model_shrinks_with_the_root_of_the_points(dimension):
    errors = []
    for points in (250, 4000):
        fits = torch.stack([twonn(pareto(points, dimension, seed=s)) for s in range(200)])
        error = (fits - dimension).square().mean().sqrt().item()
        # 1.1 d / sqrt(N), measured on 200 draws to 5 %; the bias of F = i/N adds a little.
        assert error == pytest.approx(1.1 * dimension / math.sqrt(points), rel=0.25)
        errors.append(error)
    assert errors[1] < errors[0] / 3


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


@pytest.mark.parametrize("k", SCALES)
def test_gride_on_the_exact_model_is_within_four_standard_errors(k):
    points, dimension = 500, 8
    draws = torch.cat([gride(beta(points, dimension, k, seed=s), [k]) for s in range(100)])
    error = draws.std().item()
    assert error <= 1.15 * dimension / math.sqrt(points)
    # The correction by N - 1 leaves a bias of order d/N at k > 1.
    assert abs(draws.mean().item() - dimension) < 4 * error / 10 + dimension / points


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_estimators_find_the_dimension_of_a_torus(dimension):
    distances = nearest(torus(4096, dimension, seed=dimension), k=16).distances
    error = 1.1 * dimension / math.sqrt(4096)
    # Neighbours share points, which makes the ratios dependent, and curvature bends the larger k.
    assert abs(twonn(distances).item() - dimension) < 4 * error + 0.02 * dimension
    for estimate in gride(distances, [1, 2, 4, 8]).tolist():
        assert abs(estimate - dimension) < 4 * error + 0.04 * dimension


def test_error_on_a_torus_shrinks_as_points_are_added():
    def error(points, draws):
        found = [
            twonn(nearest(torus(points, 3, seed=seed), k=2).distances).item()
            for seed in range(draws)
        ]
        return math.sqrt(sum((f - 3) ** 2 for f in found) / draws)

    assert error(3000, draws=10) < 0.6 * error(150, draws=30)


def test_gaussian_noise_has_a_ceiling_far_below_its_width():
    noise = torch.randn(2048, 768, generator=generator(0))
    # Measured: 153; one draw varies by about 1.1 d / sqrt(N) = 4.
    assert twonn(nearest(noise, k=2).distances).item() == pytest.approx(153, abs=12)


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (hyper_ball(500, 5, 0), 4.159093274086606),
        (hyper_sphere(500, 30, 1), 21.534662028474745),
        (torch.nn.functional.pad(hyper_ball(300, 5, 0), (0, 5)), 4.362176532643619),
    ],
    ids=["ball", "sphere", "padded ball"],
)
def test_twonn_gives_the_digits_of_scikit_dimension(rows, want):
    assert twonn(nearest(rows, k=2).distances).item() == pytest.approx(want, rel=1e-12)
    assert twonn(distances_by_tree(rows, 2)).item() == pytest.approx(want, rel=1e-12)


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


def test_copied_rows_are_harmless_once_taken_out():
    rows = normal(2000, 10)
    copied = torch.cat([rows, rows[:160]])[torch.randperm(2160, generator=generator(1))]
    distinct = copied[unique_rows(copied)]
    assert len(distinct) == 2000
    want = twonn(nearest(rows, k=2).distances)
    torch.testing.assert_close(twonn(nearest(distinct, k=2).distances), want, rtol=1e-12, atol=0)
    assert want.item() == pytest.approx(9.6, abs=0.9)


def test_points_at_distance_zero_or_infinity_are_left_out():
    distances = torch.cat([pareto(500, 6), torch.zeros(40, 2)])
    distances[500:520, 1] = 1
    distances = torch.cat([distances, torch.tensor([[1.0, math.inf], [math.nan, math.nan]])])
    distances = distances[torch.randperm(len(distances), generator=generator(3))]
    torch.testing.assert_close(twonn(distances), twonn(pareto(500, 6)))
    torch.testing.assert_close(gride(distances, [1]), gride(pareto(500, 6), [1]))


@pytest.mark.parametrize("points", [0, 1, 2])
def test_fewer_than_three_points_give_nan(points):
    distances = torch.cat([pareto(points, 6), torch.zeros(9, 2, dtype=torch.float64)])
    for few in (distances, distances[:points]):
        assert twonn(few).isnan()
        assert gride(few, [1]).isnan().all()
        assert twonn(few).dtype == gride(few, [1]).dtype == torch.float64
    assert gride(beta(points, 3, 4), [4]).isnan().all()


def test_scales_without_enough_neighbours_are_nan_and_the_others_are_not():
    got = gride(beta(100, 4, 5), [1, 2, 4, 5, 6, 8, 32])
    assert got.shape == (7,)
    assert got.dtype == torch.float64
    assert got.isnan().tolist() == [False] * 4 + [True] * 3


def test_gride_of_no_scales_is_empty():
    assert gride(pareto(100, 3), []).shape == (0,)


@pytest.mark.parametrize("points", [3, 500])
def test_equal_distances_everywhere_give_infinity(points):
    distances = torch.ones(points, 4)
    assert gride(distances, [1, 2]).tolist() == [math.inf, math.inf]
    assert twonn(distances).item() == math.inf


def test_ties_count_as_ratios_of_one():
    distances = beta(400, 5, 4)
    distances[:40] = 1
    barely = distances.clone()
    barely[:40, 4:] = 1 + 1e-12
    torch.testing.assert_close(
        gride(distances, [2, 4])[1], gride(barely, [4])[0], rtol=1e-9, atol=0
    )
    torch.testing.assert_close(twonn(distances[:, 3:5]), twonn(barely[:, 3:5]), rtol=1e-9, atol=0)


@given(seeds, st.integers(3, 40), st.sampled_from([1e-12, 1e-3, 7.0, 1e12]))
@few_examples
def test_dimension_does_not_depend_on_unit_or_order(seed, points, unit):
    distances = normal(points, 8, seed=seed).abs().add(0.01).sort(dim=1).values
    order = torch.randperm(points, generator=generator(seed))
    for other in (distances * unit, distances[order]):
        torch.testing.assert_close(twonn(other), twonn(distances), rtol=1e-9, atol=0)
        torch.testing.assert_close(
            gride(other, [1, 2, 4]), gride(distances, [1, 2, 4]), rtol=1e-9, atol=0
        )


@given(seeds, st.integers(3, 40), st.sampled_from([0.25, 2.0, 5.0]))
@few_examples
def test_raising_distances_to_a_power_divides_the_dimension_by_it(seed, points, power):
    distances = normal(points, 8, seed=seed).abs().add(0.01).sort(dim=1).values
    torch.testing.assert_close(twonn(distances**power), twonn(distances) / power, rtol=1e-8, atol=0)
    torch.testing.assert_close(
        gride(distances**power, [1, 2, 4]), gride(distances, [1, 2, 4]) / power, rtol=1e-8, atol=0
    )


@given(seeds, st.integers(3, 40), st.sampled_from([2, 3, 16]))
@few_examples
def test_gride_is_a_root_of_the_score(seed, points, k):
    log_ratio = (3 * normal(points, seed=seed)).exp()
    distances = torch.ones(points, 2 * k, dtype=torch.float64)
    distances[:, k:] = log_ratio.clamp(max=500).exp()[:, None]
    x = (distances[:, k]).log()
    d = gride(distances, [k])[0]
    own = (k - 1) * (x / -torch.expm1(-d * x)).sum()
    score = (points - 1) / d + own - (2 * k - 1) * x.sum()
    assert d > 0
    assert abs(score.item()) < 1e-9 * (2 * k - 1) * x.sum().item()


@given(seeds, st.integers(20, 60))
@few_examples
def test_dimension_does_not_change_under_shift_rotation_or_scale_of_the_points(seed, points):
    rows = normal(points, 5, seed=seed)
    turn = torch.linalg.qr(normal(5, 5, seed=seed + 1)).Q
    want = nearest(rows, k=8).distances
    for other in (rows + 100, rows @ turn, 1e-5 * rows):
        got = nearest(other, k=8).distances
        torch.testing.assert_close(twonn(got), twonn(want), rtol=1e-8, atol=0)
        torch.testing.assert_close(gride(got, [1, 4]), gride(want, [1, 4]), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_estimators_take_any_floating_dtype_and_leave_it_alone(dtype):
    distances = (normal(500, 8).abs() + 0.5).sort(dim=1).values.to(dtype)
    before = distances.clone()
    assert twonn(distances).dtype == gride(distances).dtype == torch.float64
    assert twonn(distances).shape == ()
    assert gride(distances).shape == (len(SCALES),)
    assert distances.dtype == dtype
    assert torch.equal(distances, before)
    assert twonn(distances).item() == twonn(distances.double()).item()
    assert gride(distances, [2]).item() == gride(distances.double(), [2]).item()


@pytest.mark.parametrize("estimate", [twonn, gride])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 0), (0,), (2, 5, 2), ()])
def test_estimators_name_the_shape_they_cannot_use(estimate, shape):
    with pytest.raises(ValueError, match=r"expected distances \[tokens, k\]") as caught:
        estimate(torch.ones(shape))
    assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize("discard", [0.0, 0.1, 0.3, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("n", [10, 500, 4100])
def test_the_share_that_is_kept_is_not_rounded_down_by_a_digit(n, discard):
    mu = torch.linspace(1.01, 3, n, dtype=torch.float64)
    neighbours = torch.stack([torch.ones_like(mu), mu], dim=1)
    kept = min(n - round(n * discard), n - 1)  # a whole number for each of these
    x = mu.log()[:kept]
    y = -torch.log1p(-torch.arange(1, kept + 1, dtype=torch.float64) / n)
    assert twonn(neighbours, discard).item() == pytest.approx((x @ y / (x @ x)).item(), rel=1e-12)


def test_equal_spacings_are_equal_though_their_distances_are_rounded():
    # Roots of rounded sums: the two distances of a row differ in the last digit.
    near = torch.full((20,), 2.0, dtype=torch.float64).sqrt()
    far = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.float64))
    neighbours = torch.stack([near, far], dim=1)
    assert (far > near).all()
    assert twonn(neighbours).isinf()
    assert twonn_censored(neighbours).value.isinf()
    assert gride(neighbours, [1]).isinf().all()


@pytest.mark.parametrize("discard", [-0.1, 1.0, 1.5, math.nan])
def test_twonn_names_a_share_out_of_range(discard):
    with pytest.raises(ValueError, match=rf"share in \[0, 1\), got {discard}"):
        twonn(pareto(10, 2), discard)


@pytest.mark.parametrize("scales", [[0], [1, -1]])
def test_gride_names_scales_out_of_range(scales):
    with pytest.raises(ValueError, match=r"1 or more, got \[") as caught:
        gride(pareto(10, 2), scales)
    assert str(scales) in str(caught.value)
