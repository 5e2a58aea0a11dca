"""Following a record: new readings are read while the run goes on."""

from pathlib import Path

from geomon.record.jsonl import BUFFER, FILE_NAME, MAX_LINE, parse_lines
from geomon.record.reading import Reading, Readings, SequenceCheck


class Follower:
    """Reader of a growing record, which may reach hundreds of MB: it continues where it stopped.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        stack: Name of the stack to follow, for a model with several; None for the main one.

    Attributes:
        path: Path of the file.
        readings: All readings of the file so far.
    """

    def __init__(self, directory: Path, stack: str | None = None) -> None:
        self._stack = stack
        self.path = directory if directory.suffix == ".jsonl" else directory / FILE_NAME
        self.readings: list[Reading] = []
        self._inode, self._offset, self._lines = -1, 0, 0
        self._check = SequenceCheck()

    @property
    def mixed_at(self) -> int | None:
        """Line from which the file holds the readings of two runs at once; None for one run."""
        return self._check.mixed_at

    def look(self) -> list[Reading]:
        """Read what was written since the last call; a replaced file is read from its start.

        Returns:
            The new readings.

        Raises:
            ValueError: The file is not a record, or the model has no stack of that name.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self.readings = status.st_ino, 0, []
            self._lines, self._check = 0, SequenceCheck()
        if status.st_size == self._offset:
            return []
        new: list[Reading] = []
        with self.path.open("rb", buffering=BUFFER) as file:
            file.seek(self._offset)
            # A line at a time: a record that grew for long is larger than the memory for it.
            while (line := file.readline(MAX_LINE + 1)).endswith(b"\n") or len(line) > MAX_LINE:
                parsed = parse_lines([line], self.path, self._check, first=self._lines + 1)
                new += [item for item in parsed if isinstance(item, Reading)]
                self._offset += len(line)
                self._lines += 1
        new = Readings([], new).of_stack(self._stack).readings if new else new
        self.readings += new
        return new
