"""Figures: how matplotlib draws panels, and each kind of figure by its data and its words."""

import math
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from shown import HEADS, LAYERS, STEPS, alerted, write_run
from tagged import reading_of, with_values
from typer.testing import CliRunner

from geomon.analysis.chance import chance_limit, heads_limit
from geomon.analysis.compare import Difference, compare
from geomon.cli import make_app
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.record import Readings
from geomon.show.collect import depth_panel, head_panels, map_panel
from geomon.show.colours import BLUE, GREY, NOTHING, VERMILLION
from geomon.show.figures import KINDS, as_image, card, draw, geometry_figure, save
from geomon.show.figures.compare import compare_figure
from geomon.show.figures.run import title_of
from geomon.show.panels import Line, Lines, NotMeasuredError


@pytest.fixture
def run(make_readings, tmp_path):
    return write_run(tmp_path, make_readings(STEPS, layers=LAYERS, heads=HEADS))


def panels_of(figure):
    """The axes that are panels, without colour bars, by their captions."""
    titled = {axes.get_title("left").split("   ")[-1]: axes for axes in figure.axes}
    return {words: axes for words, axes in titled.items() if words}


def words_of(figure) -> str:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([figure.get_suptitle(), *panels_of(figure), *texts])


def lines_of(axes, points):
    return [line for line in axes.lines if len(line.get_xdata()) == points]


def small(figure) -> np.ndarray:
    figure.dpi = 45
    return as_image(figure)


# -- panels, as matplotlib draws them --------------------------------------------------------------


def drawn(panel):
    return card(panel).axes


def test_lines_have_their_places_colours_bands_and_names():
    lines = [
        Line("one", [0, 4, 32], [5.0, 6.0, 7.0], BLUE, [4.5, 5.5, 6.0], [5.5, 6.5, 8.0]),
        Line("two", [0, 4, 32], [0.0, math.nan, 3.0], VERMILLION, dash="dash", width=3.0),
    ]
    panel = Lines("values", lines, null=(4.0, "noise: 4"), chance=(1.5, "by chance"))
    (axes,) = drawn(panel)
    first, second = lines_of(axes, 3)
    assert (list(first.get_ydata()), first.get_color()) == ([5, 6, 7], BLUE)
    assert (list(second.get_xdata())[1:], second.get_linewidth()) == ([4, 32], 3.0)
    assert second.get_linestyle() == "--"
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert sorted(set(corners[corners[:, 0] == 32, 1])) == [6.0, 8.0]
    assert axes.get_ylabel() == "values\n(band: 95 % interval)"
    assert axes.get_xlabel() == "training step (logarithmic)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4", "10", "32"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "one", "two", "by chance",
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in lines_of(axes, 2)] == [[4.0, 4.0]]
    assert "noise: 4" in [text.get_text() for text in axes.texts]
    assert axes.patches[0].get_y() + axes.patches[0].get_height() == 1.5
    assert axes.get_ylim()[0] == 0
    left, right = axes.get_xlim()
    assert left < first.get_xdata()[0] < 32 < right


def test_lines_named_by_steps_have_a_colour_bar():
    lines = [Line(f"{step}", [0, 1], [1.0, 2.0], c) for step, c in ((4, BLUE), (32, GREY))]
    axes, bar = drawn(Lines("values", lines, "layer", "step", remark="one more thing"))
    assert axes.get_xlabel() == "layer (0 = what enters the first block)\none more thing"
    assert [line.get_marker() for line in axes.lines] == ["o", "o"]
    assert bar.get_ylabel() == "step"
    assert sorted(label.get_text() for label in bar.get_yticklabels()) == ["32", "4"]
    (mesh,) = [c for c in bar.collections if c.get_array() is not None and c.get_array().size > 1]
    colours = [matplotlib.colors.to_hex(c).upper() for c in mesh.to_rgba(mesh.get_array().ravel())]
    assert colours == [BLUE, GREY]


@pytest.mark.parametrize("high", [250.0, 315.0])  # an axis up to 1e3 times its beginning
def test_a_logarithmic_axis_names_numbers(high):
    lines = [Line("", [1, 2, 4], [0.5, 2.0, high], BLUE)]
    (axes,) = drawn(Lines("values", lines, "scale", is_logarithmic=True))
    axes.figure.draw_without_rendering()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylabel() == "values\n(logarithmic)"
    named = [label.get_text() for label in axes.get_yticklabels()]
    assert ("3" in named) == (high < 300)
    assert "1" in named
    (dot,) = drawn(Lines("values", [Line("", [7], [1.0], BLUE)]))[0].lines
    assert dot.get_marker() == "o"
    norms = {f"norm/layer_{n:02d}": v for n, v in enumerate((0.25, 2.0, high))}
    axes, bar = drawn(map_panel(Readings([], [reading_of(norms)]), "norm"))
    axes.figure.draw_without_rendering()
    assert bar.get_ylabel() == "norm\nlogarithmic"
    assert ("3" in [label.get_text() for label in bar.get_yticklabels()]) == (high < 300)


def test_an_alert_is_a_line_along_which_its_kind_is_written(make_readings):
    readings = alerted(make_readings(), [(200, "rank_collapse"), (1700, "rank_collapse")])
    figure = geometry_figure(readings)
    for panel in (figure.axes[place] for place in (0, 2, 3)):
        marked = [line.get_xdata()[0] for line in panel.lines if line.get_color() == "#A8488A"]
        assert marked == [200, 1700]
        assert panel.get_xlim()[1] > 1700  # after the last reading
        texts = [(t.get_text(), t.xy[0]) for t in panel.texts if t.get_rotation() == 90]
        assert texts == [("rank collapse", 200), ("", 1700)]
    losses = {"training/loss": [4.0] * 9}
    early = geometry_figure(alerted(make_readings(curves=losses), [(3, "not_finite")]))
    (loss,) = next(axes for axes in early.axes if "loss" in axes.get_ylabel()).lines
    # Step 0 has its place by the first step that is drawn, that of the alert.
    assert loss.get_xdata()[0] == early.axes[0].lines[0].get_xdata()[0] < 3


def test_a_matrix_has_the_first_layer_at_the_bottom_and_small_ones_their_values():
    values = {f"q/layer_{n:02d}/head_{h}": 10.0 * n + h for n in (1, 2) for h in range(3)}
    values["q/layer_01/head_1"] = math.nan
    (matrix,) = head_panels(Readings([], [reading_of(values)]), "q").values()
    axes, bar = drawn(matrix)
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {
        (h, n - 1): f"{10 * n + h:.2f}" for n in (1, 2) for h in range(3) if (n, h) != (1, 1)
    }
    assert axes.get_ylim()[0] < axes.get_ylim()[1]
    assert matplotlib.colors.to_hex(axes.get_facecolor()).upper() == NOTHING
    assert (bar.get_ylabel(), axes.get_xlabel()) == ("q", "head")


def test_heads_are_drawn_at_the_ends_and_in_the_middle_of_the_run(make_readings):
    steps = (0, 16, 32, 64, 128, 362, 500, 724)
    figure = draw("heads", make_readings(steps, heads=2), "qk_cosine")
    titles = [axes.get_title("left") for axes in figure.axes]
    assert [words for words in titles if words] == ["step 0", "step 362", "step 724"]


def test_a_map_has_columns_about_its_steps(make_readings):
    curves = {f"twonn/layer_{n:02d}": [5.0 + 30 * (not n)] * 9 for n in range(3)}
    matrix = map_panel(make_readings(curves=curves), "twonn")
    axes, _ = drawn(matrix)
    mesh = axes.collections[0]
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), matrix.values)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.0, 5.0)
    edges = mesh.get_coordinates()[0, :, 0]
    steps = list(matrix.columns)[1:]
    assert all(a < step < b for a, step, b in zip(edges[1:], steps, edges[2:], strict=False))
    assert axes.get_xlabel().endswith("\nlayer 0, far above: 35")
    large, small = (
        drawn(head_panels(make_readings((0,), layers=layers, heads=2), "qk_cosine")[0])[0]
        for layers in (17, 12)
    )
    assert (len(large.texts), len(small.texts)) == (0, 24)
    assert [int(label.get_text()) for label in large.get_yticklabels()] == [*range(1, 18, 2)]


# -- the figure of a run ---------------------------------------------------------------------------


def test_each_caption_stands_over_its_own_data(run):
    found = panels_of(draw("run", run))
    expected = {
        "Intrinsic dimension, mean over layers": run.series("twonn/mean")[1],
        "anisotropy over depth": [run[-1].values[f"anisotropy/layer_0{n}"] for n in range(5)],
        "cosine of mean query and mean key by layer": np.median(
            [run.series(f"qk_cosine/layer_01/head_{head}")[1] for head in range(HEADS)], axis=0
        ),
        "attention entropy by layer": run.series("attention_entropy/layer_02")[1],
    }
    assert list(found) == list(expected)
    for words, values in expected.items():
        assert any(list(line.get_ydata()) == pytest.approx(values) for line in found[words].lines)
        assert found[words].get_ylabel().startswith(words.split(", ")[0].split(" by ")[0][:10])
    bars = [axes.get_ylabel() for axes in draw("run", run).axes]
    assert "layer (c and d)" in bars
    mixed = replace(run, mixed_at=3)
    assert draw("run", mixed).get_suptitle().startswith("Two runs wrote into this record at once")


@pytest.mark.parametrize("distinct", [5.0, 40.0])  # a linear axis, and a logarithmic one
def test_no_line_is_covered_by_the_legend(run, distinct):
    changed = [with_values(r, r.values | {"twonn_distinct/mean": distinct}) for r in run]
    figure = geometry_figure(Readings(run.runs, changed), title="Takes height from the panels")
    figure.draw_without_rendering()
    (loss,) = next(axes for axes in figure.axes if "loss" in axes.get_ylabel()).lines
    for panel, others in ((figure.axes[0], [loss]), (figure.axes[2], [])):
        bottom = panel.get_legend().get_frame().get_window_extent().y0
        for line in (*panel.lines, *others):
            assert line.get_window_extent().y1 < bottom
        assert max(panel.get_yticks()) < panel.get_ylim()[1] * 0.95


def test_what_was_not_measured_is_said(make_readings):
    missing = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    empty = [
        with_values(r, dict.fromkeys(r.values.keys() - {"geomon/seconds"}, math.nan))
        for r in make_readings()
    ]
    for readings in (make_readings(without=missing), Readings([], []), Readings([], empty)):
        figure = geometry_figure(readings)
        as_image(figure)
        assert words_of(figure).count("not measured") == 4
        assert {words.get_position() for axes in figure.axes for words in axes.texts} == {
            (0.5, 0.5)
        }
        assert not any(axes.get_xticks().size for axes in figure.axes)


@pytest.mark.parametrize(
    ("steps", "layers", "heads"),
    [((0,), 2, 1), ((7,), 3, 5), ((0, 16), 48, 64), ((500, 700, 900), 2, 3)],
)
def test_every_size_of_run_is_drawn(make_readings, steps, layers, heads):
    figure = geometry_figure(make_readings(steps, layers=layers, heads=heads), title="run")
    assert small(figure).std() > 5


def test_the_title_says_model_size_steps_and_loss(run, make_readings):
    assert title_of(run) == (
        "Synthetic, 1.23 million parameters, 4 blocks, steps 0 to 1,500, training loss 5.00 → 2.00"
    )
    assert draw("run", run).get_suptitle() == title_of(run)
    described = {"model": "a\x1b[2J\u202e$b^$", "layers": 3, "parameters": 10**9}
    acting = Readings([described], make_readings((0,)).readings)
    assert title_of(acting).isprintable()
    assert "1 billion parameters" in title_of(acting)
    few = Readings([{"parameters": 5000}], acting.readings)
    assert title_of(few) == "5,000 parameters, steps 0 to 0"
    small(draw("run", acting))
    assert title_of(Readings([], [])) is None
    curves = {"training/loss": [5.0, 4.0]}
    for steps in ((0,), (0, 16)):  # a line needs two points
        axes = geometry_figure(make_readings(steps, curves=curves)).axes
        assert sum("loss" in each.get_ylabel() for each in axes) == len(steps) - 1
    losses = [a for a in draw("run", run).axes if "training loss" in a.get_ylabel()]
    assert list(losses[0].lines[0].get_ydata()) == run.series("training/loss")[1]
    assert losses[0].get_ylabel() == "training loss (dash-dotted)"
    values = {t: v for t, v in run[-1].values.items() if t != "training/loss"}
    shorter = Readings(run.runs, [*run.readings[:-1], with_values(run[-1], values)])
    (label,) = [a.get_ylabel() for a in draw("run", shorter).axes if "loss" in a.get_ylabel()]
    assert label == "training loss (dash-dotted, known to step 128)"
    assert title_of(shorter).endswith(", training loss 5.00 → 4.74 (step 128)")


# -- other kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "run"])
def test_a_run_that_cannot_give_a_figure_says_what_was_not_measured(make_readings, kind):
    bare = make_readings(
        without=["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    )
    for readings in (bare, Readings([], [])):
        with pytest.raises(NotMeasuredError) as raised:
            draw(kind, readings)
        text = str(raised.value)
        assert "not measured" in text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("kind", "metric", "words"),
    [
        ("map", "anisotropi", r"anisotropi: not measured in this run: did you mean anisotropy"),
        ("map", "zzz", r"not measured in this run; .*twonn, .* were$"),
        ("heads", "twonn", r"twonn of single heads: not measured in this run; .*qk_cosine"),
        ("cosines", "qk_cosin", r"did you mean qk_cosine"),
    ],
)
def test_a_metric_that_is_not_there_is_answered_by_those_that_are(run, kind, metric, words):
    with pytest.raises(NotMeasuredError, match=words):
        draw(kind, run, metric)


def test_heads_beyond_chance_among_all_heads_are_counted(run):
    """Of isotropic directions one head in twenty lies outside its own band of 95 %."""
    last = run[-1]
    cosines = 2 * [0.9, -0.9, 0.8, 0.75, 0.6, -0.6, 0.4, -0.2]
    names = [f"qk_cosine/layer_{n:02d}/head_{h}" for n in range(1, 5) for h in range(4)]
    values = dict(last.values) | dict(zip(names, cosines, strict=True))
    values["qk_cosine/null_magnitude"] = isotropic_cosine_magnitude(16)
    readings = Readings([], [*run.readings[:-1], with_values(last, values)])
    figure = draw("cosines", readings)
    limit = heads_limit(readings[-1])
    assert sum(abs(value) > chance_limit(16) for value in cosines) == 12
    assert (
        "16 heads at the end: 6 similar (orange), 2 opposite (blue), 8 within chance "
        f"(±{limit:.2f})"
    ) in words_of(figure)
    lines = [line for axes in figure.axes for line in lines_of(axes, 4)]
    for colour, count in zip((VERMILLION, BLUE, GREY), (6, 2, 8), strict=True):
        assert sum(line.get_color() == colour for line in lines) == count
    (band,) = figure.axes[0].patches
    assert band.get_y() + band.get_height() == pytest.approx(limit)


def test_heads_of_another_metric_are_coloured_by_their_sign():
    values = {f"qk_dot/layer_01/head_{head}": head - 1.0 for head in range(3)}
    (axes,) = draw("cosines", Readings([], [reading_of(values)]), "qk_dot").axes
    assert [line.get_color() for line in axes.lines] == [BLUE, GREY, VERMILLION]


@pytest.mark.parametrize("layers", [1, 2, 13])
def test_the_title_of_few_and_of_many_layers_stays_inside(make_readings, tmp_path, layers):
    figure = draw("cosines", write_run(tmp_path, make_readings((0, 8), layers=layers, heads=8)))
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert title.x0 > 0
    assert title.x1 < figure.bbox.x1
    assert figure._supylabel.get_window_extent().y1 < title.y0
    assert ("12 of 13 layers are drawn" in words_of(figure)) == (layers == 13)


def test_profiles_say_where_they_peak(run):
    panel = panels_of(draw("profiles", run))["anisotropy"]
    assert panel.get_xlabel().endswith("last step: peak at depth 0.50, bulge +4.50")


# -- two runs --------------------------------------------------------------------------------------


def test_names_of_folders_are_no_formulas_and_stay_inside(make_readings):
    runs = [make_readings((0, 16, 128)) for _ in range(2)]
    long = "/".join(["folder"] * 6)
    figure = compare_figure((runs[0], runs[1]), (f"{long}/a$^$", f"{long}/b"), compare(*runs))
    small(figure)
    left, right = figure.axes
    labels = left.get_legend().get_texts()
    assert [text.get_text() for text in labels] == [rf"first: {long}/a\$^\$", f"second: {long}/b"]
    for words in (left.xaxis.label, right.xaxis.label, *labels):
        box = words.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, words.get_text()


def test_differences_are_ordered_by_their_errors_and_one_that_is_large_hides_no_other(run):
    found = [
        Difference("twonn/mean", 8, 5.0, 6.0, 0.1),
        Difference("twonn_distinct/mean", 8, 5.0, 8.0, 1.0),
        Difference("attention_entropy/mean", 8, 2.0, 22.2, 13.0),
    ]
    for count, scale in ((3, "symlog"), (2, "linear")):
        panel = compare_figure((run, run), ("a", "b"), found[:count]).axes[1]
        names = [label.get_text() for label in panel.get_yticklabels()]
        titles = ["attention entropy", "distinct tokens", "intrinsic dimension"][-count:]
        assert [title in name for title, name in zip(titles, names, strict=True)] == [True] * count
        assert panel.get_xscale() == scale


# -- files -----------------------------------------------------------------------------------------


def test_images_are_pixels_and_files_are_written(make_readings, tmp_path):
    figure = card(depth_panel(make_readings(), "anisotropy"))
    image = as_image(figure)
    assert image.dtype == np.uint8
    height, width, channels = image.shape
    assert channels == 3
    assert width > height > 200
    path = save(figure, f"{tmp_path}/new/folder/profile.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="xyz"):
        save(figure, tmp_path / "profile.xyz")
    with pytest.raises(ValueError, match=r"ends in \.png"):
        save(figure, tmp_path / "profile")


def test_nothing_of_matplotlib_is_changed_and_pyplot_is_never_loaded(make_readings):
    before = dict(matplotlib.rcParams)
    as_image(geometry_figure(make_readings()))
    assert dict(matplotlib.rcParams) == before
    code = "import sys, geomon.show.figures; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def invoke(*arguments):
    return CliRunner().invoke(make_app(), ["figure", *map(str, arguments)])


def test_figures_are_written_by_kind(run, tmp_path):
    result = invoke(tmp_path, "--kind", "dimension", "--kind", "map", "--metric", "cosine")
    assert result.stdout.splitlines() == [
        f"wrote {tmp_path / 'figures' / 'dimension.png'}",
        f"wrote {tmp_path / 'figures' / 'map_cosine.png'}",
    ]
    other = tmp_path / "else.svg"
    assert invoke(tmp_path, "--kind", "profiles", "--out", other).exit_code == 0
    assert "<svg" in other.read_text()[:1000]


@pytest.fixture
def files_are_empty(monkeypatch):
    def touch(figure, path):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr("geomon.show.figures.save", touch)


@pytest.mark.usefixtures("files_are_empty")
def test_all_draws_what_the_run_can_give_and_says_the_rest_in_a_line(make_readings, tmp_path):
    write_run(tmp_path, make_readings(without=["qk_cosine"]), arrays=None)
    lines = invoke(tmp_path, "--all").stdout.splitlines()
    assert len(lines) == len(KINDS)
    missing = [line.split(":")[0] for line in lines if line.startswith("no ")]
    assert missing == ["no cosines"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "nothing"], "no figure is called 'nothing': there are run, dimension"),
        (["--kind", "nothing", "--kind", "map"], "no figure is called 'nothing'"),
        (
            ["--kind", "dimension", "--metric", "cosine"],
            "'dimension' takes no metric: profiles, map, heads",
        ),
        (["--kind", "heads", "--metric", "twonn"], "twonn of single heads: not measured"),
    ],
)
def test_bad_input_is_one_clear_line(make_readings, tmp_path, arguments, words):
    write_run(tmp_path, make_readings(STEPS), arrays=None)
    result = invoke(tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_notebook_shows_what_is_drawn(run):
    assert draw("heads", run)._repr_png_().startswith(b"\x89PNG")
