"""The file of a run, `readings.jsonl`: one line of JSON per reading, written before it is shown.

A line either describes the run (`"run"`: versions, model, layers, metrics) or is a reading. Each
line is written whole and immediately: a killed run keeps every reading, and a resumed run appends
to the same file.
"""

import errno
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from geomon.record.reading import Reading, Readings

FILE_NAME = "readings.jsonl"

# Lines kept in memory while the disk is full: a large model's have 100 kB each.
_MAX_PENDING = 100


class Record:
    """Writer of `readings.jsonl` in a directory.

    A line that cannot be written (a full disk, a deleted folder) stays in memory and is written
    before the next one. At most 100 lines are kept; then the oldest reading is dropped.

    Args:
        directory: Folder of the run; made if it does not exist.

    Raises:
        ValueError: The directory cannot be made or written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / FILE_NAME
        self._is_foreign = False  # whether the file on disk belongs to another run
        self._pending: deque[str] = deque()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                pass
        except OSError as error:
            raise ValueError(
                f"directory={str(directory)!r} cannot be written ({error.strerror}): give a folder "
                "that can be made and written"
            ) from error

    def begin(self, step: int, description: Mapping[str, Any]) -> set[tuple[int, str]]:
        """Start the file or continue it, and report which readings it holds already.

        A run that begins at or before the first recorded step is a new one: the old file is then
        renamed with a number, as is a file that is not a record. The line that describes the run is
        written with the first reading.

        Args:
            step: First step that this run reads.
            description: Facts about the run (versions, model, metrics) for the line that opens it.

        Returns:
            (step, source) of each reading that the file holds.

        Raises:
            ValueError: The file is not a record.
            OSError: The file cannot be read.
        """
        opening = {"run": {**description, "time": time.time(), "from_step": step}}
        self._pending.append(json.dumps(opening))
        try:
            earlier = _parse(self.path).readings
        except ValueError:
            self._is_foreign = True
            raise
        self._is_foreign = bool(earlier) and step <= earlier[0].step
        return set() if self._is_foreign else {(item.step, item.source) for item in earlier}

    def write(self, reading: Reading) -> None:
        """Append a reading to the file; on return it is with the operating system.

        Args:
            reading: Reading to append.

        Raises:
            OSError: The file cannot be written now; the reading is kept and written with the next.
        """
        self._pending.append(reading.line())
        if len(self._pending) > _MAX_PENDING:
            del self._pending[1]  # the first may be the line that opens the run
        if self._is_foreign:
            self.path.rename(_free_name(self.path))
            self._is_foreign = False
        while self._pending:
            self._append(self._pending[0])
            self._pending.popleft()

    def close(self) -> None:
        """Do nothing: the file is open only while a line is written."""

    def _append(self, line: str) -> None:
        """Append a whole line, or leave the file as it was.

        The file is unbuffered, so that a line is one write; a line torn by a kill is removed first.
        """
        content = (line + "\n").encode()
        with self.path.open("a+b", buffering=0) as file:
            end = _truncate_torn_line(file)
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise


def read(directory: str | os.PathLike[str]) -> Readings:
    """Read the record of a run.

    Args:
        directory: Folder of the run, or the path of its `readings.jsonl`.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The file is not a record.
    """
    path = Path(directory)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no record at {path}: expected the folder of a run, with a {FILE_NAME} in it"
        )
    return _parse(path)


def parse_line(line: str | bytes) -> Reading | dict[str, Any]:
    """Parse one line of a record.

    Args:
        line: Text of a whole line.

    Returns:
        A reading, or the description of a run.

    Raises:
        ValueError: The line is neither of the two.
    """
    try:
        content: dict[str, Any] = json.loads(line)
        return content["run"] if "run" in content else Reading.from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _parse(path: Path) -> Readings:
    """Parse all whole lines of a record; a last line without its end is torn or being written."""
    runs: list[dict[str, Any]] = []
    readings: list[Reading] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                content = parse_line(line)
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} is not a line of a record ({error}): expected what "
                    "geomon writes; move the file away"
                ) from error
            if isinstance(content, Reading):
                readings.append(content)
            else:
                runs.append(content)
    return Readings(runs, readings)


def _truncate_torn_line(file: FileIO) -> int:
    """Remove a last line without its end from a file, and return the file's length in bytes."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return 0
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return end
    file.seek(0)
    return file.truncate(file.readall().rfind(b"\n") + 1)


def _free_name(path: Path) -> Path:
    """Find a free path beside the given one: `readings.1.jsonl`, `readings.2.jsonl` and so on."""
    number = 1
    while (name := path.with_stem(f"{path.stem}.{number}")).exists():
        number += 1
    return name
