"""Lists the kinds of figures that can be drawn for every run, by name."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures.cosines import cosines_figure
from geomon.show.figures.layers import (
    dimension_figure,
    heads_figure,
    map_figure,
    profiles_figure,
)
from geomon.show.figures.run import geometry_figure, title_of
from geomon.show.panels import NotMeasuredError


@dataclass(frozen=True)
class Kind:
    """Kind of figure.

    Attributes:
        draw: Function that draws the readings of a run. If `takes_metric` is not empty, it also
            takes the name of a metric.
        takes_metric: "layers" or "heads" if the kind draws any metric with such values; "" if the
            kind takes no metric. Defaults to "".
    """

    draw: Callable[..., Figure]
    takes_metric: str = ""


def _run_figure(readings: Readings) -> Figure:
    return geometry_figure(readings, title=title_of(readings))


KINDS: dict[str, Kind] = {
    "run": Kind(_run_figure),
    "dimension": Kind(dimension_figure),
    "profiles": Kind(profiles_figure, takes_metric="layers"),
    "map": Kind(map_figure, takes_metric="layers"),
    "heads": Kind(heads_figure, takes_metric="heads"),
    "cosines": Kind(cosines_figure, takes_metric="heads"),
}


def draw(kind: str, readings: Readings, metric: str | None = None) -> Figure:
    """Draw one kind of figure for a run.

    Args:
        kind: Name of the kind, a key of `KINDS`.
        readings: Readings of the run.
        metric: Name of the metric to draw. Defaults to None, which uses the metrics of that kind.

    Raises:
        NotMeasuredError: If the run lacks values for the figure.
        ValueError: If there is no such kind, or if it takes no metric.
    """
    if kind not in KINDS:
        raise ValueError(f"no figure is called {kind!r}: there are {', '.join(KINDS)}")
    found = KINDS[kind]
    if metric is None:
        return found.draw(readings)
    if not found.takes_metric:
        able = ", ".join(name for name, one in KINDS.items() if one.takes_metric)
        raise ValueError(f"the figure {kind!r} takes no metric: {able} do")
    try:
        return found.draw(readings, metric)
    except NotMeasuredError as error:
        known = [name for name in _metrics(readings, found.takes_metric) if name != metric]
        close = difflib.get_close_matches(metric, known, cutoff=0.5)
        advice = f": did you mean {' or '.join(close)}?" if close else f"; {', '.join(known)} were"
        raise NotMeasuredError(f"{error}{advice if known else ''}") from error


def _metrics(readings: Readings, has: str) -> dict[str, None]:
    """List the metrics that have values per layer or per head: `has` is "layers" or "heads"."""
    columns = [item for reading in readings for item in reading.columns.items()]
    return dict.fromkeys(metric for metric, column in columns if getattr(column, has))
