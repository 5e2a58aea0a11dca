"""The report: what the page says and shows, that it needs no network, and that nothing acts."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from shown import course_of, write
from tagged import TEXTS, raised_of, with_values
from typer.testing import CliRunner

from geomon.analysis import summarise
from geomon.cli import make_app
from geomon.note import Note
from geomon.record import FILE_NAME, Readings
from geomon.show.charts import draw
from geomon.show.loading import load, name_runs
from geomon.show.report import Run, render
from geomon.show.report.content import build_content, build_panels

CURVES = (
    "twonn/mean", "twonn_distinct/mean", "gride/mean/k1", "gride/mean/k32",
    "attention_entropy/mean", "geomon/overhead",
)  # fmt: skip
ACTING = "<script>alert(1)</script><b onclick='x()'>\"&amp;</b></script><!--"
TAG = "<img src=x onerror=alert(1)>"


def invoke(*arguments):
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


def run_of(readings, name="a", **description):
    described = {"model": "Synthetic", "metrics": TEXTS, **description}
    return Run(name, Path(name), replace(readings, runs=[described]))


def load_runs(paths):
    return [Run(name, path, load(path)) for name, path in zip(name_runs(paths), paths, strict=True)]


class Page(HTMLParser):
    """Elements, attributes and text of a page, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.scripts, self.words = [], [], [], ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.words += data


@pytest.fixture(scope="module")
def library():
    """The page with a short chart library, which is 5 MB long."""
    import plotly.offline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plotly.offline, "get_plotlyjs", lambda: "window.Plotly = {}")
        yield


def test_the_page_says_the_run_in_words_first(make_readings, library):
    page = Page(render([run_of(make_readings(), "run of today")]))
    words = " ".join(page.words.split())
    assert f"Geometry of run of today geomon {version('geomon')}, report of 20" in words
    assert "run of today Synthetic" in words
    assert (
        "intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, compressing, -0.4 ± 0.3 "
        "since step 1,024; peak 7.4 ± 0.1" in words
    )
    order = ["compressing", "No alerts.", "In words", "Over training", "Any other value"]
    order += ["Over depth and heads", "By layer and head"]
    order += ["Warnings and notes", "Configuration", "Cost", "Glossary"]
    places = [words.index(text) for text in order]
    assert places == sorted(places)


def test_the_page_asks_the_network_for_nothing_and_holds_the_library_once(make_readings):
    from plotly.offline import get_plotlyjs

    text = render([run_of(make_readings())])
    page = Page(text)
    assert len(text) < len(get_plotlyjs()) + 5e5
    fetched = [x for x in page.attributes if x[1] in ("src", "href", "action", "srcset")]
    assert fetched == [("link", "href", "data:,")]
    assert text.count(get_plotlyjs()[:2000]) == 1
    own = text.replace(get_plotlyjs(), "").replace('"plotlyServerURL": "https://plot.ly"', "")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|import\(", own)


def test_what_a_record_says_is_shown_and_does_not_act(make_readings, library):
    readings = make_readings(notes=[ACTING])
    values = [
        {**reading.values, f"{TAG}/mean": 1.0, f"{TAG}/layer_01": 2.0, f"{TAG}/layer_02": 2.0}
        for reading in readings
    ]
    odd = [
        with_values(reading, each, source=ACTING, mode=ACTING, dtype=ACTING)
        for reading, each in zip(readings, values, strict=True)
    ]
    courses = (course_of(TAG, 40), course_of("x", 40))
    said = {"model": ACTING, ACTING: ACTING, "layers": [ACTING]}
    raised = [raised_of(ACTING, 16, ACTING, courses=courses)]
    run = run_of(Readings([], odd, raised=raised), ACTING, **said)
    alarmed = replace(readings, raised=[raised_of("a", 16, courses=courses)])
    plain = Page(render([run_of(alarmed), run_of(readings)]))
    page = Page(render([run, run_of(readings)]))
    assert page.words.count(ACTING) >= 7  # names, model, alert, note, configuration, cost
    assert page.elements.count("script") == plain.elements.count("script")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "img" not in page.elements
    charts = "".join(page.scripts)
    assert TAG not in charts
    assert "<" not in "".join(re.findall(r'"(?:label|name|text)":"([^"]*)"', charts))
    # Twice escaped: plotly reads a little HTML, and JSON stands in a script.
    assert r"\u0026lt;img src=x" in charts or "&lt;img src=x" in charts


def test_nothing_of_a_record_brings_control_characters_into_the_page(make_readings, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)
    texts = {**TEXTS, "twonn": {**TEXTS["twonn"], "meaning": "bell\x07", "title": "esc\x1b"}}
    described = {"metrics": texts, "model": "M\x1b"}
    described |= {"geomon": "9999.1\x1b", "key\x07": "value\x1b"}
    curves = {"twonn/layer_01": [5.0] * 9}
    readings = make_readings(curves=curves, notes=["note\x07"])
    readings = replace(readings, raised=[raised_of("kind\x1b", 0, "alert\x1b")])
    readings.readings[-1] = with_values(readings[-1], readings[-1].values, dtype="type\x07")
    runs = [  # two of them differ in their seeds
        run_of(readings, name, seed=min(number, 1), tokens=number // 2, **described)
        for number, name in enumerate(name_runs([Path(f"run\x1b{n}") for n in range(3)]))
    ]
    page = render(runs)
    assert "mean of run" in page
    assert not set("\x07\x1b") & set(page)
    assert not re.search(r"\\u00(07|1b)", page)


def test_several_runs_stand_side_by_side_and_those_of_other_seeds_make_a_band(
    make_readings, tmp_path
):
    paths = [
        write(tmp_path / "one" / "seed_0", make_readings(), seed=0, rate=1, width=2),
        write(
            tmp_path / "one" / "seed_1",
            make_readings(error=0.3),
            width=2,
            rate=1,
            seed=1,
            time=1.8e9,
        ),
        write(tmp_path / "other" / "seed_0", make_readings(), tokens=64, rate=1, width=2),
    ]
    names = ["one/seed_0", "one/seed_1", "other/seed_0"]
    runs = load_runs([paths[0], paths[1] / FILE_NAME, paths[2]])
    assert [run.name for run in runs] == names

    def named(paths):
        panel = build_panels(load_runs(paths)).training["Intrinsic dimension"]
        return [line.name.split(":")[0] for line in panel.lines if line.name]

    of_mean = f"mean of {names[0]}, {names[1]}"
    assert set(named(paths)) == {names[2], of_mean}
    content = build_content(runs)
    assert [run["colour"] for run in content["runs"]].count(content["runs"][0]["colour"]) == 2
    differing = {row["name"] for row in content["configuration"] if row["differs"]}
    assert differing == {"seed", "tokens"}
    (tokens,) = (row for row in content["configuration"] if row["name"] == "tokens")
    assert tokens["texts"] == ["not recorded", "not recorded", "64"]
    # Two runs of one seed differ in something that no record holds, as the learning rate.
    paths.append(write(tmp_path / "rate" / "seed_1", make_readings(), seed=1, rate=1, width=2))
    assert not any(name.startswith("mean of") for name in named(paths))
    assert not any(name.startswith("mean of") for name in named([paths[1], paths[3]]))
    assert [run.name for run in load_runs([paths[0], paths[0]])] == ["seed_0 (1)", "seed_0 (2)"]


def test_the_mean_of_seeds_has_a_band_from_the_lowest_to_the_highest(make_readings):
    curves = [((0, 10, 20), [1.0, 2.0, 3.0]), ((0, 5, 20), [2.0, 3.0, 6.0])]
    curves += [((0, 20), [1.5, 4.5])] * 3
    runs = [
        run_of(make_readings(steps, curves={"anisotropy/mean": curve}), f"{seed}", seed=seed)
        for seed, (steps, curve) in enumerate(curves)
    ]
    panel = build_panels(runs).training["anisotropy"]
    mean = next(x for x in panel.lines if "mean of 0, 1, 2, 3, ...: " in x.name)
    assert (list(mean.x), list(mean.y)) == ([0, 10, 20], [1.5, 3.0, 4.5])
    assert (list(mean.low), list(mean.high)) == ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert all(line.width < mean.width / 2 for line in panel.lines if not line.name)


def test_maps_and_heads_of_long_runs_are_thinned_and_keep_both_ends(make_readings):
    steps = tuple(range(450))
    curves = {name: [1.0] * 450 for name in CURVES}
    panels = build_panels([run_of(make_readings(steps, curves=curves))])
    for shown, most in (
        (panels.maps["anisotropy"].columns, 64),
        (panels.heads["cosine of mean query and mean key"], 16),
        (panels.training["Intrinsic dimension"].lines[0].x, 402),
        (panels.steps, 402),
    ):
        assert len(shown) <= most
        assert (min(shown), max(shown)) == (0, 449)


def test_the_values_are_those_of_the_record(make_readings):
    readings = make_readings()
    panels = build_panels([run_of(readings)])
    dimension = panels.training["Intrinsic dimension"].lines
    assert dimension[0].y == readings.series("twonn/mean")[1]
    assert [line.name for line in dimension] == [
        "mean over layers", "distinct tokens, mean over layers",
        "by scale, scale 32, mean over layers",
    ]  # fmt: skip
    assert len({line.colour for line in dimension}) == 3
    last, profile = readings[-1].values, panels.depth["anisotropy"].lines[-1]
    assert list(profile.x) == [0, 1, 2, 3, 4]
    assert profile.y == [last[f"anisotropy/layer_{n:02d}"] for n in range(5)]
    heads = panels.heads["cosine of mean query and mean key"][1500]
    assert list(heads.layers) == [1, 2, 3, 4]
    assert heads.values[1][3] == last["qk_cosine/layer_02/head_3"]
    (largest,) = panels.training["anisotropy, largest layer"].lines
    assert largest.y[-1] == max(profile.y[1:])
    table = panels.maps["anisotropy"].values
    assert table.shape == (5, len(readings))
    np.testing.assert_array_equal(table[:, -1], profile.y)


def test_what_led_to_an_alert_is_a_chart_for_each_value(make_readings):
    courses = [course_of(f"max_logit/layer_01/head_{head}", 1055) for head in range(99)]
    at = {"words": "x", "courses": tuple(courses)}
    first, other = (raised_of("left_band", step, **at) for step in (1055, 1400))
    readings = replace(make_readings(), raised=[first, other, raised_of("not_finite", 8)])
    panels = build_panels([run_of(readings)]).before_alerts
    assert len(panels) == 12
    panel = panels["left band at step 1,055: max_logit/layer_01/head_1"]
    assert (panel.label, panel.alerts) == (courses[1].tag, [(1055, "left band")])
    (line,) = panel.lines
    assert (line.x, line.y) == (courses[1].steps, courses[1].values)
    assert draw(panel).layout.xaxis.ticktext == ("1,024", "1,055")
    both = build_panels([run_of(readings, "a"), run_of(make_readings(), "b")]).before_alerts
    assert next(iter(both)) == "a: left band at step 1,055: max_logit/layer_01/head_0"


def test_alerts_come_with_their_number_and_notes_are_counted(make_readings):
    raised = [raised_of("rank_collapse", step) for step in (20, 1700)]
    readings = replace(make_readings(notes=["few rows: 64"]), raised=raised)
    (run,) = build_content([run_of(readings)])["runs"]
    assert run["alerts"] == [f"Alert at step 20 (first of 2): {raised[0].words()}."]
    panel = build_panels([run_of(readings)]).training["Intrinsic dimension"]
    assert [step for step, _ in panel.alerts] == [20, 1700]
    words = [run["headline"], *run["alerts"], *run["sentences"]]
    assert sorted(words) == sorted(summarise(readings))  # each sentence once
    assert [note["text"] for note in run["notes"]] == ["few rows: 64"]
    once, often = Note("a", "once"), [Note("b", f"{n} often") for n in range(3)]
    noted = [
        with_values(reading, reading.values, notes=(each, *([once] * (reading.step == 8))))
        for reading, each in zip(make_readings((0, 8, 16)), often, strict=True)
    ]
    (run,) = build_content([run_of(Readings([], noted))])["runs"]
    names = ("text", "first", "last", "count")
    assert [tuple(note[name] for name in names) for note in run["notes"]] == [
        ("2 often", 0, 16, 3), ("once", 8, 8, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "without", [("twonn",), ("anisotropy", "qk_cosine"), ("attention_entropy",)]
)
def test_what_was_not_measured_has_no_chart(make_readings, without):
    readings = make_readings(without=without)
    panels = build_panels([run_of(readings)])
    titles = {TEXTS[name]["title"] for name in without if name != "twonn"}
    shown = [*panels.training, *panels.depth, *panels.maps, *panels.heads]
    assert not [title for title in shown if any(each in title for each in titles)]
    assert "Training loss" not in panels.training
    glossary = build_content([run_of(readings)])["glossary"]
    assert not any(f"({name})" in words for name in without for words in glossary)


def test_a_record_of_one_reading_without_metrics_makes_a_page(make_readings, library):
    reading = with_values(make_readings()[0], {"geomon/seconds": 1.0})
    page = Page(render([Run("a", Path("a"), Readings([], [reading]))]))
    assert "1 readings without a headline quantity." in page.words
    assert "newPlot" not in "".join(page.scripts)
    assert "share of the training's time" not in page.words  # which is unknown


def test_the_time_of_a_run_is_from_its_first_to_its_last_reading(make_readings):
    readings = [
        with_values(each, each.values, time=1e9 + 60 * each.step) for each in make_readings((8, 30))
    ]
    cost = build_content([run_of(Readings([], readings))])["cost"]
    (row,) = [row for row in cost if row["name"] == "from first to last reading"]
    assert row["texts"] == ["22.0 min"]


def test_runs_that_were_taken_up_again_say_how_often(make_readings):
    readings = make_readings().readings
    runs = [
        Run(name, Path(name), Readings([{"seed": 0, "model": 7}] * count, readings))
        for name, count in (("once", 1), ("again", 2))
    ]
    content, panels = build_content(runs), build_panels(runs)
    (row,) = [x for x in content["configuration"] if x["name"] == "starts"]
    assert (row["texts"], row["differs"]) == (["1", "2"], True)
    assert content["runs"][0]["model"] == "7"  # whatever a record calls it
    assert {name.partition(": ")[0] for name in (*panels.maps, *panels.heads)} == {"once", "again"}
    ends = [line.name for line in panels.depth["anisotropy"].lines if line.name]
    assert ends == ["once, step 1,500", "again, step 1,500"]
    once = build_content(runs[:1])["configuration"]
    assert not any(row["name"] == "starts" for row in once)


def test_a_report_is_a_page(make_readings, tmp_path):
    result = invoke("report", write(tmp_path / "run", make_readings()), "-o", tmp_path / "a.pdf")
    assert result.exit_code == 2
    assert "the file of a report must end in .html" in result.stderr
    assert not (tmp_path / "a.pdf").exists()


def test_the_command_writes_the_page(make_readings, tmp_path, library):
    folder = write(tmp_path / "run", make_readings())
    out = tmp_path / "new folder" / "in it" / "page.html"
    result = invoke("report", folder, folder, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"wrote {out} (0.")
    assert out.read_text().lstrip().startswith("<!DOCTYPE html>")
