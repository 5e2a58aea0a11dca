"""Neutrality and every way out, in every loop; the same readings from all of them."""

import itertools
import signal

import pytest
import torch
from fingerprint import fingerprint, random_state, weights
from loops import LOOPS, Learner
from models import transformer

from geomon import Memory, every, read, select

METRICS = select("variance", "attention_entropy", "qk_cosine")


def failing(at):
    """A metric that raises at one of its calls."""
    calls = itertools.count()

    def unreliable(hidden):
        if next(calls) == at:
            raise ArithmeticError("in a metric")
        return hidden.norm()

    return METRICS | {"unreliable": unreliable}


# Of each case: what the learner and the loop are told, and in which loops it can be.
CASES = {
    "end": {},
    "exception in the model": {"error": RuntimeError},
    "ctrl-c": {"error": KeyboardInterrupt},
    "exception in a metric": {"metrics": lambda: failing(at=45)},
    # 4 layers, each measured once and 8 times for its margin: the third reading.
    "exception in a metric, strict": {"metrics": lambda: failing(at=72), "strict": True},
    "accumulation": {"loop": {"accumulate": 4}},
    "lbfgs": {"loop": {"kind": "lbfgs"}, "loops": ("lightning", "plain")},
    "two optimizers": {"loop": {"kind": "two"}, "loops": ("lightning", "plain")},
    "skipped by -1": {"loop": {"skip": "-1"}, "loops": ("lightning",)},
    "skipped by None": {"loop": {"skip": "None"}, "loops": ("lightning",)},
}
CELLS = [(loop, case) for case, of in CASES.items() for loop in of.get("loops", LOOPS)]


def expected_steps(loop, case):
    """Every second step; a forced last one where the loop knows which it is."""
    if CASES[case].get("error") or case.endswith("strict"):
        return [0, 2]
    if loop == "plain":
        return [0, 2, 4]
    if case == "two optimizers":  # 12 steps, two in each batch
        return [0, 2, 4, 6, 8, 10]
    return [0, 2, 4, 5]


def train(loop, learner, options, folder, error, **told):
    """Train until the end, or until `error` comes out of it."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        if error is None:
            LOOPS[loop](learner, options, folder, **told)
        else:
            # Lightning turns Ctrl-C into an exit.
            with pytest.raises((error, SystemExit) if error is KeyboardInterrupt else error):
                LOOPS[loop](learner, options, folder, **told)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after the first
    return fingerprint(learner.inside[0]), random_state(), weights(learner)


@pytest.mark.parametrize(("loop", "case"), CELLS)
def test_training_is_as_if_nobody_watched(tmp_path, loop, case):
    of = CASES[case]
    told, error, strict = of.get("loop", {}), of.get("error"), of.get("strict", False)
    # A strict metric ends the run where the plain one is ended by the model.
    ends = RuntimeError if strict else error
    plain = train(loop, Learner(error=ends), None, tmp_path / "plain", ends, **told)

    memory = Memory()
    options = {
        "metrics": of.get("metrics", lambda: METRICS)(), "schedule": every(2), "tokens": 64,
        "batches": 1, "sinks": [memory], "strict": strict,
    }  # fmt: skip
    ends = ArithmeticError if strict else error
    watched = train(loop, Learner(error=error), options, tmp_path / "run", ends, **told)

    for name, value in plain[0].items():
        assert watched[0][name] == value, name
    assert not any(map(sum, watched[0]["hooks"]))
    assert watched[1] == plain[1]
    for one, other in zip(watched[2], plain[2], strict=True):
        assert torch.equal(one, other)
    steps = [reading.step for reading in read(tmp_path / "run")]
    assert steps == expected_steps(loop, case)
    assert steps == [reading.step for reading in memory.readings]
    assert all(reading.tokens == 64 for reading in memory.readings)


@pytest.mark.parametrize("net", ["gpt2", "plain"])
def test_all_loops_give_the_same_readings(tmp_path, net):
    options = {"schedule": every(2), "tokens": 64}
    seen, trained = {}, {}
    for loop, run in LOOPS.items():
        learner = Learner(transformer("gpt2") if net == "gpt2" else None)
        run(learner, options, tmp_path / loop, steps=5)
        trained[loop] = weights(learner)
        seen[loop] = {
            reading.step: {
                tag: value.hex()
                for tag, value in reading.values.items()
                if tag not in ("geomon/seconds", "geomon/overhead")
            }
            for reading in read(tmp_path / loop)
        }
    for loop in ("lightning", "huggingface"):
        assert all(map(torch.equal, trained[loop], trained["plain"]))
        assert seen[loop] == seen["plain"]
    assert list(seen["plain"]) == [0, 2, 4]
    assert len(seen["plain"][4]) > 300
    assert all("training/loss" in values for values in seen["plain"].values())
