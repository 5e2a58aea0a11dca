"""Makes the jobs of a monitor: what its readings and its checks measure, and where."""

from torch import nn

from geomon.analysis import WATCHED, Inputs
from geomon.capture import HOST
from geomon.distributed import RankGroup
from geomon.metrics import Evaluator, check_metrics
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.jobs import CHECK, ReadingJob
from geomon.monitor.moves import Moves
from geomon.monitor.options import MonitorOptions

# Rows of hidden states that a check looks at.
CHECK_ROWS = 1024


class JobFactory:
    """Makes jobs for readings of all metrics, and for checks of those that alerts watch.

    Args:
        options: All options of the monitor, checked.
        model: The watched model.

    Attributes:
        evaluator: Measures the layers of a reading.
        quick_evaluator: Measures the layers of a check.
        device: Device that measures them.

    Raises:
        ValueError: If a metric reads an unknown view, or the device is not available.
    """

    def __init__(self, options: MonitorOptions, model: nn.Module) -> None:
        self.evaluator = Evaluator(
            check_metrics(options["metrics"]), options["splits"], options["queries"],
            options["strict"],
            keeps_arrays=options["arrays"] and options["directory"] is not None,
        )  # fmt: skip
        self.quick_evaluator = Evaluator(
            {name: m for name, m in self.evaluator.metrics.items() if name in WATCHED},
            splits=1, has_margins=False,
        )  # fmt: skip
        self.device = MeasuringDevice(options["device"], model)
        self._rows = options["tokens"]

    def suit_background(self, wanted: bool | str | None, group: RankGroup) -> bool:
        """Return whether jobs are measured in the background, given the option of that name."""
        chosen = self.device.of_model != HOST if wanted is None else bool(wanted)
        # A user's own metric may draw random numbers. Their states are restored around it, which
        # must not happen while the training draws.
        return chosen and not self.evaluator.has_own_metrics and not group.connected

    def reading(
        self,
        step: int,
        source: str,
        group: RankGroup,
        *,
        same_inputs: bool,
        inputs: Inputs | None,
        moves: Moves | None,
    ) -> ReadingJob:
        """Make the job of a reading, which all ranks of a group measure (see `ReadingJob`)."""
        return ReadingJob(
            step, source, group, self.evaluator, rows=self._rows, place=self.device,
            same_inputs=same_inputs, inputs=inputs, moves=moves,
        )  # fmt: skip

    def check(self, step: int, *, inputs: Inputs | None, moves: Moves | None) -> ReadingJob:
        """Make the job of a check, which this rank measures alone."""
        return ReadingJob(
            step, CHECK, RankGroup(), self.quick_evaluator, rows=CHECK_ROWS, place=self.device,
            inputs=inputs, moves=moves,
        )  # fmt: skip


__all__ = ["CHECK_ROWS", "JobFactory"]
