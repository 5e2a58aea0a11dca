"""Panels drawn in characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from geomon.show.panels import Line, Lines
from geomon.show.terminal import charts


def built(panel, columns=60, rows=20):
    return Text.from_ansi(charts.build(panel, columns, rows)).plain.rstrip("\n").split("\n")


def marks_of(lines):
    """The highest and the lowest mark of the axis of values."""
    marks = [float(text.split("┤")[0]) for text in lines if "┤" in text]
    return [max(marks), min(marks)]


def curve(x, y, margin=0.0, *, dash="dashdot", **more):
    """A panel of one line, of crosses unless it is solid."""
    band = ([v - margin for v in y], [v + margin for v in y]) if margin else ((), ())
    return Lines("a", [Line("one", x, y, charts.COLOURS[0], *band, dash=dash)], **more)


@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), min_size=1, max_size=30),
    columns=st.integers(12, 120), rows=st.integers(4, 40),
)  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_any_curve_fits_into_any_chart(points, columns, rows):
    values = [value for value, _ in points]
    low, high = ([v + sign * m for v, m in points] for sign in (-1, 1))
    steps = [7 * n * n for n in range(len(points))]
    panel = Lines("a", [Line("", steps, values, charts.COLOURS[0], low, high)])
    lines = built(panel, columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_noise_within_the_margins_is_drawn_on_few_rows():
    """Of 20 rows, a curve that moves by a tenth of its margin takes two at most."""
    values = [5.0 + 0.01 * (n % 3) for n in range(40)]
    lines = built(curve([*range(40)], values, 0.2))
    assert 1 <= sum("x" in text for text in lines) <= 2
    assert marks_of(lines) == pytest.approx([5.41, 4.61])  # four margins about the middle
    lines = built(curve([*range(40)], values))
    assert 1 <= sum("x" in text for text in lines) <= 4
    assert marks_of(lines) == pytest.approx([5.11, 4.91], abs=0.006)  # 4 % of the value


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-10, 3.0, 1e38, -3.0])
def test_a_constant_is_a_flat_line_on_an_axis_that_is_not_negative(value):
    lines = built(curve([*range(9)], [value] * 9))
    assert sum("x" in text for text in lines) == 1
    assert (marks_of(lines)[1] >= 0) == (value >= 0)


def test_a_logarithmic_axis_has_room_for_step_0_and_marks_powers_of_ten():
    assert built(curve([0, 10, 2000], [1.0, 2.0, 3.0]))[-1].split() == ["0", "10", "100", "2,000"]
    assert built(curve([50, 2000], [1.0, 2.0]))[-1].split() == ["50", "100", "1,000", "2,000"]


def test_the_interval_a_single_point_and_alerts_are_drawn():
    steps = [*range(0, 101, 10)]
    bell = [9.0 - ((step - 50) / 20) ** 2 for step in steps]
    plain = curve(steps, bell, dash="solid")
    interval = curve(steps, bell, 1.5, dash="solid")
    peak = Lines("a", [*plain.lines, Line("", [50], [9.0], charts.COLOURS[1])])
    alert = curve(steps, bell, dash="solid", alerts=[(80, "rank collapse"), (90, "")])

    def dots(lines):
        return sum("⠀" < character <= "⣿" for text in lines for character in text)

    def rules(lines):
        return sum(text[40:].count("│") for text in lines)

    assert dots(built(interval)) > 2 * dots(built(plain))
    assert dots(built(curve(steps, bell, 1.5, dash="dash"))) == 0  # which has no lines beside it
    top = next(text for text in built(peak) if "●" in text)
    assert 0.6 < top.index("●") / 60 < 0.95
    assert rules(built(plain)) == 0
    assert 10 < rules(built(alert)) < 20


def test_the_title_names_lines_and_null_and_the_remark_stands_below():
    one, two = (Line(name, [0, 1], [1.0, 2.0], "#56B4E9") for name in ("a", "b\x1b[2J"))
    panel = Lines("values", [one, two], null=(3.0, "noise: 3"), remark="more")
    assert charts.title_of(panel).plain == "values  noise: 3  ━ a  ━ b�[2J"
    assert built(panel)[-1].strip() == "more"
    assert charts.title_of(Lines("values", [])).plain == "values  not measured"
