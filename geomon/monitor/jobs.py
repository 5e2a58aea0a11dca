"""A reading under way: a snapshot measured layer by layer, all at once or as time allows."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from geomon.capture.snapshot import Layer, Snapshot
from geomon.metrics.cautions import Note
from geomon.metrics.evaluate import MeasuredLayer, combined, measure_layer
from geomon.metrics.table import Metric
from geomon.monitor.together import Found

# Rows on which the cost of a layer is learned before anything is measured, and what that costs
# itself, about: half of the look at all layers and rows, and at least so many seconds a metric.
_TRIAL_ROWS = 256
_TRIAL_SECONDS = 0.004


class UnderWay:
    """One reading between the look at the model and its values.

    Args:
        step: Of the look.
        source: "inline" or "probe".
        snapshot: What was seen.
        metrics: Checked metrics by name.
        rows: Rows of hidden states in one batch.
        batches: Largest number of batches.
        strict: Raise what a metric raises, instead of recording the value as missing.
        seconds: What the look took of the training's time.
    """

    def __init__(
        self,
        step: int,
        source: str,
        snapshot: Snapshot,
        metrics: Mapping[str, Metric],
        *,
        rows: int,
        batches: int,
        strict: bool,
        seconds: float,
    ) -> None:
        self.step = step
        self.source = source
        self.seconds = seconds
        self.rows = rows
        self._full = rows
        self._about = snapshot.notes, snapshot.tokens, snapshot.mode, snapshot.dtype
        self._left = deque(snapshot.layers)
        self._metrics = metrics
        self._batches = batches
        self._strict = strict
        self._measured: list[MeasuredLayer] = []

    @property
    def begun(self) -> bool:
        """Whether a layer has been measured."""
        return bool(self._measured)

    @property
    def layers(self) -> int:
        """Number of layers, measured and not."""
        return len(self._measured) + len(self._left)

    @property
    def complete(self) -> bool:
        """Whether every layer has been measured."""
        return not self._left

    def thin(self, rows: int) -> None:
        """Take fewer rows in a batch; before the first layer is measured.

        Raises:
            ValueError: Layers have been measured already: a reading stands on one number of rows.
        """
        if self._measured:
            raise ValueError(f"{len(self._measured)} layers stand on {self.rows} rows already")
        self.rows = min(rows, self._full)

    @property
    def trial_guess(self) -> float:
        """Seconds that `try_out` is expected to take."""
        return max(self.seconds / 2, _TRIAL_SECONDS * len(self._metrics))

    def try_out(self) -> tuple[int, float]:
        """Measure a layer on few rows for its cost alone: rows, and seconds the second time."""
        layer = self._left[-1]
        rows = min(_TRIAL_ROWS, self._full)
        taken = [self._timed(lambda: self._measure(layer, rows)) for _ in range(2)]
        return rows, taken[1]  # the first warms up

    def measure_next(self) -> float:
        """Measure one more layer and let go of what was seen of it; the seconds it took."""

        def measure() -> None:
            self._measured.append(self._measure(self._left[0], self.rows))
            self._left.popleft()  # only now: an interrupted layer is measured again

        return self._timed(measure)

    def found(self) -> Found:
        """What was measured; after all layers have been."""
        began = time.perf_counter()
        result = combined(self._measured, self._metrics, rows=self.rows)
        self.seconds += time.perf_counter() - began
        noted, tokens, mode, dtype = self._about
        notes = [*noted, *result.notes]
        if self.rows < self._full:
            text = f"{self.rows} rows in a batch instead of {self._full}, to stay within the budget"
            notes.append(Note("rows thinned by the budget", text))
        kept = min(tokens, self.rows * self._batches)
        return Found(result.values, notes, kept, mode, dtype)

    def _measure(self, layer: Layer, rows: int) -> MeasuredLayer:
        return measure_layer(
            layer, self._metrics, rows=rows, batches=self._batches, strict=self._strict
        )

    def _timed(self, action: Callable[[], object]) -> float:
        began = time.perf_counter()
        action()
        taken = time.perf_counter() - began
        self.seconds += taken
        return taken
