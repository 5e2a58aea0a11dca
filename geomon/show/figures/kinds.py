"""Lists the kinds of figures that can be drawn for every run, by name."""

import difflib
from collections.abc import Callable

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures.layers import (
    cosines_figure,
    dimension_figure,
    heads_figure,
    map_figure,
    profiles_figure,
)
from geomon.show.figures.run import geometry_figure, title_of
from geomon.show.panels import NotMeasuredError

# Functions that draw the readings of a run, by the name of the figure.
KINDS: dict[str, Callable[..., Figure]] = {
    "run": lambda readings: geometry_figure(readings, title=title_of(readings)),
    "dimension": dimension_figure,
    "profiles": profiles_figure,
    "map": map_figure,
    "heads": heads_figure,
    "cosines": cosines_figure,
}
# Figures of any metric with such values: their functions also take the name of a metric.
TAKES_METRIC = {"profiles": "layers", "map": "layers", "heads": "heads", "cosines": "heads"}


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
    if metric is None:
        return KINDS[kind](readings)
    if kind not in TAKES_METRIC:
        raise ValueError(f"the figure {kind!r} takes no metric: {', '.join(TAKES_METRIC)} do")
    try:
        return KINDS[kind](readings, metric)
    except NotMeasuredError as error:
        known = list(
            dict.fromkeys(
                name
                for reading in readings
                for name, column in reading.columns.items()
                if name != metric and getattr(column, TAKES_METRIC[kind])
            )
        )
        close = difflib.get_close_matches(metric, known, cutoff=0.5)
        advice = f": did you mean {' or '.join(close)}?" if close else f"; {', '.join(known)} were"
        raise NotMeasuredError(f"{error}{advice if known else ''}") from error
