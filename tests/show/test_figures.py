"""Pictures drawn by matplotlib: which panels there are, and what their axes hold."""

import math

import pytest

from geomon.analysis import Difference
from geomon.record import Readings
from geomon.show.figures import compare_figure, draw
from support.readings import reading_of, synthetic_run

# The second value of a metric that is 1 in the first run, and the scale of the axis.
APART = [(1.5, "linear"), (10.9, "linear"), (11.1, "symlog"), (1e4, "symlog")]


def runs_of(*values, **more):
    return tuple(Readings([{}], [reading_of({"own/mean": x, **more})]) for x in values)


@pytest.mark.parametrize(("second", "scale"), APART)
def test_a_run_that_diverged_does_not_flatten_the_other_differences(second, scale):
    runs = runs_of(1.0, second, **{"own/mean/margin": 0.1})
    panel = compare_figure(runs, ["a", "b"], [Difference("own/mean", 0, 1.0, second, 0.14)]).axes[1]
    assert panel.get_xscale() == scale
    if scale == "symlog":
        assert panel.get_xlim()[0] == -200  # nothing falls by more than 100 %
        assert panel.xaxis.get_major_formatter()(1000) == "1000"
    (point,) = [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "o"]
    assert point == pytest.approx(100 * (second - 1))


def test_differences_without_an_error_are_not_drawn_and_said():
    found = [Difference("own/mean", 0, 1.0, 2.0, math.nan)]
    panel = compare_figure(runs_of(1.0, 2.0), ["a", "b"], found).axes[1]
    assert [text.get_text() for text in panel.texts] == ["no difference has a known error"]


def test_places_of_a_grid_without_a_panel_are_empty():
    figure = draw("cosines", synthetic_run(layers=5))
    assert [place.get_visible() for place in figure.axes] == [True] * 5 + [False] * 3
