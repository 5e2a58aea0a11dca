"""Runs that start, write, go back, are cut and take over a folder: what its record holds then."""

import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.record import FILE_NAME, Follower, Readings, Record, read
from support.histories import (
    History,
    alert,
    begin,
    check,
    close,
    fill_the_disk,
    free_the_disk,
    points,
    reading,
    tear,
    warn,
    write,
)
from support.readings import alert_of, reading_of

TENS = range(0, 70, 10)
ONE = [(0, 1), (10, 1), (20, 1)]


def of(value, *steps):
    return [(step, value) for step in steps]


def remove_and_write(*steps):
    def event(folder):
        shutil.rmtree(folder.path)
        write(*steps)(folder)

    return event


TORN = ['{"step": 3, "ti', '{"step": 3}', '{"run": {"a', '{"step": ' + 200_000 * "0"]
HISTORIES = {
    "goes on": History(
        [begin(0), write(0), write(5, source="probe"), begin(6), write(8)],
        [(0, 1), (5, 1), (8, 2)], rewound=[None, None], earlier=[0, 5],
    ),
    "goes back": History(
        [begin(0), write(*TENS), begin(25), write(25, 30, 40)],
        [*ONE, *of(2, 25, 30, 40)], of(1, 30, 40, 50, 60), rewound=[None, 25], earlier=[0, 10, 20],
    ),
    "goes back to a step that was read": History(
        [begin(0), write(0, 10, 20), begin(20), write(20)], [*ONE[:2], (20, 2)], [(20, 1)],
        rewound=[None, 20], earlier=[0, 10],
    ),
    "goes back twice, behind an earlier start": History(
        [begin(0), write(0, 10, 20, 30), begin(20), write(20, 30), begin(10), write(10, 20)],
        [(0, 1), (10, 3), (20, 3)], [*of(1, 20, 30), (10, 1), *of(2, 20, 30)],
        rewound=[None, 20, 10],
    ),
    "a start that dies before its first reading": History(
        [begin(0), write(0, 10, 20), begin(10), begin(21), write(25)], [*ONE, (25, 3)],
        rewound=[None, None],
    ),
    "both sources are given up": History(
        [begin(0), *(write(step, source=s) for step in (0, 10, 20) for s in ("inline", "probe")),
         begin(20), write(20, source="probe")],
        [*of(1, 0, 0, 10, 10), (20, 2)], of(1, 20, 20), rewound=[None, 20],
    ),
    "begins anew": History(
        [event for _ in range(3) for event in (begin(0), write(0, 1))], of(3, 0, 1),
        earlier=[], files=[FILE_NAME, "readings.1.jsonl", "readings.2.jsonl"],
    ),
    "a reading given again with other notes": History(
        [begin(0), write(0, 1), write(1, notes=["a note"])], of(1, 0, 1)
    ),
    "alerts are lines of their own": History(
        [begin(0), write(0), warn(4), write(10)], of(1, 0, 10), alerts=[4]
    ),
    "alerts given again after Ctrl-C": History(
        [begin(0), write(0), *[warn(1), warn(1, words="too small"), write(1)] * 2], of(1, 0, 1),
        alerts=[1, 1],
    ),
    "begins with an alert, and goes back behind some": History(
        [begin(0), warn(0), write(10), warn(15, 17), begin(16), warn(16)], [(10, 1)],
        alerts=[0, 15, 16], rewound=[None, 16], earlier=[10],
    ),
    "a folder that is removed": History(
        [begin(0), write(0), remove_and_write(1, 2)], of(1, 1, 2)
    ),
    "a folder that is removed at a start": History(
        [begin(0), write(0), begin(3), remove_and_write(3)], of(2, 3)
    ),
    "a torn line that is the only one": History(
        [begin(0), tear(TORN[2]), begin(0), write(0)], [(0, 2)]
    ),
    **{
        f"a torn line: {text[:11]}": History(
            [begin(0), write(0), tear(text), begin(1), write(2)], [(0, 1), (2, 2)],
            rewound=[None, None],
        )
        for text in TORN
    },
    **{
        f"a disk with {free} bytes, and the end": History(
            [begin(0), write(0), fill_the_disk(free), write(*range(1, 9)), close, free_the_disk],
            of(1, *range(9)), failed=failed,
        )
        for free, failed in ((0, 9), (1, 9), (100, 9), (900, 6))
    },
    **{
        f"a disk with {free} bytes, and then space": History(
            [begin(0), write(0), fill_the_disk(free), write(*range(1, 9)), free_the_disk, write(9)],
            of(1, *range(10)), failed=failed,
        )
        for free, failed in ((0, 8), (1, 8), (100, 8), (900, 5))
    },
    "alerts wait for the disk with the readings": History(
        [begin(0), write(0), fill_the_disk(20), warn(1), write(2), warn(2, 2), free_the_disk,
         warn(3)], of(1, 0, 2), alerts=[1, 2, 3], failed=4,
    ),
    "of many lines that wait the oldest are given up": History(
        [begin(0), fill_the_disk(0), write(*range(300)), free_the_disk, write(300)],
        of(1, *range(202, 301)), failed=300,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_the_record_holds_the_branch_that_is_trained_now(tmp_path, name):
    check(HISTORIES[name], tmp_path)


def test_lines_of_a_record_and_what_they_say_of_alerts(tmp_path):
    check(HISTORIES["alerts are lines of their own"], tmp_path)
    kinds = [
        next(iter(json.loads(line))) for line in (tmp_path / FILE_NAME).read_text().splitlines()
    ]
    assert kinds == ["run", "step", "alert", "step"]
    run = read(tmp_path)
    (found,) = run.raised
    assert run.alerts == [found]
    assert (found.step, found.source, found.words()) == (4, "check", "too large")
    assert found.courses[0].steps == (3, 4)
    assert found.courses[0].values == pytest.approx((1.0, float("nan")), nan_ok=True)
    noted = reading_of({"a/mean": 1.0}, 8, notes=[alert_of("spike", "one"), "a remark"])
    older = Readings([], [noted], raised=[alert(4), alert(12)])  # alerts stand in its readings
    assert [(each.step, each.words()) for each in older.alerts] == [
        (4, "too large"), (8, "one"), (12, "too large"),
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["1.5", '"a"', "null", "true", "[]"])
def test_a_line_that_says_no_step_is_refused(tmp_path, word):
    (tmp_path / FILE_NAME).write_text(f'{{"run":{{"rewound_to":{word}}}}}\n')
    with pytest.raises(ValueError, match=r"line 1 .*'rewound_to' is .*, expected a step"):
        read(tmp_path)


def test_a_stack_is_selected_in_every_branch():
    both = reading_of({"a/encoder_mean": 1.0, "a/decoder_mean": 2.0})
    run = Readings([], [both], abandoned=[both]).of_stack("encoder")
    assert points(run) == points(run.abandoned) == [(0, 1)]


def test_a_folder_that_is_renamed_while_a_run_goes_on_is_made_again(tmp_path):
    record, beside = Record(tmp_path / "a"), Record(tmp_path / "a")
    record.begin(0, {"model": "M"})
    record.write(reading(0))
    (tmp_path / "a").rename(tmp_path / "b")
    record.write(reading(1))
    beside.write(reading(2))  # of another monitor of the same folder
    assert points(read(tmp_path / "b")) == [(0, 1)]
    found = read(tmp_path / "a")
    assert (points(found), [run["model"] for run in found.runs]) == (of(1, 1, 2), ["M"])
    other = Record(tmp_path / "b")  # nothing of this process locks it any more
    for each in (record, beside, other):
        each.close()
    assert not list(tmp_path.glob("*/.readings.lock"))


@pytest.mark.parametrize("end", [Record.close, lambda record: record.write(reading(1))])
@pytest.mark.parametrize("moment", range(4))
def test_ctrl_c_in_a_write_neither_loses_nor_doubles_the_line(tmp_path, monkeypatch, moment, end):
    """Between any two steps of the write: before it, in it, after it, and at the file's end."""
    record = Record(tmp_path)
    record.begin(0, {})
    record.write(reading(0))

    class File(io.FileIO):
        def write(self, content):
            if moment == 0:
                raise KeyboardInterrupt
            written = super().write(content[:10] if moment == 1 else content)
            if moment < 3:
                raise KeyboardInterrupt
            return written

        def __exit__(self, *error):
            super().__exit__(*error)
            if moment == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r", **kwargs: File(path, "a+"))
        with pytest.raises(KeyboardInterrupt):
            record.write(reading(1))
    end(record)
    assert points(read(tmp_path)) == of(1, 0, 1)


STARTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.sampled_from(["close", "torn"])),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(starts=STARTS)
def test_the_record_is_that_of_the_run_that_goes_on(tmp_path_factory, starts):
    """Any starts, each cut after a few steps, whole or in the middle of a line."""
    folder = tmp_path_factory.mktemp("run")
    follower, branch, given_up = Follower(folder), {}, 0
    for number, (first, count, end) in enumerate(starts):
        record = Record(folder)
        is_new = not branch or first <= min(branch)
        earlier = record.begin(first, {"model": "m"})
        kept = {} if is_new else {step: x for step, x in branch.items() if step < first}
        assert dict(points(earlier)) == kept
        written = {first + 2 * index: float(number) for index in range(count)}
        for step, value in written.items():
            record.write(reading(step, value))
            record.write_alert(alert(step, value))
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
from support.readings import reading_of
from geomon.record import Record
record = Record(sys.argv[1])
record.begin(10, {})
if sys.argv[2] == "written":
    record.write(reading_of({"a/mean": 2.0}, 10, "inline"))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("moment", "left"), [("begun", ONE), ("written", [(0, 1), (10, 2)])])
def test_a_kill_leaves_the_old_branch_or_the_new_one(forks, tmp_path, moment, left):
    check(History([begin(0), write(0, 10, 20)], ONE), tmp_path)
    done = forks.run(_KILLED, tmp_path, moment)
    assert done.returncode == -9
    assert points(read(tmp_path)) == left
    record = Record(tmp_path)
    record.begin(15, {})
    record.write(reading(15, 3.0))
    assert points(read(tmp_path))[-1] == (15, 3)
