"""Ctrl-C at a chosen line: KeyboardInterrupt, raised by a trace function."""

import sys
from pathlib import Path

import geomon


def files(*names: str) -> set[str]:
    """Full names of files of the package, as frames have them."""
    return {str(Path(geomon.__file__).parent / name) for name in names}


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line of some files that is reached from `begin` on.

    Args:
        files: Full names of the files.
        at: Number of the line, from 1; -1 only counts.

    Attributes:
        lines: File and number of each line that was reached, in order.
    """

    def __init__(self, files: set[str], at: int) -> None:
        self.files = files
        self.at = at
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
                raise KeyboardInterrupt
        return self._trace
