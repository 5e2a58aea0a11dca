"""The first reading after a resume shows what changed with it."""

import math

import msgspec
import numpy as np
import pytest

from geomon.analysis.alerts import AlertWatch
from support.readings import reading_of

LAYERS, HEADS, MATRICES = (1, 2, 3), (0, 1), ("q_proj", "k_proj")


def reading(step, seed=0, source="probe", training=(), mode="eval", **changed):
    """A reading of a training whose values drift and scatter a little; some may be changed."""
    noise = np.random.default_rng(1000 * seed + step)
    values = {"training/loss": 2.3 + 0.03 * noise.standard_normal()}
    for layer in LAYERS:
        place = f"layer_{layer:02d}"
        for name in MATRICES:
            values[f"weight_norm/{place}/{name}"] = 4.0 + 0.001 * step
        values[f"variance/{place}"] = (0.1 if step == 0 else 6) * (
            1 + 0.02 * noise.standard_normal()
        )
        for head in HEADS:
            entropy = 0.6 + 0.01 * noise.standard_normal()
            values[f"attention_entropy_normalised/{place}/head_{head}"] = entropy
            values[f"max_logit/{place}/head_{head}"] = 15 + 0.5 * noise.standard_normal()
    if step == 0:
        values |= UNTRAINED
    names = {name.replace("__", "/"): value for name, value in changed.items()}
    assert names.keys() <= values.keys()
    found = reading_of(values | names, step, source)
    return msgspec.structs.replace(found, mode=mode, fingerprint="of the probe")


WEIGHTS = [f"weight_norm/layer_{layer:02d}/{name}" for layer in LAYERS for name in MATRICES]
UNTRAINED = dict.fromkeys(WEIGHTS, 1.2) | {
    f"attention_entropy_normalised/layer_{layer:02d}/head_{head}": 1.0
    for layer in LAYERS
    for head in HEADS
}


def resumed(now, before=range(0, 400, 20), given_up=(), **options):
    """The alerts on the first reading after a resume."""
    watch = AlertWatch(["changed_at_resume"])
    for step in before:
        watch.recall(reading(step, **options))
    watch.recall_given_up(given_up)
    found = watch.add(now)
    assert watch.add(msgspec.structs.replace(now, step=now.step + 20)) == []  # said once
    return found


def names(layer, name="attention_entropy_normalised", heads=HEADS):
    return [f"{name}/layer_{layer:02d}/head_{head}" for head in heads]


SHARP = dict.fromkeys(names(2), 0.3)
CASES = {
    "other attention, as of another rotary base or order": (
        SHARP, ((2, 0), (2, 1)), "attention entropy 0.3, before 0.6",
        "norms of all weights are as before", "rotary base",
    ),
    "another matrix": (
        SHARP | {"weight_norm/layer_02/q_proj": 12.3}, (2,), "weight_norm/q_proj 12.3, before 4.38",
        "also attention entropy of layer 2, head", "what was loaded into these weights",
    ),
    "another head": (
        {"training/loss": 5.45}, (), "loss 5.45, before 2.3",
        "no value of a layer moved further than usual", "whether it is tied",
    ),
    "weights drawn anew": (
        UNTRAINED | {f"variance/layer_{layer:02d}": 0.1 for layer in LAYERS}, (1, 2, 3),
        "weight_norm/", "back at the values of the first reading", "the checkpoint was loaded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("source", ["probe", "inline"])
def test_a_change_at_a_resume_is_said_with_its_place(case, source):
    changed, places, finding, more, advice = CASES[case]
    (alert,) = resumed(reading(400, source=source, **changed), source=source)
    assert (alert.name, alert.step) == ("changed_at_resume", 400)
    assert set(alert.heads or alert.layers) == set(places)
    line, rest = alert.note().lines("alert at step 400: ")
    assert finding in line
    assert len(line) <= 100
    assert more in rest
    assert advice in rest
    assert "before is at step 380" in rest


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("source", ["probe", "inline"])
@pytest.mark.parametrize("step", [240, 400, 460])
def test_a_resume_that_goes_on_as_before_says_nothing(seed, source, step):
    before = range(0, min(step, 400), 20)
    assert resumed(reading(step, seed, source), before, source=source, seed=seed) == []


def test_many_steps_explain_more_than_few():
    drifted = dict.fromkeys(WEIGHTS, 4.8)
    assert resumed(reading(400, **drifted)) != []
    assert resumed(reading(780, **drifted)) == []


@pytest.mark.parametrize(("step", "before"), [
    (400, [0, 380]),  # one change says little of what is usual
    (160, range(0, 160, 20)),  # everything changes early in a training
])  # fmt: skip
def test_nothing_is_said_if_what_is_usual_is_unknown(step, before):
    assert resumed(reading(step, **SHARP), before) == []


def test_a_head_with_few_readings_is_expected_to_move_as_the_others_do():
    watch, unknown = AlertWatch(["changed_at_resume"]), dict.fromkeys(names(2), math.nan)
    for step in range(0, 400, 20):
        watch.recall(reading(step, **(unknown if step < 360 else {})))
    (alert,) = watch.add(reading(400, **SHARP))
    assert set(alert.heads) == {(2, 0), (2, 1)}


def test_a_source_is_compared_with_itself():
    assert resumed(reading(400, source="inline", **SHARP), source="probe") == []


@pytest.mark.parametrize(("mode", "fingerprint", "is_said"), [
    ("eval", "of the probe", True), ("eval", "", False), ("eval", "of another one", False),
    ("train", "of the probe", False),  # dropout may differ
])  # fmt: skip
def test_readings_of_the_same_step_and_rows_should_agree(mode, fingerprint, is_said):
    changed = dict.fromkeys(names(2), 0.56)  # as far as readings scatter
    found = resumed(
        msgspec.structs.replace(reading(120, mode=mode, **changed), fingerprint=fingerprint),
        range(0, 120, 20),
        [reading(step, mode=mode) for step in (120, 140)],
    )
    assert [alert.heads for alert in found] == [((2, 0), (2, 1))] * is_said
    assert all("before is at step 120" in alert.words() for alert in found)
    assert resumed(reading(120, mode=mode), range(0, 120, 20), [reading(120, mode=mode)]) == []
