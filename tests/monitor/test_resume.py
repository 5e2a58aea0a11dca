"""A training that is cut and goes on; that of the Trainer is in test_huggingface.py."""

import time

import loops
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import Learner, in_lightning
from models import PlainDecoder, batch

from geomon import Monitor, every, read, select
from geomon.lightning import GeometryMonitor

FEW = {"metrics": select("variance", "qk_cosine"), "tokens": 64, "strict": True}


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_with_two_optimizers_a_run_goes_on_at_the_batch_after_the_cut(tmp_path):
    """The checkpoint is of step 10, the batch before it began at 8; step 9 was in between."""
    for steps, resume in ((5, None), (7, tmp_path / "step=10.ckpt")):
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
        in_lightning(
            Learner(), {**FEW, "schedule": every(9)}, tmp_path, kind="two", steps=steps,
            callbacks=[keep], resume=resume,
        )  # fmt: skip
    assert [r.step for r in read(tmp_path)] == [0, 8, 12]


@pytest.mark.parametrize("probe", [None, batch(8, 32, seed=77)], ids=["inline", "probe"])
def test_after_a_cut_the_values_are_those_of_a_run_without_one(tmp_path, monkeypatch, probe):
    """Without dropout, on one batch again and again: nothing of the cut is left in the weights."""
    monkeypatch.setattr(loops, "ROWS", batch(8, 32, seed=0).repeat(24, 1))

    def run(folder, steps, resume=None):
        """Two monitors, that differ in their folders alone."""
        monitors = [
            GeometryMonitor(probe=probe, schedule=every(3), directory=folder / name, **FEW)
            for name in "ab"
        ]
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=7, save_top_k=-1)
        torch.manual_seed(0)
        learner = Learner(PlainDecoder())
        in_lightning(learner, None, folder, steps=steps, callbacks=[*monitors, keep], resume=resume)
        return learner

    whole = run(tmp_path / "whole", 13)
    run(tmp_path / "cut", 8)
    checkpoint = tmp_path / "cut" / "step=7.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    assert not any("Geometry" in key for key in saved["callbacks"])
    last = read(tmp_path / "cut" / "b").readings[2]
    assert saved["geomon"]["geomon/variance"] == last.values["variance/mean"]
    resumed = run(tmp_path / "cut", 13, resume=checkpoint)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    for name in "ab":
        expected, found = read(tmp_path / "whole" / name), read(tmp_path / "cut" / name)
        assert len(found.runs) == 2
        # The first run read its end, which the second one has not reached: it went back behind it.
        last, first_end = (13, 8) if probe is not None else (12, 7)
        assert [reading.step for reading in found] == sorted({0, 3, 6, 9, 12, last})
        assert [reading.step for reading in found.abandoned] == [first_end]
        assert found.runs[-1]["rewound_to"] == 7
        found = {reading.step: reading for reading in found}
        for reading in expected:
            for tag, value in reading.values.items():
                if not tag.startswith("geomon/"):
                    same = pytest.approx(value, rel=0, abs=0, nan_ok=True)  # the end has no loss
                    assert found[reading.step].values[tag] == same, (reading.step, tag)
        moved = [reading.values["variance/mean"] for reading in expected]
        assert len(set(moved)) == len(moved)  # a curve that stands still would prove nothing


@pytest.mark.parametrize("loop", ["lightning", "plain"])
def test_after_a_rewind_the_record_is_that_of_the_training_that_goes_on(tmp_path, loop):
    options = {**FEW, "schedule": every(2)}
    for resumes, rate in ((False, 1e-3), (True, 0.1)):
        began = time.time()
        if loop == "lightning":
            learner = Learner()
            learner.optimizers = lambda kind, own=learner, rate=rate: [
                torch.optim.SGD(own.parameters(), rate)
            ]
            keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
            in_lightning(
                learner, options, tmp_path, steps=9, callbacks=[keep],
                resume=tmp_path / "step=4.ckpt" if resumes else None,
            )  # fmt: skip
            continue
        model = PlainDecoder()
        with Monitor(model, directory=tmp_path, **options) as monitor:
            for step in range(4 if resumes else 0, 9):
                with monitor(step):
                    model(batch(seed=step))
                with torch.no_grad():
                    model.head.weight.mul_(1 + rate)
                    model.blocks[0].c_attn.weight.mul_(1 + rate)
    record = read(tmp_path)
    assert [reading.step for reading in record] == [0, 2, 4, 6, 8]
    assert [reading.time > began for reading in record] == [False, False, True, True, True]
    assert [reading.step for reading in record.abandoned] == [4, 6, 8]
    assert record.runs[-1]["rewound_to"] == 4
    assert record.mixed_at is None
