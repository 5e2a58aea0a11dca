"""Planner of readings: which are to be made, which of them can be paid, which have been made."""

from collections.abc import Collection

from geomon.distributed import RankGroup
from geomon.monitor.planning.budget import Budget
from geomon.monitor.planning.schedule import Schedule

# Steps that are remembered as read: a step comes again at once (accumulated gradients) or never.
_REMEMBERED = 10_000


class ReadingPlanner:
    """Decides at each step whether a reading is made: due, paid for, and not made yet.

    A reading that is due and cannot be paid, or whose step is jumped over, stays owed until it is
    made.

    Args:
        schedule: Function from a step to whether a reading is due; step 0 always is.
        budget: Budget that readings are paid from.
        group: The ranks. Where they are connected the first one decides for all.
        source: Source of the readings that the schedule asks for, "inline" or "probe".
    """

    def __init__(
        self, schedule: Schedule, budget: Budget, group: RankGroup, *, source: str
    ) -> None:
        self._schedule = schedule
        self._budget = budget
        self._group = group
        self._source = source
        self._recorded: Collection[tuple[int, str]] = ()  # what the record held before
        self._read: dict[tuple[int, str], None] = {}  # by this process: the same on every rank
        self._step: int | None = None  # the last step that the training was at
        self._scheduled = False  # whether a reading is due at this step
        self._owed = False  # whether an earlier one is still to be made
        self._paid = False  # whether this step's reading can be paid
        self._ask_again = 0  # step from which the ranks ask again whether a reading can be paid

    @property
    def step(self) -> int | None:
        """The last step that the training was at; None before the first."""
        return self._step

    @property
    def is_wanted(self) -> bool:
        """Whether a reading is due or owed at this step."""
        return self._scheduled or self._owed

    def resume(self, step: int) -> None:
        """Take up a training whose last step that was watched is known.

        Args:
            step: The step. What is due between it and the next one is owed.
        """
        self._step = step

    def owe(self) -> None:
        """Have a reading made at the next step, where ranks exchange no decisions."""
        self._owed = self._owed or not self._group.connected

    def skip_recorded(self, recorded: Collection[tuple[int, str]]) -> None:
        """Make no reading again that the record holds.

        Args:
            recorded: Step and source of each reading in the record.
        """
        self._recorded = recorded

    def advance(self, step: int) -> bool:
        """Move to the step that the training is at; returns whether it is a new one.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        before, self._step = self._step, step
        if step == before:
            return False
        self._budget.move_to(step)
        self._scheduled = self._paid = False  # and stays so where the schedule raises
        jumped = range(max(before + 1, step - _REMEMBERED), step) if before is not None else ()
        self._owed = self._owed or any(map(self._schedule, jumped))
        self._scheduled = step == 0 or self._schedule(step)
        return True

    def settle(self, *, busy: bool) -> None:
        """Decide whether this step's reading can be paid; a collective where ranks are connected.

        Args:
            busy: Whether an earlier reading is not finished yet.

        Raises:
            RankFailedError: Another rank is at a later step.
            RanksLostError: A rank does not answer.
        """
        assert self._step is not None
        if self.is_wanted and not self.is_read(self._step, self._source):
            self._paid = self._can_pay(self._step, busy=busy)
            self._owed = self._owed or not self._paid

    def is_due(self, step: int, source: str, *, force: bool) -> bool:
        """Whether a reading from a source is to be made at the step that the training is at.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
            force: Whether to read whatever the schedule and the budget say.
        """
        if self.is_read(step, source):
            return False
        return force or (self._paid and self.is_wanted)

    def is_read(self, step: int, source: str) -> bool:
        """Whether a reading has been made or recorded, as far as all ranks know.

        Only the first rank knows the record. Where the ranks exchange nothing, all run a probe's
        pass again (a sharded model would hang otherwise), and it is not recorded twice.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
        """
        all_know = self._group.members == self._group.size
        return (step, source) in self._read or (all_know and self.is_recorded(step, source))

    def is_recorded(self, step: int, source: str) -> bool:
        """Whether the record held a reading before this run.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
        """
        return (step, source) in self._recorded

    def mark_read(self, step: int, source: str) -> None:
        """Note that a reading is being made: nothing is owed any more.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
        """
        self._owed = False
        self._budget.count_reading()
        self._read[step, source] = None
        if len(self._read) > _REMEMBERED:
            del self._read[next(iter(self._read))]

    def _can_pay(self, step: int, *, busy: bool) -> bool:
        if not self._budget.limited:
            return True
        made = len(self._recorded) + len(self._read)
        if not self._group.connected:
            return self._budget.decide(made).paid and not busy
        if step < self._ask_again and not self._scheduled:
            return False
        decision = self._group.meet(step, self._budget.decide(made))[0]
        self._ask_again = step + decision.wait
        return decision.paid


__all__ = ["ReadingPlanner"]
