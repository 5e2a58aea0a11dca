"""Turning points of curves, and claims that follow from where they lie."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tagged import reading_of
from typer.testing import CliRunner

from geomon import read
from geomon.record import Record
from recipes.enwik8.data import ENWIK8
from recipes.overfit.__main__ import app
from recipes.overfit.claims import WATCHED, claims, leads, load_runs, table
from recipes.overfit.figure import draw
from recipes.overfit.train import TEXTS
from recipes.overfit.turns import first_turn, turning_points
from recipes.study import load_claims, mark_finished

curves = st.lists(st.floats(0.1, 10), min_size=1, max_size=30)
shares = st.floats(0.01, 0.5)


@settings(deadline=None)
@given(curves, shares)
@example([5.0, 8.0, 4.0], 0.5)
def test_turning_points_alternate_and_are_left_by_the_share(values, share):
    points = turning_points(values, share)
    assert all(one.place < other.place for one, other in pairwise(points))
    assert all(one.kind != other.kind for one, other in pairwise(points))
    for number, point in enumerate(points):
        end = points[number + 1].place if number + 1 < len(points) else len(values) - 1
        between = values[point.place : end + 1]
        if point.kind == "peak":
            assert max(between) == values[point.place]
            assert min(between) * (1 + share) < values[point.place]
        else:
            assert min(between) == values[point.place]
            assert max(between) > values[point.place] * (1 + share)


@settings(deadline=None)
@given(curves, shares, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_turning_points_do_not_see_the_unit(values, share, factor):
    scaled = [factor * value for value in values]  # powers of two: no rounding
    assert turning_points(scaled, share) == turning_points(values, share)


@settings(deadline=None)
@given(curves, shares)
def test_a_curve_that_goes_one_way_never_turns(values, share):
    for kind in ("peak", "trough"):
        assert first_turn(sorted(values), share, kind) is None
        assert first_turn(sorted(values, reverse=True), share, kind) is None


@settings(deadline=None)
@given(curves, shares, st.sampled_from(["peak", "trough"]))
def test_what_must_come_after_the_other_kind_does(values, share, kind):
    plain = first_turn(values, share, kind)
    later = first_turn(values, share, kind, after_other=True)
    inner = [point for point in turning_points(values, share) if point.place > 0]
    if later is not None:
        assert any(point.place < later and point.kind != kind for point in inner)
        assert plain is not None
        assert plain <= later


def test_noise_below_the_share_is_no_turn():
    falling = [5.0, 4.0, 3.0, 3.02, 2.5, 2.52, 2.49]
    assert first_turn(falling, 0.02, "trough") is None
    assert first_turn([*falling, 2.6], 0.02, "trough") == 6
    assert first_turn(falling, 0.005, "trough") == 2


# -- claims, from records of known shape -----------------------------------------------------------

STEPS = [0, 10, 20, 30, 40, 50]
SEEDS = 6  # six of six are beyond one half, five of five are not
LOSS = {"few": [5.0, 3.0, 2.5, 2.4, 2.6, 3.0], "plenty": [5.0, 3.0, 2.5, 2.4, 2.3, 2.2]}
DIMENSION = {"few": [2.0, 8.0, 5.0, 6.0, 7.0, 8.0], "plenty": [2.0, 8.0, 5.0, 4.9, 4.8, 4.7]}
RANK = {"few": [30.0, 4.0, 9.0, 10.0, 12.0, 11.0], "plenty": [30.0, 4.0, 9.0, 12.0, 13.0, 14.0]}


def write(folder, dimension=DIMENSION, loss=LOSS) -> None:
    for seed in range(SEEDS):
        for name in TEXTS:
            path = folder / f"seed_{seed}" / name
            record = Record(path)
            record.begin(0, {})
            for place, step in enumerate(STEPS):
                values = {
                    "training/held_out_loss": loss[name][place], "training/train_loss": 1.0,
                    "effective_rank/layer_02": RANK[name][place],
                    "effective_rank_last/layer_02": RANK[name][place],
                }  # fmt: skip
                for metric in ("local_dimension", "twonn"):
                    values[f"{metric}/layer_01"] = 1.0  # the last layer counts
                    values[f"{metric}/layer_02"] = dimension[name][place]
                record.write(reading_of(values, step))
            record.close()
            mark_finished(path, {}, 10.0)


def test_records_as_published_agree_with_every_claim(tmp_path):
    write(tmp_path)
    found = {each.name: each for each in claims(tmp_path)}
    assert {name: each.verdict for name, each in found.items() if each.verdict != "agrees"} == {}
    assert found["local_dimension_turns_before_the_loss"].values == (10.0,) * SEEDS
    assert found["few_texts_overfit"].values == pytest.approx((0.6,) * SEEDS)
    assert len(found) == 5
    assert {each.seconds for each in found.values()} == {SEEDS * 2 * 10.0 / 2}


def test_a_control_that_turns_is_a_false_alarm(tmp_path):
    write(tmp_path, {"few": DIMENSION["few"], "plenty": DIMENSION["few"]})
    verdicts = {each.name: each.verdict for each in claims(tmp_path)}
    assert verdicts["local_dimension_turns_with_overfitting_alone"] == "disagrees"
    (line,) = [each for each in table(tmp_path) if "`local_dimension`" in each]
    assert line == (
        "| `local_dimension` | trough | 20, 20, 20, 20, 20, 20 | 10 ± 0 "
        "| 6 of 6 (at 20, 20, 20, 20, 20, 20) |"
    )


def test_a_curve_that_never_turns_has_no_lead(tmp_path):
    write(tmp_path, {"few": DIMENSION["plenty"], "plenty": DIMENSION["plenty"]})
    found = {each.name: each.verdict for each in claims(tmp_path)}
    assert found["local_dimension_turns"] == "disagrees"
    assert "local_dimension_turns_before_the_loss" not in found
    assert leads(load_runs(tmp_path), WATCHED[0]) == []
    assert any(
        each.startswith(f"| `twonn` | trough | {', '.join(['never'] * SEEDS)} | none |")
        for each in table(tmp_path)
    )
    draw(tmp_path).draw_without_rendering()


def test_what_does_not_overfit_disagrees(tmp_path):
    write(tmp_path, loss={"few": LOSS["plenty"], "plenty": LOSS["few"]})
    verdicts = {each.name: each.verdict for each in claims(tmp_path)}
    assert verdicts["few_texts_overfit"] == "disagrees"
    assert verdicts["plenty_of_text_does_not_overfit"] == "disagrees"


# -- the command -----------------------------------------------------------------------------------


def run(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_leaves_records_claims_and_a_picture(tmp_path):
    letters = torch.randint(97, 123, (210_000,), generator=torch.Generator().manual_seed(0))
    text = tmp_path / "prefix"
    text.write_bytes(ENWIK8.head + bytes(letters.tolist()))
    sizes = ["--layers", 1, "--width", 8, "--heads", 2, "--context", 16, "--batch", 2]
    broken_off = Record(tmp_path / "o" / "seed_0" / "few")
    broken_off.begin(0, {})
    for step in (0, 60):
        broken_off.write(reading_of({"twonn/mean": 1.0}, step))
    broken_off.close()
    result = run(
        "--data", text, "--out", tmp_path / "o", "--seeds", 1, "--processes", 1, *sizes,
        "--steps", 3, "--distance", 2, "--few", 100,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for name in TEXTS:
        folder = tmp_path / "o" / "seed_0" / name
        assert [path.name for path in folder.glob("readings*")] == ["readings.jsonl"]
        readings = read(folder)
        assert [each.step for each in readings] == [0, 2, 3]
        for each in readings:
            assert each.values["training/held_out_loss"] > 2
            assert each.values["training/train_loss"] > 2
            assert each.values["effective_rank_last/layer_01/n"] == 128
            assert each.values["local_dimension/layer_01"] > 0
    assert {each.verdict for each in load_claims(tmp_path / "o")} == {"undecided"}
    assert (tmp_path / "o" / "overfit.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", 10, "--heads", 4], "--width 10 cannot be shared among --heads 4"),
        (["--few", 20, "--context", 32], "--few 20 holds no window of --context 32"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments, words, tmp_path):
    result = run("--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
