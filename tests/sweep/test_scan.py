"""The sweep against live runs: equal values, going on, what fails, what is kept of it."""

import collections
import contextlib
import functools
import inspect
import json
import logging
import math
import shutil
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from geomon import Checkpoint, Memory, Monitor, every, read, scan, select
from geomon.lightning import GeometryMonitor
from geomon.monitor.options import MonitorOptions, declared
from geomon.sweep import hub_checkpoints, lightning_checkpoints, trainer_checkpoints
from support.models import batch, transformer

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


def build():
    return Decoder("gpt2", 50)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the recipe's model with a checkpoint at every second step, and its live record."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = build()
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
    scan_run(run, folder)
    return folder


def scan_run(run, folder, model=None, **options):
    found = lightning_checkpoints(run / "checkpoints")
    return scan(model or build(), found, directory=folder, **(SMALL | options))


def values(reading):
    """Values of the model as text, so that NaN equals NaN; a scan logs no training."""
    other = ("geomon/", "training/")
    return json.dumps({t: x for t, x in reading.values.items() if not t.startswith(other)})


def by_step(readings):
    return {reading.step: values(reading) for reading in readings}


def test_a_scan_equals_the_live_record_to_the_last_digit(run, scanned):
    live, found = read(run), read(scanned)
    assert [reading.step for reading in found] == list(STEPS)
    of_live = by_step(live)
    assert by_step(found) == {step: of_live[step] for step in STEPS}
    facts = [
        {tuple(getattr(each, name) for name in ("source", "mode", "tokens", "world_size", "dtype"))
         for each in readings} for readings in (found, live)
    ]  # fmt: skip
    assert facts[0] == facts[1]
    assert all(math.isnan(reading.overhead) for reading in found)  # it takes no time of a training
    for name in ("model", "parameters", "layers", "metrics", "tokens", "splits", "queries", "seed"):
        assert found.runs[0][name] == live.runs[0][name]


def test_a_folder_of_the_trainer_equals_the_live_record_of_the_model_with_its_head(tmp_path):
    model, probe = transformer("gpt2"), {"input_ids": PROBE % 50}
    monitor = Monitor(model, directory=tmp_path / "live", metrics=CHOSEN, tokens=192)
    for step in (0, 9, 10):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        monitor.probe(step, probe)
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
    monitor.close()
    checkpoints = trainer_checkpoints(tmp_path / "run")
    found = scan(None, checkpoints, directory=tmp_path / "scan", **(SMALL | {"inputs": probe}))
    assert by_step(found) == by_step(read(tmp_path / "live"))
    assert len({*by_step(found).values()}) == 3


@pytest.mark.parametrize("holds", [dict, transformer], ids=["state dicts", "models"])
def test_checkpoints_of_any_layout_are_read_in_the_order_of_their_steps(tmp_path, holds):
    """Each is a state dict or a model, and is loaded only when its turn comes."""
    model, probe, weights, loaded = transformer("gpt2"), {"input_ids": PROBE % 50}, {}, []
    monitor = Monitor(model, directory=tmp_path / "live", metrics=CHOSEN, tokens=192)
    for step in (3, 40):
        with torch.no_grad():
            model.transformer.wte.weight.mul_(1.5)
        weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
        monitor.probe(step, probe)
    monitor.close()

    def load(step):
        loaded.append(step)
        if holds is dict:
            return weights[step]
        other = transformer("gpt2")
        other.load_state_dict(weights[step])
        return other

    checkpoints = [Checkpoint(step, lambda step=step: load(step)) for step in (40, 3)]
    into = model if holds is dict else None
    found = scan(into, checkpoints, directory=tmp_path / "scan", **(SMALL | {"inputs": probe}))
    assert by_step(found) == by_step(read(tmp_path / "live"))
    assert loaded == [3, 40]


class _Adapted:
    """Adapter as in peft: weights that are added to a model's."""

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
    model, probe = transformer("gpt2"), {"input_ids": PROBE % 50}
    model.save_pretrained(tmp_path / "base")
    monitor = Monitor(model, tokens=192, directory=tmp_path / "live", metrics=CHOSEN)
    name, added = "transformer.h.0.attn.c_proj.weight", torch.randn(32, 32)
    with torch.no_grad():
        model.get_parameter(name).add_(added)
    monitor.probe(1, probe)
    monitor.close()
    for folder in ("checkpoint-1", "lost-step2"):
        path = tmp_path / "run" / folder
        path.mkdir(parents=True)
        named = json.dumps({"base_model_name_or_path": str(tmp_path / "base")})
        (path / "adapter_config.json").write_text(named)
        torch.save({name: added}, path / "adapter.pt")
    own = {**SMALL, "inputs": probe, "directory": tmp_path / "scan"}
    checkpoints = trainer_checkpoints(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"holds an adapter, which needs peft .* or merge it"):
        scan(None, checkpoints, **own)
    peft = types.ModuleType("peft")
    peft.__dict__.update(PeftModel=_Adapted, __spec__=ModuleSpec("peft", None))
    monkeypatch.setitem(sys.modules, "peft", peft)
    found = scan(None, checkpoints, **own)
    assert by_step(found) == by_step(read(tmp_path / "live"))
    assert "cannot be merged" in caplog.text  # left out, because nothing of it was loaded


@pytest.mark.parametrize("key", [None, "model", "model_state_dict", "optimizer"])
def test_a_file_of_a_loop_of_ones_own_is_read(key, tmp_path):
    weights, file = transformer("gpt2").state_dict(), tmp_path / "step7.pt"
    content = {} if key == "optimizer" else weights
    torch.save(weights if key is None else {key: content, "best": 0.5}, file)
    has_none = pytest.raises(ValueError, match=r"holds no weights \(optimizer, best\): expected a")
    with has_none if key == "optimizer" else contextlib.nullcontext():
        checkpoints = lightning_checkpoints(file)
        (found,) = scan(transformer("gpt2"), checkpoints, directory=tmp_path / "scan", **SMALL)
        assert found.step == 7


def test_revisions_of_a_model_on_the_hub_are_loaded_by_their_names(tmp_path, monkeypatch):
    """No network here: the hub's revisions are folders."""
    loaded, local, says = [], transformers.AutoModel.from_pretrained, transformers.utils.logging
    for number in (0, 5):
        model = transformer("gpt2")
        with torch.no_grad():
            model.transformer.wte.weight.mul_(1 + number)
        model.save_pretrained(tmp_path / f"step{number}")

    def from_hub(source, *, revision, **options):
        loaded.append((source, revision, options["trust_remote_code"]))
        assert (says.is_progress_bar_enabled(), says.get_verbosity()) == (False, logging.ERROR)
        return local(tmp_path / revision, **options)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_hub)
    checkpoints = hub_checkpoints("someone/model", ["step5", "step0", "step7"])
    own = SMALL | {"inputs": {"input_ids": PROBE % 50}, "directory": tmp_path / "scan"}
    found = by_step(scan(None, checkpoints, **own))
    assert loaded == [("someone/model", f"step{step}", False) for step in (0, 5, 7)]
    assert list(found) == [0, 5]
    assert found[0] != found[5]


class Stop(Memory):
    """A sink at which the scan is ended from outside, at its second reading."""

    def write(self, reading):
        super().write(reading)
        if len(self.readings) == 2:
            raise KeyboardInterrupt


def test_a_scan_that_was_ended_goes_on_where_it_was(run, scanned, tmp_path):
    shown, model = Memory(), build()
    with pytest.raises(KeyboardInterrupt):
        scan_run(run, tmp_path, model, sinks=[Stop()])
    assert [reading.step for reading in read(tmp_path)] == [2, 4]
    with (tmp_path / "readings.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "ti')  # a line that a kill has torn
    readings = scan_run(run, tmp_path, model, sinks=[shown])
    assert [reading.step for reading in shown.readings] == [6]
    assert (by_step(readings), readings.mixed_at) == (by_step(read(scanned)), None)
    assert len(scan_run(run, tmp_path, model)) == 3


def test_a_checkpoint_that_fails_is_named_left_out_and_tried_again(run, scanned, tmp_path, caplog):
    place = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", place)
    (broken,) = place.glob("*step=2.ckpt")
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    readings = scan_run(tmp_path, tmp_path / "scan")
    assert [reading.step for reading in readings] == [4, 6]
    words = "epoch=0-step=2.ckpt (step 2): "
    counts = [sum(words in note for note in reading.words()) for reading in readings]
    assert counts == [1, 0]
    (named,) = [x.getMessage() for x in caplog.records if words in x.getMessage()]
    assert "\n" not in named
    still_broken = scan_run(tmp_path, tmp_path / "scan")
    assert [reading.step for reading in still_broken] == [4, 6]
    broken.write_bytes(whole)
    again = scan_run(tmp_path, tmp_path / "scan")
    assert [reading.step for reading in again] == [2, 4, 6]
    assert (by_step(again), again.mixed_at) == (by_step(read(scanned)), None)


def fails(error):
    """A model whose pass raises an error."""

    def raises(*given, **options):
        raise error

    model = build()
    model.network.register_forward_pre_hook(raises)
    return model


def fails_once():
    """A model whose first pass alone fails."""
    model, errors = build(), [RuntimeError("no such pass")]

    def raises(*given, **options):
        if errors:
            raise errors.pop()

    model.network.register_forward_pre_hook(raises)
    return model


def test_a_checkpoint_that_fails_for_no_reason_that_is_found_again_is_left_out(run, tmp_path):
    readings = scan_run(run, tmp_path, fails_once())
    assert [reading.step for reading in readings] == [4, 6]
    left = "a checkpoint is left out: epoch=0-step=2.ckpt (step 2): it gave no reading"
    assert left in readings[0].words()


class Broken(Memory):
    closed = False

    def write(self, reading):
        raise OSError("gone")

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Decoder("gpt2", 49),
         r"no checkpoint.*step=2.*do not fit the model: .*and 2 more failed too"),
        (lambda: fails(IndexError("out of range in self")), "IndexError: .*; sequences may be"),
        (lambda: fails(RuntimeError("no\n such " * 50)),
         rf": RuntimeError: {('no such ' * 50)[:300]}, and 2 more failed too$"),
        (lambda: fails(ValueError("no such pass")), r"\(step 2\): no such pass, and 2 more"),
    ],
)  # fmt: skip
def test_if_every_checkpoint_fails_the_first_reason_is_the_error(run, tmp_path, model, words):
    sink = Broken()
    with pytest.raises(ValueError, match=words) as caught:
        scan_run(run, tmp_path, model(), sinks=[sink])
    assert sink.closed
    assert caught  # what it refers to does not hold the folder
    assert not (tmp_path / ".readings.lock").exists()


@pytest.mark.parametrize(
    ("model", "loaded", "words"),
    [
        (None, {}, r"loads a state dict, and there is no model for it: pass one, scan\(model"),
        (
            transformer("gpt2"),
            3,
            r"step 8: it loads a int: expected .* with weights$",
        ),
    ],
)
def test_a_checkpoint_must_load_weights(tmp_path, model, loaded, words):
    with pytest.raises(ValueError, match=words):
        scan(model, [Checkpoint(8, lambda: loaded)], directory=tmp_path, **SMALL)
    with pytest.raises(ValueError, match=r"no checkpoints: expected a Checkpoint\(step, load\)"):
        scan(model, [], directory=tmp_path, **SMALL)


def test_a_sink_that_fails_is_a_warning_and_the_record_goes_on(run, scanned, tmp_path, caplog):
    sink = Broken()
    readings = scan_run(run, tmp_path, sinks=[sink])
    assert sink.closed
    assert by_step(readings) == by_step(read(scanned))
    assert "the record goes on: OSError: gone" in caplog.text


OTHERS = [PROBE + 1, PROBE.int(), PROBE.view(torch.float64), PROBE.reshape(24, 16), [PROBE],
          {"tokens": PROBE}, {"input_ids": PROBE}, print, len]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [*(({"inputs": other}, "inputs") for other in OTHERS),
     ({"tokens": 191}, "tokens"), ({"splits": 2}, "splits"), ({"queries": None}, "queries"),
     ({"seed": 1}, "seed"), ({"metrics": select("anisotropy")}, "metrics"),
     ({"blocks": "network.*"}, "blocks"), ({"inputs": PROBE + 1, "seed": 1}, "inputs and seed")],
)  # fmt: skip
def test_another_scan_in_the_folder_is_refused(run, scanned, options, words):
    before = (scanned / "readings.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"holds a scan with other {words}: choose another"):
        scan_run(run, scanned, **options)
    assert (scanned / "readings.jsonl").read_bytes() == before


def test_the_folder_of_the_same_scan_or_of_nothing_is_taken_and_of_a_training_refused(
    run, scanned, tmp_path
):
    assert len(scan_run(run, scanned, inputs=PROBE.t().contiguous().t())) == 3
    (tmp_path / "readings.jsonl").touch()  # of a run that has read nothing: anybody's
    assert len(scan_run(run, tmp_path)) == 3
    live = (run / "readings.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds the record of a training"):
        scan_run(run, run)
    assert (run / "readings.jsonl").read_bytes() == live


def first_rows(model, count):
    model(PROBE[:count] % 50)


def last_rows(model):
    model(PROBE[-8:] % 50)


# Inputs of a scan; the same as they may come again; others.
AGAIN = [
    ({"input_ids": PROBE % 50}, collections.UserDict(input_ids=PROBE % 50), {"x": PROBE % 50}),
    (last_rows, last_rows, first_rows),
    (functools.partial(first_rows, count=8), functools.partial(first_rows, count=8), last_rows),
]


@pytest.mark.parametrize(("inputs", "same", "other"), AGAIN, ids=["dict", "function", "partial"])
def test_a_scan_knows_its_inputs_again(tmp_path, inputs, same, other):
    model, own = transformer("gpt2"), SMALL | {"directory": tmp_path, "tokens": 48}
    own["metrics"] = select("anisotropy")
    there = [Checkpoint(step, model.state_dict) for step in (1, 2)]
    before = scan(model, there[:1], **(own | {"inputs": inputs}))
    after = scan(model, there, **(own | {"inputs": same}))
    assert [reading.step for reading in after] == [1, 2]
    assert values(after[0]) == values(after[1]) == values(before[0])
    with pytest.raises(ValueError, match="a scan with other inputs: choose"):
        scan(model, there, **(own | {"inputs": other}))


def test_the_record_of_another_model_is_not_gone_on_with(tmp_path):
    """A long name keeps its end, which tells folders of one place apart."""
    model, own = transformer("gpt2"), SMALL | {"directory": tmp_path, "tokens": 48}
    own |= {"metrics": select("anisotropy"), "inputs": {"input_ids": PROBE % 50}}
    name = "/place" * 50
    (found,) = scan(model, [Checkpoint(1, model.state_dict, source=name)], **own).runs
    assert found["training/scan/source"] == name[-200:]
    for source in (f"{name}1", ""):
        with pytest.raises(ValueError, match="a scan with other source: choose"):
            scan(model, [Checkpoint(1, model.state_dict, source=source)], **own)


def test_warnings_of_the_same_kind_come_once_and_nothing_stays(run, tmp_path, caplog):
    model = build()
    filters, state = list(logging.getLogger("geomon").filters), torch.get_rng_state()
    scan_run(run, tmp_path, model, tokens=4096)
    for kind in ("only 384 rows here", "an extra pass of the model was made"):
        assert caplog.text.count(kind) == 1, kind
    assert logging.getLogger("geomon").filters == filters
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["tokens", "splits"])
def test_sizes_are_whole_numbers_which_is_looked_at_before_anything_is_loaded(tmp_path, name):
    loaded = []
    checkpoints = [Checkpoint(3, lambda: loaded.append(3))]
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        scan(None, checkpoints, **SMALL | {"directory": tmp_path / "scan", name: 0})
    assert not loaded
    assert not (tmp_path / "scan").exists()


def test_a_scan_measures_as_a_monitor_does_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, inputs = transformer("gpt2").train(), {"input_ids": PROBE[:2] % 50}
    weights = {step: {n: w * step for n, w in model.state_dict().items()} for step in (2, 1)}
    kept = model.transformer.wte.weight
    there = [Checkpoint(n, lambda n=n: weights[n]) for n in weights]
    found = scan(model, there, inputs, metrics=select("anisotropy"))
    assert torch.equal(kept, weights[2]["transformer.wte.weight"])
    assert not model.training
    assert [reading.step for reading in read("scan")] == [1, 2] == [x.step for x in found]
    assert all(math.isnan(reading.overhead) for reading in found)
    expected = {"tokens": 4096, "splits": 1, "queries": 1024, "seed": 0}
    assert {name: found.runs[0][name] for name in expected} == expected
    assert found.runs[0]["schedule"] == "every(steps=1)"
    of_scan = inspect.signature(scan).parameters
    options = declared(MonitorOptions)
    shared = of_scan.keys() & options.keys() - {"directory", "device"}
    assert shared == {"metrics", "tokens", "splits", "queries", "seed", "blocks", "sinks"}
    for name in shared:
        assert of_scan[name].default == options[name].default
