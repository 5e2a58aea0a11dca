"""The loss on a probe's inputs, of the same pass as the geometry."""

import logging
import math

import pytest
import torch
from torch.utils.data import DataLoader

from geomon import read
from geomon.huggingface import GeometryMonitor as OfTrainer
from geomon.lightning import GeometryMonitor as OfLightning
from support.fingerprint import fingerprint, random_state
from support.loops import Learner
from support.measuring import watching
from support.models import batch

ROWS = torch.cat([batch(5, 16, seed=seed) for seed in range(4)])
TAG = "training/probe_loss"


def own_loss(outputs, inputs):
    return outputs["loss"]


def loss_of(outputs, ids):
    """The inputs are given as they were."""
    assert ids.shape[1:] == ROWS.shape[1:]
    return outputs["loss"]


@pytest.fixture
def model():
    with torch.random.fork_rng():
        return Learner()


@pytest.fixture
def expected(model):
    with torch.no_grad():
        return float(model.eval()(ROWS)["loss"])


def readings_of(model, steps=1, **options):
    monitor, memory = watching(model, **options)
    with monitor:
        for step in range(steps):
            with monitor(step):
                pass
    return list(memory.readings)


@pytest.mark.parametrize(
    ("probe", "function"),
    [
        (ROWS, loss_of),
        ((ROWS,), lambda outputs, inputs: loss_of(outputs, *inputs)),
        ({"ids": ROWS}, lambda outputs, inputs: loss_of(outputs, inputs["ids"])),
        (lambda model: model(ROWS), own_loss),
        (iter([{"ids": ROWS, "name": ["x"]}]), own_loss),
        ([ROWS, ROWS], lambda outputs, inputs: float(loss_of(outputs, inputs[0]))),
        (DataLoader(ROWS, batch_size=7), loss_of),  # 7, 7 and 6: weighted as trainers do
    ],
    ids=["tensor", "tuple", "dict", "function", "loader", "list", "ragged"],
)
def test_every_kind_of_inputs_has_its_loss_in_the_record(
    model, expected, tmp_path, probe, function
):
    readings_of(model, 2, probe=probe, probe_loss=function, directory=tmp_path, tokens=10_000)
    assert [r.values[TAG] for r in read(tmp_path)] == [pytest.approx(expected, rel=1e-5)] * 2


def test_without_the_option_nothing_is_added_and_with_it_no_other_value_changes(model):
    (without,), (plain,) = (readings_of(model, probe=ROWS, probe_loss=f) for f in (None, loss_of))
    assert plain.values.keys() - without.values.keys() == {TAG}
    for tag, value in without.values.items():
        if not tag.startswith("geomon/"):
            assert plain.values[tag] == value


def test_the_loss_is_computed_as_the_pass_is_and_nothing_is_changed(model):
    model.train()
    model.net.blocks[1].eval()  # frozen by its owner
    seen = []

    def random_loss(outputs, ids):
        hooks = [hook for module in model.modules() for hook in module._forward_hooks]
        seen.append((model.training, torch.is_grad_enabled(), hooks))
        return torch.rand(())

    before, random = fingerprint(model), random_state()
    readings_of(model, 2, probe=ROWS, probe_loss=random_loss)
    assert seen == [(False, False, [])] * 2
    assert fingerprint(model) == before
    assert random_state() == random


@pytest.mark.parametrize(
    "function",
    [lambda o, i: o["no"], lambda o, i: None, lambda o, i: "1", lambda o, i: o["loss"].expand(2)],
    ids=["raises", "nothing", "text", "several"],
)
def test_a_loss_that_fails_is_one_warning_and_a_reading_without_it(model, caplog, function):
    with caplog.at_level(logging.WARNING, "geomon"):
        found = readings_of(model, 3, probe=ROWS, probe_loss=function, strict=False)
    assert len(found) == 3
    assert all(math.isnan(reading.values[TAG]) for reading in found)
    assert all(reading.values["variance/mean"] > 0 for reading in found)
    (said,) = [text for text in caplog.messages if "extra pass" not in text]
    assert said.startswith("probe_loss failed")
    assert "\n" not in said
    with pytest.raises(Exception, match=r"no|expected a number or a tensor of one"):
        readings_of(model, probe=ROWS, probe_loss=function)


@pytest.mark.parametrize("of_callback", [OfLightning, OfTrainer])
def test_a_loss_that_no_pass_is_made_for_is_an_error(of_callback):
    with pytest.raises(ValueError, match="pass probe='validation', or inputs") as error:
        of_callback(probe_loss=loss_of)
    assert "\n" not in str(error.value)
    of_callback(probe="validation", probe_loss=loss_of)
    with pytest.raises(TypeError, match="lambda outputs, batch: outputs"):
        of_callback(probe="validation", probe_loss="loss")
