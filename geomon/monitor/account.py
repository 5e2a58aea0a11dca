"""The account of the seconds that geomon takes from a training."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

# Steps without a measuring thread that are needed to know how long a step takes, and the factor up
# to which a longer step still counts.
_FEWEST_ALONE, _LONGEST_STEP = 32, 20


class _Charge:
    """Time of the code inside a `with`, written out because it is paid at every step.

    Charges are meant for the training's thread. Time that two charges share counts once.
    """

    __slots__ = ("_account", "_began", "_known")

    def __init__(self, account: "Account") -> None:
        self._account = account

    def __enter__(self) -> None:
        self._known = self._account.charged + self._account.left_out
        self._began = self._account.clock()

    def __exit__(self, *error: object) -> None:
        account = self._account
        now = account.clock()
        known = account.charged + account.left_out
        if account.began > self._began:  # training began inside, and nothing before it counts
            taken = now - account.began
        else:
            taken, known = now - self._began, known - self._known
        account.charged += max(0.0, taken - known)


class Account:
    """Account of the seconds that geomon takes from a training.

    Args:
        clock: Returns seconds that never go back. Defaults to `time.perf_counter`.

    Attributes:
        clock: The argument.
        began: Time when the training began, by the clock; infinity before that.
        charged: Seconds since then for which the training has waited.
        left_out: Seconds inside charges that the training would have taken without geomon too.
    """

    def __init__(
        self,
        clock: Callable[[], float] = lambda: time.perf_counter(),  # noqa: PLW0108  (may be replaced)
    ) -> None:
        self.clock = clock
        self.began = math.inf
        self.charged = self.left_out = self._slowed = 0.0
        self._trained: float | None = None  # seconds of training until the last step
        self._is_measuring = False  # whether a thread was measuring when that step began
        # Seconds and number of steps with a measuring thread (not settled yet), and of others.
        self._busy, self._steps_busy = 0.0, 0
        self._alone, self._steps_alone = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock; time spent before the first step does not count."""
        self.began = self.clock()
        self.charged = self.left_out = self._slowed = 0.0
        self._trained, self._busy, self._steps_busy = None, 0.0, 0

    def step(self, *, measuring: bool) -> None:
        """Handle the start of a step, to learn what a measuring thread costs.

        A measuring thread takes time for which nobody waits visibly: Python's lock, cores, the
        device. Means are compared, because a loop that looks at its loss every ten steps waits for
        ten of them then. Single comparisons are rough, but their errors cancel over many.

        Args:
            measuring: Whether a thread is measuring now.
        """
        was_measuring, self._is_measuring = self._is_measuring, measuring
        before, self._trained = self._trained, self.elapsed - self.charged
        if before is None:
            return
        took, known = self._trained - before, self._steps_alone >= _FEWEST_ALONE
        usual = self._alone / self._steps_alone if known else math.inf
        took = min(took, _LONGEST_STEP * usual)  # a checkpoint or validation is not a usual step
        if was_measuring or measuring:
            self._busy, self._steps_busy = self._busy + took, self._steps_busy + 1
            return
        self._alone, self._steps_alone = self._alone + took, self._steps_alone + 1
        if known and 0 < self._steps_busy <= self._steps_alone:
            self._slowed += self._busy - self._steps_busy * usual
            self._busy, self._steps_busy = 0.0, 0
            self._alone, self._steps_alone = self._alone / 2, self._steps_alone / 2

    @property
    def spent(self) -> float:
        """Seconds that geomon has taken: charged, and lost because a thread slowed steps down."""
        return self.charged + max(0.0, self._slowed)

    @property
    def trained(self) -> float:
        """Seconds of training without geomon."""
        return self.elapsed - self.spent

    @property
    def elapsed(self) -> float:
        """Seconds since the training began; 0 before that."""
        return max(0.0, self.clock() - self.began)

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before it."""
        return self.spent / self.elapsed if self.elapsed else math.nan

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the time inside it to geomon's.

        Time that is charged twice counts once, and time that is left out does not count.
        """
        return _Charge(self)


__all__ = ["Account"]
