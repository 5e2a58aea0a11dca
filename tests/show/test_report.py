"""The report: what stands on its first screen, and what is healthy."""

import json
import re

import pytest

from geomon import Readings
from support.pages import alerted, course_of, invoke, write
from support.readings import TEXTS, reading_of


@pytest.fixture(autouse=True)
def _short_library(monkeypatch):
    """Pages without the library of charts, which is 5 MB long."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)


def page_of(folder, readings, **texts):
    """The page of a run, and its charts by title: curves and layout."""
    return page_on(folder, write(folder / "run", readings, metrics={**TEXTS, **texts}))


def page_on(folder, *runs):
    """The page on the folders of runs, and its charts by title: curves and layout."""
    done = invoke("report", *runs, "-o", folder / "page.html")
    assert done.exit_code == 0, done.stderr
    page = (folder / "page.html").read_text()
    charts, decoder = {}, json.JSONDecoder()
    for found in re.finditer(r'<h3>([^<]*)</h3>(?:(?!<h3>).)*?Plotly.newPlot\(\s*"[^"]*",\s*', page,
                             re.DOTALL):  # fmt: skip
        curves, end = decoder.raw_decode(page, found.end())
        layout, _ = decoder.raw_decode(page, re.compile(r"[\s,]*").match(page, end).end())
        charts[found[1]] = curves, layout
    return page, charts


def run_of(*means, metric="twonn"):
    """Readings with a metric's mean at steps 0, 100, 200 and so on."""
    values = [{f"{metric}/mean": mean, f"{metric}/mean/margin": 0.1} for mean in means]
    return [reading_of(each, 100 * place) for place, each in enumerate(values)]


def test_a_chart_comes_first_then_a_table_and_sentences_are_folded(tmp_path):
    page, _ = page_of(tmp_path, run_of(2.0, 7.0, 5.0))
    parts = ['class="headline"', "3 readings, at most 100 steps apart", "Plotly.newPlot",
             "<th>Quantity</th>", "<summary>In sentences</summary>", "<li>"]  # fmt: skip
    assert [page.count(part) > 0 for part in parts] == [True] * len(parts)
    assert sorted(parts, key=page.index) == parts
    assert re.search(r"<details>\s*<summary>In sentences", page)
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert [name for name in (".panel", ".headline", ".quiet", ".wide") if name not in style] == []
    row = re.search(r"<tr><th>intrinsic dimension, mean over layers</th>(.*?)</tr>", page, re.S)
    cells = [" ".join(cell.split()) for cell in re.findall(r"<td>(.*?)</td>", row[1], re.S)]
    assert cells[0].startswith("2.0 ± 0.1")
    assert "7.0 ± 0.1" in cells[1]
    assert cells[2].startswith("5.0 ± 0.1")
    assert cells[3].startswith("↓ ")


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        ([], '"calm">No alerts.</b> Until step 200: 3 readings, at most 100 steps apart, not wat'),
        ([(16, "not_finite")], '"quiet"> Until step 200: 3 readings, at most 100 steps apart, not'),
    ],
)
def test_it_says_how_often_was_looked_for_alerts(alerts, said, tmp_path):
    page, _ = page_of(tmp_path, alerted(Readings([], run_of(2.0, 7.0, 5.0)), alerts))
    assert said in re.sub(r"\s+", " ", page)


# Words on the healthy range, the last value, the band, and the words beside the value.
RANGES = [
    (
        "In runs (steps 400 to 800): 3.9 to 5.9; else look.",
        12.0,
        (3.9, 5.9),
        "far above the healthy 3.9 to 5.9",
    ),
    ("In runs (steps 400 to 800): 3.9 to 5.9; else look.", 11.8, (3.9, 5.9), ""),
    ("In runs (steps 400 to 800): 3.9 to 5.9; else look.", 1.95, (3.9, 5.9), ""),
    (
        "In runs (steps 400 to 800): 3.9 to 5.9; else look.",
        1.9,
        (3.9, 5.9),
        "far below the healthy 3.9 to 5.9",
    ),
    (
        "In runs: at scale 32, 13 to 34; GPT-2 is at 100 to 200.",
        90.0,
        (13, 34),
        "far above the healthy 13 to 34",
    ),
    ("In runs: 0; if it rises, look at 3 to 4.", 90.0, None, ""),
    ("", 90.0, None, ""),
]


@pytest.mark.parametrize(("healthy", "value", "band", "said"), RANGES)
def test_healthy_ranges_are_bands_and_values_far_outside_are_named(
    healthy, value, band, said, tmp_path
):
    text = {"title": "intrinsic dimension", "healthy": healthy}
    page, charts = page_of(tmp_path, run_of(5.0, value), twonn=text)
    assert re.findall(r'<b class="far">(.*?)</b>', page) == ([said] if said else [])
    _, layout = charts["Intrinsic dimension, mean over layers"]
    bands = [(each["y0"], each["y1"]) for each in layout.get("shapes", ()) if "fillcolor" in each]
    assert bands == ([band] if band else [])


@pytest.mark.parametrize(
    ("distinct", "kind"), [(30.0, "log"), (4.0, None), (0.0, None)]
)  # fmt: skip
def test_dimensions_that_differ_by_far_have_a_logarithmic_axis(distinct, kind, tmp_path):
    values = {"twonn/mean": 2.0, "twonn_distinct/mean": distinct}
    _, charts = page_of(tmp_path, [reading_of(values, step) for step in (0, 8)])
    ((_, layout),) = (chart for title, chart in charts.items() if title == "Intrinsic dimension")
    assert layout["yaxis"].get("type") == kind
    assert (layout["yaxis"].get("ticktext", []).count("20") == 1) == (kind == "log")


def test_the_mean_of_seeds_is_over_the_steps_that_all_runs_have(tmp_path):
    curves = {
        "a": {0: 2.0, 100: 4.0, 200: 6.0, 300: 8.0},
        "b": {100: 8.0, 150: 9.0, 300: 4.0, 400: 1.0},
        "c": {0: 7.0, 400: 7.5},
    }
    for name, curve in curves.items():
        values = [reading_of({"twonn/mean": value}, step) for step, value in curve.items()]
        described = {"seed": ord(name), "rate": float(name == "c")}
        write(tmp_path / name, values, **described)
    _, charts = page_on(tmp_path, *(tmp_path / name for name in curves))
    drawn, _ = charts["Intrinsic dimension, mean over layers"]
    points, colours, bands = {}, {}, {}
    for piece in drawn:  # lines are dashed across gaps
        name = piece["legendgroup"]
        if piece["mode"] == "none":
            half = len(piece["x"]) // 2
            ends = zip(piece["y"][:half], piece["y"][half:][::-1], strict=True)
            bands.setdefault(name, {}).update(zip(piece["x"][:half], ends, strict=True))
        else:
            points.setdefault(name, {}).update(zip(piece["customdata"], piece["y"], strict=True))
            colours[name] = piece["line"]["color"]
    mean = "mean of a, b"
    assert points == {
        "0": curves["a"], "1": curves["b"], "c": curves["c"],
        mean: {100: 6.0, 200: 6.6667, 300: 6.0},
    }  # fmt: skip
    assert bands == {mean: {100: (8.0, 4.0), 200: (7.3333, 6.0), 300: (8.0, 4.0)}}
    assert colours["0"] == colours["1"] == colours[mean] != colours["c"]


@pytest.mark.parametrize("count", [1, 2])
def test_curves_before_alerts_name_their_run_if_there_are_several(count, tmp_path):
    whole = alerted(Readings([], run_of(2.0, 7.0)), [(100, "left_band")], [course_of("a/b", 100)])
    runs = [write(tmp_path / name, whole) for name in "xy"[:count]]
    page, charts = page_on(tmp_path, *runs)
    assert "Before the alerts" in charts
    found = re.findall(r"[xy: ]*left[ _]band at step 100: a/b", page)
    names = ["x: ", "y: "] if count > 1 else [""]
    said = [f"{name}left band at step 100: a/b" for name in names]
    assert {*found} == {*said} if count > 1 else not found
