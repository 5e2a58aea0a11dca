import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual_plotext.plot import Plot

from geomon.analysis import Curve
from geomon.show.terminal import charts
from geomon.show.terminal.charts import Line


def built(plot, columns=60, rows=20):
    """The lines of a chart, built as textual's widget builds it."""
    plot._set_size(columns, rows)
    return plot.uncolorize(plot.build()).rstrip("\n").split("\n")


def over_steps(curve, *, logarithmic=False, marker="x", size=(60, 20), **options):
    plot = Plot()
    line = Line("a", curve, charts.COLOURS[0], marker)
    charts.draw_over_steps(plot, [line], logarithmic=logarithmic, **options)
    return built(plot, *size)


@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), min_size=1, max_size=30),
    columns=st.integers(12, 120), rows=st.integers(4, 40), logarithmic=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_any_curve_fits_into_any_chart(points, columns, rows, logarithmic):
    steps = [7 * n * n for n in range(len(points))]
    curve = Curve(steps, [value for value, _ in points], [margin for _, margin in points])
    lines = over_steps(curve, logarithmic=logarithmic, marker="braille", size=(columns, rows))
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_noise_within_the_margins_is_drawn_on_few_rows():
    """Of 20 rows, a curve that moves by a tenth of its margin takes two at most."""
    values = [5.0 + 0.01 * (n % 3) for n in range(40)]
    lines = over_steps(Curve([*range(40)], values, [0.2] * 40))
    assert 1 <= sum("x" in text for text in lines) <= 2
    lines = over_steps(Curve([*range(40)], values, [0.0] * 40))
    assert 1 <= sum("x" in text for text in lines) <= 4


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-10, 3.0, 1e38])
def test_a_constant_is_a_flat_line_on_an_axis_that_is_not_negative(value):
    lines = over_steps(Curve([*range(9)], [value] * 9, [0.0] * 9))
    assert sum("x" in text for text in lines) == 1
    marks = [float(text.split("┤")[0]) for text in lines if "┤" in text]
    assert min(marks) >= 0


def test_a_logarithmic_axis_has_room_for_step_0_and_marks_powers_of_ten():
    curve = Curve([0, 10, 2000], [1.0, 2.0, 3.0], [0.0] * 3)
    assert over_steps(curve, logarithmic=True)[-1].split() == ["0", "1", "10", "100", "1,000"]
    assert over_steps(Curve([50, 2000], [1.0, 2.0], [0.0] * 2), logarithmic=True)[-1].split() == [
        "100", "1,000",
    ]  # fmt: skip


def test_the_interval_the_peak_and_the_chosen_step_are_drawn():
    steps = [*range(0, 101, 10)]
    bell = [9.0 - ((step - 50) / 20) ** 2 for step in steps]
    curve, exact = Curve(steps, bell, [1.5] * 11), Curve(steps, bell, [0.0] * 11)
    lines = {
        kind: over_steps(each, marker="braille", **options)
        for kind, each, options in (
            ("plain", exact, {}), ("interval", curve, {}), ("chosen", exact, {"chosen": 80}),
            ("peak", exact, {"peak": (50, 9.0)}),
        )
    }  # fmt: skip

    def dots(kind):
        return sum("⠀" < character <= "⣿" for text in lines[kind] for character in text)

    assert dots("interval") > 2 * dots("plain")
    top = next(text for text in lines["peak"] if "●" in text)
    assert 0.4 < top.index("●") / 60 < 0.6
    assert (
        sum("│" in text[40:] for text in lines["chosen"])
        > 10
        > sum("│" in text[40:] for text in lines["plain"])
    )


def test_layers_are_marked_by_their_numbers():
    plot = Plot()
    profile = Curve([*range(33)], [math.sin(n / 9) for n in range(33)], [0.0] * 33)
    charts.draw_over_depth(plot, [Line("now", profile, charts.COLOURS[0])])
    marks = [int(mark) for mark in built(plot)[-1].split()]
    assert marks == [0, 5, 10, 15, 20, 25, 30]
