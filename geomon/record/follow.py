"""Read a record, `readings.jsonl`, during the run or afterwards."""

import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from geomon.failures import failures
from geomon.record.alert import RaisedAlert
from geomon.record.arrays import ArrayFolder
from geomon.record.lock import writer_of
from geomon.record.paths import local_path
from geomon.record.reading import Reading, Readings
from geomon.record.versions import is_newer
from geomon.version import __version__

FILE_NAME = "readings.jsonl"

# Longest line in bytes: ten times what a model with 1,000 layers and heads needs.
MAX_LINE = 2**26
_MOST_NAMED = 4  # most folders named in a message


class _RunLine(msgspec.Struct):
    run: dict[str, Any]


class _AlertLine(msgspec.Struct):
    alert: RaisedAlert


# Decoders of the kinds of lines, by how a line begins.
_KINDS: dict[bytes, msgspec.json.Decoder[Any]] = {
    b'{"run"': msgspec.json.Decoder(_RunLine),
    b'{"alert"': msgspec.json.Decoder(_AlertLine),
    b'{"step"': msgspec.json.Decoder(Reading),
}


class _Content:
    """Content of the lines of a record: the starts of the run, and its branches.

    Attributes:
        runs: Descriptions of the starts.
        new: Readings and alerts of the present branch since the last look.
        mixed_at: Number of the first line of another run that writes too, or None.
    """

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.new: list[Reading | RaisedAlert] = []
        self.mixed_at: int | None = None
        self._branch: list[Reading | RaisedAlert] = []
        self._abandoned: list[Reading] = []
        self._last: dict[str, int] = {}  # last step of the present run, by source

    def readings(self, folder: ArrayFolder | None) -> Readings:
        """Return the readings and alerts of the present branch, and the abandoned readings."""
        readings = [each for each in self._branch if isinstance(each, Reading)]
        raised = [each for each in self._branch if isinstance(each, RaisedAlert)]
        return Readings([*self.runs], readings, self.mixed_at, folder, raised, [*self._abandoned])

    def rewind(self, step: int) -> None:
        """Give up the branch from a step on."""
        self._abandoned += [
            each for each in self._branch if each.step >= step and isinstance(each, Reading)
        ]
        self._branch = [each for each in self._branch if each.step < step]
        self.new = [each for each in self.new if each.step < step]

    def add(self, content: Reading | RaisedAlert | dict[str, Any], line: int) -> None:
        """Add what a line says, given the line's number."""
        if isinstance(content, dict):
            self._last.clear()
            self.runs.append(content)
            if "rewound_to" in content:  # an older record has no such line
                self.rewind(content["rewound_to"])
            return
        if isinstance(content, Reading):
            # One run writes ascending steps. If a step comes again although no line says that a run
            # has begun, another run is writing too.
            if content.step <= self._last.get(content.source, -math.inf) and self.mixed_at is None:
                self.mixed_at = line
            self._last[content.source] = content.step
        self._branch.append(content)
        self.new.append(content)

    @property
    def version(self) -> str:
        """Version of geomon that wrote the last start of the run; "" if unknown."""
        return str(self.runs[-1].get("geomon", "")) if self.runs else ""


class _ReadLines:
    """The lines of a file that were read, to go on behind them.

    Attributes:
        count: Number of lines.
        size: Their size in bytes.
    """

    def __init__(self) -> None:
        self.count = self.size = 0
        # First and last line: two runs differ in their times and numbers.
        self._first = self._last = b""

    def add(self, line: bytes) -> None:
        """Add the next line."""
        self.size += len(line)
        self.count += 1
        self._first, self._last = self._first or line, line

    def are_in(self, file: BinaryIO) -> bool:
        """Return whether the first and the last line are in their places in an open file."""
        if file.read(len(self._first)) != self._first:
            return False
        file.seek(self.size - len(self._last))
        return file.read(len(self._last)) == self._last


class Follower:
    """Reader of a growing record, up to hundreds of MB; each look continues after the last one.

    A last line without its end is torn or still being written, and left for later.

    Args:
        directory: Folder of the run, or the path of its file; either may appear later.
        searches: Whether to follow the newest record below the folder if it has none itself.
            Defaults to False.

    Attributes:
        path: Path of the file.

    Raises:
        ValueError: If the directory is remote.
    """

    def __init__(self, directory: Path, *, searches: bool = False) -> None:
        self._searches = searches
        directory = local_path(directory)
        is_path = directory.suffix == ".jsonl" or directory.is_file()
        self.path = directory if is_path else directory / FILE_NAME
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._content, self._lines = _Content(), _ReadLines()
        self._state: tuple[int, int, int] | None = None  # state of the file at the last look
        self._torn = b""

    def readings(self) -> Readings:
        """Return the readings and alerts of the present branch, and the abandoned readings."""
        return self._content.readings(ArrayFolder.of_record(self.path))

    def writer(self) -> str | None:
        """Name the process that writes the record; "" if it was killed, None if there is none."""
        return writer_of(self.path.parent)

    def rewind(self, step: int) -> None:
        """Give up the branch from a step on: its readings are abandoned, and its alerts dropped.

        Args:
            step: First step that is trained again.
        """
        self._content.rewind(step)

    def look(self) -> list[Reading | RaisedAlert]:
        """Read what was written since the last call.

        A file that was replaced or rewritten is read from its start, as is a file that was not a
        record once it has changed.

        Returns:
            The new readings and alerts. If the run went back to an earlier step meanwhile,
            `readings` no longer holds all that were returned before.

        Raises:
            ValueError: If the file is not a record.
        """
        self._content.new = []
        if self._searches and not self._state and not self.path.exists():
            self.path = next(iter(_records_below(self.path.parent)), self.path)
        try:
            status = self.path.stat()
        except failures(FileNotFoundError):
            return []
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a record: expected a regular file")
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if state == self._state:
            return []
        try:
            with self.path.open("rb") as file:
                if not self._lines.are_in(file):
                    self._begin_anew()
                file.seek(self._lines.size)
                # One line at a time, because a long record may not fit into memory.
                while (line := file.readline(MAX_LINE)).endswith(b"\n") or len(line) == MAX_LINE:
                    self._take(line)
                self._torn = line
        except failures(ValueError):
            self._begin_anew()
            self._state = state  # do not read the file again before it has changed
            raise
        self._state = state
        return self._content.new

    def _take(self, line: bytes) -> None:
        """Process the next line, or as much of it as a line may have."""
        try:
            if not line.endswith(b"\n"):
                raise ValueError(f"it is longer than {MAX_LINE:,} bytes")
            content = _parse(line)
        except failures(ValueError) as error:
            if not self._is_of_newer_kind(line):
                raise self._is_no_line(error) from error
            content = None
        self._lines.add(line)
        if content is not None:
            self._content.add(content, self._lines.count)

    def _is_of_newer_kind(self, line: bytes) -> bool:
        """Whether a newer geomon wrote this record, with a kind of line unknown here."""
        is_known = line.startswith(tuple(_KINDS))
        return line.startswith(b'{"') and not is_known and is_newer(self._content.version)

    def _is_no_line(self, why: object) -> ValueError:
        version = self._content.version
        advice = f"expected a line from geomon {__version__}"
        if is_newer(version):
            advice = f"the newer geomon {version} wrote it, so upgrade geomon"
        elif version:
            advice = f"geomon {version} wrote it, perhaps before lines changed: read it there"
        return ValueError(
            f"line {self._lines.count + 1} of {self.path} is not a line of a record ({why}): "
            f"{advice}, or move the file away"
        )

    def check_writable(self) -> None:
        """Raise unless the file, as of the last look, is a record that can be continued.

        A torn last line must belong to a record too, because it is going to be removed.
        """
        torn = self._torn
        if not any(torn.startswith(x) or x.startswith(torn) for x in _KINDS):
            raise self._is_no_line(reprlib.repr(torn))


def read(directory: str | os.PathLike[str]) -> Readings:
    """Read the record of a run.

    Args:
        directory: Folder of the run, or the path of its `readings.jsonl`.

    Returns:
        The readings.

    Raises:
        FileNotFoundError: If the folder holds no record.
        ValueError: If the file is not a record, or the directory is remote.
    """
    path = local_path(directory)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        folder = path.parent if path.name == FILE_NAME else path
        below = [str(found.parent) for found in _records_below(folder)[:_MOST_NAMED]]
        raise FileNotFoundError(
            f"no record at {path}: expected the folder of a run, with a {FILE_NAME} in it"
            + (f"; there is one in {', '.join(sorted(below))}" if below else "")
        )
    follower = Follower(path)
    follower.look()
    return follower.readings()


def _records_below(folder: Path) -> list[Path]:
    """List the records at most two levels below a folder, the last written first."""
    found = [path for below in ("*", "*/*") for path in folder.glob(f"{below}/{FILE_NAME}")]
    return sorted(found, key=os.path.getmtime, reverse=True)


def _parse(line: bytes) -> Reading | RaisedAlert | dict[str, Any]:
    """Parse one whole line: a reading, an alert, or the description of a run."""
    decoder = next((_KINDS[x] for x in _KINDS if line.startswith(x)), _KINDS[b'{"step"'])
    try:
        content = decoder.decode(line.decode())  # it would not check UTF-8 in skipped content
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(content, _AlertLine):
        return content.alert
    if isinstance(content, Reading):
        return content
    run: dict[str, Any] = content.run
    if type(run.get("rewound_to", 0)) is not int:
        raise ValueError(f"'rewound_to' is {reprlib.repr(run['rewound_to'])}, expected a step")
    return run
