"""Pages of W&B: headline values, interactive charts, the key numbers of the run, and alerts."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from geomon.analysis import find_phase
from geomon.analysis.alerts import alert_notes, dimension_of
from geomon.record import Reading, Readings, Sink
from geomon.record.headline import HEADLINE, Charts, Detail
from geomon.record.sinks import Affords
from geomon.show.loggers.history import Part, RunDrawer
from geomon.show.loggers.parts import Pages

log = logging.getLogger("geomon")

# Key of the reading's step in rows of W&B.
_STEP = "geomon/step"
# Readings that wait for rows of a W&B run to which nothing has been logged, before it is said.
_MANY_WAITING = 3
# Seconds in which W&B sends one alert of a title at most.
_ALERT_PAUSE = 600
# Seconds expected for the first charts, which import plotly.
_FIRST_COST = 1.0


class WandB(Pages):
    """Sink that fills the pages of a W&B run, beside what others log there.

    Headline values and interactive charts join the rows that the training logs (see `WandBRows`);
    the summary holds the phase, peak and last value of the intrinsic dimension; the configuration
    describes the run, as `geomon`; alerts are alerts of W&B (docs/wandb.md).

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        alone: Whether nothing else is logged to the run: every reading is then a row at once.
        detail: "headline" for about a dozen values, in the group `geomon/`; "layers" for all that
            are charted; or names of metrics whose means are headline values too.
        pictures: Whether charts of layers and heads are drawn, each time the step has doubled and
            at the end, which takes plotly.

    Raises:
        ValueError: The detail is none of them.
        ImportError: No run is given, and wandb is missing.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        alone: bool = False,
        detail: Detail = HEADLINE,
        pictures: bool = True,
    ) -> None:
        if run is None and find_spec("wandb") is None:
            raise ImportError("W&B's charts need wandb: pip install 'geomon[wandb]'")
        super().__init__()
        self._rows = WandBRows(run, alone=alone, detail=detail)
        self._pictures = pictures

    def _make_parts(self, affords: Affords) -> Iterator[Sink]:
        yield self._rows
        yield WandBSummary(self._rows)
        yield WandBAlerts(self._rows)
        if self._pictures:
            yield WandBCharts(self._rows, affords=affords)


class WandBRows:
    """Sink that logs charted values to a W&B run, beside what others log there.

    W&B counts rows, and drops what is logged with `step=` below its counter. A reading therefore
    never makes a row of its own while the run goes on: it joins the row that the training logs next
    (`commit=False`), one reading to a row and the newest first. Readings for which there was no row
    get theirs when the run is finished. Charts take the reading's step, `geomon/step`, as their
    axis: the row may be of another step.

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        alone: Whether nothing else is logged to the run: every reading is then a row at once.
        detail: "headline", "layers", or names of metrics whose means are headline values too.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(self, run: Any, *, alone: bool, detail: Detail) -> None:
        self._charts = Charts(detail)
        self.named = self._charts.named
        self._run: Any = None
        self._alone = alone
        self._waiting: deque[dict[str, Any]] = deque()  # rows that have not been logged yet
        # The run's row that a reading of ours has joined, and the step of the reading.
        self._joined: tuple[int, int] | None = None
        self._defined: set[str] = set()
        self._flushed_by_run = False
        self._description: dict[str, Any] | None = None
        if run is not None:
            self._follow(run)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Put the description of the run into the configuration of the W&B run, as `geomon`.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._charts.describe(description)
        texts = description.get("metrics")
        names = {"metrics": list(texts)} if isinstance(texts, dict) else {}
        self._description = {**description, **names}
        if self.run is not None:
            self._configure()

    def write(self, reading: Reading) -> None:
        """Log the charted values with the row that the training logs next."""
        self.log(self._charts.select(reading), reading.step)

    @property
    def run(self) -> Any:
        """The run of W&B: the active one where none was given; None while there is none."""
        if self._run is None:
            import wandb

            if wandb.run is not None:
                self._follow(wandb.run)
        return self._run

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log values of a reading with the row that the training logs next.

        Args:
            values: Numbers, or charts of W&B, by the name under which they are shown.
            step: Step of the reading.
        """
        if self.run is None:
            return
        for name in values.keys() - self._defined:  # a pattern may give way to the training's own
            self._defined.add(name)
            # The chart of the intrinsic dimension has the ends of its interval as a band.
            hidden = self._charts.is_end(name)
            self._run.define_metric(name, step_metric=_STEP, hidden=hidden)
        self._log(dict(values), step)

    def close(self) -> None:
        """Log what is waiting, unless that is done when the run is finished.

        The run is finished by whoever started it.
        """
        if self._run is not None and not self._flushed_by_run:
            self._flush()

    def _follow(self, run: Any) -> None:
        self._run = run
        self._flushed_by_run = _call_at_finish(run, self._flush)
        run.define_metric(_STEP, hidden=True)
        self._configure()

    def _configure(self) -> None:
        if self._description is not None:
            self._run.config.update({"geomon": self._description}, allow_val_change=True)

    def _log(self, values: dict[str, Any], step: int) -> None:
        if getattr(self._run, "disabled", False):
            return
        row = {**values, _STEP: step}
        if self._alone:
            self._run.log(row)
            return
        if self._waiting and self._waiting[-1][_STEP] == step:
            self._waiting[-1] |= row  # values and charts of one step
        else:
            self._waiting.append(row)
        present = self._run.step
        if self._joined is None or present != self._joined[0] or step == self._joined[1]:
            self._joined = present, step
            self._run.log(self._waiting.pop(), commit=False)
        elif len(self._waiting) == _MANY_WAITING and present == 0:
            log.warning(
                "W&B: readings wait for the rows of the training, and nothing has been logged to "
                "the run so far; if nothing else is logged there, use WandB(run, alone=True)"
            )

    def _flush(self) -> None:
        """Give each waiting reading a row of its own."""
        if self._waiting and self._joined is not None and self._joined[0] == self._run.step:
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


class WandBSummary:
    """Sink that keeps the key numbers of a run in the summary of a W&B run.

    They are `geomon/phase`, `geomon/peak_step` and `geomon/peak` where the intrinsic dimension has
    a peak, `geomon/final` (its last value) and `geomon/alerts` (their number so far).

    Args:
        rows: Rows of the run.
    """

    def __init__(self, rows: WandBRows) -> None:
        self._rows = rows
        self._curves: dict[str, list[tuple[int, float, float]]] = {}  # by source of the readings
        self._alerts = 0

    def __str__(self) -> str:
        return "the summary of the W&B run"

    def write(self, reading: Reading) -> None:
        """Bring the summary up to date."""
        self._alerts += len(alert_notes(reading))
        value, error, _ = dimension_of(reading)
        if math.isfinite(value):
            self._curves.setdefault(reading.source, []).append((reading.step, value, error))
        run = self._rows.run
        if run is not None and not getattr(run, "disabled", False):
            run.summary.update({"geomon/alerts": self._alerts, **self._numbers()})

    def close(self) -> None:
        """Do nothing: the summary is up to date."""

    def _numbers(self) -> dict[str, Any]:
        if not self._curves:
            return {}
        # Readings of two sources see different tokens: those of the more common one are a curve.
        points = max(self._curves.values(), key=len)
        steps, values, errors = map(list, zip(*points, strict=True))
        phase = find_phase(steps, values, errors)
        has_peak = phase.name in ("peak", "compressing")
        return {
            "geomon/phase": phase.name,
            "geomon/peak_step": phase.peak_step if has_peak else None,
            "geomon/peak": phase.peak if has_peak else None,
            "geomon/final": values[-1],
        }


class WandBAlerts:
    """Sink that sends the alerts of a run as alerts of W&B.

    An alert is raised again only where four times as much is found; W&B sends those of one kind at
    most every ten minutes.

    Args:
        rows: Rows of the run.
    """

    def __init__(self, rows: WandBRows) -> None:
        self._rows = rows

    def __str__(self) -> str:
        return "sending alerts to W&B"

    def write(self, reading: Reading) -> None:
        """Send the alerts of a reading."""
        alerts = alert_notes(reading)
        if not alerts or self._rows.run is None:
            return
        for alert in alerts:
            title = f"geomon: {alert.kind.replace('_', ' ')}"
            self._rows.run.alert(
                title=title[:63],  # of 64 characters W&B takes none
                text=f"Step {reading.step}: {alert}",
                level="WARN",
                wait_duration=_ALERT_PAUSE,
            )

    def close(self) -> None:
        """Do nothing: alerts are sent at once."""


class WandBCharts(RunDrawer):
    """Sink that logs interactive charts of layers and heads to a W&B run.

    W&B has no heat map of its own; it draws charts of plotly, which are logged as such. `write`
    raises an ImportError where plotly is missing.

    Args:
        rows: Rows of the run.
        affords: Function of a number of seconds that returns whether drawing may take them now.
    """

    def __init__(self, rows: WandBRows, *, affords: Affords) -> None:
        super().__init__(affords=affords, first_cost=_FIRST_COST, metrics=rows.named)
        self._rows = rows

    def __str__(self) -> str:
        return "drawing charts for W&B"

    def _draw(
        self, readings: Readings, reading: Reading, *, fresh: bool, last: bool
    ) -> Iterator[Part]:
        def log_charts() -> None:
            import wandb

            from geomon.show.loggers.charts import charts_of

            charts = charts_of(readings, reading, self._metrics)
            logged = {f"geomon_charts/{name}": wandb.Plotly(c) for name, c in charts.items()}
            self._rows.log(logged, reading.step)

        if self._rows.run is not None and fresh:
            yield log_charts


__all__ = ["WandB", "WandBAlerts", "WandBCharts", "WandBRows", "WandBSummary"]
