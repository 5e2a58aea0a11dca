"""Pages of W&B: headline values, interactive charts, the key numbers of the run, and alerts."""

import atexit
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from geomon.advice import to_install
from geomon.analysis import FactLog
from geomon.failures import failures
from geomon.record import (
    ALERTS,
    HEADLINE,
    Charts,
    Detail,
    RaisedAlert,
    Reading,
    Readings,
    Sink,
    tags,
    texts_of,
)
from geomon.show.loggers.others import Alerts
from geomon.show.loggers.parts import Page, Pages, Part, RunDrawer

log = logging.getLogger("geomon")

# Key of the reading's step in W&B rows.
_STEP = "geomon/step"
# Warn once this many readings wait for rows and nothing else has been logged to the run.
_MANY_WAITING = 3
# W&B sends at most one alert with the same title in this many seconds.
_ALERT_PAUSE = 600


class WandB(Pages):
    """Sink that adds geomon's values, charts and alerts to a W&B run that others log to as well.

    Headline values and interactive charts join the rows that the training logs (see `WandBRows`).
    The summary holds the phase, peak and last value of the intrinsic dimension, the configuration
    describes the run under the key `geomon`, and alerts become W&B alerts (docs/wandb.md).

    Args:
        run: W&B run, as `wandb.init()` returns it. Defaults to None, the active run.
        by_step: Whether other code numbers its rows by training step, never passes a step, or logs
            nothing. A reading that comes before the first row of others then gets a row of its own.
            Defaults to False.
        detail: "headline" for about a dozen values in the group `geomon/`, "layers" for all charted
            values, or names of metrics whose means become headline values too. Defaults to
            "headline".
        pictures: Whether to draw charts of layers and heads each time the step has doubled and at
            the end, which requires plotly. Defaults to True.

    Raises:
        ValueError: If the detail is none of them.
        ImportError: If no run is given and wandb is missing.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        by_step: bool = False,
        detail: Detail = HEADLINE,
        pictures: bool = True,
    ) -> None:
        if run is None and find_spec("wandb") is None:
            raise ImportError(f"W&B's charts need wandb: {to_install('wandb')}")
        rows = WandBRows(run, by_step=by_step, detail=detail)

        def send(title: str, text: str, step: int) -> None:
            if rows.run is not None:
                rows.run.alert(
                    title=title, text=f"Step {step}: {text}", level="WARN",
                    wait_duration=_ALERT_PAUSE,
                )  # fmt: skip

        parts: list[Sink] = [rows, WandBSummary(rows), Alerts(send, name="W&B")]
        super().__init__("W&B", [*parts, WandBCharts(rows)] if pictures else parts)


class WandBRows:
    """Sink that logs charted values to a W&B run without disturbing the rows that others log.

    W&B counts rows and drops values that are logged with a `step=` below its counter. `WandBRows`
    therefore watches what others log, and never takes a row number that they may still use:

    - A reading joins the open row, unless that row holds another reading.
    - Otherwise it waits for the next log of others. If they pass no `step=`, the reading gets a row
      after theirs; if they do, it gets a number that they skipped, or joins their row.
    - Readings that are left over get rows of their own when the run is finished or the program
      ends.

    Charts use the reading's step, `geomon/step`, as their x axis.

    Args:
        run: W&B run, as `wandb.init()` returns it; None for the active run.
        by_step: Whether other code numbers its rows by training step or not at all. The number of a
            reading's step is then free as soon as that step has come.
        detail: "headline", "layers", or names of metrics whose means become headline values too.
    """

    def __init__(self, run: Any, *, by_step: bool, detail: Detail) -> None:
        self._charts = Charts(detail)
        self.named = self._charts.named
        self.alerts = 0  # so far
        self._target = _TargetRun(run)
        self._by_step = by_step
        self._rows: _FreeRows | None = None  # until there is a run
        self._defined: set[str] = set()
        self._description: dict[str, Any] | None = None
        if run is not None:
            self._follow()

    def describe(self, description: Mapping[str, Any]) -> None:
        """Write the description of the run and the healthy range of each metric into the config."""
        self._charts.describe(description)
        metrics = texts_of(description).items()
        words = {name: text.healthy or text.meaning for name, text in metrics}
        self._description = {**description, "metrics": words}
        self._configure()

    def write(self, reading: Reading) -> None:
        """Log the charted values of a reading."""
        self.log(self._charts.select(reading), reading.step)

    def alert(self, alert: RaisedAlert) -> None:
        """Log the number of alerts so far."""
        self.alerts += 1
        self.log({ALERTS: self.alerts}, alert.step)

    @property
    def run(self) -> Any:
        """The given or active W&B run, or None if there is none yet, or it is disabled or finished.

        A finished run answers nothing, and would be waited for at each reading.
        """
        if self._target.find():
            self._follow()
        return self._target.open_run()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers or plotly charts of a reading by name."""
        run = self.run
        if run is None or self._rows is None:
            return
        for name in values.keys() - self._defined:  # a glob yields to the training's own
            self._defined.add(name)
            # The ends of the interval are hidden: a chart draws them as a band.
            run.define_metric(name, step_metric=_STEP, hidden=self._charts.is_end(name))
        self._rows.add({**values, _STEP: step}, step)

    def close(self) -> None:
        """Log waiting rows, unless this happens when the owner finishes the run."""
        if self._rows is not None:
            self._rows.close()

    def _follow(self) -> None:
        """Begin to watch the run that was found."""
        run = self._target.open_run()
        if run is not None:
            self._rows = _FreeRows(self._target, by_step=self._by_step)
            run.define_metric(_STEP, hidden=True)
            self._configure()

    def _configure(self) -> None:
        if self._target.run is not None and self._description is not None:
            description = {"geomon": self._description}
            self._target.run.config.update(description, allow_val_change=True)


class _TargetRun:
    """W&B run that may not be there yet, and may end at any time.

    Attributes:
        run: The given or active run, or None if there was none so far.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._was_finished = False

    def find(self) -> bool:
        """Take the active run if there was none so far; return whether one was found now."""
        if self.run is not None:
            return False
        import wandb

        self.run = wandb.run
        return self.run is not None

    def open_run(self) -> Any:
        """Return the run, or None if it is disabled or finished; warn once if it is finished."""
        is_finished = getattr(self.run, "_is_finished", False)
        if is_finished and not self._was_finished:
            log.warning("W&B: the run was finished, so later readings are not shown there")
        self._was_finished = is_finished
        return None if is_finished or getattr(self.run, "disabled", False) else self.run


class _FreeRows:
    """Rows of readings in a run that others log to, under numbers that others do not use.

    Args:
        target: The run, which is open.
        by_step: Whether other code numbers its rows by training step or not at all.
    """

    def __init__(self, target: _TargetRun, *, by_step: bool) -> None:
        self._target, self._run = target, target.run
        self._by_step = by_step
        # Whether others pass a step with their rows; None until they have logged something.
        self._numbered: bool | None = None
        self._waiting: deque[dict[str, Any]] = deque()  # rows that are not logged yet
        self._free = 0  # first row number that no reading uses
        self._is_logging = False
        self._flushed_by_run = _call_at_finish(self._run, self._end)
        atexit.register(self._end)  # an unfinished run ends with the program
        self._unwatch = self._watch()

    def add(self, row: dict[str, Any], step: int) -> None:
        """Log the row of a reading now or when a number is free."""
        self._waiting.append(row)
        is_free = self._by_step and self._numbered is None
        self._fill(max(self._run.step, step) if is_free else self._run.step)
        if len(self._waiting) == _MANY_WAITING and self._numbered is None and not self._by_step:
            log.warning(
                "W&B: readings wait for the rows of the training, and nothing has been logged to "
                "the run so far; if nothing else is logged there, use WandB(run, by_step=True)"
            )

    def close(self) -> None:
        """Log waiting rows, unless this happens when the owner finishes the run."""
        if not self._flushed_by_run or not self._waiting:
            self._end()

    def _watch(self) -> Callable[[], None]:
        """Wrap the private function behind `run.log`, for lack of a hook; return how to undo it."""
        run = self._run
        original = getattr(run, "_log", None)
        if original is None:
            return lambda: None
        own = {name: each for name, each in vars(run).items() if name == "_log"}

        @functools.wraps(original)
        def watched(data: Any, step: int | None = None, commit: bool | None = None) -> None:
            is_own = self._is_logging
            if step is not None and not is_own:
                self._attempt(self._fill, step)  # free numbers up to the one of this row
            original(data, step, commit)
            if not is_own:
                self._numbered = self._numbered or step is not None
                if not self._numbered and commit is not False:  # W&B counts their rows
                    self._attempt(self._flush)

        run._log = watched

        def take_away() -> None:
            if vars(run).get("_log") is watched:  # and no other wrapper lies on top of it
                del run._log
                vars(run).update(own)

        return take_away

    def _attempt(self, function: Callable[..., None], *given: Any) -> None:
        """Log readings without letting a failure affect the row that others log."""
        try:
            function(*given)
        except failures() as error:
            log.warning("W&B: a reading was not logged: %s: %s", type(error).__name__, error)

    def _end(self) -> None:
        """Log waiting rows and remove all hooks from the run."""
        atexit.unregister(self._end)
        if self._waiting and self._target.open_run() is not None:
            self._attempt(self._flush)  # W&B may already be torn down
        self._unwatch()

    def _fill(self, last: int) -> None:
        """Log waiting readings under free row numbers, from the open row to `last`."""
        while self._waiting and (number := max(self._run.step, self._free)) <= last:
            self._free = number + 1
            self._log(self._waiting.popleft(), step=number)

    def _flush(self) -> None:
        """Log each waiting reading as a row of its own, whatever its number."""
        if self._waiting and self._free > self._run.step:
            self._log({}, commit=True)  # completes the row that a reading has joined
        while self._waiting:
            self._log(self._waiting.popleft(), commit=True)

    def _log(self, row: dict[str, Any], **how: Any) -> None:
        self._is_logging = True
        try:
            self._run.log(row, **how)
        finally:
            self._is_logging = False


def _call_at_finish(run: Any, function: Callable[[], None]) -> bool:
    """Register a private hook of W&B that runs when the run finishes; return whether it worked."""
    try:
        from wandb.sdk.wandb_run import TeardownHook, TeardownStage

        run._teardown_hooks.append(TeardownHook(function, TeardownStage.EARLY))
    except (ImportError, AttributeError):
        return False
    return True


class WandBSummary(Page):
    """Sink that keeps the key numbers and facts of a run in the summary of its W&B run.

    It writes `geomon/phase`, `geomon/peak_step` and `geomon/peak` (if the intrinsic dimension has
    fallen from a peak), `geomon/final` (its last value), `geomon/facts` (a sentence for each
    headline quantity) and `geomon/alerts` (their number so far).
    """

    def __init__(self, rows: WandBRows) -> None:
        super().__init__("the summary of the W&B run")
        self._rows = rows
        self._facts = FactLog()

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep the description of the run, which names its metrics."""
        self._facts = FactLog([description])

    def write(self, reading: Reading) -> None:
        """Update the summary."""
        self._facts.add([reading])
        run = self._rows.run
        if run is None:
            return
        facts = self._facts.facts()
        numbers: dict[str, Any] = {ALERTS: self._rows.alerts}
        if facts:
            numbers["geomon/facts"] = "\n".join(fact.sentence for fact in facts)
        for fact in facts:
            if fact.quantity.tag == tags.mean_tag("twonn"):
                phase = fact.phase
                numbers |= {
                    "geomon/phase": phase.name,
                    "geomon/peak_step": phase.peak.step if phase.has_fallen else None,
                    "geomon/peak": phase.peak.value if phase.has_fallen else None,
                    "geomon/final": phase.last.value,
                }
        run.summary.update(numbers)

    def alert(self, alert: RaisedAlert) -> None:
        """Update the number of alerts."""
        if (run := self._rows.run) is not None:
            run.summary.update({ALERTS: self._rows.alerts})


class WandBCharts(RunDrawer):
    """Sink that logs plotly charts of layers and heads, as W&B lacks a heat map of its own."""

    def __init__(self, rows: WandBRows) -> None:
        super().__init__("drawing charts for W&B", metrics=rows.named)
        self._rows = rows

    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        if self._rows.run is not None:
            yield partial(self._log_charts, readings, step)

    def _log_charts(self, readings: Readings, step: int) -> None:
        from geomon.show.charts import charts_of

        charts = charts_of(readings, self._metrics).items()
        self._rows.log({f"geomon_charts/{name}": chart for name, chart in charts}, step)
