"""Checks: between readings, a look at the few values that alerts watch."""

import time
from collections.abc import Callable

from geomon.monitor.planning.schedule import Schedule

# Share of the time that checks may take where no schedule says when they are made.
SHARE = 0.01
# First step of a check that no schedule asks for: before it everything moves.
_FIRST = 32


class Checks:
    """Decides at which steps a check is made, and accounts for its time.

    Args:
        schedule: Function from a step to whether a check is due; None for as many as a hundredth of
            the time affords.
        clock: Function that returns seconds, which never go back.

    Example:
        >>> seconds = iter([0.0, 1.0, 49.0, 51.0])
        >>> checks = Checks(None, clock=lambda: next(seconds))
        >>> checks.is_due(0), checks.is_due(32)  # at 0 s the clock begins
        (False, True)
        >>> checks.add(32, 0.25)
        >>> checks.is_due(33), checks.is_due(80)  # 0.25 + 0.25 s are a hundredth of 50 s
        (False, True)
    """

    def __init__(
        self, schedule: Schedule | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._schedule = schedule
        self._clock = clock
        self._began: float | None = None
        self._spent = 0.0
        self._made = 0
        self._last: int | None = None
        self._again = False
        self._stopped = False

    def is_due(self, step: int) -> bool:
        """Whether a check is to be made at a step at which no reading is.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        if self._stopped or step == self._last:
            return False
        if self._again:
            return True
        if self._schedule is not None:
            return self._schedule(step)
        now = self._clock()
        self._began = now if self._began is None else self._began
        expected = self._spent + self._spent / max(self._made, 1)
        return step >= _FIRST and expected <= SHARE * (now - self._began)

    def add(self, step: int, seconds: float, *, again: bool = False) -> None:
        """Add a check to the account.

        Args:
            step: Its step.
            seconds: Time that it took from the training.
            again: Whether the next step is to be checked too, whatever the schedule says. Such a
                second check has no third one: checks stay bounded where every value is strange.
        """
        self._made, self._last = self._made + 1, step
        self._again = again and not self._again
        self._spent += seconds

    def stop(self) -> None:
        """Make no further checks."""
        self._stopped = True


__all__ = ["SHARE", "Checks"]
