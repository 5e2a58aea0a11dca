"""The budget: the share of a run's time that geomon may take, and whether one more reading fits."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

# Readings that are made whatever they cost: fewer of them are no curve.
ALWAYS_MADE = 8
# Part of what the rest of a run allows that may be taken in advance, so that readings may be dense
# where curves move; what is kept back pays for readings to the end.
_IN_ADVANCE = 0.75
# Steps after which their time is known well enough to tell how long the run will take.
_STEPS_TO_KNOW = 10


class Decision(NamedTuple):
    """Whether a reading may be made now.

    Attributes:
        paid: Whether it may.
        wait: Number of steps after which to ask again, if it may not.
    """

    paid: bool
    wait: int


class _Charge:
    """Time of the code inside a `with`: written out, because it is paid at every step.

    Charges are meant for the thread that trains. The time that charges of two threads have in
    common counts once.
    """

    __slots__ = ("_began", "_budget", "_known")

    def __init__(self, budget: "Budget") -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._known = self._budget.spent + self._budget.left_out
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        now, first = time.perf_counter(), self._budget.first_step
        known = self._budget.spent + self._budget.left_out
        if first > self._began:  # the training has begun inside: nothing before that counts
            taken = now - first
        else:
            taken, known = now - self._began, known - self._known
        self._budget.spend(max(0.0, taken - known))


class Budget:
    """Account of geomon's time beside the training's, and its limit.

    The limit is a share of the time that the whole run is expected to take, where its last step is
    known, and of the time since the first step otherwise. A reading is expected to cost what
    readings have cost so far on average, and the cost of another one is kept in reserve for the
    end of the run. The first eight readings are made whatever they cost.

    Args:
        share: Largest share of the time that geomon may take, in (0, 1); None for no limit.
        clock: Function that returns seconds, which never go back.

    Attributes:
        first_step: When the training began, in seconds of `time.perf_counter`.

    Example:
        >>> seconds = iter([0.0, 50.0, 150.0])
        >>> budget = Budget(0.01, clock=lambda: next(seconds))
        >>> budget.begin(0)
        >>> budget.count_reading()
        >>> budget.spend(0.5)
        >>> budget.decide(made=8).paid, budget.decide(made=8).paid  # 0.5 + 2 * 0.5 seconds
        (False, True)
    """

    def __init__(
        self, share: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._share = share
        self._clock = clock
        self.first_step = math.inf
        self._began = math.nan
        self._first: int
        self._step: int
        self._last: int | None = None
        self._readings = 0
        self._spent = 0.0
        self._left_out = 0.0

    @property
    def begun(self) -> bool:
        """Whether the training has begun."""
        return not math.isnan(self._began)

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._share is not None

    def begin(self, step: int) -> None:
        """Start the clock: what was spent before the first step does not count.

        Args:
            step: The first step.
        """
        self._began, self.first_step = self._clock(), time.perf_counter()
        self._first = self._step = step
        self._spent = self._left_out = 0.0

    def expect_end(self, step: int | None) -> None:
        """Take the limit from the time of the whole run.

        Args:
            step: The last step of the run; None where it is not known.
        """
        self._last = step

    def move_to(self, step: int) -> None:
        """Note the step that the training is at.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        self._step = step

    def count_reading(self) -> None:
        """Count one more reading: what is spent is spread over their number."""
        self._readings += 1

    def spend(self, seconds: float) -> None:
        """Add to the time that geomon has taken.

        Args:
            seconds: Time taken from the training.
        """
        self._spent += seconds

    def leave_out(self, seconds: float) -> None:
        """Leave time inside a `charge` out: the training takes it without geomon too.

        Args:
            seconds: That time.
        """
        self._left_out += seconds

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the time inside it to the time that geomon has taken.

        What is spent inside on its own account counts once, and what is left out does not count.
        """
        return _Charge(self)

    @property
    def spent(self) -> float:
        """Seconds that geomon has taken."""
        return self._spent

    @property
    def left_out(self) -> float:
        """Seconds that were left out of the account by now."""
        return self._left_out

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before it."""
        elapsed = self._elapsed()
        return self._spent / elapsed if elapsed else math.nan

    def decide(self, made: int) -> Decision:
        """Decide whether a reading that is due may be made now.

        Args:
            made: Number of readings that the run has by now, those of earlier starts included.
        """
        # What the first reading of a process costs is not known.
        if self._share is None or made < ALWAYS_MADE or not self._readings:
            return Decision(True, 0)
        elapsed = self._elapsed()
        step_time = max(elapsed - self._spent, 1e-9) / max(self._step - self._first, 1)
        to_come = 0.0
        if self._last is not None and self._step - self._first >= _STEPS_TO_KNOW:
            to_come = step_time * max(self._last - self._step, 0)
        needed = self._spent + 2 * self._spent / self._readings
        missing = needed / self._share - (elapsed + _IN_ADVANCE * to_come)
        if missing <= 0:
            return Decision(True, 0)
        grows = step_time * (1 - _IN_ADVANCE) if to_come else step_time
        return Decision(False, math.ceil(missing / grows))

    def _elapsed(self) -> float:
        return self._clock() - self._began


__all__ = ["ALWAYS_MADE", "Budget", "Decision"]
