import io
import json
import os
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from tagged import TEXTS, with_values
from typer.testing import CliRunner

from geomon.analysis.alerts import RULES
from geomon.cli import make_app
from geomon.record import FILE_NAME, read
from geomon.show import geometry_figure
from geomon.show.terminal import live


@pytest.fixture
def run(make_readings, tmp_path):
    """A folder with the record of a run."""
    readings = make_readings()
    described = {"model": "Synthetic", "metrics": TEXTS}
    lines = [json.dumps({"run": described}), *(r.line() for r in readings)]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


def test_watch_once_prints_the_present(run):
    result = invoke("watch", run, "--once")
    assert result.exit_code == 0
    assert "compressing since step 256" in result.stdout


def test_summary_says_the_run_in_words(run):
    result = invoke("summary", run)
    assert result.exit_code == 0
    assert result.stdout.startswith("intrinsic dimension 5.3 ± 0.1, compressing")


def test_figure_is_written_beside_the_record_or_where_asked(run, tmp_path):
    assert invoke("figure", run).stdout == f"wrote {run / 'geometry.png'}\n"
    assert (run / "geometry.png").stat().st_size > 10_000
    other = tmp_path / "else" / "picture.svg"
    assert invoke("figure", run / FILE_NAME, "--out", other).exit_code == 0
    assert "<svg" in other.read_text()[:1000]


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
    assert result.stderr.endswith("): give another place by --out\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "file", "writes"),
    [
        ("export", "a.csv", "geomon.record.export._write_csv"),
        ("figure", "a.png", "matplotlib.figure.Figure.savefig"),
    ],
)
def test_what_stood_there_stays_where_the_new_one_cannot_be_finished(
    name, file, writes, run, tmp_path, monkeypatch
):
    def fill_up(*given, **more):
        raise OSError(28, "No space left on device")

    (tmp_path / file).write_text("of yesterday")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(writes, fill_up)
    result = invoke(name, run, "--out", tmp_path / file)
    assert result.exit_code == 2
    assert "cannot be written (No space left on device)" in result.stderr
    assert (tmp_path / file).read_text() == "of yesterday"
    assert set(tmp_path.iterdir()) == before  # no part of the new one


def test_a_picture_needs_an_ending(run, tmp_path):
    result = invoke("figure", run, "--out", tmp_path / "picture")
    assert (result.exit_code, list(tmp_path.glob("*picture*"))) == (2, [])
    assert "ends in .png, .svg or .pdf" in result.stderr
    assert invoke("figure", run, "--out", tmp_path / "picture.xyz").exit_code == 2


def test_several_figures_are_not_written_into_a_file(run, tmp_path):
    (tmp_path / "a.png").write_text("of the user")
    result = invoke("figure", run, "--kind", "run", "--kind", "map", "--out", tmp_path / "a.png")
    assert result.exit_code == 2
    assert result.stderr.endswith("is a file: give a folder by --out, for several figures\n")
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


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_of_a_record_acts_on_the_terminal_while_it_is_followed(
    make_readings, tmp_path, monkeypatch, terminal
):
    monkeypatch.setattr(live, "_POLL", 0.001)
    corrupt_text(tmp_path / FILE_NAME, make_readings())
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    looks = iter(range(3))
    live.follow([tmp_path], console=console, keep_going=lambda: next(looks, None) is not None)
    assert "\x1b]0" not in console.file.getvalue()
    assert "\x1b[2J" not in console.file.getvalue()
    assert not set(ACTING) & set(console.file.getvalue()) - set("\x1b\r\n[];titleabc31mlnd02J")


@pytest.mark.parametrize("terminal", [False, True])
def test_pages_say_that_two_runs_write_at_once(make_readings, tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(live, "_POLL", 0.001)
    lines = [reading.line() for reading in make_readings() for _ in range(2)]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    for command in (["summary"], ["watch", "--once"]):
        output = invoke(*command, tmp_path).stdout
        assert "From line 2 on, two runs wrote into this record at once" in " ".join(output.split())
    console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    looks = iter(range(3))
    live.follow([tmp_path], console=console, keep_going=lambda: next(looks, None) is not None)
    assert "two runs wrote into this record" in console.file.getvalue()
    title = geometry_figure(read(tmp_path)).get_suptitle()
    assert title.startswith("Two runs wrote into this record at once")
    assert geometry_figure(make_readings()).get_suptitle() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_waited_for_and_followed(make_readings, tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(live, "_POLL", 0.001)
    readings = make_readings()
    looks = iter(range(len(readings) + 2))

    def keep_going():
        look = next(looks, None)
        if look and look <= len(readings):
            with (tmp_path / FILE_NAME).open("a") as file:
                file.write(readings[look - 1].line() + "\n")
        return look is not None

    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=terminal, color_system=None)
    live.follow([tmp_path], console=console, keep_going=keep_going)
    text = output.getvalue()
    assert text.startswith(f"waiting for {tmp_path / FILE_NAME}")
    if terminal:
        assert "compressing since step 256, 28 % below its peak 7.4" in text
    else:
        assert [shown.split(":")[0] for shown in text.splitlines()[1:]] == [
            f"step {reading.step}" for reading in readings
        ]


def test_several_runs_are_printed_and_followed_with_their_names(
    make_readings, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(live, "_POLL", 0.001)
    other = tmp_path / "other"
    other.mkdir()
    described = json.dumps({"run": {"metrics": TEXTS}})
    (other / FILE_NAME).write_text(f"{described}\n{make_readings((0,))[0].line()}\n")
    printed = invoke("watch", run, other, "--once").stdout.splitlines()
    assert printed[0] == run.name
    assert "other" in printed
    assert sum("intrinsic dimension" in line for line in printed) == 2
    for terminal, words in ((False, "other: step 0: twonn 2.5"), (True, "other\n")):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
        looks = iter(range(2))
        live.follow([run, other], console=console, keep_going=lambda: next(looks, None) is not None)  # noqa: B023
        assert words in "\n".join(x.rstrip() for x in console.file.getvalue().splitlines())


def test_a_dumb_terminal_gets_lines(run, monkeypatch):
    monkeypatch.setattr(live, "_POLL", 0.001)
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    looks = iter(range(2))
    live.follow([run], console=console, keep_going=lambda: next(looks, None) is not None)
    lines = console.file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines][:2] == ["step 0", "step 16"]
    assert "\x1b" not in console.file.getvalue()


class Terminal(io.StringIO):
    """Standard output and input of a terminal, of an encoding."""

    def __init__(self, encoding):
        super().__init__()
        self._encoding = encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("encoding", "has_textual", "words"),
    [
        ("utf-8", True, "the application"),
        (
            "utf-8",
            False,
            "a plain view is shown: the application needs textual and textual-plotext",
        ),
        ("ascii", True, "__.=##*+="),
    ],
)
def test_a_terminal_gets_what_it_can_draw(run, monkeypatch, encoding, has_textual, words):
    terminal = Terminal(encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(live, "_POLL", 0.001)
    monkeypatch.setenv("TERM", "xterm-256color")
    if not has_textual:
        monkeypatch.setitem(sys.modules, "textual.app", None)
        monkeypatch.delitem(sys.modules, "geomon.show.terminal.app", raising=False)
    else:
        from geomon.show.terminal import app

        monkeypatch.setattr(app.WatchApp, "run", lambda self, **_: print("the application"))
    looks = iter(range(2))
    live.follow([run], keep_going=lambda: next(looks, None) is not None)
    assert words in terminal.getvalue()
    assert ("the application" in terminal.getvalue()) == (encoding == "utf-8")
    shows_view = encoding == "ascii" or not has_textual
    assert ("intrinsic dimension" in terminal.getvalue()) == shows_view


def test_ctrl_c_ends_the_watch_quietly(run):
    output = io.StringIO()

    def keep_going():
        raise KeyboardInterrupt

    before = threading.active_count()
    live.follow([run], console=Console(file=output, force_terminal=False), keep_going=keep_going)
    assert output.getvalue() == ""
    assert threading.active_count() == before


def test_without_typer_it_says_what_to_install():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['geomon'];"
        "from geomon import cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'geomon[terminal]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_view_is_drawn_anew_at_its_pace_and_for_each_reading(make_readings, run, monkeypatch):
    """In a time of its own: a second for each look, ten seconds between two drawings."""
    now, looks, drawn = [100.0], iter(range(41)), []

    class Time:
        @staticmethod
        def monotonic():
            return now[0]

        @staticmethod
        def sleep(seconds):
            now[0] += 1

    def keep_going():
        if next(looks, None) is None:
            return False
        if now[0] == 115:
            with (run / FILE_NAME).open("a") as file:
                file.write(make_readings((2000,))[0].line() + "\n")
        return now[0] < 140

    def view(readings):
        drawn.append((now[0] - 100, len(readings)))
        return ""

    monkeypatch.setattr(live, "time", Time)
    monkeypatch.setattr(live, "_REFRESH", 10)
    monkeypatch.setattr("geomon.show.terminal.live.view", view)
    console = Console(file=io.StringIO(), force_terminal=True)
    live.follow([run], console=console, keep_going=keep_going)
    assert drawn == [(0, 9), (11, 9), (15, 10), (26, 10), (37, 10)]


def test_a_record_is_looked_at_at_the_pace_of_the_poll(run, monkeypatch):
    slept, looks = [], iter(range(4))
    monkeypatch.setattr(live.time, "sleep", slept.append)
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    live.follow([run], console=console, keep_going=lambda: next(looks, None) is not None)
    assert slept == [live._POLL] * 4
    assert 0.1 <= live._POLL <= 5


def test_alerts_are_explained_where_no_docs_are_installed():
    everything = invoke("alerts").stdout
    for name, rule in RULES.items():
        assert f"{name}" in everything
        one = " ".join(invoke("alerts", name).stdout.split())
        assert rule.advice in one
        assert "{" not in one
    assert "no alert is called 'x'" in invoke("alerts", "x").stderr
