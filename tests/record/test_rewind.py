"""A run that goes back to an earlier step: the record holds the branch that is trained now."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from full_disk import FullDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import alert_of, reading_of

from geomon.record import (
    FILE_NAME,
    Course,
    Follower,
    RaisedAlert,
    Reading,
    Readings,
    Record,
    read,
)
from geomon.record.arrays import ArrayPlace

SOURCES = ("inline", "probe")


def reading(step: int, value: float = 1.0, source: str = "inline") -> Reading:
    return reading_of({"a/mean": value}, step, source, time=value)


def alert(step: int, source: str = "check", words: str = "too large") -> RaisedAlert:
    course = Course("a/mean", (step - 1, step), (1.0, float("nan")))
    return RaisedAlert(step, 7.0, source, alert_of("spike", words), (course,))


def start(folder, step: int, steps=(), value: float = 1.0, sources=("inline",)) -> Record:
    """Begin a run at a step, and write its readings."""
    record = Record(folder)
    record.begin(step, {"model": "m"})
    for each in steps:
        for source in sources:
            record.write(reading(each, value, source))
    return record


def points(readings) -> list[tuple[int, float]]:
    return [(each.step, each.value("a/mean")) for each in readings]


def test_from_the_step_of_the_resume_on_the_new_readings_count(tmp_path):
    start(tmp_path, 0, range(0, 70, 10)).close()
    before = (tmp_path / FILE_NAME).read_bytes()
    record = Record(tmp_path)
    earlier = record.begin(25, {"model": "m"})
    assert points(earlier) == [(0, 1), (10, 1), (20, 1)]
    assert points(earlier.abandoned) == [(step, 1) for step in (30, 40, 50, 60)]
    assert len(earlier.runs) == 1
    assert (tmp_path / FILE_NAME).read_bytes() == before  # a start that dies now loses nothing
    for step in (25, 30, 40):
        record.write(reading(step, 2.0))
    run = read(tmp_path)
    assert points(run) == [(0, 1), (10, 1), (20, 1), (25, 2), (30, 2), (40, 2)]
    assert points(run.abandoned) == [(step, 1) for step in (30, 40, 50, 60)]
    assert [each.get("rewound_to") for each in run.runs] == [None, 25]
    assert run.mixed_at is None
    assert run["a/mean"].steps == [0, 10, 20, 25, 30, 40]
    assert (tmp_path / FILE_NAME).read_bytes().startswith(before)
    assert not list(tmp_path.glob("readings.*.jsonl"))


def test_a_step_that_both_branches_read_is_read_again(tmp_path):
    start(tmp_path, 0, [0, 10, 20]).close()
    record = Record(tmp_path)
    assert points(record.begin(20, {})) == [(0, 1), (10, 1)]
    record.write(reading(20, 2.0))
    assert points(read(tmp_path)) == [(0, 1), (10, 1), (20, 2)]


def test_a_run_may_go_back_more_than_once_and_behind_an_earlier_start(tmp_path):
    start(tmp_path, 0, [0, 10, 20, 30], 1.0).close()
    start(tmp_path, 20, [20, 30], 2.0).close()
    start(tmp_path, 10, [10, 20], 3.0).close()
    run = read(tmp_path)
    assert points(run) == [(0, 1), (10, 3), (20, 3)]
    assert points(run.abandoned) == [(20, 1), (30, 1), (10, 1), (20, 2), (30, 2)]
    assert [each.get("rewound_to") for each in run.runs] == [None, 20, 10]
    start(tmp_path, 0, [0], 4.0).close()  # a new run
    assert points(read(tmp_path)) == [(0, 4)]
    assert points(read(tmp_path / "readings.1.jsonl")) == points(run)


def test_a_start_that_dies_before_its_first_reading_leaves_the_branch(tmp_path):
    start(tmp_path, 0, [0, 10, 20]).close()
    start(tmp_path, 10).close()
    assert points(read(tmp_path)) == [(0, 1), (10, 1), (20, 1)]
    start(tmp_path, 21, [25], 2.0).close()  # it goes on after all
    run = read(tmp_path)
    assert points(run) == [(0, 1), (10, 1), (20, 1), (25, 2)]
    assert not any("rewound_to" in each for each in run.runs)


def test_readings_of_both_sources_are_given_up(tmp_path):
    start(tmp_path, 0, [0, 10, 20], 1.0, SOURCES).close()
    start(tmp_path, 20, [20], 2.0, SOURCES[1:]).close()
    run = read(tmp_path)
    found = [(each.step, each.source) for each in run]
    assert found == [*((step, source) for step in (0, 10) for source in SOURCES), (20, "probe")]
    assert [each.source for each in run.abandoned] == [*SOURCES]


def test_an_older_record_is_read_as_it_was(tmp_path):
    lines = [
        {"run": {"from_step": 0}}, 0, 10, 20, {"run": {"from_step": 5}}, 25,
    ]  # fmt: skip
    text = [json.dumps(x) if isinstance(x, dict) else reading(x).line() for x in lines]
    (tmp_path / FILE_NAME).write_text("".join(f"{line}\n" for line in text))
    run = read(tmp_path)
    assert points(run) == [(0, 1), (10, 1), (20, 1), (25, 1)]
    assert (run.abandoned, run.raised, run.mixed_at) == ([], [], None)


def test_who_follows_the_file_sees_the_branch_that_goes_on(tmp_path):
    first = start(tmp_path, 0, [0, 10, 20])
    first.write_alert(alert(20))
    first.close()
    follower = Follower(tmp_path)
    assert [each.step for each in follower.look()] == [0, 10, 20, 20]
    record = start(tmp_path, 10, [10], 2.0)
    assert [each.step for each in follower.look()] == [10]
    found = follower.readings()
    assert points(found) == [(0, 1), (10, 2)]
    assert found.raised == []
    record.write_alert(alert(15))
    assert follower.look() == follower.readings().raised
    for step in (20, 30):
        record.write(reading(step, 2.0))
    record.close()
    start(tmp_path, 30, [30, 40], 3.0)  # both since the last look
    assert points(follower.look()) == [(20, 2), (30, 3), (40, 3)]
    assert points(follower.readings()) == points(read(tmp_path))


@pytest.mark.parametrize("word", ["1.5", '"a"', "null", "true", "[]"])
def test_a_line_that_says_no_step_is_refused(tmp_path, word):
    (tmp_path / FILE_NAME).write_text(f'{{"run":{{"rewound_to":{word}}}}}\n')
    with pytest.raises(ValueError, match=r"line 1 .*'rewound_to' is .*, expected a step"):
        read(tmp_path)


def test_a_stack_is_selected_in_every_branch():
    both = reading_of({"a/encoder_mean": 1.0, "a/decoder_mean": 2.0})
    run = Readings([], [both], abandoned=[both]).of_stack("encoder")
    assert points(run) == points(run.abandoned) == [(0, 1)]


def test_a_reading_given_again_with_other_notes_stands_once(tmp_path):
    record = start(tmp_path, 0, [0])
    record.write(reading(1))
    record.write(reading_of({"a/mean": 1.0}, 1, "inline", ["a note"], time=1.0))
    assert points(read(tmp_path)) == [(0, 1), (1, 1)]


# -- arrays ------------------------------------------------------------------------------------


def write_with_arrays(record: Record, step: int, number: float) -> None:
    record.write(reading(step, number))
    record.write_arrays(
        reading(step, number), {ArrayPlace("", "mean_query", 1): np.full(2, number)}
    )


def array_of(folder, step: int) -> float:
    return float(read(folder).arrays(step)["mean_query/layer_01"][0])


def test_arrays_of_a_branch_that_was_given_up_are_kept_apart(tmp_path):
    record = start(tmp_path, 0)
    for step in (0, 10, 20, 30):
        write_with_arrays(record, step, 1.0)
    record.close()
    again = start(tmp_path, 15)
    assert array_of(tmp_path, 30) == 1.0  # nothing is trained again yet
    again.write(reading(20, 2.0))  # without arrays
    run = read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no arrays of step 20"):
        run.arrays(20)
    assert run.folder is not None
    assert run.folder.steps("inline") == [0, 10]
    write_with_arrays(again, 30, 2.0)
    assert [array_of(tmp_path, step) for step in (0, 10, 30)] == [1, 1, 2]
    kept = sorted(os.listdir(tmp_path / "arrays.1"))
    assert kept == ["step_000020_inline.npz", "step_000030_inline.npz"]
    again.close()
    write_with_arrays(start(tmp_path, 30), 30, 3.0)
    assert os.listdir(tmp_path / "arrays.2") == ["step_000030_inline.npz"]
    assert array_of(tmp_path, 30) == 3.0


# -- alerts ------------------------------------------------------------------------------------


def test_an_alert_is_a_line_of_its_own_with_its_step(tmp_path):
    record = start(tmp_path, 0, [0])
    record.write_alert(alert(4))
    record.write(reading(10))
    run = read(tmp_path)
    assert [each.step for each in run] == [0, 10]
    (found,) = run.raised
    assert (found.step, found.source, found.words()) == (4, "check", "too large")
    assert found.courses[0].steps == (3, 4)
    assert found.courses[0].values == pytest.approx((1.0, float("nan")), nan_ok=True)
    assert run.alerts == [found]
    assert run.mixed_at is None
    kinds = [next(iter(json.loads(line))) for line in record.path.read_text().splitlines()]
    assert kinds == ["run", "step", "alert", "step"]


def test_alerts_of_an_older_record_stand_in_its_readings():
    noted = reading_of({"a/mean": 1.0}, 8, notes=[alert_of("spike", "one"), "a remark"])
    run = Readings([], [noted], raised=[alert(4), alert(12)])
    assert [(each.step, each.words()) for each in run.alerts] == [
        (4, "too large"), (8, "one"), (12, "too large"),
    ]  # fmt: skip


def test_an_alert_may_be_what_a_run_begins_with_and_what_it_goes_back_behind(tmp_path):
    first = start(tmp_path, 0)
    first.write_alert(alert(0))
    first.write(reading(10))
    first.write_alert(alert(15))
    first.write_alert(alert(17))
    first.close()
    assert len(read(tmp_path).runs) == 1
    second = Record(tmp_path)
    earlier = second.begin(16, {})
    assert [each.step for each in earlier.raised] == [0, 15]
    assert [each.step for each in read(tmp_path).raised] == [0, 15, 17]
    second.write_alert(alert(16, words="again"))
    run = read(tmp_path)
    assert [(each.step, each.words()) for each in run.raised] == [
        (0, "too large"), (15, "too large"), (16, "again"),
    ]  # fmt: skip
    assert run.runs[-1]["rewound_to"] == 16
    assert run.abandoned == []


def test_an_alert_waits_for_the_disk_with_the_readings(tmp_path, monkeypatch):
    record = start(tmp_path, 0, [0])
    disk = FullDisk(monkeypatch, 20)
    for line in (alert(1), reading(2), alert(2), alert(2)):
        with pytest.raises(OSError, match="No space"):
            (record.write if isinstance(line, Reading) else record.write_alert)(line)
        assert points(read(tmp_path)) == [(0, 1)]
    disk.free = 10**6
    record.write_alert(alert(3))
    run = read(tmp_path)
    assert [each.step for each in run] == [0, 2]
    assert [each.step for each in run.raised] == [1, 2, 3]


def test_an_alert_given_again_after_ctrl_c_stands_once(tmp_path):
    record = start(tmp_path, 0, [0])
    for _ in range(2):  # what was in hand when the key was pressed, in its order
        record.write_alert(alert(1))
        record.write_alert(alert(1, words="too small"))
        record.write(reading(1))
    run = read(tmp_path)
    assert [each.words() for each in run.raised] == ["too large", "too small"]
    assert [each.step for each in run] == [0, 1]


# -- any course of things ----------------------------------------------------------------------

STARTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.sampled_from(["close", "torn"])),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(starts=STARTS)
def test_the_record_is_that_of_the_run_that_goes_on(tmp_path_factory, starts):
    """Any starts, each cut after a few steps, whole or in the middle of a line."""
    folder = tmp_path_factory.mktemp("run")
    follower = Follower(folder)
    branch: dict[int, float] = {}
    given_up = 0
    for number, (first, count, end) in enumerate(starts):
        record = Record(folder)
        is_new = not branch or first <= min(branch)
        earlier = record.begin(first, {"model": "m"})
        kept = {} if is_new else {step: x for step, x in branch.items() if step < first}
        assert dict(points(earlier)) == kept
        written = {first + 2 * index: float(number) for index in range(count)}
        for step, value in written.items():
            record.write(reading(step, value))
            record.write_alert(alert(step))
        if written:
            given_up = 0 if is_new else given_up + len(branch) - len(kept)
            branch = kept | written
        record.close()
        if end == "torn":
            with record.path.open("a") as file:
                file.write('{"step": 5, "ti')
        follower.look()
        for run in (read(folder), follower.readings()):
            assert points(run) == sorted(branch.items())
            assert len(run.abandoned) == given_up
            assert {each.step for each in run.raised} == set(branch)
            assert run.mixed_at is None


_KILLED = """
import os, sys
from tagged import reading_of
from geomon.record import Record
record = Record(sys.argv[1])
record.begin(10, {})
if sys.argv[2] == "written":
    record.write(reading_of({"a/mean": 2.0}, 10, "inline"))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("moment", "left"), [("begun", [(0, 1), (10, 1), (20, 1)]), ("written", [(0, 1), (10, 2)])]
)
def test_a_kill_leaves_the_old_branch_or_the_new_one(tmp_path, moment, left):
    start(tmp_path, 0, [0, 10, 20]).close()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), moment], check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == -9
    assert points(read(tmp_path)) == left
    start(tmp_path, 15, [15], 3.0).close()
    assert points(read(tmp_path))[-1] == (15, 3)
