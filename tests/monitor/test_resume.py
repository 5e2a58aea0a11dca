"""A training that is cut and goes on, in every loop."""

import loops
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import LOOPS, Learner, in_lightning
from models import PlainDecoder, batch

from geomon import every, read, select

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
