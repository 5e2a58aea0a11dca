import math

import pytest

from geomon.analysis import Curve, curve_of, single_source
from geomon.analysis.phase import Point
from support.readings import reading_of, with_values


def test_curves_keep_to_the_commoner_source_or_to_that_of_the_last_reading(make_readings):
    probe, inline = make_readings(), make_readings((7, 1500), source="inline")
    assert single_source([*inline, *probe]) == probe.readings
    assert single_source([]) == []
    probe, inline = probe.readings[:3], make_readings((4, 16, 64), source="inline").readings
    assert single_source([*probe, *inline]) == inline
    assert single_source([*inline, *probe]) == probe


def test_a_curve_has_margins_and_a_phase_and_leaves_out_what_is_missing(make_readings):
    readings = make_readings(error=0.3)
    curve = curve_of(readings, "twonn")
    assert curve.steps == [r.step for r in readings]
    assert curve.margins == pytest.approx([0.3] * 9)
    assert curve_of(readings, "gride", part="k32").margins == [0.0] * 9
    missing = [with_values(r, {"twonn/mean": math.nan}) for r in readings]
    assert len(curve_of(missing, "twonn")) == 0
    curve = Curve([Point(0, 10.0, 0.5), Point(1, 10.5, 0.5), Point(2, 12.0, 0.5)])
    assert (len(curve), curve.phase().peak.step) == (3, 2)


def test_the_last_of_several_readings_of_a_step_counts_and_steps_ascend(make_readings):
    first = make_readings((0, 8), curves={"twonn/mean": [1.0, 2.0]})
    again = make_readings((8, 4), curves={"twonn/mean": [3.0, 4.0]})
    curve = curve_of([*first, *again], "twonn")
    assert (curve.steps, curve.values) == ([0, 4, 8], [1.0, 4.0, 3.0])


def test_a_value_is_that_of_the_main_stack():
    values = {"twonn/encoder_layer_01": 1.0, "twonn/decoder_layer_01": 2.0}
    values |= {"twonn/encoder_mean": 3.0, "twonn/decoder_mean": 4.0, "twonn/decoder_mean/margin": 1}
    curve = curve_of([reading_of(values)], "twonn")
    assert (curve.values, curve.margins) == ([4.0], [1.0])
