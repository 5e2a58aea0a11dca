"""What pages of a run that goes on are made of: few of its readings, more of them early on."""

import abc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from geomon.record import RaisedAlert, Reading, Readings
from geomon.show.collect import BY_HEAD, BY_LAYER, DIMENSIONS

# What pages draw and describe of a reading: a large model's has tens of thousands of values.
_SHOWN = frozenset({*BY_LAYER, *BY_HEAD, *DIMENSIONS})
# Smallest ratio of the steps of two readings kept. Four readings for each octave of steps make
# about a hundred in a long run; 0.99 allows for rounded steps.
_KEPT_RATIO = 2 ** (1 / 4) * 0.99
# First step at which a run is drawn again: before it, the curves are flat.
_SECOND = 16
# Seconds expected for a first part that imports what it draws with.
FIRST_COST = 1.0
# Largest share of the time that the drawings of a run take while it goes on.
SHARE = 0.005

# One part of a drawing: a picture that is drawn and handed to the logger, say.
Part = Callable[[], object]


class RunHistory:
    """Readings of the main stack of a run, thinned: memory grows with the logarithm of the steps.

    Alerts are all kept, without their courses.

    Args:
        metrics: Names of metrics that are kept beside the usual ones.

    Attributes:
        runs: The description of the run, once it is known.
        raised: The alerts so far.
    """

    def __init__(self, metrics: Collection[str] = ()) -> None:
        self._shown = _SHOWN | set(metrics)
        self.runs: list[dict[str, Any]] = []
        self.raised: list[RaisedAlert] = []
        self._kept: list[Reading] = []
        self._next = 0.0  # first step at which a reading is kept again
        self._last: list[Reading] = []  # the last reading, unless it is kept

    def add(self, reading: Reading) -> None:
        """Take the next reading."""
        shown = {name: each for name, each in reading.columns.items() if name in self._shown}
        reading, self._last = replace(reading, stacks={"": shown}), []
        if reading.step >= self._next:
            self._kept.append(reading)
            self._next = _KEPT_RATIO * reading.step
        else:
            self._last = [reading]

    def readings(self) -> Readings:
        """Return the readings that are kept, and the last one, with all alerts."""
        return Readings(self.runs, self._kept + self._last, raised=[*self.raised])


class RunDrawer(abc.ABC):
    """Sink that draws a run at first, each time its step has doubled, and when it is closed.

    After an alert it draws with the next reading. Otherwise the number of drawings grows with the
    logarithm of the steps. While the run goes on they take at most 0.5 % of the time since the sink
    was made: of a drawing those parts that there is time for, in their order. The first part is
    made with the first reading, whatever it takes, and the last drawing has all parts.

    Args:
        what: What it does, in words for messages.
        first_cost: Seconds expected for the first part.
        metrics: Names of metrics that are drawn beside the usual ones.
    """

    def __init__(
        self, what: str, *, first_cost: float = FIRST_COST, metrics: Collection[str] = ()
    ) -> None:
        self._what = what
        self._metrics = metrics
        self._cost = first_cost  # seconds expected for the next part
        self._history = RunHistory(metrics)
        self._next = 0  # first step at which the run is drawn again
        self._is_whole = True  # whether the last reading has all parts of its drawing
        self._began = time.perf_counter()
        self._spent = 0.0

    def __str__(self) -> str:
        return self._what

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, which says how its metrics are called."""
        self._history.runs = [dict(description)]

    def write(self, reading: Reading) -> None:
        """Draw the run if the step is at least twice that of the last drawing, and time allows.

        Raises:
            Exception: What drawing has raised.
        """
        self._history.add(reading)
        self._is_whole = False
        if reading.step >= self._next:
            self._draw_run(last=False)

    def alert(self, alert: RaisedAlert) -> None:
        """Keep an alert, which is drawn with the next reading, or else at the end."""
        self._history.raised.append(replace(alert, courses=()))
        self._next = 0
        self._is_whole = not self._history.readings()

    def close(self) -> None:
        """Draw the end of the run; may be called more than once.

        Raises:
            Exception: What drawing has raised.
        """
        if not self._is_whole:
            self._draw_run(last=True)

    def _draw_run(self, *, last: bool) -> None:
        """Make the parts of a drawing that there is time for; one that fails keeps no other back.

        Raises:
            Exception: What the first part that failed has raised, once the others are made.
        """
        readings = self._history.readings()
        parts = self._draw(readings, step := readings[-1].step)
        failure: Exception | None = None
        while last or not self._spent or self._is_within_share():
            self._next = max(_SECOND, 2 * step)
            began = time.perf_counter()
            try:
                part = next(parts, None)
                if part is None:
                    self._is_whole = True
                    break
                part()
            except Exception as error:
                failure = failure or error
            self._cost = time.perf_counter() - began
            self._spent += self._cost
        if failure is not None:
            raise failure

    def _is_within_share(self) -> bool:
        """Whether one more part would leave the drawings within their share of the time."""
        return self._spent + self._cost <= SHARE * (time.perf_counter() - self._began)

    @abc.abstractmethod
    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        """Give the parts of a drawing, the most telling first; nothing is drawn before they are.

        Args:
            readings: Readings so far, thinned.
            step: Step of the last one.
        """


__all__ = ["Part", "RunDrawer", "RunHistory"]
