"""Errors that geomon may handle: its own, and not an exception of a user's signal handler.

Python runs a signal handler between two instructions of whatever is running, so its exception may
rise inside geomon: a cluster's SIGUSR1 or an alarm that a training turns into an exception. That
exception belongs to the training, as Ctrl-C does. Every part of geomon that keeps on after an
error names the errors with `failures`, or passes over them with `ignored`.
"""

import inspect
import itertools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar, overload

_Kind = TypeVar("_Kind", bound=BaseException)


@overload
def failures() -> tuple[type[Exception], ...]: ...
@overload
def failures(*kinds: type[_Kind]) -> tuple[type[_Kind], ...]: ...
def failures(*kinds: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return the classes for an `except` clause; none if a signal handler raised the error.

    Write it in the clause itself, `except failures() as error:`, so that it is called while the
    error is being handled. If the error was raised from one of a signal handler, that one is raised
    instead.

    Args:
        *kinds: Classes of errors. Defaults to Exception.
    """
    error = cause = sys.exception()
    while cause is not None:
        if _is_of_handler(cause):
            if cause is error:
                return ()
            raise cause
        cause = cause.__cause__
    return kinds or (Exception,)


@contextmanager
def ignored(*kinds: type[BaseException]) -> Iterator[None]:
    """Pass over errors inside the `with`, unless a signal handler raised them.

    Args:
        *kinds: Classes of errors. Defaults to Exception.
    """
    try:
        yield
    except failures(*kinds):
        pass


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error.

    A handler is called with the number of a signal and the frame that it interrupts, which is the
    one before it in the traceback; no other function is called so.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if _handles_signal(trace.tb_frame, interrupted):
            return True
    return False


def _handles_signal(frame: FrameType, interrupted: FrameType) -> bool:
    names, more, _, values = inspect.getargvalues(frame)
    given = [values.get(name) for name in names] + list(values.get(more) or () if more else ())
    return any(
        found is interrupted and isinstance(number, int) and number in signal.valid_signals()
        for number, found in itertools.pairwise(given)
    )


__all__ = ["failures", "ignored"]
