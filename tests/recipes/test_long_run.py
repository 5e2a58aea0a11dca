"""The page of a longer training says what its record shows, and what it does not decide."""

import json

import numpy as np
import pytest
from tagged import reading_of
from typer.testing import CliRunner

from geomon import Readings
from recipes.long_run.__main__ import app
from recipes.long_run.changes import DIMENSIONS, changes, nearest
from recipes.long_run.page import planned_steps, render

STEPS = [0, *(round(2 ** (octave / 4)) for octave in range(20, 55)), 12_000]


def reading(step, values):
    return reading_of(values, step)


def record(late=1.0, margin=0.1):
    """TwoNN rises from 2 to 7, and is 5 at the end of the demo; `late` is what follows."""
    places, values = [0, 128, 1448, 12_000], [2, 7, 5, 5 + late]
    course = np.interp(np.log1p(STEPS), np.log1p(places), values)
    return Readings(
        [{}],
        [
            reading(step, {
                "twonn/mean": value, "twonn/mean/margin": margin,
                "gride/mean/k32": 10 - value, "gride/mean/k32/margin": margin,
                "training/loss": 2.0,
            })
            for step, value in zip(STEPS, course.tolist(), strict=True)
        ],
    )  # fmt: skip


@pytest.mark.parametrize(("late", "paper", "far"), [(-1, "falls", "grows"), (1, "grows", "falls")])
def test_each_value_is_judged_by_its_own_change(late, paper, far):
    by_name = {change.name: change for change in changes(record(late), DIMENSIONS)}
    assert by_name["TwoNN, all tokens"].verdict == paper
    assert by_name["TwoNN, all tokens"].before == pytest.approx(5)
    assert by_name["TwoNN, all tokens"].after == pytest.approx(5 + late)
    assert by_name["Gride, scale 32"].verdict == far


def test_a_change_within_the_errors_decides_nothing():
    (change, _) = changes(record(-0.05, margin=0.5), DIMENSIONS)
    assert change.verdict == "undecided"
    assert change.margin >= 0.5 * 2**0.5


def test_the_peak_leaves_step_0_out():
    change = changes(record(), ["Gride, scale 32"])[0]
    assert change.peak == (pytest.approx(5), 1448)


def test_values_that_were_not_measured_have_no_line():
    assert [c.name for c in changes(record(), DIMENSIONS)] == [
        "TwoNN, all tokens",
        "Gride, scale 32",
    ]


def test_steps_are_compared_on_a_logarithmic_axis():
    assert nearest([0, 1, 1000, 4000], 2001) == 3
    assert nearest([0, 1, 1000, 4000], 0) == 0


def test_the_page_says_what_is_decided_and_how_far_the_record_goes(tmp_path):
    def page(late, planned):
        return render(
            record(late), planned=planned, page=tmp_path / "a.md", picture=tmp_path / "b" / "c.png"
        )

    assert "The compression goes on" in page(-1, 12_000)
    assert "The compression does not go on" in page(1, 12_000)
    assert "is undecided" in page(0.01, 12_000)
    assert "The sign depends on the scale" in page(-1, 12_000)
    assert "of 12,000" not in page(-1, 12_000)
    assert "This record ends at step 12,000 of 24,000" in page(-1, 24_000)
    assert "](b/c.png)" in page(-1, None)


def test_the_command_writes_page_and_picture(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"preset": {"steps": 12_000}}))
    lines = [reading.line() for reading in record(-1)]
    (tmp_path / "readings.jsonl").write_text("\n".join([json.dumps({"run": {}}), *lines, ""]))
    page, picture = tmp_path / "docs" / "page.md", tmp_path / "pictures" / "a.png"
    arguments = [str(tmp_path), "-o", str(page), "--picture", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "](../pictures/a.png)" in page.read_text()
    assert 20_000 < picture.stat().st_size < 150_000


@pytest.mark.parametrize("content", [None, json.dumps({"run": {}}) + "\n"])
def test_without_a_longer_record_one_line_says_how_to_get_it(tmp_path, content):
    if content is not None:
        (tmp_path / "readings.jsonl").write_text(content)
    result = CliRunner().invoke(app, [str(tmp_path), "-o", str(tmp_path / "page.md")])
    assert result.exit_code == 2
    assert "make enwik8 ARGS=" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize("content", [None, "no json", "[]", "{}"])
def test_unknown_plans_are_no_error(tmp_path, content):
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    assert planned_steps(tmp_path) is None
