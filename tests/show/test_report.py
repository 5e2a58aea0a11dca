import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tagged import TEXTS, alert_of, reading_of, with_values
from typer.testing import CliRunner

from geomon.cli import make_app
from geomon.note import Note
from geomon.record import FILE_NAME, Readings
from geomon.show.report import Run, load_runs, render, write_report
from geomon.show.report.content import _spread, build_content

ACTING = "<script>alert(1)</script><b onclick='x()'>\"&amp;</b></script><!--"


TAG = "<img src=x onerror=alert(1)>"


def invoke(*arguments):
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


def write(folder, readings, **description):
    folder.mkdir(parents=True)
    run = {"run": {"model": "Synthetic", "seed": 0, "time": 1.7e9, "metrics": TEXTS, **description}}
    lines = [json.dumps(run), *(reading.line() for reading in readings)]
    (folder / FILE_NAME).write_text("\n".join(lines) + "\n")
    return folder


def run_of(readings, name="a", **description):
    described = {"model": "Synthetic", "metrics": TEXTS, **description}
    return Run(name, Path(name), replace(readings, runs=[described]))


class Page(HTMLParser):
    """Elements, attributes and text of a page, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words, self.styles = [], [], "", ""
        self.attributes = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        last = self.elements[-1] if self.elements else ""
        if last == "script" and not self._is_over("script"):
            self.scripts[-1] += data
        elif last != "style":
            self.words += data

    def handle_endtag(self, tag):
        self.elements.append("/" + tag)

    def _is_over(self, tag):
        return self.elements[-1] == "/" + tag

    @property
    def data(self):
        return json.loads(self.scripts[0])


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
    assert "Geometry of run of today" in words
    assert (
        "intrinsic dimension 5.3 ± 0.1, compressing since step 256, 28 % below its peak 7.4"
        in words
    )
    order = ["compressing", "No alerts.", ", peak", "Over training", "Over depth", "Heads"]
    order += ["Warnings and notes", "Configuration", "Cost", "Glossary"]
    places = [words.index(text) for text in order]
    assert places == sorted(places)
    assert "5.3 ± 0.1" in words
    assert [chart["title"] for chart in page.data["charts"]][:2] == [
        "intrinsic dimension", "anisotropy"
    ]  # fmt: skip


def test_a_dimension_that_ends_before_the_run_is_not_said_to_be_that_of_now(make_readings):
    readings = make_readings()
    lost = with_values(readings[-1], {"training/loss": 1.0}, step=9000)
    content = build_content([run_of(Readings([], [*readings, lost]))])["runs"][0]
    end = f"{readings[-1].step:,}"
    assert f"(known to step {end})" in content["headline"]


def test_the_page_asks_the_network_for_nothing(make_readings):
    text = render([run_of(make_readings())])
    page = Page(text)
    assert len(text) < 3e6
    fetched = [x for x in page.attributes if x[1] in ("src", "href", "action", "srcset")]
    assert fetched == [("link", "href", "data:,")]
    own = text[: text.index('<script type="text/plain"')] + page.scripts[2]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|import\(", own)


def test_what_a_record_says_is_shown_and_does_not_act(make_readings, library):
    readings = make_readings(notes=[ACTING, alert_of(ACTING, ACTING)])
    values = [
        {**reading.values, f"{TAG}/mean": 1.0, f"{TAG}/layer_01": 2.0} for reading in readings
    ]
    odd = [
        with_values(reading, each, source=ACTING, mode=ACTING, dtype=ACTING)
        for reading, each in zip(readings, values, strict=True)
    ]
    run = run_of(Readings([], odd), ACTING, model=ACTING, **{ACTING: ACTING, "layers": [ACTING]})
    plain, page = Page(render([run_of(readings)])), Page(render([run, run_of(readings)]))
    assert page.words.count(ACTING) >= 7  # names, model, alert, note, configuration, cost
    assert page.elements.count("script") == plain.elements.count("script") == 3
    assert "b" not in {tag for tag, name, _ in page.attributes if name.startswith("on")}
    assert page.data["runs"][0]["name"] == ACTING
    assert "img" not in page.elements
    assert f"{TAG}/mean" in page.data["curves"]


def test_several_runs_stand_side_by_side_and_those_of_other_seeds_make_a_band(
    make_readings, tmp_path
):
    paths = [
        write(tmp_path / "one" / "seed_0", make_readings(), seed=0),
        write(tmp_path / "one" / "seed_1", make_readings(error=0.3), seed=1, time=1.8e9),
        write(tmp_path / "other" / "seed_0", make_readings(), tokens=64),
    ]
    runs = load_runs([paths[0], paths[1] / FILE_NAME, paths[2]])
    assert [run.name for run in runs] == ["one/seed_0", "one/seed_1", "other/seed_0"]
    content = build_content(runs)
    assert content["groups"] == [[0, 1]]
    differing = {row["name"] for row in content["configuration"] if row["differs"]}
    assert differing == {"seed", "tokens"}
    (tokens,) = (row for row in content["configuration"] if row["name"] == "tokens")
    assert tokens["texts"] == ["not recorded", "not recorded", "64"]
    # Two runs of one seed differ in something that no record holds, as the learning rate.
    paths.append(write(tmp_path / "rate" / "seed_1", make_readings(), seed=1))
    assert build_content(load_runs(paths))["groups"] == []
    assert build_content(load_runs([paths[1], paths[3]]))["groups"] == []
    assert [run.name for run in load_runs([paths[0], paths[0]])] == ["seed_0 (1)", "seed_0 (2)"]


def test_curves_and_tables_are_thinned_and_keep_ends_and_extremes(make_readings):
    steps = tuple(range(3000))
    curve = [5 + math.sin(step / 300) + 3 * (step == 1717) for step in steps]
    flat = {name: [1.0] * len(steps) for name in ("twonn_distinct/mean", "gride/mean/k1")}
    flat |= {name: [1.0] * len(steps) for name in ("gride/mean/k32", "attention_entropy/mean")}
    readings = make_readings(
        steps, curves={"twonn/mean": curve, "geomon/overhead": [0.1] * 3000, **flat}
    )
    (run,) = build_content([run_of(readings)])["runs"]
    points = run["curves"]["twonn/mean"]
    assert len(points["x"]) == len(points["y"]) == len(points["margin"]) <= 402
    assert (points["x"][0], points["x"][-1]) == (0, 2999)
    assert max(points["y"]) == pytest.approx(max(curve), rel=1e-4)
    assert 1717 in points["x"]
    assert {1, 2, 4} <= set(points["x"])  # what happens early is shown too
    for part in ("profiles", "heads"):
        assert len(run[part]["steps"]) <= 32
        assert (run[part]["steps"][0], run[part]["steps"][-1]) == (0, 2999)
        for table in run[part]["values"].values():
            assert len(table["rows"]) == len(run[part]["steps"])
    assert len(json.dumps(run)) < 200_000


def test_the_values_are_those_of_the_record(make_readings):
    readings = make_readings()
    (run,) = build_content([run_of(readings)])["runs"]
    assert run["curves"]["twonn/mean"]["y"] == readings.series("twonn/mean")[1]
    profile = run["profiles"]["values"]["anisotropy"]
    last = readings[-1].values
    assert profile["layers"] == [0, 1, 2, 3, 4]
    assert profile["rows"][-1] == pytest.approx(
        [last[f"anisotropy/layer_{n:02d}"] for n in range(5)], rel=1e-4
    )
    heads = run["heads"]["values"]["qk_cosine"]
    assert heads["layers"] == [1, 2, 3, 4]
    assert heads["rows"][-1][1][3] == pytest.approx(last["qk_cosine/layer_02/head_3"], rel=1e-4)
    largest = run["curves"]["anisotropy_max"]["y"][-1]
    assert largest == max(profile["rows"][-1][1:])


def test_alerts_come_with_their_number_and_their_meaning(make_readings):
    alert = alert_of("rank_collapse", "rank collapse (layer 4): effective rank 1.2; look there")
    readings = make_readings(notes=[alert, "few rows: 64"])
    (run,) = build_content([run_of(readings)])["runs"]
    assert run["alerts"] == [{"step": 0, "count": 9, "words": alert.text}]
    (noted,) = run["notes"]
    assert (noted["text"], noted["first"], noted["last"], noted["count"]) == (
        "few rows: 64", 0, 1500, 9
    )  # fmt: skip


@pytest.mark.parametrize(
    "without", [("twonn",), ("anisotropy", "qk_cosine"), ("attention_entropy",)]
)
def test_what_was_not_measured_has_no_chart(make_readings, library, without):
    page = Page(render([run_of(make_readings(without=without))]))
    titles = {chart["title"] for chart in page.data["charts"]}
    drawn = {tag for chart in page.data["charts"] for tag in chart["lines"]}
    assert not {tag for tag in drawn if re.split(r"/|_(?:max|min|size)", tag)[0] in without}
    assert "training loss" not in titles
    assert not any(f"({name})" in page.words for name in without)


def test_the_loss_on_the_probe_has_a_chart_where_there_is_one():
    values = {"twonn/mean": 5.0, "training/loss": 3.0, "training/probe_loss": 4.0}
    readings = [reading_of(values, step, "probe") for step in (0, 1)]
    charts = build_content([run_of(Readings([], readings))])["charts"]
    assert [chart["lines"] for chart in charts if "oss" in chart["title"]] == [
        {"training/loss": "training loss"}, {"training/probe_loss": "loss on the probe"},
    ]  # fmt: skip


def test_a_loss_of_an_earlier_step_is_not_shown_as_that_of_the_end():
    losses = {0: 4.0, 1000: 2.0, 1500: math.nan}  # after the last update there is no batch
    readings = [reading_of({"training/loss": loss}, step, "probe") for step, loss in losses.items()]
    for length, shown in ((3, "2 at step 1,000"), (2, "2")):
        (run,) = build_content([run_of(Readings([], readings[:length]))])["runs"]
        assert dict(run["numbers"])["training loss"] == shown


def test_a_record_of_one_reading_without_metrics_makes_a_page(make_readings, library):
    reading = with_values(make_readings()[0], {"geomon/seconds": 1.0})
    page = Page(render([Run("a", Path("a"), Readings([], [reading]))]))
    assert "twonn: not measured." in page.words
    assert page.data["charts"] == []


def test_notes_are_counted_by_kind_the_most_frequent_first(make_readings):
    once, often = Note("a", "once"), [Note("b", f"{n} often") for n in range(3)]
    readings = list(make_readings((0, 8, 16)))
    noted = [
        with_values(reading, reading.values, notes=(each, *([once] * (reading.step == 8))))
        for reading, each in zip(readings, often, strict=True)
    ]
    (run,) = build_content([run_of(Readings([], noted))])["runs"]
    names = ("text", "first", "last", "count")
    assert [tuple(note[name] for name in names) for note in run["notes"]] == [
        ("2 often", 0, 16, 3), ("once", 8, 8, 1),
    ]  # fmt: skip


def test_of_many_steps_few_are_chosen_by_the_distance_from_the_first(make_readings):
    """A run that is resumed at step 1000 begins there: its first steps are shown as well."""
    chosen = [1000 + index for index in _spread(range(1000, 4000), 32)]
    assert (chosen[0], chosen[-1]) == (1000, 3999)
    assert {1001, 1002} <= set(chosen)
    assert len(chosen) <= 32


def test_the_time_of_a_run_is_from_its_first_to_its_last_reading(make_readings):
    readings = [
        with_values(each, each.values, time=1e9 + 60 * each.step) for each in make_readings((8, 30))
    ]
    (run,) = build_content([run_of(Readings([], readings))])["runs"]
    assert run["cost"]["from first to last reading"] == "22.0 min"


def test_the_command_writes_the_page(make_readings, tmp_path, library):
    folder = write(tmp_path / "run", make_readings())
    out = tmp_path / "new folder" / "page.html"
    result = invoke("report", folder, folder, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"wrote {out} (0.")
    assert out.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("case", ["no folder", "no readings", "no record", "another ending"])
def test_bad_input_ends_in_one_line(make_readings, tmp_path, case):
    folder = write(tmp_path / "run", make_readings())
    out = tmp_path / "page.html"
    if case == "no folder":
        folder = tmp_path / "nowhere"
    elif case == "no readings":
        (folder / FILE_NAME).write_text('{"run": {}}\n')
    elif case == "no record":
        (folder / FILE_NAME).write_text("hello\n")
    else:
        out = tmp_path / "page.pdf"
    result = invoke("report", folder, "-o", out)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_without_plotly_it_says_what_to_install(make_readings, tmp_path):
    folder = write(tmp_path / "run", make_readings((0, 16)))
    code = (
        "import sys; sys.modules['plotly'] = sys.modules['plotly.offline'] = None;"
        f"sys.argv = ['geomon', 'report', {str(folder)!r}];"
        "from geomon import cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'geomon[report]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_script_is_valid(tmp_path):
    """Where a JavaScript engine is at hand: a page whose script does not parse shows no chart."""
    import shutil

    if (node := shutil.which("node")) is None:
        pytest.skip("no JavaScript engine")
    script = Path(sys.modules["geomon.show.report"].__file__).with_name("page.js")
    done = subprocess.run([node, "--check", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_write_report_gives_the_path(make_readings, tmp_path, library):
    assert write_report([run_of(make_readings((0, 16)))], tmp_path / "a.html").is_file()
