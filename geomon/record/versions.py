"""Versions of geomon: which of them have written a record, as far as it matters to its reader."""

import functools
import importlib.metadata
import re
from typing import NamedTuple

_RELEASE = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,9})", re.ASCII)


class Newer(NamedTuple):
    """What a newer version of geomon has written into a record.

    Attributes:
        version: The version.
        left_out: Number of lines that this version of geomon cannot read.
    """

    version: str
    left_out: int

    def words(self) -> str:
        """Say in a sentence what the reader of the record misses, and what to do."""
        s = "s" * (self.left_out != 1)
        lost = f"leaves out {self.left_out} line{s} of it" if self.left_out else "may miss values"
        return (
            f"This record was written by a newer geomon ({self.version}): this one "
            f"({installed()}) {lost}; pip install --upgrade geomon."
        )


@functools.cache
def installed() -> str:
    """Return the version of geomon that is running."""
    return importlib.metadata.version("geomon")


def is_newer(version: str) -> bool:
    """Return whether a version is newer than the one that is running.

    Compared are the numbers of the releases; what is no version is not newer.

    Args:
        version: Version that a record names, for instance "0.1.0".

    Example:
        >>> is_newer("9999.0"), is_newer("0.0.1"), is_newer("unknown")
        (True, False, False)
    """
    return _release(version) > _release(installed())


def _release(version: str) -> tuple[int, ...]:
    found = _RELEASE.match(version)
    numbers = [int(number) for number in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:  # 1.0 is 1.0.0
        numbers.pop()
    return tuple(numbers)


__all__ = ["Newer", "installed", "is_newer"]
