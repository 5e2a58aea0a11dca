"""Versions of geomon that wrote a record, as far as they matter to its reader."""

import math
import re

from geomon.version import __version__

# Trailing zeros are ignored: 1.0 is 1.0.0.
_RELEASE = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,9}?)(?:\.0+)*(?![.\d])", re.ASCII)


def is_newer(version: str) -> bool:
    """Return whether a version is newer than the running one.

    Numbers of releases are compared. Text that is not a version is not newer, and nothing is newer
    than an unknown version.

    Example:
        >>> is_newer("9999.0"), is_newer("0.0.1"), is_newer("unknown")
        (True, False, False)
    """
    return _release(version) > (_release(__version__) or (math.inf,))


def _release(version: str) -> tuple[float, ...]:
    found = _RELEASE.match(version)
    return tuple(map(int, found[1].split("."))) if found else ()


__all__ = ["is_newer"]
