"""The figure of several runs: a line for each, names that tell them apart, and what it refuses."""

import numpy as np
import pytest
from typer.testing import CliRunner

from geomon.analysis.compare import compare
from geomon.analysis.queries_keys import align_layers, chance_limit
from geomon.cli import make_app
from geomon.record import Readings, Record, read
from geomon.record.arrays import ArrayPlace
from geomon.show.figures import as_image, draw
from geomon.show.figures.compare import compare_figure
from geomon.show.panels import NotMeasuredError

STEPS = (0, 16, 128)
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


@pytest.fixture
def run_of(make_readings, tmp_path):
    """Write a run whose joined cosine goes from 0 to an end at each of its layers."""

    def write(name, ends, first_layer=1) -> Readings:
        record = Record(tmp_path / name)
        record.begin(0, {})
        for number, reading in enumerate(make_readings(STEPS, layers=first_layer + len(ends))):
            arrays = {}
            for layer, end in enumerate(ends, start=first_layer):
                cosine = end * number / (len(STEPS) - 1)
                query, key = np.zeros((HEADS, WIDTH)), np.zeros((KEY_HEADS, WIDTH))
                query[:, 0], query[:, 1], key[:, 0] = cosine, np.sqrt(1 - cosine**2), 3
                arrays[ArrayPlace("", "mean_query", layer)] = query
                arrays[ArrayPlace("", "mean_key", layer)] = key
            record.write(reading)
            record.write_arrays(reading, arrays)
        record.close()
        return read(tmp_path / name)

    return write


def panels_of(figure):
    return {axes.get_title("left"): axes for axes in figure.axes if axes.get_title("left")}


def words_of_legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_run_has_a_line_in_the_panel_of_each_layer(run_of):
    ends = {"a": (0.9, 0.8, -0.7), "b": (0.8, -0.5, -0.9), "c": (0.7, 0.1, -0.8)}
    runs = [run_of(f"study/seed_{name}", values) for name, values in ends.items()]
    figure = draw("stability", runs)
    panels = panels_of(figure)
    assert list(panels) == ["layer 1", "layer 2", "layer 3"]
    for layer, panel in enumerate(panels.values(), start=1):
        lines = [line for line in panel.lines if len(line.get_xdata()) == len(STEPS)]
        for line, run, values in zip(lines, runs, ends.values(), strict=True):
            np.testing.assert_allclose(line.get_ydata(), align_layers(run)[layer].cosines)
            assert line.get_ydata()[-1] == pytest.approx(values[layer - 1])
            assert tuple(line.get_xdata())[1:] == STEPS[1:]
        assert len({line.get_color() for line in lines}) == 3
    band = (
        panels["layer 1"]
        .patches[0]
        .get_extents()
        .transformed(panels["layer 1"].transData.inverted())
    )
    assert band.y1 == pytest.approx(chance_limit(HEADS * WIDTH))
    assert words_of_legend(figure)[:3] == ["seed_a", "seed_b", "seed_c"]
    assert "3 runs: all end on the same side, beyond chance, in 2 of 3 layers" in (
        figure.get_suptitle()
    )
    figure.dpi = 40
    assert as_image(figure).std() > 5


def test_a_run_without_means_is_named_and_runs_without_a_common_layer_are_refused(run_of):
    whole, bare = run_of("a", [0.5]), run_of("b", [])
    with pytest.raises(NotMeasuredError, match=r"^b: no mean queries and keys stand beside"):
        draw("stability", [whole, bare])
    with pytest.raises(NotMeasuredError, match="no layers in common"):
        draw("stability", [whole, run_of("c", [0.5], first_layer=2)])
    with pytest.raises(ValueError, match="needs a run"):
        draw("stability", [])


def test_names_of_folders_are_no_formulas(run_of):
    runs = [run_of(name, [0.5]) for name in ("a$^", "b$")]
    assert words_of_legend(draw("stability", runs))[:2] == [r"a\$^", r"b\$"]
    for figure in (draw("stability", runs), compare_figure((runs[0], runs[1]), ("a$^$", "b$"), [])):
        figure.dpi = 30
        as_image(figure)


def test_long_names_do_not_push_words_out_of_the_comparison(run_of):
    first, second = run_of("a", [0.5]), run_of("b", [0.9])
    names = "/".join(["folder"] * 6) + "/a", "/".join(["folder"] * 6) + "/b"
    figure = compare_figure((first, second), names, compare(first, second))
    figure.draw_without_rendering()
    left, right = figure.axes
    for words in (left.xaxis.label, right.xaxis.label, *left.get_legend().get_texts()):
        box = words.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, words.get_text()
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels == [f"first: {names[0]}", f"second: {names[1]}"]


def test_the_command_lays_runs_over_one_another(run_of, tmp_path):
    def figure(*arguments):
        return CliRunner().invoke(make_app(), ["figure", *map(str, arguments)])

    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        run_of(folder.name, [0.5])
    path = tmp_path / "a" / "figures" / "stability.png"
    assert figure(*folders, "--kind", "stability").stdout == f"wrote {path}\n"
    assert path.stat().st_size > 10_000
    refused = figure(*folders)
    assert refused.exit_code == 2
    assert "the figure 'run' is of one run: of several there is stability" in refused.stderr
    every = figure(*folders, "--all", "--out", tmp_path / "all").stdout.splitlines()
    assert [line for line in every if not line.endswith("it is of one run")] == [
        f"wrote {tmp_path / 'all' / 'stability.png'}"
    ]
