"""Claims decide themselves from the interval over repetitions."""

import math

import numpy as np
import pytest
from scipy import stats

from recipes.study import Claim, estimate, load_claims, save_claims


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
    save_claims(claims, tmp_path / "a")
    back = load_claims(tmp_path / "a")
    assert [each.values for each in back] == [(1.0, 2.0), (3.0,)]
    assert [each.verdict for each in back] == [each.verdict for each in claims]
    with pytest.raises(FileNotFoundError, match="run the experiment first"):
        load_claims(tmp_path)
