"""Time limit of a call in the thread that trains: a sink that hangs does not hold a run up.

The call is not moved to another thread: loggers keep state by thread, and some are not safe there.
A timer interrupts it instead, even where it waits for a socket, a lock or a disk.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitError(TimeoutError):
    """A call took longer than its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise where the code inside the `with` takes longer than the limit.

    The handler and the timer of the program that uses the same signal are put back afterwards. A
    timer of the program that is due earlier is left alone. Outside of the main thread, and on
    systems without timer signals, the limit is checked only after the code has ended.

    Args:
        seconds: Largest duration.

    Raises:
        TimeLimitError: The code took longer.
    """
    began = time.monotonic()
    if not _can_interrupt() or 0 < signal.getitimer(signal.ITIMER_REAL)[0] < seconds:
        yield
        _check(began, seconds)
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        _check(began, 0.0)

    handler = signal.signal(signal.SIGALRM, interrupt)
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if delay > 0:
            left = delay - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def _can_interrupt() -> bool:
    main = threading.current_thread() is threading.main_thread()
    # A handler that was not installed from Python cannot be put back.
    return main and hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is not None


def _check(began: float, seconds: float) -> None:
    taken = time.monotonic() - began
    if taken > seconds:
        raise TimeLimitError(f"it took more than {taken:.0f} s")


__all__ = ["TimeLimitError", "time_limit"]
