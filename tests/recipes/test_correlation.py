"""Correlation of two metrics over depth."""

import math

import numpy as np
import pytest
from scipy import stats

from geomon.record.columns import Column
from recipes.papers.correlation import correlate


def columns(count, seed=0):
    generator = np.random.default_rng(seed)
    return [Column(layers=generator.integers(0, 7, count).tolist()) for _ in range(2)]


WAYS = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("name", WAYS)
def test_p_values_of_few_layers_are_those_of_all_permutations(count, seed, name):
    one, other = columns(count, seed)
    found = stats.permutation_test(
        (one.layers,), lambda x: WAYS[name](x, other.layers).statistic,
        permutation_type="pairings", n_resamples=np.inf, vectorized=False,
    )  # fmt: skip
    expected = (found.statistic, found.pvalue)
    assert correlate(one, other)[name] == pytest.approx(expected, abs=1e-12)


def test_p_values_of_nine_layers_are_of_all_permutations_still():
    for found in correlate(*columns(9)).values():
        count = found.p_value * math.factorial(9) / 2
        assert count == pytest.approx(round(count), abs=1e-6)


@pytest.mark.parametrize("name", WAYS)
def test_p_values_of_more_layers_are_those_of_normal_series(name):
    one, other = columns(10)
    assert correlate(one, other)[name] == pytest.approx(WAYS[name](one.layers, other.layers))


def test_a_correlation_needs_four_layers_that_have_both_and_vary():
    known = Column(layers=[1.0, 2.0, 4.0, 8.0, 16.0])
    holes = Column(first=1, layers=[1.0, math.nan, 3.0, 4.0, 9.0])
    assert correlate(known, holes) == {}
    constant = Column(layers=[3.0] * 5)
    for pair in ((known, constant), (constant, known)):
        assert math.isnan(correlate(*pair)["pearson"].value)
    tiny = Column(layers=[1e-200 * value for value in known.layers])
    assert correlate(known, tiny)["pearson"].value == pytest.approx(1)
