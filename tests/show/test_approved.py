"""Every page of a synthetic run, beside what a person has looked at and approved.

What other tests hold in words and numbers is here the whole page: each mark, size and place. After
a change that is meant: `APPROVE=1 pytest tests/show/test_approved.py`, and look at what git shows.
"""

import base64
import io
import json
import math
import os
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import plotly.offline
import pytest
from matplotlib.testing.compare import compare_images
from rich.console import Console
from shown import HEADS, LAYERS, STEPS, alerted, course_of, write_run
from typer.testing import CliRunner

from geomon.analysis.compare import compare
from geomon.cli import make_app
from geomon.note import Note
from geomon.show.charts import charts_of
from geomon.show.collect import cards_of
from geomon.show.figures import KINDS, card, draw
from geomon.show.figures.compare import compare_figure
from geomon.show.report import Run, render
from geomon.show.terminal import format_line, view, watch

APPROVED = Path(__file__).parent / "approved"
# Root mean square of the differences of two pictures, of 255: what another processor may round.
TOLERANCE = 0.1
# The age of a reading does not hang on the day of the test.
NOW = 1_800_000_000.0


def made(make_readings, folder, alerts=(), **options):
    """A run on disk, of known times."""
    whole = make_readings(**{"steps": STEPS, "layers": LAYERS, "heads": HEADS, **options})
    whole = alerted(whole, alerts, [course_of("max_logit/layer_02/head_1", 700)])
    timed = [msgspec.structs.replace(each, time=NOW - 100 + each.step / 20) for each in whole]
    return write_run(folder, replace(whole, readings=timed))


@pytest.fixture
def run(make_readings, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(time, "gmtime", lambda *_: datetime.fromtimestamp(NOW, UTC).timetuple())
    notes = [Note("rows", "half of the rows are near-duplicates", layers=(1, 2))]
    kinds = [(16, "logit_growth"), (700, "not_finite")]
    return made(make_readings, tmp_path / "run", kinds, notes=notes)


@pytest.fixture
def other(make_readings, tmp_path):
    """A larger run: one layer, and one head, more than pictures have room for."""
    curves = {
        "twonn/mean": (2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 7.0, 5.0, 4.5),
        "training/loss": (9.0, 6.0, 5.0, 4.5, 4.0, 3.8, 3.7, 3.6, math.nan),
        "anisotropy/layer_00": [9.0] * 9,
    }
    steps = (0, 16, 32, 64, 128, 256, 512, 1024, 1500)
    folder = tmp_path / "other"
    return made(make_readings, folder, steps=steps, layers=13, heads=5, curves=curves)


def holds_text(name, text):
    file = APPROVED / name
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if "APPROVE" in os.environ:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def rounded(value):
    """Numbers to five digits: beyond these, processors differ."""
    match value:
        case dict():
            return {name: rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [rounded(each) for each in value]
        case float():
            return float(f"{value:.5g}")
    return value


def holds_data(name, value):
    text = json.dumps(rounded(value), indent=0, ensure_ascii=False, sort_keys=True)
    # What holds neither a list nor another dict stands in one line.
    holds_text(
        name, re.sub(r"[\[{]\n[^][{}]*[\]}]", lambda found: found[0].replace("\n", " "), text)
    )


def holds_figure(name, figure, tmp_path):
    drawn, file = tmp_path / f"{name}.png", APPROVED / f"{name}.png"
    figure.savefig(drawn, dpi=50)
    if "APPROVE" in os.environ:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(drawn.read_bytes())
    differs = compare_images(str(file), str(drawn), TOLERANCE)
    assert differs is None, differs


@pytest.mark.parametrize("kind", KINDS)
def test_figures(kind, run, tmp_path):
    holds_figure(kind, draw(kind, run), tmp_path)


@pytest.mark.parametrize("kind", ["run", "profiles", "map", "heads", "cosines"])
def test_figures_of_a_larger_run(kind, other, tmp_path):
    holds_figure(f"large_{kind}", draw(kind, other), tmp_path)


def test_the_figure_of_two_runs(run, other, tmp_path):
    figure = compare_figure((run, other), ("run", "other"), compare(run, other))
    holds_figure("compare", figure, tmp_path)


def test_cards_of_loggers(run, tmp_path):
    for number, (_, panel) in enumerate(cards_of(run)):
        holds_figure(f"card_{number}", card(panel), tmp_path)


def plain(value):
    """A chart without what plotly adds to each; arrays as lists."""
    match value:
        case {"bdata": data, "dtype": kind, **rest}:
            numbers = np.frombuffer(base64.b64decode(data), kind)
            shape = [int(size) for size in rest.get("shape", "-1").split(",")]
            return numbers.reshape(shape).tolist()
        case dict():
            return {name: plain(each) for name, each in value.items() if name != "template"}
        case list():
            return [plain(each) for each in value]
    return value


def test_charts_of_wandb(run):
    charts = {name: json.loads(chart.to_json()) for name, chart in charts_of(run).items()}
    holds_data("wandb.json", plain(charts))


@pytest.mark.parametrize("count", [1, 3])
def test_reports(count, run, other, monkeypatch):
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")
    seeded = replace(other, runs=[{**run.runs[-1], "seed": 1}])  # beside `run` of another seed
    wider = replace(other, runs=[{**run.runs[-1], "width": 8}])
    named = zip("abc", (run, wider, seeded), strict=True)
    page = render([Run(name, Path(name), readings) for name, readings in named][:count])
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    charts, decoder = [], json.JSONDecoder()
    for start in re.finditer(r"Plotly.newPlot\(\s*", page):
        at = start.end()
        for _ in range(4):  # its place, curves, layout and settings
            value, at = decoder.raw_decode(page, at)
            charts.append(plain(value))
            at += len(re.match(r"[\s,]*", page[at:])[0])
    assert charts
    holds_data(f"report_{count}.json", charts)
    holds_text(f"report_{count}.html", re.sub(r"(?s)(<script[^>]*>).*?(</script>)", r"\1\2", page))


@pytest.mark.parametrize("width", [80, 120])
def test_overviews(width, run, other):
    style = {"force_terminal": True, "color_system": "truecolor", "record": True}
    console = Console(width=width, file=io.StringIO(), **style)
    console.print(view(run))
    console.print(view(other))
    console.print(format_line(run[-1], run))
    holds_text(f"overview_{width}.txt", console.export_text(styles=True).replace("\x1b", "^"))


@pytest.mark.parametrize(
    "words", ["summary run", "alerts", "alerts not_finite", "compare run other"]
)
def test_commands(words, run, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    found = CliRunner().invoke(make_app(), words.split())
    assert found.exit_code == 0
    holds_text(f"{words.replace(' ', '_')}.txt", found.output)


def test_the_terminal_view(run, other, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "110")
    watch([tmp_path / "run"], once=True)
    watch([tmp_path / "run", tmp_path / "other"], metric="anisotropy", layer=2, once=True)
    holds_text("watch.txt", capsys.readouterr().out)
