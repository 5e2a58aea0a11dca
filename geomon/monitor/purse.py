"""Spend a share of a run's time on checks, and on readings that are spread over its steps."""

import itertools
import math
import statistics

from geomon.monitor.account import Account
from geomon.monitor.schedule import Schedule
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Share of the time that checks take beside a schedule of readings.
CHECK_SHARE = 0.01
# First step of an unscheduled check: earlier, everything is still moving.
_FIRST_CHECK = 32
# This part of the readings is spread evenly over the logarithm of the step, the rest over steps.
_BY_LOGARITHM = 0.7
# Readings are at least this share of the average distance that is left apart, up to a number of
# steps: the first ones would otherwise take what later ones need.
_OF_AVERAGE, _FIRST_APART = 0.3, 48
# A run whose end is unknown is planned as if this many readings fitted into it, within this many
# steps, and later as if it were this factor longer than so far.
_FITTING, _SHORT, _AHEAD = 11, 2_000, 1.5
# A second reading is made in any case, with one in hand because the cost is hardly known: late, as
# if half a reading were affordable, or as the first of a few if the end is unknown.
_BETWEEN, _SOON = 0.5, 4
# A first reading loads libraries, and costs about this factor more than the others. The cost of a
# reading is that of so many recent ones.
_FIRST_COST, _RECENT = 2.2, 10
# Readings that show a curve; a run that can have fewer says so.
_FEW = 10
# Readings that show a curve well. Beyond that, more would show little more, but more checks see a
# fault sooner; so checks get what these leave of the share, within these parts of it.
_ENOUGH, _LEAST_PART, _LARGEST_PART = 40, 0.2, 0.6


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
            self.is_due = self._is_again or (
                not busy and step >= _FIRST_CHECK and expected <= self._purse
            )

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


class _StepTime:
    """Seconds of a step of training, since the second step of a start; the first one may compile.

    Args:
        account: Account of the time.
    """

    def __init__(self, account: Account) -> None:
        self._account = account

    def begin(self, step: int) -> None:
        """Begin at a step."""
        self._first = step
        self._take(step)

    def follow(self, before: int | None, step: int) -> None:
        """Move from a step to a later one."""
        if before == self._first:
            self._take(step)

    def at(self, step: int) -> float:
        """Return the mean seconds of the steps so far."""
        return max(self._account.trained - self._trained, 1e-9) / max(step - self._since, 1)

    def _take(self, step: int) -> None:
        self._since, self._trained = step, self._account.trained


class Purse:
    """Spreads what is left of a share of the time over the steps that remain.

    Args:
        share: Largest share of the time that geomon may take, including checks.
        account: Account of the time.
        checks: The checks, which are paid from the same share.

    Attributes:
        end: The last step of the run; None if it is not known.
        last_read: Step of the last reading.
        made: Number of readings of this start.
    """

    def __init__(self, share: float, account: Account, checks: Checks) -> None:
        self._share, self._account, self._checks = share, account, checks
        self.end: int | None = None
        self.made = 0
        self._before: list[float] = []  # seconds of all readings before each
        self._step_time = _StepTime(account)
        self._is_explained = False

    def begin(self, step: int, earlier: int) -> None:
        """Begin at a step, after readings of earlier starts; a late beginning is read densely."""
        self._earlier = earlier
        self._origin = self.last_read = 0 if earlier else step
        self._step_time.begin(step)

    def follow(self, before: int | None, step: int) -> None:
        """Move from the training's last step to the present one."""
        self._step_time.follow(before, step)

    def mark_read(self) -> None:
        """Record that a reading is being made."""
        self.made += 1
        self._before.append(self._account.spent - self._checks.cost)

    def pays(self, step: int, *, spread: bool) -> bool:
        """Return whether to read a step; readings of a schedule need not be `spread`."""
        if not self._before or (spread and step == self.end):
            return True  # the first one, whose cost is not known, and the last one
        end = self._end(step)
        if spread:
            self._checks.share = self._share_of_checks(self._seconds(step, end))
        count: float = math.floor(self._affordable(step, end))  # a part of one would be left over
        if self._earlier + self.made < 2:
            count = max(count - 1, _SOON if self.end is None else _BETWEEN)
        least = min(_FIRST_APART, _OF_AVERAGE * (end - self.last_read) / max(count + 1, 1))
        if count <= 0 or (spread and step - self.last_read < least):
            return False
        done = self._way(self.last_read, end)
        return (self._way(step, end) - done) * (count + 1) >= 1 - done

    def explain_few(self, step: int) -> Note | None:
        """Return a note if the run can have only few readings, once costs are known."""
        if self._is_explained or self.made < 2:
            return None
        self._is_explained = True
        end = self._origin + _SHORT if self.end is None else max(self.end, step)
        seconds, made = self._seconds(step, end), self._earlier + self.made
        later = max(math.floor(self._affordable(step, end)), 0) + (self.end is not None)
        if made + later >= _FEW:
            return None
        training = seconds * (1 - self._share)
        least = self._account.spent + (self.end is not None) * self._cost
        wanted = self._account.spent + (_FEW - made) * self._cost
        wanted /= 1 - self._share_of_checks(seconds) / self._share
        return Note(
            NoteKind.FEW_READINGS,
            "this run can have only {readings} readings until step {end}, {share} of the time, "
            "because a reading takes as long as {cost} steps: budget='{needed}' pays for {enough}, "
            "schedule= sets their steps, and fewer metrics= or tokens= make them cheaper",
            numbers={
                "readings": made + later, "end": f"{end:,}", "enough": _FEW,
                "cost": f"{self._cost / self._step_time.at(step):.2g}",
                "share": f"{max(least / (training + least), self._share):.0%}",
                "needed": f"{wanted / (training + wanted) + 0.005:.0%}",
            },
        )  # fmt: skip

    @property
    def _cost(self) -> float:
        """Usual seconds of a reading: one that was dear (a garbage collection) says little."""
        ends = *self._before[-_RECENT:], self._account.spent - self._checks.cost
        costs = [after - before for before, after in itertools.pairwise(ends)]
        if 0 < self.made < _RECENT:
            costs[0] /= _FIRST_COST
        return max(statistics.median(costs or [0.0]), 1e-9)

    def _end(self, step: int) -> int:
        """Return the last step of the run, or one that is planned for if it is unknown."""
        if self.end is not None and self.end >= step:
            return self.end
        fitting = min(_FITTING * self._cost / (self._share * self._step_time.at(step)), _SHORT)
        return self._origin + round(max(fitting, _AHEAD * (step - self._origin), 1))

    def _seconds(self, step: int, end: int) -> float:
        """Seconds of the whole run until its end, as expected at a step."""
        return (self._account.trained + (end - step) * self._step_time.at(step)) / (1 - self._share)

    def _share_of_checks(self, seconds: float) -> float:
        """Share of the time that checks take in a run of some seconds."""
        left = self._share - _ENOUGH * self._cost / max(seconds, 1e-9)
        taken = min(max(left, _LEAST_PART * self._share), _LARGEST_PART * self._share)
        return 0.0 if self._checks.schedule is None else taken

    def _affordable(self, step: int, end: int) -> float:
        """Return the number of readings that can be paid for from a step on, without the last."""
        seconds = self._seconds(step, end)
        later = self._share_of_checks(seconds) * max(seconds - self._account.elapsed, 0.0)
        for_readings = self._share * seconds - self._account.spent - later
        return for_readings / self._cost - (self.end is not None)  # the last step is read

    def _way(self, step: int, end: int) -> float:
        """Part of the readings of a run that are made by a step."""
        done, whole = step - self._origin, max(end - self._origin, 1)
        return (
            _BY_LOGARITHM * math.log1p(done) / math.log1p(whole)
            + (1 - _BY_LOGARITHM) * done / whole
        )


__all__ = ["Checks", "Purse"]
