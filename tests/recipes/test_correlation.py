"""Correlation of two metrics over depth."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from geomon.record.columns import Column
from recipes.papers.correlation import correlate

VALUES = st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3))


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
