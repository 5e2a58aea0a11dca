"""`geomon watch` in a terminal: overviews and a chart, refreshed in place, without a clock."""

import io
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from geomon.cli import make_app
from geomon.record import FILE_NAME, Record
from geomon.show import view
from geomon.show.panels import Lines
from geomon.show.terminal.charts import title_of
from support.pages import Terminal, alerted, invoke, write
from support.readings import raised_of, reading_of


class Screens:
    """The screen of a terminal after each look at the files; between looks something happens."""

    def __init__(self, monkeypatch):
        self.terminal, self._monkeypatch = Terminal("utf-8"), monkeypatch
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def of(self, *folders, between=(), size=(100, 30), arguments=()):
        """The characters of the screen after the first look, and after each thing that happens."""
        shown, left, begun = [], list(between), 0

        def sleep(seconds):
            nonlocal begun
            written = self.terminal.getvalue()[begun:]
            begun += len(written)
            shown.append(Text.from_ansi(re.sub("\x1b\\[[0-9;?]*[A-HJKhl]", "", written)).plain)
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        self._monkeypatch.setenv("COLUMNS", str(size[0]))
        self._monkeypatch.setenv("LINES", str(size[1]))
        self._monkeypatch.setattr("sys.stdout", self.terminal)
        self._monkeypatch.setattr("time.sleep", sleep)
        make_app()(["watch", *map(str, folders), *arguments], standalone_mode=False)
        return shown


def words(screen):
    return " ".join(screen.split())


def is_chart(line):
    return any("⠀" < character <= "⣿" for character in line)


def fits(lines, size):
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def screens(monkeypatch):
    return Screens(monkeypatch)


def test_a_title_is_fit_for_a_terminal():
    text = title_of(Lines("size\x1b[2J of the norm", []))
    assert text.plain.split("  ")[0].isprintable()
    assert "not measured" in text.plain


def test_a_chart_is_left_out_where_the_overview_fills_the_screen(make_readings, tmp_path, screens):
    (screen,) = screens.of(write(tmp_path, make_readings()), size=(100, 12))
    assert "step 1,500" in screen
    assert not any(map(is_chart, screen.splitlines()))


@pytest.mark.parametrize("size", [(80, 24), (100, 24), (120, 40)])
def test_a_chart_has_room_on_any_usual_terminal(make_readings, tmp_path, screens, size):
    kinds = ("rank_collapse", "logit_growth")
    whole = alerted(make_readings(notes=["a note"]), [(32, kind) for kind in kinds])
    (screen,) = screens.of(write(tmp_path, whole), size=size)
    fits(screen.splitlines(), size)
    assert sum(map(is_chart, screen.splitlines())) >= 5
    assert all(kind.replace("_", " ") in words(screen) for kind in kinds)
    assert "compressing" in screen


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), min_size=1, max_size=30),
    size=st.tuples(st.integers(40, 120), st.integers(30, 60)),
)
def test_any_curve_fits_into_any_terminal(points, size, tmp_path, screens):
    readings = [
        reading_of({"own/mean": value, "own/mean/margin": margin}, 7 * step * step)
        for step, (value, margin) in enumerate(points)
    ]
    screens.terminal = Terminal("utf-8")
    (screen,) = screens.of(write(tmp_path, readings), size=size)
    assert "┤" in screen
    fits(screen.splitlines(), size)


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_an_overview_fits_the_terminal_and_cuts_no_word(make_readings, width):
    note = " ".join(f"word{n}" for n in range(60))
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(view(make_readings(layers=24, heads=16, notes=[note])))
    lines = console.file.getvalue().splitlines()
    fits(lines, (width, 100))
    text = words(" ".join(lines))
    assert width < 100 or "since step 128; peak 7.4 ± 0.1" in text
    assert note in text
    assert "…" not in text or width == 40  # of the rows below
    assert any("5.3 ± 0.1     ▁▁▂▅██▇▆▅ " in f"{line} " for line in lines)  # value and curve whole


def test_a_brief_overview_has_one_line_for_all_alerts_and_no_note(make_readings):
    readings = make_readings(source="inline", notes=["a note of the last reading"])
    run = alerted(readings, [(0, "not_finite"), (64, "logit_growth")])
    console = Console(width=80, color_system=None, file=io.StringIO())
    console.print(view(run, is_brief=True))
    brief = console.file.getvalue()
    assert "\nAlerts: not finite at step 0, logit growth at step 64\n" in brief
    assert "Alert at" not in brief
    assert "note" not in brief
    console.print(view(run))
    whole = console.file.getvalue().removeprefix(brief)
    assert "Alert at step 0: not finite" in whole
    assert "note: a note of the last reading" in whole


def test_a_record_is_followed_while_it_is_written(make_readings, tmp_path, screens):
    readings, path = make_readings(), tmp_path / FILE_NAME
    line = readings[0].line()
    happens = {
        "waiting for": lambda: path.write_text('{"run": {}}\n'),
        "no readings yet": lambda: append(path, line[:100]),  # torn: the rest is on its way
        "no readings yet ": lambda: append(path, line[100:] + "\n"),
        "step 0 ": lambda: write(tmp_path, readings),
        "step 1,500": path.unlink,  # a synced file is replaced
        "step 1,500 ": lambda: write(tmp_path, readings.readings[:3]),
        "step 32 ": lambda: append(path, "hello\n"),
        "line 5 of": lambda: write(tmp_path, readings),
    }
    shown = [*map(words, screens.of(tmp_path, between=happens.values()))]
    for said, screen in zip((*happens, "step 1,500 "), shown, strict=True):
        assert said.strip() in screen
    assert "step 32 " in shown[-2]  # what was read before stays
    assert "line 5 of" not in shown[-1]


HOST = socket.gethostname()
# The text in the lock of a record, and the words on a run of two readings.
LIVES = {
    None: "not training",
    f"process {os.getpid()} on {HOST}": "training, next reading near step 32 in 20 s",
    f"process {2**22 + 1} on {HOST}": "its process was killed",
    "process 1 on another.machine": "training, next reading near step 32 in 20 s",
    "": "training, next reading near step 32 in 20 s",
}


@pytest.mark.parametrize("lock", LIVES, ids=["none", "own", "killed", "elsewhere", "empty"])
def test_whether_a_training_lives_and_when_it_is_read_next(lock, tmp_path, screens, monkeypatch):
    readings = [reading_of({"twonn/mean": 3.0}, step, time=1e9 + 5 * step) for step in (0, 16)]
    folder = write(tmp_path, readings)
    if lock is not None:
        (folder / ".readings.lock").write_text(lock)
    monkeypatch.setattr("time.time", lambda: 1e9 + 140)
    (screen,) = screens.of(folder)
    assert screen.startswith(f"step 16 · 60 s ago · probe, eval · {LIVES[lock]}\n")


def test_a_reading_that_is_late_is_due_and_the_own_process_keeps_its_lock(
    tmp_path, screens, monkeypatch
):
    record = Record(tmp_path)
    readings = [reading_of({"twonn/mean": 3.0}, step, time=1e9 + 5 * step) for step in (0, 16)]
    write(tmp_path, readings)
    monkeypatch.setattr("time.time", lambda: 1e9 + 400)
    (screen,) = screens.of(tmp_path)
    assert "training, next reading near step 32 due 4 min ago" in screen
    code = f"from geomon.record import Record; Record({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is in use" in done.stderr
    record.close()


def test_a_folder_of_runs_shows_the_newest_also_if_it_appears_later(
    make_readings, tmp_path, screens
):
    def begin(name, count, age):
        write(tmp_path / name, make_readings().readings[:count])
        os.utime(tmp_path / name / FILE_NAME, (1e9 - age, 1e9 - age))

    between = [lambda: (begin("old", 3, 9), begin("deep/new", 5, 1))]
    none, newest = screens.of(tmp_path, between=between)
    assert "waiting for" in none
    assert str(tmp_path / "deep" / "new") in newest.replace("\n", "")
    assert "step 128 " in newest
    assert "step 128 " in invoke("watch", tmp_path, "--once").stdout


def test_an_alert_is_shown_at_once_and_what_a_run_gave_up_is_not(make_readings, tmp_path, screens):
    readings, path = make_readings(source="inline"), tmp_path / FILE_NAME
    write(tmp_path, alerted(replace(readings, readings=[]), [(0, "not_finite")]))
    between = [
        lambda: write(tmp_path, readings),
        lambda: append(path, raised_of("logit_growth", 1700).line() + "\n"),
        lambda: append(path, '{"run": {"rewound_to": 500}}\n'),
    ]
    none, healthy, raised, rewound = map(words, screens.of(tmp_path, between=between))
    assert "no readings yet Alert at step 0: not finite (layer 2)" in none
    assert "Alert at" not in healthy
    assert "Alert at step 1,700: logit growth (layer 2)" in raised
    assert "step 256 ·" in rewound  # before the first reading of the new branch
    assert "Alert at" not in rewound


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
    make_readings, tmp_path, screens, monkeypatch, terminal, term, draws
):
    monkeypatch.setenv("TERM", term)
    screens.terminal = terminal
    screens.of(write(tmp_path, make_readings()))
    printed = terminal.getvalue()
    assert ("\x1b[?25l" in printed) == draws  # the cursor is hidden meanwhile
    assert "since step 128; peak 7.4" in " ".join(re.sub("\x1b\\[[0-9;]*m", "", printed).split())
    assert printed.isascii() == (getattr(terminal, "encoding", None) == "ascii")
