"""The budget: what share of the training's time geomon may take, and how much of it is left."""

import math
import time
from collections.abc import Callable

# A batch of rows is halved until a reading is paid for by this many steps, and never below so few
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


class Budget:
    """Keeps account of geomon's time beside the training's.

    What is due is put off until it can be paid; where a reading would cost more than a hundred
    steps' allowance, it stands on fewer rows.

    Args:
        share: Largest share of the time since the first step that geomon may take, in (0, 1); None
            for no limit.
        tokens: Rows in one batch of the estimate, which a tight budget makes fewer.
        clock: Seconds that never go back.

    Raises:
        ValueError: `share` is not between 0 and 1.

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
        if share is not None and not 0 < share < 1:
            raise ValueError(
                f"budget is a share of the training time between 0 and 1 (0.01 is one per cent), "
                f"or None for no limit, got {share!r}"
            )
        self._share = share
        self._planned = 1.0 if share is None else _PLANNED * share
        self._tokens = tokens
        self._rows: int | None = None if share is not None else tokens
        self._clock = clock
        self._began: float | None = None
        self._steps = 0
        self._spent = 0.0
        self._look = 0.0  # seconds of the last look at the model
        self._costs: dict[int, float] = {}  # seconds of one layer, by rows in a batch

    def begin(self) -> None:
        """The first step: time runs from here on."""
        self._began = self._clock()

    def count_step(self) -> None:
        """Another step of the training has begun."""
        self._steps += 1

    def spend(self, seconds: float) -> None:
        """Note what geomon has taken of the training's time."""
        self._spent += seconds

    def looked(self, seconds: float) -> None:
        """Note what a look at the model has taken of the training's time."""
        self._look = seconds
        self.spend(seconds)

    @property
    def spent(self) -> float:
        """Seconds that geomon has taken."""
        return self._spent

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

    def verdict(self, layers: int) -> tuple[bool, int, int]:
        """Whether a reading can be paid now, on how many rows, and when to ask again if not.

        A second reading of the same cost is kept in reserve, for the end of the run.

        Args:
            layers: In one reading.

        Returns:
            The answer, rows in a batch, and steps to wait.
        """
        rows = self.rows(layers) or self._tokens
        if self._share is None or self._began is None:
            return True, rows, 0
        cost = self.reading_cost(layers)
        if not self._costs:  # the first: what it costs is not known, and nothing has been paid yet
            return True, rows, 0
        passed = self._clock() - self._began
        missing = self._spent + 2 * cost - self._planned * passed
        if missing <= 0:
            return True, rows, 0
        step = max(passed / max(self._steps, 1), 1e-9)
        return False, rows, max(1, math.ceil(missing / self._planned / step))

    def learn(self, rows: int, seconds: float) -> None:
        """Note what one layer cost, with so many rows in a batch."""
        before = self._costs.get(rows)
        self._costs[rows] = seconds if before is None else (before + seconds) / 2

    def layer_cost(self, rows: int) -> float:
        """Seconds that one layer with so many rows in a batch is expected to take.

        From the nearest number of rows that is known: in proportion to fewer rows, to the square of
        more, which is the dearer guess in both directions. 0 where nothing is known.
        """
        if not self._costs:
            return 0.0
        known = min(self._costs, key=lambda other: abs(math.log(other / rows)))
        return self._costs[known] * (rows / known) ** (2 if rows > known else 1)

    def reading_cost(self, layers: int) -> float:
        """Seconds that the next reading is expected to take: the look, and so many layers."""
        return self._look + layers * self.layer_cost(self._rows or self._tokens)

    def rows(self, layers: int) -> int | None:
        """Rows in a batch of the next reading; None while the time of a step is not known yet.

        Args:
            layers: In one reading.
        """
        if self._share is None or self._began is None:
            return self._rows
        if self._steps <= _STEPS_TO_KNOW or not self._costs:
            return None
        training = max(self._clock() - self._began - self._spent, 1e-9)
        allowed = self._share * training / self._steps * _STEPS_PER_READING
        rows = self._rows or self._tokens
        slack = _TOLERANCE if self._rows else 1.0
        while rows > _FEWEST_ROWS and layers * self.layer_cost(rows) > slack * allowed:
            rows = max(rows // 2, _FEWEST_ROWS)
        more = min(2 * rows, self._tokens)
        if self._rows and more > rows and slack * layers * self.layer_cost(more) < allowed:
            rows = more
        self._rows = min(rows, self._tokens)
        return self._rows


__all__ = ["Budget"]
