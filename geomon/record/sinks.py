"""Sinks: where readings go besides the record.

A sink takes a whole reading; what it shows is its own affair. One that fails is reported once and
left out, and training goes on.
"""

import os
from collections import deque
from typing import Any, Protocol, runtime_checkable

from geomon.record.reading import Reading
from geomon.record.tags import layout


@runtime_checkable
class Sink(Protocol):
    """Anything with these two methods."""

    def write(self, reading: Reading) -> None:
        """Take a reading."""

    def close(self) -> None:
        """Flush; may be called more than once."""


class Memory:
    """Keeps the last readings, as `readings`.

    Args:
        most: How many are kept; a long run leaves memory flat.
    """

    def __init__(self, most: int = 10_000) -> None:
        self.readings: deque[Reading] = deque(maxlen=most)

    def write(self, reading: Reading) -> None:
        """Keep a reading."""
        self.readings.append(reading)

    def close(self) -> None:
        """Nothing to flush."""


class TensorBoard:
    """Writes charted values as scalars, for loops that have no logger of their own.

    Args:
        directory: Of the event files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.fspath(directory))
        self._laid_out = False

    def write(self, reading: Reading) -> None:
        """Write the charted values at the reading's step, and first the layout of their charts."""
        if not self._laid_out:
            self._writer.add_custom_scalars(layout(reading.charted()))
            self._laid_out = True
        for tag, value in reading.charted().items():
            # The old style rounds to float32.
            self._writer.add_scalar(tag, value, reading.step, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Logs charted values to a W&B run, with the step as `geomon/step`.

    W&B drops values that are logged with a lower step than the last: the reading's step is a value
    of its own, which charts can take as their axis.

    Args:
        run: What `wandb.init()` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("geomon/step")

    def write(self, reading: Reading) -> None:
        """Log the charted values as one dict."""
        self._run.log({**reading.charted(), "geomon/step": reading.step})

    def close(self) -> None:
        """The run is the caller's to finish."""
