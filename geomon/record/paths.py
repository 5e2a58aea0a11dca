"""Paths, checked before they are opened: geomon reads and writes files of this machine."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from urllib.request import url2pathname

# "s3://bucket", which pathlib makes "s3:/bucket"; a single letter is a drive of Windows.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


def local_path(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a folder of this machine.

    Args:
        directory: A path, or one as "file:///runs/a".

    Raises:
        ValueError: It names remote storage, or is not a path.

    Example:
        >>> local_path("file:///runs/a").as_posix()
        '/runs/a'
    """
    text = os.fsdecode(directory)
    if found := _SCHEME.match(text):
        if found[1].lower() != "file":
            whole = f"{found[1]}://{text[found.end() :]}"
            raise ValueError(
                f"directory={whole!r} is remote storage, and geomon keeps its record in a local "
                "folder: give one, directory='runs/a' for instance"
            )
        text = url2pathname(text[len("file:") :].removeprefix("//"))
    try:
        with contextlib.suppress(OSError):
            os.lstat(text)
    except ValueError as error:  # a character that no path holds
        raise ValueError(
            f"directory={text!r} is no path ({error}): give a folder, 'runs/a' for instance"
        ) from None
    return Path(text)


def check_regular(path: Path, *, follow_symlinks: bool = True) -> None:
    """Raise if a path names no file: a pipe, say, opens once somebody writes into it."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat(follow_symlinks=follow_symlinks).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
