"""What was seen is measured: at once, as the budget allows, or in a thread of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from geomon.monitor.background import Background
from geomon.monitor.budget import Budget
from geomon.monitor.jobs import UnderWay
from geomon.monitor.output import Outlet
from geomon.monitor.together import Found

HandOut = Callable[[int, str, Found, float], None]


class Measuring:
    """Takes readings from the look at the model to their values, one after another.

    Args:
        budget: What is paid from.
        background: The thread that measures; None measures in the one that trains.
        outlet: Where a failure is said.
        hand_out: Takes step, source, what was found, and the seconds that it took.
    """

    def __init__(
        self, budget: Budget, background: Background | None, outlet: Outlet, hand_out: HandOut
    ) -> None:
        self._budget = budget
        self._background = background
        self._outlet = outlet
        self._hand_out = hand_out
        self._under_way: UnderWay | None = None

    @property
    def busy(self) -> bool:
        """Whether a reading is not finished yet."""
        behind = self._background is not None and self._background.busy
        return behind or self._under_way is not None

    def start(self, reading: UnderWay) -> None:
        """Take a reading on, after the one before is finished."""
        self.finish()
        if self._background is not None:
            self._background.give(reading)
        else:
            self._under_way = reading
            self.go_on()

    def go_on(self) -> None:
        """Measure as much as the budget allows, all where there is none; hand out what is done."""
        self._hand_out_finished()
        reading = self._under_way
        if reading is None:
            return
        with self._dropping():
            if self._budget.limited and not reading.begun and not self._settle_rows(reading):
                return
            while not reading.complete:
                if not self._budget.affords(self._budget.layer_cost(reading.rows)):
                    return
                self._measure_layer(reading)
            self._complete(reading)

    def finish(self) -> None:
        """Measure what is left in this thread, on few rows where the budget is tight."""
        reading = self._under_way
        if reading is not None:
            with self._dropping():
                if self._budget.limited and not reading.begun:
                    self._try_out(reading)
                    reading.thin(self._budget.rows(reading.layers) or reading.rows)
                while not reading.complete:
                    self._measure_layer(reading)
                self._complete(reading)

    def close(self) -> None:
        """Finish everything, and end the thread; may be called more than once."""
        self.finish()
        if self._background is not None:
            self._background.close()
            self._hand_out_finished()

    def _settle_rows(self, reading: UnderWay) -> bool:
        """Decide on how many rows a reading stands; False while that is not known yet."""
        if not self._budget.knows_costs and not self._budget.affords(reading.trial_guess):
            return False
        self._try_out(reading)
        rows = self._budget.rows(reading.layers)
        if rows is None:
            return False
        reading.thin(rows)
        return True

    def _try_out(self, reading: UnderWay) -> None:
        """Learn what a layer costs, if that is not known."""
        if not self._budget.knows_costs:
            before = reading.seconds
            few, seconds = reading.try_out()
            self._budget.spend(reading.seconds - before)
            self._budget.learn(few, seconds)

    def _measure_layer(self, reading: UnderWay) -> None:
        seconds = reading.measure_next()
        self._budget.spend(seconds)
        self._budget.learn(reading.rows, seconds)

    def _complete(self, reading: UnderWay) -> None:
        before = reading.seconds
        found = reading.found()
        self._budget.spend(reading.seconds - before)
        self._under_way = None
        self._hand_out(reading.step, reading.source, found, reading.seconds)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Around the reading under way: one that fails is dropped."""
        with self._outlet.guard():
            try:
                yield
            except Exception:
                self._under_way = None
                raise

    def _hand_out_finished(self) -> None:
        """What the background has finished; a failure there is a warning here."""
        if self._background is None:
            return
        for reading, found in self._background.finished():
            with self._outlet.guard():
                if isinstance(found, Exception):
                    raise found
                self._hand_out(reading.step, reading.source, found, reading.seconds)


__all__ = ["Measuring"]
