"""Readings of a probe compared with the ones before, against neighbours found by brute force."""

import math

import pytest
import torch
from definitions import overlap
from measuring import seen
from models import PlainDecoder, batch
from plain_models import vision_transformer
from samples import normal

from geomon import Memory, Monitor, geometry, measure, select
from geomon.capture.snapshot import Layer
from geomon.distributed.packing import pack, unpack
from geomon.metrics import Evaluator
from geomon.metrics.between_readings import INLINE, EarlierReading

NAME = "neighbour_overlap_in_time"
OVERLAP = select(NAME)


def made(rows, index=1, stack="", **more):
    labels = {"token_ids": torch.arange(len(rows)) % 7, "positions": torch.arange(len(rows))}
    return Layer(index, f"{stack}.{index}", {"hidden": rows, **labels, **more}, stack=stack)


def compared(before, after, **more):
    """Values and notes of a reading after another one, each a list of layers."""
    evaluator = Evaluator(OVERLAP, 1)
    measured = [[evaluator.measure_layer(one, 300) for one in layers] for layers in (before, after)]
    measured = unpack(pack(measured))  # as by another rank
    kept = evaluator.keep_for_next(measured[0])
    return seen(evaluator.combine(measured[1], 300, EarlierReading(kept, 50, **more)))


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_it_is_the_share_of_the_ten_nearest_that_stay(noise):
    before = normal(300, 8)
    after = 50 - 3 * (before + noise * normal(300, 8, seed=1))
    found = compared([made(before, 0), made(before)], [made(before, 0), made(after)])
    assert found.values[f"{NAME}/layer_00"] == 1
    assert found.values[f"{NAME}/layer_01"] == pytest.approx(overlap(before, after).mean())
    assert found.values[f"{NAME}/mean"] == found.values[f"{NAME}/layer_01"]
    assert found.values[f"{NAME}/layer_01/n"] == 300
    assert found.values[f"{NAME}/layer_01/steps"] == found.values[f"{NAME}/mean/steps"] == 50
    assert found.notes == []


ROWS = normal(300, 5)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (made(ROWS, positions=torch.arange(300).flip(0)), "not the tokens"),
        (made(ROWS, token_ids=torch.arange(300) % 5), "not the tokens"),
        (made(ROWS[:299]), "not the tokens"),
        (made(ROWS[:9].repeat(34, 1)[:300]), "copies of others"),
        (made(ROWS, 2), "nothing of this layer"),
        (Layer(1, "block", {}, {"hidden": "skipped"}), "'hidden' is missing: skipped"),
    ],
)
def test_what_cannot_be_compared_is_missing_and_said(after, words):
    found = compared([made(ROWS)], [after])
    assert math.isnan(found.values[f"{NAME}/layer_{after.index:02d}"])
    assert len([note for note in found.notes if words in note]) == 1


def test_tokens_without_ids_are_compared_where_the_inputs_are_known_to_be_the_same():
    plain = Layer(1, "block", {"hidden": ROWS, "positions": torch.arange(300)})
    assert compared([plain], [plain], same_inputs=True).values[f"{NAME}/layer_01"] == 1
    found = compared([plain], [plain])
    assert math.isnan(found.values[f"{NAME}/layer_01"])
    assert "no token ids" in found.notes[0]


def test_one_reading_by_itself_and_plain_rows_have_no_value():
    values = measure(PlainDecoder(), batch(), metrics=OVERLAP)
    assert {tag for tag in values if math.isfinite(values[tag])} <= {f"{NAME}/null"}
    assert [NAME in note and "readings of a probe" in note for note in values.notes] == [True]
    with pytest.raises(ValueError, match="reads an earlier reading of a probe"):
        geometry(ROWS, metrics=OVERLAP)


def test_inline_layers_have_a_reason_and_no_value():
    evaluator = Evaluator(OVERLAP, 1, strict=True)
    measured = [evaluator.measure_layer(made(ROWS, n), 300) for n in (0, 1)]
    found = seen(evaluator.combine(measured, 300, INLINE))
    assert math.isnan(found.values[f"{NAME}/layer_01"])
    assert [note.count("other tokens each time") for note in found.notes] == [1]


# -- in a training ---------------------------------------------------------------------------------


def monitored(model, directory=None, **options):
    memory = Memory()
    settings = {"metrics": OVERLAP, "tokens": 128, "batches": 1, "schedule": lambda step: True}
    return Monitor(model, directory=directory, sinks=[memory], **settings | options), memory


def read(monitor, model, steps, change=0.0):
    for step in steps:
        with monitor(step):
            model(batch(seed=step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(change * torch.randn_like(parameter))


def of(reading):
    return {tag: value for tag, value in reading.values.items() if tag.startswith(NAME)}


@pytest.mark.parametrize("background", [False, True])
def test_a_frozen_model_keeps_its_neighbours_and_a_trained_one_moves_them(background):
    torch.manual_seed(0)
    model = PlainDecoder()
    monitor, memory = monitored(model, probe=batch(sequences=8), background=background)
    read(monitor, model, (0, 3))
    read(monitor, model, (10,), change=0.2)
    read(monitor, model, (11,))
    monitor.close()
    first, frozen, still, moved = map(of, memory.readings)
    assert first == {}  # there is nothing to compare with, and nothing is wrong
    assert {frozen[f"{NAME}/layer_{n:02d}"] for n in range(4)} == {1.0}
    assert frozen[f"{NAME}/layer_02/steps"] == 3
    assert still[f"{NAME}/mean"] == 1
    assert still[f"{NAME}/mean/steps"] == 7
    assert moved[f"{NAME}/null"] < moved[f"{NAME}/mean"] < 0.9
    assert moved[f"{NAME}/mean/steps"] == 1
    assert not any(NAME in note for reading in memory.readings for note in reading.words())


def test_images_are_compared_where_the_monitor_holds_them():
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    own, memory = monitored(vision_transformer("sdpa"), probe=images)
    own.probe(0)
    own.probe(1)
    assert of(memory.readings[1])[f"{NAME}/mean"] == 1
    model = vision_transformer("sdpa")
    for probe in ({}, {"probe": lambda model: model(images)}):
        given, memory = monitored(model, **probe)
        for step in (0, 1):
            given.probe(step, None if probe else images)
        assert math.isnan(of(memory.readings[1])[f"{NAME}/layer_01"])
        assert any("no token ids" in note for note in memory.readings[1].words())
