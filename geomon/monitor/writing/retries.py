"""Retries of a sink that fails: at the next readings, then after pauses, and never given up."""

import time
from collections.abc import Callable

# A sink that failed so often in a row is left in peace for a while: a server that is away would
# otherwise cost its time-out at every reading.
FAILURES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0  # seconds


class Retries:
    """Decides when a sink is tried: always, but for pauses after failures in a row.

    After the third failure it pauses for a minute, and after each further one twice as long, up to
    an hour.

    Args:
        clock: Function that returns seconds, which never go back.

    Attributes:
        failures: Number of failures in a row.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._clock = clock
        self._paused_until = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the sink is to be tried now."""
        return self.failures < FAILURES or self._clock() >= self._paused_until

    def note(self, *, succeeded: bool) -> None:
        """Note how a try ended.

        Args:
            succeeded: Whether the sink took the reading.
        """
        self.failures = 0 if succeeded else self.failures + 1
        if self.failures >= FAILURES:
            doublings = min(self.failures - FAILURES, 10)
            self._paused_until = self._clock() + min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE)


__all__ = ["FAILURES", "Retries"]
