from dataclasses import replace

import threadpoolctl
import torch
from measuring import evaluate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture.snapshot import Layer, PassInfo, Snapshot
from geomon.distributed import RankGroup
from geomon.metrics import Evaluator, check_metrics, select
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.jobs import ReadingJob
from geomon.note import Note

aten = torch.ops.aten
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
    return Snapshot(layers, PassInfo(rows, "eval", "float32", [Note("kind", "seen")]))


def make_job(metrics=METRICS, rows=500, splits=2, of=None):
    job = ReadingJob(
        7, "probe", RankGroup(), Evaluator(check_metrics(metrics), splits, strict=True),
        rows=rows, place=MeasuringDevice("cpu", nn.Identity()),
    )  # fmt: skip
    job.begin([of or snapshot()], 0.5)
    return job


def measured(job):
    job.measure(1)
    return job.result()


def values_of(reading):
    return {tag: value for tag, value in reading.values.items() if tag != "geomon/seconds"}


def test_layer_by_layer_gives_what_all_at_once_gives():
    job = make_job()
    job.measure_next()
    assert job.left == 3
    reading = measured(job)
    whole = evaluate(snapshot(), METRICS, rows=500, splits=2, strict=True)
    assert values_of(reading) == whole.values
    assert reading.notes == (Note("kind", "seen"), *whole.notes)
    assert (reading.step, reading.source, reading.mode) == (7, "probe", "eval")
    assert (reading.tokens, reading.dtype, reading.world_size) == (1000, "float32", 1)
    assert reading.seconds == reading.values["geomon/seconds"] == job.seconds > 0.5


def test_copies_that_are_on_their_way_to_the_host_are_waited_for(monkeypatch):
    """From CUDA they are queued: until then the rows are those of another reading, or none."""
    arriving = snapshot()
    rows = [layer.captured["hidden"] for layer in arriving.layers]
    arrived = [each.clone() for each in rows]
    for each in rows:
        each.zero_()

    class Event:
        def synchronize(self):
            for each, copy in zip(rows, arrived, strict=True):
                each.copy_(copy)

    monkeypatch.setattr(MeasuringDevice, "mark_ready", lambda self: Event())
    found = values_of(measured(make_job(of=arriving)))
    monkeypatch.undo()
    assert found == values_of(measured(make_job()))


def test_few_rows_are_noted():
    reading = measured(make_job(of=snapshot(200)))
    assert reading.tokens == 200
    assert "only 200 rows here (tokens=500 asked for more)" in reading.words()[-1]
    assert not any("estimates" in note for note in measured(make_job(of=snapshot(500))).words())
    seen = snapshot(200)  # of no hidden states: attention alone was seen, say
    unknown = replace(seen, info=replace(seen.info, tokens=0))
    assert not any("estimates" in note for note in measured(make_job(of=unknown)).words())


class Rounded(TorchDispatchMode):
    """A mode that rounds products, as a training in few bits does, and counts operations."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        out = func(*args, **(kwargs or {}))
        return out.round() if func.overloadpacket in (aten.mm, aten.bmm) else out


def test_rows_are_measured_outside_of_the_modes_of_the_training():
    metrics = select("cosine", "variance", "twonn", "anisotropy")
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        plain, job = make_job(metrics), make_job(metrics)
        expected = values_of(measured(plain))
        with Rounded() as mode:
            job.measure()
        assert mode.seen == 0
        assert values_of(measured(job)) == expected
