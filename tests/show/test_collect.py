"""Panels of a run, by their data: what all pages draw of it."""

import math

import numpy as np
import pytest
from shown import alerted
from tagged import TEXTS, reading_of, with_values

from geomon.analysis import Curve
from geomon.analysis.curves import mean_abs_over_heads
from geomon.record import Readings
from geomon.show import collect
from geomon.show.colours import BLUE, look_of
from geomon.show.panels import Line, Lines, StepAxis, spread_items, spread_steps, thin


def lopsided(steps=(0, 4, 32), layers=3, heads=5):
    """A run of which no two values are equal: step, layer, head and metric are in each."""
    readings = []
    for place, step in enumerate(steps):
        values = {}
        for layer in range(layers + 1):
            base = 0.01 * place + 0.1 * layer
            values[f"anisotropy/layer_{layer:02d}"] = 0.05 + base
            values[f"anisotropy/layer_{layer:02d}/margin"] = 0.01 + 0.001 * layer - 0.002 * place
            if layer:
                values[f"attention_entropy/layer_{layer:02d}"] = 2 + base
            for head in range(heads if layer else 0):
                size = base + 0.001 * (head + 1)
                values[f"qk_cosine/layer_{layer:02d}/head_{head}"] = size * (-1 if not head else 1)
        for number, name in enumerate(("twonn/mean", "twonn_distinct/mean", "gride/mean/k32")):
            values[name] = 5.0 + place + 0.1 * number
            values[f"{name}/margin"] = 0.5 + 0.01 * number
        values["gride/mean/k1"] = 50.0
        readings.append(reading_of(values, step, notes=["note"]))
    return Readings([{"model": "Synthetic", "metrics": TEXTS}], readings)


def with_all(readings, values):
    return Readings(readings.runs, [with_values(r, r.values | values) for r in readings])


def single(metric, profile):
    """A run of one reading with these values of a metric by layer."""
    values = {f"{metric}/layer_{layer:02d}": value for layer, value in enumerate(profile)}
    return Readings([], [reading_of(values)])


# -- over training ---------------------------------------------------------------------------------


def test_the_dimension_has_its_variants_with_intervals_and_the_largest_scale():
    readings = lopsided()
    panel = collect.dimension_panel(readings)
    tags = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k32")
    assert panel.label == "Intrinsic dimension"
    assert [line.name for line in panel.lines] == [
        "intrinsic dimension", "distinct tokens", "by scale, scale 32",
    ]  # fmt: skip
    for line, tag in zip(panel.lines, tags, strict=True):
        rows = [(r.values[tag], r.values[f"{tag}/margin"]) for r in readings]
        assert list(line.y) == [value for value, _ in rows]
        assert list(line.low) == [value - margin for value, margin in rows]
        assert list(line.high) == [value + margin for value, margin in rows]
    assert len({line.colour for line in panel.lines}) == 3
    assert panel.lines[2].dash != "solid"


def test_the_peak_is_named_where_the_dimension_has_fallen_from_one(make_readings):
    (first, *_) = collect.dimension_panel(make_readings()).lines
    assert first.name == "intrinsic dimension: peak 7.4 at step 256"
    rising = make_readings(curves={"twonn/mean": [2, 2.5, 3, 4, 5, 6, 7, 8, 9]})
    assert not any("peak" in line.name for line in collect.dimension_panel(rising).lines)


@pytest.mark.parametrize(("distinct", "is_logarithmic"), [(32.0, True), (10.0, False)])
def test_the_dimension_is_logarithmic_only_where_variants_lie_far_apart(
    make_readings, distinct, is_logarithmic
):
    curves = {"twonn_distinct/mean": [distinct] * 9}
    panel = collect.dimension_panel(make_readings(curves=curves, error=40.0, without=["gride"]))
    assert panel.is_logarithmic == is_logarithmic
    lowest = min(min(line.low) for line in panel.lines)
    assert lowest == pytest.approx(0.1) if is_logarithmic else lowest < 0  # it has no 0


def test_every_layer_is_a_line_in_its_colour_and_its_heads_are_a_band():
    readings = lopsided()
    layers = collect.layers_panel(readings, "attention_entropy").lines
    assert [line.name for line in layers] == ["1", "2", "3"]
    assert len({line.colour for line in layers}) == 3
    panel = collect.cosines_panel(readings)
    assert panel.bands == "quartiles over the heads of a layer"
    *bands, mean = panel.lines
    assert [band.colour for band in bands] == [line.colour for line in layers]
    for layer, (line, band) in enumerate(zip(layers, bands, strict=True), start=1):
        tag = f"attention_entropy/layer_{layer:02d}"
        assert list(line.y) == [reading.values[tag] for reading in readings]
        heads = [
            [reading.values[f"qk_cosine/layer_{layer:02d}/head_{head}"] for head in range(5)]
            for reading in readings
        ]
        for found, share in ((band.low, 25), (band.y, 50), (band.high, 75)):
            assert list(found) == pytest.approx(np.percentile(heads, share, axis=1))
    assert list(mean.y) == mean_abs_over_heads(readings, "qk_cosine").values
    assert mean.width > bands[0].width


def test_of_many_layers_some_have_their_heads_drawn_and_heads_without_a_value_are_left_out():
    values = {f"qk_cosine/layer_{n:02d}/head_{h}": 0.1 * h for n in range(1, 14) for h in range(3)}
    values["qk_cosine/layer_13/head_2"] = math.nan
    lost = values | {f"qk_cosine/layer_07/head_{h}": math.nan for h in range(3)}
    *bands, _ = collect.cosines_panel(Readings([], [reading_of(values), reading_of(lost, 1)])).lines
    assert [band.y[0] for band in bands] == pytest.approx([0.1] * 4 + [0.05])
    assert [math.isnan(band.y[1]) for band in bands] == [False, False, True, False, False]


def test_the_axis_of_layers_begins_at_0_and_has_room_for_uniform_attention(make_readings):
    panel = collect.layers_panel(make_readings(), "attention_entropy")
    assert panel.ends == pytest.approx((0, 1.08 * 3.0))
    nothing = single("attention_entropy", [0.0, 0.0])
    assert collect.layers_panel(nothing, "attention_entropy").ends == (0, 1)
    high = with_all(make_readings(), {"attention_entropy/null": 4.0})
    assert collect.layers_panel(high, "attention_entropy").ends == pytest.approx((0, 1.08 * 4.0))


def test_alerts_are_at_their_steps_and_a_kind_is_named_once(make_readings):
    kinds = [(130, "rank_collapse"), (256, "rank_collapse"), (512, "rank_collapse")]
    kinds.append((512, "logit_growth"))
    found = [(130, "rank collapse"), (256, ""), (512, "logit growth")]
    readings = alerted(make_readings(), kinds)
    assert collect.alerts_of(readings) == found
    assert collect.dimension_panel(readings).alerts == found


@pytest.mark.parametrize("on_probe", [False, True])
def test_the_loss_is_that_which_reaches_furthest(make_readings, on_probe):
    losses = {"training/loss": [3.0] * 8 + [math.nan]}  # no batch comes after the last update
    losses |= {"training/probe_loss": [4.0] * 9} if on_probe else {}
    name, curve = collect.furthest_loss(make_readings(curves=losses))
    assert (name, len(curve)) == (
        ("loss on the probe", 9) if on_probe else ("training loss", 8)
    )  # fmt: skip
    first = make_readings((0,), curves={"training/probe_loss": [4.0]})
    assert collect.furthest_loss(first)[0] == "loss on the probe"


# -- over depth ------------------------------------------------------------------------------------


def test_a_profile_has_a_line_for_each_step_and_the_last_has_its_intervals():
    readings = lopsided()
    panel = collect.depth_panel(readings, "anisotropy")
    assert [(line.name, list(line.x)) for line in panel.lines] == [
        (step, [0, 1, 2, 3]) for step in ("0", "4", "32")
    ]
    values = [readings[-1].values[f"anisotropy/layer_{layer:02d}"] for layer in range(4)]
    assert panel.lines[-1].y == values
    assert panel.lines[-1].high == pytest.approx(
        [v + 0.006 + 0.001 * n for n, v in enumerate(values)]
    )
    assert panel.lines[-1].low == pytest.approx(
        [v - 0.006 - 0.001 * n for n, v in enumerate(values)]
    )
    assert not any(len(line.low) for line in panel.lines[:-1])


@pytest.mark.parametrize(
    ("profile", "is_left_out"),
    [
        ([30.0, 2, math.inf, 3], True),
        ([30.0, 2, 4, 3], True),
        ([2.5, 2, 4, 3], False),
        ([0.5, -0.02, 0.05, 0.01], True),
        ([0.1, -0.02, 0.05, 0.01], False),
        ([0.4, 0.0, 0.0], False),  # stays beside blocks that are all 0
    ],
)
def test_layer_0_is_left_out_where_it_would_flatten_the_blocks(profile, is_left_out):
    readings = single("twonn", profile)
    (line,) = collect.depth_panel(readings, "twonn").lines
    matrix = collect.map_panel(readings, "twonn")
    assert list(line.x) == list(matrix.layers) == [*range(len(profile))][is_left_out:]
    np.testing.assert_array_equal(
        line.y, [x if math.isfinite(x) else math.nan for x in profile][is_left_out:]
    )
    remark = f"layer 0, far above: {profile[0]:.3g}" if is_left_out else ""
    assert matrix.remark == collect.depth_panel(readings, "twonn").remark == remark


def test_the_dimension_by_scale_is_a_line_for_each_step(make_readings):
    panel = collect.scales_panel(make_readings((0, 16)))
    assert (panel.over, panel.named_by) == ("scale", "step")
    assert [(line.name, line.x, line.y) for line in panel.lines] == [
        ("0", [1, 32], [2.6, 14.6]), ("16", [1, 32], [2.9, 10.0]),
    ]  # fmt: skip
    one_scale = Readings([], [reading_of({"gride/mean/k32": 6.0})])
    assert collect.scales_panel(one_scale).lines == []


def test_a_map_has_a_column_for_each_step_and_its_scale_from_the_blocks(make_readings):
    curves = {f"twonn/layer_{layer:02d}": [5.0] * 9 for layer in range(3)}
    curves |= {"twonn/layer_00": [40.0] * 9, "twonn/layer_02": [5.0] * 8 + [8.0]}
    matrix = collect.map_panel(make_readings(curves=curves, layers=2), "twonn")
    assert matrix.values.shape == (2, 9)
    assert matrix.values[:, -1].tolist() == [5.0, 8.0]
    assert (matrix.low, matrix.high, matrix.is_signed) == (0.0, 8.0, False)
    positive = collect.map_panel(single("cosine", [0.25, 0.0, 0.25, 0.5]), "cosine")
    assert (positive.low, positive.high, positive.is_logarithmic) == (0, 0.5, False)
    nothing = collect.map_panel(single("drift", [0.0, 0.0]), "drift")
    assert nothing.low == 0 < nothing.high
    both = collect.map_panel(single("drift", [0.25, -0.5, 0.25]), "drift")
    assert (both.low, both.high, both.is_signed) == (-0.5, 0.5, True)
    known = collect.map_panel(
        single("attention_entropy_normalised", [0.1, 0.4]), "attention_entropy_normalised"
    )
    assert (known.low, known.high) == (0, 1)
    wide = collect.map_panel(single("norm", [0.25, 4.0, 2.0]), "norm")
    assert (wide.low, wide.high, wide.is_logarithmic) == (0.25, 4.0, True)
    assert not collect.map_panel(single("norm", [0.25, 3.0, 2.0]), "norm").is_logarithmic
    assert collect.map_panel(Readings([], [reading_of({}, 0, "inline")]), "twonn") is None


def test_heads_stand_by_layer_and_head_on_one_scale(make_readings):
    values = {
        f"q/layer_{layer:02d}/head_{head}": 10.0 * (layer - 1) + head
        for layer in (1, 2)
        for head in range(3)
    }
    readings = Readings(
        [], [reading_of(values), reading_of({**values, "q/layer_02/head_2": 30.0}, 1)]
    )
    assert collect.head_panels(readings, "other") == {}
    first, last = collect.head_panels(readings, "q", 2).values()
    assert first.values.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert (list(first.layers), list(first.columns)) == ([1, 2], [0, 1, 2])
    assert (first.low, first.high) == (last.low, last.high) == (0, 30)
    run = make_readings()
    (cosines,) = collect.head_panels(run, "qk_cosine").values()
    assert (cosines.low, cosines.high) == (-1, 1)
    (entropy,) = collect.head_panels(run, "attention_entropy").values()
    assert (entropy.low, entropy.high) == pytest.approx((2.0, 3.0))
    bounded = with_all(run, {"attention_entropy/null": 4.0})
    (entropy,) = collect.head_panels(bounded, "attention_entropy").values()
    assert (entropy.low, entropy.high) == (0.0, 4.0)


# -- axes and choices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("null", "drawn"), [(0.5, 0.5), (8.2, 8.2), (12.0, None), (-1.0, None), (math.nan, 5.5)]
)
def test_the_last_null_is_drawn_where_it_lies_within_the_panel(null, drawn):
    first, *others = with_all(lopsided(), {"twonn/null": null})
    first = with_values(first, first.values | {"twonn/null": 5.5})
    panel = collect.dimension_panel(Readings(lopsided().runs, [first, *others]))
    assert panel.null_inside == (drawn and (drawn, f"Gaussian noise: {drawn:.2g}"))


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ((0, 1, 32), [0, 1, 10, 32]),
        ((0, 4, 32), [0, 4, 10, 32]),
        ((0, 16, 724), [0, 16, 100, 724]),
        ((0, 80, 1500), [0, 80, 1500]),  # the names of 80 and 100, 1,000 and 1,500 would touch
        ((0, 300, 310), [0, 310]),
        ((500, 700, 900), [500, 900]),
        ((50, 700, 2000), [50, 100, 1000, 2000]),
        ((0, 1, 7_000_000), [0, 10, 1000, 100_000, 7_000_000]),
    ],
)
def test_the_axis_of_steps_names_its_ends_and_powers_of_ten_with_step_0_to_the_left(steps, ticks):
    axis = StepAxis(steps)
    assert axis.ticks() == ticks
    places = axis.places(steps)
    assert places[1:] == list(steps[1:])
    assert places[0] == (steps[0] or pytest.approx(steps[1] / 2.8, rel=0.02))
    edges = axis.edges()
    assert all(low < at < high for low, at, high in zip(edges, places, edges[1:], strict=False))


def test_columns_meet_halfway_between_their_steps():
    assert StepAxis([1, 100]).edges() == pytest.approx([0.1, 10, 1000])
    assert StepAxis([6]).edges() == pytest.approx([4, 9])
    assert StepAxis([0]).ticks() == [0]


def test_looks_differ_as_long_as_they_can():
    looks = [look_of(number) for number in range(29)]
    assert len(set(looks)) == 28
    assert looks[0] == looks[28] == (BLUE, "solid")


def test_what_is_chosen_has_the_first_and_the_last():
    assert spread_steps([32, 0, 1, 2, 16, 4, 8], 3) == [0, 4, 32]
    assert spread_items(range(10), 3) == [0, 4, 9]
    assert spread_items([3, 5], 7) == [3, 5]
    assert spread_steps([0, 1, 2, 3, 4, 5, 100], 7) == [0, 1, 2, 3, 4, 5, 100]
    short = Curve([*range(400)], [0.0] * 400, [0.0] * 400)
    assert thin(short) == short
    curve = Curve(
        [*range(3000)], [math.sin(n / 300) + 9 * (n == 1717) for n in range(3000)], [0.0] * 3000
    )
    found = thin(curve)
    assert len(found) <= 402
    assert {0, 1, 2, 4, 1717, 2999} <= set(found.steps)  # what happens early is shown too
    assert all(
        curve.values[step] == value for step, value in zip(found.steps, found.values, strict=True)
    )


def test_bands_are_known_by_their_lines():
    assert Lines("a", [Line("", [0], [1.0], "#000000", [0.5], [1.5])]).has_bands
    assert not Lines("a", [Line("", [0], [1.0], "#000000")]).has_bands
