"""One process at a time writes into a folder."""

import errno
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from tagged import reading_of

from geomon.record import Reading, Record, lock, read

_HOLD = """
import sys, time
from geomon.record import Record
record = Record(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def reading(step: int) -> Reading:
    return reading_of({"a/mean": 1.0}, step)


@pytest.fixture
def held(tmp_path):
    """A folder in which another process records, and that process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield tmp_path, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_until_the_first_is_gone(held):
    folder, process = held
    with pytest.raises(ValueError, match=f"is in use, process {process.pid} on ") as refusal:
        Record(folder)
    assert "\n" not in str(refusal.value)
    process.kill()  # however it ends: a resume after a crash is let in at once
    process.wait()
    record = Record(folder)
    record.begin(0, {})
    record.write(reading(0))
    assert len(read(folder)) == 1


def test_a_process_that_the_owner_forks_is_another_one(tmp_path):
    forking = """
import os, sys
from geomon.record import Record
owner = Record(sys.argv[1])
if os.fork() == 0:
    try:
        Record(sys.argv[1])
    except ValueError:
        os._exit(7)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.wait()[1])
assert len(os.listdir(sys.argv[1])) == 2  # the lock is the owner's still
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", forking, str(tmp_path)], check=False)
    assert done.returncode == 7


def test_a_worker_that_outlives_the_training_does_not_keep_the_lock(tmp_path):
    forking = _HOLD.replace("print", "import os; os.fork() or (time.sleep(60), os._exit(0)); print")
    process = subprocess.Popen(
        [sys.executable, "-c", forking, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="is in use"):
            Record(tmp_path)
        process.kill()
        process.wait()
        Record(tmp_path)
    finally:
        os.killpg(process.pid, 9)  # the worker
        process.stdout.close()


def free_descriptor():
    """The lowest one: how many are open."""
    with open(os.devnull) as file:
        return file.fileno()


def test_one_process_may_record_twice_and_closing_leaves_nothing(tmp_path):
    before = free_descriptor()
    first, second = Record(tmp_path), Record(tmp_path)
    first.close()
    assert (tmp_path / ".readings.lock").exists()
    second.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["readings.jsonl"]
    assert free_descriptor() == before


def test_a_reading_after_the_end_takes_the_folder_again(tmp_path):
    record = Record(tmp_path)
    record.begin(0, {})
    record.close()
    assert record.path.read_text() == ""
    record.write(reading(0))
    assert (tmp_path / ".readings.lock").is_file()


class NoLocks:
    """A file system that keeps no locks."""

    LOCK_EX = LOCK_NB = 0

    @staticmethod
    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("owner", "age", "refused"),
    [
        ({"host": "here", "process": "parent"}, 10_000, True),  # alive: however long ago
        ({"host": "here", "process": "gone"}, 0, False),
        ({"host": "here", "process": "own"}, 0, False),  # numbers come again: in a container
        ({"host": "elsewhere", "process": 1}, 0, True),
        ({"host": "elsewhere", "process": 1}, 70, False),
        ({}, 0, False),
        ([], 0, False),
        (None, 0, False),  # of no JSON: it was ended as it wrote
        ({"host": "here", "process": 10**40}, 0, True),
        ({"host": "here", "process": "a word"}, 120, False),
    ],
)
def test_without_locks_the_file_says_who_writes(tmp_path, monkeypatch, owner, age, refused):
    monkeypatch.setattr(lock, "fcntl", NoLocks)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words = {"here": socket.gethostname(), "parent": os.getppid(), "gone": gone.pid,
             "own": os.getpid()}  # fmt: skip
    if isinstance(owner, dict):
        owner = {key: words.get(value, value) for key, value in owner.items()}
    path = tmp_path / ".readings.lock"
    path.write_text("{" if owner is None else json.dumps(owner))
    os.utime(path, (time.time() - age,) * 2)
    if refused:
        with pytest.raises(ValueError, match="is in use"):
            Record(tmp_path)
        return
    record = Record(tmp_path)
    assert json.loads(path.read_text())["process"] == os.getpid()
    os.utime(path, (0, 0))
    record.begin(0, {})
    record.write(reading(0))
    assert time.time() - path.stat().st_mtime < 30  # a sign of life, for other hosts
    record.close()
    assert not path.exists()


def test_a_lock_that_the_system_keeps_needs_no_sign_of_life(tmp_path):
    """A file system may not have it: only there the age of the file says who is alive."""
    path = tmp_path / "lock"
    held_here = lock.FolderLock(path)
    try:
        os.utime(path, (1, 1))
        held_here.refresh()
        kept_by_system = lock.fcntl is not None
        assert (path.stat().st_mtime == 1) == kept_by_system
    finally:
        held_here.release()
