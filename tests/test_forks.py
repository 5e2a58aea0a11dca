"""A program that starts as a fork is a process like any other."""

import os
import signal
import subprocess

import pytest
from forks import Forks

PROGRAM = """
import json, os, pathlib, sys, time
assert "colorsys" in sys.modules  # of the preparation
print(json.dumps([sys.argv[1:], os.environ["GIVEN"], "HOME" in os.environ]), flush=True)
if "fail" in sys.argv:
    raise ValueError("as asked")
if "write" in sys.argv:
    pathlib.Path(sys.argv[2]).write_bytes(bytes(2000))
if "wait" in sys.argv:
    time.sleep(300)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def forks():
    forks = Forks("import colorsys")
    yield forks
    forks.close()


@pytest.fixture
def start(forks, tmp_path):
    """Starts the program; gives its process and the file descriptors of what it prints."""
    path, (reader, writer) = tmp_path / "program.py", os.pipe()
    path.write_text(PROGRAM)

    def started(*arguments, **options):
        process = forks.start(
            str(path), *arguments, environment={"GIVEN": "so"}, stdout=writer, stderr=writer,
            **options,
        )  # fmt: skip
        os.close(writer)
        return process, open(reader)

    return started


def test_it_has_its_own_arguments_environment_streams_and_status(start):
    process, said = start("a", 1)
    with said:
        assert said.read() == '[["a", "1"], "so", false]\n'
    assert process.wait(60) == process.wait(60) == 7
    assert not process.is_running()
    process.send_signal(signal.SIGKILL)  # of what has ended it does nothing


def test_an_exception_is_its_own(start):
    process, said = start("fail")
    with said:
        assert said.read().endswith("ValueError: as asked\n")
    assert process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_it(start, number):
    process, said = start("wait")
    with said:
        said.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(number)
        assert process.wait(60) == -number
        assert ("KeyboardInterrupt" in said.read()) == (number == signal.SIGINT)


def test_files_can_be_limited(start, tmp_path):
    process, said = start("write", tmp_path / "file", file_size=1000)
    with said:
        assert "File too large" in said.read()
    assert process.wait(60) == 1


def test_a_preparation_that_fails_is_an_error(capfd):
    forks = Forks("import no_such_module")
    try:
        with pytest.raises((RuntimeError, OSError)):
            forks.start("x.py", environment={}, stdout=1, stderr=2)
    finally:
        forks.close()
    assert "no_such_module" in capfd.readouterr().err


def test_what_still_runs_is_ended_with_it(tmp_path):
    forks, path = Forks("import colorsys"), tmp_path / "program.py"
    path.write_text(PROGRAM)
    with (tmp_path / "said").open("w") as said:
        process = forks.start(
            str(path), "wait", environment={"GIVEN": ""}, stdout=said.fileno(), stderr=said.fileno()
        )
    forks.close()
    assert process.wait(60) == -signal.SIGKILL
