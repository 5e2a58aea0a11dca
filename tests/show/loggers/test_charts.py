"""Interactive charts: what they draw, on which scales, and that JSON can hold them."""

import json
import math
import sys

import pytest
from msgspec.structs import replace
from tagged import alert_of, reading_of, with_values

from geomon.record import Readings
from geomon.show.loggers.charts import charts_of

CURVES = {f"twonn/layer_{layer:02d}": [value] * 9 for layer, value in ((0, 40.0), (1, 5.0))}
NAMES = [
    "1_intrinsic_dimension", "2_anisotropy_over_depth", "3_intrinsic_dimension_by_layer",
    "4_anisotropy_by_layer", "5_attention_entropy_by_layer",
    "6_cosine_of_mean_query_and_mean_key_by_head",
    "7_attention_entropy_by_head",
]  # fmt: skip


@pytest.fixture
def readings(make_readings):
    return make_readings(curves=CURVES, layers=2, heads=3)


def test_there_is_a_chart_for_each_thing_that_was_measured(readings, make_readings):
    assert list(charts_of(readings, readings[-1])) == NAMES
    few = make_readings((0,), without=["twonn", "twonn_distinct", "gride", "anisotropy"])
    assert list(charts_of(few, few[-1])) == [NAMES[4], *NAMES[5:]]
    nothing = reading_of({}, 0, "inline")
    assert charts_of(Readings([], [nothing]), nothing) == {}


def test_the_dimension_has_bands_and_true_steps(readings):
    chart = charts_of(readings, readings[-1])[NAMES[0]]
    lines = {trace.name: trace for trace in chart.data if trace.name}
    bands = [trace for trace in chart.data if trace.fill == "toself"]
    assert len(lines) == 3
    assert len(bands) == 2  # gride has no margin here
    twonn = lines["intrinsic dimension"]
    assert list(twonn.customdata) == [reading.step for reading in readings]
    assert list(twonn.x) == sorted(set(twonn.x))
    ends = list(bands[0].y)
    assert ends[4] == pytest.approx(7.3 + 0.1)
    assert ends[-5] == pytest.approx(7.3 - 0.1)
    assert next(iter(chart.layout.xaxis.ticktext)) == "0"


def test_an_alert_is_a_line_with_its_name(readings):
    marked = [*readings]
    marked[4] = replace(marked[4], notes=(alert_of("rank_collapse", "x"),))
    chart = charts_of(Readings(readings.runs, marked), marked[-1])[NAMES[0]]
    (line,) = chart.layout.shapes
    assert line.x0 == pytest.approx(math.log10(128))
    assert [note.text for note in chart.layout.annotations] == ["rank collapse"]


def test_maps_have_the_scale_of_the_blocks_and_matrices_one_that_stays(readings):
    charts = charts_of(readings, readings[-1])
    (dimension,) = charts[NAMES[2]].data
    assert (dimension.zmin, dimension.zmax) == (0.0, 5.0)
    assert "beyond" in charts[NAMES[2]].layout.title.text
    assert len(dimension.x) == len(readings) + 1
    (cosines,) = charts[NAMES[5]].data
    assert (cosines.zmin, cosines.zmax) == (-1.0, 1.0)
    assert [list(row) for row in cosines.z] == [pytest.approx([-0.7, 0.7, -0.7])] * 2
    last = with_values(readings[-1], {**readings[-1].values, "attention_entropy/null": 4.0})
    (entropies,) = charts_of(Readings(readings.runs, [last]), last)[NAMES[6]].data
    assert (entropies.zmin, entropies.zmax) == (0.0, pytest.approx(4.0))


def test_json_holds_every_chart_though_values_are_missing(readings):
    holed = [
        with_values(r, {t: math.nan if "_02" in t else v for t, v in r.values.items()})
        for r in readings
    ]
    for chart in charts_of(Readings([], holed), holed[-1]).values():
        json.dumps(json.loads(chart.to_json()), allow_nan=False)


def test_without_plotly_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "geomon.show.loggers.charts")
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pip install 'geomon\[wandb\]'"):
        import geomon.show.loggers.charts  # noqa: F401
