"""Write `readings.jsonl`: one line of JSON for each reading or alert, before it is shown.

A line describes the run (`"run"`: versions, model, layers, metrics), or is a reading or an alert.
Each line is written whole and immediately: a killed run keeps every reading, and a resumed run
appends to the same file. If the run goes back to a step that was already read, the line that
describes it says so (`"rewound_to"`), and earlier lines from that step on belong to an abandoned
branch. One process at a time writes into a folder (see `geomon.record.lock`).
"""

import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from geomon.failures import failures, ignored
from geomon.record.alert import RaisedAlert
from geomon.record.arrays import ArrayFolder, Arrays
from geomon.record.encode import encode_line
from geomon.record.follow import FILE_NAME, MAX_LINE, Follower
from geomon.record.lock import LOCK_NAME, FolderLock, lock_folder
from geomon.record.paths import check_regular, local_path
from geomon.record.reading import Reading, Readings

# Lines kept in memory while the disk is full; a large model has 100 kB per line.
_MAX_PENDING = 100
# Identity of a line: step, source, time, and more for an alert.
_Key = tuple[Any, ...]
_OPENING: _Key = ()  # the line that describes the run
# Number of last lines that are not written twice: the last reading and its alerts.
_REMEMBERED = 4


class Record:
    """Writer of `readings.jsonl` in a directory.

    A line that cannot be written (because the disk is full, for example) stays in memory and is
    written before the next one, or by `close`. At most 100 lines are kept; then the oldest reading
    is dropped. If the file was moved, removed or replaced, a new one is begun.

    Args:
        directory: Folder of the run; created if it does not exist.

    Attributes:
        path: Path of the file.
        arrays: Folder of the arrays.
        kept_as: Path under which the file of another run is kept, with the first line of this one;
            None if there is none.
        news: Sentence on where lines go since the file was moved, for the user, who sets it back
            to "".

    Raises:
        ValueError: If the directory is remote, cannot be created or written, or another process
            writes there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Absolute, because the program may change its folder while it trains.
        self.path = local_path(directory).absolute() / FILE_NAME
        self.arrays = ArrayFolder.of_record(self.path)
        self._is_foreign = False  # whether the file on disk belongs to another run
        # First step whose existing arrays belong to another run or an abandoned branch.
        self._set_aside: int | None = None
        self._opening: str | None = None  # the line that describes this run
        self._pending: dict[_Key, str] = {}  # lines that wait, in order
        # After Ctrl-C, a reading or alert may be passed again.
        self._written: deque[_Key] = deque(maxlen=_REMEMBERED)
        self._lock: FolderLock | None = None
        self.kept_as: Path | None = None
        self.news = ""
        self._file: os.stat_result | None = None  # status of the file at the last line
        try:
            self._take_lock().newest = weakref.ref(self)
            check_regular(self.path)
            with self.path.open("a"):
                pass
            self.arrays.remove_parts()
        except failures(OSError) as error:
            raise ValueError(
                f"directory={str(directory)!r} cannot be written ({error.filename}: "
                f"{error.strerror}): use a folder that can be created and written"
            ) from error

    def begin(self, step: int, description: Mapping[str, Any]) -> Readings:
        """Start the file or continue it, and return what it already holds of this run.

        A run that begins at or before the first recorded step is a new one: the old file is renamed
        with a number, as is a file that is not a record. A run that begins at a later step which
        the record has reached rewinds: lines from that step on stay in the file as an abandoned
        branch. The line that says so and describes the run is written with the first reading or
        alert, and nothing changes before.

        Args:
            step: First step that this run reads.
            description: Facts about the run (versions, model, metrics) for its opening line.

        Returns:
            The earlier readings and alerts of the continued run (those before `step`), with the
            descriptions of all its starts, this one last.

        Raises:
            ValueError: If the file is not a record.
            OSError: If the file cannot be read.
        """
        opening = {**description, "time": time.time(), "from_step": step}
        follower = Follower(self.path)
        try:
            follower.look()
            follower.check_writable()
            earlier = follower.readings()
            steps = [r.step for r in earlier.readings] + [a.step for a in earlier.raised]
            self._is_foreign = min(steps, default=-1) >= step
            if self._is_foreign or not steps:
                self._set_aside = 0
            elif max(steps) >= step:
                opening["rewound_to"] = self._set_aside = step
                follower.rewind(step)
            found = Readings([], []) if self._is_foreign else follower.readings()
            found.runs.append(opening)
            return found
        except failures(ValueError):  # not a record
            self._is_foreign, self._set_aside = True, 0
            raise
        finally:
            self.kept_as = _free_name(self.path) if self._is_foreign else None
            self._opening = self._pending[_OPENING] = encode_line({"run": opening})

    def write(self, reading: Reading) -> None:
        """Append a reading to the file; on return, the operating system has it.

        The last reading is not written twice, because it may be passed again after Ctrl-C.

        Args:
            reading: Reading to append.

        Raises:
            OSError: If the file cannot be written now; the reading is kept and written with the
                next.
            FolderLockedError: If another process writes there since `close`; the reading is kept.
        """
        self._write((reading.step, reading.source, reading.time), reading.line())

    def write_alert(self, alert: RaisedAlert) -> None:
        """Append an alert to the file, as `write` appends a reading.

        Args:
            alert: Alert to append.

        Raises:
            OSError: If the file cannot be written now; the alert is kept and written with the next.
            FolderLockedError: If another process writes there since `close`; the alert is kept.
        """
        key = alert.step, alert.source, alert.time, alert.note.kind, alert.note.text
        self._write(key, alert.line())

    def _write(self, key: _Key, line: str) -> None:
        """Append a line, after the lines that wait."""
        if key not in self._written:
            self._pending.setdefault(key, line)
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(other for other in self._pending if other != _OPENING)]
        self._write_pending()

    def write_arrays(self, reading: Reading, arrays: Arrays) -> None:
        """Write the arrays of a written reading to a file next to the record.

        Among close readings only some get arrays, and none whose line was not written.

        Args:
            reading: The reading.
            arrays: Arrays by place.

        Raises:
            OSError: If the file cannot be written; earlier content is unchanged.
        """
        if self._pending or not arrays:
            return
        if self.arrays.takes(reading.step, reading.source):
            self.arrays.write(reading.step, reading.source, arrays)

    def close(self) -> None:
        """Write what could not be written before, and let other processes write in the folder.

        It may be called more than once; a later reading takes the folder again.

        Raises:
            OSError: If the file still cannot be written. Waiting readings are lost if the process
                ends now.
        """
        try:
            if self._pending.keys() - {_OPENING}:
                self._write_pending()
        finally:
            self._lock = None

    def check_alone(self) -> None:
        """Raise an error if a later record of this process is open in the same folder.

        The later one decides, because a notebook may make a monitor again while the first, which
        nobody will use any more, is still in memory.

        Raises:
            ValueError: If there is one.
        """
        if self._rival is not None:
            raise ValueError(
                f"two monitors of this program would record in directory={str(self.path.parent)!r} "
                "at once: give each a folder of its own, such as directory='runs/b' (and a trainer "
                "its callback once)"
            )

    @property
    def _rival(self) -> "Record | None":
        """A record of this process that was made later for the same file and is still open."""
        newest: Record | None = None if self._lock is None else self._lock.newest()
        if newest is self or newest is None or newest._lock is None:
            return None
        return newest if newest.path.name == self.path.name else None

    def _take_lock(self) -> FolderLock:
        """Create the folder if needed, and make sure that this process holds it."""
        if self._lock is None or not self._lock.is_held:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path.parent / LOCK_NAME)
        return self._lock

    def _leave_file(self) -> None:
        """Begin a new file if the old one was moved or removed, or belongs to others now."""
        step = next(key[0] for key in self._pending if key != _OPENING)
        path = self.path
        if path.exists():  # what others have put in its place is left to them
            self.path = _free_name(path)
            self.arrays = ArrayFolder.of_record(self.path)
        self._file = None
        self.news = (
            f"{path} was moved, deleted or taken over by another run: from step {step:,} on, the "
            f"readings of this run are in a new file, {self.path}"
        )

    @property
    def _has_file(self) -> bool:
        """Whether the file is the one that was written before, and nobody else writes there."""
        if self._file is None:
            return True
        if self._rival is not None and self._rival._opening is not None:
            return False
        try:
            # Some file systems number files anew; then its content tells.
            same = os.path.samestat(self._file, self.path.stat())
            return same or str(self._opening).encode() in self.path.read_bytes()
        except failures(OSError):
            return False

    def _write_pending(self) -> None:
        self._take_lock()
        if not self._has_file:
            self._leave_file()
        if self._set_aside is not None:
            free = self.kept_as or _free_name(self.path)
            self.arrays.move(ArrayFolder.of_record(free), self._set_aside)
            if self._is_foreign:
                with ignored(FileNotFoundError):
                    self.path.rename(free)
                self._file = None
            self._is_foreign, self._set_aside = False, None
        for key in [*self._pending]:
            self._append(key)

    def _append(self, key: _Key) -> None:
        """Append a waiting line as a whole, or leave the file as it was.

        The file is unbuffered, so that a line is one write; a line torn by a kill is removed first.
        Whatever comes between, even Ctrl-C, the line is either in the file or waiting, never both.
        """
        line = self._pending[key]
        with self.path.open("a+b", buffering=0) as file:
            end = _truncate_torn_line(file)
            # A file that was removed during the run starts with the description of the run again.
            first = [] if end or self._opening in (None, line) else [self._opening]
            content = "".join(f"{text}\n" for text in (*first, line)).encode()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._file = os.fstat(file.fileno())
                self._written.append(key)
                del self._pending[key]
            except BaseException:
                if key in self._pending:
                    file.truncate(end)
                raise


def _truncate_torn_line(file: FileIO) -> int:
    """Remove a last line without its end, and return the file's length in bytes."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read(1) in (b"", b"\n"):
        return end
    start = file.seek(max(0, end - MAX_LINE))
    return file.truncate(start + file.readall().rfind(b"\n") + 1)


def _free_name(path: Path) -> Path:
    """Find a free path such as `readings.1.jsonl` or `readings.2.jsonl`."""
    number = 1
    while (name := path.with_stem(f"{path.stem}.{number}")).exists() or ArrayFolder.of_record(
        name
    ).path.exists():
        number += 1
    return name
