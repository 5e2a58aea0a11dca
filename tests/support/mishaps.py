"""Mishaps of a run: a full disk, Ctrl-C at a chosen line, and a signal whose handler raises."""

import errno
import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import geomon


class FullDisk:
    """A disk with a few free bytes: the write that exceeds them is cut short, the next refused."""

    def __init__(self, monkeypatch, free: int = 0) -> None:
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


def files(*names: str) -> set[str]:
    """Full names of files of the package, as frames have them."""
    return {str(Path(geomon.__file__).parent / name) for name in names}


class StopError(TimeoutError, RuntimeError, ValueError):
    """Raised by a handler; part of the kinds of errors that geomon deals with."""


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def send_a_signal() -> None:
    """Send this process the signal of `handled`, as a scheduler does."""
    signal.raise_signal(signal.SIGUSR1)


@contextmanager
def handled() -> Iterator[None]:
    """Have a handler of the training raise `StopError`."""

    def handle(number, frame):
        raise StopError

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Interrupting:
    """Strikes, by default as Ctrl-C, at the n-th line of files that is reached from `begin` on.

    Args:
        files: Full names of the files.
        at: Number of the line, from 1; -1 only counts.
        strike: Raises.

    Attributes:
        lines: File and number of each line that was reached, in order.
    """

    def __init__(self, files: set[str], at: int, strike: Callable[[], None] = press_ctrl_c) -> None:
        self.files = files
        self.at = at
        self.strike = strike
        self.lines: list[tuple[str, int]] = []
        self._before = sys.gettrace()  # coverage.py's, say

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *error):
        self.end()

    def begin(self) -> None:
        sys.settrace(self._trace)
        frame = sys._getframe()
        while frame is not None:  # those that run already, which return to lines of theirs
            if frame.f_code.co_filename in self.files:
                frame.f_trace = self._trace
            frame = frame.f_back

    def end(self) -> None:
        """Trace as before."""
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.at:
                self.end()
                self.strike()
        return self._trace
