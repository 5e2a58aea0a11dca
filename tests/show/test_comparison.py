"""Two runs compared: what the command says of their values and settings, and what it draws."""

import math

import pytest
from typer.testing import CliRunner

from geomon.analysis.compare import Difference, compare
from geomon.cli import make_app
from geomon.record import FILE_NAME, Readings
from geomon.show.comparison import describe_differences
from geomon.show.settings import describe_settings


def test_words_have_the_digits_that_tell_values_apart_and_no_percent_of_signs():
    found = [
        Difference("entropy/mean", 200, 3.2051, 3.2047, 1e-4),
        Difference("cosine/mean", 200, -0.4, -0.7, 0.02),
        Difference("norm/mean", 200, 4.0123, 45.0, 0.2),
        Difference("square/mean", 200, 8.0, 12e3, 1e3),
        Difference("training/loss", 128, 1.0, 1.007, math.nan),
    ]
    lines = describe_differences(found, ("a", "b"))
    assert lines[0] == "b against a, at step 200"
    entropy, cosine, norm, square, loss = (line for line in lines if "->" in line)
    assert entropy.endswith("3.2051 -> 3.2047, lower by 0.0004 ± 0.0001 (less than 0.1 %)")
    assert cosine.endswith("-0.4 -> -0.7, lower by 0.3 ± 0.02")
    assert ": 4.01 -> 45, " in norm
    assert norm.endswith("(11.2 times as high)")
    assert square.endswith("± 1e+03")
    assert ": 1 -> 1.007, " in loss
    assert loss.endswith("(+0.7 %), at step 128")


def test_equal_values_are_counted_and_other_steps_are_said(make_readings):
    found = compare(make_readings(), make_readings())
    assert describe_differences(found, ("a", "b"))[1:-1] == [f"{len(found)} equal"]
    found = compare(make_readings((0, 200)), make_readings((0, 190)))
    assert describe_differences(found, ("a", "b"))[0] == "b against a, at steps 190 and 200"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"time": 1.0, "from_step": 1}, {"time": 2.0, "from_step": 2}, ""),
        ({"x": "a" * 60}, {"x": "b"}, f"x {'a' * 60} and b"),
        ({"layers": ["a", "b"]}, {"layers": ["a"]}, "layers 2: a, b and 1: a"),
        ({"seed": 0}, {"seed": 10**4}, "seed 0 and 10,000"),
        ({"x": 0.10001}, {"x": 0.10002}, "x 0.10001 and 0.10002"),
        ({"x": 1}, {"x": "1"}, "x (1, with other values)"),
        ({"x": "a" * 61 + "b"}, {"x": "a" * 61 + "c"}, f"x ({'a' * 60} ..., with other values)"),
        ({}, {"x": 3}, "x not recorded and 3"),
    ],
)  # fmt: skip
def test_settings_that_differ_are_named(one, other, said, make_readings):
    runs = (Readings([{"seed": 0, **run}], make_readings((0,)).readings) for run in (one, other))
    expected = f"the records differ in {said}" if said else ""
    assert describe_settings(*runs) == expected
    assert describe_settings(Readings([one], []), Readings([], [])) == ""


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
