"""Sinks: objects that receive every reading after it was recorded.

A sink takes a whole reading and decides itself what it shows. One that fails is reported once and
tried again with later readings; the training and the other sinks go on. Messages call it by its
`__str__`, if it has one of its own, or else by the name of its class.

Those that draw charts show the headline values (`geomon.record.headline`), and with
`detail="layers"` every value that is charted.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from geomon.record.headline import HEADLINE, Charts, Detail
from geomon.record.reading import Reading

log = logging.getLogger("geomon")

# Key of the reading's step in rows of W&B.
_WANDB_STEP = "geomon/step"
# Readings that wait for rows of a W&B run to which nothing has been logged, before it is said.
_MANY_WAITING = 3


@runtime_checkable
class Sink(Protocol):
    """Receiver of readings: any object with these two methods."""

    def write(self, reading: Reading) -> None:
        """Take a reading."""

    def close(self) -> None:
        """Flush what is buffered; may be called more than once."""


class Memory:
    """Sink that keeps the last readings in memory.

    Args:
        most: Largest number of readings kept.

    Attributes:
        readings: Readings kept, oldest first.
    """

    def __init__(self, most: int = 10_000) -> None:
        self.readings: deque[Reading] = deque(maxlen=most)

    def write(self, reading: Reading) -> None:
        """Keep a reading; beyond the largest number, the oldest is dropped."""
        self.readings.append(reading)

    def close(self) -> None:
        """Do nothing: there is nothing to flush."""


class TensorBoard:
    """Sink that writes charted values as TensorBoard scalars, for loops without a logger.

    Args:
        directory: Folder of the event files.
        detail: "headline" for about a dozen values, in the group `geomon/`; "layers" for all that
            are charted; or names of metrics whose means are headline values too.

    Raises:
        ValueError: The detail is none of them.
        ImportError: tensorboard is missing.
    """

    def __init__(self, directory: str | os.PathLike[str], *, detail: Detail = HEADLINE) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard's files need tensorboard ({error}): pip install 'geomon[tensorboard]'"
            ) from error
        self._charts = Charts(detail)
        self._layout = ChartLayout(self._charts)
        self._writer = SummaryWriter(os.fspath(directory))

    def write(self, reading: Reading) -> None:
        """Write the charted values at the reading's step; before the first, the charts' layout."""
        self._layout.write_once(reading, [self._writer])
        for tag, value in self._charts.select(reading).items():
            # The old style rounds to float32.
            self._writer.add_scalar(tag, value, reading.step, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Sink that logs charted values to a W&B run, beside what others log there.

    W&B counts rows, and drops what is logged with `step=` below its counter. A reading therefore
    never makes a row of its own while the run goes on: it joins the row that the training logs next
    (`commit=False`), one reading to a row and the newest first. Readings for which there was no row
    get theirs when the run is finished. Charts take the reading's step, `geomon/step`, as their
    axis: the row may be of another step.

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        alone: Whether nothing else is logged to the run: every reading is then a row at once.
        detail: "headline" for about a dozen values, in the group `geomon/`; "layers" for all that
            are charted; or names of metrics whose means are headline values too.

    Raises:
        ValueError: The detail is none of them.
        ImportError: No run is given, and wandb is missing.
    """

    def __init__(self, run: Any = None, *, alone: bool = False, detail: Detail = HEADLINE) -> None:
        if run is None and find_spec("wandb") is None:
            raise ImportError("W&B's charts need wandb: pip install 'geomon[wandb]'")
        self._charts = Charts(detail)
        self._run: Any = None
        self._alone = alone
        self._waiting: deque[dict[str, Any]] = deque()  # rows that have not been logged yet
        self._joined: int | None = None  # the run's row that a reading of ours has joined
        self._defined: set[str] = set()
        self._flushed_by_run = False
        self._description: Mapping[str, Any] | None = None
        if run is not None:
            self._follow(run)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Put the description of the run into the configuration of the W&B run, as `geomon`.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._description = description
        if self._has_run():
            self._configure()

    def write(self, reading: Reading) -> None:
        """Log the charted values with the row that the training logs next."""
        if not self._has_run():
            return
        values = self._charts.select(reading)
        for name in values.keys() - self._defined:  # a pattern may give way to the training's own
            self._defined.add(name)
            self._run.define_metric(name, step_metric=_WANDB_STEP)
        self._log(values, reading.step)

    def post(self, name: str, image: Any, step: int) -> None:
        """Show a picture.

        Args:
            name: Name of the picture.
            image: Pixels, uint8 [height, width, 3].
            step: Step of the reading that is shown.
        """
        if self._has_run():
            import wandb

            self._log({name: wandb.Image(image)}, step)

    def close(self) -> None:
        """Log what is waiting, unless that is done when the run is finished.

        The run is finished by whoever started it.
        """
        if self._run is not None and not self._flushed_by_run:
            self._flush()

    def _has_run(self) -> bool:
        """Whether there is a run; the active one is taken where none was given."""
        if self._run is None:
            import wandb

            if wandb.run is not None:
                self._follow(wandb.run)
        return self._run is not None

    def _follow(self, run: Any) -> None:
        self._run = run
        self._flushed_by_run = _call_at_finish(run, self._flush)
        run.define_metric(_WANDB_STEP)
        self._configure()

    def _configure(self) -> None:
        if self._description is not None:
            self._run.config.update({"geomon": dict(self._description)}, allow_val_change=True)

    def _log(self, values: dict[str, Any], step: int) -> None:
        if getattr(self._run, "disabled", False):
            return
        row = {**values, _WANDB_STEP: step}
        if self._alone:
            self._run.log(row)
            return
        if self._waiting and self._waiting[-1][_WANDB_STEP] == step:
            self._waiting[-1] |= row  # several pictures of one step
        else:
            self._waiting.append(row)
        present = self._run.step
        if present != self._joined:  # its row has no reading yet
            self._joined = present
            self._run.log(self._waiting.pop(), commit=False)
        elif len(self._waiting) == _MANY_WAITING and present == 0:
            log.warning(
                "W&B: readings wait for the rows of the training, and nothing has been logged to "
                "the run so far; if nothing else is logged there, use WandB(run, alone=True)"
            )

    def _flush(self) -> None:
        """Give each waiting reading a row of its own."""
        if self._waiting and self._joined == self._run.step:
            self._run.log({}, commit=True)  # ends the row that a reading has joined
        while self._waiting:
            self._run.log(self._waiting.popleft(), commit=True)


def _call_at_finish(run: Any, function: Callable[[], None]) -> bool:
    """Have a function called when a W&B run is finished; returns whether that can be done.

    There is no public way: W&B's own integrations register a hook like this one.
    """
    try:
        from wandb.sdk.wandb_run import TeardownHook, TeardownStage

        run._teardown_hooks.append(TeardownHook(function, TeardownStage.EARLY))
    except (ImportError, AttributeError):
        return False
    return True


class ChartLayout:
    """Layout of TensorBoard's custom scalars, written with the first reading only.

    Args:
        charts: What is charted.
    """

    def __init__(self, charts: Charts) -> None:
        self._charts = charts
        self._is_written = False

    def write_once(self, reading: Reading, writers: Iterable[Any]) -> None:
        """Write the layout of the charts of a reading, unless one was written before.

        Args:
            reading: Reading whose values the charts show.
            writers: `SummaryWriter`s of TensorBoard; iterated over only when the layout is written.
        """
        if self._is_written:
            return
        layout = self._charts.layout(reading)
        for writer in writers:
            writer.add_custom_scalars(layout)
        self._is_written = True  # only now: one that failed is written with the next reading


class LoggerSink:
    """Sink that writes to one logger of a training framework.

    Args:
        name: Name of the logger, for messages.
        log: Function that hands the charted values to the logger, by name, with their step.
        detail: "headline", "layers", or names of metrics whose means are headline values too.
        save: Function that flushes the logger.
        writers: Function that returns the logger's `SummaryWriter`s; None where it is not
            TensorBoard. They get the layout of the charts, and pictures.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(
        self,
        name: str,
        log: Callable[[dict[str, float], int], object],
        *,
        detail: Detail = HEADLINE,
        save: Callable[[], object] = lambda: None,
        writers: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        self._name = name
        self._log = log
        self._save = save
        self._writers = writers
        self._charts = Charts(detail)
        self._layout = ChartLayout(self._charts)

    def __str__(self) -> str:
        return self._name

    def write(self, reading: Reading) -> None:
        """Hand charted values to the logger; before the first, write the layout of their charts."""
        if self._writers is not None:
            self._layout.write_once(reading, self._writers())
        if values := self._charts.select(reading):
            self._log(values, reading.step)

    @property
    def shows_pictures(self) -> bool:
        """Whether the logger shows pictures."""
        return self._writers is not None

    def post(self, name: str, image: NDArray[np.uint8], step: int) -> None:
        """Show a picture.

        Args:
            name: Name of the picture.
            image: Pixels, uint8 [height, width, 3].
            step: Step of the reading that is shown.
        """
        for writer in self._writers() if self._writers is not None else ():
            writer.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        """Flush the logger, which is closed by whoever made it."""
        self._save()


# Takes the name of a picture, its pixels (uint8 [height, width, 3]) and the step.
Post = Callable[[str, NDArray[np.uint8], int], object]


def post_to_each(sinks: Iterable[Sink]) -> Post | None:
    """Make a function that shows a picture in every sink that shows pictures.

    Args:
        sinks: Sinks of loggers.

    Returns:
        Function that posts to them all, and then raises what the first that failed has raised; None
        where none of the sinks shows pictures.
    """
    posts: list[Post] = [
        sink.post
        for sink in sinks
        if isinstance(sink, WandB) or (isinstance(sink, LoggerSink) and sink.shows_pictures)
    ]
    if not posts:
        return None

    def post(name: str, image: NDArray[np.uint8], step: int) -> None:
        failures = []
        for each in posts:
            try:
                each(name, image, step)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    return post
