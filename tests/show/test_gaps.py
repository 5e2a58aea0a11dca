"""Gaps between readings: lines are dashed across them, and maps leave them white."""

import json
import re
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from geomon import read
from geomon.show.figures import draw
from support.pages import invoke, write
from support.readings import reading_of

# Steps of a run, and the gaps between them.
GAPS = [
    ((0, 16, 48, 500, 640, 900, 1050, 1200, 1350, 1500), [(48, 500)]),
    ((0, 400), [(0, 400)]),
    ((0, 16, 32, 64, 128, 256, 400), []),  # step 0 has no place of its own on the axis
    ((0, 100, 120, 150, 200, 300, 400), [(0, 100)]),
    ((0, 16, 32, 64, 128, 256, 512, 724, 1024, 1448), []),  # a third of the steps, all the same
    ((16, 500, 900, 1800, 3000, 10_000), [(16, 500)]),  # a twentieth of the steps
    ((300, 301, 303, 309, 315, 600), [(315, 600)]),
    ((64,), []),
]


def made(folder, steps):
    """A run on disk whose values differ at each reading."""
    readings = [
        reading_of({f"{metric}/{place}": 2.0 + n for metric in ("twonn", "anisotropy")
                    for place in ("mean", "layer_00", "layer_01")}, step)
        for n, step in enumerate(steps)
    ]  # fmt: skip
    return write(folder, readings)


@pytest.mark.parametrize(("steps", "gaps"), GAPS)
def test_lines_have_dots_at_readings_and_are_dashed_across_gaps(steps, gaps, tmp_path):
    (place, *_) = draw("dimension", read(made(tmp_path, steps))).axes
    dashed, joined, dotted = [], [], set()
    for line in place.lines:
        values = [round(value - 2) for value in line.get_ydata()]
        pairs = [(steps[one], steps[two]) for one, two in pairwise(values)]
        (joined if line.get_linestyle() == "-" else dashed).extend(pairs)
        dotted |= set(values) if line.get_marker() == "o" and line.get_markersize() > 2 else set()
    assert dashed == gaps
    assert sorted([*joined, *gaps]) == [*pairwise(steps)]
    assert dotted == {*range(len(steps))}
    assert ("dashed: no readings" in place.get_xlabel()) == bool(gaps)


@pytest.mark.parametrize(("steps", "gaps"), GAPS)
def test_maps_leave_gaps_white(steps, gaps, tmp_path):
    place = draw("map", read(made(tmp_path, steps)), "anisotropy").axes[0]
    white = [patch for patch in place.patches if to_hex(patch.get_facecolor()) == "#ffffff"]
    for patch, (one, other) in zip(white, gaps, strict=True):
        start, end = patch.get_x(), patch.get_x() + patch.get_width()
        assert end < other
        assert start > one or one == 0
        assert end / start > (other / max(one, start)) ** 0.7
    assert ("white: no readings" in place.get_xlabel()) == bool(gaps)


@pytest.mark.parametrize(("steps", "gaps"), GAPS)
def test_charts_of_reports_have_the_same_gaps(steps, gaps, tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)
    page = tmp_path / "page.html"
    done = invoke("report", made(tmp_path / "run", steps), "-o", page)
    assert done.exit_code == 0, done.stderr
    charts = [
        json.JSONDecoder().raw_decode(page.read_text(), start.end())[0]
        for start in re.finditer(r'Plotly.newPlot\(\s*"chart-\d+",\s*', page.read_text())
    ]
    line = [each for each in charts[0] if each.get("mode") != "none"]
    dashed = [tuple(piece["customdata"]) for piece in line if piece["line"]["dash"] == "dash"]
    assert dashed == gaps
    assert all(piece["mode"] == "lines+markers" for piece in line)


@pytest.mark.parametrize("count", [60, 61])
def test_many_readings_make_a_line_without_dots(count, tmp_path):
    (place, *_) = draw("dimension", read(made(tmp_path, tuple(range(1, count + 1))))).axes
    assert {line.get_marker() for line in place.lines} == {"o" if count == 60 else ""}


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ([40.0, 2.0, 4.0, 3.0], "peak at depth 0.50, bulge +0.60"),  # layer 0 is far above
        ([4.0, 2.0, 4.0, 3.0], "peak at depth 0.00, bulge −0.14"),
    ],
)
def test_profiles_speak_only_of_layers_that_they_draw(profile, said, tmp_path):
    values = {f"own/layer_{layer:02d}": value for layer, value in enumerate(profile)}
    run = read(write(tmp_path, [reading_of(values, 8)]))
    assert said in draw("profiles", run, "own").axes[0].get_xlabel()
