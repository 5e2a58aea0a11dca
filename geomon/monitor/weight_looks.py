"""Looks at the weights of the watched model, for the metrics of updates and for alerts."""

from geomon.monitor.model_blocks import ModelBlocks
from geomon.monitor.moves import Moves, WeightWatch
from geomon.monitor.run_alerts import RunAlerts
from geomon.monitor.warnings import Warnings


class WeightLooks:
    """Looks at the weights at each step that is read or checked, if anything wants that.

    Args:
        blocks: The blocks of the model.
        alerts: Raises alerts on weights that stand still.
        warnings: Turns errors into warnings.
        is_alerted: Whether to look for weights that stand still.
        is_measured: Whether a metric reads how far weights move.

    Attributes:
        moves: How the weights have moved since the look before; None if that is unknown.
    """

    def __init__(
        self,
        blocks: ModelBlocks,
        alerts: RunAlerts,
        warnings: Warnings,
        *,
        is_alerted: bool,
        is_measured: bool,
    ) -> None:
        self._blocks, self._alerts, self._warnings = blocks, alerts, warnings
        self._is_alerted, self._is_measured = is_alerted, is_measured
        self._watch = WeightWatch(blocks.model.root)
        self.moves: Moves | None = None

    def note_rate(self, step: int, rate: float) -> None:
        """Note the learning rate of a step, over which the size of updates is measured."""
        self._watch.note_rate(step, rate)

    def look(self, step: int) -> None:
        """Look at the weights of a step."""
        self.moves = None
        if not (self._is_alerted or self._is_measured):
            return
        failed = "how far weights move is not measured"
        self._warnings.attempt(lambda: self._look(step), failed, once=True)
        news = self._watch.news()
        if self._is_alerted:
            self._alerts.watch_weights(news)

    def _look(self, step: int) -> None:
        self.moves = self._watch.look(step, self._blocks.places)


__all__ = ["WeightLooks"]
