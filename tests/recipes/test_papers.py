"""Figures of single papers, and the command that draws them.

`approved` holds what a person has approved: after a change that is meant, run these tests with
`APPROVE=1` and look at the pictures.
"""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from geomon.kernels.token_types import token_types
from geomon.record import Readings, read
from geomon.record.arrays import ArrayPlace
from recipes.papers.__main__ import OF_A_RUN, app
from recipes.papers.arrays import MissingError
from recipes.papers.layers import norms_figure
from recipes.papers.queries_keys import clouds_figure, means_figure, stability_figure
from support.pages import HEADS, LAYERS, STEPS, WIDTH, arrays_at, holds_picture, write, write_run
from support.samples import normal


@pytest.fixture
def run(make_readings, tmp_path):
    return write_run(tmp_path / "whole", make_readings(STEPS, layers=LAYERS, heads=HEADS))


def rewrite(run, change):
    """Change the arrays of each reading by a function of them."""
    for reading in run:
        arrays = arrays_at(reading)
        change(arrays)
        run.folder.write(reading.step, reading.source, arrays)


def words_of(figure) -> str:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    labels = [each for axes in figure.axes for each in (axes.get_title("left"), axes.get_ylabel())]
    return " | ".join([figure.get_suptitle(), *texts, *labels])


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_that_cannot_give_a_figure_says_what_is_missing(make_readings, name):
    for readings in (make_readings(), Readings([], [])):
        with pytest.raises(MissingError, match=r"^.*(not measured|stand beside the).*$"):
            OF_A_RUN[name](readings)


def test_rows_that_are_not_finite_are_left_out(run):
    def spoil(arrays):
        for head, bad in enumerate((np.nan, np.inf)):
            arrays["", "queries", 1][head, 0] = arrays["", "mean_query", 2][head] = bad

    rewrite(run, spoil)
    for draw in (means_figure, clouds_figure):
        draw(run).draw_without_rendering()


def test_without_single_rows_there_are_means_and_no_clouds(run):
    def drop(arrays):
        for place in [place for place in arrays if place.name in ("queries", "keys")]:
            del arrays[place]

    rewrite(run, drop)
    assert "most similar head" in words_of(means_figure(run))
    with pytest.raises(MissingError, match="so many heads that only their means fit"):
        clouds_figure(run)


def test_the_line_through_token_types_is_that_of_the_metric(make_readings, tmp_path):
    ids = torch.randint(0, 9, (400,), generator=torch.Generator().manual_seed(0))
    hidden = (1 + ids[:, None] / 3) * normal(400, 6) + ids[:, None] / 5
    found = token_types(hidden, ids)
    fit = found.norm_variance_slope()
    run = write_run(tmp_path, make_readings((0,)), arrays=None)
    arrays = {"type_ids": ids.unique(), "type_rows": found.rows, "type_square_of_mean": found.m,
              "type_scatter": found.scatter}  # fmt: skip
    run.folder.write(0, "probe", {ArrayPlace("", n, 1): a.numpy() for n, a in arrays.items()})
    figure = norms_figure(run)
    words = f"{words_of(figure)} {figure.axes[0].get_xlabel()}"
    assert f"slope {fit.slope.item():+.2f}, R² {fit.r_squared.item():.2f}" in words
    assert f"Q varies by {100 * fit.q_variation.item():.0f} %" in words
    assert f"{int(fit.types)} token types" in words


@pytest.mark.parametrize(
    ("rows", "scatter"),
    [(9, 40.0), (20, 40.0), (20, 0.0)],  # too few of each type; all types alike; and rows too
)
def test_where_types_give_no_line_none_is_said(run, rows, scatter):
    def level(arrays):
        alike = {"type_rows": rows, "type_square_of_mean": 5.0, "type_scatter": scatter}
        arrays |= {place: np.full(12, alike[place.name]) for place in arrays if place.name in alike}

    rewrite(run, level)
    figure = norms_figure(run)
    assert ("fewer than 3 token types come 10 times" in words_of(figure)) == (rows < 10)
    assert figure.axes[0].get_title("left").endswith("Layer 0, step 1,500")
    assert "slope" not in figure.axes[0].get_xlabel()


@pytest.fixture
def run_of(make_readings, tmp_path):
    """Write a run whose joined cosine goes from 0 to an end at each of its layers."""
    steps = (0, 16, 128)

    def write_one(name, ends, first_layer=1) -> Readings:
        def arrays(reading):
            found = {}
            for layer, end in enumerate(ends, start=first_layer):
                cosine = end * steps.index(reading.step) / 2
                query, key = np.zeros((HEADS, WIDTH)), np.zeros((HEADS // 2, WIDTH))
                query[:, 0], query[:, 1], key[:, 0] = cosine, np.sqrt(1 - cosine**2), 3
                found[ArrayPlace("", "mean_query", layer)] = query
                found[ArrayPlace("", "mean_key", layer)] = key
            return found

        readings = make_readings(steps, layers=first_layer + len(ends))
        return read(write(tmp_path / name, readings, arrays))

    return write_one


def test_a_run_without_means_is_named_and_runs_without_a_common_layer_are_refused(run_of):
    whole, bare = run_of("a", [0.5]), run_of("b", [])
    with pytest.raises(MissingError, match=r"^b: no mean queries and keys stand beside"):
        stability_figure({"a": whole, "b": bare})
    with pytest.raises(MissingError, match="no layers in common"):
        stability_figure({"a": whole, "c": run_of("c", [0.5], first_layer=2)})


@pytest.mark.usefixtures("run")
def test_the_command_draws_what_runs_can_give_and_says_the_rest_in_a_line(run_of, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    for name, ends in (("a", (0.9, 0.01, -0.7)), ("b", (0.8, -0.5, -0.9))):
        run_of(name, ends)
    with matplotlib.rc_context({"savefig.dpi": 50}):
        result = invoke(*(tmp_path / name for name in ("whole", "a", "b")))
        alone = invoke(tmp_path / "a", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = [tmp_path / "whole" / "papers" / f"{name}.png" for name in (*OF_A_RUN, "stability")]
    assert result.stdout.splitlines() == [f"wrote {path}" for path in written]
    for path in written:
        holds_picture(Path(__file__).parent / "approved" / path.name, path)
    lines = alone.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("no ")] == [
        "no clouds", "no drift", "no norms", "no spectra",
    ]  # fmt: skip
    refused = invoke(tmp_path / "nothing")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
