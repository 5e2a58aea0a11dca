import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from geomon.sweep import Checkpoint, find_checkpoints


def folder_of(path, step=None):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if step is not None:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def build(**settings):
    raise AssertionError("only asked for its checkpoints")


def found(*arguments):
    checkpoints, notes = find_checkpoints(*arguments)
    return [(one.name, one.step) for one in checkpoints], notes


def test_folders_of_the_trainer_are_ordered_by_their_steps(tmp_path):
    folder_of(tmp_path / "checkpoint-10")
    folder_of(tmp_path / "checkpoint-9")
    folder_of(tmp_path / "best", step=4)
    folder_of(tmp_path / "checkpoint-7", step=8)  # what the training says counts, not the name
    (tmp_path / "runs").mkdir()
    expected = [("best", 4), ("checkpoint-7", 8), ("checkpoint-9", 9), ("checkpoint-10", 10)]
    assert found(str(tmp_path)) == (expected, [])
    assert found("model", tmp_path) == (expected, [])


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_revisions_are_ordered_by_the_number_in_their_name(steps):
    names = [f"step{step}" for step in steps]
    checkpoints, notes = find_checkpoints("someone/model", None, names)
    assert [one.step for one in checkpoints] == sorted(set(steps))
    assert all(one.revision == f"step{one.step}" for one in checkpoints)
    assert all(one.source == "someone/model" for one in checkpoints)
    assert notes == []


def test_where_one_names_no_step_all_are_numbered_and_it_is_said():
    names = ["step1000", "step2000", "main"]
    expected = [("step1000", 0), ("step2000", 1), ("main", 2)]
    checkpoints, notes = found("someone/model", None, names)
    assert checkpoints == expected
    assert len(notes) == 1
    assert notes[0].endswith("the step is unknown for 1 of 3, such as main")


def test_folders_without_steps_are_in_the_order_of_the_numbers_in_their_names(tmp_path):
    for name in ("epoch-10", "epoch-9", "best"):
        folder_of(tmp_path / name)
    assert found(tmp_path)[0] == [("best", 0), ("epoch-9", 1), ("epoch-10", 2)]


def test_a_model_alone_needs_no_step(tmp_path):
    folder_of(tmp_path / "model")
    folder_of(tmp_path / "model" / "checkpoint-7")  # of the training that ended with the model
    assert found(tmp_path / "model") == ([("model", 0)], [])
    folder_of(tmp_path / "checkpoint-70")
    assert found(tmp_path / "checkpoint-70") == ([("checkpoint-70", 70)], [])
    assert find_checkpoints("gpt2") == ([Checkpoint("gpt2", 0, "gpt2")], [])
    assert find_checkpoints("a/step3") == ([Checkpoint("step3", 3, "a/step3")], [])


def test_files_of_lightning_know_their_steps_and_one_of_two_equal_ones_is_taken(tmp_path):
    for name, step in (("a.ckpt", 30), ("b.ckpt", 4), ("last.ckpt", 30)):
        torch.save({"global_step": step, "state_dict": {}}, tmp_path / name)
    assert found(build, tmp_path) == ([("b.ckpt", 4), ("a.ckpt", 30)], [])
    assert found(build, tmp_path / "b.ckpt") == ([("b.ckpt", 4)], [])
    (tmp_path / "epoch=0-step=7.ckpt").write_bytes(b"torn")
    names = [("b.ckpt", 4), ("epoch=0-step=7.ckpt", 7), ("a.ckpt", 30)]
    assert found(build, tmp_path) == (names, [])


def adapter_of(path):
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "the/model"}')


def test_adapters_are_checkpoints_of_the_model_that_they_or_the_caller_name(tmp_path):
    run = tmp_path / "run"
    adapter_of(run)  # the last adapter, which a Trainer leaves beside its checkpoints
    for step in (20, 3):
        adapter_of(run / f"checkpoint-{step}")

    def bases(*arguments):
        return [(one.step, one.base) for one in find_checkpoints(*arguments)[0]]

    assert bases(str(run)) == [(3, "the/model"), (20, "the/model")]
    assert bases(str(run), run) == [(3, "the/model"), (20, "the/model")]
    assert bases(str(run / "checkpoint-3")) == [(3, "the/model")]
    assert bases(str(run / "checkpoint-3"), run) == [(3, "the/model"), (20, "the/model")]
    (run / "config.json").touch()  # an adapter all the same
    assert bases(str(run)) == [(3, "the/model"), (20, "the/model")]
    adapter_of(tmp_path / "unfinished" / "checkpoint-5")
    assert bases(str(tmp_path / "unfinished")) == [(5, "the/model")]
    assert bases("other", run) == [(3, "other"), (20, "other")]
    assert bases("other", run / "checkpoint-20") == [(20, "other")]
    folder_of(tmp_path / "whole")
    assert bases(str(tmp_path / "whole")) == [(0, None)]
    adapter_of(tmp_path / "merged" / "checkpoint-4")
    (tmp_path / "merged" / "checkpoint-4" / "model.safetensors").touch()
    (tmp_path / "merged" / "checkpoint-4" / "config.json").touch()
    assert bases(str(tmp_path / "merged")) == [(4, None)]
