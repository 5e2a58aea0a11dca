"""Every page of synthetic runs equals the page that a person has approved.

Other tests hold words and numbers, and this one the whole page: each mark, size and place. After
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

import matplotlib
import msgspec
import numpy as np
import plotly.offline
import pytest
from matplotlib.image import imsave
from rich.console import Console

from geomon import Readings, WandB, read
from geomon.note import Note
from geomon.show import Pictures, Printer, view
from support.pages import (
    FILE_NAME,
    HEADS,
    LAYERS,
    STEPS,
    alerted,
    course_of,
    holds_picture,
    invoke,
    write,
    write_run,
)
from support.readings import TEXTS, raised_of, reading_of
from support.wandb_file import Run

APPROVED = Path(__file__).parent / "approved"
# The age of a reading does not hang on the day of the test.
NOW = 1_800_000_000.0
NAN, INF = math.nan, math.inf

# Each metric of the odd run asks for something of its own: values by layer at the last step.
ODD = {
    "wide": [0.25, 2.0, 40.0, 3.0],  # colours are logarithmic
    "widest": [0.25, 2.0, 315.0, 3.0],  # and name powers of ten alone
    "signed": [0.25, -0.5, 0.25, 0.125],
    "positive": [0.25, 0.0, 0.25, 0.5],
    "nothing": [0.0, 0.0, 0.0, 0.0],
    "far": [30.0, 2.0, INF, 3.0],  # layer 0 would flatten the others
    "below": [0.5, -0.02, 0.05, 0.01],
    "near": [2.5, 2.0, 4.0, 3.0],
    "beside_zeros": [0.4, 0.0, 0.0, 0.0],
    "holed": [1.0, NAN, 3.0, 4.0],
    "late": [NAN, NAN, 3.0, 4.0],
    "attention_entropy": [NAN, 0.0, 0.0, 0.0],
}
ODD_TEXTS = {
    "wide": {"title": "wide, as a title of many words <b>", "unit": "m", "null": "noise"},
    "signed": {"title": "signed", "healthy": "It stays <i>.", "meaning": "A sum.\n\nOf all."},
    "gride": {**TEXTS["gride"], "parts": {"k1": "scale 1", "k4": "scale 4"}},
}


def made(make_readings, folder, alerts=(), **options):
    """A run on disk, of known times."""
    whole = make_readings(**{"steps": STEPS, "layers": LAYERS, "heads": HEADS, **options})
    whole = alerted(whole, alerts, [course_of("max_logit/layer_02/head_1", 700)])
    timed = [msgspec.structs.replace(each, time=NOW - 100 + each.step / 20) for each in whole]
    return write_run(folder, replace(whole, readings=timed))


def again(folder, count):
    """Write a line of the record once more at its end: the description, or a reading."""
    path = folder / FILE_NAME
    path.write_text(path.read_text() + path.read_text().splitlines()[count] + "\n")


@pytest.fixture
def run(make_readings, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(time, "gmtime", lambda *_: datetime.fromtimestamp(NOW, UTC).timetuple())
    notes = [Note("rows", "half of the rows are near-duplicates", layers=(1, 2))]
    kinds = [(16, "logit_growth"), (700, "not_finite")]
    return made(make_readings, tmp_path / "run", kinds, notes=notes)


@pytest.fixture
def other(make_readings, tmp_path):
    """A larger run: more layers, and one head more, than pictures have room for."""
    curves = {
        "twonn/mean": (2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 7.0, 5.0, 4.5),
        "training/loss": (9.0, 6.0, 5.0, 4.5, 4.0, 3.8, 3.7, 3.6, NAN),
        "anisotropy/layer_00": [9.0] * 9,
    }
    steps = (0, 16, 32, 64, 128, 256, 512, 1024, 1500)
    folder = tmp_path / "other"
    return made(make_readings, folder, steps=steps, layers=17, heads=5, curves=curves)


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """A short run, taken up twice, whose values ask each for another scale."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    readings = []
    for place, step in enumerate((0, 4, 32)):
        values = {
            f"{name}/layer_{layer:02d}": value * (1 + place - 2) if name == "signed" else value
            for name, profile in ODD.items()
            for layer, value in enumerate(profile)
        }
        heads = np.arange(-3.0, 3.0).reshape(2, 3) * place
        heads[1, 1] = NAN
        for (layer, head), value in np.ndenumerate(heads):
            values[f"qk_dot/layer_{layer + 1:02d}/head_{head}"] = float(value)
        values |= {"twonn/mean": 5.0 - place, "twonn/mean/margin": 0.5 * place}
        values |= {"twonn_distinct/mean": 5.0 * 3**place, "twonn_distinct/mean/margin": 9.0}
        values |= {"gride/mean/k1": 4.0, "gride/mean/k4": 2.0 + place, "wide/null": 9.0}
        values |= {"twonn/null": 80.0, "wide/mean": 7.0, "wide/mean/margin": 0.25}
        values |= {"training/loss": 4.0 if place < 2 else NAN, "training/probe_loss": 3.0 - place}
        values |= {f"far/layer_{layer:02d}/margin": 0.5 for layer in range(4)}
        values |= {"geomon/overhead": NAN, "training/lr": 0.1, "twonn/layer_01/n": 64.0}
        values |= {"signed/mean/a": 1.0 + place, "signed/mean/std": 0.5}
        noted = [Note("copies", f"{place} rows are copies"), *[Note("once", "once")][place:]]
        readings.append(reading_of(values, step, "inline", noted, time=NOW - 5000 + step))
    words = "left its band (layer 2): look there"
    alerts = [
        raised_of("left_band", 0, words, courses=[course_of(f"a/{n}", 40) for n in range(13)]),
        raised_of("entropy_collapse", 4),
        raised_of("rank_collapse", 4), raised_of("left_band", 50, words),
    ]  # fmt: skip
    whole = Readings([{}], readings, raised=alerts)
    described = {"model": "a$b^$", "parameters": 10**9, "metrics": {**TEXTS, **ODD_TEXTS}}
    again(write(tmp_path / "odd", whole, **described), 0)


@pytest.fixture
def bare(tmp_path):
    """Two programs that wrote into one record, and measured nothing."""
    readings = [reading_of({"geomon/seconds": 1.0, "geomon/overhead": 0.1}, 8, time=NOW)]
    again(write(tmp_path / "bare", readings), 1)


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
    text = json.dumps(rounded(value), indent=0, ensure_ascii=False, sort_keys=True, allow_nan=False)
    # A dict that holds neither a list nor another dict stands in one line.
    holds_text(
        name, re.sub(r"[\[{]\n[^][{}]*[\]}]", lambda found: found[0].replace("\n", " "), text)
    )


# Arguments of `geomon figure` and `geomon compare`, by the name of the picture.
PICTURES = {
    **{kind: f"figure run --kind {kind}"
       for kind in ("run", "dimension", "profiles", "map", "heads", "cosines")},
    **{f"large_{kind}": f"figure other --kind {kind}"
       for kind in ("run", "dimension", "profiles", "map", "heads", "cosines")},
    "compare": "compare run other",
    "compare_few": "compare run run",
    "bare": "figure bare",
    **{f"odd_{kind}": f"figure odd --kind {kind}" for kind in ("run", "dimension")},
    **{f"odd_{kind}_{metric}": f"figure odd --kind {kind} --metric {metric}"
       for kind, metric in (("map", "wide"), ("map", "widest"), ("map", "signed"),
                            ("map", "holed"), ("map", "nothing"), ("map", "positive"),
                            ("profiles", "far"), ("profiles", "late"),
                            ("heads", "qk_dot"), ("cosines", "qk_dot"))},
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.usefixtures("run", "other", "odd", "bare")
def test_pictures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"savefig.dpi": 50}):
        done = invoke(*PICTURES[name].split(), "--out", f"{name}.png")
    assert done.exit_code == 0, done.stderr
    holds_picture(APPROVED / f"{name}.png", tmp_path / f"{name}.png")


def test_cards_of_loggers(run, tmp_path, monkeypatch):
    for name in ("FIRST_SHARE", "SHARE"):  # before the end, there is no time for more than a card
        monkeypatch.setattr(f"geomon.show.loggers.parts.{name}", 0.0)
    posted = []
    pictures = Pictures(lambda *given: posted.append(given), metrics=["cosine"])
    pictures.describe(run.runs[-1])
    for each in run:
        pictures.write(each)
    for alert in run.raised:
        pictures.alert(alert)
    pictures.close()
    first, *posted = posted
    assert (first[0], first[2]) == ("1 Intrinsic dimension", 0)
    assert {step for *_, step in posted} == {1500}
    names = [name for name, *_ in posted]
    for name, image, _ in posted:
        drawn = tmp_path / "card.png"
        height, width, _ = image.shape
        halved = image.reshape(height // 2, 2, width // 2, 2, 3).mean(axis=(1, 3))
        imsave(drawn, halved.round().astype(np.uint8))
        holds_picture(APPROVED / f"card_{name.split()[0]}.png", drawn)
    holds_text("cards.txt", "\n".join(names))


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


def test_charts_and_summary_of_wandb(run):
    wandb = Run()
    sink = WandB(wandb, by_step=True, detail=["cosine"])
    sink.describe(run.runs[-1])
    for each in run:
        sink.write(each)
    for alert in run.raised:
        sink.alert(alert)
    sink.close()
    wandb.end_row()
    charts = [
        {name: json.loads(chart.to_json()) for name, chart in row.items() if "charts/" in name}
        for row in wandb.rows
    ]
    holds_data("wandb.json", plain([row for row in charts if row][-1]))
    holds_data("wandb_summary.json", wandb.summary)


@pytest.mark.parametrize("names", ["run", "odd", "bare", "run other seeded"])
@pytest.mark.usefixtures("run", "odd", "bare")
def test_reports(names, other, tmp_path, monkeypatch):
    write(tmp_path / "seeded", other, **{**other.runs[-1], "seed": 1})  # the same but for the seed
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")
    monkeypatch.chdir(tmp_path)
    done = invoke("report", *names.split(), "-o", "page.html")
    assert done.exit_code == 0, done.stderr
    page = re.sub(r"<style>.*?</style>", "", Path("page.html").read_text(), flags=re.DOTALL)
    charts, decoder = [], json.JSONDecoder()
    for start in re.finditer(r"Plotly.newPlot\(\s*", page):
        at = start.end()
        for _ in range(4):  # its place, curves, layout and settings
            value, at = decoder.raw_decode(page, at)
            charts.append(plain(value))
            at += len(re.match(r"[\s,]*", page[at:])[0])
    assert charts or names == "bare"
    name = f"report_{names.replace(' ', '_')}"
    holds_data(f"{name}.json", charts)
    holds_text(f"{name}.html", re.sub(r"(?s)(<script[^>]*>).*?(</script>)", r"\1\2", page))


@pytest.mark.parametrize("width", [80, 120])
def test_overviews(width, run, other):
    style = {"force_terminal": True, "color_system": "truecolor", "record": True}
    console = Console(width=width, file=io.StringIO(), **style)
    console.print(view(run))
    console.print(view(other))
    holds_text(f"overview_{width}.txt", console.export_text(styles=True).replace("\x1b", "^"))


@pytest.mark.parametrize("name", ["run", "other", "odd", "bare"])
@pytest.mark.usefixtures("run", "other", "odd", "bare")
def test_rows_of_readings(name, tmp_path, capsys):
    whole, printer = read(tmp_path / name), Printer()
    printer.describe(whole.runs[-1])
    for reading in whole:
        printer.write(reading)
    printer.close()
    holds_text(f"rows_{name}.txt", capsys.readouterr().out)


# Commands by the name of what they print.
COMMANDS = {
    **{re.sub(r"\W+", "_", words): words
       for words in ("summary run", "summary odd", "alerts", "alerts not_finite",
                     "compare run other", "watch run --once", "watch odd --once",
                     "watch odd --once --metric wide", "watch odd --once --metric gride/k4")},
    "watch_without_colours": "watch run other --once --metric anisotropy --layer 2",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("run", "other", "odd")
def test_commands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1" if "without" in name else "")
    found = invoke(*COMMANDS[name].split())
    assert found.exit_code == 0, found.stderr
    holds_text(f"{name}.txt", found.output)
