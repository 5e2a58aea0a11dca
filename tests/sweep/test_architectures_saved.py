"""Saved models of every kind read the batch that is given."""

import math

import pytest
import torch
import transformers as t

from geomon import scan, select
from geomon.sweep import trainer_checkpoints
from support.zoo import ZOO

CHOSEN = {"tokens": 48, "metrics": select("anisotropy", "qk_cosine")}

# Model and layers of each stack.
GIVEN = {
    "GPT-2": {"": 4},
    "ViT": {"": 4},
    "wav2vec 2.0": {"": 4},
    "Whisper": {"encoder": 3, "decoder": 4},
    "T5 (position bias)": {"encoder": 3, "decoder": 4},
    "ResNet": {"": 5},
}


def layers_are_measured(reading, stacks):
    assert (reading.step, reading.source, reading.mode) == (0, "probe", "eval")
    found = {stack: reading.stacks[stack]["anisotropy"].layers for stack in stacks}
    assert {stack: sum(map(math.isfinite, each)) for stack, each in found.items()} == stacks
    assert not any("checkpoint is left out" in note for note in reading.words())


@pytest.mark.parametrize("name", GIVEN)
def test_a_saved_model_reads_the_batch_that_is_given_and_the_reports_of_loads_stay(tmp_path, name):
    torch.manual_seed(0)
    ZOO[name].build("eager").save_pretrained(tmp_path / "model")
    reports = t.utils.logging
    shows = reports.is_progress_bar_enabled(), reports.get_verbosity()
    found = trainer_checkpoints(tmp_path / "model")
    (reading,) = scan(None, found, ZOO[name].inputs(), directory=tmp_path / "scan", **CHOSEN)
    layers_are_measured(reading, GIVEN[name])
    assert (reports.is_progress_bar_enabled(), reports.get_verbosity()) == shows
