"""Claims decide themselves from the interval over repetitions."""

import math

import numpy as np
import pytest
from scipy import stats

from recipes.study import (
    Claim,
    estimate,
    estimate_share,
    load_claims,
    save_claims,
    verdict_lines,
)


def claim(values, **ends):
    words = dict.fromkeys(("asserts", "published", "source", "command", "quantity"), "x")
    return Claim(name="x", values=tuple(values), **words, **ends)


def test_the_interval_is_that_of_scipy():
    values = [0.3, 0.7, 0.4, 1.1]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert estimate(values).low == pytest.approx(low)
    assert estimate(values).high == pytest.approx(high)


def test_the_interval_covers_the_mean_of_the_population():
    draws = np.random.default_rng(0).normal(3, 2, (2000, 3))
    covered = [e.low < 3 < e.high for e in map(estimate, draws.tolist())]
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize(
    ("values", "ends", "verdict"),
    [
        ((1.0, 1.1, 0.9), {"above": 0}, "agrees"),
        ((1.0, 1.1, 0.9), {"below": 0}, "disagrees"),
        ((1.0, -1.1, 0.9), {"above": 0}, "undecided"),
        ((1.0, 1.1, 0.9), {"above": 0, "below": 2}, "agrees"),
        ((1.0, 1.1, 0.9), {"above": 3, "below": 4}, "disagrees"),
        ((1.0,), {"above": 0}, "undecided"),
    ],
)
def test_a_verdict_takes_the_whole_interval(values, ends, verdict):
    assert claim(values, **ends).verdict == verdict


@pytest.mark.parametrize("ends", [{}, {"above": 1, "below": 1}, {"above": 2, "below": 1}])
def test_a_claim_that_nothing_decides_is_refused(ends):
    with pytest.raises(ValueError, match="claim x"):
        claim((1.0,), **ends)


@pytest.mark.parametrize("values", [(), (math.nan, 1.0)])
def test_values_that_give_no_mean_are_refused(values):
    with pytest.raises(ValueError, match="one finite value or more"):
        estimate(values)


def test_claims_come_back_from_their_file(tmp_path):
    claims = [claim((1.0, 2.0), above=0), claim((3.0,), below=2)]
    claims.append(claim((1.0, 1.0), above=0.5, counted=True))
    save_claims(claims, tmp_path / "a")
    back = load_claims(tmp_path / "a")
    assert [each.values for each in back] == [(1.0, 2.0), (3.0,), (1.0, 1.0)]
    assert [each.verdict for each in back] == [each.verdict for each in claims]
    with pytest.raises(FileNotFoundError, match="run the experiment first"):
        load_claims(tmp_path)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_interval_of_a_share_is_that_of_scipy_and_covers_it(count):
    for so in range(count + 1):
        share = estimate_share([1] * so + [0] * (count - so))
        exact = stats.binomtest(so, count).proportion_ci(0.95, "exact")
        assert (share.low, share.high) == (pytest.approx(exact.low), pytest.approx(exact.high))
        assert share.mean == so / count
        assert share.mean + share.margin >= share.high - 1e-12
    for probability in (0.02, 0.3, 0.5, 0.97):
        chances = stats.binom.pmf(range(count + 1), count, probability)
        found = [estimate_share([1] * so + [0] * (count - so)) for so in range(count + 1)]
        covered = sum(
            c for c, s in zip(chances, found, strict=True) if s.low <= probability <= s.high
        )
        assert covered >= 0.95


def test_a_count_decides_by_its_own_interval_and_not_by_a_scatter_that_is_0():
    """Three of three are not certainty: as means they would have no margin at all."""
    assert claim((1.0,) * 3, above=0.5).verdict == "agrees"
    assert claim((1.0,) * 3, above=0.5, counted=True).verdict == "undecided"
    assert claim((1.0,) * 6, above=0.5, counted=True).verdict == "agrees"
    assert claim((0.0,) * 6, above=0.5, counted=True).verdict == "disagrees"
    (line,) = verdict_lines([claim((1.0, 0.0, 1.0), below=0.1, counted=True, repeated="control")])
    assert line == "undecided  x: 0.67 (0.09 to 0.99) (3 x control; below 0.1)"


@pytest.mark.parametrize("outcomes", [(), (0.5,), (1.0, math.nan)])
def test_outcomes_that_are_neither_so_nor_not_are_refused(outcomes):
    with pytest.raises(ValueError, match="each 0 or 1"):
        estimate_share(outcomes)
