"""Check paths before opening them: geomon reads and writes only local files."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from urllib.request import url2pathname

# "s3://bucket", which pathlib turns into "s3:/bucket"; a single letter is a Windows drive.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


def local_path(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a local folder, given a path or "file:///runs/a".

    Raises ValueError if it names remote storage, or is not a path.

    Example:
        >>> local_path("file:///runs/a").as_posix()
        '/runs/a'
    """
    text = os.fsdecode(directory)
    if found := _SCHEME.match(text):
        if found[1].lower() != "file":
            whole = f"{found[1]}://{text[found.end() :]}"
            raise ValueError(
                f"directory={whole!r} is remote storage, but geomon keeps its record in a local "
                "folder: pass one, such as directory='runs/a'"
            )
        text = url2pathname(text[len("file:") :].removeprefix("//"))
    try:
        with contextlib.suppress(OSError):
            os.lstat(text)
    except ValueError as error:  # a character that paths cannot have
        raise ValueError(
            f"directory={text!r} is not a path ({error}): pass a folder, such as 'runs/a'"
        ) from None
    return Path(text)


def check_regular(path: Path, *, follow_symlinks: bool = True) -> None:
    """Raise unless a path is a regular file or missing (opening a pipe waits for a writer)."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat(follow_symlinks=follow_symlinks).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
