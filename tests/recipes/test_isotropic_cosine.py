"""The isotropic cosine: closed form, simulation, and watched models beside them."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import reading_of
from typer.testing import CliRunner

from geomon.kernels.baselines import isotropic_cosine_quantile
from geomon.record import Record
from recipes.enwik8.data import Corpus
from recipes.isotropic_cosine.__main__ import app
from recipes.isotropic_cosine.claims import PUBLISHED, level_claims, quantile_claims
from recipes.isotropic_cosine.levels import Level, levels, width_of
from recipes.isotropic_cosine.simulate import density, quantile_error, simulated_quantile
from recipes.isotropic_cosine.train import preset, train
from recipes.study import load_claims


@pytest.mark.parametrize("width", [3, 16, 768, 8192])
def test_the_density_is_that_whose_95_percent_the_quantile_cuts_off(width):
    quantile = isotropic_cosine_quantile(width)
    cosines = np.linspace(-1 + 1e-9, quantile, 400_001)
    assert np.trapezoid(density(cosines, width), cosines) == pytest.approx(0.95, abs=1e-5)


def test_a_simulated_quantile_scatters_as_its_standard_error_says():
    generator = torch.Generator().manual_seed(0)
    found = [simulated_quantile(16, 60, generator) for _ in range(200)]
    error = quantile_error(16, 60)
    assert abs(np.mean(found) - isotropic_cosine_quantile(16)) < 0.5 * error
    assert 0.85 < np.std(found) / error < 1.15


@pytest.mark.parametrize(("width", "value"), PUBLISHED.items())
def test_the_published_numbers_are_those_of_the_closed_form(width, value):
    assert float(f"{isotropic_cosine_quantile(width):.3g}") == value


@given(st.integers(2, 20_000))
@settings(deadline=None)
def test_a_width_is_found_again_from_its_quantile(width):
    assert width_of(isotropic_cosine_quantile(width)) == width


def test_claims_about_wrong_numbers_do_not_agree():
    right = {width: isotropic_cosine_quantile(width) for width in PUBLISHED}
    exact = quantile_claims(2048, [right, right])
    assert [claim.verdict for claim in exact] == ["agrees"] * 4
    wrong = {width: 1.02 * value for width, value in right.items()}
    assert [claim.verdict for claim in quantile_claims(2048, [wrong, wrong])] == ["disagrees"] * 4


def test_a_level_is_compared_with_the_percentile_of_its_width():
    above = [[Level("a", 64, 8, 0.5, 0.1, 0.2)]] * 3
    mean, least = level_claims(64, above)
    assert (mean.verdict, mean.measured.mean) == ("agrees", 2.5)
    assert (least.verdict, least.measured.mean) == ("disagrees", 0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training of two steps on random characters."""
    folder = tmp_path_factory.mktemp("decoder") / "seed_0"
    text = np.random.default_rng(0).integers(0, 8, 9000).astype(np.uint8)
    corpus = Corpus("random characters", b"abcdefgh", text, text, text)
    train(corpus, preset(32, 2), 0, folder)
    train(corpus, preset(32, 2), 0, folder)  # it is not made twice
    return folder


def test_levels_come_from_the_record(run):
    found = levels(run)
    assert [level.step for level in found] == [0, 2]
    assert {level.width for level in found} == {32}
    record = [json.loads(line) for line in (run / "readings.jsonl").read_text().splitlines()]
    column = record[1]["stacks"][""]["cosine"]
    layers = column["layers"][1 - column.get("first", 0) :]
    assert len(layers) == 4
    assert found[0].mean == pytest.approx(math.fsum(layers) / 4)
    assert found[0].least == min(layers)


def test_the_command_draws_a_run_that_is_given(run, tmp_path):
    arguments = ["--out", str(tmp_path), "--run", str(run), "--seeds", "2", "--rows", "60"]
    result = CliRunner().invoke(app, [*arguments, "--processes", "1"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    assert [claim.name for claim in load_claims(tmp_path)] == [
        *(f"isotropic_95th_percentile_{width}" for width in PUBLISHED), "isotropic_closed_form",
    ]  # fmt: skip
    again = CliRunner().invoke(app, [*arguments, "--processes", "1", "--rows", "70"])
    assert again.exit_code == 2
    assert again.stderr.startswith("error: ")
    assert "choose another folder by --out" in again.stderr


def test_a_record_without_mean_cosines_gets_one_clear_line(tmp_path):
    record = Record(tmp_path)
    record.write(reading_of({"twonn/mean": 3.0}, 0))
    record.close()
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "x"), "--run", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no mean cosine of layers" in result.stderr
    assert result.stderr.count("\n") == 1
