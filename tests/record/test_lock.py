"""One process at a time writes into a folder."""

import contextlib
import errno
import os
import signal
import socket

import pytest

from geomon.record import Follower, Record, read
from support.readings import reading_of

_HOLD = """
import os, sys, time
os.setsid()
from geomon.record import Record
record = Record(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holding(code, folder, forks):
    """A process that records in the folder; what it has started ends with it."""
    reader, writer = os.pipe()
    process = forks.start(code, folder, environment=os.environ, stdout=writer, stderr=2)
    os.close(writer)
    with open(reader) as said:
        try:
            assert said.readline() == "held\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def write(record, step):
    record.begin(step, {})
    record.write(reading_of({"a/mean": 1.0}, step))


_OUTLIVED = _HOLD.replace(
    "print", "os.fork() or (time.sleep(60), os._exit(0)); print"
)  # fmt: skip


@pytest.mark.parametrize("code", [_HOLD, _OUTLIVED], ids=["alone", "outlived by a worker"])
def test_a_second_process_is_refused_until_the_first_is_gone(forks, tmp_path, code):
    with holding(code, tmp_path, forks) as process:
        place = f"is in use, process {process.pid} on "
        with pytest.raises(ValueError, match=place) as refusal:
            Record(tmp_path)
        assert "\n" not in str(refusal.value)
        (tmp_path / ".readings.lock").write_text("\x1b[2Jprocess")  # acts on no terminal
        with pytest.raises(ValueError, match="is in use") as refusal:
            Record(tmp_path)
        assert "\x1b" not in str(refusal.value)
        (tmp_path / ".readings.lock").write_text("")
        with pytest.raises(ValueError, match=r"in use, a process records a run there: .* in it$"):
            Record(tmp_path)
        process.send_signal(signal.SIGKILL)  # a resume after a crash is let in at once
        process.wait(60)
        write(Record(tmp_path), 0)
    assert len(read(tmp_path)) == 1


HERE, GONE = socket.gethostname(), 2**22 + 1  # no system numbers a process so
# Contents of a lock, and the process that a page names: "" if it was killed.
WRITERS = {
    "runs": (f"process {os.getppid()} on {HERE}", f"process {os.getppid()} on {HERE}"),
    "was killed": (f"process {GONE} on {HERE}", ""),
    "on another machine": (f"process {GONE} on the_{HERE}", f"process {GONE} on the_{HERE}"),
    "of no possible number": (f"process {10**30} on {HERE}", f"process {10**30} on {HERE}"),
    "says nothing": ("", "a process"),
    "says something else": ("a note\x1b[2J", "a note\ufffd[2J"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_looks_at_a_record_is_told_which_process_writes_it(tmp_path, name):
    follower = Follower(tmp_path)
    assert follower.writer() is None
    record = Record(tmp_path)
    assert follower.writer() == f"process {os.getpid()} on {HERE}"
    record.close()
    assert follower.writer() is None
    content, named = WRITERS[name]
    (tmp_path / ".readings.lock").write_text(content)
    assert follower.writer() == named
    (tmp_path / ".readings.lock").unlink()
    (tmp_path / ".readings.lock").symlink_to(tmp_path / "elsewhere")
    assert follower.writer() is None
    (tmp_path / "elsewhere").write_text(content)  # nor is a link followed to a file
    assert follower.writer() is None


def test_a_process_that_the_owner_forks_is_another_one(forks, tmp_path):
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
    assert forks.run(forking, tmp_path).returncode == 7


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
    write(first, 0)  # takes the folder again
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
    write(record, 0)
    record.close()
    assert [each.name for each in tmp_path.iterdir()] == ["readings.jsonl"]
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "appears after the look"])
@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "nothing"])
def test_a_link_in_place_of_the_lock_is_refused_and_nothing_is_written_through(
    tmp_path, monkeypatch, is_there, is_seen
):
    other = tmp_path / "elsewhere.txt"
    if is_there:
        other.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".readings.lock").symlink_to(other)
    if not is_seen:
        monkeypatch.setattr("geomon.record.lock.check_regular", lambda path, **options: None)
    with pytest.raises(ValueError, match=r"run' cannot be written \("):
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
        record.write(reading_of({}, 0))
    path.unlink()
    record.write(reading_of({}, 1))
    record.close()
    assert other.read_text() == "precious"
    assert [each.step for each in read(tmp_path / "run")] == [0, 1]
