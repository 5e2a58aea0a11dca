"""A training that is cut, and copies that are made in the middle of one."""

import copy
import pickle

import pytest
import test_lightning
import torch
from fingerprint import HOOKS
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from models import PlainDecoder, batch
from test_lightning import TwoOptimizers
from test_lightning import fit as fit_lightning

from geomon import every, read, select
from geomon.lightning import GeometryMonitor as OfLightning

FEW = {"metrics": select("variance", "qk_cosine"), "tokens": 64, "strict": True}


@pytest.mark.parametrize("probe", [None, batch(seed=77)], ids=["inline", "probe"])
def test_a_lightning_run_goes_on_with_the_same_curves(tmp_path, probe):
    def monitors(folder):
        """Two of them, that differ in their folders alone."""
        return [
            OfLightning(probe=probe, schedule=every(3), directory=folder / name, **FEW)
            for name in "ab"
        ]

    fit_lightning(tmp_path, monitors(tmp_path / "whole"), steps=12)

    def keep():
        return ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)

    told = {"enable_checkpointing": True}
    fit_lightning(tmp_path, [*monitors(tmp_path / "cut"), keep()], steps=8, **told)
    path = tmp_path / "step=7.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]
    ours = [held for key, held in state.items() if key.startswith("GeometryMonitor")]
    assert ours == [{"seen": 6}] * 2
    again = [*monitors(tmp_path / "cut"), keep()]
    fit_lightning(tmp_path, again, steps=12, resume=path, weights_only=True, **told)
    for name in "ab":
        whole, cut = read(tmp_path / "whole" / name), read(tmp_path / "cut" / name)
        assert len(cut.runs) == 2
        last = 12 if probe is not None else 11
        first_end = 8 if probe is not None else 7
        assert [r.step for r in whole] == [0, 3, 6, 9, last]
        assert [r.step for r in cut] == [0, 3, 6, first_end, 9, last]
        # The dropout after the cut is another: Lightning's checkpoints hold no random state.
        for reading, other in list(zip(whole, cut, strict=False))[:3]:
            assert reading.values["variance/mean"] == other.values["variance/mean"]


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_a_step_that_was_passed_over_at_the_cut_is_read_after_it(tmp_path):
    """Two optimizers: the checkpoint is of step 10, the batch before it began at 8, due was 9."""

    for steps, resume in ((10, None), (14, tmp_path / "step=10.ckpt")):
        monitor = OfLightning(schedule=every(9), directory=tmp_path / "run", **FEW)
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
        fit_lightning(
            tmp_path, [monitor, keep], steps=steps, resume=resume, model=TwoOptimizers(),
            enable_checkpointing=True, weights_only=True,
        )  # fmt: skip
    assert [r.step for r in read(tmp_path / "run")] == [0, 8, 10, 12]


def copies_of(model, monitor):
    return [copy.deepcopy((model, monitor)), pickle.loads(pickle.dumps((model, monitor)))]


class CopyInLightning(Callback):
    def __init__(self, monitor):
        self.monitor = monitor

    def on_train_batch_end(self, trainer, module, outputs, ids, index):
        if index == 4:
            self.made = copies_of(module.net, self.monitor)


def check(made, before):
    """The copies are whole, free of hooks, and know the settings and nothing of the training."""
    assert len(made) == 2
    for model, monitor in made:
        assert not any(len(getattr(m, kind)) for m in model.modules() for kind in HOOKS)
        assert not any("forward" in vars(m) for m in model.modules())
        assert monitor.overhead != monitor.overhead
        assert vars(monitor).keys() == before
        assert monitor._session.monitor is None


def test_copies_made_while_lightning_trains(tmp_path):
    monitor = OfLightning(schedule=every(2), directory=tmp_path / "run", pictures=False, **FEW)
    before = set(vars(monitor))
    copier = CopyInLightning(monitor)
    logger = TensorBoardLogger(tmp_path)
    watched, _ = fit_lightning(tmp_path, [monitor, copier], logger=logger)
    check(copier.made, before)
    plain, _ = fit_lightning(tmp_path / "plain", [])
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
    for _, copied in copier.made:
        fit_lightning(tmp_path, [copied], steps=3)
        assert [r.step for r in read(tmp_path / "run")] == [0, 2]


@pytest.mark.parametrize("probe", [None, batch(8, 32, seed=77)], ids=["inline", "probe"])
def test_after_a_cut_the_values_are_those_of_a_run_without_one(tmp_path, monkeypatch, probe):
    """Without dropout, on one batch again and again: nothing of the cut is left in the weights."""
    monkeypatch.setattr(test_lightning, "batch", lambda *shape, seed: batch(8, 32, seed=0))

    def net():
        model = test_lightning.Decoder()
        torch.manual_seed(0)
        model.net = PlainDecoder()
        return model

    def run(folder, steps, resume=None):
        monitor = OfLightning(probe=probe, schedule=every(3), directory=folder, **FEW)
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=7, save_top_k=-1)
        model, _ = fit_lightning(
            folder, [monitor, keep], steps=steps, resume=resume, model=net(),
            enable_checkpointing=True, weights_only=True,
        )  # fmt: skip
        return model

    whole = run(tmp_path / "whole", 13)
    run(tmp_path / "cut", 8)
    resumed = run(tmp_path / "cut", 13, resume=tmp_path / "cut" / "step=7.ckpt")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    expected, found = read(tmp_path / "whole"), read(tmp_path / "cut")
    assert len(found.runs) == 2
    found = {reading.step: reading for reading in found}
    after = [reading.step for reading in expected if reading.step > 8]
    assert after == ([9, 12, 13] if probe is not None else [9, 12])
    for reading in expected:
        for tag, value in reading.values.items():
            if not tag.startswith("geomon/"):
                same = pytest.approx(value, rel=0, abs=0, nan_ok=True)  # the last step has no loss
                assert found[reading.step].values[tag] == same, (reading.step, tag)
    moved = [reading.values["variance/mean"] for reading in expected]
    assert len(set(moved)) == len(moved)  # a curve that stands still would prove nothing
