"""The session that callbacks share, driven by hand: no framework is loaded here."""

import copy
import math
import pickle

import pytest

from geomon import Memory, every, select
from geomon.monitor import CallbackSession
from support.fingerprint import is_watched
from support.models import PlainDecoder, batch

FEW = {"metrics": select("variance"), "tokens": 64, "schedule": every(2), "strict": True}


def started(folder, step=0, **options):
    memory, model = Memory(), PlainDecoder()
    session = CallbackSession({**FEW, **options}, "GeometryMonitor")
    session.start(model, step, folder, [memory])
    return session, model, memory


def do(session, model, what, *given, **named):
    """Something that a callback does, or the model, or the framework."""
    if what == "call":
        model(batch())
    elif what == "start":
        session.start(PlainDecoder(), 0, session.monitor.path.parent / "next", [])
    elif what == "close in vain":
        with pytest.raises(RuntimeError, match="did not run while the window was open"):
            session.close()
    else:
        getattr(session, what)(*given, **named)


FAILS = ("close", ValueError("the forward pass failed"))
# Events, each with whether a window is open behind it; steps of the readings.
COURSES = {
    "discarded": ([(("open", 0), True), (("discard",), False), (("call",), False)], []),
    "failed": ([(("open", 2), True), (("call",), True), (FAILS, False)], []),
    "of a training that ended without a word": ([(("open", 4), True), (("start",), False)], []),
    "finished while it is open": (
        [(("open_at_call", 6), True), (("finish",), False), (("finish",), False)], [],
    ),
    "gives way to the next": (
        [(("open", 0), True), (("open", 2), True), (("call",), True), (("close",), False)], [2],
    ),
    "calls at due steps": (
        [event for step in range(4)
         for event in ((("open_at_call", step), step % 2 == 0), (("call",), False),
                       (("close",), False))], [0, 2],
    ),
    "of a model that is not called": (
        [(("open_at_call", 4), True), (("close in vain",), False), (("close",), False)], [],
    ),
    "failed before the call": (
        [(("open_at_call", 0), True), (FAILS, False), (("call",), False)], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_a_window_is_open_for_a_forward_pass_and_no_longer(tmp_path, name):
    events, steps = COURSES[name]
    session, model, memory = started(tmp_path)
    for event, is_open in events:
        do(session, model, *event)
        assert is_watched() == is_open
    session.finish()
    assert not is_watched()
    assert [reading.step for reading in memory.readings] == steps


@pytest.mark.parametrize(
    ("given", "of_training", "folder"),
    [(None, "run", "run"), (None, ".", "runs/geomon"), ("own", "run", "own"), ("own", ".", "own")],
)
def test_the_record_is_in_the_folder_of_the_training_unless_another_is_given(
    tmp_path, monkeypatch, given, of_training, folder
):
    monkeypatch.chdir(tmp_path)
    session, *_ = started(of_training, directory=given)
    assert session.monitor.path == tmp_path / folder / "readings.jsonl"
    assert repr(session).startswith("GeometryMonitor(PlainDecoder, 3 blocks, 1 metric,")


def test_errors_of_what_the_framework_shows_and_logs_are_one_warning_each(tmp_path, caplog):
    session, model, memory = started(tmp_path, strict=False, schedule=every(1))
    seen = []

    def broken(*given):
        seen.append([list(each) for each in given[:1]])
        raise KeyError("of the framework", len(memory.readings))

    for step in range(2):
        session.open_at_call(step, seen=broken)
        model(ids=batch()) if step else model(batch())
        session.log(step, broken)
    model(batch())
    session.finish()
    assert seen == [[[]], [], [["ids"]], []]
    assert [math.isnan(r.values["training/loss"]) for r in memory.readings] == [True, True]
    assert [said.partition(" cannot be read")[0] for said in caplog.messages] == [
        "what the model returned", "what the training logs",
    ]  # fmt: skip
    assert all("KeyError: ('of the framework', 0)" in said for said in caplog.messages)


# -- the batches of the trainer's validation -------------------------------------------------------


def test_the_first_validation_is_read_from_then_on_and_by_the_next_training_not(tmp_path, caplog):
    session, _, memory = started(tmp_path, probe="validation", schedule=every(1))
    asked = []
    for step in range(4):
        assert session.waits == (step < 2)
        session.probe(step)
        session.log(step, lambda step=step: asked.append(step) or {"loss": step / 2})
        if step:
            session.held_out.begin()
            session.held_out.offer(batch(8, 32, seed=step))
            session.held_out.end()
    session.finish()
    found = [(r.step, r.source, r.tokens, r.training["loss"]) for r in memory.readings]
    assert found == [(2, "probe", 64, 1.0), (3, "probe", 64, 1.5)]
    assert asked == [2, 3]
    session.start(PlainDecoder(), 0, tmp_path / "next", [])
    assert session.waits
    session.probe(0, last=True)
    (said,) = [text for text in caplog.messages if "extra pass" not in text]
    assert "made no validation" in said


def test_a_trainer_that_does_not_validate_is_said_at_the_start(tmp_path):
    session = CallbackSession({**FEW, "probe": "validation"}, "GeometryMonitor")
    with pytest.raises(
        ValueError, match="it makes none: give the trainer validation data, or pass a loader"
    ):
        session.start(PlainDecoder(), 0, tmp_path, [], validates=False)


def test_before_training_every_call_does_nothing():
    session = CallbackSession(FEW, "GeometryMonitor")
    for event in (("open", 0), ("open_at_call", 0), ("close",), ("discard",), ("finish",),
                  ("probe", 0), ("log", 0, dict)):  # fmt: skip
        do(session, None, *event)
    assert math.isnan(session.overhead)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_starts_with_its_own_training(tmp_path, copied_by):
    session, model, memory = started(tmp_path)
    session.open(0)
    copied = copied_by(session)
    assert copied.monitor is None
    assert copied.options["tokens"] == 64
    copied.discard()
    assert is_watched()
    model(batch())
    session.close()
    session.finish()
    assert len(memory.readings) == 1
