"""The kinds of figures that a run can give, by name."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from geomon.record import Readings
from geomon.show.figures.maps import heads_over_training_figure, map_figure
from geomon.show.figures.norms import norms_figure
from geomon.show.figures.profiles import dimension_figure, drift_figure, profiles_figure
from geomon.show.figures.queries_keys import clouds_figure, cosines_figure, means_figure
from geomon.show.figures.run import geometry_figure, title_of
from geomon.show.figures.spectra import spectra_figure
from geomon.show.figures.stability import stability_figure
from geomon.show.panels import NotMeasuredError


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        about: What it shows, in words for a list.
        draw: Function that draws it, of the readings of a run, or of a sequence of runs where it
            `takes_runs`; also of a metric where it `takes_metric`.
        takes_metric: Whether it can be drawn of another metric than by default.
        of_heads: Whether that is a metric of single heads.
        takes_runs: Whether it lays several runs over one another.
    """

    about: str
    draw: Callable[..., Figure]
    takes_metric: bool = False
    of_heads: bool = False
    takes_runs: bool = False


def _run_figure(readings: Readings) -> Figure:
    return geometry_figure(readings, title=title_of(readings))


KINDS: dict[str, Kind] = {
    "run": Kind("the run in four panels", _run_figure),
    "dimension": Kind("intrinsic dimension: variants over training, scales", dimension_figure),
    "profiles": Kind("dimension and anisotropy over depth", profiles_figure, takes_metric=True),
    "map": Kind("metrics by layer and step", map_figure, takes_metric=True),
    "heads": Kind(
        "metrics by head and layer at three steps",
        heads_over_training_figure,
        takes_metric=True,
        of_heads=True,
    ),
    "cosines": Kind(
        "cosine of mean query and mean key of each head",
        cosines_figure,
        takes_metric=True,
        of_heads=True,
    ),
    "means": Kind("paths of mean queries and keys of two heads", means_figure),
    "clouds": Kind("single queries and keys of two heads", clouds_figure),
    "stability": Kind(
        "cosine of mean query and mean key of each layer, a line for each run",
        stability_figure,
        takes_runs=True,
    ),
    "drift": Kind("norm of the mean row against cosine across layers", drift_figure),
    "norms": Kind("norm against variance of token types, shares over depth", norms_figure),
    "spectra": Kind("eigenvalues by rank", spectra_figure),
}


def draw(kind: str, readings: Readings | Sequence[Readings], metric: str | None = None) -> Figure:
    """Draw a kind of figure.

    Args:
        kind: Name of the kind, in `KINDS`.
        readings: Readings of a run; of several runs for a kind that lays them over one another.
        metric: Name of the metric to draw; None for the kind's own.

    Raises:
        NotMeasuredError: The run cannot give it.
        ValueError: There is no such kind, it takes no metric, or it is of one run.
    """
    if kind not in KINDS:
        raise ValueError(f"no figure is called {kind!r}: there are {', '.join(KINDS)}")
    found = KINDS[kind]
    runs = [readings] if isinstance(readings, Readings) else list(readings)
    if not runs:
        raise ValueError(f"the figure {kind!r} needs a run: give one")
    if len(runs) > 1 and not found.takes_runs:
        able = ", ".join(name for name, one in KINDS.items() if one.takes_runs)
        raise ValueError(f"the figure {kind!r} is of one run: of several there is {able}")
    subject = runs if found.takes_runs else runs[0]
    if metric is None:
        return found.draw(subject)
    if not found.takes_metric:
        able = ", ".join(name for name, one in KINDS.items() if one.takes_metric)
        raise ValueError(f"the figure {kind!r} takes no metric: {able} do")
    try:
        return found.draw(subject, metric)
    except NotMeasuredError as error:
        known = _metrics(runs[0], of_heads=found.of_heads)
        close = difflib.get_close_matches(metric, known, n=3, cutoff=0.5)
        advice = f": did you mean {' or '.join(close)}?" if close else f"; {', '.join(known)} were"
        raise NotMeasuredError(f"{error}{advice if known else ''}") from error


def _metrics(readings: Readings, *, of_heads: bool) -> list[str]:
    """List the metrics that a run has of layers, or of single heads."""
    return list(
        dict.fromkeys(
            metric
            for reading in readings
            for metric, column in reading.columns.items()
            if (column.heads if of_heads else column.layers)
        )
    )
