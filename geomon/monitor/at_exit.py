"""Monitors that are still open when the program ends are closed then."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import weakref
from typing import Protocol


class Closed(Protocol):
    """Something that is to be closed before its process ends."""

    def close(self) -> None:
        """Close it; may be called more than once, and does nothing in a fork of its process."""


# What is open, by the process that has opened it.
_OPEN: "weakref.WeakKeyDictionary[Closed, int]" = weakref.WeakKeyDictionary()


def close_at_exit(opened: Closed) -> None:
    """Have something closed when the program ends, if it still exists then.

    A process of multiprocessing ends without the handlers of atexit, and calls finalizers.

    Args:
        opened: What is to be closed.
    """
    if os.getpid() not in _OPEN.values():
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _OPEN[opened] = os.getpid()


def _close_all() -> None:
    for opened in list(_OPEN):
        opened.close()


__all__ = ["close_at_exit"]
