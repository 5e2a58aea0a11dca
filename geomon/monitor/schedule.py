"""Schedules: functions from a step to whether a reading is due."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from geomon.failures import ignored

Schedule = Callable[[int], bool]

# A schedule that does not fire up to this step is refused; no run waits longer for a curve.
_HORIZON = 100_000


@dataclass(frozen=True)
class every:  # noqa: N801  (reads as a function: schedule=every(100))
    """A reading every `steps` steps, beginning at step 0.

    Raises:
        ValueError: If `steps` is below 1.

    Example:
        >>> [step for step in range(10) if every(4)(step)]
        [0, 4, 8]
    """

    steps: int

    def __post_init__(self) -> None:
        _require_count("every", self.steps)

    def __call__(self, step: int) -> bool:
        """Whether a reading is due at `step`."""
        return step % self.steps == 0


@dataclass(frozen=True)
class log_spaced:  # noqa: N801
    """Readings at step 0, then at `per_octave` steps between each power of two and the next.

    They are dense at first, because the intrinsic dimension expands in the first one or two hundred
    steps. Readings between step 0 and `first` are left out, where half of a short run's readings
    would lie and show little. If readings would be more than `at_most` steps apart, multiples of
    `at_most` are read too, so that long runs do not go dark. Defaults to 2 per octave, at most
    1,000 steps apart, from step 32.

    Raises:
        ValueError: If `per_octave`, `at_most` or `first` is below 1.

    Example:
        >>> [step for step in range(200) if log_spaced()(step)]
        [0, 32, 45, 64, 91, 128, 181]
        >>> [step for step in range(40) if log_spaced(per_octave=4, first=1)(step)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 23, 27, 32, 38]
    """

    per_octave: int = 2
    at_most: int = 1000
    first: int = 32

    def __post_init__(self) -> None:
        _require_count("log_spaced: per_octave", self.per_octave)
        _require_count("log_spaced: at_most", self.at_most)
        _require_count("log_spaced: first", self.first)

    def __call__(self, step: int) -> bool:
        """Whether a reading is due at `step`."""
        if step < self.first:
            return step == 0
        nearest = round(self.per_octave * math.log2(step)) / self.per_octave
        near = round(2**nearest) == step
        wide = step * (2 ** (1 / self.per_octave) - 1) > self.at_most - 1  # to the next: rounded
        return near or (wide and step % self.at_most == 0)


def check_schedule(schedule: Schedule | int | None) -> Schedule | None:
    """Return a schedule that fires, with a number of steps turned into `every`."""
    if schedule is None:
        return None
    if isinstance(schedule, int) and not isinstance(schedule, bool) and schedule > 0:
        schedule = every(schedule)
    if not callable(schedule):
        raise ValueError(
            f"schedule is {schedule!r}: expected a function from a step to a bool, such as "
            "every(100) or log_spaced(), or a number of steps, 1 or more"
        )
    if not any(schedule(step) for step in range(_HORIZON + 1)):
        raise ValueError(
            f"schedule {schedule!r} fires at none of the steps 0 to {_HORIZON}: use one that does, "
            "such as every(100) or log_spaced()"
        )
    return schedule


def first_steps(schedule: Schedule) -> list[int]:
    """List the steps below 1,000 where a schedule is due, for comparing schedules."""
    due = []
    for step in range(1000):
        with ignored():  # reported when training reaches the step
            if schedule(step):
                due.append(step)
    return due


def _require_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a number of steps, 1 or more, got {value!r}")
