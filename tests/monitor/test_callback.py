"""The session that callbacks share, driven by hand: no framework is loaded here."""

import copy
import functools
import math
import pickle

import pytest
import torch
from models import PlainDecoder, batch

from geomon import Memory, every, select
from geomon.capture.snapshot import NotSeenError
from geomon.distributed import RankGroup
from geomon.monitor import CallbackSession

FEW = {"metrics": select("variance"), "tokens": 64, "schedule": every(2), "strict": True}


def started(tmp_path, step=0, **options):
    memory, model = Memory(), PlainDecoder()
    session = CallbackSession({**FEW, **options}, "GeometryMonitor")
    session.start(model, step, tmp_path, [memory])
    return session, model, memory


def is_watched():
    """Whether a window is open: calls of modules are seen."""
    return torch.nn.Module._compiled_call_impl is not None


def test_what_is_discarded_or_failed_is_not_measured(tmp_path):
    session, model, memory = started(tmp_path)
    session.open(0)
    assert is_watched()
    session.discard()
    assert not is_watched()
    session.open(2)
    model(batch())
    session.close(ValueError("the forward pass failed"))
    assert not is_watched()
    assert not memory.readings
    session.open(4)
    session.start(model, 0, tmp_path, [])  # of a training that ended without a word
    assert not is_watched()
    session.open_at_call(6)
    assert is_watched()
    session.finish()
    assert not is_watched()


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


@pytest.mark.parametrize("probe", [None, batch()], ids=["inline", "probe"])
def test_a_schedule_is_followed_without_a_budget_also_where_ranks_could_not_share_one(
    tmp_path, monkeypatch, probe
):
    monkeypatch.setattr("geomon.monitor.monitor.find_ranks", lambda: RankGroup(0, 2))
    session, model, memory = started(tmp_path, schedule=every(1), gather=False, probe=probe)
    for step in range(20):
        session.probe(step)
        session.open(step)
        model(batch())
        session.close()
    session.finish()
    assert len(memory.readings) == 20


def test_a_window_that_no_pass_went_through_gives_way_to_the_next(tmp_path):
    session, model, memory = started(tmp_path)
    for step in (0, 2):
        session.open(step)
    model(batch())
    session.close()
    session.finish()
    assert [reading.step for reading in memory.readings] == [2]


def test_fixed_inputs_are_read_when_due_and_at_the_end(tmp_path):
    session, _, memory = started(tmp_path, probe=batch())
    asked = []

    def logged_at(step):
        asked.append(step)
        return {"loss": 1.0 / step if step else 0.5, "other": 3.0}

    for step in range(4):
        session.probe(step, last=step == 3)
        session.close()
        session.log(step, functools.partial(logged_at, step))
    found = [(r.step, r.source, r.values["training/loss"]) for r in memory.readings]
    assert found == [(0, "probe", 0.5), (2, "probe", 0.5), (3, "probe", 1 / 3)]
    assert asked == [0, 2, 3]


def test_a_call_at_a_step_that_is_not_due_is_not_watched(tmp_path):
    session, model, memory = started(tmp_path)
    for step in range(4):
        session.open_at_call(step)
        assert is_watched() == (step % 2 == 0)
        model(batch())
        session.close()
    session.finish()
    assert [reading.step for reading in memory.readings] == [0, 2]


def test_a_model_that_is_not_called_is_said_unless_its_step_has_failed(tmp_path):
    session, model, memory = started(tmp_path)
    session.open_at_call(0)
    session.close(ValueError("before the call"))
    model(batch())
    assert not is_watched()
    session.open_at_call(3, force=True)
    with pytest.raises(NotSeenError):
        session.close()
    session.close()  # said once
    assert not is_watched()
    assert not memory.readings


def test_while_it_trains_a_session_shows_its_monitor(tmp_path):
    session, *_ = started(tmp_path)
    assert repr(session).startswith("GeometryMonitor(PlainDecoder, 3 blocks, 1 metrics")


def test_the_call_that_was_watched_is_shown_whatever_comes_of_that(tmp_path, caplog):
    session, model, memory = started(tmp_path, strict=False, schedule=every(1))
    seen = []

    def see(given, output):
        seen.append((list(given), output.shape))
        raise KeyError("of the framework", len(memory.readings))

    for step in range(2):
        session.open_at_call(step, seen=see)
        model(ids=batch()) if step else model(batch())
    model(batch())
    shape = model(batch()).shape
    session.finish()
    assert seen == [([], shape), (["ids"], shape)]
    assert len(memory.readings) == 2
    (said,) = caplog.messages
    assert "cannot be read: KeyError" in said


# -- the batches of the trainer's validation -------------------------------------------------------


def test_the_first_validation_is_read_from_then_on_and_by_the_next_training_not(tmp_path, caplog):
    session, _, memory = started(tmp_path, probe="validation", schedule=every(1))
    for step in range(4):
        assert session.waits == (step < 2)
        session.probe(step)
        session.log(step, dict)
        if step:
            session.held_out.begin()
            session.held_out.offer(batch(8, 32, seed=step))
            session.held_out.end()
    session.finish()
    assert [reading.step for reading in memory.readings] == [2, 3]
    assert {reading.tokens for reading in memory.readings} == {64}
    assert not [text for text in caplog.messages if "extra pass" not in text]
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
    session.open(0)
    session.open_at_call(0)
    session.close()
    session.discard()
    session.probe(0, last=True)
    session.log(0, dict)
    session.finish()
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


def test_what_cannot_be_known_is_missing_and_the_training_goes_on(tmp_path, caplog):
    session, model, memory = started(tmp_path, strict=False)

    def broken():
        raise KeyError("of the framework", len(memory.readings))

    for step in (0, 2):
        session.open(step)
        model(batch())
        session.close()
        session.log(step, broken)
    assert [math.isnan(r.values["training/loss"]) for r in memory.readings] == [True, True]
    (said,) = caplog.messages
    assert said.endswith("missing: KeyError: ('of the framework', 0)")
