"""Programs that start from a process which has imported what they need.

If a test needs a process of its own, most of its seconds go into the imports of torch, Lightning
and transformers. So one process imports them, once, and forks: the fork is a process like any
other, with its own arguments, environment, streams and signals.
"""

import contextlib
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# With one thread in the process that forks no other can hold a lock that its forks inherit.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_NUMBER = 8  # bytes of a number that is sent


class Program:
    """A running program."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._code: int | None = None
        self.pid = _receive(channel)

    def is_running(self) -> bool:
        return self._code is None and not select.select([self._channel], [], [], 0)[0]

    def send_signal(self, number: int) -> None:
        if self.is_running():
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Its exit status, negative for a signal, within a number of seconds."""
        if self._code is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._code = _receive(self._channel)
            self._channel.close()
        return self._code


class Forks:
    """A process that has run `preparation`, imports for instance, and starts programs.

    Args:
        preparation: Statements of Python.
        parent: Another such process, which this one is forked from: it need not import again what
            that one has imported.
    """

    def __init__(self, preparation: str, parent: "Forks | None" = None) -> None:
        self._programs: list[Program] = []
        self._process: subprocess.Popen[bytes] | None = None
        if parent is not None:
            self._channel = parent._ask({"preparation": preparation}, stdout=1, stderr=2)
            return
        self._channel, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), preparation],
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT,
                env=os.environ | ONE_THREAD,
            )  # fmt: skip

    def _ask(self, request: Mapping[str, Any], *, stdout: int, stderr: int) -> socket.socket:
        """Have the process fork; returns the channel to the fork, which answers the request."""
        channel, other = socket.socketpair()
        try:
            with other:
                socket.send_fds(self._channel, [b"!"], [other.fileno(), stdout, stderr])
            content = json.dumps(request).encode()
            _send(channel, len(content))
            channel.sendall(content)
        except BaseException:
            channel.close()
            raise
        return channel

    def start(
        self, what: str, *arguments: object, environment: Mapping[str, str], stdout: int,
        stderr: int, file_size: int | None = None,
    ) -> Program:  # fmt: skip
        """Start a program: a module (`"package.module"`), the path of a file, or lines of code.

        Its streams are file descriptors; the size of a file that it writes can be limited, in
        bytes: no disk need be full.
        """
        request = {
            "what": what, "arguments": [str(each) for each in arguments],
            "environment": {**environment, **ONE_THREAD}, "file_size": file_size,
        }  # fmt: skip
        self._programs.append(Program(self._ask(request, stdout=stdout, stderr=stderr)))
        return self._programs[-1]

    def run(
        self, what: str, *arguments: object, environment: Mapping[str, str] = os.environ,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a program to its end, as `subprocess.run` does; `start` says what it may be."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            program = self.start(
                what, *arguments, environment=environment, stdout=out.fileno(),
                stderr=errors.fileno(),
            )  # fmt: skip
            try:
                code = program.wait(timeout)
            finally:
                program.send_signal(signal.SIGKILL)
            said = [stream.seek(0) or stream.read() for stream in (out, errors)]
        return subprocess.CompletedProcess([what, *arguments], code, *said)

    def close(self) -> None:
        for program in self._programs:  # none is left, unless a test has failed
            program.send_signal(signal.SIGKILL)
            program.wait(60)
        self._channel.close()
        if self._process is not None:
            self._process.wait()


def _receive(channel: socket.socket) -> int:
    number = channel.recv(_NUMBER, socket.MSG_WAITALL)
    if len(number) < _NUMBER:
        raise RuntimeError("the process that forks has ended: its preparation failed, see stderr")
    return int.from_bytes(number, signed=True)


def _send(channel: socket.socket, number: int) -> None:
    channel.sendall(number.to_bytes(_NUMBER, signed=True))


def _serve(channel: socket.socket) -> tuple[socket.socket, int, int]:
    """Fork for every request until there are no more; returns in the forks only."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 3)
        with contextlib.suppress(ChildProcessError):  # there was none yet
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            _wait_for_all()
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            answer, stdout, stderr = descriptors
            return socket.socket(fileno=answer), stdout, stderr
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_all() -> None:
    """Wait for the forks, so that their processor time counts towards the suite."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _become_program(answer: socket.socket, stdout: int, stderr: int) -> None:
    """Fork once more: one process runs the program, and the other reports its status."""
    program = os.fork()
    if program == 0:
        answer.close()
        for own, given in enumerate((stdout, stderr), start=1):
            os.dup2(given, own)
            os.close(given)
        return
    os.close(stdout)
    os.close(stderr)
    _send(answer, program)
    _, status = os.waitpid(program, 0)
    _send(answer, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the program; its globals live as long as the process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    # A shell that starts the suite in the background has it, and its children, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit := request["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    what = request["what"]
    sys.argv = [what, *request["arguments"]]
    if "\n" in what:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<program>", "exec"), vars(main))
        return vars(main)
    if what.endswith(".py"):
        sys.path.insert(0, str(Path(what).parent))
        return runpy.run_path(what, run_name="__main__")
    return runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path[0] = str(ROOT / "tests")  # as pytest has it, and not the folder of this file
    sys.path.insert(0, str(ROOT))
    channel, request = socket.socket(fileno=int(sys.argv[1])), {"preparation": sys.argv[2]}
    streams: list[int] = []
    while "preparation" in request:
        for stream in streams:
            os.close(stream)
        exec(request["preparation"])
        gc.freeze()  # a program that ends need not search what was imported for garbage
        channel, *streams = _serve(channel)
        request = json.loads(channel.recv(_receive(channel), socket.MSG_WAITALL))
    _become_program(channel, *streams)
    program = _run(request)
