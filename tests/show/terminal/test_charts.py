import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual_plotext.plot import Plot

from geomon.show.terminal import charts
from geomon.show.terminal.charts import Line, Scale


def drawn(line, columns, rows, **options):
    """The lines of a chart, built as textual's widget builds it."""
    plot = Plot()
    charts.draw_over_steps(plot, [line], (columns, rows), **options)
    plot._set_size(columns, rows)
    return plot.uncolorize(plot.build()).rstrip("\n").split("\n")


def profile(values, columns=60, rows=12):
    """The lines of a profile over depth."""
    plot = Plot()
    places = [float(layer) for layer in range(len(values))]
    line = Line(places, values, [0.0] * len(values), charts.RUNS[0])
    charts.draw_profile(plot, [line], (columns, rows), layers=range(len(values)))
    plot._set_size(columns, rows)
    return plot.uncolorize(plot.build()).rstrip("\n").split("\n")


def test_layer_0_does_not_flatten_the_blocks():
    lines = profile([25.0, 1.0, 3.0, 6.0, 2.0])
    assert "0: 25.0↑" in lines[-1]
    marks = [float(line.split("┤")[0]) for line in lines if "┤" in line]
    assert max(marks) <= 6
    highest = next(row for row, line in enumerate(lines) if any(c > "⠀" for c in line[6:]))
    assert highest <= 1  # the curve of the blocks fills the chart


@pytest.mark.parametrize(("first", "is_far"), [(0.5, True), (0.1, False)])
def test_layer_0_is_compared_with_the_range_of_blocks_below_0(first, is_far):
    lines = profile([first, -0.2, -0.05, 0.01, -0.1])
    assert (f"0: {first:.2f}↑" in lines[-1]) == is_far


@pytest.mark.parametrize("first", [5.0, 11.0, -30.0])
def test_layer_0_near_the_blocks_is_drawn_with_them(first):
    lines = profile([first, 1.0, 3.0, 6.0, 2.0])
    assert "↑" not in "".join(lines)


values = st.one_of(st.floats(-1, 3), st.just(math.nan))


@given(
    layers=st.integers(1, 60), heads=st.integers(1, 70), columns=st.integers(8, 120),
    rows=st.integers(3, 40), coloured=st.booleans(), data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=30)
def test_heads_fit_into_any_chart(layers, heads, columns, rows, coloured, data):
    row = data.draw(st.lists(values, min_size=layers, max_size=layers))
    table = [row] * heads
    scale = charts.scale_of("own", -1.0, 3.0)
    text = charts.draw_heads(
        list(range(layers)), table, scale, (columns, rows), coloured=coloured
    ).plain
    lines = text.split("\n")
    assert len(lines) <= rows
    assert max(map(len, lines[:-1])) <= columns


@pytest.mark.parametrize("coloured", [True, False])
def test_few_heads_have_their_values_and_many_their_means(coloured):
    few = charts.draw_heads([1, 2], [[0.25, 0.5]], Scale(0, 1), (40, 8), coloured=coloured)
    assert "0.25" in few.plain
    assert "0.50" in few.plain
    table = [[float(head % 2)] * 40 for head in range(96)]  # each field is a mean of both
    many = charts.draw_heads(list(range(40)), table, Scale(0, 1), (20, 8), coloured=coloured)
    if coloured:
        middle = "#{:02x}{:02x}{:02x}".format(*Scale(0, 1).colour(0.5))
        assert {str(span.style) for span in many.spans if "on" in str(span.style)} >= {
            f"{middle} on {middle}"
        }
    else:
        assert set(many.plain.split("\n")[0][3:]) == {"▒"}


@pytest.mark.parametrize(
    ("metric", "lowest", "highest", "ends"),
    [
        ("qk_cosine", -0.2, 0.3, (-1, 1)),
        ("attention_entropy", 0.1, 0.9, (0, 0.9)),
        ("attention_sink", 0.0, 0.4, (0, 1)),
        ("max_logit", 1.0, 31.0, (0, 31)),
        ("qk_dot", -9.0, 7.0, (-9, 9)),
        ("attention_entropy", 0.0, 0.0, (0, 1)),
    ],
)
def test_the_scale_of_heads_suits_the_metric(metric, lowest, highest, ends):
    scale = charts.scale_of(metric, lowest, highest)
    assert (scale.low, scale.high) == ends
    assert [scale.share(value) for value in (lowest - 10, highest + 10)] == [0.0, 1.0]


@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), min_size=1, max_size=30),
    columns=st.integers(8, 120), rows=st.integers(3, 40), logarithmic=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_any_curve_fits_into_any_chart(points, columns, rows, logarithmic):
    steps = [7 * n * n for n in range(len(points))]
    xs = [math.log2(step + 1) if logarithmic else float(step) for step in steps]
    line = Line(xs, [v for v, _ in points], [m for _, m in points], (86, 180, 233))
    lines = drawn(line, columns, rows, steps=(0, steps[-1]), logarithmic=logarithmic)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_noise_within_the_margins_is_drawn_on_few_rows():
    """Of 20 rows, a curve that moves by a tenth of its margin takes two at most."""
    ys = [5.0 + 0.01 * (n % 3) for n in range(40)]
    line = Line([float(n) for n in range(40)], ys, [0.2] * 40, (86, 180, 233), "x")
    lines = drawn(line, 60, 22, steps=(0, 39), logarithmic=False)
    assert 1 <= sum("x" in text for text in lines) <= 2
