import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import with_values

from geomon.analysis.compare import Difference, compare
from geomon.record import Readings


def by_tag(found):
    return {each.tag: each for each in found}


def test_runs_are_compared_at_their_last_common_step(make_readings):
    first = make_readings()
    second = make_readings((0, 16, 32, 64), curves={"twonn/mean": (2.5, 2.8, 3.3, 5.6)})
    found = by_tag(compare(first, second))
    twonn = found["twonn/mean"]
    assert (twonn.step, twonn.first, twonn.second) == (64, 5.0, 5.6)
    assert twonn.margin == pytest.approx(math.hypot(0.1, 0.1))
    assert twonn.verdict == "higher"
    assert found["twonn_distinct/mean"].verdict == "equal"
    assert {"gride/mean/k1", "gride/mean/k32", "attention_entropy/mean"} <= found.keys()
    assert not [tag for tag in found if "margin" in tag or "layer" in tag or "geomon" in tag]


@pytest.mark.parametrize(
    ("second", "margin", "verdict"),
    [
        (5.0, 0.1, "equal"), (5.2, 0.1, "higher"), (4.8, 0.1, "lower"),
        (5.2, 0.2001, "within the errors"), (5.5, 0.5, "within the errors"),
        (5.2, math.nan, "error unknown"),
        (5.0 + 1e-15, 0.1, "equal"), (5.0 - 1e-15, math.nan, "equal"),  # another order of sums
        (5.0 + 1e-7, math.nan, "error unknown"), (5.0 - 1e-7, 1e-8, "lower"),
    ],
)  # fmt: skip
def test_a_difference_is_one_beyond_its_margin_only(second, margin, verdict):
    assert Difference("a/mean", 1, 5.0, second, margin).verdict == verdict


@given(first=st.floats(-1e6, 1e6), second=st.floats(-1e6, 1e6), margin=st.floats(0.0, 1e6))
def test_the_other_way_round_the_verdict_is_the_opposite(first, second, margin):
    opposite = {"higher": "lower", "lower": "higher"}
    one = Difference("a/mean", 1, first, second, margin).verdict
    assert Difference("a/mean", 1, second, first, margin).verdict == opposite.get(one, one)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [(2.0, 0.0, -1.0), (2.0, 3.0, 0.5), (0.0, 1.0, math.nan), (-1.0, 1.0, math.nan),
     (1.0, -1.0, math.nan)],
)  # fmt: skip
def test_a_change_is_a_share_of_what_has_no_sign(first, second, share):
    found = Difference("a/mean", 1, first, second, 0.1).share
    assert found == pytest.approx(share, nan_ok=True)


def test_a_run_beside_itself_has_no_difference(make_readings):
    found = compare(make_readings(), make_readings())
    assert {each.verdict for each in found} == {"equal"}


def test_a_deviation_over_splits_of_the_rows_decides_nothing(make_readings):
    """The splits are of the same sequences: two readings of one model differ by more than that."""
    runs = make_readings(), make_readings(curves={"gride/mean/k1": [9.0] * 9})
    deviations = {"gride/mean/k1/std": 0.01, "twonn/mean/std": 0.01}
    known = [[with_values(r, {**r.values, **deviations}) for r in run] for run in runs]
    found = by_tag(compare(*(Readings([], run) for run in known)))
    assert found["gride/mean/k1"].verdict == "error unknown"
    assert found["twonn/mean"].margin == pytest.approx(math.hypot(0.1, 0.1))


def test_runs_without_a_common_step_are_refused(make_readings):
    with pytest.raises(ValueError, match="no values at steps near one another"):
        compare(make_readings((0, 16)), Readings([], make_readings().readings[4:]))


def test_runs_of_other_schedules_are_compared_at_steps_near_one_another(make_readings):
    first, second = make_readings((0, 100, 200, 400)), make_readings((0, 60, 190, 330, 700))
    found = by_tag(compare(first, second))["twonn/mean"]
    assert (found.step, found.second_step) == (200, 190)
    found = by_tag(compare(first, make_readings((0, 380, 400))))["twonn/mean"]
    assert (found.step, found.second_step) == (400, None)
    found = by_tag(compare(make_readings((0, 100)), make_readings((0, 90))))["twonn/mean"]
    assert (found.step, found.second_step) == (100, 90)  # a tenth of the larger one, to the step
    dense = by_tag(compare(make_readings((0, 96, 100)), make_readings((0, 97, 140))))["twonn/mean"]
    assert (dense.step, dense.second_step) == (96, 97)  # and not 100, a bit later and further off
    with pytest.raises(ValueError, match="no values at steps near one another"):
        compare(first, make_readings((0, 140, 300)))  # step 0 alone says nothing of the training
