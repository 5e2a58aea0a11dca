import pytest
import torch

from geomon.capture.snapshot import Layer, Snapshot
from geomon.metrics.cautions import Note
from geomon.monitor.jobs import UnderWay
from geomon.monitor.together import measure_alone

METRICS = {
    "mean": lambda hidden: hidden.mean(),
    "rows": lambda hidden: float(len(hidden)),
    "spread": lambda spectrum: spectrum.sum(),
}


def snapshot(rows=1200):
    generator = torch.Generator().manual_seed(0)
    layers = [
        Layer(i, f"layer {i}", {"hidden": torch.randn(rows, 4, generator=generator)})
        for i in range(4)
    ]
    return Snapshot(layers, rows, "eval", "float32", [Note("kind", "seen")])


def under_way(rows=500, batches=2):
    return UnderWay(
        7, "probe", snapshot(), METRICS, rows=rows, batches=batches, strict=True, seconds=0.5
    )


def test_layer_by_layer_gives_what_all_at_once_gives():
    reading = under_way()
    while not reading.complete:
        assert reading.measure_next() > 0
    whole = measure_alone(snapshot(), METRICS, rows=500, batches=2, strict=True)
    assert reading.found().values == whole.values
    assert reading.found().notes == whole.notes
    assert (reading.step, reading.source, reading.layers) == (7, "probe", 4)
    assert reading.seconds > 0.5


def test_thinned_rows_are_fewer_in_every_layer_and_said():
    reading = under_way()
    reading.thin(300)
    while not reading.complete:
        reading.measure_next()
    found = reading.found()
    assert {v for tag, v in found.values.items() if tag.startswith("rows/layer")} <= {300, 0}
    assert found.tokens == 600
    assert found.notes[-1].text == "300 rows in a batch instead of 500, to stay within the budget"


def test_more_rows_than_were_asked_for_are_not_taken():
    reading = under_way()
    reading.thin(4096)
    assert reading.rows == 500


def test_rows_do_not_change_once_a_layer_stands_on_them():
    reading = under_way()
    reading.measure_next()
    with pytest.raises(ValueError, match="1 layers stand on 500 rows already"):
        reading.thin(300)


def test_a_trial_costs_time_and_changes_nothing():
    reading, other = under_way(), under_way()
    rows, seconds = reading.try_out()
    assert rows == 256
    assert seconds > 0
    assert reading.seconds > 0.5 + seconds
    while not reading.complete:
        reading.measure_next()
        other.measure_next()
    assert reading.found() == other.found()
