"""How many numbers a picture names: at their limits, all of them or some."""

import numpy as np
import pytest

from geomon import Readings
from geomon.show.figures import card, draw
from geomon.show.panels import Line, Lines, Matrix
from support.readings import reading_of


def labels(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


@pytest.mark.parametrize(
    ("layers", "heads", "written", "named"),
    [
        (12, 12, 144, (12, 12)), (12, 13, 0, (12, 13)), (13, 12, 0, (13, 12)),
        (3, 16, 0, (3, 16)), (17, 3, 0, (9, 3)),
    ],
)  # fmt: skip
def test_a_matrix_of_heads_has_its_values_written_if_it_is_small(layers, heads, written, named):
    values = {
        f"own/layer_{layer + 1:02d}/head_{head}": layer - head / 100
        for layer in range(layers)
        for head in range(heads)
    }
    place = draw("heads", Readings([], [reading_of(values)]), "own").axes[0]
    texts = [text.get_text() for text in place.texts]
    assert len(texts) == written
    if written:
        assert (texts[0], texts[1], texts[12]) == ("0.00", "−0.01", "1.00")
    rows, columns = labels(place.yaxis), labels(place.xaxis)
    assert (len(rows), len(columns)) == named
    assert (rows[:2], columns[:2]) == (["1", "3" if layers > 16 else "2"], ["0", "1"])


@pytest.mark.parametrize(("count", "named"), [(12, [*range(12)]), (13, [*range(0, 13, 2)])])
def test_a_colour_bar_of_lines_names_at_most_twelve(count, named):
    lines = [Line(str(n), [0, 8], [1.0, 2.0 + n], f"#0000{n:02X}") for n in range(count)]
    _, bar = card(Lines("size", lines, named_by="layer")).axes
    assert labels(bar.yaxis) == [*map(str, named)]
    assert bar.get_ylabel() == "layer"


@pytest.mark.parametrize(("high", "named"), [(1000.0, [1, 2, 3, 5, 10]), (1001.0, [1, 10, 100])])
def test_a_long_logarithmic_axis_names_powers_of_ten_alone(high, named):
    panel = Matrix("size", np.array([[1.0, high]]), [1], [0, 1], 1.0, high, is_logarithmic=True)
    _, bar = card(panel).axes
    found = [each for each in bar.yaxis.get_majorticklocs() if 1 <= each <= high]
    assert found[: len(named)] == pytest.approx(named)
    assert bar.get_ylabel() == "size\nlogarithmic"
