import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import gammainc

from geomon.kernels.dimension import meets_clusters
from support import definitions as by_book
from support.kernels import SCALES, gride, nearest, twonn, twonn_of_each
from support.samples import generator


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


def hyper_ball(points, dimension, seed):
    """hyperBall of scikit-dimension 0.5: uniform in the unit ball."""
    x = np.random.RandomState(seed).normal(size=(points, dimension))
    square = np.sum(x**2, axis=1)
    radius = gammainc(dimension / 2, square / 2) ** (1 / dimension) / np.sqrt(square)
    return torch.from_numpy(x * radius[:, None])


def maximum_of(loss):
    return minimize_scalar(loss, bounds=(1e-3, 300), method="bounded", options={"xatol": 1e-9}).x


def by_censored_likelihood(distances, discard):
    """The likelihood of a sample whose largest values are only known to exceed the last kept."""
    log_mu, kept = by_book.ratios(distances, discard)

    def loss(d):
        beyond = (len(log_mu) - kept) * -d * log_mu[kept - 1]
        return -((math.log(d) - (d + 1) * log_mu[:kept]).sum() + beyond)

    return maximum_of(loss) * (kept - 1) / kept  # which takes the bias away


def gride_by_maximisation(distances, k):
    """The likelihood of Denti et al., with N - 1 for N in front of log d, maximised numerically."""
    x = np.log((distances[:, 2 * k - 1] / distances[:, k - 1]).numpy())

    def loss(d):
        # log(e^(dx) - 1), which overflows as it stands.
        own = (k - 1) * (d * x + np.log(-np.expm1(-d * x))).sum() if k > 1 else 0.0
        return -((len(x) - 1) * math.log(d) + own - d * (2 * k - 1) * x.sum())

    return maximum_of(loss)


@pytest.mark.parametrize("points", [3, 4, 10, 11, 500])
@pytest.mark.parametrize("dimension", [0.7, 7, 60])
def test_twonn_is_the_fit_and_the_likelihood_of_its_ratios(points, dimension):
    near = pareto(points, dimension, seed=points)
    odd = torch.tensor([[0.0, 1.0], [1.0, math.inf]]).double()  # left out
    found, near = twonn(torch.cat([odd, near])), near.numpy()
    fits = [found.value, found.discard_0, found.discard_80]
    want = [by_book.twonn(near, discard) for discard in ("0.1", "0", "0.8")]
    assert [*map(float, fits)] == pytest.approx(want, rel=1e-10, nan_ok=True)
    assert found.censored.item() == pytest.approx(by_censored_likelihood(near, "0.1"), rel=1e-5)


@pytest.mark.parametrize("k", SCALES)
@pytest.mark.parametrize("points", [10, 4096])
@pytest.mark.parametrize("dimension", [0.7, 60])
def test_gride_maximises_the_likelihood(k, points, dimension):
    distances = beta(points, dimension, k, seed=k)
    want = gride_by_maximisation(distances, k)
    assert gride(distances, [k]).item() == pytest.approx(want, rel=1e-6)


def test_padded_ball_gives_the_published_digits():
    near = nearest(torch.nn.functional.pad(hyper_ball(300, 5, 0), (0, 5)), k=64).distances
    # DADApy fits the slope by iteration and stops 2.7e-12 from the least squares.
    assert twonn(near).value.item() == pytest.approx(4.362176532655348, rel=1e-11)
    got = gride(near).tolist()
    assert got[0] == pytest.approx(4.113138917297787, rel=1e-12)
    assert got == pytest.approx([4.1131, 4.6669, 4.3124, 4.3983, 4.2753, 3.8385], abs=6e-5)


def test_scales_without_enough_neighbours_are_nan_and_the_others_are_not():
    got = gride(beta(100, 4, 5), [1, 2, 4, 5, 6, 8, 32])
    assert got.dtype == torch.float64
    assert got.isnan().tolist() == [False] * 4 + [True] * 3
    in_any_order = gride(beta(100, 4, 5), [5, 32, 1, 1, 6, 4])
    assert torch.equal(in_any_order.nan_to_num(), got[[3, 6, 0, 0, 4, 2]].nan_to_num())


def test_ties_count_as_ratios_of_one():
    distances, barely = beta(400, 5, 4), beta(400, 5, 4)
    distances[:40] = barely[:40] = 1
    barely[:40, 4:] = 1 + 1e-12
    one, other = ([gride(near, [4]), *twonn(near[:, 3:5])] for near in (distances, barely))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=0)


def test_neighbourhoods_whose_ratios_are_rounded_to_1_have_no_finite_dimension():
    barely = torch.tensor([1.0, 1 + 1e-7]).expand(1, 5, 2)
    assert [twonn_of_each(barely, rounding=r).isinf().item() for r in (1e-6, 0)] == [True, False]


def test_the_smallest_fifth_of_five_ratios_is_one_ratio_and_enough():
    distances = torch.tensor([[1.0, mu] for mu in (3.0, 2.0, 6.0, 4.0, 5.0)], dtype=torch.float64)
    assert float(twonn(distances).discard_80) == pytest.approx(-math.log(1 - 1 / 5) / math.log(2))


def clustered(before, behind, count=100):
    """Points of even growth; some leave a cluster before neighbour 8, and some behind it.

    Logarithms of their distances to neighbours 4, 8 and 16 are 0, 1 and 2.
    """
    logs = torch.zeros(count, 16, dtype=torch.float64)
    logs[:, 7:] = 1
    logs[:, 15] = 2
    logs[:before, 7:] += 9
    logs[before : before + behind, 15] += 9
    return logs.exp()


@pytest.mark.parametrize(
    ("neighbours", "k", "meets"),
    [
        (clustered(6, 0), 8, True), (clustered(5, 0), 8, False),  # more than 5 %
        (clustered(2, 4), 8, True), (clustered(2, 5), 8, False), (clustered(0, 0), 8, False),
        (torch.ones(100, 16), 8, False), (clustered(6, 0)[:, :15], 8, False),
        (clustered(6, 0)[:, 7:9], 1, False), (clustered(6, 0)[:, [3, 7, 7, 15]], 2, True),
    ],
)  # fmt: skip
def test_a_scale_meets_clusters_whose_edges_are_before_it_and_not_behind_it(neighbours, k, meets):
    assert meets_clusters(neighbours, k) is meets


@pytest.mark.parametrize(("growth", "is_edge"), [(8.01, True), (7.99, False)])
def test_an_edge_is_five_times_the_usual_growth(growth, is_edge):
    neighbours = clustered(0, 0)
    neighbours[:6, 7:] *= math.exp(growth)  # of 2 + growth, to the usual 2
    assert meets_clusters(neighbours, 8) is is_edge
