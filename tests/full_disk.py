"""A disk without space, for tests of what is written."""

import errno
import io
from pathlib import Path


class FullDisk:
    """A disk with a few free bytes: the write that exceeds them is cut short, the next refused."""

    def __init__(self, monkeypatch, free: int = 0) -> None:
        self.free = free
        disk = self

        class File(io.FileIO):
            def write(self, content):
                if disk.free <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = super().write(content[: disk.free])
                disk.free -= written
                return written

        def opened(path, mode="r", **kwargs):
            return File(path, "a+") if mode == "a+b" else open(path, mode, **kwargs)

        monkeypatch.setattr(Path, "open", opened)
