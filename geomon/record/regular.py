"""A check before a file is opened: to open a pipe takes as long as nobody writes into it."""

import contextlib
import errno
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Raise where a path names something else than a file.

    Args:
        path: Path of a file, which need not be there.

    Raises:
        OSError: A pipe, a device or a folder stands there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
