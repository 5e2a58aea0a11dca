import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import with_values
from typer.testing import CliRunner

from geomon.analysis.compare import (
    Difference,
    compare,
    describe_differences,
    describe_settings,
)
from geomon.cli import make_app
from geomon.record import FILE_NAME, Readings


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
        (5.2, 0.2001, "within the errors"), (5.2, math.nan, "error unknown"),
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


def test_a_run_beside_itself_has_no_difference(make_readings):
    found = compare(make_readings(), make_readings())
    assert {each.verdict for each in found} == {"equal"}
    assert describe_differences(found, ("a", "b"))[1:-1] == [f"{len(found)} equal"]


def test_words_have_the_digits_that_tell_values_apart_and_no_percent_of_signs():
    found = [
        Difference("entropy/mean", 200, 3.2051, 3.2047, 1e-4),
        Difference("cosine/mean", 200, -0.4, -0.7, 0.02),
        Difference("norm/mean", 200, 1.5, 45.0, 0.2),
        Difference("square/mean", 200, 8.0, 2.4e7, 1e5),
        Difference("third/mean", 200, 1 / 3, 2 / 3, 0.01),
        Difference("training/loss", 128, 2.0, 2.01, math.nan),
    ]
    lines = describe_differences(found, ("a", "b"))
    assert lines[0] == "b against a, at step 200"
    entropy, cosine, norm, square, third, loss = (line for line in lines if "->" in line)
    assert entropy.endswith("3.2051 -> 3.2047, lower by 0.0004 ± 0.0001 (less than 0.1 %)")
    assert cosine.endswith("-0.4 -> -0.7, lower by 0.3 ± 0.02")
    assert norm.endswith("(30 times as high)")
    assert "%" not in square
    assert third.endswith("0.333 -> 0.667, higher by 0.333 ± 0.01 (+100 %)")
    assert loss.endswith("(+0.5 %), at step 128")


def test_settings_that_differ_are_named(make_readings):
    one = {"time": 1.0, "layers": ["a", "b"], "seed": 0, "tokens": 64}
    runs = [
        Readings([run], make_readings().readings)
        for run in (one, {**one, "time": 2.0}, {**one, "layers": ["a"], "seed": 10**4})
    ]
    assert describe_settings(runs[0], runs[1]) == ""
    assert describe_settings(runs[0], Readings([], [])) == ""
    assert describe_settings(runs[0], runs[2]) == (
        "the records differ in layers of 2 and of 1, seed 0 and 10,000"
    )


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1, 2], [1, 3], "x (of 2, with other names or values)"),
        (0.10001, 0.10002, "x 0.10001 and 0.10002"),
        (1, "1", "x 1 and '1'"),
        ("a" * 61 + "b", "a" * 61 + "c", f"x '{'a' * 61}b' and '{'a' * 61}c'"),
        (None, 3, "x unknown and 3"),
    ],
)  # fmt: skip
def test_settings_that_look_alike_are_told_apart(one, other, said, make_readings):
    runs = (Readings([{"x": x}], make_readings().readings) for x in (one, other))
    assert describe_settings(*runs) == f"the records differ in {said}"


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
    assert describe_differences([found], ("a", "b"))[0] == "b against a, at steps 190 and 200"
    found = by_tag(compare(first, make_readings((0, 380, 400))))["twonn/mean"]
    assert (found.step, found.second_step) == (400, None)
    with pytest.raises(ValueError, match="no values at steps near one another"):
        compare(first, make_readings((0, 140, 300)))  # step 0 alone says nothing of the training


def test_the_command_says_and_draws_the_differences(make_readings, tmp_path):
    for name, readings in (
        ("a", make_readings()),
        ("b", make_readings(curves={"twonn/mean": (2.5, 2.8, 3.3, 5, 7, 7, 6, 5.5, 4.0)})),
    ):
        (tmp_path / name).mkdir()
        lines = [each.line() for each in readings]
        (tmp_path / name / FILE_NAME).write_text("\n".join(lines) + "\n")
    out = tmp_path / "compare.png"
    folders = [str(tmp_path / name) for name in "ab"]
    result = CliRunner().invoke(make_app(), ["compare", *folders, "-o", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "twonn/mean: 5.3 -> 4, lower by 1.3 ± 0.14 (-25 %)" in result.stdout
    assert out.stat().st_size > 10_000
    result = CliRunner().invoke(make_app(), ["compare", folders[0], str(tmp_path / "no")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
