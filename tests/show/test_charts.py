"""Interactive charts: what they draw, on which scales, and that JSON can hold them."""

import json
import math
import sys

import pytest
from msgspec.structs import replace
from tagged import alert_of, reading_of, with_values

from geomon.record import Readings
from geomon.show.charts import add_linear_axis, charts_of, choose, draw, slide
from geomon.show.panels import depth_panel, head_panels, map_panel

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
    assert list(charts_of(readings)) == NAMES
    few = make_readings((0,), without=["twonn", "twonn_distinct", "gride", "anisotropy"])
    assert list(charts_of(few)) == NAMES[4:]
    assert charts_of(Readings([], [reading_of({}, 0, "inline")])) == {}


def test_the_dimension_has_bands_and_true_steps(readings):
    chart = charts_of(readings)[NAMES[0]]
    lines = [trace for trace in chart.data if trace.showlegend]
    bands = [trace for trace in chart.data if trace.fill == "toself"]
    assert len(lines) == 3
    assert len(bands) == 2  # gride has no margin here
    assert list(lines[0].customdata) == [reading.step for reading in readings]
    assert list(lines[0].x) == sorted(set(lines[0].x))
    assert list(bands[0].y)[4] == pytest.approx(7.3 + 0.1)
    assert list(bands[0].y)[-5] == pytest.approx(7.3 - 0.1)
    assert next(iter(chart.layout.xaxis.ticktext)) == "0"
    assert min(lines[0].x) == lines[0].x[0] > 0  # a logarithmic axis has no 0


def test_an_alert_is_a_line_with_its_name(readings):
    marked = [*readings]
    marked[4] = replace(marked[4], notes=(alert_of("rank_collapse", "x"),))
    chart = charts_of(Readings(readings.runs, marked))[NAMES[0]]
    (line,) = chart.layout.shapes
    assert line.x0 == 128
    assert [(note.text, note.x) for note in chart.layout.annotations] == [
        ("rank collapse", pytest.approx(math.log10(128)))
    ]


def test_values_far_apart_have_a_logarithmic_scale_that_names_them(make_readings):
    curves = {f"twonn/layer_{layer:02d}": [2.0**layer] * 9 for layer in range(7)}
    (values,) = draw(map_panel(make_readings(curves=curves, layers=6), "twonn")).data
    assert [row[0] for row in values.z] == pytest.approx(
        [layer * math.log10(2) for layer in range(7)], rel=1e-4
    )
    assert [row[0] for row in values.text] == ["1", "2", "4", "8", "16", "32", "64"]
    assert [values.colorbar.ticktext[place] for place in (0, -1)] == ["2", "64"]


def test_a_menu_shows_one_chart_and_its_axes(readings):
    metrics = ("anisotropy", "twonn")
    charts = {name: draw(depth_panel(readings, name)) for name in metrics}
    whole = choose(charts, letters=8)
    assert [button.label for button in whole.layout.updatemenus[0].buttons] == ["anisotr…", "twonn"]
    assert len(whole.data) == sum(len(chart.data) for chart in charts.values())
    shown = [trace.visible for trace in whole.data]
    for button, name in zip(whole.layout.updatemenus[0].buttons, metrics, strict=True):
        visible, layout = button.args
        chosen = [t for t, on in zip(whole.data, visible["visible"], strict=True) if on]
        assert [list(trace.y) for trace in chosen] == [list(t.y) for t in charts[name].data]
        assert layout["yaxis"]["title"]["text"] == readings.text_of(name).label
        assert shown == visible["visible"] or name != metrics[0]


def test_a_slider_moves_all_matrices_to_the_nearest_step(readings):
    names = ("qk_cosine", "attention_entropy")
    matrices = [head_panels(readings, name, 4) for name in names]
    del matrices[1][max(matrices[1])]
    whole = slide(matrices, names)
    moves = whole.layout.sliders[0].steps
    assert [move.label for move in moves] == [f"{step:,}" for step in sorted(matrices[0])]
    for move, step in zip(moves, sorted(matrices[0]), strict=True):
        tables = move.args[0]["z"]
        assert tables[0] == pytest.approx(matrices[0][step].values.round(5))
        nearest = min(matrices[1], key=lambda other: abs(math.log1p(other) - math.log1p(step)))
        assert tables[1] == pytest.approx(matrices[1][nearest].values.round(5))
    assert [list(row) for row in whole.data[0].z] == moves[-1].args[0]["z"][0]


def test_the_axis_of_steps_can_be_made_linear_and_logarithmic_again(readings):
    chart = add_linear_axis(charts_of(readings)[NAMES[0]])
    back, linear = (button.args[0] for button in chart.layout.updatemenus[0].buttons)
    assert (chart.layout.xaxis.type, back["xaxis.type"], linear["xaxis.type"]) == (
        "log", "log", "linear",
    )  # fmt: skip
    assert linear["xaxis.range"][0] < 0 < 1500 < linear["xaxis.range"][1]
    assert back["xaxis.range"] == list(chart.layout.xaxis.range)


def test_json_holds_every_chart_though_values_are_missing(readings):
    holed = [
        with_values(r, {t: math.nan if "_02" in t else v for t, v in r.values.items()})
        for r in readings
    ]
    for chart in charts_of(Readings([], holed)).values():
        json.dumps(json.loads(chart.to_json()), allow_nan=False)


def test_without_plotly_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "geomon.show.charts")
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pip install 'geomon\[wandb\]'"):
        import geomon.show.charts  # noqa: F401
