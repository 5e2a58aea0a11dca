"""The planner decides which steps are read or checked, and what share of the time that takes.

By default, the readings of a run fill a share of its time: what is left of it is spread over the
steps that remain, densely at first, while curves move fast.
"""

import enum

from geomon.distributed import RankGroup
from geomon.monitor.account import Account
from geomon.monitor.purse import Checks, Purse
from geomon.monitor.schedule import Schedule
from geomon.note import Note

# Default share of the time that geomon takes, including checks.
DEFAULT_SHARE = 0.05
# Steps until the next decision, at least and as a share of the steps so far: no more than 500
# readings in 100,000 steps.
_WAIT, _WAIT_SHARE = 4, 0.015
# Most steps for which a schedule is evaluated at once if a training jumps.
_MOST_JUMPED = 10_000


class Due(enum.Enum):
    """Whether a step is read, checked or passed over."""

    NOTHING = 0
    CHECK = 1
    READING = 2


class _ScheduledReadings:
    """Readings that a schedule asks for; one that is not made at its step is owed.

    Args:
        schedule: Function from a step to whether a reading is due; step 0 always is.
        is_limited: Whether a share of the time puts readings off.
    """

    def __init__(self, schedule: Schedule, *, is_limited: bool) -> None:
        self._schedule, self._is_limited = schedule, is_limited
        self._is_owed, self._replaced = False, 0

    @property
    def left_out(self) -> int:
        """Number of readings that were due and have not been made, if a share limits them."""
        return self._replaced + (self._is_limited and self._is_owed)

    def settle(self) -> None:
        """Owe no reading any more, because one is made or the run begins anew."""
        self._is_owed = False

    def asks(self, before: int | None, step: int, *, may_make_up: bool) -> bool:
        """Return whether a reading is to be made at a step, given the training's last step.

        If readings are limited, one that is owed is made up for only if it may be now.
        """
        jumped = range(max(before + 1, step - _MOST_JUMPED), step) if before is not None else ()
        self._is_owed = was_owed = self._is_owed or any(map(self._schedule, jumped))
        is_scheduled = step == 0 or self._schedule(step)
        if not self._is_limited:
            return is_scheduled or was_owed
        self._replaced += is_scheduled and was_owed
        self._is_owed = was_owed or is_scheduled
        return is_scheduled or (was_owed and may_make_up)


class Planner:
    """Decides at each step whether to make a reading, a check or nothing.

    With a schedule, a reading is made if it is due and the share of the time allows it. A reading
    that the share does not allow, or whose step is jumped over, is made at the next step that can
    afford it. Without a schedule, readings fill the share: what is left of it, after what checks
    and the last reading will take, pays for `n` readings, and the next one is made as soon as
    `1 / (n + 1)` of the way from the last reading to the end is done, where step s of S is at
    `0.7 ln(1 + s) / ln(1 + S) + 0.3 s / S` of the whole way. If the length S is unknown, the run
    is planned as if 11 readings fitted into it, within 2,000 steps, and later as if it were one and
    a half times as long as so far. The first two, and the last if it is known, are made regardless
    of cost.

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
        source: The argument.
        checks: Decides which steps are checked.
        purse: Budget that the share pays for; it knows the end of the run, and the readings made.
        is_planned: Whether the present step is to be read.
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
        self._share, self.source = share, source
        self._scheduled = (
            None if schedule is None else _ScheduledReadings(schedule, is_limited=share is not None)
        )
        self._group, self._account = group, account
        self.checks = Checks(checks, account)
        self.purse = Purse(share or DEFAULT_SHARE, account, self.checks)
        self.step: int | None = None
        self._ask = 0  # next step to decide at
        self._read_here: set[str] = set()  # sources that have a reading of this step
        self._is_urgent = self.is_planned = False

    @property
    def left_out(self) -> int:
        """Number of readings that were due but that the share did not allow."""
        return 0 if self._scheduled is None else self._scheduled.left_out

    @property
    def _fills(self) -> bool:
        """Whether readings fill the share, without a schedule."""
        return self._scheduled is None and self._share is not None

    def begin(self, step: int, earlier: int) -> None:
        """Begin at the first step of this start of the run, or anew at one that it goes back to.

        Args:
            step: The step.
            earlier: Number of readings before, on the branch that continues here.
        """
        self.step, self._ask = None, step
        if self._scheduled is not None:
            self._scheduled.settle()
        self.purse.begin(step, earlier)

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
        self.is_planned = False  # stays so if a schedule raises
        self.purse.follow(before, step)
        self.checks.decide(step, busy=busy)
        self.is_planned = self._decide(before, step, busy=busy)

    def due(self, source: str = "inline", *, force: bool = False) -> Due:
        """Return what is to be made at the training's present step.

        Args:
            source: "inline" or "probe". Defaults to "inline".
            force: Whether to read regardless of schedule and share. Defaults to False.
        """
        if source in self._read_here:
            return Due.NOTHING
        if force or (self.is_planned and source == self.source):
            return Due.READING
        return Due.CHECK if self.checks.is_due and source == "inline" else Due.NOTHING

    def mark_read(self, source: str) -> None:
        """Record that a reading of the present step is being made.

        Args:
            source: "inline" or "probe".
        """
        self._read_here.add(source)
        self.purse.mark_read()
        if source == self.source:
            self._is_urgent = False
            if self._scheduled is not None:
                self._scheduled.settle()
            self.purse.last_read = self.step or 0

    def owe(self) -> None:
        """Have the next step read regardless of schedule and share.

        Connected ranks must agree, so they read the next step at which they decide together.
        """
        self._is_urgent = True

    def explain_few(self) -> Note | None:
        """Return a note if the share pays for few readings, once and as soon as costs are known."""
        if not self._fills or self.step is None:
            return None
        return self.purse.explain_few(self.step)

    def _decide(self, before: int | None, step: int, *, busy: bool) -> bool:
        """Return whether a reading is made at a step; a collective if it must fit the share."""
        is_alone = not self._group.connected
        is_urgent = self._is_urgent and is_alone
        asks = may_ask = step >= self._ask
        if self._scheduled is not None:
            asks = self._scheduled.asks(before, step, may_make_up=may_ask)
            if self._share is None:
                return asks or is_urgent
        if not (asks or is_urgent) or (busy and is_alone):
            return False
        is_made = self._is_urgent or self.purse.pays(step, spread=self._fills)
        ask, end = step + max(_WAIT, int(_WAIT_SHARE * step)), self.purse.end
        own = is_made, ask if end is None or end <= step else min(ask, end)
        is_made, self._ask = own if is_alone else self._group.meet(step, own)[0]
        return is_made


__all__ = ["DEFAULT_SHARE", "Account", "Due", "Planner"]
