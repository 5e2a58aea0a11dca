"""Pages of W&B: headline values, interactive charts, the key numbers of the run, and alerts."""

import atexit
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from geomon.analysis import find_phase
from geomon.analysis.alerts import alert_notes
from geomon.analysis.curves import measured
from geomon.record import Reading, Readings, Sink
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
        by_step: Whether others number their rows by training steps, or not at all: a reading that
            comes before their first row is then a row too.
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
        by_step: bool = False,
        detail: Detail = HEADLINE,
        pictures: bool = True,
    ) -> None:
        if run is None and find_spec("wandb") is None:
            raise ImportError("W&B's charts need wandb: pip install 'geomon[wandb]'")
        super().__init__()
        self._rows = WandBRows(run, alone=alone, by_step=by_step, detail=detail)
        self._pictures = pictures

    def _make_parts(self) -> Iterator[Sink]:
        yield self._rows
        yield WandBSummary(self._rows)
        yield Alerts(self._send_alert, name="W&B")
        if self._pictures:
            yield WandBCharts(self._rows)

    def _send_alert(self, title: str, text: str, step: int) -> None:
        if self._rows.run is not None:
            text = f"Step {step}: {text}"
            self._rows.run.alert(title=title, text=text, level="WARN", wait_duration=_ALERT_PAUSE)


class WandBRows:
    """Sink that logs charted values to a W&B run, beside what others log there.

    W&B counts rows, and drops what is logged with `step=` below its counter. What others log is
    therefore watched, and a reading never takes a number that they may still use. Where they give
    no `step=`, every reading is a row at once. Where they do, a reading joins the row that is open,
    and others take the numbers that the training leaves out; those for which there is none get rows
    of their own when the run is finished, or the program ends. Charts take the reading's step,
    `geomon/step`, as their axis.

    Args:
        run: Run of W&B, as `wandb.init()` returns it; None for the one that is active.
        alone: Whether nothing else is logged to the run: every reading is then a row at once.
        by_step: Whether others number their rows by training steps, or not at all: the number of a
            reading's step is then free as soon as that step has come.
        detail: "headline", "layers", or names of metrics whose means are headline values too.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(self, run: Any, *, alone: bool, by_step: bool = False, detail: Detail) -> None:
        self._charts = Charts(detail)
        self.named = self._charts.named
        self._run: Any = None
        # Whether others give numbers to their rows; None while they have logged nothing.
        self._numbered: bool | None = False if alone else None
        self._by_step = by_step
        self._waiting: deque[dict[str, Any]] = deque()  # rows that have not been logged yet
        self._joined: dict[str, Any] | None = None  # what of ours is in the row that is open
        self._begun = False  # whether others have begun the row that is open
        self._is_logging = False
        self._defined: set[str] = set()
        self._flushed_by_run = False
        self._unfollow: Callable[[], None] = lambda: None
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
        """Log the charted values of a reading."""
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
        """Log values of a reading.

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
        if getattr(self._run, "disabled", False):
            return
        row = {**values, _STEP: step}
        if self._waiting and _share_a_row(row, self._waiting[-1]):
            self._waiting[-1] |= row
        else:
            self._waiting.append(row)
        self._send()

    def close(self) -> None:
        """Log what is waiting, unless that is done when the run is finished.

        The run is finished by whoever started it.
        """
        if not self._flushed_by_run or not self._waiting:
            self._end()

    def _follow(self, run: Any) -> None:
        self._run = run
        if not getattr(run, "disabled", False):
            self._flushed_by_run = _call_at_finish(run, self._end)
            atexit.register(self._end)  # a run that is not finished ends with the program
            self._unfollow = _call_around_rows(run, self._before_row, self._after_row)
        run.define_metric(_STEP, hidden=True)
        self._configure()

    def _end(self) -> None:
        """Log what is waiting, and leave nothing on the run."""
        atexit.unregister(self._end)
        self._flush()
        self._unfollow()

    def _configure(self) -> None:
        if self._description is not None:
            self._run.config.update({"geomon": self._description}, allow_val_change=True)

    def _send(self) -> None:
        """Log what is waiting, as far as no row of the others is ended or overtaken by it."""
        newest = self._waiting[-1]
        if self._numbered is False and not self._begun:
            self._flush()
        elif self._joined is None or _share_a_row(newest, self._joined):
            self._joined = {**(self._joined or {}), **self._waiting.pop()}
            self._log(newest, commit=False)
        elif self._by_step and self._numbered is None and self._run.step < newest[_STEP]:
            self._joined = self._waiting.pop()
            self._log(newest, step=newest[_STEP])
        elif len(self._waiting) == _MANY_WAITING and self._numbered is None and not self._by_step:
            log.warning(
                "W&B: readings wait for the rows of the training, and nothing has been logged to "
                "the run so far; if nothing else is logged there, use WandB(run, alone=True)"
            )

    def _before_row(self, step: int | None) -> None:
        """Others are about to log: readings take the numbers between the last row and this one."""
        if self._is_logging or step is None:
            return
        self._numbered = True
        if self._waiting or self._joined:
            present = self._run.step
            if step > present:
                self._joined = None
            while self._waiting and present + 1 < step:
                present += 1
                self._log(self._waiting.popleft(), step=present)

    def _after_row(self, step: int | None, commit: bool | None) -> None:
        """Others have logged: where they count, readings follow."""
        if self._is_logging:
            return
        self._numbered = bool(self._numbered) or step is not None
        self._begun = step is not None if commit is None else not commit
        if not self._begun:
            self._joined = None
            if not self._numbered:
                self._flush()

    def _flush(self) -> None:
        """Give each waiting reading a row of its own."""
        if self._waiting and self._joined is not None:
            self._log({}, commit=True)  # ends the row that a reading has joined
            self._joined = None
        while self._waiting:
            self._log(self._waiting.popleft(), commit=True)

    def _log(self, row: dict[str, Any], **how: Any) -> None:
        self._is_logging = True
        try:
            self._run.log(row, **how)
        finally:
            self._is_logging = False


def _share_a_row(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are of one step and no value of one hides a value of the other."""
    return one[_STEP] == other[_STEP] and one.keys() & other.keys() == {_STEP}


def _call_around_rows(
    run: Any,
    before: Callable[[int | None], None],
    after: Callable[[int | None, bool | None], None],
) -> Callable[[], None]:
    """Have functions called before and after each row that is logged to a W&B run.

    There is no public way to learn whether a row was given a number. What the functions raise is a
    warning: the row is another's. Where W&B has no such function, nothing is called.

    Args:
        run: Run of W&B.
        before: Takes the number that the row was given.
        after: Takes this number, and whether the row was ended, as `run.log` takes them.

    Returns:
        Function that takes this away again.
    """
    original = getattr(run, "_log", None)
    if original is None:
        return lambda: None
    placed = True

    def attempt(function: Callable[..., None], *given: Any) -> None:
        try:
            if placed:
                function(*given)
        except Exception as error:
            log.warning("W&B: a reading was not logged: %s: %s", type(error).__name__, error)

    @functools.wraps(original)
    def watched(data: Any, step: int | None = None, commit: bool | None = None) -> None:
        attempt(before, step)
        original(data, step, commit)
        attempt(after, step, commit)

    inherited = "_log" not in vars(run)
    run._log = watched

    def take_away() -> None:
        nonlocal placed
        placed = False  # one that lies under another's goes with the run
        if vars(run).get("_log") is watched:
            if inherited:
                del run._log
            else:
                run._log = original

    return take_away


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
        value, margin = measured(reading, "twonn")
        if math.isfinite(value):
            self._curves.setdefault(reading.source, []).append((reading.step, value, margin))
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
        steps, values, margins = map(list, zip(*points, strict=True))
        phase = find_phase(steps, values, margins)
        has_peak = phase.earliest is not None
        return {
            "geomon/phase": phase.name,
            "geomon/peak_step": phase.peak_step if has_peak else None,
            "geomon/peak": phase.peak if has_peak else None,
            "geomon/final": values[-1],
        }


class WandBCharts(RunDrawer):
    """Sink that logs interactive charts of layers and heads to a W&B run.

    W&B has no heat map of its own; it draws charts of plotly, which are logged as such. `write`
    raises an ImportError where plotly is missing.

    Args:
        rows: Rows of the run.
    """

    def __init__(self, rows: WandBRows) -> None:
        super().__init__(first_cost=_FIRST_COST, metrics=rows.named)
        self._rows = rows

    def __str__(self) -> str:
        return "drawing charts for W&B"

    def _draw(self, readings: Readings, reading: Reading) -> Iterator[Part]:
        if self._rows.run is not None:
            yield partial(self._log_charts, readings, reading.step)

    def _log_charts(self, readings: Readings, step: int) -> None:
        import wandb

        from geomon.show.charts import charts_of

        charts = charts_of(readings, self._metrics)
        logged = {f"geomon_charts/{name}": wandb.Plotly(c) for name, c in charts.items()}
        self._rows.log(logged, step)


__all__ = ["WandB", "WandBCharts", "WandBRows", "WandBSummary"]
