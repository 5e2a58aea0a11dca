"""Versions of geomon: which of them have written a record, as far as it matters to its reader."""

import math
import re

from geomon import __version__

# The zeros at the end are left out: 1.0 is 1.0.0.
_RELEASE = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,9}?)(?:\.0+)*(?![.\d])", re.ASCII)


def is_newer(version: str) -> bool:
    """Return whether a version is newer than the one that is running.

    The numbers of the releases are compared; text that is not a version is not newer, and nothing
    is newer than a version that is not known.

    Args:
        version: Version that a record names, for instance "0.1.0".

    Example:
        >>> is_newer("9999.0"), is_newer("0.0.1"), is_newer("unknown")
        (True, False, False)
    """
    return _release(version) > (_release(__version__) or (math.inf,))


def _release(version: str) -> tuple[float, ...]:
    found = _RELEASE.match(version)
    return tuple(map(int, found[1].split("."))) if found else ()


__all__ = ["is_newer"]
