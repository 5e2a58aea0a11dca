"""The budget: what share of the training's time geomon may take, and how much of it is left."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

# A split of rows is halved until a reading is paid for by this many steps, and never below so few
# rows that a dimension means nothing.
_STEPS_PER_READING = 100
_FEWEST_ROWS = 256
# Steps after which their time is known well enough to choose the rows.
_STEPS_TO_KNOW = 10
# The part of the share that is planned with: what costs more than expected takes of the rest.
_PLANNED = 0.8
# A cost that is this many times too high, or too low, moves the choice: readings of different
# numbers of rows are hard to compare, so it should seldom move.
_TOLERANCE = 2.0


class Decision(NamedTuple):
    """Whether a reading can be paid now.

    Attributes:
        paid: Whether it can.
        rows: Number of rows in a split of the next reading.
        wait: Number of steps after which to ask again, if it cannot be paid now.
    """

    paid: bool
    rows: int
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
        if taken > known:
            self._budget.spend(taken - known)


class Budget:
    """Account of geomon's time beside the training's.

    A reading is put off until it can be paid. Where it would cost more than a hundred steps'
    allowance, it stands on fewer rows.

    Args:
        share: Largest share of the time since the first step that geomon may take, in (0, 1); None
            for no limit.
        tokens: Number of rows in one split of the estimate; a tight budget makes it smaller.
        clock: Function that returns seconds, which never go back.

    Attributes:
        rows: Number of rows in a split of the next reading.
        first_step: When the training began, in seconds of `time.perf_counter`.

    Example:
        >>> seconds = iter([0.0, 50.0, 50.0])
        >>> budget = Budget(0.01, tokens=4096, clock=lambda: next(seconds))
        >>> budget.begin()
        >>> budget.affords(0.3), budget.affords(0.5)
        (True, False)
    """

    def __init__(
        self,
        share: float | None,
        tokens: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share = share
        self._planned = 1.0 if share is None else _PLANNED * share
        self._tokens = tokens
        self.rows = tokens
        self._rows_chosen = share is None
        self._clock = clock
        self.first_step = -math.inf
        self._began: float | None = None
        self._steps = 0
        self._spent = 0.0
        self._left_out = 0.0
        self._capture = 0.0  # seconds that the last capture took
        self._costs: dict[int, float] = {}  # seconds of one layer, by rows in a split

    @property
    def begun(self) -> bool:
        """Whether the training has begun."""
        return self._began is not None

    def begin(self) -> None:
        """Start the clock at the first step: what was spent before it does not count."""
        self._began, self.first_step = self._clock(), time.perf_counter()
        self._spent = self._left_out = 0.0

    def count_step(self) -> None:
        """Count one more step of the training."""
        self._steps += 1

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

    def learn_capture(self, seconds: float) -> None:
        """Note what it cost to capture one snapshot.

        Args:
            seconds: Time that the capture took.
        """
        self._capture = seconds

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
        if self._began is None:
            return math.nan
        return self._spent / max(self._clock() - self._began, 1e-9)

    @property
    def knows_costs(self) -> bool:
        """Whether anything has been measured yet."""
        return bool(self._costs)

    @property
    def fewest_rows(self) -> int:
        """Number of rows in a split that a reading has at least, whatever it costs."""
        return min(_FEWEST_ROWS, self._tokens)

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return self._share is not None

    def affords(self, seconds: float) -> bool:
        """Whether `seconds` more would stay within the share of the time that has passed.

        A fifth of the share is kept back for what costs more than was expected.
        """
        if self._share is None:
            return True
        return self._began is not None and (
            self._spent + seconds <= self._planned * (self._clock() - self._began)
        )

    def decide(self, layers: int) -> Decision:
        """Decide whether a reading can be paid now, on how many rows, and when to ask again if not.

        A second reading of the same cost is kept in reserve, for the end of the run.

        Args:
            layers: Number of layers that this process measures in one reading.
        """
        self.choose_rows(layers)
        # What the first reading costs is not known, and nothing has been paid yet.
        if self._share is None or self._began is None or not self._costs:
            return Decision(True, self.rows, 0)
        passed = self._clock() - self._began
        missing = self._spent + 2 * self.reading_cost(layers) - self._planned * passed
        if missing <= 0:
            return Decision(True, self.rows, 0)
        step = max(passed / max(self._steps, 1), 1e-9)
        return Decision(False, self.rows, max(1, math.ceil(missing / self._planned / step)))

    def learn(self, rows: int, seconds: float) -> None:
        """Note what it cost to measure one layer.

        Args:
            rows: Number of rows in a split.
            seconds: Time that the layer took.
        """
        before = self._costs.get(rows)
        self._costs[rows] = seconds if before is None else (before + seconds) / 2

    def layer_cost(self, rows: int) -> float:
        """Seconds that one layer is expected to take.

        Scaled from the nearest number of rows whose cost is known: in proportion to fewer rows, to
        the square of more, which is the dearer guess in both directions. 0 where nothing is known.

        Args:
            rows: Number of rows in a split.
        """
        if not self._costs:
            return 0.0
        known = min(self._costs, key=lambda other: abs(math.log(other / rows)))
        return self._costs[known] * (rows / known) ** (2 if rows > known else 1)

    def reading_cost(self, layers: int) -> float:
        """Seconds that the next reading is expected to take: the capture, and its layers.

        Args:
            layers: Number of layers that this process measures in one reading.
        """
        return self._capture + layers * self.layer_cost(self.rows)

    def choose_rows(self, layers: int) -> bool:
        """Choose the number of rows of the next reading; False while a step's time is not known.

        Args:
            layers: Number of layers that this process measures in one reading.
        """
        if self._share is None or self._began is None:
            return self._rows_chosen
        if self._steps <= _STEPS_TO_KNOW or not self._costs:
            return False
        training = max(self._clock() - self._began - self._spent, 1e-9)
        allowed = self._share * training / self._steps * _STEPS_PER_READING
        rows = self.rows
        slack = _TOLERANCE if self._rows_chosen else 1.0
        while rows > _FEWEST_ROWS and layers * self.layer_cost(rows) > slack * allowed:
            rows = max(rows // 2, _FEWEST_ROWS)
        more = min(2 * rows, self._tokens)
        if self._rows_chosen and more > rows and slack * layers * self.layer_cost(more) < allowed:
            rows = more
        self.rows = min(rows, self._tokens)
        self._rows_chosen = True
        return True


__all__ = ["Budget"]
