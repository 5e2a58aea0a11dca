"""The file of a run, `readings.jsonl`: one line of JSON per reading, written before it is shown.

A line either describes the run (`"run"`: versions, model, layers, metrics) or is a reading. Each
line is written whole and immediately: a killed run keeps every reading, and a resumed run appends
to the same file. One process at a time writes into a folder (see `geomon.record.lock`).
"""

import contextlib
import errno
import itertools
import json
import os
import reprlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from geomon.record.arrays import ArrayFolder, Arrays
from geomon.record.lock import FolderLock, follow_folder, lock_folder
from geomon.record.printable import text_of
from geomon.record.reading import LineCheck, Reading, Readings
from geomon.record.regular import check_regular

FILE_NAME = "readings.jsonl"
_LOCK_NAME = ".readings.lock"

# Lines kept in memory while the disk is full: a large model's have 100 kB each.
_MAX_PENDING = 100
# Longest line in bytes: a model of 1,000 layers and heads, ten times over, stays below it.
MAX_LINE = 2**26
# Bytes that are read at once: a line of a large model is longer than the usual 8 kB.
BUFFER = 2**20
_MOST_NAMED = 4  # folders, in a message
# What every line of a record begins with.
_BEGINNINGS = (b'{"run"', b'{"step"')
_CHUNK = 2**16  # bytes


class Record:
    """Writer of `readings.jsonl` in a directory.

    A line that cannot be written (a full disk, say) stays in memory and is written before the next
    one, or by `close`. At most 100 lines are kept; then the oldest reading is dropped. A folder
    that was removed is made again; one that was renamed is gone on with, where the system tells
    its new name.

    Args:
        directory: Folder of the run; made if it does not exist.

    Raises:
        ValueError: The directory cannot be made or written, or another process writes there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Absolute: the program may go to another folder while it trains.
        self.path = Path(os.path.abspath(directory)) / FILE_NAME
        self.arrays = ArrayFolder.beside(self.path)
        self._is_foreign = False  # whether the file on disk belongs to another run
        self._begins = False  # whether the file has no readings, so that arrays are of another run
        self._opening: str | None = None  # the line that describes this run
        self._pending: deque[str] = deque()
        # After Ctrl-C the same reading may be given again. So the last one is kept, by its step,
        # source and time, with its line; and the last line that was written.
        self._given: tuple[tuple[int, str, float], str] | None = None
        self._written: str | None = None
        self._lock: FolderLock | None = None
        self._locked: Path | None = None  # where the lock stood when this record last looked
        try:
            self._take_lock()
            check_regular(self.path)
            with self.path.open("a"):
                pass
            self.arrays.remove_parts()
        except OSError as error:
            raise ValueError(
                f"directory={str(directory)!r} cannot be written ({error.filename}: "
                f"{error.strerror}): give a folder that can be made and written"
            ) from error

    def begin(
        self, step: int, description: Mapping[str, Any], *, resumes: bool = False
    ) -> set[tuple[int, str]]:
        """Start the file or continue it, and report which readings it holds already.

        A run that begins at or before the first recorded step is a new one: the old file is then
        renamed with a number, as is a file that is not a record. The line that describes the run is
        written with the first reading.

        Args:
            step: First step that this run reads.
            description: Facts about the run (versions, model, metrics) for the line that opens it.
            resumes: Whether earlier readings are of the same run, whatever their steps.

        Returns:
            (step, source) of each reading that the file holds.

        Raises:
            ValueError: The file is not a record.
            OSError: The file cannot be read.
        """
        opening = {"run": {**description, "time": time.time(), "from_step": step}}
        self._opening = json.dumps(opening, default=text_of)
        self._pending.append(self._opening)
        try:
            earlier = _parse(self.path, to_continue=True).readings
        except FileNotFoundError:  # removed since: it is made again
            self._begins = True
            return set()
        except ValueError:
            self._is_foreign = True
            raise
        self._begins = not earlier
        self._is_foreign = bool(earlier) and step <= earlier[0].step and not resumes
        return set() if self._is_foreign else {(item.step, item.source) for item in earlier}

    def write(self, reading: Reading) -> None:
        """Append a reading to the file; on return it is with the operating system.

        The last reading is not written twice: after Ctrl-C it may be given again.

        Args:
            reading: Reading to append.

        Raises:
            OSError: The file cannot be written now; the reading is kept and written with the next.
            FolderLockedError: Another process writes there since `close`; the reading is kept.
        """
        this = reading.step, reading.source, reading.time
        if self._given is None or self._given[0] != this:
            self._given = this, reading.line()
        _, line = self._given
        if line is not self._written and not any(other is line for other in self._pending):
            self._pending.append(line)
        if len(self._pending) > _MAX_PENDING:
            del self._pending[1]  # the first may be the line that opens the run
        self._write_pending()

    def write_arrays(self, reading: Reading, arrays: Arrays) -> None:
        """Write the arrays of a reading that is written, in a file beside the record.

        Of readings close to one another only some have arrays, and none whose line is not written.

        Args:
            reading: The reading.
            arrays: Arrays by tag.

        Raises:
            OSError: The file cannot be written; what was there is unchanged.
        """
        if self._pending or self._is_foreign or not arrays:
            return
        if self.arrays.takes(reading.step, reading.source):
            self.arrays.write(reading.step, reading.source, arrays)

    def close(self) -> None:
        """Write what could not be written before, and let other processes write in the folder.

        It may be called more than once; a reading that is written later takes the folder again.

        Raises:
            OSError: The file still cannot be written: the readings that are waiting are lost if the
                process ends now.
        """
        try:
            if any(line != self._opening for line in self._pending):
                self._write_pending()
        finally:
            self._lock = None

    def _take_lock(self) -> None:
        """Make the folder if it is not there, and see that this process holds it.

        A folder that was renamed while it is held is gone on with under its new name.
        """
        if self._lock is not None and follow_folder(self._lock) and self._lock.path != self._locked:
            self._locked = self._lock.path
            self.path = self._lock.path.with_name(FILE_NAME)
            self.arrays = ArrayFolder.beside(self.path)
        if self._lock is None or not self._lock.is_held:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path.parent / _LOCK_NAME)
            self._locked = self._lock.path
        self._lock.refresh()

    def _write_pending(self) -> None:
        self._take_lock()
        if self._is_foreign or self._begins:
            free = _free_name(self.path)
            self.arrays.move(ArrayFolder.beside(free))
            self._begins = False
            if self._is_foreign:
                with contextlib.suppress(FileNotFoundError):
                    self.path.rename(free)
                self._is_foreign = False
        while self._pending:
            self._append(self._pending[0])

    def _append(self, line: str) -> None:
        """Append the first line that waits, whole, or leave the file as it was.

        The file is unbuffered, so that a line is one write; a line torn by a kill is removed first.
        Whatever comes between, even Ctrl-C, the line is in the file or waits, and never both.
        """
        check_regular(self.path)
        with self.path.open("a+b", buffering=0) as file:
            end = _truncate_torn_line(file)
            # A file that was removed in the middle of a run begins with what describes the run.
            first = [] if end or self._opening in (None, line) else [self._opening]
            content = "".join(f"{text}\n" for text in (*first, line)).encode()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._written = line
                self._pending.popleft()
            except BaseException:
                if self._pending and self._pending[0] is line:
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
            + _records_below(path.parent if path.name == FILE_NAME else path)
        )
    return _parse(path)


def _records_below(folder: Path) -> str:
    """Name a few records in the folders below one; "" where there are none."""
    found = itertools.chain.from_iterable(
        folder.glob(f"{below}/{FILE_NAME}") for below in ("*", "*/*")
    )
    named = sorted(str(path.parent) for path in itertools.islice(found, _MOST_NAMED))
    return f"; there is one in {', '.join(named)}" if named else ""


def parse_line(line: bytes) -> Reading | dict[str, Any]:
    """Parse one line of a record.

    Args:
        line: Whole line, in UTF-8.

    Returns:
        A reading, or the description of a run.

    Raises:
        ValueError: The line is neither of the two.
    """
    try:
        if not line.startswith(_BEGINNINGS[0]):
            return _READING.decode(line.decode())  # in what it passes over it checks no UTF-8
        run = msgspec.json.decode(line)["run"]
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(run, dict):
        raise ValueError(f"'run' is {reprlib.repr(run)}, expected an object")
    return run


_READING = msgspec.json.Decoder(Reading)


def parse_lines(
    lines: Iterable[bytes], path: Path, check: LineCheck, *, first: int
) -> Iterator[Reading | dict[str, Any]]:
    """Parse successive whole lines of a record.

    After a line that says that a newer version of geomon has written the record, an object of JSON
    that is no reading is left out, and the check counts it.

    Args:
        lines: The lines.
        path: Path of the file, for messages.
        check: Check that is given every line.
        first: Number of the first of the lines.

    Yields:
        Readings and descriptions of runs.

    Raises:
        ValueError: A line is not a record's; the message has its number and the path.
    """
    for number, line in enumerate(lines, first):
        try:
            if len(line) > MAX_LINE:
                raise ValueError(f"it is longer than {MAX_LINE:,} bytes")
            content = parse_line(line)
        except ValueError as error:
            if len(line) <= MAX_LINE and _is_object(line) and check.leave_out():
                continue
            raise ValueError(
                f"line {number} of {path} is not a line of a record ({error}): expected what "
                "geomon writes; move the file away"
            ) from error
        if isinstance(content, Reading):
            check.add(number, content)
        else:
            check.begin_run(content)
        yield content


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _parse(path: Path, *, to_continue: bool = False) -> Readings:
    """Parse all whole lines of a record; a last line without its end is torn or being written.

    To continue the file, the last line too has to be of a record: it is going to be removed.
    """
    check = LineCheck()
    check_regular(path)
    with path.open("rb", buffering=BUFFER) as file:
        lines = _whole_lines(file, path, to_continue=to_continue)
        contents = list(parse_lines(lines, path, check, first=1))
    readings = [content for content in contents if isinstance(content, Reading)]
    runs = [content for content in contents if not isinstance(content, Reading)]
    if to_continue and check.newer is not None and check.newer.left_out:
        raise ValueError(f"{path}: {check.newer.words()}")
    return Readings(runs, readings, check.mixed_at, ArrayFolder.beside(path), check.newer)


def _whole_lines(file: BinaryIO, path: Path, *, to_continue: bool) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if line.endswith(b"\n") or len(line) > MAX_LINE:
            yield line
            continue
        torn = any(line.startswith(x) or x.startswith(line) for x in _BEGINNINGS)
        if to_continue and not torn:
            raise ValueError(
                f"line {number} of {path} is not a line of a record ({reprlib.repr(line)}): "
                "expected what geomon writes; move the file away"
            )


def _truncate_torn_line(file: FileIO) -> int:
    """Remove a last line without its end from a file, and return the file's length in bytes."""
    length = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _CHUNK)
        file.seek(start)
        content = file.read(end - start)
        if b"\n" in content:
            end = start + content.rindex(b"\n") + 1
            break
        end = start
    return end if end == length else file.truncate(end)


def _free_name(path: Path) -> Path:
    """Find a free path beside the given one: `readings.1.jsonl`, `readings.2.jsonl` and so on."""
    number = 1
    while (name := path.with_stem(f"{path.stem}.{number}")).exists() or ArrayFolder.beside(
        name
    ).path.exists():
        number += 1
    return name
