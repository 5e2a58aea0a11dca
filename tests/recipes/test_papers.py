"""Figures of single papers, by their data and their words, and the command that draws them."""

import numpy as np
import pytest
import torch
from samples import normal
from shown import HEADS, LAYERS, STEPS, WIDTH, arrays_at, write, write_run
from tagged import reading_of
from typer.testing import CliRunner

from geomon.analysis.chance import chance_limit
from geomon.kernels.token_types import token_types
from geomon.record import Readings, read
from geomon.record.arrays import ArrayPlace
from recipes.papers.__main__ import OF_A_RUN, app
from recipes.papers.arrays import MissingError
from recipes.papers.layers import drift_figure, norms_figure, spectra_figure
from recipes.papers.queries_keys import clouds_figure, means_figure, stability_figure


@pytest.fixture
def run(make_readings, tmp_path):
    return write_run(tmp_path, make_readings(STEPS, layers=LAYERS, heads=HEADS))


def rewrite(run, change):
    """Change the arrays of each reading by a function of them."""
    for reading in run:
        arrays = arrays_at(reading)
        change(arrays)
        run.folder.write(reading.step, reading.source, arrays)


def panels_of(figure):
    """The axes by their captions."""
    return {axes.get_title("left").split("   ")[-1]: axes for axes in figure.axes}


def words_of(figure) -> str:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    labels = [axes.get_ylabel() for axes in figure.axes]
    return " | ".join([figure.get_suptitle(), *panels_of(figure), *texts, *labels])


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_that_cannot_give_a_figure_says_what_is_missing(make_readings, name):
    for readings in (make_readings(), Readings([], [])):
        with pytest.raises(MissingError, match=r"^.*(not measured|stand beside the).*$"):
            OF_A_RUN[name](readings)


def test_the_most_similar_and_the_most_opposite_head_at_the_end_are_found(run):
    arrays = arrays_at(run[1])
    for layer in range(1, LAYERS + 1):
        arrays["", "mean_query", layer] *= -1
    run.folder.write(run[1].step, run[1].source, arrays)
    means, clouds = words_of(means_figure(run)), words_of(clouds_figure(run))
    for words in (means, clouds):
        assert "most similar head\nlayer 1, head 0, cosine +1.00" in words
        assert "most opposite head\nlayer 4, head 3, cosine -0.98" in words
    assert clouds.count(": cosine +1.00") == clouds.count(": cosine -0.98") == 3
    assert "Queries and keys of single tokens, and their means" in clouds
    assert "from step 0 (open) to step 1,500 (filled)" in means


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_left_out(run, bad):
    def spoil(arrays):
        arrays["", "queries", 1][0, 0] = arrays["", "mean_query", 2][1] = bad

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


def test_shares_of_a_layer_sum_to_one():
    parts = {"": 0.5, "/mean": 0.2, "/between": 0.3, "/within": 0.5}
    values = {f"variance_shares/layer_{n:02d}{p}": x for n in range(14) for p, x in parts.items()}
    figure = norms_figure(Readings([], [reading_of(values, 1500)]))
    panel = panels_of(figure)["Parts of Q over depth, step 1,500"]
    shares = np.array([line.get_ydata() for line in panel.lines])
    assert shares.shape == (3, 14)
    assert shares.sum(axis=0) == pytest.approx(np.ones(14))


def test_p_values_stand_over_training(run):
    correlation, p_values = drift_figure(run).axes
    assert "Pearson" in correlation.texts[-1].get_text()
    (dots,) = correlation.lines
    np.testing.assert_allclose(dots.get_ydata(), [0.1, 0.3, 0.2, 0.4, 0.5])
    names = [text.get_text() for text in p_values.get_legend().get_texts()]
    assert names == ["Spearman", "Pearson", "least possible with 5 layers: 0.017", "0.05"]
    assert p_values.get_yscale() == "log"


def test_spectra_are_shares_of_the_whole_variance(run):
    every, *over = panels_of(spectra_figure(run)).items()
    expected = run.arrays(1500)["eigenvalues/layer_00"]
    total = max(10.0, expected.sum())
    np.testing.assert_allclose(every[1].lines[0].get_ydata(), expected / total)
    assert every[0] == "Every layer at step 1,500"
    assert [(words, len(axes.lines)) for words, axes in over] == [
        ("Layer 2 over training", 4), ("Layer 4 over training", 4),
    ]  # fmt: skip


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


def test_each_run_has_a_line_in_the_panel_of_each_layer(run_of):
    ends = {"a": (0.9, 0.01, -0.7), "b": (0.8, -0.5, -0.9), "c": (0.6, -0.01, -0.8)}
    runs = {name: run_of(f"study/seed_{name}", values) for name, values in ends.items()}
    figure = stability_figure(runs)
    panels = panels_of(figure)
    assert list(panels) == ["layer 1", "layer 2", "layer 3"]
    for layer, panel in enumerate(panels.values(), start=1):
        lines = [line for line in panel.lines if len(line.get_xdata()) == 3]
        for line, values in zip(lines, ends.values(), strict=True):
            assert line.get_ydata() == pytest.approx([0, values[layer - 1] / 2, values[layer - 1]])
        assert len({line.get_color() for line in lines}) == 3
        assert panel.patches[0].get_height() == pytest.approx(2 * chance_limit(HEADS * WIDTH))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["95 % of random directions", "a", "b", "c"]
    assert "3 runs: all end on the same side, beyond chance, in 2 of 3 layers" in words_of(figure)


def test_a_run_without_means_is_named_and_runs_without_a_common_layer_are_refused(run_of):
    whole, bare = run_of("a", [0.5]), run_of("b", [])
    with pytest.raises(MissingError, match=r"^b: no mean queries and keys stand beside"):
        stability_figure({"a": whole, "b": bare})
    with pytest.raises(MissingError, match="no layers in common"):
        stability_figure({"a": whole, "c": run_of("c", [0.5], first_layer=2)})


def test_the_command_draws_what_runs_can_give_and_says_the_rest_in_a_line(run_of, run, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    for name in "ab":
        run_of(name, [0.5])
    result = invoke(tmp_path, tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0, result.output
    written = [tmp_path / "papers" / f"{name}.png" for name in (*OF_A_RUN, "stability")]
    assert result.stdout.splitlines() == [f"wrote {path}" for path in written]
    assert written[-1].read_bytes()[:4] == b"\x89PNG"
    lines = invoke(tmp_path / "a", "--out", tmp_path / "out").stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("no ")] == [
        "no clouds", "no drift", "no norms", "no spectra",
    ]  # fmt: skip
    refused = invoke(tmp_path / "nothing")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
