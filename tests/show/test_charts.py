"""Interactive charts: what they draw, on which scales, and that JSON can hold them."""

import json
import math

import pytest
from tagged import reading_of, with_values

from geomon.record import Readings
from geomon.show.charts import add_linear_axis, charts_of, choose, draw, slide
from geomon.show.collect import depth_panel, head_panels, map_panel
from geomon.show.colours import BLUE, VERMILLION
from geomon.show.panels import Line, Lines

NAMES = [
    "1_Intrinsic_dimension", "2_anisotropy_over_depth", "3_intrinsic_dimension_by_layer",
    "4_anisotropy_by_layer", "5_attention_entropy_by_layer",
    "6_cosine_of_mean_query_and_mean_key_by_head",
    "7_attention_entropy_by_head",
]  # fmt: skip


@pytest.fixture
def readings(make_readings):
    curves = {f"twonn/layer_{layer:02d}": [value] * 9 for layer, value in ((0, 40.0), (1, 5.0))}
    return make_readings(curves=curves, layers=2, heads=3)


def test_there_is_a_chart_for_each_thing_that_was_measured(readings, make_readings):
    charts = charts_of(readings)
    assert list(charts) == NAMES
    assert charts[NAMES[0]].layout.title.text == (
        "Intrinsic dimension, mean over layers (band: 95 % interval)"
    )
    few = make_readings((0,), without=["twonn", "twonn_distinct", "gride", "anisotropy"])
    assert list(charts_of(few)) == NAMES[4:]
    assert charts_of(Readings([], [reading_of({}, 0, "inline")])) == {}


def test_lines_have_their_places_bands_names_and_marks():
    lines = [
        Line("one", [0, 4, 32], [5.0, math.nan, 7.0], BLUE, [4.5, 5.5, 6.0], [5.5, 6.5, 8.0]),
        Line("two <i>", [0, 4, 32], [2.0, 2.5, 3.0], VERMILLION, dash="dash", width=3.0),
        Line("", [*range(50)], [1.0] * 50, BLUE, width=0.7),
    ]
    panel = Lines(
        "values <b>", lines, null=(4.0, "noise: 4"), chance=(1.5, "by chance"),
        alerts=[(4, "rank collapse"), (32, "")], remark="one more thing",
    )  # fmt: skip
    chart = draw(panel, steps=(0, 1000))
    band, first, second, third = chart.data
    assert list(band.y) == [5.5, 6.5, 8.0, 6.0, 5.5, 4.5]
    assert (list(first.y), list(first.customdata)) == ([5.0, None, 7.0], [0, 4, 32])
    assert 0 < first.x[0] < first.x[1] == 4  # a logarithmic axis has no 0
    assert (second.line.color, second.line.dash, second.mode) == (
        VERMILLION, "dash", "lines+markers",
    )  # fmt: skip
    assert [trace.showlegend for trace in chart.data] == [False, True, True, False]
    assert third.mode == "lines"
    assert [trace.name for trace in chart.data] == [None, "one", "two &lt;i&gt;", ""]
    layout = chart.layout
    assert (layout.showlegend, layout.yaxis.title.text) == (True, "values &lt;b&gt;")
    assert layout.xaxis.title.text == "training step (logarithmic)<br>one more thing"
    assert layout.xaxis.ticktext == ("0", "10", "100", "1,000")
    assert 10 ** layout.xaxis.range[1] > 1000
    marks = [(shape.x0, shape.y0) for shape in layout.shapes if shape.type == "line"]
    assert sorted(marks) == [(0, 4.0), (4, 0), (32, 0)]
    (chance,) = [shape for shape in layout.shapes if shape.type == "rect"]
    assert (chance.y0, chance.y1) == (-1.5, 1.5)
    said = {note.text: note.x for note in layout.annotations}
    assert said.keys() == {"rank collapse", "noise: 4", "by chance"}
    assert said["rank collapse"] == pytest.approx(math.log10(4))


def test_profiles_are_named_by_their_steps(readings):
    chart = draw(depth_panel(readings, "anisotropy"))
    names = [trace.name for trace in chart.data if trace.showlegend]
    assert names[0] == "step 0"
    assert names[-1] == "step 1,500"
    assert chart.layout.xaxis.type == "linear"
    scales = draw(
        Lines("a", [Line("4", [1, 2], [3.0, 0.1], BLUE)], "scale", "step", is_logarithmic=True)
    )
    assert (scales.layout.xaxis.type, scales.layout.yaxis.type) == ("log", "log")


def test_values_far_apart_have_a_logarithmic_scale_that_names_them(make_readings):
    curves = {f"twonn/layer_{layer:02d}": [2.0**layer] * 9 for layer in range(7)}
    chart = draw(map_panel(make_readings(curves=curves, layers=6), "twonn"))
    (values,) = chart.data
    assert [row[0] for row in values.z] == pytest.approx(
        [layer * math.log10(2) for layer in range(7)], rel=1e-4
    )
    assert [row[0] for row in values.text] == ["1", "2", "4", "8", "16", "32", "64"]
    assert [values.colorbar.ticktext[place] for place in (0, -1)] == ["1", "64"]
    assert "%{text}" in values.hovertemplate
    assert (chart.layout.yaxis.title.text, chart.layout.yaxis.dtick) == ("layer", 1)
    large = make_readings((0,), layers=33, heads=2)
    assert draw(head_panels(large, "qk_cosine")[0]).layout.yaxis.dtick == 3


def test_a_menu_shows_one_chart_and_its_axes(readings):
    metrics = ("anisotropy", "twonn")
    charts = {name: draw(depth_panel(readings, name)) for name in metrics}
    assert choose({"twonn": charts["twonn"]}) == charts["twonn"]  # nothing to choose
    whole = choose(charts)
    assert [name for name, *_ in whole.layout.meta] == ["anisotropy", "twonn"]
    assert len(whole.data) == sum(len(chart.data) for chart in charts.values())
    shown = [trace.visible for trace in whole.data]
    for name, visible, layout in whole.layout.meta:
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
    assert whole.layout.sliders[0].active == len(moves) - 1


def test_the_axis_of_steps_can_be_made_linear_and_logarithmic_again(readings):
    chart = add_linear_axis(charts_of(readings)[NAMES[0]])
    back, linear = (changes for *_, changes in chart.layout.meta)
    assert [axis["xaxis.type"] for axis in (back, linear)] == ["log", "linear"]
    assert linear["xaxis.range"][0] < 0 < 1500 < linear["xaxis.range"][1]
    assert back["xaxis.range"] == chart.layout.xaxis.range


def test_json_holds_every_chart_though_values_are_missing(readings):
    holed = [
        with_values(r, {t: math.nan if "_02" in t else v for t, v in r.values.items()})
        for r in readings
    ]
    for chart in charts_of(Readings([], holed)).values():
        json.dumps(json.loads(chart.to_json()), allow_nan=False)
