"""Pages of W&B: headline values, interactive charts, the key numbers of the run, and alerts."""

import atexit
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from geomon.analysis.facts import FactLog
from geomon.record import RaisedAlert, Reading, Readings, tags
from geomon.record.columns import texts_of
from geomon.record.headline import HEADLINE, Charts, Detail
from geomon.show.loggers.history import Part, RunDrawer
from geomon.show.loggers.others import Alerts
from geomon.show.loggers.parts import Pages

log = logging.getLogger("geomon")

# Key of the reading's step in rows of W&B.
_STEP = "geomon/step"
# Readings that wait for rows of a W&B run to which nothing has been logged, before it is said.
_MANY_WAITING = 3
# Seconds in which W&B sends one alert of a title at most.
_ALERT_PAUSE = 600


class WandB(Pages):
    """Sink that fills the pages of a W&B run, beside what others log there.

    Headline values and interactive charts join the rows that the training logs (see `WandBRows`);
    the summary holds the phase, peak and last value of the intrinsic dimension; the configuration
    describes the run, as `geomon`; alerts are alerts of W&B (docs/wandb.md).

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        by_step: Whether others number their rows by training steps, or not at all, or log nothing:
            a reading that comes before their first row is then a row too.
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
        by_step: bool = False,
        detail: Detail = HEADLINE,
        pictures: bool = True,
    ) -> None:
        if run is None and find_spec("wandb") is None:
            raise ImportError("W&B's charts need wandb: pip install 'geomon[wandb]'")
        rows = WandBRows(run, by_step=by_step, detail=detail)

        def send(title: str, text: str, step: int) -> None:
            if rows.run is not None:
                text = f"Step {step}: {text}"
                rows.run.alert(title=title, text=text, level="WARN", wait_duration=_ALERT_PAUSE)

        charts = [WandBCharts(rows)] if pictures else []
        super().__init__("W&B", [rows, WandBSummary(rows), Alerts(send, name="W&B"), *charts])


class WandBRows:
    """Sink that logs charted values to a W&B run, beside what others log there.

    W&B counts rows, and drops what is logged with `step=` below its counter. What others log is
    therefore watched, and a reading never takes a number that they may still use. It joins the row
    that is open, unless another reading is in it. Else it waits for what others log next: where
    they give no `step=`, it gets a row after theirs; where they do, a number that they have left
    out, or their own. Where there are fewer numbers than readings, the rest get rows of their own
    when the run is finished, or the program ends. Charts take the reading's step, `geomon/step`, as
    their axis.

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        by_step: Whether others number their rows by training steps, or not at all: the number of a
            reading's step is then free as soon as that step has come.
        detail: "headline", "layers", or names of metrics whose means are headline values too.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(self, run: Any, *, by_step: bool = False, detail: Detail = HEADLINE) -> None:
        self._charts = Charts(detail)
        self.named = self._charts.named
        self._run: Any = None
        self._by_step = by_step
        # Whether others give numbers to their rows; None while they have logged nothing.
        self._numbered: bool | None = None
        self._waiting: deque[dict[str, Any]] = deque()  # rows that have not been logged yet
        self._free = 0  # the first number that no reading has taken
        self._is_logging = False
        self._defined: set[str] = set()
        self._flushed_by_run = False
        self._unfollow: Callable[[], None] = lambda: None
        self._description: dict[str, Any] | None = None
        if run is not None:
            self._follow(run)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Put the description of the run into the configuration of the W&B run, as `geomon`.

        Each metric stands there with its range in healthy runs, or with its meaning.
        """
        self._charts.describe(description)
        texts = texts_of(description).items()
        words = {name: text.healthy or text.meaning for name, text in texts}
        self._description = {**description, "metrics": words}
        if self._run is not None:
            self._configure()

    def write(self, reading: Reading) -> None:
        """Log the charted values of a reading."""
        self.log(self._charts.select(reading), reading.step)

    @property
    def run(self) -> Any:
        """The run of W&B: the active one where none was given.

        None while there is none, and where it is disabled, which takes nothing.
        """
        if self._run is None:
            import wandb

            if wandb.run is not None:
                self._follow(wandb.run)
        return None if getattr(self._run, "disabled", False) else self._run

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log values of a reading.

        Args:
            values: Numbers, or charts of plotly, by the name under which they are shown.
            step: Step of the reading.
        """
        if self.run is None:
            return
        for name in values.keys() - self._defined:  # a pattern may give way to the training's own
            self._defined.add(name)
            # The chart of the intrinsic dimension has the ends of its interval as a band.
            hidden = self._charts.is_end(name)
            self._run.define_metric(name, step_metric=_STEP, hidden=hidden)
        self._waiting.append({**values, _STEP: step})
        is_free = self._by_step and self._numbered is None
        self._fill(max(self._run.step, step) if is_free else self._run.step)
        if len(self._waiting) == _MANY_WAITING and self._numbered is None and not self._by_step:
            log.warning(
                "W&B: readings wait for the rows of the training, and nothing has been logged to "
                "the run so far; if nothing else is logged there, use WandB(run, by_step=True)"
            )

    def close(self) -> None:
        """Log what is waiting, unless that is done when the run is finished.

        The run is finished by whoever started it.
        """
        if not self._flushed_by_run or not self._waiting:
            self._end()

    def _follow(self, run: Any) -> None:
        self._run = run
        if self.run is None:
            return
        self._flushed_by_run = _call_at_finish(run, self._end)
        atexit.register(self._end)  # a run that is not finished ends with the program
        self._unfollow = self._watch_rows(run)
        run.define_metric(_STEP, hidden=True)
        self._configure()

    def _watch_rows(self, run: Any) -> Callable[[], None]:
        """Watch what others log to a run, and return a function that stops watching.

        W&B offers no public hook for rows, so the function behind `run.log` is replaced on this
        run. If the run has no such function, nothing is watched.
        """
        original, own = getattr(run, "_log", None), vars(run).get("_log")
        if original is None:
            return lambda: None

        @functools.wraps(original)
        def watched(data: Any, step: int | None = None, commit: bool | None = None) -> None:
            self._attempt(self._before_row, step)
            original(data, step, commit)
            self._attempt(self._after_row, step, commit)

        run._log = watched

        def take_away() -> None:
            if vars(run).get("_log") is not watched:
                return  # it lies under another's, and goes with the run
            if own is None:
                del run._log
            else:
                run._log = own

        return take_away

    def _attempt(self, function: Callable[..., None], *given: Any) -> None:
        """Log readings beside a row of the others, which is theirs whatever comes of that."""
        if self._is_logging:
            return
        try:
            function(*given)
        except Exception as error:
            log.warning("W&B: a reading was not logged: %s: %s", type(error).__name__, error)

    def _end(self) -> None:
        """Log what is waiting, and leave nothing on the run."""
        atexit.unregister(self._end)
        self._attempt(self._flush)  # W&B may have been torn down before
        self._unfollow()

    def _configure(self) -> None:
        if self._description is not None:
            self._run.config.update({"geomon": self._description}, allow_val_change=True)

    def _before_row(self, step: int | None) -> None:
        """Others are about to log: readings take the numbers up to that of their row."""
        if step is not None:
            self._fill(step)

    def _after_row(self, step: int | None, commit: bool | None) -> None:
        """Others have logged: where W&B counts their rows, readings follow the one that ended."""
        self._numbered = self._numbered or step is not None
        if not self._numbered and commit is not False:
            self._flush()

    def _fill(self, last: int) -> None:
        """Give each waiting reading a number that none has taken, from the open row's to a last."""
        while self._waiting and (number := max(self._run.step, self._free)) <= last:
            self._free = number + 1
            self._log(self._waiting.popleft(), step=number)

    def _flush(self) -> None:
        """Give each waiting reading a row of its own, whatever its number."""
        if self._waiting and self._free > self._run.step:
            self._log({}, commit=True)  # ends the row that a reading has joined
        while self._waiting:
            self._log(self._waiting.popleft(), commit=True)

    def _log(self, row: dict[str, Any], **how: Any) -> None:
        self._is_logging = True
        try:
            self._run.log(row, **how)
        finally:
            self._is_logging = False


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
    """Sink that keeps the key numbers of a run, and its facts, in the summary of a W&B run.

    They are `geomon/phase`, `geomon/peak_step` and `geomon/peak` if the intrinsic dimension has
    fallen from a peak, `geomon/final` (its last value), `geomon/facts` (a sentence for each
    headline quantity) and `geomon/alerts` (their number so far).

    Args:
        rows: Rows of the run.
    """

    def __init__(self, rows: WandBRows) -> None:
        self._rows = rows
        self._facts = FactLog()
        self._alerts = 0

    def __str__(self) -> str:
        return "the summary of the W&B run"

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, which says how its metrics are called."""
        self._facts = FactLog([description])

    def write(self, reading: Reading) -> None:
        """Bring the summary up to date."""
        self._facts.add([reading])
        run = self._rows.run
        if run is None:
            return
        facts = self._facts.facts()
        numbers: dict[str, Any] = {"geomon/alerts": self._alerts}
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
        """Count an alert."""
        self._alerts += 1
        if (run := self._rows.run) is not None:
            run.summary.update({"geomon/alerts": self._alerts})

    def close(self) -> None:
        """Do nothing: the summary is up to date."""


class WandBCharts(RunDrawer):
    """Sink that logs interactive charts of layers and heads to a W&B run.

    W&B has no heat map of its own; it draws charts of plotly, which are logged as such. `write`
    raises an ImportError where plotly is missing.

    Args:
        rows: Rows of the run.
    """

    def __init__(self, rows: WandBRows) -> None:
        super().__init__("drawing charts for W&B", metrics=rows.named)
        self._rows = rows

    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        if self._rows.run is not None:
            yield partial(self._log_charts, readings, step)

    def _log_charts(self, readings: Readings, step: int) -> None:
        from geomon.show.charts import charts_of

        charts = charts_of(readings, self._metrics)
        self._rows.log({f"geomon_charts/{name}": chart for name, chart in charts.items()}, step)


__all__ = ["WandB", "WandBCharts", "WandBRows", "WandBSummary"]
