"""Parts of the pages of loggers: what each shows, and when the run is drawn."""

import abc
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from geomon.failures import failures
from geomon.record import AlertSink, DescribedSink, RaisedAlert, Reading, Readings, Sink
from geomon.show.collect import BY_HEAD, BY_LAYER, DIMENSIONS, cards_of
from geomon.show.panels import Lines, Matrix

# Metrics that pages use; a large model has tens of thousands of values per reading.
_SHOWN = {*BY_LAYER, *BY_HEAD, *DIMENSIONS}
# Each kept reading's step exceeds the previous one's by at least this factor: four readings per
# doubling, about a hundred in a long run. The factor 0.99 allows for rounded steps.
_KEPT_RATIO = 2 ** (1 / 4) * 0.99
# First step at which a run is drawn again: before it, the curves are flat.
_SECOND = 16
# Largest share of the run's time that drawing may take: until each part was drawn once, and then.
FIRST_SHARE, SHARE = 0.03, 0.005

# One part of a drawing, such as a picture that is drawn and passed to the logger.
Part = Callable[[], object]
# Function of a picture's name, its pixels (uint8 [height, width, 3]) and the step.
Post = Callable[[str, NDArray[np.uint8], int], object]


class Page:
    """Sink with a name for messages, which does nothing yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def write(self, reading: Reading) -> None:
        """Do nothing with a reading."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class Pages(Page):
    """Sink that shows a run on several pages, each a sink that the monitor calls separately."""

    def __init__(self, name: str, parts: Sequence[Sink]) -> None:
        super().__init__(name)
        self._parts = parts

    def parts(self) -> Sequence[Sink]:
        """Return the parts in the order in which they are written; they are closed in reverse."""
        return self._parts

    def describe(self, description: Mapping[str, Any]) -> None:
        """Pass the description of the run to each page that takes one."""
        for part in self._parts:
            if isinstance(part, DescribedSink):
                part.describe(description)

    def write(self, reading: Reading) -> None:
        """Show a reading on every page."""
        for part in self._parts:
            part.write(reading)

    def alert(self, alert: RaisedAlert) -> None:
        """Show an alert on every page that takes alerts."""
        for part in self._parts:
            if isinstance(part, AlertSink):
                part.alert(alert)

    def close(self) -> None:
        """Close every page, the last one first. Can be called more than once."""
        for part in reversed(self._parts):
            part.close()


class RunDrawer(Page, abc.ABC):
    """Sink that draws a run at its first reading, whenever its step has doubled, and at its end.

    After an alert, the run is also drawn with the next reading. While the run goes on, drawing
    takes at most 0.5 % of the time, and 3 % until every part was drawn once. A drawing that does
    not fit goes on with the next readings, where it stopped. The last drawing has all parts.

    About four readings of the main stack are kept per doubling of the step, and all alerts.

    Args:
        what: Description of the sink, for messages.
        metrics: Names of further metrics to keep. Defaults to ().
    """

    def __init__(self, what: str, *, metrics: Collection[str] = ()) -> None:
        super().__init__(what)
        self._metrics = metrics
        self._runs: list[dict[str, Any]] = []
        self._raised: list[RaisedAlert] = []  # without their courses
        self._kept: list[Reading] = []  # the last one in any case
        self._next = 0  # step from which the run is drawn again
        self._drawn = 0  # parts of the present drawing that were drawn
        self._is_whole = True  # whether all parts show the last reading
        self._share = FIRST_SHARE
        self._began = time.perf_counter()  # of the time that the share is of
        self._cost = self._spent = 0.0  # seconds that the last part took, and all of them

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep the description of the run, which names its metrics."""
        self._runs = [dict(description)]

    def write(self, reading: Reading) -> None:
        """Add a reading, and draw the run if its step has doubled or a drawing is not finished."""
        shown = {*_SHOWN, *self._metrics}
        columns = {name: each for name, each in reading.columns.items() if name in shown}
        if self._kept[1:] and self._kept[-1].step < _KEPT_RATIO * self._kept[-2].step:
            self._kept.pop()
        self._kept.append(replace(reading, stacks={"": columns}))
        self._is_whole = False
        if self._drawn or reading.step >= self._next:
            self._draw_run(last=False)
        if len(self._kept) == 1:
            self._drawn = 0  # curves begin with the second reading, which is drawn anew

    def alert(self, alert: RaisedAlert) -> None:
        """Keep an alert, which is drawn with the next reading or at the end."""
        self._raised.append(replace(alert, courses=()))
        self._next = self._drawn = 0
        self._is_whole = not self._kept

    def close(self) -> None:
        """Draw the end of the run. Can be called more than once."""
        if not self._is_whole:
            self._drawn = 0
            self._draw_run(last=True)

    def _draw_run(self, *, last: bool) -> None:
        """Draw as many parts as time allows; raise the first failure after the other parts."""
        readings = Readings(self._runs, [*self._kept], raised=[*self._raised])
        begun, step = self._drawn, readings[-1].step
        parts = itertools.islice(self._draw(readings, step), begun, None)
        failure: Exception | None = None
        while True:
            began = time.perf_counter()
            try:
                part = next(parts, None)
                # With one more part, drawing would keep within its share of the time.
                is_due = self._spent + self._cost <= self._share * (began - self._began)
                if part is None or not (last or is_due):
                    break
                self._next, self._drawn = max(_SECOND, 2 * step), self._drawn + 1
                part()
            except failures() as error:
                failure = failure or error
            self._cost = time.perf_counter() - began
            self._spent += self._cost
        if part is None:
            self._drawn, self._is_whole = 0, not begun
            if self._share != SHARE:  # after the first drawing, only the smaller share is left
                self._share, self._began, self._spent = SHARE, time.perf_counter(), 0.0
        if failure is not None:
            raise failure

    @abc.abstractmethod
    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        """Yield the parts of a drawing lazily, the most informative first."""


class Pictures(RunDrawer):
    """Sink that draws readings and posts the pictures to a logger.

    The pictures show the main stack of a model: the intrinsic dimension over training, anisotropy
    over depth, maps of layers and steps, and matrices of layers and heads. Their names are
    numbered, because loggers sort them. They are drawn at the first reading, each time the step has
    doubled, and at the end. `write` raises an ImportError with the first picture if matplotlib is
    missing.

    Args:
        post: Function of a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        name: Name of the logger, for messages. Defaults to "the logger".
        metrics: Names of further metrics to draw over training and over depth. Defaults to ().
    """

    def __init__(
        self, post: Post, *, name: str = "the logger", metrics: Collection[str] = ()
    ) -> None:
        super().__init__(f"drawing pictures for {name}", metrics=metrics)
        self._post = post

    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        from geomon.show.figures import as_image, card  # imports matplotlib: only when needed

        for name, panel in cards_of(readings, self._metrics):

            def post(name: str = name, panel: Lines | Matrix = panel) -> None:
                self._post(name, as_image(card(panel)), step)

            yield post
