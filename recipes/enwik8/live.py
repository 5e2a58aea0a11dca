"""What the terminal shows while the recipe trains: progress, loss, and the present reading."""

import math
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from geomon import Memory, Reading, Readings
from geomon.record import RaisedAlert
from geomon.record.tags import PROBE_LOSS, training_tag
from geomon.show import format_line, view

_VALIDATION = training_tag(PROBE_LOSS)


class LiveView(ProgressBar):
    """Lightning's progress and geomon's present reading in one picture, redrawn in place.

    Where the output is no terminal, one plain line for each reading instead. It is a sink too: give
    it to the `GeometryMonitor`.

    Args:
        history: The run so far, for a resumed run.
        loss_name: What the training logs its loss as, after "train/"; also its unit.
    """

    def __init__(self, history: Readings, loss_name: str = "bits_per_character") -> None:
        super().__init__()
        self._loss_name = loss_name
        self._console = Console(file=sys.stdout)
        self._memory = Memory()
        for reading in history:
            self._memory.write(reading)
        for alert in history.alerts:
            self._memory.alert(alert)
        self._numbers = ""
        self._progress = Progress(
            TextColumn("step"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"), console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task("", numbers="")
        self._live: Live | None = None

    # -- a sink ----------------------------------------------------------------------------------

    def write(self, reading: Reading) -> None:
        """Take a reading and show it."""
        self._memory.write(reading)
        if self._live is not None:
            self._live.update(self._picture())
        elif not self._console.is_terminal:
            self._console.print(
                format_line(reading, list(self._memory.readings)), soft_wrap=True, highlight=False
            )

    def alert(self, alert: RaisedAlert) -> None:
        """Take an alert and show it; without a terminal, the log has it."""
        self._memory.alert(alert)
        if self._live is not None:
            self._live.update(self._picture())

    def close(self) -> None:
        """Leave the last picture standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- Lightning's progress bar ----------------------------------------------------------------

    def disable(self) -> None:
        """Lightning asks ranks other than the first to be silent."""
        self._console = Console(quiet=True)

    def enable(self) -> None:
        """Counterpart of `disable`."""
        self._console = Console(file=sys.stdout)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to draw."""
        self._progress.update(self._task, total=trainer.max_steps, completed=trainer.global_step)
        if self._console.is_terminal:
            # A redraw takes 4 ms of the training's time.
            self._live = Live(self._picture(), console=self._console, refresh_per_second=2)
            self._live.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Move on."""
        if self._live is None:  # the loss need not be waited for
            return
        self._progress.update(
            self._task, completed=trainer.global_step, numbers=self._losses(trainer)
        )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back."""
        self.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self.close()

    def _losses(self, trainer: L.Trainer) -> str:
        """The loss of the last batch, and that on the validation text at the last reading."""
        found = {"train": float(trainer.callback_metrics.get(f"train/{self._loss_name}", math.nan))}
        if self._memory.readings:
            found["validation"] = self._memory.readings[-1].values.get(_VALIDATION, math.nan)
        shown = [f"{name} {loss:.3f}" for name, loss in found.items() if not math.isnan(loss)]
        unit = self._loss_name.replace("_per_", "/")
        return f"{', '.join(shown)} {unit}" if shown else ""

    def _picture(self) -> Group:
        if not self._memory.readings:
            return Group(self._progress)
        memory = self._memory
        whole = Readings([], [*memory.readings], raised=[*memory.alerts])
        return Group(self._progress, view(whole))
