"""Follows the file of a run and keeps what the screen shows of it."""

import time
from pathlib import Path

from geomon.analysis import single_source
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.record import Follower, Readings
from geomon.record.printable import printable
from geomon.show.terminal.overview import duration


class Watched:
    """Run that is being watched; `look` reads its file, in any thread, and updates the attributes.

    Args:
        directory: Folder of the run, or the path of its file. Both may appear later.
        stack: Name of the stack to follow if the model has several; None for the main one.
        name: Name of the run on the screen.
        colour: Colour of the run.
        dash: Dash of its line in the chart.

    Attributes:
        follower: Reader of the record, which is in the folder, or the newest one below it.
        whole: All readings of the record, and its alerts.
        readings: One reading per step, from the source that the run used most.
        quantities: Quantities that can be drawn over steps, by tag.
        trouble: Why the file cannot be read; "" if it can.
    """

    def __init__(
        self, directory: Path, stack: str | None, name: str, colour: str, dash: str
    ) -> None:
        self.follower, self._stack = Follower(directory, searches=True), stack
        self.name, self.trouble = printable(name), ""
        self.colour, self.dash = colour, dash
        self.whole = self.readings = Readings([], [])
        self.quantities: dict[str, Quantity] = {}

    def look(self) -> None:
        """Read what was written since the last look."""
        try:
            is_new = self.follower.look()
            every = self.follower.readings()
            # Alerts are lines of their own, and a resumed run can have fewer readings.
            sizes, known = [(len(x), len(x.raised)) for x in (every, self.whole)]
            if any(sizes) and (is_new or self.trouble or sizes != known):
                self.whole = every.of_stack(self._stack) if every else every
                self.readings = Readings(self.whole.runs, single_source(self.whole))
                self.quantities, self.trouble = quantities_of(self.readings), ""
        except (OSError, ValueError) as error:
            self.trouble = " ".join(str(error).split())

    @property
    def state(self) -> str:
        """Why there is nothing to show yet."""
        path = self.follower.path
        return "no readings yet" if path.is_file() else f"waiting for {printable(str(path))}"

    def outlook(self) -> str:
        """Say whether the training lives, and when the next reading is expected."""
        writer = self.follower.writer()
        if not writer:
            return "not training" if writer is None else "its process was killed"
        if len(self.readings) < 2:
            return "training"
        # Gaps grow slowly, so the next one is about as long as the last one.
        before, last = self.readings[-2], self.readings[-1]
        step, left = 2 * last.step - before.step, 2 * last.time - before.time - time.time()
        when = f"in {duration(left)}" if left >= 0 else f"due {duration(-left)} ago"
        return f"training, next reading near step {step:,} {when}"

    def layers_of(self, quantity: Quantity) -> set[int]:
        """Return the layers where a quantity has values; empty for a value of the whole run."""
        if not quantity.is_mean:
            return set()
        columns = [each.column(quantity.metric, quantity.part) for each in self.readings]
        return {layer for column in columns for layer in column.depths()}
