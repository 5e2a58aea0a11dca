"""`geomon watch` in a terminal: overviews and a chart, refreshed in place, without a clock."""

import io
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.color import Color, ColorSystem
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
    """The screen of a terminal after each look at the files; between looks something happens.

    Attributes:
        coloured: The last screen, with its colours.
        paused: Seconds between two looks.
    """

    def __init__(self, monkeypatch):
        self.terminal, self._monkeypatch = Terminal("utf-8"), monkeypatch
        self.coloured, self.paused = Text(), []
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def of(self, *folders, between=(), size=(100, 30), arguments=()):
        """The characters of the screen after the first look, and after each thing that happens."""
        shown, left, begun, threads = [], list(between), 0, {*threading.enumerate()}

        def sleep(seconds):
            nonlocal begun
            written = self.terminal.getvalue()[begun:]
            begun += len(written)
            self.coloured = Text.from_ansi(re.sub("\x1b\\[[0-9;?]*[A-HJKhl]", "", written))
            shown.append(self.coloured.plain)
            self.paused.append(seconds)
            assert {*threading.enumerate()} <= threads  # nothing is drawn between two looks
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


# Lines of the terminal, of the overview, and of the chart below its title.
HEIGHTS = [(15, 6, 0), (16, 6, 8), (20, 6, 12), (21, 11, 8), (36, 11, 23), (37, 11, 24),
           (38, 11, 24)]  # fmt: skip


@pytest.mark.parametrize(("height", "overview", "chart"), HEIGHTS)
def test_a_chart_takes_the_lines_that_the_overview_leaves(
    height, overview, chart, make_readings, tmp_path, screens
):
    whole = alerted(make_readings(notes=["a note"]), [(32, "rank_collapse")])
    (screen,) = screens.of(write(tmp_path, whole), size=(100, height))
    lines = screen.splitlines()
    assert lines[0].startswith("step 1,500 ")
    assert ("note: a note" in lines) == (overview == 11)
    assert len(lines) == (overview + 1 + chart if chart else overview)
    assert [line.startswith("intrinsic dimension  5.3 ± 0.1") for line in lines[overview:]] == [
        True, *[False] * chart
    ][: len(lines) - overview]  # fmt: skip
    assert not chart or max(map(len, lines[overview + 1 :])) == 99


def colours_of(screen):
    """The characters of a screen by their colour; rich may have cached colours of 256."""
    found = {}
    for span in screen.spans:
        if span.style.color is not None:
            colour = span.style.color.downgrade(ColorSystem.EIGHT_BIT).number
            found.setdefault(colour, set()).update(screen.plain[span.start : span.end].split())
    return {name: "".join(sorted(texts)) for name, texts in found.items()}


def test_colours_stand_for_runs_and_dim_ones_for_their_intervals(make_readings, tmp_path, screens):
    run = write(tmp_path / "a", alerted(make_readings(), [(32, "rank_collapse")]))
    higher = make_readings(curves={"twonn/mean": [20.0 + n for n in range(9)]})
    screens.of(run)
    found = colours_of(screens.coloured)
    names = ("#56B4E9", "#2B5A74", "#E69F00", "#734F00", "#CC79A7", "red", "blue")
    blue, dim_blue, orange, dim_orange, purple, red, dark = (
        Color.parse(name).downgrade(ColorSystem.EIGHT_BIT).number for name in names
    )
    assert found.keys() == {blue, dim_blue, purple, red, dark}
    assert {*found[purple]} == {"│"}  # the step of the alert
    assert found[red].startswith("(")
    assert all(map(is_chart, found[blue] + found[dim_blue]))
    assert {*found[dark]} == {*"▁▂▃▄▅▆▇█"}
    screens.terminal = Terminal("utf-8")
    screens.of(run, write(tmp_path / "b", higher))
    found = colours_of(screens.coloured)
    assert found.keys() == {blue, dim_blue, orange, dim_orange, red, dark}
    assert {*found[blue]} > {*"━a"}  # its heading, and the title of the chart
    assert {*found[orange]} > {*"━b"}


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


@pytest.mark.parametrize("is_plain", [False, True])
def test_many_runs_are_all_shown_with_colours_or_characters_again(is_plain, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1" if is_plain else "")
    runs = [write(tmp_path / name, [reading_of({"own/mean": 1.0})]) for name in "abcdefg"]
    lines = invoke("watch", *runs, "--once").stdout.splitlines()
    assert [line for line in lines if line[2:] in [*"abcdefg"]] == [
        f"{mark} {name}" for mark, name in zip("━•+x━•+" if is_plain else "━" * 7, "abcdefg",
                                               strict=True)
    ]  # fmt: skip


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
    f"process {os.getpid()} on {HOST}": "training, next reading near step 80 in 100 s",
    f"process {2**22 + 1} on {HOST}": "its process was killed",
    "process 1 on another.machine": "training, next reading near step 80 in 100 s",
    "": "training, next reading near step 80 in 100 s",
}


@pytest.mark.parametrize("lock", LIVES, ids=["none", "own", "killed", "elsewhere", "empty"])
def test_whether_a_training_lives_and_when_it_is_read_next(lock, tmp_path, screens, monkeypatch):
    readings = [reading_of({"twonn/mean": 3.0}, step, time=1e9 + 5 * step) for step in (16, 48)]
    folder = write(tmp_path, readings)
    if lock is not None:
        (folder / ".readings.lock").write_text(lock)
    monkeypatch.setattr("time.time", lambda: 1e9 + 300)
    (screen,) = screens.of(folder)
    assert screen.startswith(f"step 48 · 60 s ago · probe, eval · {LIVES[lock]}\n")
    assert screens.paused == [0.5]


@pytest.mark.parametrize(
    ("steps", "now", "when"),
    [
        ((16, 48), 400, "training, next reading near step 80 in 0 s"),
        ((16, 48), 640, "training, next reading near step 80 due 4 min ago"),
        ((48,), 640, "training"),
    ],
)
def test_a_reading_is_expected_after_as_long_as_the_one_before(
    steps, now, when, tmp_path, screens, monkeypatch
):
    record = Record(tmp_path)
    write(tmp_path, [reading_of({"twonn/mean": 3.0}, n, time=1e9 + 5 * n) for n in steps])
    monkeypatch.setattr("time.time", lambda: 1e9 + now)
    (screen,) = screens.of(tmp_path)
    assert f" · probe, eval · {when}\n" in screen
    record.close()


def test_a_record_is_not_written_by_two_processes(tmp_path):
    record = Record(tmp_path)
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
