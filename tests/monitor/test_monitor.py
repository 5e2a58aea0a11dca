import copy
import errno
import json
import logging
import math
import pickle
import time
from pathlib import Path

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn

import geomon
from geomon import METRICS, Memory, Monitor, every, measure, read, select
from geomon.distributed import RankGroup


def monitor(model, tmp_path=None, **kwargs):
    defaults = {"tokens": 64, "batches": 2, "metrics": select("variance"), "strict": True}
    return Monitor(model, directory=tmp_path, **(defaults | kwargs))


def train(model, seen, steps=10, start=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(start, start + steps):
        with seen(step):
            loss = model(batch(seed=step)).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_readings_come_at_scheduled_steps_and_once(tmp_path):
    memory = Memory()
    model = PlainDecoder()
    seen = monitor(model, tmp_path, schedule=every(4), sinks=[memory])
    train(model, seen)
    with seen(8):
        model(batch())
    with seen(9, force=True):
        model(batch())
    seen.close()
    seen.close()
    assert [r.step for r in memory.readings] == [0, 4, 8, 9]
    assert [r.step for r in read(tmp_path)] == [0, 4, 8, 9]
    assert dict(read(tmp_path)[1].values) == dict(memory.readings[1].values)


def test_step_zero_is_read_whatever_the_schedule_says(tmp_path):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, schedule=lambda step: step == 3)
    train(model, seen, steps=5)
    assert [r.step for r in read(tmp_path)] == [0, 3]


def test_a_reading_says_what_it_stands_on(tmp_path):
    model = PlainDecoder().train()
    seen = monitor(model, tmp_path, metrics=METRICS)
    with seen(0):
        model(batch())
    seen.probe(1, batch())
    inline, probe = read(tmp_path)
    assert (inline.source, inline.mode, inline.tokens) == ("inline", "train", 128)
    assert (probe.source, probe.mode, probe.dtype) == ("probe", "eval", "float32")
    assert probe.values["geomon/seconds"] == probe.seconds > 0
    assert 0 < probe.values["geomon/overhead"] <= 1
    assert "geomon/overhead" not in inline.values  # no training time has passed before the first
    run = read(tmp_path).runs[0]
    assert run["layers"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert run["metrics"] == list(METRICS)


def test_every_metric_has_a_value_at_every_layer():
    values = measure(PlainDecoder(), batch(64, 32), metrics=METRICS, tokens=1024)
    for name in METRICS:
        part = "/k1" if name == "gride" else ""
        layers = range(4) if f"{name}/layer_00{part}" in values else range(1, 4)
        for layer in layers:
            assert math.isfinite(values[f"{name}/layer_{layer:02d}{part}"]), name
        deep = [values[f"{name}/layer_{layer:02d}{part}"] for layer in (1, 2, 3)]
        assert values[f"{name}/mean{part}"] == pytest.approx(sum(deep) / 3)
    assert "anisotropy/layer_00" in values
    assert "qk_cosine/layer_00" not in values
    assert values["twonn/mean/std"] > 0


def test_probe_inputs_replace_the_training_forward(tmp_path):
    model = PlainDecoder(dropout=0.5).train()
    seen = monitor(model, tmp_path, probe=batch(seed=99), schedule=every(2))
    train(model, seen, steps=3)
    assert [(r.step, r.source, r.mode) for r in read(tmp_path)] == [
        (0, "probe", "eval"),
        (2, "probe", "eval"),
    ]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "inputs",
    [
        batch(),
        (batch(),),
        {"ids": batch()},
        lambda model: model(batch()),
    ],
    ids=["tensor", "tuple", "dict", "function"],
)
def test_probe_inputs_may_be_anything_that_a_model_takes(inputs):
    expected = measure(PlainDecoder(), batch(), metrics=select("variance"))
    torch.manual_seed(0)
    model = PlainDecoder()
    first = measure(model, inputs, metrics=select("variance"))
    assert first == measure(model, batch(), metrics=select("variance"))
    assert first.keys() == expected.keys()


def test_probe_restores_flags_and_random_state():
    model = PlainDecoder(dropout=0.5).train()
    model.blocks[1].eval()  # frozen by its owner
    flags = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    monitor(model).probe(0, lambda m: (m(batch()), torch.rand(3)))
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), state)


def test_probe_is_the_same_twice_and_leaves_no_gradients():
    model = PlainDecoder(dropout=0.5).train()
    values = [measure(model, batch(), metrics=METRICS, tokens=64) for _ in range(2)]
    assert values[0] == pytest.approx(values[1], nan_ok=True, rel=0, abs=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_metric_of_ones_own():
    def peak_norm(hidden):
        norms = hidden.norm(dim=-1)
        return norms.max() / norms.mean()

    def per_head(query, key):
        return query.mean(dim=(0, 2, 3))

    metrics = {"peak_norm": peak_norm, "per_head": per_head}
    values = measure(PlainDecoder(), batch(), metrics=metrics)
    assert values["peak_norm/mean"] > 1
    assert {"per_head/layer_01/head_3", "per_head/layer_01/min", "per_head/mean"} <= values.keys()


def test_a_failing_metric_never_ends_a_run(tmp_path, caplog):
    calls = []

    def broken(hidden):
        calls.append(1)
        raise ZeroDivisionError("by design")

    model = PlainDecoder()
    seen = monitor(
        model, tmp_path, strict=False, schedule=every(1),
        metrics=select("variance") | {"broken": broken},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=3)
    readings = read(tmp_path)
    assert len(readings) == 3
    assert all(math.isnan(r.values["broken/layer_01"]) for r in readings)
    assert all(math.isfinite(r.values["variance/layer_01"]) for r in readings)
    assert all("by design" in r.notes[-1] for r in readings)
    assert len([m for m in caplog.messages if "by design" in m]) == 1
    with pytest.raises(ZeroDivisionError):
        measure(model, batch(), metrics={"broken": broken})


class Dying:
    """A sink that takes two readings and no more."""

    def __init__(self):
        self.taken = 0

    def write(self, reading):
        self.taken += 1
        if self.taken > 2:
            raise OSError("gone")

    def close(self):
        raise OSError("gone too")


@pytest.mark.parametrize(
    "trouble",
    [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "denied"),
     OSError(errno.EROFS, "Read-only file system"), FileNotFoundError(errno.ENOENT, "no folder")],
    ids=lambda error: type(error).__name__ + str(error.errno),
)  # fmt: skip
def test_a_record_that_cannot_be_written_never_ends_a_run(tmp_path, caplog, monkeypatch, trouble):
    memory = Memory()
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False, sinks=[memory], schedule=every(1))

    def refused(*args, **kwargs):
        raise trouble

    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refused)
            train(model, seen, steps=3, start=2)
        train(model, seen, steps=2, start=5)
    assert len([m for m in caplog.messages if "could not be written" in m]) == 1
    assert [r.step for r in memory.readings] == list(range(7))
    # There is room again: what was shown meanwhile is written first.
    assert [r.step for r in read(tmp_path)] == list(range(7))


def test_a_resume_on_a_full_disk_knows_what_is_recorded(tmp_path, monkeypatch):
    model = PlainDecoder()
    train(model, monitor(model, tmp_path, schedule=every(1)), steps=3)
    resumed = monitor(model, tmp_path, schedule=every(1), strict=False)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(resumed._writer._record, "_append", full)
        train(model, resumed, steps=3, start=1)
    train(model, resumed, steps=1, start=4)
    assert [r.step for r in read(tmp_path)] == [0, 1, 2, 3, 4]
    assert [run["from_step"] for run in read(tmp_path).runs] == [0, 1]


def test_a_dying_sink_is_left_out_and_said_once(tmp_path, caplog):
    memory, dying = Memory(), Dying()
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False, sinks=[dying, memory], schedule=every(1))
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=5)
        seen.close()
        seen.close()
    assert dying.taken == 3
    assert [r.step for r in memory.readings] == [r.step for r in read(tmp_path)] == [*range(5)]
    assert len([m for m in caplog.messages if "Dying" in m]) == 1


def test_a_resume_with_other_metrics_keeps_what_was_read(tmp_path):
    model = PlainDecoder()
    first = monitor(model, tmp_path, schedule=every(1), metrics=select("variance"))
    train(model, first, steps=3)
    before = [r.values for r in read(tmp_path)]
    second = monitor(model, tmp_path, schedule=every(1), metrics=select("cosine", "twonn"))
    train(model, second, steps=3, start=2)
    found = read(tmp_path)
    assert [r.step for r in found] == [0, 1, 2, 3, 4]
    assert [r.values for r in found][:3] == before
    assert all("cosine/layer_01" in r.values for r in list(found)[3:])
    assert all("variance/layer_01" not in r.values for r in list(found)[3:])
    assert [run["metrics"] for run in found.runs] == [["variance"], ["cosine", "twonn"]]


def test_a_forward_that_never_ran_is_said_not_silent(tmp_path, caplog):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, strict=False)
    with caplog.at_level(logging.WARNING, "geomon"), seen(0):
        pass
    assert any("not run under the window" in message for message in caplog.messages)
    assert math.isnan(read(tmp_path)[0].values["variance/layer_01"])


def test_an_exception_in_the_model_is_handed_on_and_nothing_is_read(tmp_path):
    model = PlainDecoder()
    seen = monitor(model, tmp_path, schedule=every(1))
    with pytest.raises(RuntimeError, match="in the model"), seen(0):  # noqa: PT012
        model(batch())
        raise RuntimeError("in the model")
    assert not (tmp_path / "readings.jsonl").read_text().count('"step"') > 0
    with seen(0):
        model(batch())
    assert [r.step for r in read(tmp_path)] == [0]


def test_a_resumed_run_goes_on_and_reads_nothing_twice(tmp_path):
    model = PlainDecoder()
    train(model, monitor(model, tmp_path, schedule=every(2)), steps=7)
    train(model, monitor(model, tmp_path, schedule=every(2)), steps=6, start=5)
    assert [r.step for r in read(tmp_path)] == [0, 2, 4, 6, 8, 10]
    assert len(read(tmp_path).runs) == 2


class Hangs(Memory):
    def write(self, reading):
        super().write(reading)
        if reading.step == 1:
            time.sleep(60)

    def close(self):
        time.sleep(60)


def test_a_sink_that_hangs_is_left_out_and_the_training_goes_on(tmp_path, caplog):
    memory, hanging, last = Memory(), Hangs(), Hangs()
    model = PlainDecoder()
    seen = monitor(
        model, tmp_path, strict=False, sinks=[hanging, memory], schedule=every(1), sink_timeout=0.3
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "geomon"):
        train(model, seen, steps=4)
        seen.close()
        other = monitor(model, None, strict=False, sinks=[last], sink_timeout=0.3)
        other.close()
    assert time.monotonic() - began < 40
    assert [r.step for r in hanging.readings] == [0, 1]
    assert [r.step for r in memory.readings] == [r.step for r in read(tmp_path)] == [0, 1, 2, 3]
    messages = [m for m in caplog.messages if "TimeLimitError" in m]
    assert len(messages) == 2
    assert "Hangs failed and is left out" in messages[0]
    assert "closing Hangs failed" in messages[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_without_gathering_every_rank_runs_the_passes_whatever_the_record_holds(
    tmp_path, monkeypatch, rank
):
    import geomon.monitor.monitor as module

    model = PlainDecoder()
    before = monitor(model, tmp_path)
    for step in (0, 3):
        before.probe(step, batch())
    monkeypatch.setattr(module, "find_ranks", lambda: RankGroup(rank, 2))
    passes = []
    resumed = monitor(model, tmp_path, probe=lambda m: passes.append(m(batch())), gather=False)
    for step in (3, 3, 4, 4):  # as with accumulated batches
        with resumed(step, force=True):
            model(batch())
    assert len(passes) == 2
    assert [r.step for r in read(tmp_path)] == ([0, 3, 4] if rank == 0 else [0, 3])


def test_few_rows_are_said(caplog):
    memory = Memory()
    model = PlainDecoder()
    with caplog.at_level(logging.WARNING, "geomon"):
        monitor(model, None, tokens=4096, sinks=[memory]).probe(0, batch())
    assert any("256 rows, fewer than tokens=4096" in note for note in memory.readings[0].notes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"metrics": {"m": lambda hiden: 0}},
            "asks for 'hiden', which is no view; there",
        ),
        ({"metrics": {"m": lambda: 0}}, "reads no view"),
        ({"metrics": {"a/b": lambda hidden: 0}}, "cannot name a metric"),
        ({"metrics": {}}, "metrics is empty"),
        ({"schedule": lambda step: False}, "fires at none"),
        ({"tokens": 0}, "tokens is a whole number of at least 1"),
        ({"batches": 1.5}, "batches is a whole number"),
    ],
)
def test_bad_arguments_are_refused_when_the_monitor_is_built(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        Monitor(PlainDecoder(), directory=None, **wrong)
    assert "\n" not in str(error.value)


def test_other_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="metrics is a dict"):
        Monitor(PlainDecoder(), metrics=["twonn"], directory=None)
    with pytest.raises(ValueError, match="no metric is called 'twon'; there are anisotropy"):
        select("twon")
    with pytest.raises(ValueError, match="no transformer blocks"):
        Monitor(nn.Linear(3, 3), directory=None)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        Monitor(PlainDecoder(), directory=tmp_path / "file" / "x")
    with pytest.raises(ValueError, match="no inputs to probe"):
        Monitor(PlainDecoder(), directory=None).probe(0)


def test_model_can_be_copied_and_pickled_while_it_is_watched(tmp_path):
    model = transformer("gpt2")
    seen = monitor(model, tmp_path)
    with seen(0):
        model(batch())
    model.eval()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(batch())[0], model(batch())[0])


def test_record_is_plain_json(tmp_path):
    model = PlainDecoder()
    with monitor(model, tmp_path, metrics=METRICS)(0):
        model(batch())
    for line in (tmp_path / "readings.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_version_is_one():
    from importlib.metadata import version

    assert geomon.__version__ == version("geomon")
