"""Interactive charts hold what JSON can hold, whatever was measured."""

import dataclasses
import json
import math

import numpy as np
import pytest

from geomon.analysis import Curve
from geomon.analysis.phase import Point
from geomon.show.charts import choose, draw
from geomon.show.panels import Line, Lines, Matrix, thin


@pytest.mark.parametrize("is_logarithmic", [True, False])
def test_a_matrix_with_values_that_no_colour_has_is_drawn_without_them(is_logarithmic):
    values = np.array([[0.1, 10.0], [math.nan, 1.0]])
    if is_logarithmic:
        values[0, 0] = 0.0  # its logarithm is infinite
    chart = draw(
        Matrix("largest score", values, [1, 2], [0, 1], 1.0, 10.0, is_logarithmic=is_logarithmic)
    )
    (heatmap,) = json.loads(chart.to_json())["data"]
    one, ten = (0.0, 1.0) if is_logarithmic else (1.0, 10.0)
    first = None if is_logarithmic else 0.1
    assert [*map(list, chart.data[0].z)] == [[first, ten], [None, one]]
    assert heatmap["zmin"] == one
    assert heatmap["zmax"] == ten


def test_a_panel_that_several_pages_draw_is_changed_by_none():
    line = Line("one", [0, 8], [1.0, 2.0], "#000000")
    panel, matrix = Lines("size", [line]), Matrix("size", np.ones((1, 1)), [1], [0], 0.0, 1.0)
    assert (line.dot, panel.steps, matrix.is_signed) == (3.5, [0, 8], False)
    for each in (line, panel, matrix):
        name = dataclasses.fields(each)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, name, getattr(each, name))


@pytest.mark.parametrize(("count", "is_thinned"), [(400, False), (401, True)])
def test_a_curve_of_more_than_four_hundred_points_is_thinned(count, is_thinned):
    curve = Curve([Point(step, float(step % 7 == 3 or -step), 0.0) for step in range(count)])
    found = thin(curve)
    assert (len(found) < count) == is_thinned
    assert {*found.points} <= {*curve.points}
    assert found.steps[0] == 0
    assert found.steps[-1] == count - 1
    assert min(found.values) == min(curve.values)


@pytest.mark.parametrize(("count", "shown"), [(1, False), (2, True), (8, True), (9, False)])
def test_a_chart_has_a_legend_if_its_names_fit(count, shown):
    lines = [Line(str(n), [0, 8], [1.0, 2.0], "#000000") for n in range(count)]
    assert draw(Lines("size", lines)).layout.showlegend == shown


@pytest.mark.parametrize(("layers", "heads", "every"), [(16, 17, (1, 2)), (33, 16, (3, 1))])
def test_a_chart_names_at_most_sixteen_layers_and_heads(layers, heads, every):
    values = np.arange(layers * heads).reshape(layers, heads) / 8
    chart = draw(Matrix("size", values, [*range(layers)], [*range(heads)], 0.0, 70.0))
    assert (chart.layout.yaxis.dtick, chart.layout.xaxis.dtick) == every
    assert (chart.data[0].zmin, chart.data[0].zmax, chart.data[0].z[1][0]) == (0, 70, heads / 8)


def test_the_slider_of_several_matrices_moves_each_to_its_nearest_step():
    def at(value):
        return Matrix("size", np.array([[value]]), [1], [0], 0.0, 9.0)

    panels = {"one": {0: at(1.0), 64: at(2.0)}, "two": {0: at(3.0), 7: at(4.0), 60: at(5.0)}}
    chart = choose(panels)
    (slider,) = chart.layout.sliders
    moves = [(move.label, [z[0][0] for z in move.args[0]["z"]]) for move in slider.steps]
    assert moves == [("0", [1, 3]), ("7", [1, 4]), ("60", [2, 5]), ("64", [2, 5])]
    assert (slider.active, slider.currentvalue.prefix) == (3, "step ")
    assert [each.visible for each in chart.data] == [True, False]
    (one, shows_one, _), (two, shows_two, _) = chart.layout.meta
    assert (one, shows_one["visible"]) == ("one", [True, False])
    assert (two, shows_two["visible"]) == ("two", [False, True])
