"""Following a record: new readings are read while the run goes on."""

from pathlib import Path

from geomon.record.jsonl import FILE_NAME, parse_line
from geomon.record.reading import Reading, Readings


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
        self._inode, self._offset = -1, 0

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
        if status.st_size == self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        new = self._parse(whole.splitlines())
        self._offset += len(whole)
        new = Readings([], new).of_stack(self._stack).readings if new else new
        self.readings += new
        return new

    def _parse(self, lines: list[bytes]) -> list[Reading]:
        try:
            parsed = [parse_line(line) for line in lines]
        except ValueError as error:
            raise ValueError(
                f"{self.path} holds a line that is not a record's ({error}): expected what geomon "
                "writes"
            ) from error
        return [item for item in parsed if isinstance(item, Reading)]
