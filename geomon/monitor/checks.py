"""When checks are made, between readings."""

from geomon.monitor.account import Account
from geomon.monitor.schedule import Schedule

# Share of the time that checks take beside a schedule of readings.
CHECK_SHARE = 0.01
# First step of an unscheduled check: earlier, everything is still moving.
_FIRST_CHECK = 32


class Checks:
    """Decides which steps are checked, by a schedule or in a share of the time.

    Args:
        schedule: Function from a step to whether a check is due; "auto" for as many as fit into a
            share of the time; None for none.
        account: Account of the time.

    Attributes:
        schedule: The argument, or None after `stop`.
        share: Share of the time for automatic checks.
        made: Number of checks.
        cost: Seconds for which the training has waited for them.
        is_due: Whether to check the present step.
    """

    def __init__(self, schedule: Schedule | str | None, account: Account) -> None:
        self.schedule, self.share, self._account = schedule, CHECK_SHARE, account
        self.made, self.cost = 0, 0.0
        self._purse = self._updated = 0.0  # seconds for checks, and when they were updated
        # Whether to check the next step too, and whether the last check was such a second one.
        self._is_again = self._is_second = self.is_due = False

    def decide(self, step: int, *, busy: bool) -> None:
        """Decide whether a step is checked."""
        elapsed = self._account.elapsed
        self._purse, self._updated = self._purse + self.share * (elapsed - self._updated), elapsed
        self.is_due = False  # stays so if a schedule raises
        if callable(self.schedule):
            self.is_due = self._is_again or self.schedule(step)
        elif self.schedule is not None:
            expected = self.cost + self.cost / max(self.made, 1)
            is_payable = not busy and step >= _FIRST_CHECK and expected <= self._purse
            self.is_due = self._is_again or is_payable

    def mark(self, seconds: float) -> None:
        """Record that a check of the present step was begun, and how long training waited."""
        self.made, self.cost = self.made + 1, self.cost + seconds
        self._is_second, self._is_again, self.is_due = self._is_again, False, False

    def ask_again(self) -> None:
        """Have the next step checked regardless of schedule.

        A third check never follows such a second one, so checks stay few even if every value is
        strange.
        """
        self._is_again = not self._is_second

    def stop(self) -> None:
        """Make no further checks."""
        self.schedule, self.is_due = None, False


__all__ = ["Checks"]
