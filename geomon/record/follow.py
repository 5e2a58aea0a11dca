"""Following a record: new readings are read while the run goes on."""

import stat
from pathlib import Path
from typing import Any, BinaryIO

from geomon.record.jsonl import BUFFER, FILE_NAME, MAX_LINE, parse_lines
from geomon.record.reading import LineCheck, Reading, Readings
from geomon.record.versions import Newer

# Bytes by which a file is recognised: two runs differ in the times and the numbers of a line.
_SAMPLE = 4096


class Follower:
    """Reader of a growing record, which may reach hundreds of MB: it continues where it stopped.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        stack: Name of the stack to follow, for a model with several; None for the main one.

    Attributes:
        path: Path of the file.
        readings: All readings of the file so far.
        runs: Descriptions of the run so far, one for each start or resume.
    """

    def __init__(self, directory: Path, stack: str | None = None) -> None:
        self._stack = stack
        self.path = directory if directory.suffix == ".jsonl" else directory / FILE_NAME
        self.readings: list[Reading]
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.readings = []
        self.runs: list[dict[str, Any]] = []
        self._inode, self._offset, self._lines = -1, 0, 0
        self._check = LineCheck()
        self._state: tuple[int, int, int] | None = None  # of the file at the last look
        self._head = self._tail = b""  # the first and the last bytes of what was read

    @property
    def mixed_at(self) -> int | None:
        """Line from which the file holds the readings of two runs at once; None for one run."""
        return self._check.mixed_at

    @property
    def newer(self) -> Newer | None:
        """What a newer version of geomon has written; None where none has."""
        return self._check.newer

    def remarks(self) -> list[str]:
        """List what a page says before it shows the run, in sentences; mostly nothing."""
        return Readings([], [], self.mixed_at, newer=self.newer).remarks()

    def look(self) -> list[Reading]:
        """Read what was written since the last call.

        A file that was replaced, or written anew in its place, is read from its start; so is one
        that was no record, when it has changed.

        Returns:
            The new readings.

        Raises:
            ValueError: The file is not a record, or the model has no stack of that name.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is no record: expected a regular file")
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if state == self._state:
            return []
        try:
            new = self._read_on(status.st_ino)
        except ValueError:
            self._begin_anew()
            self._state = state  # as it is, the file will not do: not before it has changed
            raise
        self.readings += new
        self._state = state
        return new

    def _read_on(self, inode: int) -> list[Reading]:
        new: list[Reading] = []
        with self.path.open("rb", buffering=BUFFER) as file:
            if not self._goes_on(inode, file):
                self._begin_anew()
            self._inode = inode
            file.seek(self._offset)
            # A line at a time: a record that grew for long is larger than the memory for it.
            while (line := file.readline(MAX_LINE + 1)).endswith(b"\n") or len(line) > MAX_LINE:
                parsed = list(parse_lines([line], self.path, self._check, first=self._lines + 1))
                self.runs += [item for item in parsed if isinstance(item, dict)]
                new += [item for item in parsed if isinstance(item, Reading)]
                self._offset += len(line)
                self._lines += 1
                self._head = self._head or line[:_SAMPLE]
                self._tail = line[-_SAMPLE:]
        return Readings([], new).of_stack(self._stack).readings if new else new

    def _goes_on(self, inode: int, file: BinaryIO) -> bool:
        """Return whether the file still holds, where they were, the first and last bytes read."""
        if inode != self._inode:
            return False
        file.seek(0)
        if file.read(len(self._head)) != self._head:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail
