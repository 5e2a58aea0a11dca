"""One process at a time writes into a folder."""

import errno
import os
import subprocess
import sys

import pytest
from tagged import reading_of

from geomon.record import Record, read

_HOLD = """
import sys, time
from geomon.record import Record
record = Record(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def reading(step):
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


@pytest.mark.parametrize("system", [NoLocks, None], ids=["no locks", "windows"])
def test_without_locks_a_run_is_recorded_all_the_same(tmp_path, monkeypatch, system):
    monkeypatch.setattr("geomon.record.lock.fcntl", system)
    path = tmp_path / ".readings.lock"
    path.write_text("what a process has left there")
    record = Record(tmp_path)
    assert str(os.getpid()) in path.read_text()
    record.begin(0, {})
    record.write(reading(0))
    record.close()
    assert [each.name for each in tmp_path.iterdir()] == ["readings.jsonl"]
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "nothing"])
def test_a_link_in_place_of_the_lock_is_refused_and_nothing_is_written_through(tmp_path, is_there):
    other = tmp_path / "elsewhere.txt"
    if is_there:
        other.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".readings.lock").symlink_to(other)
    with pytest.raises(ValueError, match=r"run' cannot be written \(.*/\.readings\.lock: "):
        Record(tmp_path / "run")
    assert other.exists() == is_there
    assert not is_there or other.read_text() == "precious"


def test_a_link_that_appears_in_the_middle_of_a_run_is_not_written_through(tmp_path):
    other = tmp_path / "elsewhere.txt"
    other.write_text("precious")
    record = Record(tmp_path / "run")
    record.begin(0, {})
    path = tmp_path / "run" / ".readings.lock"
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(OSError, match=r"regular|links"):
        record.write(reading(0))
    path.unlink()
    record.write(reading(1))
    record.close()
    assert other.read_text() == "precious"
    assert [each.step for each in read(tmp_path / "run")] == [0, 1]


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="the system cannot refuse links")
def test_a_link_that_appears_after_the_look_is_not_followed(tmp_path, monkeypatch):
    other = tmp_path / "elsewhere.txt"
    other.write_text("precious")
    monkeypatch.setattr("geomon.record.lock.check_regular", lambda path, **options: None)
    (tmp_path / ".readings.lock").symlink_to(other)
    with pytest.raises(ValueError, match="cannot be written"):
        Record(tmp_path)
    assert other.read_text() == "precious"


def test_what_a_lock_file_says_does_not_act_on_a_terminal(held):
    folder, _ = held
    (folder / ".readings.lock").write_text("\x1b[2Jprocess")
    with pytest.raises(ValueError, match="is in use") as refusal:
        Record(folder)
    assert "\x1b" not in str(refusal.value)
