import argparse
import csv
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from models import VOCABULARY, PlainDecoder, batch
from tagged import charts_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from wandb_file import work_offline

import geomon
import geomon.lightning
from geomon import every, read, select
from geomon.lightning import GeometryMonitor

FEW = {
    "metrics": select("variance", "attention_entropy", "qk_cosine"),
    "tokens": 64,
    "strict": True,
    "sink_timeout": 600.0,  # how long drawing takes says how busy the machine is
    "budget": None,  # tests of it give one
}


class Decoder(L.LightningModule):
    """Dropout on, so that a disturbed random state shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = PlainDecoder(dropout=0.2)
        self.losses: list[float] = []

    def forward(self, ids):
        return self.net(ids)

    def training_step(self, ids, index):
        logits = self.net(ids)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].flatten()
        )
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids, index):
        self.net(ids)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    tmp_path, callbacks, *, steps=12, model=None, logger=False, resume=None, weights_only=None,
    **kwargs,
):  # fmt: skip
    model = Decoder() if model is None else model
    trainer = L.Trainer(
        default_root_dir=tmp_path, callbacks=callbacks, logger=logger, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
        **({"max_steps": steps, "enable_checkpointing": False} | kwargs),
    )  # fmt: skip
    data = DataLoader(torch.cat([batch(8, 32, seed=i) for i in range(40)]), batch_size=8)
    torch.manual_seed(1)
    trainer.fit(model, data, ckpt_path=resume, weights_only=weights_only)
    return model, trainer


class Described(Decoder):
    """Hyper-parameters as people keep them: some are no numbers, one is nobody's business."""

    def __init__(self, config, rate, token, rows=None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_stand_in_the_record_and_yours_count(tmp_path):
    model = Described(
        types.SimpleNamespace(a=1), torch.tensor(0.5), "hf_abc", argparse.Namespace(n=3)
    )
    monitor = GeometryMonitor(
        **FEW, settings={"rate": 0.25, "trial": 7}, directory=tmp_path / "run"
    )
    fit(tmp_path, [monitor], steps=1, model=model)
    (run,) = read(tmp_path / "run").runs
    told = {name: value for name, value in run.items() if name.startswith("training/")}
    assert told == {"training/rows/n": 3, "training/rate": 0.25, "training/trial": 7}
    fit(tmp_path, [GeometryMonitor(**FEW, directory=tmp_path / "plain")], steps=1)
    (run,) = read(tmp_path / "plain").runs
    assert not [name for name in run if name.startswith("training/")]


class Validated(Decoder):
    """Logs on the progress bar, so that it can be seen who else stands there."""

    def training_step(self, ids, index):
        loss = super().training_step(ids, index)
        self.log("loss", loss, prog_bar=True)
        return loss


def fit_with(tmp_path, *callbacks, detail="headline", steps=12, **kwargs):
    monitor = GeometryMonitor(directory=tmp_path, schedule=every(1), detail=detail, **FEW)
    return fit(tmp_path, [monitor, *callbacks], model=Validated(), steps=steps, **kwargs)[1]


@pytest.mark.parametrize("detail", ["headline", "layers"])
def test_headline_values_stand_in_the_callback_metrics_and_not_on_the_bar(tmp_path, detail):
    trainer = fit_with(tmp_path, detail=detail)
    last = read(tmp_path)[-1].values
    ours = {name: v for name, v in trainer.callback_metrics.items() if name != "loss"}
    assert {"geomon/variance", "geomon/attention_entropy", "geomon/overhead"} <= set(ours)
    assert all(name.startswith("geomon/") for name in ours)
    assert ours["geomon/variance"].item() == pytest.approx(last["variance/mean"], rel=1e-6)
    assert set(trainer.progress_bar_metrics) == {"loss"}
    assert set(trainer.logged_metrics) == {"loss"}


def test_early_stopping_and_checkpoints_follow_a_headline_value(tmp_path):
    name = "geomon/attention_entropy"
    stopping = EarlyStopping(name, patience=0, mode="max", check_on_train_epoch_end=True)
    keeping = ModelCheckpoint(tmp_path / "kept", monitor=name, mode="min", every_n_train_steps=2)
    trainer = fit_with(
        tmp_path, stopping, keeping, steps=-1, max_epochs=9, limit_train_batches=4,
        enable_checkpointing=True,
    )  # fmt: skip
    record = {reading.step: reading.values["attention_entropy/mean"] for reading in read(tmp_path)}
    ends = [record[step] for step in range(3, len(record), 4)]  # seen at the end of each epoch
    fell = next(i for i in range(1, 9) if i + 1 == 9 or ends[i] <= ends[i - 1])
    assert trainer.global_step == 4 * (fell + 1)
    kept = min(record[step] for step in range(1, len(record), 2))
    assert keeping.best_model_score.item() == pytest.approx(kept, rel=1e-6)


class TwoOptimizers(Decoder):
    """Each batch makes two steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, ids, index):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(ids, index))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        parts = self.net.blocks, self.net.head
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]


@pytest.mark.parametrize("probe", [None, batch(seed=77)], ids=["inline", "probe"])
def test_a_due_step_that_is_passed_over_is_read_at_the_next_batch(tmp_path, probe):
    monitor = GeometryMonitor(probe=probe, schedule=every(3), directory=tmp_path, **FEW)
    fit(tmp_path, [monitor], steps=14, model=TwoOptimizers())
    # Due are 0, 3, 6, 9 and 12; the batches begin at even steps.
    assert [r.step for r in read(tmp_path)] == [0, 4, 6, 10, 12] + (
        [14] if probe is not None else []
    )


@pytest.mark.parametrize("bound", [{"max_steps": 10}, {"max_steps": -1, "max_epochs": 1}])
def test_the_last_batch_is_read_with_two_optimizers_too(tmp_path, bound):
    monitor = GeometryMonitor(schedule=every(50), directory=tmp_path, **FEW)
    fit(tmp_path, [monitor], model=TwoOptimizers(), limit_train_batches=5, **bound)
    assert [r.step for r in read(tmp_path)] == [0, 8]


class Slow:
    """A metric that waits, between two batches: its readings come late."""

    def __init__(self, first, last):
        self.first, self.last, self.go = first, last, threading.Event()
        self.go.set()

    def __call__(self, hidden):
        assert self.go.wait(120)
        return hidden.norm()

    def at(self, batch_index):
        if batch_index == self.first:
            self.go.clear()
        if batch_index == self.last:
            self.go.set()


class LoggedByTwo(TwoOptimizers):
    """Two steps in each batch, and a loss that Lightning logs itself."""

    def __init__(self, at=lambda index: None):
        super().__init__()
        self.at = at

    def training_step(self, ids, index):
        self.at(index)
        super().training_step(ids, index)
        self.log("loss", self.losses[-1])


def csv_rows(path, name):
    """Lightning's step of each row that has a value of that name, and the value."""
    with path.open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def test_with_two_optimizers_curves_stand_beside_those_that_lightning_logs(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="csv")
    monitor = GeometryMonitor(directory=tmp_path, schedule=every(4), **FEW)
    model = LoggedByTwo()
    fit(tmp_path, [monitor], logger=logger, steps=14, model=model, log_every_n_steps=1)
    record = {reading.step: reading.values["variance/mean"] for reading in read(tmp_path)}
    assert list(record) == [0, 4, 8, 12]
    path = tmp_path / "csv" / "metrics.csv"
    # Batches 0, 2, 4 and 6 began at these steps; Lightning counts batches.
    assert csv_rows(path, "geomon/variance") == [
        (step // 2, value) for step, value in record.items()
    ]
    assert [step for step, _ in csv_rows(path, "loss")] == list(range(7))


@pytest.mark.usefixtures("own_metrics_in_background")
def test_a_reading_that_comes_late_is_logged_where_it_was_made(tmp_path):
    slow = Slow(2, 5)
    logger = CSVLogger(tmp_path, name="", version="csv")
    monitor = GeometryMonitor(
        directory=tmp_path, schedule=lambda step: step == 4, background=True,
        **{**FEW, "metrics": FEW["metrics"] | {"slow": slow}},
    )  # fmt: skip
    fit(tmp_path, [monitor], logger=logger, steps=14, model=LoggedByTwo(slow.at))
    assert [r.step for r in read(tmp_path)] == [0, 4, 12]
    shown = csv_rows(tmp_path / "csv" / "metrics.csv", "geomon/slow")
    assert shown == [(reading.step // 2, reading.values["slow/mean"]) for reading in read(tmp_path)]


class Logs(Decoder):
    """A loss, and values that Lightning logs."""

    def training_step(self, ids, index):
        loss = super().training_step(ids, index)
        self.log("accuracy", float(index), on_step=True)
        return loss

    def validation_step(self, ids, index):
        self.log("val/loss", torch.tensor(100.0 + self.trainer.global_step))


@pytest.mark.parametrize("probe", [None, batch(seed=77)], ids=["inline", "probe"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loss_of_the_step_and_named_values_stand_in_its_reading(tmp_path, probe, accumulate):
    logger = CSVLogger(tmp_path, name="", version="csv")
    monitor = GeometryMonitor(
        directory=tmp_path,
        schedule=every(2),
        probe=probe,
        log=("accuracy", "val/loss"),
        detail="layers",
        **FEW,
    )
    model = Logs()
    data = DataLoader(torch.cat([batch(8, 32, seed=i) for i in range(40)]), batch_size=8)
    trainer = L.Trainer(
        max_steps=6, accumulate_grad_batches=accumulate, num_sanity_val_steps=0,
        val_check_interval=3 * accumulate, limit_val_batches=1, logger=logger, callbacks=[monitor],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(model, data, data)
    readings = {r.step: r.values for r in read(tmp_path)}
    steps = [0, 2, 4] + ([5] if probe is None else [])
    assert list(readings) == steps + ([6] if probe is not None else [])
    for step in steps:  # of accumulated batches the first is read
        assert readings[step]["training/loss"] == model.losses[accumulate * step]
        assert readings[step]["training/accuracy"] == accumulate * step
        val = readings[step]["training/val/loss"]
        assert math.isnan(val) if step < 3 else val == 103.0
    if probe is not None:  # no batch is trained on with the last weights
        assert math.isnan(readings[6]["training/loss"])
        assert readings[6]["training/val/loss"] == 106.0
    rows = dict(csv_rows(tmp_path / "csv" / "metrics.csv", "training/loss"))
    assert rows == {step: readings[step]["training/loss"] for step in steps}


def test_without_a_loss_the_one_that_is_logged_stands_for_it(tmp_path):
    class Silent(TwoOptimizers):
        def training_step(self, ids, index):
            super().training_step(ids, index)
            self.log("loss", self.losses[-1])

    class Skips(Decoder):
        def training_step(self, ids, index):
            loss = super().training_step(ids, index)
            return None if index == 2 else loss

    for name, model in {"logged": Silent(), "none": Skips()}.items():
        monitor = GeometryMonitor(directory=tmp_path / name, schedule=every(2), **FEW)
        fit(tmp_path, [monitor], steps=6, model=model)
        found = {r.step: r.values["training/loss"] for r in read(tmp_path / name)}
        if name == "logged":
            assert found == {step: model.losses[step // 2] for step in (0, 2, 4)}
        else:
            assert found[0] == model.losses[0]
            assert math.isnan(found[2])


# -- the other package of Lightning ------------------------------------------------------------

OTHER = """
import sys

sys.modules["lightning"] = None
import pytorch_lightning as pl
import torch
from models import VOCABULARY, PlainDecoder, batch

from geomon import every, select
from geomon.lightning import GeometryMonitor


class Decoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = PlainDecoder()

    def training_step(self, ids, index):
        logits = self.net(ids)[:, :-1].reshape(-1, VOCABULARY)
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


assert issubclass(GeometryMonitor, pl.Callback)
folder = sys.argv[1]
pl.Trainer(
    default_root_dir=folder, max_steps=3, accelerator="cpu", enable_progress_bar=False,
    callbacks=[GeometryMonitor(metrics=select("anisotropy", "qk_cosine"), schedule=every(1))],
    enable_model_summary=False,
    logger=pl.loggers.TensorBoardLogger(folder, name="tb", version="x"),
).fit(Decoder(), torch.utils.data.DataLoader(torch.cat([batch()] * 4), batch_size=8))
"""


@pytest.mark.slow
def test_the_other_package_of_lightning_is_served_by_itself(tmp_path):
    pytest.importorskip("pytorch_lightning")
    command = [sys.executable, "-W", "ignore", "-c", OTHER, str(tmp_path)]
    paths = [str(Path(__file__).parent), str(Path(geomon.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)
    record = read(tmp_path / "tb" / "x")
    assert [reading.step for reading in record] == [0, 1, 2]
    events = EventAccumulator(str(tmp_path / "tb" / "x"))
    events.Reload()
    assert events.Tags()["images"]
    charted = {f"~{tag}" for tag in charts_of(record).select(record[-1])}
    assert charted <= set(events.Tags()["scalars"])


def test_the_record_of_all_ranks_lies_where_the_first_one_has_its_run(tmp_path, monkeypatch):
    """Loggers name runs by time or at random, on each rank anew."""
    first = str(tmp_path / "of the first rank")
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", lambda strategy, told, src=0: first)
    fit(tmp_path / "own", [GeometryMonitor(**FEW)], steps=2)
    assert [reading.step for reading in read(first)] == [0, 1]


def test_the_record_lies_with_the_run_and_never_where_the_program_was_started(
    tmp_path, monkeypatch
):
    """With W&B, whose checkpoints have a folder for each run; without logger; in a trial of one."""
    work_offline(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        logger = WandbLogger(save_dir="logs", project="test")
        fit(".", [GeometryMonitor(schedule=every(9), **FEW)], logger=logger, steps=2)
        assert read(tmp_path / "logs" / "test" / logger.experiment.id)[-1].step == 1
        logger.experiment.finish()
    fit(".", [GeometryMonitor(**FEW)], steps=2)
    assert read(tmp_path / "runs" / "geomon")[-1].step == 1
    fit("elsewhere", [GeometryMonitor(**FEW)], steps=1, fast_dev_run=True)
    assert read(tmp_path / "elsewhere")[-1].step == 0
    assert not (tmp_path / "readings.jsonl").exists()
    assert not (tmp_path / "geomon").exists()
