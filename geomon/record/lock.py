"""The lock of a record: one process at a time writes into a folder.

It is a POSIX record lock on a file next to the record. It ends with its process, so a killed run
can be resumed at once; NFS keeps it between hosts; and worker processes that a training forks do
not inherit it (they would keep a lock of flock, which filelock uses, after the training was
killed).

On systems or file systems without such locks (Windows, some network file systems), every process
can write. Pages say from which line on a record is mixed.
"""

import errno
import os
import re
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geomon.failures import failures, ignored
from geomon.record.paths import check_regular
from geomon.record.safe_text import printable

if sys.platform == "win32":
    fcntl: Any = None
else:
    import fcntl

LOCK_NAME = ".readings.lock"
# A link in place of the file is refused, not followed.
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


class FolderLockedError(ValueError):
    """Another process writes into the folder."""


class FolderLock:
    """Lock of a folder, held by this process until nobody refers to it.

    Attributes:
        newest: Returns the last object of this process that was made to write here, or None.

    The locked file is created, and removed on release. Raises FolderLockedError if another process
    holds the lock, and OSError if the file cannot be created or something else is in its place.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._process, self._descriptor = path, os.getpid(), -1
        self.newest: Callable[[], Any] = lambda: None
        check_regular(path, follow_symlinks=False)
        while not self._is_in_place():  # the last owner may have removed the file meanwhile
            self._close()
            self._descriptor = os.open(path, _FLAGS, 0o666)
            try:
                self._lock()
            except BaseException:
                self._close()
                raise

    @property
    def is_held(self) -> bool:
        """Whether this process still holds the lock, on a file that still exists."""
        return self._process == os.getpid() and self._is_in_place()

    def __del__(self) -> None:
        if self.is_held:
            with ignored(OSError):
                self._path.unlink()  # while locked, so that nobody else's file is removed
        self._close()

    def _is_in_place(self) -> bool:
        """Whether the open file is the one in the folder."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except failures(OSError):
            return False

    def _lock(self) -> None:
        """Lock the open file, and write the owner into it for messages to others."""
        try:
            if fcntl is not None:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except failures(OSError) as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = printable(os.read(self._descriptor, 4096).decode(errors="replace"))
                raise FolderLockedError(
                    f"directory={str(self._path.parent)!r} is in use, {owner or 'a process'} "
                    "records a run there: choose another folder or end that process; if there is "
                    f"none, delete {self._path.name} in it"
                ) from None
        with ignored(OSError):  # with a full disk, the lock holds anyway
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with ignored(OSError):  # already closed
            os.close(descriptor)


def writer_of(folder: Path) -> str | None:
    """Name the process that writes into a folder; "" if it was killed, None if there is none.

    Whether a process of another machine still runs is not known, so it is named.
    """
    path = folder / LOCK_NAME
    held = _HELD.get(_key(path))
    if held is not None and held.is_held:  # opening and closing the file would end the lock
        return f"process {os.getpid()} on {socket.gethostname()}"
    try:
        check_regular(path, follow_symlinks=False)
        words = printable(path.read_text(errors="replace")) or "a process"
    except (OSError, ValueError):
        return None
    found = re.fullmatch(r"process (\d+) on (.*)", words)
    if fcntl is None or found is None or found[2] != socket.gethostname():
        return words
    try:
        os.kill(int(found[1]), 0)  # signal 0 only asks whether it exists
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):
        pass
    return words


_HELD: "weakref.WeakValueDictionary[str, FolderLock]" = weakref.WeakValueDictionary()
_TAKING = threading.Lock()


def lock_folder(path: Path) -> FolderLock:
    """Lock a folder, or return the lock that this process already holds.

    Several monitors of a process share it: a notebook may build a monitor again without closing the
    first, and a process that opened the file twice would lose its lock with the first close.
    """
    with _TAKING:
        name = _key(path)
        held = _HELD.get(name)
        if held is None or not held.is_held:
            held = _HELD[name] = FolderLock(path)
        return held


def _key(path: Path) -> str:
    return os.path.join(os.path.realpath(path.parent), path.name)
