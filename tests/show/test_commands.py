import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shown import Terminal, write
from tagged import with_values
from typer.testing import CliRunner

from geomon.analysis.alerts import RULES
from geomon.cli import make_app
from geomon.record import FILE_NAME
from geomon.show.terminal import watch


@pytest.fixture
def run(make_readings, tmp_path):
    """A folder with the record of a run."""
    return write(tmp_path, make_readings())


def invoke(*arguments):
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


def test_figure_is_written_beside_the_record_or_where_asked(run, tmp_path):
    assert invoke("figure", run).stdout == f"wrote {run / 'geometry.png'}\n"
    assert (run / "geometry.png").stat().st_size > 10_000
    other = tmp_path / "else" / "picture.svg"
    assert invoke("figure", run / FILE_NAME, "--out", other).exit_code == 0
    assert "<svg" in other.read_text()[:1000]
    assert invoke("compare", run, run, "--out", other).stdout.endswith(f"\nwrote {other}\n")


def test_sentences_are_broken_between_words_on_a_terminal_alone(run):
    plain = invoke("summary", run).stdout.splitlines()
    program = "import sys; sys.stdout.isatty = lambda: True; from geomon.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "summary", str(run)], capture_output=True, text=True,
        env=os.environ | {"COLUMNS": "40"}, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 40 < max(map(len, plain))
    assert " ".join(line.strip() for line in lines) == " ".join(plain)
    assert [line for line in lines if not line.startswith("  ")] == [
        next(line for line in lines if whole.startswith(line)) for whole in plain
    ]


@pytest.mark.parametrize(
    "command",
    [("figure", "a.png"), ("compare", "a.png"), ("report", "a.html"), ("export", "a.csv")],
)
def test_a_place_that_cannot_be_written_is_named_with_what_to_do(command, run, tmp_path):
    name, file = command
    (tmp_path / "file").write_text("of the user")
    folders = [run, run] if name == "compare" else [run]
    out = tmp_path / "file" / file
    result = invoke(name, *folders, "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"geomon: {out} cannot be written (")
    assert result.stderr.endswith("): pass another path with --out\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "file", "writes"),
    [
        ("export", "a.csv", "pandas.DataFrame.to_csv"),
        ("figure", "a.png", "matplotlib.figure.Figure.savefig"),
    ],
)
def test_what_stood_there_stays_where_the_new_one_cannot_be_finished(
    name, file, writes, run, tmp_path, monkeypatch
):
    def fill_up(*given, **more):
        next(each for each in given if isinstance(each, Path)).write_text("half")
        raise OSError(28, "No space left on device")

    (tmp_path / file).write_text("of yesterday")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(writes, fill_up)
    result = invoke(name, run, "--out", tmp_path / file)
    assert result.exit_code == 2
    assert "cannot be written (No space left on device)" in result.stderr
    assert (tmp_path / file).read_text() == "of yesterday"
    assert set(tmp_path.iterdir()) == before  # no part of the new one


def test_several_figures_are_not_written_into_a_file(run, tmp_path):
    (tmp_path / "a.png").write_text("of the user")
    result = invoke("figure", run, "--kind", "run", "--kind", "map", "--out", tmp_path / "a.png")
    assert result.exit_code == 2
    assert result.stderr.endswith("is a file: pass a folder with --out for several figures\n")
    assert (tmp_path / "a.png").read_text() == "of the user"


ACTING = "\x1b[2J\x1b]0;title\x07\u202eabc\x9b31m\x00\r\nline\u2028end"


def corrupt_text(path, content):
    """A record whose every text, and every tag, holds what acts on a terminal."""
    run = {"run": {"model": ACTING, ACTING: ACTING}}
    lines = [json.dumps(run)]
    for reading in content:
        values = {**reading.values, f"twonn/{ACTING}_layer_01": 1.0}
        values |= {f"twonn/{ACTING}_mean": 3.0}
        odd = with_values(reading, values, source=ACTING, mode=ACTING, dtype=ACTING, notes=[ACTING])
        lines.append(odd.line())
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "command", [["watch", "--once"], ["summary"], ["summary", "--stack", ACTING], ["figure"]]
)
def test_nothing_of_a_record_acts_on_the_terminal(make_readings, tmp_path, command):
    folder = tmp_path / "a\x1b[2Jb\u202ec"
    folder.mkdir()
    corrupt_text(folder / FILE_NAME, make_readings())
    for _ in range(2):
        result = invoke(*command, folder)
        output = result.stdout + result.stderr
        assert output
        assert all(line.isprintable() for line in output.split("\n")), output
        (folder / FILE_NAME).write_text(f"{ACTING}\n{{}}\n")  # and then no record at all


def test_several_runs_are_printed_with_their_names(make_readings, run, tmp_path):
    other = write(tmp_path / "other", make_readings((0,)))
    printed = invoke("watch", run, other, "--once").stdout.splitlines()
    assert printed == [line.rstrip() for line in printed]
    assert printed[0] == f"━ {run.name}"
    assert "━ other" in printed
    assert sum(line.startswith("step ") for line in printed) == 2
    assert run.name not in invoke("watch", run, "--once").stdout  # one has no need of it


@pytest.mark.parametrize(
    ("terminal", "term", "draws"),
    [
        (Terminal("utf-8"), "xterm-256color", True),
        (Terminal("ascii"), "xterm-256color", False),
        (Terminal("utf-8"), "dumb", False),
        (io.StringIO(), "xterm-256color", False),
    ],
    ids=["terminal", "ascii", "dumb", "pipe"],
)
def test_the_overview_is_printed_once_if_no_terminal_can_refresh_it(
    run, monkeypatch, terminal, term, draws
):
    def leave(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("time.sleep", leave)
    watch([run])
    printed = terminal.getvalue()
    assert ("\x1b[?25l" in printed) == draws  # the cursor is hidden meanwhile
    assert "since step 1,024; peak 7.4" in " ".join(re.sub("\x1b\\[[0-9;]*m", "", printed).split())
    assert printed.isascii() == (getattr(terminal, "encoding", None) == "ascii")


def test_alerts_are_explained_where_no_docs_are_installed():
    everything = invoke("alerts").stdout.splitlines()
    assert [line.partition(":")[0] for line in everything] == [*RULES]
    assert invoke("alerts", "rank_collapse").stdout == (
        "rank_collapse: an effective rank of the hidden states below 1.1; look at the learning "
        f"rate, its warm-up and the initialisation; {RULES['rank_collapse'].odds}\n"
    )
    assert "no alert is called 'x'" in invoke("alerts", "x").stderr
