import math
from dataclasses import replace

import pytest

from geomon.analysis import curve_of, mean_abs_over_heads, single_source
from geomon.record import Readings


def test_curves_keep_to_the_commoner_source(make_readings):
    probe, inline = make_readings(), make_readings((7, 1500), source="inline")
    kept = single_source([*inline, *probe])
    assert [reading.step for reading in kept] == [reading.step for reading in probe]
    assert {reading.source for reading in kept} == {"probe"}
    assert single_source([]) == []


def test_a_curve_has_the_errors_of_its_std(make_readings):
    readings = make_readings(error=0.3)
    curve = curve_of(readings, "twonn/mean")
    assert (curve.steps, curve.errors) == ([r.step for r in readings], [0.3] * 9)
    assert curve_of(readings, "gride/mean/k32").errors == [0.0] * 9
    missing = [replace(r, values={"twonn/mean": math.nan}) for r in readings]
    assert len(curve_of(missing, "twonn/mean")) == 0


def test_cosines_of_both_signs_do_not_cancel(make_readings):
    readings = make_readings()
    assert mean_abs_over_heads(readings, "qk_cosine").values[0] == pytest.approx(0.1)
    assert len(mean_abs_over_heads(Readings([], []), "qk_cosine")) == 0
