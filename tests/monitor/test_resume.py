"""A training that is cut and goes on, in every loop."""

import itertools
import re

import loops
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import LOOPS, Learner, in_lightning
from models import PlainDecoder, batch

from geomon import Monitor, every, read, select
from geomon.analysis import summarise

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
@pytest.mark.parametrize("loop", LOOPS)
def test_after_a_cut_record_and_weights_are_those_of_a_run_without_one(
    tmp_path, monkeypatch, loop, probe
):
    """Without dropout, on one batch again and again: nothing of the cut is left in the weights."""
    monkeypatch.setattr(loops, "ROWS", batch(8, 32, seed=0).repeat(24, 1))
    options, states = {**FEW, "schedule": every(2), "probe": probe}, {}

    def run(name, steps, **resume):
        torch.manual_seed(0)
        learner, folder = Learner(PlainDecoder()), tmp_path / name
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
        told = {
            "lightning": {"callbacks": [keep]}, "plain": {"states": states},
            "huggingface": {"save_strategy": "steps", "save_steps": 4},
        }  # fmt: skip
        LOOPS[loop](learner, options, folder, steps=steps, **told[loop] | resume)
        return learner, read(folder)

    whole, expected = run("whole", 9)
    _, first = run("cut", 7)
    checkpoint = {
        "lightning": tmp_path / "cut" / "step=4.ckpt", "plain": 4,
        "huggingface": str(tmp_path / "cut" / "checkpoint-4"),
    }  # fmt: skip
    if loop == "lightning":
        saved = torch.load(checkpoint[loop], weights_only=True)
        assert not any("Geometry" in key for key in saved["callbacks"])
        assert saved["geomon"]["geomon/variance"] in first["variance/mean"].values
    if loop == "huggingface":
        state = (tmp_path / "cut" / "checkpoint-4" / "trainer_state.json").read_text()
        assert "geomon" not in state
    resumed, found = run("cut", 9, resume=checkpoint[loop])
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert [run.get("rewound_to") for run in found.runs] == [None, 4]
    assert [reading.step for reading in found] == [reading.step for reading in expected]
    assert [reading.step for reading in found.abandoned] == [
        reading.step for reading in first if reading.step >= 4
    ]
    assert (found.mixed_at, expected[-1].step) == (
        None,
        9 if probe is not None and loop != "plain" else 8,
    )
    for one, other in zip(found, expected, strict=True):
        for tag, value in other.values.items():
            if not tag.startswith(("geomon/", "training/")):
                assert one.values[tag] == pytest.approx(value, rel=0, abs=0, nan_ok=True), tag
    moved = [reading.values["variance/mean"] for reading in expected]
    assert len(set(moved)) == len(moved)  # a curve that stands still would prove nothing


SETTINGS = {
    "tokens": ({"tokens": 32}, "tokens 32 instead of 64"),
    "splits": ({"splits": 2}, "splits 2 instead of 1"),
    "queries": ({"queries": 16}, "queries 16 instead of None"),
    "seed": ({"seed": 5}, "seed 5 instead of 0"),
    "probe": ({"probe": batch(8, 32)}, "probe inputs .{8} instead of the training forward"),
    "a loader": ({"probe": iter([batch(8, 32)])}, "probe batches of a loader instead of"),
    "metrics": ({"metrics": ["variance", "drift_norm"]}, "without qk_cosine, with drift_norm"),
    "layers": ({"extra": 2}, "layers 4 instead of 2"),
    "two of them": ({"tokens": 32, "seed": 5}, "tokens 32 .*, seed 5 instead of 0"),
    "the same": ({}, None),
    "what no value depends on": (
        {"schedule": 2, "alerts": (), "settings": {"learning_rate": 0.1}, "arrays": False}, None,
    ),
}  # fmt: skip


def read_steps(directory, *steps, extra=0, **options):
    torch.manual_seed(0)
    model = PlainDecoder(layers=2 + extra)
    given = {"metrics": ["variance", "qk_cosine"], "tokens": 64, "queries": None, "schedule": 1}
    with Monitor(model, directory=directory, checks=None, **given | options) as monitor:
        for step in steps:
            with monitor(step):
                model(batch(8, 32))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_that_reads_otherwise_is_said_at_once_and_marked_in_the_record(
    tmp_path, caplog, name
):
    changed, words = SETTINGS[name]
    read_steps(tmp_path, 0, 2)
    caplog.clear()
    read_steps(tmp_path, 4, 6, **changed)
    found = read(tmp_path)
    told = [note.kind for reading in found for note in reading.notes].count("other settings")
    assert [step for step, _ in found.breaks] == [4] * (words is not None)
    assert told == len(found.breaks) == len([r for r in caplog.records if "break" in r.message])
    for _, sentence in found.breaks:
        assert re.search(rf"^From step 4 on, .* \({words}.*\): its curves have a break", sentence)
        assert sentence in caplog.text
        assert sentence in summarise(found)
        assert "other settings" in [note.kind for note in found[2].notes]


def test_other_inputs_of_a_probe_are_a_break_and_equal_ones_are_none(tmp_path):
    for number, seed in enumerate((0, 0, 1)):
        read_steps(tmp_path, number, probe={"ids": batch(8, 32, seed=seed)})
    assert [step for step, _ in read(tmp_path).breaks] == [2]


def test_a_branch_that_was_given_up_leaves_no_break(tmp_path):
    """Tokens were changed at step 4; then training went back to step 2, with the first ones."""
    read_steps(tmp_path, 0, 2, 4)
    read_steps(tmp_path, 4, 6, tokens=32)
    read_steps(tmp_path, 2, 8)
    assert read(tmp_path).breaks == []


@pytest.mark.parametrize("tokens", [64, 32])
def test_phases_start_afresh_at_a_break(tmp_path, tokens):
    """Three times the dimension is a change only if the same rows are measured."""
    phases = []
    for first, dimension, rows in ((0, 2.0, 64), (4, 6.0, tokens)):
        calls = itertools.count()

        def twonn(hidden, dimension=dimension, calls=calls):
            call = next(calls) % 9  # of all sequences, and without each eighth of them
            return dimension + (0.02 * (-1) ** call if call else 0.0)

        read_steps(
            tmp_path, *range(first, first + 4), metrics={"twonn": twonn}, tokens=rows,
            on_phase=lambda phase: phases.append(phase.name),
        )  # fmt: skip
    assert ("expanding" in phases) == (tokens == 64)
