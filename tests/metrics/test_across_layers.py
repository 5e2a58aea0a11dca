import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.analysis.profile import bulge, peak_depth, profile_of
from geomon.capture.snapshot import Layer
from geomon.kernels.dimension import twonn
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import anisotropy, spectrum
from geomon.metrics import Evaluator
from geomon.metrics import across_layers as module
from geomon.metrics.across_layers import (
    across_layers,
    correlation,
    null_values,
    profile_shape,
    ranks,
)
from geomon.metrics.table import METRICS, select
from tests.new_tensors import LargestNewTensor

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def profile(metric, numbers):
    return {f"{metric}/layer_{layer:02d}": value for layer, value in enumerate(numbers)}


def test_drift_and_cosine_are_correlated_over_layers():
    drift, cosine = [1.0, 2.0, 4.0, 9.0, 7.0], [0.1, 0.3, 0.2, 0.8, 0.9]
    found = across_layers(profile("drift_norm", drift) | profile("cosine", cosine))
    assert found["drift_cosine/pearson"] == pytest.approx(stats.pearsonr(drift, cosine).statistic)
    assert found["drift_cosine/spearman"] == pytest.approx(stats.spearmanr(drift, cosine).statistic)
    # Of the 120 orders of 5 layers 8 have a rank correlation of 0.8 or more.
    assert found["drift_cosine/spearman_p"] == pytest.approx(2 * 8 / 120)
    exact = stats.pearsonr(drift, cosine, method=stats.PermutationMethod(n_resamples=1000))
    assert found["drift_cosine/pearson_p"] == pytest.approx(exact.pvalue)


def test_a_bell_has_its_peak_in_the_middle_and_a_bulge():
    found = across_layers(profile("anisotropy", [0.1, 0.4, 0.8, 0.4, 0.1]))
    assert found["anisotropy_profile/peak_depth"] == 0.5
    assert found["anisotropy_profile/bulge"] > 1
    rising = across_layers(profile("anisotropy", [0.1, 0.2, 0.3, 0.4, 0.5]))
    assert rising["anisotropy_profile/peak_depth"] == 1
    assert rising["anisotropy_profile/bulge"] == pytest.approx(0)


def test_layers_without_a_value_keep_their_depth():
    """A layer whose rows are all equal has no anisotropy: the others stay where they are."""
    numbers = [0.1, 0.2, math.nan, 0.8, 0.3, 0.1, math.nan]
    values = profile("anisotropy", numbers)
    found = across_layers(values)
    assert found["anisotropy_profile/peak_depth"] == 3 / 6
    assert found["anisotropy_profile/peak_depth"] == peak_depth(profile_of(values, "anisotropy"))
    assert math.isnan(found["anisotropy_profile/bulge"])  # the last layer is an end
    values = profile("anisotropy", numbers[:-1])
    found = across_layers(values)
    assert found["anisotropy_profile/bulge"] == pytest.approx(bulge(numbers[:-1]))


@few_examples
@given(seeds, st.sets(st.integers(0, 7), max_size=3), st.sets(st.integers(0, 7), max_size=3))
def test_drift_and_cosine_are_paired_by_layer(seed, no_drift, no_cosine):
    drift, cosine = normal(2, 8, seed=seed).tolist()
    both = [layer for layer in range(8) if layer not in no_drift | no_cosine]
    for series, missing in ((drift, no_drift), (cosine, no_cosine)):
        for layer in missing:
            series[layer] = math.nan
    found = across_layers(profile("drift_norm", drift) | profile("cosine", cosine))
    if len(both) < 4:
        assert found == {}
        return
    one, other = ([series[layer] for layer in both] for series in (drift, cosine))
    assert found["drift_cosine/pearson"] == pytest.approx(stats.pearsonr(one, other).statistic)
    assert found["drift_cosine/spearman"] == pytest.approx(stats.spearmanr(one, other).statistic)


def test_few_layers_say_nothing_across():
    assert across_layers(profile("anisotropy", [0.1, 0.4, 0.8])) == {}
    assert across_layers({}) == {}


def test_nulls_are_what_noise_gives():
    found = null_values(METRICS, 1000, 32)
    noise = torch.randn(1000, 32, generator=torch.Generator().manual_seed(5))
    assert found["anisotropy/null"] == pytest.approx(anisotropy(spectrum(noise)).item(), rel=0.05)
    assert found["cosine/null"] == 0  # of a mean over all pairs, and not of one pair
    assert 0.2 < found["cosine/isotropic_pair"] < 0.35  # 1.645 / sqrt(32) = 0.29
    assert 15 < found["twonn/null"] < 32
    assert null_values(select("variance"), 1000, 32) == {}
    assert null_values(METRICS, 2, 32) == {}


@pytest.mark.parametrize("causal", [True, False])
def test_uniform_attention_has_the_entropy_of_the_null(causal):
    """Scores that are all 0, some sequences shorter than others."""
    length, lengths = 12, torch.tensor([12, 5, 1])
    visible = torch.arange(length) < lengths[:, None]
    visible = (visible[:, None, :, None] & visible[:, None, None, :]).expand(3, 1, length, length)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    query = torch.zeros(3, 2, length, 4)
    captured = {"query": query, "key": query, "visible": visible, "scale": 0.5}
    captured |= {"bias": None, "softcap": None, "sink": None}
    found = Evaluator(select("attention_entropy"), 1, strict=True).evaluate(
        [Layer(1, "block", captured, sources=frozenset({"attention"}))], 64
    )
    assert found.values["attention_entropy/null"] > 1
    assert found.values["attention_entropy/mean"] == pytest.approx(
        found.values["attention_entropy/null"], rel=1e-6
    )  # probabilities are float32


@pytest.mark.parametrize(("rows", "width"), [(200, 8), (1024, 32), (9742, 12)])
def test_the_null_and_its_deviation_are_those_of_many_samples(rows, width):
    """One sample of 200 x 8 gave 9.4 where the mean is 7.6."""
    generator = torch.Generator().manual_seed(1)

    def sample():
        noise = torch.randn(rows, width, generator=generator)
        some = torch.arange(min(rows, 4096))
        return twonn(nearest(noise, k=2, of=some).distances).item()

    samples = [sample() for _ in range(60 if rows < 5000 else 6)]
    mean, deviation = statistics.fmean(samples), statistics.stdev(samples)
    found = null_values(select("twonn"), rows, width)
    drawn = max(4, min(64, 4 * 4096 // rows))
    slack = 4 * deviation * (1 / len(samples) + 1 / drawn) ** 0.5 + 0.004 * mean
    assert abs(found["twonn/null"] - mean) < slack
    share = min(1, 4096 / rows) ** 0.5
    assert share * deviation / 3 < found["twonn/null_std"] < 3 * share * deviation


@pytest.mark.parametrize("rows", [512, 1700])
def test_the_null_makes_no_copy_of_its_rows_in_more_digits(rows, monkeypatch):
    monkeypatch.setattr(module, "_NULL_ROWS", 512)
    with LargestNewTensor() as largest:
        module._sample_dimension(rows, 3000, torch.Generator().manual_seed(0))
    assert largest.bytes <= 4 * 512 * 3000


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("width", [1, 2, 12, 300])
def test_the_null_of_many_rows_has_the_neighbours_of_all_of_them(width, precision, monkeypatch):
    monkeypatch.setattr(module, "_NULL_ROWS", 256)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        found = module._sample_dimension(1000, width, torch.Generator().manual_seed(0))
    finally:
        torch.set_float32_matmul_precision(before)
    generator = torch.Generator().manual_seed(0)
    sizes = [256] + [16] * 46 + [8]
    rows = torch.cat([torch.randn(size, width, generator=generator) for size in sizes])
    want = nearest(rows, k=2, of=torch.arange(256)).distances
    assert found == pytest.approx(float(twonn(want)), rel=1e-12)


def test_the_null_is_measured_once_for_numbers_of_rows_that_are_alike():
    """Copies are taken out, so that the number changes from reading to reading."""
    one, other = (null_values(select("twonn"), rows, 16)["twonn/null"] for rows in (1010, 1040))
    assert one == other
    assert null_values(select("twonn"), 700, 16)["twonn/null"] != one


def brute_force_p(x, y):
    """Twice the smaller tail of all permutations, with a tolerance for equal sums."""
    x, y = x - x.mean(), y - y.mean()
    orders = np.array(list(itertools.permutations(range(len(x)))))
    sums, own = y.numpy()[orders] @ x.numpy(), float(x @ y)
    slack = 1e-10 * float(x.norm() * y.norm())
    return min(1.0, 2 * min((sums >= own - slack).mean(), (sums <= own + slack).mean()))


@given(seeds, st.integers(3, 60), st.floats(-3, 3), st.sampled_from([0, 1, 3]))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_correlation_agrees_with_scipy(seed, layers, slope, decimals):
    # One decimal makes ties, of which the ranks share the mean.
    x = normal(layers, seed=seed).round(decimals=decimals)
    y = (slope * x + normal(layers, seed=seed + 1)).round(decimals=decimals)
    if (x == x[0]).all() or (y == y[0]).all():
        return
    pearson, spearman = correlation(x, y), correlation(ranks(x), ranks(y))
    by_value, by_rank = stats.pearsonr(x.numpy(), y.numpy()), stats.spearmanr(x.numpy(), y.numpy())
    np.testing.assert_array_equal(ranks(x).numpy(), stats.rankdata(x.numpy()))
    assert pearson.value == pytest.approx(by_value.statistic, abs=1e-12)
    assert spearman.value == pytest.approx(by_rank.statistic, abs=1e-12)
    if layers >= 10:
        assert pearson.p_value == pytest.approx(by_value.pvalue, rel=1e-6, abs=1e-9)
        assert spearman.p_value == pytest.approx(by_rank.pvalue, rel=1e-6, abs=1e-9)


@given(seeds, st.integers(3, 7), st.floats(-3, 3), st.sampled_from([0, 1, 6]))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_p_values_of_few_layers_are_those_of_all_permutations(seed, layers, slope, decimals):
    x = normal(layers, seed=seed).round(decimals=decimals)
    y = (slope * x + normal(layers, seed=seed + 1)).round(decimals=decimals)
    if (x == x[0]).all() or (y == y[0]).all():
        return
    for a, b in [(x, y), (ranks(x), ranks(y))]:
        assert correlation(a, b).p_value == pytest.approx(brute_force_p(a, b), rel=1e-12)


@pytest.mark.parametrize("layers", [8, 9])
@pytest.mark.parametrize("decimals", [0, 6])
def test_p_values_are_exact_up_to_nine_layers(layers, decimals):
    x = normal(layers, seed=3).round(decimals=decimals)
    y = (x + normal(layers, seed=4)).round(decimals=decimals)
    assert correlation(x, y).p_value == pytest.approx(brute_force_p(x, y), rel=1e-12)


def test_p_values_agree_with_scipys_permutations():
    x, y = normal(6), normal(6) + 0.5 * normal(6, seed=1)
    method = stats.PermutationMethod(n_resamples=1000)
    want = stats.pearsonr(x.numpy(), y.numpy(), method=method).pvalue
    assert correlation(x, y).p_value == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("layers", range(3, 10))
def test_the_smallest_p_value_is_that_of_one_order_in_two_tails(layers):
    x = torch.arange(layers, dtype=torch.float64)
    for y in (x, x.exp(), -x):
        found = correlation(ranks(x), ranks(y))
        assert abs(found.value) == 1
        assert found.p_value == pytest.approx(2 / math.factorial(layers), rel=1e-12)
        assert correlation(x, y).p_value == pytest.approx(2 / math.factorial(layers), rel=1e-12)


def test_p_values_keep_their_digits_next_to_a_correlation_of_one():
    x = torch.arange(24, dtype=torch.float64)
    y = x + 0.01 * normal(24)
    want = stats.pearsonr(x.numpy(), y.numpy()).pvalue
    assert 0 < want < 1e-40
    assert correlation(x, y).p_value == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("layers", [8, 13])
def test_p_values_of_independent_series_are_uniform(layers):
    for of in (lambda series: series, ranks):
        values = [
            correlation(of(normal(layers, seed=2 * i)), of(normal(layers, seed=2 * i + 1))).p_value
            for i in range(500)
        ]
        assert stats.kstest(values, stats.uniform.cdf).pvalue > 1e-3


def test_a_curve_that_always_rises_has_a_rank_correlation_of_one():
    x = torch.arange(1.0, 13.0, dtype=torch.float64)
    spearman = correlation(ranks(x), ranks(x.exp()))
    assert spearman.value == pytest.approx(1, abs=1e-12)
    assert spearman.p_value == pytest.approx(0, abs=1e-30)
    assert correlation(x, x.exp()).value < 0.9
    assert correlation(x, -x).value == pytest.approx(-1, abs=1e-12)


@given(seeds, st.integers(3, 30), st.sampled_from([1e-150, 0.1, 7.0, 1e150]))
@few_examples
def test_correlation_does_not_change_with_scale_shift_order_or_roles(seed, layers, scale):
    x, y = normal(layers, seed=seed), normal(layers, seed=seed + 1)
    order = torch.randperm(layers, generator=torch.Generator().manual_seed(seed))
    want = correlation(x, y)
    for other in ((scale * x, y), (x, y + 5), (x[order], y[order]), (y, x)):
        assert correlation(*other) == pytest.approx(want, rel=1e-8, abs=1e-10)
    opposite = correlation(-x, y)
    assert opposite == pytest.approx((-want.value, want.p_value), rel=1e-8)


def test_correlation_far_from_zero_where_sums_of_products_cancel():
    x, y = (normal(40) * 1024).round() / 1024, (normal(40, seed=1) * 1024).round() / 1024
    far_x, far_y = x + 1e9, y + 1e9
    n = 40
    naive = (far_x * far_y).sum() / n - far_x.mean() * far_y.mean()
    true = ((x - x.mean()) * (y - y.mean())).mean()
    assert abs(naive - true) > abs(true)
    assert correlation(far_x, far_y) == pytest.approx(correlation(x, y))


def test_layers_without_a_value_are_left_out():
    drift, cosine = normal(12).tolist(), normal(12, seed=1).tolist()
    want = across_layers(profile("drift_norm", drift) | profile("cosine", cosine))
    drift, cosine = [*drift, math.inf, math.nan], [*cosine, math.nan, math.inf]
    assert across_layers(profile("drift_norm", drift) | profile("cosine", cosine)) == want


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (tensor(), tensor()),
        (tensor(1, 2), tensor(3, 5)),
        (tensor(1, 2, 3), tensor(0.1, 0.1, 0.1)),
        (tensor(7, 7, 7, 7), tensor(1, 2, 3, 4)),
    ],
)
def test_series_that_say_nothing_are_nan(x, y):
    assert all(math.isnan(value) for value in correlation(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_profile_shape_takes_any_floating_dtype_and_leaves_it_alone(dtype):
    values = (2e4 * normal(13)).clamp(-6e4, 6e4).to(dtype)
    before = values.clone()
    results, wants = profile_shape(values), profile_shape(values.double())
    assert torch.equal(values, before)
    for got, want in zip(results, wants, strict=True):
        assert got.dtype == torch.float64
        assert got.shape == ()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


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


@pytest.mark.parametrize("rows", [20, 50, 64])
def test_the_neighbourhoods_of_few_rows_are_compared_with_those_of_exactly_as_many(rows):
    names = ("local_dimension", "local_anisotropy", "local_cosine")
    found = module.null_values(select(*names), rows, 8)
    want = module._gaussian_neighbourhoods(rows, 8)
    assert {name: found[f"{name}/null"] for name in names} == want
