"""Both callbacks in files of YAML, as LightningCLI and jsonargparse read them."""

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from transformers import TrainerCallback

from geomon import Memory, every, read
from geomon.huggingface import GeometryMonitor as OfTrainer
from geomon.lightning import GeometryMonitor as OfLightning
from geomon.monitor import CallbackOptions
from support.models import PlainDecoder


def note(alert):
    """Somebody's function, which a file names by its path."""


# Every option that can be said in YAML, in a form other than its default.
GIVEN = {
    "metrics": ["anisotropy", "twonn"], "tokens": 64, "splits": 2, "queries": None,
    "blocks": r"layers\.\d", "extra_layers": ["final_norm"], "seed": 3, "checks": 7,
    "budget": "2 %", "probe": "validation", "directory": "here", "arrays": False,
    "log": ["val_loss"], "settings": {"learning_rate": 0.1, "trial": {"number": 7}},
    "alerts": ["logit_growth"], "gather": False, "rank_timeout": 5.0, "background": False,
    "device": "auto", "max_capture_mb": 10.0, "strict": True, "sink_timeout": 2.0,
    "pictures": False, "detail": "layers", "sinks": [{"class_path": "geomon.Memory"}],
    "schedule": {"class_path": "geomon.every", "init_args": {"steps": 5}},
}  # fmt: skip
# Functions have to be of a module that can be imported.
OF_PYTHON = {"probe_loss", "on_alert", "on_phase", "on_peak"}
BASES = {OfLightning: L.Callback, OfTrainer: TrainerCallback}


def parsed(parser, callback):
    return parser.parse_object({"callback": callback})


@pytest.mark.parametrize("cls", BASES, ids=["Lightning", "Trainer"])
def test_every_option_of_yaml_is_taken_and_a_saved_file_loads_again(cls):
    assert GIVEN.keys() | OF_PYTHON == CallbackOptions.__optional_keys__
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=BASES[cls])
    path = f"{cls.__module__}.{cls.__qualname__}"
    first = parsed(parser, {"class_path": path, "init_args": GIVEN})
    again = parsed(parser, yaml.safe_load(parser.dump(first, skip_unset=False))["callback"])
    for config in (first, again):
        options = parser.instantiate(config).callback._session.options
        assert options["schedule"] == every(5)
        assert isinstance(options["sinks"][0], Memory)
        assert options["budget"] == 0.02
        assert options["log"] == ("val_loss",)
        assert options["checks"] == every(7)
        for name in GIVEN.keys() - {"schedule", "checks", "sinks", "budget", "log", "metrics"}:
            found = options[name]
            assert (list(found) if isinstance(found, tuple) else found) == GIVEN[name], name
        assert list(options["metrics"]) == GIVEN["metrics"]


@pytest.mark.parametrize("wrong", [{"token": 3}, {"tokens": "many"}, {"detail": 3}])
def test_what_is_wrong_in_a_file_is_said_before_the_training(wrong):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=L.Callback)
    path = "geomon.lightning.GeometryMonitor"
    with pytest.raises(Exception, match=next(iter(wrong))):
        parsed(parser, {"class_path": path, "init_args": wrong})


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = PlainDecoder()

    def training_step(self, ids, index):
        return self.net(ids).logsumexp(-1).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randint(0, 50, (48, 16)), batch_size=8)


@pytest.mark.filterwarnings("ignore")  # of the command line of Lightning
def test_a_training_of_lightningcli_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it saves its own file
    given = {"schedule": 2, "tokens": 64, "metrics": ["anisotropy"], "directory": "record"}
    callback = {"class_path": "geomon.lightning.GeometryMonitor", "init_args": given}
    content = {"max_steps": 5, "accelerator": "cpu", "logger": False, "callbacks": [callback],
               "enable_progress_bar": False, "enable_checkpointing": False}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": content}))
    LightningCLI(Module, Data, args=["fit", "--config", "run.yaml"])
    (saved,) = tmp_path.rglob("config.yaml")
    saved.rename(tmp_path / "run.yaml")
    LightningCLI(Module, Data, args=["fit", "--config", "run.yaml"])
    assert [reading.step for reading in read(tmp_path / "record")] == [0, 2, 4]
