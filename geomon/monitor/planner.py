"""The planner decides which steps are read or checked, and what share of the time that takes.

By default, the readings of a run fill a share of its time. They are dense while curves move fast
and never stop, so that no part of a run goes unseen.
"""

import bisect
import enum
import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from geomon.distributed import RankGroup
from geomon.monitor.schedule import Schedule

# Default share of the time that geomon takes, including checks.
DEFAULT_SHARE = 0.05
# Share of the time that checks take if they have no schedule. If readings have no schedule either,
# checks get the part of geomon's share that `_ENOUGH` readings leave, within these bounds: more
# readings would show little more, but more checks see a fault sooner.
CHECK_SHARE = 0.01
_ENOUGH, _LEAST_PART, _LARGEST_PART = 40, 0.2, 0.6
# First step of an unscheduled check: earlier, everything is still moving.
_FIRST_CHECK = 32
# Earliest steps of the first readings, made regardless of cost, because a curve needs three.
ALWAYS_READ = (0, 16, 48)
# This part of a run's readings is spread evenly over the logarithm of the step, and the rest evenly
# over the steps.
_BY_LOGARITHM = 0.3
# Readings are at least this many steps apart, this share of the steps so far (500 readings in
# 100,000 steps), and this share of the average distance at this place of the run, so that saved
# time is not spent at once.
_LEAST_STEPS, _LEAST_APART, _OF_AVERAGE = 4, 0.015, 0.8
# A run is read after a gap of this share of its length if it can then still afford gaps of that
# share until its end.
_LONGEST, _KEPT = 0.09, 0.1
# Longest wait until the next decision, as a share of the steps so far, because costs change.
_LONGEST_WAIT = 0.05
# Steps without a measuring thread that are needed to know how long a step takes, and the factor up
# to which a longer step still counts.
_FEWEST_ALONE, _LONGEST_STEP = 32, 20
# Most steps for which a schedule is evaluated at once if a training jumps.
_MOST_JUMPED = 10_000


class Due(enum.Enum):
    """Whether a step is read, checked or passed over."""

    NOTHING = 0
    CHECK = 1
    READING = 2


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
    def slowed(self) -> float:
        """Seconds by which steps took longer while a thread measured."""
        return max(0.0, self._slowed)

    @property
    def spent(self) -> float:
        """Seconds that geomon has taken from the training since it began."""
        return self.charged + self.slowed

    @property
    def elapsed(self) -> float:
        """Seconds since the training began; 0 before that."""
        return max(0.0, self.clock() - self.began)

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before it."""
        elapsed = self.elapsed
        return self.spent / elapsed if elapsed else math.nan

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the time inside it to geomon's.

        Time that is charged twice counts once, and time that is left out does not count.
        """
        return _Charge(self)

    def leave_out(self, seconds: float) -> None:
        """Exclude time inside a charge that the training would have taken without geomon too.

        Args:
            seconds: The time.
        """
        self.left_out += max(0.0, seconds)


class _Decision(NamedTuple):
    """Whether a reading is made now, and after how many steps to decide again."""

    is_made: bool
    wait: int


class Planner:
    """Decides at each step whether to make a reading, a check or nothing.

    With a schedule, a reading is made if it is due and the share of the time allows it. A reading
    that the share does not allow, or whose step is jumped over, is made at the next step that can
    afford it. Without a schedule, readings fill the share: with `N = share * steps / cost`, where
    the cost of a reading is in steps, reading number `N * (0.3 ln(1 + s) / ln(1 + S) + 0.7 s / S)`
    is made by step s of S. If the length of the run is unknown, a reading is made as soon as the
    time spent is within the share of the time so far. The first three are made regardless of cost.

    Args:
        schedule: Function from a step to whether a reading is due (step 0 always is), or None to
            fill the share of the time.
        share: Largest share of the time that geomon may take, or None for no limit.
        checks: Function from a step to whether a check is due; "auto" for as many as 1 % of the
            time affords, or up to three fifths of the share if 40 readings leave that much of it;
            None for none.
        group: The ranks. If they are connected, the first one decides for all.
        account: Account of the time.
        source: Source of the planned readings, "inline" or "probe".

    Attributes:
        step: The training's last step; None before the first.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        share: float | None,
        checks: Schedule | str | None,
        group: RankGroup,
        account: Account,
        *,
        source: str,
    ) -> None:
        self._schedule, self._share, self._checks = schedule, share, checks
        self._group, self._account, self._source = group, account, source
        self.step: int | None = None
        self._last: int | None = None  # the last step of the run
        self._from = (0, 0.0)  # a step, and the seconds of training until then
        self._made = 0  # readings of this start
        self._costs_before: list[float] = []  # seconds of all readings before each
        self._checks_made, self._checks_cost = 0, 0.0
        self._check_purse = self._purse_at = 0.0  # seconds for checks, and when they were updated
        self._last_read = 0
        self._read_here: set[str] = set()  # sources that have a reading of this step
        self._left_out = 0
        self._is_owed = self._is_urgent = self._is_paid = False
        # Whether to check the next step too, whether to check here, and whether the last check was
        # such a second one.
        self._check_again = self._check_here = self._is_second = False

    @property
    def left_out(self) -> int:
        """Number of readings that were due but that the share did not allow."""
        return self._left_out + (self._share is not None and self._is_owed)

    @property
    def made(self) -> int:
        """Number of readings of this start."""
        return self._made

    @property
    def wants_reading(self) -> bool:
        """Whether a reading was planned for the present step."""
        return self._is_paid

    def begin(self, step: int, earlier: int) -> None:
        """Begin at the first step of this start of the run.

        Args:
            step: The step.
            earlier: Number of readings that earlier starts have made.
        """
        self._first, self._earlier, self._ask = step, earlier, step

    def rewind(self, step: int) -> None:
        """Plan anew from an earlier step that the training goes back to.

        Args:
            step: The step.
        """
        self.step, self._last_read, self._ask, self._is_owed = None, 0, step, False

    def expect_end(self, step: int | None) -> None:
        """Relate the share to the time of the whole run.

        Args:
            step: The last step of the run, or None if it is not known.
        """
        self._last = step

    def advance(self, step: int, *, busy: bool = False) -> None:
        """Move to the training's present step, and decide what is due.

        This is a collective if the ranks are connected and a reading must fit the share.

        Args:
            step: Number of optimizer updates already in the weights.
            busy: Whether an earlier reading or check is not finished yet. Defaults to False.

        Raises:
            RankFailedError: If another rank is at a later step.
            RanksLostError: If a rank does not answer.
        """
        before, self.step = self.step, step
        if step == before:
            return
        self._account.step(measuring=busy)
        self._read_here.clear()
        self._is_paid = self._check_here = False  # stays so if a schedule raises
        if before is not None and before == self._first:  # the first step may compile
            self._from = step, self._account.elapsed - self._account.spent
        self._check_here = self._decide_check(step, busy=busy)
        self._is_paid = self._decide_reading(before, step, busy=busy)

    def due(self, source: str = "inline", *, force: bool = False) -> Due:
        """Return what is to be made at the training's present step.

        Args:
            source: "inline" or "probe". Defaults to "inline".
            force: Whether to read regardless of schedule and share. Defaults to False.
        """
        if source in self._read_here:
            return Due.NOTHING
        if force or (self._is_paid and source == self._source):
            return Due.READING
        return Due.CHECK if self._check_here and source == "inline" else Due.NOTHING

    def mark_read(self, source: str) -> None:
        """Record that a reading of the present step is being made.

        Args:
            source: "inline" or "probe".
        """
        self._read_here.add(source)
        if source == self._source:
            self._is_owed = self._is_urgent = False
            self._last_read = self.step or 0
        self._made += 1
        self._costs_before.append(self._spent_on_readings)

    def mark_checked(self, seconds: float) -> None:
        """Record that a check of the present step was begun.

        Args:
            seconds: Time for which the training waited for it.
        """
        self._checks_made, self._checks_cost = self._checks_made + 1, self._checks_cost + seconds
        self._is_second, self._check_again, self._check_here = self._check_again, False, False

    def check_again(self) -> None:
        """Have the next step checked regardless of schedule.

        A third check never follows such a second one, so checks stay few even if every value is
        strange.
        """
        self._check_again = not self._is_second

    def stop_checks(self) -> None:
        """Make no further checks."""
        self._checks, self._check_again, self._check_here = None, False, False

    def owe(self) -> None:
        """Have the next step read regardless of schedule and share.

        Connected ranks must agree, so they read the next step at which they decide together.
        """
        self._is_urgent = True

    def _decide_check(self, step: int, *, busy: bool) -> bool:
        """Return whether a check is made at a step, and update the seconds for checks."""
        if self._checks is None:
            return False
        if self._check_again:
            return True
        if callable(self._checks):
            return self._checks(step)
        elapsed, since = self._account.elapsed, self._purse_at
        self._check_purse += self._check_share(step) * (elapsed - since)
        self._purse_at = elapsed
        expected = self._checks_cost + self._checks_cost / max(self._checks_made, 1)
        return not busy and step >= _FIRST_CHECK and expected <= self._check_purse

    def _decide_reading(self, before: int | None, step: int, *, busy: bool) -> bool:
        """Return whether a reading is made at a step; a collective if it must fit the share."""
        is_alone = not self._group.connected
        if self._schedule is None:
            asks = step >= self._ask
        else:
            jumped = range(max(before + 1, step - _MOST_JUMPED), step) if before is not None else ()
            self._is_owed = self._is_owed or any(map(self._schedule, jumped))
            is_scheduled = step == 0 or self._schedule(step)
            if self._share is None:
                return is_scheduled or self._is_owed or (self._is_urgent and is_alone)
            self._left_out += is_scheduled and self._is_owed
            asks = is_scheduled or (self._is_owed and step >= self._ask)
            self._is_owed = self._is_owed or is_scheduled
        if not asks and not (self._is_urgent and is_alone):
            return False
        decision = self._decide(step)
        if is_alone:
            decision = decision._replace(is_made=decision.is_made and not busy)
        else:
            decision = self._group.meet(step, decision)[0]
        self._ask = step + decision.wait
        return decision.is_made

    def _decide(self, step: int) -> _Decision:
        """Decide whether to read a step, either in any case or because it fits the share."""
        made = self._earlier + self._made
        always = made < len(ALWAYS_READ)
        begun = 0 if self._earlier else self._first
        if self._schedule is None and always:
            is_made = step - begun >= ALWAYS_READ[made] or not self._made
        else:
            # The cost of a process's first reading is not known.
            is_made = always or not self._made or self._is_payable(step, step, 0.0)
        is_made = is_made or self._is_urgent
        made += is_made
        if self._schedule is None and made < len(ALWAYS_READ):
            return _Decision(is_made, max(1, begun + ALWAYS_READ[made] - step))
        later = range(step + 1, step + 1 + max(1, int(_LONGEST_WAIT * step)))
        cost = self._cost if is_made else 0.0
        wait = 1 + bisect.bisect_left(
            later, True, key=lambda other: self._is_payable(step, other, cost)
        )
        return _Decision(is_made, wait)

    @property
    def _spent_on_readings(self) -> float:
        return self._account.spent - self._checks_cost

    @property
    def _cost(self) -> float:
        """Mean seconds of a reading, without the first one, which loads libraries."""
        if self._made < 2:
            return self._spent_on_readings
        return max(0.0, self._spent_on_readings - self._costs_before[1]) / (self._made - 1)

    @property
    def _usual_cost(self) -> float:
        """Median seconds of a reading, without the first: a single expensive one says little."""
        ends = *self._costs_before[1:], self._spent_on_readings
        return statistics.median([b - a for a, b in itertools.pairwise(ends)] or [ends[0]])

    def _check_share(self, step: int) -> float:
        """Share of the time that checks may take."""
        if self._schedule is not None or self._share is None:
            return CHECK_SHARE
        _, end = self._times(step)
        left = self._share - _ENOUGH * self._cost / max(end, 1e-9)
        return min(max(left, _LEAST_PART * self._share), _LARGEST_PART * self._share)

    def _times(self, step: int) -> tuple[float, float]:
        """Seconds of a training step, and of the whole run (or until now if its end is unknown)."""
        assert self._share is not None
        elapsed, spent = self._account.elapsed, self._account.spent
        since, trained = self._from
        step_time = max(elapsed - spent - trained, 1e-9) / max(step - since, 1)
        if self._last is None or self._last <= step:
            return step_time, elapsed
        return step_time, (elapsed - spent + (self._last - step) * step_time) / (1 - self._share)

    def _is_payable(self, step: int, other: int, more: float) -> bool:
        """Return whether a reading at this or a later step would fit the share."""
        assert self._share is not None
        elapsed, spent = self._account.elapsed, self._account.spent
        step_time, end = self._times(step)
        cost, ahead = self._cost, other - step
        apart = other - (step if more else self._last_read)
        if self._last is None or self._last <= step:
            allowed = self._share * (elapsed + more + ahead * step_time)
            slope = self._share * step_time
        else:
            # The last step is read anyway; others are made half a distance ahead.
            purse = max(self._share * end - 1.5 * cost, 0.0)
            begun = self._progress(self._first)
            allowed = purse * (self._progress(other) - begun) / (1 - begun) + cost / 2
            slope = purse * self._slope(other) / (1 - begun)
            # A single expensive reading (a garbage collection, for example) must not leave a hole.
            left = purse - spent - more - self._check_share(step) * max(end - elapsed, 0.0)
            needed = self._usual_cost * max(1.0, (1 - other / self._last) / _KEPT)
            if apart >= _LONGEST * self._last and left >= needed:
                return True
        if spent + more + cost > allowed:
            return False
        if self._schedule is not None:
            return True
        average = cost / slope if slope else math.inf
        return apart >= max(_LEAST_STEPS, _LEAST_APART * other, _OF_AVERAGE * average)

    def _progress(self, step: int) -> float:
        """Part of a run's readings made by a step."""
        assert self._last is not None
        by_logarithm = math.log1p(step) / math.log1p(self._last)
        return _BY_LOGARITHM * by_logarithm + (1 - _BY_LOGARITHM) * step / self._last

    def _slope(self, step: int) -> float:
        """Part of a run's readings made in one step."""
        assert self._last is not None
        by_logarithm = 1 / ((1 + step) * math.log1p(self._last))
        return _BY_LOGARITHM * by_logarithm + (1 - _BY_LOGARITHM) / self._last


__all__ = ["ALWAYS_READ", "CHECK_SHARE", "DEFAULT_SHARE", "Account", "Due", "Planner"]
