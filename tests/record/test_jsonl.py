import contextlib
import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record.reading import FILE_NAME, Reading, Record, heads, layers_of, read

HERE = Path(__file__).parent
PATHS = (HERE, HERE.parent)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def reading(step: int, source: str = "inline", **values: float) -> Reading:
    return Reading(step, 1.0, 0.5, source, "train", 64, 1, "float32", values or {"a/mean": 1.0})


@given(values=st.dictionaries(st.text(min_size=1), NUMBERS), step=st.integers(0))
def test_a_line_gives_the_reading_back_to_the_last_bit(values, step):
    before = Reading(step, 1.5, 0.1, "probe", "eval", 3, 2, "bfloat16", values, ["a note"])
    line = before.line()
    assert "\n" not in line
    assert Reading.from_json(json.loads(line)) == before


def test_values_that_are_no_numbers_become_null():
    line = reading(0, x=math.nan, y=math.inf, z=1.0).line()
    assert json.loads(line)["values"] == {"x": None, "y": None, "z": 1.0}
    assert math.isnan(Reading.from_json(json.loads(line)).values["x"])


def test_record_goes_on_after_a_resume(tmp_path):
    record = Record(tmp_path)
    assert record.begin(0, {"model": "m"}) == set()
    record.write(reading(0))
    record.write(reading(5, "probe"))
    resumed = Record(tmp_path)
    assert resumed.begin(4, {"model": "m"}) == {(0, "inline"), (5, "probe")}
    resumed.write(reading(8))
    found = read(tmp_path)
    assert [r.step for r in found] == [0, 5, 8]
    assert [run["from_step"] for run in found.runs] == [0, 4]


def test_a_killed_run_loses_no_reading_and_reads_none_twice(tmp_path):
    """Twenty kills at random moments of a reading; the program says what it found."""
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_runs.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kills, halfway, _, readings = map(int, re.findall(r"\d+", done.stdout))
    assert kills == 20
    assert halfway >= 10
    assert readings > 40


def test_the_line_that_describes_a_run_comes_with_its_first_reading(tmp_path):
    record = Record(tmp_path)
    record.begin(0, {"metrics": ["a"]})
    assert record.path.read_text() == ""
    record.write(reading(0))
    resumed = Record(tmp_path)
    assert resumed.begin(1, {"metrics": ["a", "b"]}) == {(0, "inline")}
    resumed.write(reading(1))
    kinds = ["run" if "run" in json.loads(line) else "reading" for line in lines(record)]
    assert kinds == ["run", "reading", "run", "reading"]
    assert [run["metrics"] for run in read(tmp_path).runs] == [["a"], ["a", "b"]]


def lines(record: Record) -> list[str]:
    return record.path.read_text().splitlines()


class FullDisk:
    """Room for some more bytes, as a disk has it: a write is cut short, the next one refused."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room = room
        disk = self

        class File(io.FileIO):
            def write(self, content):
                if disk.room <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = super().write(content[: disk.room])
                disk.room -= written
                return written

        def opened(path, mode="r", **kwargs):
            return File(path, "a+") if mode == "a+b" else open(path, mode, **kwargs)

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 1, 100, 700])
def test_lines_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, room):
    record = Record(tmp_path)
    record.begin(0, {"model": "m"})
    record.write(reading(0))
    disk = FullDisk(monkeypatch, room)
    for step in range(1, 9):
        with contextlib.suppress(OSError):
            record.write(reading(step))
        read(tmp_path)  # no reader trips on what is there
    before = [r.step for r in read(tmp_path)]
    assert before == list(range(len(before)))
    assert len(before) < 9
    disk.room = 10**6
    record.write(reading(9))
    assert [r.step for r in read(tmp_path)] == list(range(10))


def test_of_many_lines_that_wait_the_oldest_are_given_up(tmp_path, monkeypatch):
    record = Record(tmp_path)
    record.begin(0, {"model": "m"})
    disk = FullDisk(monkeypatch, 0)
    for step in range(300):
        with pytest.raises(OSError, match="No space left"):
            record.write(reading(step))
    disk.room = 10**6
    record.write(reading(300))
    found = read(tmp_path)
    assert [run["model"] for run in found.runs] == ["m"]
    assert [r.step for r in found] == list(range(202, 301))


def test_a_file_that_is_no_record_is_set_aside(tmp_path):
    (tmp_path / FILE_NAME).write_text("no json\n")
    record = Record(tmp_path)
    with pytest.raises(ValueError, match="line 1 of"):
        record.begin(0, {})
    record.write(reading(0))
    assert [r.step for r in read(tmp_path)] == [0]
    assert (tmp_path / "readings.1.jsonl").read_text() == "no json\n"


def test_a_run_that_starts_over_keeps_the_old_record(tmp_path):
    for _ in range(3):
        record = Record(tmp_path)
        record.begin(0, {})
        record.write(reading(0))
        record.write(reading(1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["readings.1.jsonl", "readings.2.jsonl", FILE_NAME]
    assert all(len(read(tmp_path / name)) == 2 for name in names)


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', '{"step": 3}', '{"run": {"a'])
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path, torn):
    record = Record(tmp_path)
    record.begin(0, {})
    record.write(reading(0))
    with record.path.open("a") as file:
        file.write(torn)
    assert [r.step for r in read(tmp_path)] == [0]
    resumed = Record(tmp_path)
    resumed.begin(1, {})
    resumed.write(reading(2))
    assert [r.step for r in read(tmp_path)] == [0, 2]


def test_series_are_in_order_and_without_gaps(tmp_path):
    record = Record(tmp_path)
    record.begin(0, {})
    for step, value in ((0, 1.0), (4, math.nan), (2, 3.0)):
        record.write(reading(step, **{"t/mean": value}))
    assert read(tmp_path).series("t/mean") == ([0, 2], [1.0, 3.0])
    assert read(tmp_path).series("no such tag") == ([], [])


def test_heads_and_layers():
    values = {f"q/layer_{layer:02d}/head_{head}": 10.0 * layer + head
              for layer in (1, 2) for head in range(3)}  # fmt: skip
    assert heads(reading(0, **values), "q") == [[10, 11, 12], [20, 21, 22]]
    assert heads(reading(0, **values), "other") == []
    assert layers_of(values, "q") == [1, 2]


def test_bad_places_get_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no record at .*readings\.jsonl"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Record(tmp_path / "file" / "inside")
    (tmp_path / FILE_NAME).write_text("no json\n")
    with pytest.raises(ValueError, match="line 1 of"):
        read(tmp_path)


_WRITER = """
import sys
from geomon.record import Reading, Record
record = Record(sys.argv[1])
record.begin(0, {})
step = 0
while True:
    values = {"x" * 50: 1.0 * step}
    record.write(Reading(step, 0.0, 0.0, "inline", "train", 1, 1, "float32", values))
    print(step, flush=True)
    step += 1
"""


def test_a_killed_process_loses_no_reading_that_was_shown(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    shown = [0, *map(int, process.stdout.read().splitlines()[:-1])]
    process.wait()
    process.stdout.close()
    assert len(shown) > 20
    assert [r.step for r in read(tmp_path)][: len(shown)] == shown
