"""The checkpoints that a folder holds: their steps, their order, and the model of an adapter."""

import dataclasses
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from geomon.sweep import hub_checkpoints, lightning_checkpoints, trainer_checkpoints

ADAPTER = {"adapter_config.json": '{"base_model_name_or_path": "the/model"}'}
MODEL = {"config.json": "{}"}
MERGED = MODEL | ADAPTER | {"model.safetensors": ""}


def model_at(step):
    """A model with the step of the training that saved it."""
    return MODEL | {"trainer_state.json": json.dumps({"global_step": step})}


def lay(**paths):
    """Files by path; a number, or a tensor of one, is the step of a file of Lightning."""
    for path, content in paths.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int | torch.Tensor):
            torch.save({"global_step": content, "state_dict": {}}, path)
        else:
            Path(path).write_text(content)


def folders(**named):
    return {f"{name}/{file}": text for name, files in named.items() for file, text in files.items()}


# The training's own word counts, not the name; if it says nothing, the name does.
TRAINER = folders(**{
    "r/checkpoint-10": MODEL, "r/checkpoint-9": MODEL, "r/best": model_at(4.0), "r/runs": {"x": ""},
    "r/checkpoint-7": model_at(8), "r/step_11": model_at(None), "r/Step=012": MODEL,
    "r/checkpoint-0": MODEL | {"trainer_state.json": "{"},
    "r/step-13": MODEL | {"trainer_state.json": "[]"}, "r/a": model_at(14), "r/b": model_at(14),
    "r/d": model_at(15), "r/c": model_at(15), "r/step9-step16": MODEL,
})  # fmt: skip
OF_TRAINER = [
    ("checkpoint-0", 0), ("best", 4), ("checkpoint-7", 8), ("checkpoint-9", 9),
    ("checkpoint-10", 10), ("step_11", 11), ("Step=012", 12), ("step-13", 13), ("a", 14),
    ("c", 15), ("step9-step16", 16),
]  # fmt: skip
# A model, and a checkpoint of the training that ended with it.
ENDED = folders(**{"model": MODEL, "model/checkpoint-7": MODEL, "checkpoint-70": MODEL})
# One of two with the same step is taken, whichever was written first.
LIGHTNING = {"r/a.ckpt": 30, "r/b.ckpt": 4, "r/last.ckpt": 30, "r/e.ckpt": torch.tensor(50),
             "r/d.ckpt": 50}  # fmt: skip
TORN = LIGHTNING | {"r/epoch=0-step=7.ckpt": "torn"}
# Files; function and folder; names and steps.
FOUND = [
    (TRAINER, trainer_checkpoints, "r", OF_TRAINER),
    (ENDED, trainer_checkpoints, "model", [("model", 0)]),
    (ENDED, trainer_checkpoints, "checkpoint-70", [("checkpoint-70", 70)]),
    (LIGHTNING, lightning_checkpoints, "r", [("b.ckpt", 4), ("a.ckpt", 30), ("d.ckpt", 50)]),
    (LIGHTNING, lightning_checkpoints, "r/e.ckpt", [("e.ckpt", 50)]),
    (LIGHTNING, lightning_checkpoints, "r/b.ckpt", [("b.ckpt", 4)]),
    (TORN, lightning_checkpoints, "r",
     [("b.ckpt", 4), ("epoch=0-step=7.ckpt", 7), ("a.ckpt", 30), ("d.ckpt", 50)]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "find", "folder", "expected"), FOUND)
def test_checkpoints_have_their_steps_and_their_order(
    files, find, folder, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lay(**files)
    found = find(folder)
    assert [(each.name, each.step) for each in found] == expected
    assert {type(each.step) for each in found} == {int}
    assert {each.source for each in found} == {str(tmp_path / folder)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].step = 3


@pytest.mark.parametrize("find", [trainer_checkpoints, lightning_checkpoints])
@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_checkpoints_is_refused(find, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^no .*(checkpoints|files) in .*: expected the"):
        find(tmp_path / folder)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_revisions_are_ordered_by_the_number_in_their_name(steps):
    found = hub_checkpoints("someone/model", [f"step{step}" for step in steps])
    assert [(each.step, each.name, each.source) for each in found] == [
        (step, f"step{step}", "someone/model") for step in sorted(set(steps))
    ]


def test_one_of_several_without_a_step_is_refused_and_one_alone_is_at_step_0(tmp_path):
    words = r"step of main is unknown: .* pass a Checkpoint\(step, load\)"
    for revisions in (["step1000", "main"], ["main", "step0"], ["main", "step1000", "step2"]):
        with pytest.raises(ValueError, match=words):
            hub_checkpoints("someone/model", revisions)
    for revisions in (["step5", "step0"], ["step5", "step0", "step1"]):
        found = [each.name for each in hub_checkpoints("someone/model", revisions)]
        assert found == sorted(revisions)
    assert [(each.name, each.step) for each in hub_checkpoints("gpt2")] == [("main", 0)]


# A run of adapters: the last one, which a Trainer leaves beside its checkpoints, and two of these.
ADAPTERS = folders(**{
    "run": ADAPTER, "run/checkpoint-20": ADAPTER, "run/checkpoint-3": ADAPTER,
    "unfinished/checkpoint-5": ADAPTER, "whole": MODEL, "merged/checkpoint-4": MERGED,
})  # fmt: skip
OWN = [(3, "the/model"), (20, "the/model")]


@pytest.mark.parametrize(
    ("folder", "base", "expected"),
    [
        ("run", None, OWN), ("run/checkpoint-3", None, OWN[:1]),
        ("unfinished", None, [(5, "the/model")]), ("run", "other", [(3, "other"), (20, "other")]),
        ("run/checkpoint-20", Path("other"), [(20, "other")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"run/config.json": ""}])  # an adapter all the same
def test_adapters_are_merged_with_the_model_that_they_or_the_caller_name(
    folder, base, expected, more, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lay(**ADAPTERS, **more)
    merged = []
    peft = types.ModuleType("peft")
    peft.__dict__["PeftModel"] = Adapted
    monkeypatch.setitem(sys.modules, "peft", peft)
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained",
        lambda name, **options: merged.append(name) or types.SimpleNamespace(architectures=[]),
    )  # fmt: skip
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda name: name)
    found = trainer_checkpoints(folder, base)
    assert [str(each.load()) for each in found] == [f"merged {name}" for _, name in expected]
    assert [*zip([each.step for each in found], merged, strict=True)] == expected


class Adapted:
    """An adapter that only says which model it was merged with."""

    @classmethod
    def from_pretrained(cls, model, folder):
        assert isinstance(folder, str)
        merged = types.SimpleNamespace(base_model=f"merged {model}")
        return types.SimpleNamespace(merge_and_unload=lambda: merged)


def test_a_whole_model_beside_an_adapter_is_read_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay(**ADAPTERS)
    loaded = []

    def load(source, **options):
        loaded.append((source, options["revision"], options["trust_remote_code"]))
        return "model", {"missing_keys": []}

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", load)
    for folder in ("whole", "merged"):
        (found,) = trainer_checkpoints(folder)
        assert found.load() == "model"
    assert loaded == [(name, "main", False) for name in ("whole", "merged/checkpoint-4")]


OWN_CODE = "open('has_run', 'w').close(); from transformers import * ; "
OWN_CODE += "Own = PreTrainedModel; OwnConfig = PretrainedConfig"


@pytest.mark.parametrize("is_adapter", [False, True])
def test_code_beside_a_model_is_not_run(is_adapter, tmp_path, monkeypatch):
    """A checkpoint from elsewhere may bring code along."""
    monkeypatch.chdir(tmp_path)
    peft = types.ModuleType("peft")
    peft.__dict__.update(PeftModel=Adapted, __spec__=ModuleSpec("peft", None))
    monkeypatch.setitem(sys.modules, "peft", peft)
    names = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.Own"}
    config = json.dumps({"model_type": "own", "auto_map": names})
    adapter = {"adapter_config.json": json.dumps({"base_model_name_or_path": "model"})}
    lay(**folders(model={"config.json": config, "own.py": OWN_CODE}, adapter=adapter))
    (found,) = trainer_checkpoints("adapter" if is_adapter else "model")
    with pytest.raises(ValueError, match="custom code"):
        found.load()
    assert not Path("has_run").exists()


def test_weights_that_are_missing_are_no_random_ones(tmp_path):
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=12,
    )  # fmt: skip
    model = transformers.BertModel(config)
    block, weights = "encoder.layer.0.output.dense", model.state_dict()
    del weights["pooler.dense.weight"]  # a head
    some = {name: weight for name, weight in weights.items() if not name.startswith(block)}
    model.save_pretrained(tmp_path, state_dict=weights)
    (found,) = trainer_checkpoints(tmp_path)
    found.load()
    model.save_pretrained(tmp_path, state_dict=some)
    with pytest.raises(ValueError, match=r"lacks 2 of .* BertModel, such as .*output\.dense\.bias"):
        found.load()
