import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geomon.record import FILE_NAME, Follower, Reading, Record, read

TESTS = Path(__file__).parent.parent


def reading(step: int, source: str = "inline", **values: float) -> Reading:
    return Reading(step, 1.0, 0.5, source, "train", 64, 1, "float32", values or {"a/mean": 1.0})


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
        [sys.executable, str(TESTS / "kill_runs.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
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
    """A disk with a few free bytes: the write that exceeds them is cut short, the next refused."""

    def __init__(self, monkeypatch, free: int) -> None:
        self.free = free
        disk = self

        class File(io.FileIO):
            def write(self, content):
                if disk.free <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = super().write(content[: disk.free])
                disk.free -= written
                return written

        def opened(path, mode="r", **kwargs):
            return File(path, "a+") if mode == "a+b" else open(path, mode, **kwargs)

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("free", [0, 1, 100, 700])
def test_lines_wait_until_a_full_disk_has_space(tmp_path, monkeypatch, free):
    record = Record(tmp_path)
    record.begin(0, {"model": "m"})
    record.write(reading(0))
    disk = FullDisk(monkeypatch, free)
    for step in range(1, 9):
        with contextlib.suppress(OSError):
            record.write(reading(step))
        read(tmp_path)  # no reader trips on what is there
    before = [r.step for r in read(tmp_path)]
    assert before == list(range(len(before)))
    assert len(before) < 9
    disk.free = 10**6
    record.write(reading(9))
    assert [r.step for r in read(tmp_path)] == list(range(10))


def test_of_many_lines_that_wait_the_oldest_are_given_up(tmp_path, monkeypatch):
    record = Record(tmp_path)
    record.begin(0, {"model": "m"})
    disk = FullDisk(monkeypatch, 0)
    for step in range(300):
        with pytest.raises(OSError, match="No space left"):
            record.write(reading(step))
    disk.free = 10**6
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


def test_bad_places_get_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no record at .*readings\.jsonl"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Record(tmp_path / "file" / "inside")
    (tmp_path / FILE_NAME).write_text("no json\n")
    with pytest.raises(ValueError, match="line 1 of"):
        read(tmp_path)


@pytest.mark.parametrize("line", ["5", "[]", '"run"', '{"step": 1}', '{"values": []}'])
def test_json_of_another_shape_is_no_record(tmp_path, line):
    (tmp_path / FILE_NAME).write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1 of"):
        read(tmp_path)
    with pytest.raises(ValueError, match="not a record's"):
        Follower(tmp_path).look()


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
