"""`geomon watch`: overviews and a chart, refreshed in place, without a clock; or printed once."""

import re
from dataclasses import replace

import pytest
from rich.text import Text
from shown import Terminal, alerted, write
from tagged import raised_of, with_values

from geomon.record import FILE_NAME
from geomon.show.terminal import watch


class Screens:
    """What a terminal shows after each look at the files; between two looks something happens."""

    def __init__(self, monkeypatch, size=(100, 30)):
        self.terminal = Terminal("utf-8")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(size[0]))
        monkeypatch.setenv("LINES", str(size[1]))
        monkeypatch.delenv("NO_COLOR", raising=False)
        self._monkeypatch = monkeypatch

    def of(self, *folders, between=(), **options):
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

        self._monkeypatch.setattr("sys.stdout", self.terminal)
        self._monkeypatch.setattr("time.sleep", sleep)
        watch([*folders], **options)
        return shown


def words(screen):
    return " ".join(screen.split())


def is_chart(line):
    return any("⠀" < character <= "⣿" for character in line)


@pytest.fixture
def screens(monkeypatch):
    return Screens(monkeypatch)


@pytest.mark.parametrize("size", [(80, 40), (120, 40), (200, 50)])
def test_dimensions_phases_and_alerts_are_whole_at_any_size_above_a_chart(
    make_readings, tmp_path, monkeypatch, size
):
    kinds = [(16, "logit_growth"), (64, "not_finite"), (256, "entropy_collapse")]
    folder = write(tmp_path / "a", alerted(make_readings(layers=12, heads=16), kinds))
    (screen,) = Screens(monkeypatch, size).of(folder)
    assert "step 1,500 · " in words(screen)
    assert (
        "Alerts: not finite at step 64, logit growth at step 16, entropy collapse at step "
        "256. intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, compressing, -0.4"
    ) in words(screen)
    lines = screen.splitlines()
    assert "intrinsic dimension  5.3 ± 0.1" in screen  # above the chart
    assert sum(map(is_chart, lines)) >= 4
    assert sum(line.count("│") >= 3 for line in lines) >= 6  # alerts
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]


def test_a_chart_is_left_out_where_the_overview_fills_the_screen(
    make_readings, tmp_path, monkeypatch
):
    (screen,) = Screens(monkeypatch, (100, 12)).of(write(tmp_path, make_readings()))
    assert "step 1,500" in screen
    assert not any(map(is_chart, screen.splitlines()))


def test_a_record_is_followed_while_it_is_written(make_readings, tmp_path, screens):
    readings, path = make_readings(), tmp_path / FILE_NAME
    line = readings[0].line()

    def append(text):
        with path.open("a") as file:
            file.write(text)

    between = [
        lambda: path.write_text('{"run": {}}\n'),
        lambda: append(line[:100]),  # torn: the rest is on its way
        lambda: append(line[100:] + "\n"),
        lambda: write(tmp_path, readings),
        path.unlink,  # a synced file is replaced
        lambda: write(tmp_path, readings.readings[:3]),
        lambda: append("hello\n"),
        lambda: write(tmp_path, readings),
    ]
    shown = [*map(words, screens.of(tmp_path, between=between))]
    expected = [
        "waiting for", "no readings yet", "no readings yet", "step 0 ", "step 1,500", "step 1,500",
        "step 32 ", "line 5 of", "step 1,500",
    ]  # fmt: skip
    for said, screen in zip(expected, shown, strict=True):
        assert said in screen
    assert "step 32 " in shown[-2]  # what was read before stays
    assert "line 5 of" not in shown[-1]


def test_an_alert_is_shown_at_once_and_what_a_run_gave_up_is_not(make_readings, tmp_path, screens):
    readings = make_readings(source="inline")

    def append(line):
        with (tmp_path / FILE_NAME).open("a") as file:
            file.write(line + "\n")

    write(tmp_path, alerted(replace(readings, readings=[]), [(0, "not_finite")]))
    between = [
        lambda: write(tmp_path, readings),
        lambda: append(raised_of("logit_growth", 1700).line()),
        lambda: append('{"run": {"rewound_to": 500}}'),
    ]
    none, healthy, raised, rewound = map(words, screens.of(tmp_path, between=between))
    assert "no readings yet Alert at step 0: not finite (layer 2)" in none
    assert "Alert at" not in healthy
    assert "Alert: logit growth at step 1,700. intrinsic dimension, mean" in raised
    assert "Alert at step 1,700: logit growth (layer 2)" in raised
    assert "step 256 ·" in rewound  # before the first reading of the new branch
    assert "Alert at" not in rewound


def test_several_runs_lie_over_one_another_with_a_legend(make_readings, tmp_path, monkeypatch):
    folders = [
        write(tmp_path / name, make_readings((0, 16, 1500), curves={"twonn/mean": values}))
        for name, values in (("one", [3.0, 7.0, 5.0]), ("two", [1.0, 2.0, 9.0]))
    ]
    (screen,) = Screens(monkeypatch, (110, 50)).of(*folders)
    lines = screen.splitlines()
    assert any(line.startswith("━ one") for line in lines)
    assert "intrinsic dimension  ━ one  ━ two" in screen
    assert lines.index(next(line for line in lines if "━ two" in line)) > 3
    marks = [float(line.split("┤")[0]) for line in lines if "┤" in line]
    assert max(marks) >= 9
    assert min(marks) <= 1


def test_the_metric_and_the_layer_of_the_chart_are_chosen(
    make_readings, tmp_path, monkeypatch, capsys
):
    readings = make_readings(layers=4, heads=2)
    own = [with_values(r, {**r.values, "drift_norm/mean": 1.0 + r.step}) for r in readings]
    folder = write(tmp_path, replace(readings, readings=own))
    monkeypatch.setenv("COLUMNS", "100")
    for options, title in (
        ({}, "intrinsic dimension  "), ({"metric": "drift_norm"}, "drift_norm  "),
        ({"metric": "anisotropy", "layer": 2}, "anisotropy, layer 2  "),
    ):  # fmt: skip
        watch([folder], once=True, **options)
        printed = capsys.readouterr().out
        assert any(line.startswith(title) for line in printed.splitlines()), title
        assert sum(map(is_chart, printed.splitlines())) >= 4
    with pytest.raises(ValueError, match=r"no run has 'anisotropi': there are twonn, "):
        watch([folder], once=True, metric="anisotropi")
    with pytest.raises(ValueError, match=r"no layer 9 of anisotropy: there are 0 to "):
        watch([folder], once=True, metric="anisotropy", layer=9)


@pytest.mark.parametrize(
    ("content", "stack", "said"),
    [("hello\n", None, "line 1 of"), ("", "encoder", "no stack is called 'encoder'")],
)
def test_what_is_no_record_ends_in_one_line(make_readings, tmp_path, screens, content, stack, said):
    path = write(tmp_path, make_readings()) / FILE_NAME
    path.write_text(content + path.read_text())
    with pytest.raises(ValueError, match=said) as caught:
        screens.of(tmp_path, stack=stack)
    assert "\n" not in str(caught.value)


def test_nothing_of_a_record_acts_on_the_terminal_or_on_the_markup(
    make_readings, tmp_path, screens
):
    odd = "\x1b[2J[bold]x[/nope]\u202e"
    values = {f"{odd}/mean": 1.0, f"{odd}/layer_01/head_0": 1.0}
    readings = [
        with_values(r, values, source=odd, mode=odd, notes=[odd]) for r in make_readings((0, 16))
    ]
    folder = write(tmp_path / "a[red]\x1b[2J", readings)
    (screen,) = screens.of(folder)
    assert "[bold]x[/nope]" in screen
    assert "\x1b[2J" not in screens.terminal.getvalue()
    assert "\u202e" not in screens.terminal.getvalue()
