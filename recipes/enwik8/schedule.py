"""When a run of the recipe is read: often where the dimension moves fast, seldom elsewhere."""

from dataclasses import dataclass

from geomon import log_spaced

# Half of a run's readings on a logarithmic scale lie before this step, and show little that is new.
_LATEST_FIRST = 32
# Multiples of the first step between which the dimension rises to its peak and begins to fall.
_DENSE_FROM, _DENSE_TO = 2, 8
# Share of the run after which only its last step is read, which a callback does by itself.
_BEFORE_THE_END = 0.9


@dataclass(frozen=True)
class ReadingSteps:
    """Schedule of a run: step 0, one reading an octave, and two where most happens.

    Attributes:
        steps: Optimizer updates of the run.

    Example:
        >>> due = ReadingSteps(1500)
        >>> [step for step in range(1500) if due(step)]
        [0, 32, 64, 91, 128, 181, 256, 512, 1024]
    """

    steps: int

    def __call__(self, step: int) -> bool:
        """Whether a reading is due at `step`."""
        first = first_reading(self.steps)
        if step < first or step > _BEFORE_THE_END * self.steps:
            return step == 0
        is_dense = _DENSE_FROM * first <= step <= _DENSE_TO * first
        return log_spaced(2 if is_dense else 1, at_most=self.steps, first=first)(step)


def first_reading(steps: int) -> int:
    """First step that is read after step 0: a power of two of about a fortieth of the run.

    Args:
        steps: Optimizer updates of the run.

    Example:
        >>> first_reading(6), first_reading(300), first_reading(1500), first_reading(20_000)
        (1, 4, 32, 32)
    """
    return min(_LATEST_FIRST, 1 << max(0, (steps // 40).bit_length() - 1))
