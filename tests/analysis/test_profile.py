import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tagged import reading_of

from geomon.analysis.profile import bulge, correlate, is_far_above, peak_depth, profile_of
from geomon.record.columns import Column

VALUES = st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3))
PROFILES = st.lists(st.one_of(VALUES, st.just(math.nan)), min_size=1, max_size=20)


@given(st.integers(4, 30), st.floats(0.1, 10), st.one_of(st.just(0.0), st.floats(0.01, 5)))
def test_a_straight_profile_has_no_bulge(count, first, slope):
    profile = [first + slope * layer for layer in range(count)]
    assert bulge(profile) == pytest.approx(0, abs=1e-9)
    assert peak_depth(profile) == (1.0 if profile[-1] > profile[-2] else 0.0)


@given(PROFILES.filter(lambda x: len(x) > 1), st.floats(0.1, 10))
def test_neither_depends_on_the_unit(profile, unit):
    scaled = [unit * value for value in profile]
    assert bulge(scaled) == pytest.approx(bulge(profile), rel=1e-6, abs=1e-6, nan_ok=True)
    assert peak_depth(profile[::-1]) >= 0 or math.isnan(peak_depth(profile))


@pytest.mark.parametrize(
    ("profile", "expected", "depth"),
    [
        ([1.0, 3.0, 1.0], 2.0, 0.5),
        ([2.0, 1.0, 1.0, 2.0], -0.5, 0.0),
        # The published figures of a decoder, by layer: the peak is at a quarter of the depth.
        ([0.083, 0.458, 0.275, 0.146, 0.136], 0.275 / 0.1095 - 1, 0.25),
        ([1.0], math.nan, math.nan),
        ([1.0, 2.0], math.nan, 1.0),
        ([], math.nan, math.nan),
        ([math.nan, 1.0, 2.0], math.nan, 1.0),
        ([-1.0, 3.0, 1.0], math.nan, 0.5),
    ],
)
def test_closed_forms(profile, expected, depth):
    assert bulge(profile) == pytest.approx(expected, nan_ok=True)
    assert peak_depth(profile) == pytest.approx(depth, nan_ok=True)


def test_a_profile_has_the_values_of_layers_alone():
    values = {
        "cosine/layer_01": 0.2, "cosine/layer_00": 0.1, "cosine/layer_01/margin": 9.0,
        "cosine/layer_01/head_0": 9.0, "cosine/mean": 9.0,
        "cosine/null": 0.0, "twonn/layer_02": 9.0,
    }  # fmt: skip
    reading = reading_of(values)
    assert profile_of(reading, "cosine") == [0.1, 0.2]
    assert profile_of(reading, "anisotropy") == []
    assert str(profile_of(reading_of({"qk_dot/layer_01": 0.2}), "qk_dot")) == "[nan, 0.2]"


@given(VALUES, st.lists(VALUES, min_size=1, max_size=20), st.sampled_from((0.25, 2.0, 64.0)))
def test_layer_0_far_above_the_blocks_does_not_depend_on_the_unit(first, blocks, unit):
    is_far = is_far_above([first], blocks)
    assert is_far == is_far_above([unit * first], [unit * value for value in blocks])
    assert is_far == is_far_above([math.nan, first, -1000.0], [*blocks, math.nan])
    # On an axis from 0, or from the lowest block, the blocks fill less than half the height.
    low, high = min(0.0, *blocks), max(0.0, *blocks)
    assert is_far == (high > low and (high - low) < 0.5 * (first - low))


def test_layer_0_is_far_above_no_blocks():
    assert not is_far_above([3.0], [])
    assert not is_far_above([3.0], [0.0, math.nan])
    assert not is_far_above([], [1.0])


def columns(count, seed=0):
    generator = np.random.default_rng(seed)
    return [Column(layers=generator.integers(0, 7, count).tolist()) for _ in range(2)]


@pytest.mark.parametrize("count", [4, 5])
def test_p_values_of_few_layers_are_those_of_all_permutations(count):
    for seed in range(3):
        one, other = columns(count, seed)
        ways = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
        for name, way in ways.items():
            found = stats.permutation_test(
                (one.layers,), lambda x, way=way, y=other.layers: way(x, y).statistic,
                permutation_type="pairings", n_resamples=np.inf, vectorized=False,
            )  # fmt: skip
            expected = (found.statistic, found.pvalue)
            assert correlate(one, other)[name] == pytest.approx(expected, abs=1e-12), name


def test_p_values_of_nine_layers_are_of_all_permutations_still():
    for found in correlate(*columns(9)).values():
        count = found.p_value * math.factorial(9) / 2
        assert count == pytest.approx(round(count), abs=1e-6)


def test_p_values_of_more_layers_are_those_of_normal_series():
    one, other = columns(10)
    for name, way in {"pearson": stats.pearsonr, "spearman": stats.spearmanr}.items():
        assert correlate(one, other)[name] == pytest.approx(way(one.layers, other.layers)), name


def test_a_correlation_needs_four_layers_that_have_both_and_vary():
    known = Column(layers=[1.0, 2.0, 4.0, 8.0, 16.0])
    holes = Column(first=1, layers=[1.0, math.nan, 3.0, 4.0, 9.0])
    assert correlate(known, holes) == {}
    constant = Column(layers=[3.0] * 5)
    for pair in ((known, constant), (constant, known)):
        assert math.isnan(correlate(*pair)["pearson"].value)
    tiny = Column(layers=[1e-200 * value for value in known.layers])
    assert correlate(known, tiny)["pearson"].value == pytest.approx(1)
