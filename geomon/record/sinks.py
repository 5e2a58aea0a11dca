"""Sinks: objects that receive every reading after it was recorded.

A sink takes a whole reading and decides itself what it shows. One that fails is reported once and
gets no further readings; the training goes on.
"""

import os
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from geomon.record.reading import Reading
from geomon.record.tags import layout


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
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.fspath(directory))
        self._layout = ChartLayout()

    def write(self, reading: Reading) -> None:
        """Write the charted values at the reading's step; before the first, the charts' layout."""
        self._layout.write_once(reading, [self._writer])
        for tag, value in reading.charted().items():
            # The old style rounds to float32.
            self._writer.add_scalar(tag, value, reading.step, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Sink that logs charted values to a W&B run, with the step as `geomon/step`.

    W&B drops values that are logged with a lower step than the last: the reading's step is a value
    of its own, which charts can take as their axis.

    Args:
        run: Run of W&B, as `wandb.init()` returns it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("geomon/step")

    def write(self, reading: Reading) -> None:
        """Log the charted values as one row."""
        self._run.log({**reading.charted(), "geomon/step": reading.step})

    def close(self) -> None:
        """Do nothing: who started the run finishes it."""


class ChartLayout:
    """Layout of TensorBoard's custom scalars, written with the first reading only.

    Args:
        prefix: Text that a logger puts before each tag, for instance "train/".
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._is_written = False

    def write_once(self, reading: Reading, writers: Iterable[Any]) -> None:
        """Write the layout of the charts of a reading, unless one was written before.

        Args:
            reading: Reading whose charted tags the charts show.
            writers: `SummaryWriter`s of TensorBoard; iterated over only when the layout is written.
        """
        if self._is_written:
            return
        self._is_written = True
        charts = {
            category: {
                f"{self._prefix}{title}": [kind, [f"{self._prefix}{tag}" for tag in patterns]]
                for title, (kind, patterns) in titles.items()
            }
            for category, titles in layout(reading.charted()).items()
        }
        for writer in writers:
            writer.add_custom_scalars(charts)


def post_picture_to_writer(writer: Any, name: str, image: NDArray[np.uint8], step: int) -> None:
    """Post a picture to TensorBoard.

    Args:
        writer: `SummaryWriter` of TensorBoard.
        name: Tag of the picture.
        image: Pixels, uint8 [height, width, 3].
        step: Training step at which the picture is shown.
    """
    writer.add_image(name, image, step, dataformats="HWC")
