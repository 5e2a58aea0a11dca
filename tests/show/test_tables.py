"""Rows of readings and the table of a run: as wide as a reader's terminal, on any output."""

import io
import itertools

import pytest

from geomon import Readings
from geomon.show import Printer, run_table
from support.pages import Terminal
from support.readings import TEXTS, reading_of

OWN = {"own": {"title": "own", "is_charted": True}}


def printed(monkeypatch, readings, output=None):
    """Lines that a run prints on an output."""
    output = output or io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    printer = Printer()
    printer.describe({"metrics": TEXTS | OWN, "training/loss_unit": "nats"})
    for reading in readings:
        printer.write(reading)
    return output.getvalue().splitlines()


def heads(lines):
    return [place for place, line in enumerate(lines) if line.startswith("----")]


def test_the_head_comes_again_after_25_rows_and_with_a_new_column(monkeypatch):
    readings = [reading_of({"twonn/mean": 3.0}, step) for step in range(60)]
    readings += [reading_of({"twonn/mean": 3.0, "anisotropy/mean": 0.5}, 60)]
    lines = printed(monkeypatch, readings)
    rows = [lines[place + 1].split()[0] for place in heads(lines)]
    assert rows == ["0", "25", "50", "60"]
    assert "anisotropy" in lines[heads(lines)[-1] - 2]


def test_both_losses_have_their_unit_and_a_missing_one_leaves_its_column(monkeypatch):
    losses = [{"training/loss": 2.0, "training/probe_loss": 2.5}, {"training/probe_loss": 2.25}]
    lines = printed(monkeypatch, [reading_of(each, step) for step, each in enumerate(losses)])
    (head,) = heads(lines)
    assert " ".join(" ".join(lines[:head]).split()).count("nats") == 2
    first, last = lines[-2:]
    assert first.index("2.50") == last.index("2.25")
    assert "2.00" in first


def test_values_of_the_user_s_own_metrics_have_columns(monkeypatch):
    lines = printed(monkeypatch, [reading_of({"own/mean": 12.5}, 3)])
    assert lines[0].split() == ["Step", "own"]
    assert lines[-1].split() == ["3", "12.5"]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
@pytest.mark.parametrize("value", [-1e12, -3.25, 0.0, 1e-9, 0.07, 31.5, 4e7])
@pytest.mark.parametrize("margin", [0.0, 1e-7, 0.3, 1e6])
def test_any_value_keeps_its_column(monkeypatch, columns, value, margin):
    metrics = ("twonn", "twonn_distinct", "anisotropy", "attention_entropy")
    values = {f"{name}/mean": value for name in metrics} | {"training/loss": value}
    values |= {f"{name}/mean/margin": margin for name in metrics}
    monkeypatch.setenv("COLUMNS", str(columns))
    readings = [reading_of(values, step) for step in (0, 7, 10**8)]
    lines = printed(monkeypatch, readings, Terminal("utf-8"))
    assert max(map(len, lines)) <= min(columns, 100)
    places = [*heads(lines), len(lines)]
    for start, end in itertools.pairwise(places):
        rows = [line for line in lines[start + 1 : end] if line.split()[0][0].isdigit()]
        assert rows
        assert all(len(row) <= len(lines[start]) for row in rows)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_an_output_without_unicode_gets_plain_characters(monkeypatch, encoding):
    values = [{"twonn/mean": 3.0 + n, "twonn/mean/margin": 0.1} for n in range(3)]
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    readings = [reading_of(each, step) for step, each in enumerate(values)]
    monkeypatch.setattr("sys.stdout", output)
    printer = Printer()
    for reading in readings:
        printer.write(reading)
    output.seek(0)
    row = output.read().splitlines()[-1].split()
    assert row == ["2", *(["5.0±0.1", "↑"] if encoding == "utf-8" else ["5.0+0.1", "^"])]


def test_a_run_is_a_table_with_its_alerts_and_its_cost_below(make_readings):
    lines = run_table(make_readings()).splitlines()
    assert lines[0].split() == ["start", "peak", "or", "low", "now", "trend"]
    (row,) = [line for line in lines if line.startswith("intrinsic dimension  ")][:1]
    assert "peak 7.4 ± 0.1" in row
    assert "5.3 ± 0.1" in row
    assert "compressing" in row
    assert max(map(len, lines[:-1])) <= 100
    assert run_table(Readings([], [])) == "No readings yet."
