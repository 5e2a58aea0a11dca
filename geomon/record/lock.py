"""The lock of a record: one process at a time writes into a folder.

The lock is a POSIX record lock on a file beside the record. It ends with its process, however that
ends, so a killed run can be resumed at once; NFS keeps it between hosts; and the worker processes
that a training forks do not inherit it (they would keep a lock of flock, which filelock takes, when
the training itself has been killed).

Where there are no such locks (some network and user-space file systems, Windows) the content of the
file decides: it names host and process. A process of the same host counts as long as it is alive;
one of another host, for a minute after it last wrote a reading. That cannot be exact: two runs that
start within the same moment are both let in. Pages say where a record is mixed.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from geomon.record.regular import check_regular

if sys.platform == "win32":
    fcntl: Any = None
else:
    import fcntl

# Seconds for which a process of another host counts after its last reading, where nothing better
# is known.
_STALE = 60.0


class FolderLockedError(ValueError):
    """Another process writes into the folder."""


class FolderLock:
    """Lock of a folder, held by this process until it is released.

    Within a process it may be taken several times: see `lock_folder`.

    Args:
        path: Path of the file that is locked; it is made, and removed when the lock is released.

    Raises:
        FolderLockedError: Another process holds the lock.
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        self._descriptor = -1
        check_regular(path)
        while not self._is_in_place():  # its last owner may have removed the file meanwhile
            self._close()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._exact = self._lock()
            except BaseException:
                self._close()
                raise
        self._sign()

    @property
    def is_held(self) -> bool:
        """Whether this process still holds the lock, on a file that is still there."""
        return self._process == os.getpid() and self._is_in_place()

    def follow(self) -> None:
        """Find the folder again where it was renamed while this process holds it."""
        if self._is_in_place():
            return
        with contextlib.suppress(OSError):
            found = _path_of(self._descriptor)
            if found.name == self.path.name:  # that of a removed file is another
                self.path = found

    def refresh(self) -> None:
        """Show that this process is alive, where only the file says so."""
        if not self._exact:
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def release(self) -> None:
        """Give the lock back; may be called more than once."""
        if self._process == os.getpid() and self._is_in_place():
            with contextlib.suppress(OSError):
                self.path.unlink()  # while it is locked: nobody else's is removed
        self._close()

    def __del__(self) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        """Whether the file that is open is the one that stands in the folder."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _lock(self) -> bool:
        """Lock the open file; returns whether the system keeps the lock."""
        if fcntl is not None:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise FolderLockedError(_refusal(self.path, self._owner())) from None
            else:
                return True
        owner = self._owner()
        if self._is_alive(owner):
            raise FolderLockedError(_refusal(self.path, owner))
        return False

    def _owner(self) -> dict[str, Any]:
        """What the file says of the process that made it; nothing where it cannot be read."""
        try:
            owner = json.loads(os.read(self._descriptor, 4096))
        except (OSError, ValueError, RecursionError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _is_alive(self, owner: dict[str, Any]) -> bool:
        process = owner.get("process")
        if owner.get("host") == socket.gethostname() and isinstance(process, int) and fcntl:
            return process != os.getpid() and _exists(process)
        return bool(owner) and time.time() - os.fstat(self._descriptor).st_mtime < _STALE

    def _sign(self) -> None:
        """Write who holds the lock, for the message that another process gets."""
        owner = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, owner)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):  # it was closed before
            os.close(descriptor)


_HELD: "weakref.WeakValueDictionary[str, FolderLock]" = weakref.WeakValueDictionary()
_TAKING = threading.Lock()


def lock_folder(path: Path) -> FolderLock:
    """Take the lock of a folder, or the one that this process holds already.

    It is released once nobody refers to it. A second monitor of one process shares it: a notebook
    builds one again without closing the first.

    Args:
        path: Path of the file that is locked.

    Raises:
        FolderLockedError: Another process holds the lock.
        OSError: The file cannot be made.
    """
    with _TAKING:
        name = os.path.realpath(path)
        held = _HELD.get(name)
        # One that was renamed has gone away with its folder.
        if held is None or not held.is_held or os.path.realpath(held.path) != name:
            held = _HELD[name] = FolderLock(path)
        return held


def follow_folder(lock: FolderLock) -> bool:
    """Have a lock go along with its folder, if that was renamed.

    Args:
        lock: Lock that `lock_folder` gave.

    Returns:
        Whether it is held.
    """
    with _TAKING:
        lock.follow()
        if lock.is_held:
            _HELD[os.path.realpath(lock.path)] = lock
        return lock.is_held


def _path_of(descriptor: int) -> Path:
    """Return the name that an open file has now.

    Raises:
        OSError: The system does not tell.
    """
    if fcntl is not None and hasattr(fcntl, "F_GETPATH"):  # macOS
        found = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return Path(os.fsdecode(found.rstrip(b"\0")))
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        pass
    return True


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    who = f"process {owner.get('process')!r} on {owner.get('host')!r}" if owner else "a process"
    return (
        f"directory={str(path.parent)!r} is in use, {who} records a run there: choose another "
        f"folder or end that process; if there is none, delete {path.name} in it"
    )
