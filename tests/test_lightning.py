"""What Lightning's callback does by itself; what both callbacks do is in test_loops.py."""

import copy
import csv
import gc
import math

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from geomon import every, huggingface, read, select
from geomon.lightning import GeometryMonitor
from support.fingerprint import fingerprint
from support.loggers import events_of
from support.loops import ROWS, Learner, Module, in_lightning
from support.models import batch
from support.readings import charts_of
from support.wandb_file import work_offline

FEW = {
    "metrics": select("variance", "attention_entropy", "qk_cosine"),
    "tokens": 64,
    "strict": True,
    "sink_timeout": 600.0,  # how long drawing takes says how busy the machine is
    "budget": None,  # tests of it give one
}


class Described(Module):
    """Hyper-parameters as people keep them: some are nobody's business."""

    def __init__(self, rate, token) -> None:
        super().__init__(Learner())
        self.save_hyperparameters()


def test_of_settings_those_that_you_give_stand_in_the_record(tmp_path):
    options = {**FEW, "settings": {"trial": 7}}
    in_lightning(Learner(), options, tmp_path, steps=1, module=Described(0.5, "hf_abc"))
    (run,) = read(tmp_path).runs
    assert {n: x for n, x in run.items() if n.startswith("training/")} == {"training/trial": 7}
    assert "hf_abc" not in (tmp_path / "readings.jsonl").read_text()


@pytest.mark.parametrize("detail", ["headline", "layers"])
def test_headline_values_stand_in_the_callback_metrics_and_not_on_the_bar(tmp_path, detail):
    options = {**FEW, "schedule": every(1), "detail": detail}
    trainer = in_lightning(Learner(), options, tmp_path)
    last = read(tmp_path)[-1].values
    ours = {name: v for name, v in trainer.callback_metrics.items() if name != "loss"}
    assert {"geomon/variance", "geomon/attention_entropy", "geomon/overhead"} <= set(ours)
    assert all(name.startswith("geomon/") for name in ours)
    assert ours["geomon/variance"].item() == pytest.approx(last["variance/mean"], rel=1e-6)
    assert set(trainer.progress_bar_metrics) == {"loss"}
    assert set(trainer.logged_metrics) == {"loss"}


class Logged(Callback):
    """Keeps the newest value under a name as each batch begins, or None."""

    def __init__(self, name):
        self.name, self.seen = name, []

    def on_train_batch_start(self, trainer, *event):
        self.seen.append(trainer.callback_metrics.get(self.name))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("known", [True, False])
def test_early_stopping_on_a_headline_value_outlives_a_resume(tmp_path, known):
    name, told = "geomon/variance", {"max_steps": -1, "limit_train_batches": 4}
    options = {**FEW, "schedule": every(1000)}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)
    in_lightning(
        Learner(), options if known else None, tmp_path, callbacks=[keep], max_epochs=2, **told
    )
    path = tmp_path / "step=6.ckpt"
    logged = Logged(name)
    stopping = EarlyStopping(name, patience=9, strict=known, check_on_train_epoch_end=True)
    trainer = in_lightning(
        Learner(), options, tmp_path, callbacks=[stopping, logged], resume=path, max_epochs=4,
        **told,
    )  # fmt: skip
    assert trainer.global_step == 16
    (before, *_) = logged.seen
    value = read(tmp_path)[0].values["variance/mean"] if known else None
    assert torch.load(path, weights_only=True).get("geomon", {}).get(name) == value
    assert before == (pytest.approx(value, rel=1e-6) if known else None)


def test_a_copy_of_the_callback_has_no_method_of_a_module(tmp_path):
    """Lightning lends its callbacks the methods by which a module logs."""
    monitor = GeometryMonitor(**FEW)
    assert math.isnan(monitor.overhead)
    in_lightning(Learner(), None, tmp_path, callbacks=[monitor], steps=2)
    assert 0 < monitor.overhead < 1
    monitor.log, monitor.log_dict = print, print
    copied = copy.deepcopy(monitor)
    assert not vars(copied).keys() & {"log", "log_dict"}
    assert vars(copied).keys() == vars(monitor).keys() - {"log", "log_dict"}
    assert math.isnan(copied.overhead)


def test_values_of_one_training_are_not_those_of_the_next(tmp_path):
    logged, monitor = Logged("geomon/variance"), GeometryMonitor(**FEW, directory=tmp_path)
    for _ in range(2):
        in_lightning(Learner(), None, tmp_path, callbacks=[monitor, logged], steps=2)
    assert [value is None for value in logged.seen] == [True, False] * 2


def test_a_second_monitor_is_told_to_take_a_folder_of_its_own(tmp_path):
    with pytest.raises(ValueError, match=r"would record in directory=.* at once: give") as error:
        in_lightning(Learner(), None, tmp_path, callbacks=[GeometryMonitor(), GeometryMonitor()])
    assert "\n" not in str(error.value)
    two = [GeometryMonitor(**FEW, directory=tmp_path / name) for name in "ab"]
    in_lightning(Learner(), None, tmp_path, callbacks=two, steps=1)
    assert [len(read(tmp_path / name)) for name in "ab"] == [1, 1]


def test_the_callback_of_transformers_says_which_class_to_take(tmp_path):
    wrong = huggingface.GeometryMonitor(**FEW)
    with pytest.raises(AttributeError, match=r"from geomon\.lightning import"):
        in_lightning(Learner(), None, tmp_path, callbacks=[wrong], steps=1)
    assert not hasattr(copy.deepcopy(wrong), "on_fit_start")


def test_a_remote_folder_is_refused_and_becomes_no_local_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'memory://bucket/run' is remote storage"):
        in_lightning(Learner(), {**FEW, "directory": None}, "memory://bucket/run", steps=1)
    assert not list(tmp_path.iterdir())


class WithoutForward(Module):
    forward = LightningModule.forward


def test_inputs_for_a_module_without_forward_are_refused_with_a_remedy(tmp_path):
    module = WithoutForward(Learner())
    with pytest.raises(ValueError, match="define forward, pass a function") as error:
        in_lightning(Learner(), {**FEW, "probe": batch()}, tmp_path / "a", module=module)
    assert 'probe="validation"' in str(error.value)
    options = {**FEW, "probe": lambda module: module.learner(batch())}
    in_lightning(Learner(), options, tmp_path / "b", module=module, steps=1)
    assert [reading.step for reading in read(tmp_path / "b")] == [0, 1]


# -- the validation's own batches ------------------------------------------------------------------


def test_of_several_validation_sets_the_first_is_read_and_nothing_of_a_validation_by_hand(tmp_path):
    class Both(Module):
        def validation_step(self, ids, index, dataloader_idx=0):
            self.learner(ids)

    metrics = {"ids": lambda token_ids: token_ids.double().mean()}
    monitor = GeometryMonitor(
        **{**FEW, "metrics": metrics}, probe="validation", directory=tmp_path, schedule=every(1)
    )
    trainer = L.Trainer(
        max_steps=2, limit_val_batches=1, accelerator="cpu", logger=False, callbacks=[monitor],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sets = [DataLoader(data, batch_size=4) for data in (ROWS, ROWS * 0)]
    module = Both(Learner())
    trainer.fit(module, DataLoader(ROWS, batch_size=8), sets)
    expected = ROWS[:4].double().mean().item()
    for reading in read(tmp_path):
        assert reading.values["ids/layer_01"] == pytest.approx(expected, abs=4)
        assert reading.tokens == 64
    trainer.validate(module, DataLoader(torch.zeros(4, 31, dtype=torch.int64)), verbose=False)
    gc.collect()
    kept = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (1, 31)]
    assert not kept


# -- which steps are read, and what a logger of Lightning gets -------------------------------------


class Looks(Module):
    """Looks at itself as the training begins and as each epoch ends."""

    def __init__(self, *given):
        super().__init__(*given)
        self.found = []

    def on_train_start(self):
        self.found.append(fingerprint(self))

    on_train_epoch_end = on_train_start


# With two optimizers each batch makes two steps: due are 0, 3, 6, 9 and 12.
ENDS, FIVE = {"max_steps": -1, "max_epochs": 1}, {"limit_train_batches": 5}
READ = {
    "due steps that are passed over": (
        every(3), None, "two", "", {"max_steps": 14}, [0, 4, 6, 10, 12]
    ),
    "passed over, probed": (
        every(3), batch(seed=77), "two", "", {"max_steps": 14}, [0, 4, 6, 10, 12, 14]
    ),
    "the last of so many steps": (every(50), None, "two", "", FIVE | {"max_steps": 10}, [0, 8]),
    "the last of an epoch": (every(50), None, "two", "", FIVE | ENDS, [0, 8]),
    "a batch that was skipped": (every(1), None, "adamw", "-1", ENDS, [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_steps_are_read_and_no_window_is_left_open(tmp_path, name):
    schedule, probe, kind, skip, bounds, steps = READ[name]
    module, logger = Looks(Learner(), kind, skip), CSVLogger(tmp_path, name="", version="csv")
    options = {**FEW, "schedule": schedule, "probe": probe}
    in_lightning(Learner(), options, tmp_path, module=module, logger=logger, **bounds)
    assert [reading.step for reading in read(tmp_path)] == steps
    assert all(found == module.found[0] for found in module.found)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        shown = [int(row["step"]) for row in csv.DictReader(file) if row["geomon/variance"]]
    assert [step * (2 if kind == "two" else 1) for step in shown] == steps


def test_without_a_loss_the_one_that_is_logged_stands_for_it(tmp_path):
    module = Module(Learner(), skip="None")
    in_lightning(Learner(), {**FEW, "schedule": every(1)}, tmp_path, module=module, steps=4)
    losses = {reading.step: reading.values["training/loss"] for reading in read(tmp_path)}
    assert losses == dict(enumerate(module.learner.losses))


# -- the other package of Lightning ------------------------------------------------------------

OTHER = """
import sys

sys.modules["lightning"] = None
import pytorch_lightning as pl
import torch
from support.models import VOCABULARY, PlainDecoder, batch

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
def test_the_other_package_of_lightning_is_served_by_itself(forks, tmp_path):
    pytest.importorskip("pytorch_lightning")
    done = forks.run(OTHER, tmp_path)
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "tb" / "x")
    assert [reading.step for reading in record] == [0, 1, 2]
    found = events_of(tmp_path / "tb" / "x", of_lightning=True)
    assert any(value is None for points in found.values() for _, value in points)  # a picture
    assert {f"~{tag}" for tag in charts_of(record).select(record[-1])} <= found.keys()


def test_the_record_of_all_ranks_lies_where_the_first_one_has_its_run(tmp_path, monkeypatch):
    """Loggers name runs by time or at random, on each rank anew."""
    first = str(tmp_path / "of the first rank")
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", lambda strategy, told, src=0: first)
    in_lightning(Learner(), {**FEW, "directory": None}, tmp_path / "own", steps=2)
    assert [reading.step for reading in read(first)] == [0, 1]


def test_the_record_lies_with_the_run_and_never_where_the_program_was_started(
    tmp_path, monkeypatch
):
    """With W&B, whose checkpoints have a folder for each run; without logger; in a trial of one."""
    work_offline(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    options = {**FEW, "directory": None, "schedule": every(9)}
    for _ in range(2):
        logger = WandbLogger(save_dir="logs", project="test")
        in_lightning(Learner(), options, ".", logger=logger, steps=2)
        assert read(tmp_path / "logs" / "test" / logger.experiment.id)[-1].step == 1
        logger.experiment.finish()
    in_lightning(Learner(), options, ".", steps=2)
    assert read(tmp_path / "runs" / "geomon")[-1].step == 1
    in_lightning(Learner(), options, "elsewhere", steps=1, fast_dev_run=True)
    assert read(tmp_path / "elsewhere")[-1].step == 0
    assert not (tmp_path / "readings.jsonl").exists()
    assert not (tmp_path / "geomon").exists()
