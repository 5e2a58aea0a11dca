import math

import pytest
from tagged import reading_of, with_values

from geomon.analysis import Curve, curve_of, single_source
from geomon.analysis.curves import mean_abs_over_heads, measured


def test_curves_keep_to_the_commoner_source(make_readings):
    probe, inline = make_readings(), make_readings((7, 1500), source="inline")
    kept = single_source([*inline, *probe])
    assert [reading.step for reading in kept] == [reading.step for reading in probe]
    assert {reading.source for reading in kept} == {"probe"}
    assert single_source([]) == []


def test_a_curve_has_the_margins_of_its_intervals(make_readings):
    readings = make_readings(error=0.3)
    curve = curve_of(readings, "twonn")
    assert curve.steps == [r.step for r in readings]
    assert curve.margins == pytest.approx([0.3] * 9)
    assert curve_of(readings, "gride", part="k32").margins == [0.0] * 9
    missing = [with_values(r, {"twonn/mean": math.nan}) for r in readings]
    assert len(curve_of(missing, "twonn")) == 0


def test_of_two_equally_common_sources_the_last_reading_decides(make_readings):
    probe = make_readings((0, 8, 32), source="probe")
    inline = make_readings((4, 16, 64), source="inline")
    for one, other in ((probe, inline), (inline, probe)):
        kept = single_source([*one, *other])
        assert [reading.step for reading in kept] == [reading.step for reading in other]


def test_of_several_readings_of_a_step_the_last_counts_and_steps_ascend(make_readings):
    first = make_readings((0, 8), curves={"twonn/mean": [1.0, 2.0]})
    again = make_readings((8, 4), curves={"twonn/mean": [3.0, 4.0]})
    curve = curve_of([*first, *again], "twonn")
    assert (curve.steps, curve.values) == ([0, 4, 8], [1.0, 4.0, 3.0])


def test_a_curve_has_a_phase():
    curve = Curve([0, 1, 2], [10.0, 10.5, 12.0], [0.5, 0.5, 0.5])
    assert (len(curve), curve.phase().peak.step) == (3, 2)


def test_the_mean_size_is_over_heads_alone_and_at_every_step(make_readings):
    """Lopsided: one head far from the others, a layer's own value and another metric beside."""
    values = {
        "qk_cosine/layer_01/head_0": 0.9, "qk_cosine/layer_01/head_1": -0.1,
        "qk_cosine/layer_02/head_0": -0.2, "qk_cosine/layer_02/head_1": math.nan,
        "qk_cosine/layer_01": 100.0, "qk_cosine/mean": 100.0, "qk_cosine/layer_01/std": 100.0,
        "qk_cosine_other/layer_01/head_0": 100.0,
    }  # fmt: skip
    start, later = make_readings((0, 8))
    readings = [with_values(start, {}), with_values(later, values)]
    curve = mean_abs_over_heads(readings, "qk_cosine")
    assert (curve.steps, curve.margins) == ([8], [0.0])
    assert curve.values == [pytest.approx(1.2 / 3)]


def test_a_value_is_that_of_the_main_stack():
    values = {"twonn/encoder_layer_01": 1.0, "twonn/decoder_layer_01": 2.0}
    values |= {"twonn/encoder_mean": 3.0, "twonn/decoder_mean": 4.0, "twonn/decoder_mean/margin": 1}
    assert measured(reading_of(values), "twonn") == (4.0, 1.0)
    assert math.isnan(measured(reading_of({}), "twonn").value)
