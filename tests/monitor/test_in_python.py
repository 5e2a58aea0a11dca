"""People type and see names in place of functions, `with Monitor(...)`, one-line reprs."""

import platform

import msgspec
import pytest
import torch

from geomon import METRICS, Memory, Monitor, __version__, every, read
from geomon.analysis import find_phase
from geomon.metrics import searched_by
from support.models import PlainDecoder, batch


def test_metrics_by_name_and_a_schedule_by_number(tmp_path):
    model, options = PlainDecoder(), {"metrics": ["cosine", "anisotropy"], "tokens": 64}
    with Monitor(model, schedule=2, directory=tmp_path, **options) as monitor:
        assert monitor.latest is None
        assert "nothing read yet" in repr(monitor)
        for step in range(5):
            with monitor(step):
                model(batch())
        shown, page = repr(monitor), monitor._repr_html_()
    assert shown == (
        f"Monitor(PlainDecoder, 3 blocks, 2 metrics, schedule=every(steps=2), "
        f"record={str(tmp_path / 'readings.jsonl')!r}, last step 4)"
    )
    assert "3 readings, steps 0 to 4" in page
    recorded = read(tmp_path)
    assert [reading.step for reading in recorded] == [0, 2, 4]
    assert recorded[-1].values == monitor.latest.values
    run = recorded.runs[0]
    assert (list(run["metrics"]), run["schedule"]) == (options["metrics"], "every(steps=2)")


def test_a_run_is_described_by_all_that_its_values_hang_on(tmp_path):
    model, largest = PlainDecoder(), 2**63 - 1  # larger numbers are no numbers to JSON readers
    settings = {"rate": 0.5, "flag": True, "kind": None, "at": {"low": -largest, "b": {"c": 3}}}
    settings |= {"large": largest + 1, "small": -largest - 1, "long": "x" * 201}
    options = {"tokens": 300, "splits": 2, "queries": 77, "seed": 5, "device": "cpu"}
    options |= {"metrics": ["twonn", "qk_cosine"], "schedule": every(7), "settings": settings}
    with Monitor(model, directory=tmp_path, **options, probe=len) as monitor:
        found = monitor.describe()
        monitor.probe(3, batch(2, 4))
    assert found == {
        "geomon": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "model": "PlainDecoder", "parameters": sum(w.numel() for w in model.parameters()),
        "layers": ["blocks.0", "blocks.1", "blocks.2"],
        "metrics": {name: msgspec.to_builtins(METRICS[name].text) for name in options["metrics"]},
        "schedule": "every(steps=7)", "probe": "a function", "tokens": 300, "splits": 2,
        "queries": 77, "seed": 5, "world_size": 1, "gather": False, "mesh": "1 rank",
        "device": "cpu", "search": searched_by(torch.device("cpu")),
        "training/rate": 0.5, "training/flag": True, "training/kind": "None",
        "training/at/low": -largest, "training/at/b/c": 3, "training/large": str(2**63),
        "training/small": str(-(2**63)), "training/long": "x" * 200,
    }  # fmt: skip
    (run,) = read(tmp_path).runs
    assert run == found | {"from_step": 3, "time": run["time"]}


def test_the_monitor_is_closed_whatever_ends_the_with():
    closed = []

    class Sink(Memory):
        def close(self):
            closed.append(self)

    sinks = [Sink(), Sink()]
    options = {"metrics": ["cosine"], "directory": None, "sinks": sinks, "schedule": lambda _: True}
    with pytest.raises(RuntimeError, match="mine"):  # noqa: SIM117
        with Monitor(PlainDecoder(), **options) as monitor:
            raise RuntimeError("mine")
    assert closed == sinks[::-1]  # what draws into a logger comes after it
    assert (monitor.path, "no record, nothing read yet" in repr(monitor)) == (None, True)
    page = monitor._repr_html_()
    assert page.startswith("<p>Monitor(PlainDecoder, 3 blocks, 1 metric, schedule=&lt;functi")
    assert "Readings(none yet)" in page


def test_a_phase_is_words_in_a_notebook():
    shown = find_phase([0, 8, 16], [2.0, 7.4, 5.2], [0.1] * 3)._repr_html_()
    assert shown == (
        "<p><b>compressing, -2.2 ± 0.2 since step 8</b>; start 2.0 ± 0.1 at step 0; "
        "peak 7.4 ± 0.1 at step 8</p>"
    )
