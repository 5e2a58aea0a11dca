"""The claims of the decoder follow from its records, and its records from its seeds."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tagged import reading_of
from typer.testing import CliRunner

from geomon import Readings, read
from geomon.analysis.queries_keys import LayerAlignment
from geomon.kernels.token_types import token_types
from recipes.decoder.__main__ import app
from recipes.decoder.claims import decoder_claims
from recipes.decoder.figure import decoder_figure, seeds_figure
from recipes.decoder.metrics import norm_variance_slope_shuffled
from recipes.decoder.questions import comparisons_of, questions_of
from recipes.decoder.questions.stability import one_sign_at_end, trend_correlations
from recipes.decoder.train import SIZES, Study, seconds_taken, train_seeds
from recipes.study.history import History, growth, onset, with_depth
from recipes.study.pictures import save_small

# Batches of 64: the 512 windows of a validation are eight of them.
TINY = Study(
    replace(SIZES, width=32, heads=2, context=16, batch=64, steps=8, warmup=1),
    windows=64,
    rows=256,
    first=4,
)
ARGUMENTS = [
    "--width", "32", "--heads", "2", "--context", "16", "--batch", "64", "--steps", "8",
    "--warmup", "1", "--windows", "64", "--rows", "256", "--first", "4", "--processes", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """No data and no network: nothing listens on port 9."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENWIK8", "")
        patch.setenv("GEOMON_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in ("http_proxy", "https_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        yield


@pytest.fixture(scope="module")
def folder(offline, tmp_path_factory):
    """Two trained seeds."""
    path = tmp_path_factory.mktemp("study")
    train_seeds(TINY, 2, folder=path, processes=1)
    return path


def history(course, steps=(0, 25, 50, 75, 100)):
    """A history in which every tag has the value of its function at each step."""
    readings = []
    for step in steps:
        values = {tag: function(step) for tag, function in course.items()}
        readings.append(reading_of(values, step))
    return History(Readings([{}], readings))


def answer(name, course):
    (question,) = [each for each in questions_of(SIZES) if each.name == name]
    return question.measure(history(course))


def layers(metric, *functions):
    return {f"{metric}/layer_{n:02d}": function for n, function in enumerate(functions)}


def test_every_question_is_answered_by_every_seed_or_named(folder):
    claims, unanswered = decoder_claims(folder)
    names = [question.name for question in (*questions_of(TINY.sizes), *comparisons_of(2))]
    assert len(set(names)) == len(names)
    assert sorted([*(claim.name for claim in claims), *unanswered]) == sorted(names)
    assert {claim.measured.count for claim in claims if claim.repeated == "seed"} == {2}
    assert all("4 layers of width 32, 8 steps" in claim.differs for claim in claims)
    assert all(claim.seconds > 0 for claim in claims)
    assert not {name for name in unanswered if "heads" not in name}


def test_seeds_differ_in_everything_but_the_text(folder):
    one, other = (read(folder / f"seed_{seed}")[0] for seed in range(2))
    assert one.tokens == other.tokens == 256
    assert one.values["twonn/mean"] != other.values["twonn/mean"]


def test_a_complete_seed_is_kept_and_an_ended_one_completed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "study")
    first, second = (tmp_path / "study" / f"seed_{n}" / "readings.jsonl" for n in range(2))
    before, whole = first.read_bytes(), read(second.parent)
    second.write_text("".join(second.read_text().splitlines(keepends=True)[:-1]))
    train_seeds(TINY, 2, folder=tmp_path / "study", processes=1)
    assert first.read_bytes() == before
    assert read(second.parent)[-1].step == 8
    tag = "anisotropy/mean"
    assert read(second.parent)[-1].values[tag] == pytest.approx(whole[-1].values[tag])


def test_the_pictures_are_small(folder, tmp_path):
    path = save_small(decoder_figure(folder), tmp_path / "a.png")
    assert 30_000 < path.stat().st_size < 150_000
    path = save_small(seeds_figure(folder), tmp_path / "b.png")
    assert 10_000 < path.stat().st_size < 60_000


def test_the_command_leaves_claims_and_refuses_other_sizes(folder):
    result = CliRunner().invoke(app, [*ARGUMENTS, "--seeds", "2", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert "anisotropy_grows" in result.output
    assert len(json.loads((folder / "claims.json").read_text())) > 50
    other = CliRunner().invoke(app, [*ARGUMENTS, "--steps", "9", "--out", str(folder)])
    assert other.exit_code == 2
    assert "with other sizes: choose another folder" in other.stderr
    assert other.stderr.count("\n") == 1


def test_seeds_are_compared_layer_by_layer(folder):
    claims = {claim.name: claim for claim in decoder_claims(folder)[0]}
    alike, signs = claims["seeds_align_alike"], claims["seeds_end_with_one_sign"]
    assert alike.repeated == signs.repeated == "layer"
    assert len(alike.values) == len(signs.values) == 4
    assert all(-1 <= value <= 1 for value in alike.values)
    assert signs.above == 0.5  # of two seeds every second layer has one sign by chance
    assert list(comparisons_of(1)) == []


def aligned(*curves):
    """Histories of seeds whose layers have these curves, [seeds][layers][steps]."""
    found = []
    for layers in curves:
        seed = history({})
        seed.__dict__["joined_heads"] = {
            number: LayerAlignment(number, 32, tuple(range(len(curve))), tuple(curve))
            for number, curve in enumerate(layers, start=1)
        }
        found.append(seed)
    return found


def test_trends_are_alike_where_their_directions_are():
    rise, fall, both = [0.0, 0.1, 0.4], [0.0, -0.2, -0.8], [0.1, -0.3, 0.2]
    assert trend_correlations(aligned([rise, fall], [rise, fall])) == pytest.approx([1, 1])
    assert trend_correlations(aligned([rise], [[-2 * v for v in rise]])) == pytest.approx([-1])
    # Of three seeds with one against the other two: 1, -1 and -1.
    against = [[-v for v in rise]]
    assert trend_correlations(aligned([rise], [rise], against)) == pytest.approx([-1 / 3])
    assert one_sign_at_end(aligned([rise, fall, rise], [both, fall, fall])) == [1, 1, 0]


def test_layers_without_a_whole_curve_for_every_seed_are_left_out():
    rise, torn = [0.0, 0.1, 0.4], [0.0, math.nan, 0.4]
    assert len(trend_correlations(aligned([rise, torn], [rise, rise]))) == 1
    assert len(one_sign_at_end(aligned([rise, rise], [rise]))) == 1
    assert trend_correlations(aligned([[0.5] * 3], [rise])) == []


def test_seeds_whose_signs_are_chance_have_no_correlation_on_average():
    signs = np.random.default_rng(0).choice([-1, 1], (3, 4000))
    curve = np.array([0.0, 0.3, 0.5])
    seeds = aligned(*([list(sign * curve) for sign in row] for row in signs))
    assert np.mean(trend_correlations(seeds)) == pytest.approx(0, abs=0.03)
    assert np.mean(one_sign_at_end(seeds)) == pytest.approx(0.25, abs=0.03)


def test_a_change_is_read_between_readings():
    linear = history({"a/mean": lambda step: 1.0 + step})
    assert linear.change("a/mean", 0, 1) == pytest.approx(100)
    assert linear.change("a/mean", 0.25, 0.75) == pytest.approx(76 / 26 - 1)


@pytest.mark.parametrize(
    ("course", "drift"),
    [(lambda step: step, 0.25), (lambda step: min(step, 50), 0), (lambda step: -step, -0.25)],
)
def test_late_drift_tells_growth_from_rest(course, drift):
    assert history({"a/mean": course}).late_drift("a/mean") == pytest.approx(drift)


def test_late_drift_needs_a_reading_in_the_third_quarter():
    assert math.isnan(history({"a/mean": float}, steps=(0, 50, 100)).late_drift("a/mean"))


def test_growing_in_the_mean_is_not_growing_at_every_layer():
    course = layers("anisotropy", lambda s: 1 - s, lambda s: s, lambda s: s, lambda s: 1 - s / 9)
    assert answer("anisotropy_grows", course) > 0
    assert answer("anisotropy_grows_at_every_layer", course) < 0
    assert growth(history(course), "anisotropy") == pytest.approx([100, 100, -100 / 9])


def test_expansion_and_compression_are_asked_of_the_same_moments():
    course = {"twonn/mean": lambda step: {0: 2, 25: 8}.get(step, 4)}
    assert answer("twonn_expands", course) == pytest.approx(3)
    assert answer("twonn_compresses", course) == pytest.approx(-0.5)


def test_depth_counts_from_layer_0():
    course = layers("variance_shares", *(lambda _, n=n: n for n in (3, 1, 2, 4)))
    assert with_depth(history(course).last, "variance_shares") == pytest.approx(0.4)


def test_the_onset_is_the_last_time_that_a_head_comes_beyond_chance():
    cosines = dict(zip((0, 25, 50, 75, 100), (-0.9, 0.1, -0.5, -0.6, -0.7), strict=True))
    heads = history({"qk_cosine/layer_01/head_0": cosines.get})
    assert onset(heads, "qk_cosine", (1, 0), 0.3) == 0.5
    assert onset(heads, "qk_cosine", (1, 0), 0.65) == 1
    assert onset(heads, "qk_cosine", (1, 0), 0.05) == 0.5


def test_heads_are_counted_on_their_side():
    heads = {"head_0": 0.9, "head_1": -0.9, "head_2": 0.1, "head_3": -0.8}
    course = {f"qk_cosine/layer_01/{name}": lambda _, v=v: v for name, v in heads.items()}
    assert answer("almost_all_heads_align", course) == 0.75
    assert answer("some_heads_opposite", course) == 0.5
    assert answer("similar_heads_align_early", course) == [0]
    assert len(answer("opposite_heads_align_late", course)) == 2


def test_shuffled_types_show_what_arithmetic_alone_makes():
    generator = torch.Generator().manual_seed(0)
    types = torch.arange(40).repeat_interleave(25)
    centres = torch.randn(40, 8, generator=generator).repeat_interleave(25, dim=0)
    noise = torch.randn(1000, 8, generator=generator)
    # The spread of a type grows with its distance from the origin: the opposite of a trade-off.
    rows = centres * (1 + 0.5 * noise)
    assert token_types(rows, types).norm_variance_slope().slope > 0
    assert -1.5 < norm_variance_slope_shuffled(rows, types)[""] < 0
    sphere = rows / rows.norm(dim=1, keepdim=True)
    assert norm_variance_slope_shuffled(sphere, types)[""] == pytest.approx(-1, abs=0.05)


def test_time_is_that_of_two_cores_which_take_the_next_seed(tmp_path):
    seeds = [tmp_path / f"seed_{n}" for n in range(3)]
    for seed, seconds in zip(seeds, (100, 60, 50), strict=True):
        seed.mkdir()
        (seed / "timing.json").write_text(json.dumps({"processor_seconds": seconds}))
    assert seconds_taken(seeds) == 110
    (seeds[1] / "timing.json").unlink()
    assert seconds_taken(seeds) != seconds_taken(seeds)  # unknown
