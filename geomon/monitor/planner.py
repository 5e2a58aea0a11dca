"""The agenda: which readings are to be made, what of them can be paid, and which have been made."""

from collections.abc import Callable
from typing import Any

from geomon.distributed.group import Ranks
from geomon.monitor.budget import Budget
from geomon.monitor.schedule import Schedule

# Steps that are remembered as read: a step comes again at once (accumulated gradients) or never.
_REMEMBERED = 10_000


class Agenda:
    """Decides at each step whether a reading is made: due, paid for, and not made yet.

    What is due and cannot be paid, or is jumped over, stays owed until it is made.

    Args:
        schedule: From a step to whether a reading is due; step 0 always is.
        budget: What is paid from.
        ranks: That decide together where they are linked.
        agree: Gives every rank what the first one has; a collective.
        tokens: Rows in a batch, which a tight budget makes fewer.
        layers: Gives how many layers this process measures of one reading, about.

    Attributes:
        rows: In a batch of the next reading.
        recorded: (step, source) of the readings that the record held before.
    """

    def __init__(
        self,
        schedule: Schedule,
        budget: Budget,
        ranks: Ranks,
        agree: Callable[[Any], Any],
        *,
        tokens: int,
        layers: Callable[[], int],
    ) -> None:
        self.rows = tokens
        self.recorded: set[tuple[int, str]] = set()
        self._schedule = schedule
        self._budget = budget
        self._ranks = ranks
        self._agree = agree
        self._layers = layers
        self._done: dict[tuple[int, str], None] = {}  # by this process: the same on every rank
        self._step: int | None = None  # the last that was asked about
        self._owed = False
        self._look_again = 0  # step from which the ranks ask again whether it can be paid

    def go_to(self, step: int) -> bool:
        """Note the step that the training is at; whether it is another than before."""
        before, self._step = self._step, step
        if step == before:
            return False
        self._budget.count_step()
        jumped = range(max(before + 1, step - _REMEMBERED), step) if before is not None else ()
        # Owed until it is read: who asks twice about a step gets the same answer.
        self._owed = self._owed or any(map(self._schedule, jumped))
        return True

    def wants(self, step: int, *, force: bool) -> bool:
        """Whether a reading is due or owed at `step`, or forced."""
        return force or self._owed or self._is_scheduled(step)

    def admits(self, step: int, source: str, *, force: bool, busy: bool) -> bool:
        """Whether a reading that is wanted can be made: not made yet, and paid for.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
            force: Whatever the budget says.
            busy: Whether the reading before is not finished yet.
        """
        if (step, source) in self._done:
            return False
        # Only the first rank knows the record: were it to skip a probe's pass that the others run,
        # a sharded model would hang. Without a line the pass is run again, and not recorded twice.
        knows = self._ranks.linked or self._ranks.size == 1
        if knows and (step, source) in self.recorded:
            return False
        return force or self._can_pay(step, busy=busy)

    def take(self, step: int, source: str) -> None:
        """A reading is being made: nothing is owed any more."""
        self._owed = False
        self._done[step, source] = None
        if len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]

    def affords_reading(self) -> bool:
        """Whether one more reading would stay within the budget, for all ranks; a collective."""
        if not self._budget.limited:
            return True
        affords: bool = self._agree(self._budget.affords(self._budget.reading_cost(self._layers())))
        return affords

    def _is_scheduled(self, step: int) -> bool:
        return step == 0 or self._schedule(step)

    def _can_pay(self, step: int, *, busy: bool) -> bool:
        """Whether the budget has room for a reading; if not, it is owed."""
        if not self._budget.limited:
            return True
        if self._ranks.linked:
            if step < self._look_again and not self._is_scheduled(step):
                return False
            verdict = self._budget.verdict(self._layers())  # the first rank's holds for all
            paid, self.rows, wait = self._agree(verdict)
            self._look_again = step + wait
        else:
            paid, self.rows, _ = self._budget.verdict(self._layers())
            paid = paid and not busy
        self._owed = self._owed or not paid
        return paid


__all__ = ["Agenda"]
