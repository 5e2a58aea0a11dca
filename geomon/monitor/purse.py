"""The purse of a run: which steps its share of the time pays for reading."""

import itertools
import math
import statistics
from typing import NamedTuple

from geomon.monitor.account import Account
from geomon.monitor.checks import Checks

# This part of the readings is spread evenly over the logarithm of the step, the rest over steps.
_BY_LOGARITHM = 0.7
# Readings are at least this many steps apart, this share of the steps so far (500 readings in
# 100,000 steps), and this share of the average distance that is left, up to a number of steps: the
# first ones would otherwise take what later ones need.
_LEAST_STEPS, _LEAST_APART, _OF_AVERAGE, _FIRST_APART = 4, 0.015, 0.3, 48
# A run whose end is unknown is planned as if this many readings fitted into it, within this many
# steps, and later as if it were this factor longer than so far.
_FITTING, _SHORT, _AHEAD = 12, 2_000, 1.5
# A first reading loads libraries, and costs about this factor more than the others. The cost of a
# reading is that of so many recent ones.
_FIRST_COST, _RECENT = 2.2, 10
# Readings that show a curve well. Beyond that, more would show little more, but more checks see a
# fault sooner; so checks get what these leave of the share, within these parts of it.
_ENOUGH, _LEAST_PART, _LARGEST_PART = 40, 0.2, 0.6


class Outlook(NamedTuple):
    """What a run can expect of its share of the time.

    Attributes:
        readings: Number of readings, with those that were made.
        share: Share of the time that geomon takes; it is above the limit if the few readings that
            are made in any case exceed it.
        steps: Number of steps of the run, or in which the readings are made if it is unknown.
        cost: Steps that a reading takes.
        needed: Share of the time that pays for the number of readings that was asked for.
    """

    readings: int
    share: float
    steps: int
    cost: float
    needed: float


class Purse:
    """Spreads what is left of a share of the time over the steps that remain.

    Args:
        share: Largest share of the time that geomon may take, including checks; None if there is
            no limit, and nothing to ask here.
        account: Account of the time.
        checks: The checks, which are paid from the same share.

    Attributes:
        end: The last step of the run; None if it is not known.
        last_read: Step of the last reading.
    """

    def __init__(self, share: float | None, account: Account, checks: Checks) -> None:
        self._share, self._account, self._checks = share, account, checks
        self.end: int | None = None
        self.last_read = self._earlier = self._origin = 0
        self._from: tuple[int, float] | None = None  # a step, and the seconds of training until it
        self._before: list[float] = []  # seconds of all readings before each

    @property
    def made(self) -> int:
        """Number of readings of this start."""
        return len(self._before)

    def begin(self, step: int, earlier: int) -> None:
        """Begin at a first step, after readings of earlier starts."""
        self._earlier = earlier
        self._origin = self.last_read = 0 if earlier else step

    def rewind(self, step: int) -> None:
        """Go back to an earlier step."""
        self.last_read, self._origin = 0, min(self._origin, step)

    def end_first_step(self, step: int) -> None:
        """Take the time of steps from here on, because the first one may compile."""
        self._from = step, self._account.elapsed - self._account.spent

    def mark_read(self) -> None:
        """Record that a reading is being made."""
        self._before.append(self._account.spent - self._checks.cost)

    def share_of_checks(self, step: int) -> float:
        """Share of the time that checks take, from a step on."""
        assert self._share is not None
        if not self._checks.are_made:
            return 0.0
        left = self._share - _ENOUGH * self._cost / max(self._length(step)[2], 1e-9)
        return min(max(left, _LEAST_PART * self._share), _LARGEST_PART * self._share)

    def pays(self, step: int, other: int, *, is_read: bool = False, spread: bool = True) -> bool:
        """Return whether a later step (or this one) would be read, as far as is known at a step.

        Args:
            step: The present step.
            other: The step to be read.
            is_read: Whether the present step is read before. Defaults to False.
            spread: Whether readings keep apart; those of a schedule need not. Defaults to True.
        """
        made, last = (self.made + 1, step) if is_read else (self.made, self.last_read)
        if not made:
            return True  # the cost is not known
        end, _, _ = self._length(step)
        # The last step is paid for. A part of a reading would be left over at the end.
        count: float = math.floor(self._affordable(step)) - is_read + (other >= end)
        count = max(count, 0.5 * (self._earlier + made < 2))  # the second one is late if alone
        if count <= 0:
            return False
        done, then = self._way(last, end), self._way(other, end)
        average = (end - last) / (count + 1)
        least = max(_LEAST_STEPS, _LEAST_APART * other, min(_FIRST_APART, _OF_AVERAGE * average))
        is_apart = not spread or other - last >= least
        return is_apart and (then - done) * (count + 1) >= 1 - done

    def outlook(self, step: int, readings: int) -> Outlook:
        """Predict the readings of the run, and the share that pays for a number of them."""
        end, step_time, seconds = self._length(step)
        assert self._share is not None
        part, training = self.share_of_checks(step) / self._share, seconds * (1 - self._share)
        count = self._earlier + self.made + max(math.floor(self._affordable(step)), 0) + 1

        def share(more: float) -> float:
            total = (self._account.spent + more * self._cost) / (1 - part)
            return total / (training + total)

        return Outlook(
            count, max(self._share, share(1)), end, self._cost / step_time,
            share(readings - self._earlier - self.made),
        )  # fmt: skip

    @property
    def _cost(self) -> float:
        """Usual seconds of a reading: one that was dear (a garbage collection) says little."""
        ends = *self._before[-_RECENT:], self._account.spent - self._checks.cost
        costs = [after - before for before, after in itertools.pairwise(ends)]
        if 0 < self.made < _RECENT:
            costs[0] /= _FIRST_COST
        return max(statistics.median(costs or [0.0]), 1e-9)

    def _length(self, step: int) -> tuple[int, float, float]:
        """Return the last step of the run, seconds of a step of training, and of the whole run."""
        assert self._share is not None
        since, trained = self._from or (self._origin, 0.0)
        training = self._account.elapsed - self._account.spent
        step_time = max(training - trained, 1e-9) / max(step - since, 1)
        end = self.end
        if end is None or end < step:
            fitting = min(_FITTING * self._cost / (self._share * step_time), _SHORT)
            end = self._origin + round(max(fitting, _AHEAD * (step - self._origin), 1))
        return end, step_time, (training + (end - step) * step_time) / (1 - self._share)

    def _affordable(self, step: int) -> float:
        """Return the number of readings that are paid for between a step and the last one."""
        assert self._share is not None
        seconds = self._length(step)[2]
        later = self.share_of_checks(step) * max(seconds - self._account.elapsed, 0.0)
        return (self._share * seconds - self._account.spent - later) / self._cost - 1

    def _way(self, step: int, end: int) -> float:
        """Part of the readings of a run that are made by a step."""
        done, whole = max(step - self._origin, 0), max(end - self._origin, 1)
        by_logarithm = math.log1p(done) / math.log1p(whole)
        return _BY_LOGARITHM * by_logarithm + (1 - _BY_LOGARITHM) * done / whole


__all__ = ["Outlook", "Purse"]
