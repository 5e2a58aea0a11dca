"""Which checkpoints a folder holds: their steps, their order, and the model of an adapter."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geomon.sweep import Checkpoint, find_checkpoints

ADAPTER = {"adapter_config.json": '{"base_model_name_or_path": "the/model"}'}
MODEL = {"config.json": "{}"}
MERGED = MODEL | ADAPTER | {"model.safetensors": ""}


def model_at(step):
    """A model with the step of the training that saved it."""
    return MODEL | {"trainer_state.json": json.dumps({"global_step": step})}


def build(**settings):
    raise AssertionError("only asked for its checkpoints")


def lay(**paths):
    """Files by path; a number is the step of a file of Lightning."""
    for path, content in paths.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            torch.save({"global_step": content, "state_dict": {}}, path)
        else:
            Path(path).write_text(content)


def folders(**named):
    return {f"{name}/{file}": text for name, files in named.items() for file, text in files.items()}


TRAINER = folders(**{
    "r/checkpoint-10": MODEL, "r/checkpoint-9": MODEL, "r/best": model_at(4), "r/runs": {"x": ""},
    "r/checkpoint-7": model_at(8),  # what the training says counts, not the name
})  # fmt: skip
OF_TRAINER = [("best", 4), ("checkpoint-7", 8), ("checkpoint-9", 9), ("checkpoint-10", 10)]
# A model, and a checkpoint of the training that ended with it.
ENDED = folders(**{"model": MODEL, "model/checkpoint-7": MODEL, "checkpoint-70": MODEL})
LIGHTNING = {"r/a.ckpt": 30, "r/b.ckpt": 4, "r/last.ckpt": 30}  # one of two equal ones is taken
TORN = LIGHTNING | {"r/epoch=0-step=7.ckpt": "torn"}
# Files; arguments; names and steps.
FOUND = [
    (TRAINER, ("r",), OF_TRAINER), (TRAINER, ("model", "r"), OF_TRAINER),
    (folders(**{f"r/{name}": MODEL for name in ("epoch-10", "epoch-9", "best")}), ("r",),
     [("best", 0), ("epoch-9", 1), ("epoch-10", 2)]),
    (ENDED, ("model",), [("model", 0)]), (ENDED, ("checkpoint-70",), [("checkpoint-70", 70)]),
    (LIGHTNING, (build, "r"), [("b.ckpt", 4), ("a.ckpt", 30)]),
    (LIGHTNING, (build, "r/b.ckpt"), [("b.ckpt", 4)]),
    (TORN, (build, "r"), [("b.ckpt", 4), ("epoch=0-step=7.ckpt", 7), ("a.ckpt", 30)]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "arguments", "expected"), FOUND)
def test_checkpoints_have_their_steps_and_their_order(
    files, arguments, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lay(**files)
    source, *folder = arguments
    checkpoints, notes = find_checkpoints(source, *map(Path, folder))
    assert [(each.name, each.step) for each in checkpoints] == expected
    # Where no name says a step, all are numbered, and it is said.
    assert len(notes) == ("epoch-9" in dict(expected))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_revisions_are_ordered_by_the_number_in_their_name(steps):
    names = [f"step{step}" for step in steps]
    checkpoints, notes = find_checkpoints("someone/model", None, names)
    assert notes == []
    assert [(each.step, each.revision, each.source) for each in checkpoints] == [
        (step, f"step{step}", "someone/model") for step in sorted(set(steps))
    ]


def test_where_one_names_no_step_all_are_numbered_and_it_is_said():
    names = ["step1000", "main"]
    checkpoints, (note,) = find_checkpoints("someone/model", None, names)
    assert [(each.name, each.step) for each in checkpoints] == [("step1000", 0), ("main", 1)]
    assert note.endswith("the step is unknown for 1 of 2, such as main")


@pytest.mark.parametrize(
    ("source", "name", "step"), [("gpt2",) * 2 + (0,), ("a/step3", "step3", 3)]
)
def test_a_model_alone_needs_no_step(source, name, step):
    assert find_checkpoints(source) == ([Checkpoint(name, step, source)], [])


# A run of adapters: the last one, which a Trainer leaves beside its checkpoints, and two of these.
ADAPTERS = folders(**{
    "run": ADAPTER, "run/checkpoint-20": ADAPTER, "run/checkpoint-3": ADAPTER,
    "unfinished/checkpoint-5": ADAPTER, "whole": MODEL, "merged/checkpoint-4": MERGED,
})  # fmt: skip
OWN = [(3, "the/model"), (20, "the/model")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run",), OWN), (("run", "run"), OWN), (("run/checkpoint-3",), OWN[:1]),
        (("run/checkpoint-3", "run"), OWN), (("unfinished",), [(5, "the/model")]),
        (("other", "run"), [(3, "other"), (20, "other")]),
        (("other", "run/checkpoint-20"), [(20, "other")]),
        (("whole",), [(0, None)]), (("merged",), [(4, None)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"run/config.json": ""}])  # an adapter all the same
def test_adapters_are_checkpoints_of_the_model_that_they_or_the_caller_name(
    arguments, expected, more, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lay(**ADAPTERS, **more)
    source, *folder = arguments
    checkpoints, _ = find_checkpoints(source, *map(Path, folder))
    assert [(each.step, each.base) for each in checkpoints] == expected
