import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.kernels.profile import correlation, profile_shape

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@given(seeds, st.integers(3, 60), st.floats(-3, 3), st.sampled_from([0, 1, 3]))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_correlation_agrees_with_scipy(seed, layers, slope, decimals):
    # One decimal makes ties, of which the ranks share the mean.
    x = normal(layers, seed=seed).round(decimals=decimals)
    y = (slope * x + normal(layers, seed=seed + 1)).round(decimals=decimals)
    if (x == x[0]).all() or (y == y[0]).all():
        return
    got = correlation(x, y)
    pearson = stats.pearsonr(x.numpy(), y.numpy())
    spearman = stats.spearmanr(x.numpy(), y.numpy())
    assert got.pearson.item() == pytest.approx(pearson.statistic, abs=1e-12)
    assert got.spearman.item() == pytest.approx(spearman.statistic, abs=1e-12)
    assert got.pearson_p.item() == pytest.approx(pearson.pvalue, rel=1e-6, abs=1e-9)
    assert got.spearman_p.item() == pytest.approx(spearman.pvalue, rel=1e-6, abs=1e-9)
    assert got.n.item() == layers


def test_p_values_keep_their_digits_next_to_a_correlation_of_one():
    x = torch.arange(24, dtype=torch.float64)
    y = x + 0.01 * normal(24)
    got = correlation(x, y)
    want = stats.pearsonr(x.numpy(), y.numpy()).pvalue
    assert 0 < want < 1e-40
    assert got.pearson_p.item() == pytest.approx(want, rel=1e-6)


def test_p_values_of_independent_series_are_uniform():
    fits = [correlation(normal(13, seed=2 * i), normal(13, seed=2 * i + 1)) for i in range(500)]
    for name in ("pearson_p", "spearman_p"):
        values = np.array([getattr(fit, name).item() for fit in fits])
        assert stats.kstest(values, stats.uniform.cdf).pvalue > 1e-3


def test_a_curve_that_always_rises_has_a_rank_correlation_of_one():
    x = torch.arange(1.0, 13.0)
    got = correlation(x, x.exp())
    assert got.spearman.item() == pytest.approx(1, abs=1e-12)
    assert got.spearman_p.item() == pytest.approx(0, abs=1e-30)
    assert got.pearson.item() < 0.9
    assert correlation(x, -x).pearson.item() == pytest.approx(-1, abs=1e-12)


@given(seeds, st.integers(3, 30), st.sampled_from([1e-150, 0.1, 7.0, 1e150]))
@few_examples
def test_correlation_does_not_change_with_scale_shift_order_or_roles(seed, layers, scale):
    x, y = normal(layers, seed=seed), normal(layers, seed=seed + 1)
    order = torch.randperm(layers, generator=torch.Generator().manual_seed(seed))
    want = correlation(x, y)
    for got in (
        correlation(scale * x, y),
        correlation(x, y + 5),
        correlation(x[order], y[order]),
        correlation(y, x),
    ):
        for value, other in zip(got, want, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-8, atol=1e-10)
    opposite = correlation(-x, y)
    torch.testing.assert_close(opposite.pearson, -want.pearson)
    torch.testing.assert_close(opposite.spearman, -want.spearman)


def test_correlation_far_from_zero_where_sums_of_products_cancel():
    x, y = (normal(40) * 1024).round() / 1024, (normal(40, seed=1) * 1024).round() / 1024
    far_x, far_y = x + 1e9, y + 1e9
    n = 40
    naive = (far_x * far_y).sum() / n - far_x.mean() * far_y.mean()
    true = ((x - x.mean()) * (y - y.mean())).mean()
    assert abs(naive - true) > abs(true)
    torch.testing.assert_close(correlation(far_x, far_y).pearson, correlation(x, y).pearson)


def test_layers_without_a_value_are_left_out():
    x, y = normal(12), normal(12, seed=1)
    broken = torch.cat([x, tensor(1.0, math.nan, math.inf)])
    other = torch.cat([y, tensor(math.nan, 2.0, 3.0)])
    for value, want in zip(correlation(broken, other), correlation(x, y), strict=True):
        torch.testing.assert_close(value, want)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (tensor(), tensor()),
        (tensor(1, 2), tensor(3, 5)),
        (tensor(1, 2, 3), tensor(0.1, 0.1, 0.1)),
        (tensor(7, 7, 7, 7), tensor(1, 2, 3, 4)),
        (tensor(1, 2, math.nan), tensor(3, 5, 6)),
    ],
)
def test_series_that_say_nothing_are_nan(x, y):
    got = correlation(x, y)
    assert all(value.isnan() for value in got[:4])
    assert got.n.item() == (torch.isfinite(x) & torch.isfinite(y)).sum()


def test_three_layers_have_a_p_value():
    got = correlation(tensor(1, 2, 3), tensor(1, 3, 2))
    want = stats.pearsonr([1, 2, 3], [1, 3, 2])
    assert got.pearson_p.item() == pytest.approx(want.pvalue, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_profiles_take_any_floating_dtype_and_leave_it_alone(dtype):
    x, y = (2e4 * normal(13)).clamp(-6e4, 6e4).to(dtype), normal(13, seed=1).to(dtype)
    before = x.clone(), y.clone()
    results = [*correlation(x, y), *profile_shape(x)]
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    wants = [*correlation(x.double(), y.double()), *profile_shape(x.double())]
    for got, want in zip(results, wants, strict=True):
        assert got.dtype == torch.float64
        assert got.shape == ()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.ones(3), torch.ones(4)), (torch.ones(3, 1), torch.ones(3, 1)), (torch.ones(()),) * 2],
)
def test_correlation_names_the_shapes_it_cannot_use(x, y):
    with pytest.raises(ValueError, match="two series") as caught:
        correlation(x, y)
    assert f"{list(x.shape)} and {list(y.shape)}" in str(caught.value)


@pytest.mark.parametrize("layers", [2, 3, 5, 13, 25])
@pytest.mark.parametrize("peak", [0, 1, -1])
def test_the_peak_is_where_it_was_put(layers, peak):
    values = torch.zeros(layers)
    values[peak] = 1
    assert profile_shape(values).peak_depth.item() == pytest.approx(
        (peak % layers) / (layers - 1), abs=1e-15
    )


def test_bulge_of_a_bell_a_bowl_and_a_line():
    depth = torch.linspace(0, 1, 13, dtype=torch.float64)
    assert profile_shape(2 + 3 * depth).bulge.item() == pytest.approx(0, abs=1e-12)
    bell = 0.2 + 4 * depth * (1 - depth)
    inner = 0.2 + np.mean([4 * i / 12 * (1 - i / 12) for i in range(4, 9)])
    assert profile_shape(bell).bulge.item() == pytest.approx((inner - 0.2) / 0.2)
    assert profile_shape(bell).peak_depth.item() == 0.5
    assert profile_shape(2 - bell).bulge.item() < 0
    # Below 0 a bell is still a bell.
    assert profile_shape(bell - 10).bulge.item() > 0


@pytest.mark.parametrize(
    ("layers", "middle"),
    [(3, [1]), (4, [1, 2]), (5, [2]), (6, [2, 3]), (7, [2, 3, 4]), (13, [4, 5, 6, 7, 8])],
)
def test_the_middle_third_is_the_layers_of_depth_one_third_to_two_thirds(layers, middle):
    for layer in range(1, layers - 1):
        values = torch.ones(layers)
        values[layer] = 2
        want = 1 / len(middle) if layer in middle else 0
        assert profile_shape(values).bulge.item() == pytest.approx(want, abs=1e-12)


@given(seeds, st.integers(3, 40), st.sampled_from([1e-100, 0.3, 1e100]))
@few_examples
def test_shape_does_not_change_with_the_scale_and_turns_with_the_layers(seed, layers, scale):
    values = normal(layers, seed=seed)
    want = profile_shape(values)
    scaled, turned = profile_shape(scale * values), profile_shape(values.flip(0))
    torch.testing.assert_close(scaled.bulge, want.bulge, rtol=1e-9, atol=1e-12)
    assert scaled.peak_depth.item() == want.peak_depth.item()
    torch.testing.assert_close(turned.bulge, want.bulge, rtol=1e-9, atol=1e-12)
    assert turned.peak_depth.item() == pytest.approx(1 - want.peak_depth.item(), abs=1e-12)


def test_missing_layers_keep_the_depth_of_the_others():
    shape = profile_shape(tensor(1, math.nan, 2, 5, 1))
    assert shape.peak_depth.item() == 0.75
    assert shape.bulge.item() == pytest.approx(1)
    assert profile_shape(tensor(math.nan, 2, 3)).bulge.isnan()
    assert profile_shape(tensor(math.nan, 2, 3)).peak_depth.item() == 1
    assert profile_shape(tensor(1, math.nan, 3)).bulge.isnan()
    assert profile_shape(tensor(math.nan, math.nan)).peak_depth.isnan()


def test_the_first_of_equal_peaks_is_the_peak():
    assert profile_shape(tensor(0, 4, 1, 4, 0)).peak_depth.item() == 0.25


def test_one_or_two_layers_have_no_middle():
    assert profile_shape(tensor(3)).peak_depth.isnan()
    assert profile_shape(tensor(3)).bulge.isnan()
    assert profile_shape(tensor(3, 4)).bulge.isnan()
    assert profile_shape(tensor(-1, 5, 1)).bulge.isnan()  # nothing to be relative to


@pytest.mark.parametrize("values", [torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_profile_shape_names_the_shape_it_cannot_use(values):
    with pytest.raises(ValueError, match=r"expected values \[layers\]") as caught:
        profile_shape(values)
    assert str(list(values.shape)) in str(caught.value)
