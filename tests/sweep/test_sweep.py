"""The sweep against live runs: equal values, going on, what fails, what is kept of it."""

import json
import logging
import math
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from loggers import SINKS
from models import batch, transformer
from torch.utils.data import DataLoader

from geomon import Memory, Monitor, every, read, scan, select
from geomon.lightning import GeometryMonitor

STEPS = (2, 4, 6)
PROBE = batch(16, 24, seed=3)
# One metric of each kind: of rows, of neighbours, of heads, of attention.
CHOSEN = select("anisotropy", "qk_cosine", "attention_entropy", "max_logit")
SMALL = {"tokens": 192, "inputs": PROBE, "metrics": CHOSEN, "device": "cpu"}


class Decoder(L.LightningModule):
    """A decoder, as a training of Lightning has it."""

    def __init__(self, kind, vocabulary):
        super().__init__()
        self.save_hyperparameters()
        self.network = transformer(kind)
        self.network.resize_token_embeddings(vocabulary)

    def forward(self, tokens):
        return self.network(input_ids=tokens, use_cache=False).logits

    def training_step(self, tokens, index):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def build(**settings):
    return Decoder(**settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the recipe's model with a checkpoint at every second step, and its live record."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = Decoder("gpt2", 50)
    monitor = GeometryMonitor(
        probe=PROBE, schedule=every(2), tokens=192, directory=folder, metrics=CHOSEN
    )
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=6, logger=False, callbacks=[monitor, saving],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batch(8 * 6, 25), batch_size=8))
    return folder


@pytest.fixture(scope="module")
def scanned(run, tmp_path_factory):
    """The folder of a scan over the checkpoints of the run."""
    folder = tmp_path_factory.mktemp("scan")
    scan(build, checkpoints=run / "checkpoints", directory=folder, **SMALL)
    return folder


def values(reading):
    """What is measured of the model: bytes, so that NaN equals NaN. A scan trains nothing."""
    other = ("geomon/", "training/")
    own = {tag: value for tag, value in reading.values.items() if not tag.startswith(other)}
    return json.dumps(own)


def test_a_scan_equals_the_live_record_to_the_last_digit(run, scanned):
    live = {reading.step: reading for reading in read(run)}
    readings = read(scanned)
    assert [reading.step for reading in readings] == list(STEPS)
    for reading in readings:
        assert values(reading) == values(live[reading.step])
        for name in ("source", "mode", "tokens", "world_size", "dtype"):
            assert getattr(reading, name) == getattr(live[reading.step], name)
        assert math.isnan(reading.overhead)  # a scan takes no time of a training
    live_run, scan_run = read(run).runs[0], readings.runs[0]
    for name in ("model", "parameters", "layers", "metrics", "tokens", "splits", "queries", "seed"):
        assert scan_run[name] == live_run[name]


def test_a_folder_of_the_trainer_equals_the_live_record_of_the_model_with_its_head(tmp_path):
    model = transformer("gpt2")
    own = {"metrics": CHOSEN, "tokens": 192}
    probe = {"input_ids": PROBE % 50}
    monitor = Monitor(model, directory=tmp_path / "live", **own)
    for step in (0, 9, 10):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        monitor.probe(step, probe)
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
    monitor.close()
    found = scan(tmp_path / "run", directory=tmp_path / "scan", inputs=probe, device="cpu", **own)
    live = read(tmp_path / "live")
    assert [values(reading) for reading in found] == [values(reading) for reading in live]
    assert len({values(reading) for reading in found}) == 3


class _Adapted:
    """As peft has it: weights that are added to those of a model."""

    def __init__(self, model, folder):
        self.model, self.weights = model, torch.load(Path(folder) / "adapter.pt")
        warnings.warn("of no interest to who scans", stacklevel=1)

    @classmethod
    def from_pretrained(cls, model, folder):
        if "lost" in str(folder):
            warnings.warn("Found missing adapter keys while loading the checkpoint", stacklevel=1)
        return cls(model, folder)

    def merge_and_unload(self):
        with torch.no_grad():
            for name, weight in self.weights.items():
                self.model.get_parameter(name).add_(weight)
        return self.model


def test_an_adapter_is_measured_as_merged_with_its_model(tmp_path, monkeypatch, caplog):
    model = transformer("gpt2")
    model.save_pretrained(tmp_path / "base")
    monitor = Monitor(model, tokens=192, directory=tmp_path / "live", metrics=CHOSEN)
    added = {"transformer.h.0.attn.c_proj.weight": torch.randn(32, 32)}
    for step in (1, 2):
        with torch.no_grad():
            model.transformer.h[0].attn.c_proj.weight.add_(*added.values())
        monitor.probe(step, {"input_ids": PROBE % 50})
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(tmp_path / "base")})
        )
        torch.save({name: step * weight for name, weight in added.items()}, folder / "adapter.pt")
    monitor.close()
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "run" / "lost-step2")
    own = {**SMALL, "inputs": {"input_ids": PROBE % 50}, "directory": tmp_path / "scan"}
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"holds an adapter, which needs peft .* or merge it"):
        scan(tmp_path / "run", **own)
    peft = types.ModuleType("peft")
    peft.__dict__.update(PeftModel=_Adapted, __spec__=ModuleSpec("peft", None))
    monkeypatch.setitem(sys.modules, "peft", peft)
    found = scan(tmp_path / "run", **own)
    assert [values(reading) for reading in found] == [values(read(tmp_path / "live")[0])]
    assert "cannot be merged" in caplog.text  # one of which nothing was loaded is left out
    assert any("merged with its adapter" in note for note in found[0].words())


@pytest.mark.parametrize("key", [None, "model", "model_state_dict"])
def test_a_file_of_a_loop_of_ones_own_is_read(key, tmp_path):
    model = transformer("gpt2")
    weights = model.state_dict()
    torch.save(weights if key is None else {key: weights, "best": 0.5}, tmp_path / "step7.pt")
    own = {**SMALL, "directory": tmp_path / "scan"}
    (found,) = scan(lambda: transformer("gpt2"), checkpoints=tmp_path / "step7.pt", **own)
    assert found.step == 7
    torch.save({"optimizer": {}, "best": 0.5}, tmp_path / "step8.pt")
    own["directory"] = tmp_path / "other"
    with pytest.raises(ValueError, match=r"holds no weights \(optimizer, best\): expected a state"):
        scan(lambda: transformer("gpt2"), checkpoints=tmp_path / "step8.pt", **own)


def test_revisions_of_a_model_on_the_hub_are_loaded_by_their_names(tmp_path, monkeypatch):
    """No network here: the hub's revisions are folders."""
    loaded, local = [], transformers.AutoModel.from_pretrained
    for name in ("step0", "step5"):
        model = transformer("gpt2")
        with torch.no_grad():
            model.transformer.wte.weight.mul_(1 + int(name[4:]))
        model.save_pretrained(tmp_path / name)

    def from_hub(source, *, revision, **options):
        loaded.append((source, revision, options["trust_remote_code"]))
        says = transformers.utils.logging
        assert (says.is_progress_bar_enabled(), says.get_verbosity()) == (False, logging.ERROR)
        return local(tmp_path / revision, **options)

    def letters(text, max_length=None, **options):
        rows = [[ord(letter) % 50 for letter in part[:max_length]] for part in text]
        return {"input_ids": rows}

    def tokenizer_from_hub(source, *, revision, trust_remote_code):
        assert (source, revision, trust_remote_code) == ("someone/model", "step0", False)
        return letters

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_hub)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer_from_hub)
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 99)
    readings = scan(
        "someone/model", revisions=["step5", "step0", "step7"], directory=tmp_path / "scan",
        **{**SMALL, "inputs": None, "text": tmp_path / "text", "length": 16},
    )  # fmt: skip
    assert loaded == [("someone/model", f"step{step}", False) for step in (0, 5, 7)]
    assert [reading.step for reading in readings] == [0, 5]
    assert values(readings[0]) != values(readings[1])


@pytest.mark.parametrize("name", ["no-such-model", "runs/no-such-run"])
def test_of_what_is_neither_here_nor_on_the_hub_both_are_said(tmp_path, monkeypatch, name):
    def from_hub(source, *, revision, **options):
        raise OSError(f"We couldn't connect to {revision} ")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_hub)
    with pytest.raises(ValueError, match=f"no folder {name} here, .* hub: OSError: We .* main$"):
        scan(name, directory=tmp_path / "scan", inputs={"input_ids": PROBE}, metrics=CHOSEN)


class Stop:
    """A sink at which the scan is ended from outside, at its second reading."""

    def __init__(self):
        self.left = 2

    def write(self, reading):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def close(self):
        pass


def test_a_scan_that_was_ended_goes_on_where_it_was(run, scanned, tmp_path):
    built = []

    def counted(**settings):
        built.append(None)
        return build(**settings)

    def go(sinks=()):
        return scan(counted, checkpoints=run / "checkpoints", directory=tmp_path,
                    sinks=sinks, **SMALL)  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go([Stop()])
    assert [reading.step for reading in read(tmp_path)] == [2, 4]
    with (tmp_path / "readings.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "ti')  # a line that a kill has torn
    shown = Memory()
    readings = go([shown])
    assert [reading.step for reading in shown.readings] == [6]
    assert [values(one) for one in readings] == [values(one) for one in read(scanned)]
    assert readings.mixed_at is None
    assert len(go()) == 3
    assert len(built) == 2  # one model for each scan that had something to read


def copy(run, folder, *, broken):
    folder.mkdir()
    for path in (run / "checkpoints").glob("*.ckpt"):
        content = path.read_bytes()
        own = content[: len(content) // 2] if f"step={broken}.ckpt" in path.name else content
        (folder / path.name).write_bytes(own)
    return folder


def test_a_checkpoint_that_fails_is_named_left_out_and_tried_again(run, scanned, tmp_path, caplog):
    folder = copy(run, tmp_path / "checkpoints", broken=2)
    readings = scan(build, checkpoints=folder, directory=tmp_path / "scan", **SMALL)
    assert [reading.step for reading in readings] == [4, 6]
    words = "epoch=0-step=2.ckpt (step 2): "
    assert [words in note for note in readings[0].words()].count(True) == 1
    assert not any(words in note for note in readings[1].words())
    named = [x.getMessage() for x in caplog.records if words in x.getMessage()]
    assert len(named) == 1
    assert "\n" not in named[0]

    (whole,) = (run / "checkpoints").glob("*step=2.ckpt")
    (folder / whole.name).write_bytes(whole.read_bytes())
    again = scan(build, checkpoints=folder, directory=tmp_path / "scan", **SMALL)
    assert [reading.step for reading in again] == [2, 4, 6]
    assert again.mixed_at is None
    expected = {reading.step: values(reading) for reading in read(scanned)}
    assert {reading.step: values(reading) for reading in again} == expected


class Failing(Decoder):
    def forward(self, tokens):
        raise RuntimeError("no such pass")


class TooLong(Decoder):
    def forward(self, tokens):
        raise IndexError("index out of range in self")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda **settings: Decoder("gpt2", 49),
         r"no checkpoint.*step=2.*do not fit the model that was built.*and 2 more failed too"),
        (lambda **settings: 3, "the function built a int: expected a torch module"),
        (lambda **settings: TooLong("gpt2", 50), "IndexError: .*; sequences may be longer"),
        (lambda arch: None, r"called with the hyper-parameters in the file \(\w+, \w+"),
        (lambda **settings: Failing("gpt2", 50), "RuntimeError: no such pass"),
    ],
)  # fmt: skip
def test_where_every_checkpoint_fails_the_first_reason_is_the_error(run, tmp_path, build, words):
    with pytest.raises(ValueError, match=words) as caught:
        scan(build, checkpoints=run / "checkpoints", directory=tmp_path, **SMALL)
    assert caught  # what it refers to does not hold the folder
    assert not (tmp_path / ".readings.lock").exists()


class Broken(Memory):
    closed = False

    def write(self, reading):
        raise OSError("gone")

    def close(self):
        self.closed = True


def test_a_sink_that_fails_is_a_warning_and_the_record_goes_on(run, scanned, tmp_path, caplog):
    sink = Broken()
    given = {**SMALL, "sinks": [sink]}
    readings = scan(build, checkpoints=run / "checkpoints", directory=tmp_path, **given)
    assert sink.closed
    assert [values(one) for one in readings] == [values(one) for one in read(scanned)]
    assert "the record goes on: OSError: gone" in caplog.text


@pytest.mark.parametrize("name", ["Memory", "Aim", "TensorBoard", "W&B"])
def test_sinks_get_what_those_of_a_live_run_get(tmp_path, monkeypatch, name):
    """Names, steps and values, one by one; alerts and pictures."""
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", math.inf)  # drawings are not put off
    monkeypatch.setattr("geomon.show.figures.card", lambda panel: panel)
    monkeypatch.setattr("geomon.show.figures.as_image", lambda figure: np.zeros((8, 8, 3), "u1"))
    model, inputs = transformer("gpt2"), {"input_ids": PROBE % 50}
    sink, of_live = SINKS[name](tmp_path / "of_live", monkeypatch)
    with Monitor(model, probe=inputs, tokens=192, sinks=[sink], directory=None) as monitor:
        for step in (0, 10, 20):
            monitor.probe(step)
            model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
            with torch.no_grad():
                for block in model.transformer.h:  # until logits are so large that it is an alert
                    block.attn.c_attn.weight.mul_(12)
    sink, of_scan = SINKS[name](tmp_path / "of_scan", monkeypatch)
    scan(tmp_path / "run", directory=tmp_path / "record", sinks=[sink], device="cpu", tokens=192,
         inputs=inputs)  # fmt: skip
    live, found = of_live(), of_scan()
    assert [(step, measured(row)) for step, row in found.rows] == [
        (step, measured(row)) for step, row in live.rows
    ]
    assert found[1:] == live[1:]
    assert [step for step, _ in live.rows] == [0, 10, 20]
    assert live.alerts
    assert (not live.pictures) == (name == "Memory")


def measured(row):
    """All but charts and the time that was taken, of which a scan has none; NaN equals NaN."""
    of_time = ("/overhead", "/seconds")
    numbers = {tag: x for tag, x in row.items() if isinstance(x, float)}
    return {tag: repr(x) for tag, x in numbers.items() if not tag.endswith(of_time)}


def test_another_scan_or_a_training_in_the_folder_is_refused(run, scanned, tmp_path):
    before = (scanned / "readings.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds a scan with other inputs and seed: choose another"):
        scan(build, checkpoints=run / "checkpoints", directory=scanned,
             **{**SMALL, "inputs": PROBE + 1, "seed": 1})  # fmt: skip
    others = (PROBE.int(), PROBE.reshape(24, 16), [PROBE], {"tokens": PROBE}, {"input_ids": PROBE},
              build, len)  # fmt: skip
    for other in others:
        with pytest.raises(ValueError, match="holds a scan with other inputs: choose another"):
            scan(build, checkpoints=run / "checkpoints", directory=scanned,
                 **{**SMALL, "inputs": other})  # fmt: skip
    same = {**SMALL, "inputs": PROBE.t().contiguous().t()}
    assert len(scan(build, checkpoints=run / "checkpoints", directory=scanned, **same)) == 3
    assert (scanned / "readings.jsonl").read_bytes() == before
    (tmp_path / "readings.jsonl").touch()  # of a run that has read nothing: anybody's
    assert len(scan(build, checkpoints=run / "checkpoints", directory=tmp_path, **SMALL)) == 3
    live = (run / "readings.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds the record of a training"):
        scan(build, checkpoints=run / "checkpoints", directory=run, **SMALL)
    assert (run / "readings.jsonl").read_bytes() == live


def test_warnings_of_the_same_kind_come_once_and_nothing_stays(run, tmp_path, caplog):
    logger, state = logging.getLogger("geomon"), torch.get_rng_state()
    filters = list(logger.filters)
    scan(build, checkpoints=run / "checkpoints", directory=tmp_path, inputs=PROBE,
         metrics=CHOSEN)  # fmt: skip
    few = [r for r in caplog.records if "(tokens=4096 asked for more)" in r.getMessage()]
    assert len(few) == 1
    assert logger.filters == filters
    assert torch.equal(torch.get_rng_state(), state)


class Own:
    """A class whose objects no file may bring along."""


# Arguments, in a folder with others in it, and words of the one line that refuses them.
WRONG = [
    (("./x",), {}, "no checkpoints in x"),
    (("a/b/c",), {}, "no checkpoints in a/b/c"),
    (("./empty",), {}, "no checkpoints in"),
    (("model", "empty"), {}, "expected the folder of a transformers model"),
    (("model", "files"), {}, "module:function, which builds the model"),
    ((build, "folders"), {}, "pass the model's folder"),
    ((build, "empty"), {}, r"needs the folder of its \*.ckpt files"),
    ((build,), {}, r"needs the folder of its \*.ckpt files"),
    (("model", "folders"), {"revisions": ["main"]}, "not both"),
    ((build, "own"), {}, r"values \([\w ]+\): .*add_safe_globals"),
    (("orphan",), {}, "does not say which model .*--checkpoints FOLDER"),
    ((transformer("gpt2"),), {}, "pass a function that builds it"),
    (("recipes.enwik8.train:none", "x"), {}, "cannot be imported"),
    (("math:pi", "x"), {}, "math:pi is not a function"),
    (("a",), {"text": __file__}, "not both"),
    *((("a",), {name: 0}, f"{name} must be a whole number")
      for name in ("tokens", "splits", "sequences", "length")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "words"), WRONG)
def test_bad_arguments_end_in_one_line(tmp_path, monkeypatch, arguments, options, words):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "files", "folders/checkpoint-1", "own", "orphan"):
        Path(name).mkdir(parents=True)
    Path("files/a.ckpt").touch()
    Path("folders/checkpoint-1/config.json").write_text("{}")
    Path("orphan/adapter_config.json").write_text("{}")
    torch.save({"global_step": 1, "hyper_parameters": Own()}, "own/a.ckpt")
    model, checkpoints = (*arguments, None)[:2]
    given = {"inputs": PROBE, "metrics": CHOSEN, "directory": "scan", **options}
    with pytest.raises(ValueError, match=words) as caught:
        scan(model, checkpoints=checkpoints, **given)
    assert "\n" not in str(caught.value)
    assert not Path("scan/readings.jsonl").exists()
