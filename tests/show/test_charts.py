"""Interactive charts hold what JSON can hold, whatever was measured."""

import json
import math

import numpy as np
import pytest

from geomon.show.charts import draw
from geomon.show.panels import Matrix


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
