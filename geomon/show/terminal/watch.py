"""Watches runs: shows their overviews and a chart, refreshed in place or printed once."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from geomon.advice import to_install
from geomon.analysis import null_of
from geomon.analysis.numbers import with_margin
from geomon.analysis.quantities import Quantity
from geomon.record import read
from geomon.show.collect import alerts_of, line_of
from geomon.show.colours import DASHES
from geomon.show.loading import name_runs
from geomon.show.panels import Lines, thin
from geomon.show.tables import write_text
from geomon.show.terminal import charts
from geomon.show.terminal.overview import safe, view
from geomon.show.terminal.runs import Watched

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text
except ImportError as error:
    raise ImportError(f"the terminal view needs rich: {to_install('terminal')}") from error

# Least and largest height of a chart on the screen, and its height if printed, in lines.
_LEAST, _MOST, _PRINTED = 8, 24, 16


def watch(
    directories: Sequence[Path],
    stack: str | None = None,
    *,
    metric: str | None = None,
    layer: int | None = None,
    once: bool = False,
    poll: float = 0.5,
) -> None:
    """Show runs while they are recorded, until Ctrl-C, or print their current state.

    The state is printed once if `once` is set or if the output is not a terminal that can draw. On
    a terminal, `watch` waits for folders that do not exist yet.

    Args:
        directories: Folders of the runs.
        stack: Name of a stack, for models with several. Defaults to None, the main one.
        metric: Metric of the chart, or a tag such as "twonn/censored". Defaults to None, the first
            metric.
        layer: Layer of the chart. Defaults to None, the mean over layers.
        once: Whether to print the current state and return. Defaults to False.
        poll: Seconds between two looks at the files. Defaults to 0.5.

    Raises:
        FileNotFoundError: If the state is to be printed and a folder holds no record.
        ValueError: If a file is not a record, if a model has no such stack, or if a run has no such
            metric or layer.
    """
    console = Console()
    can_draw = console.is_terminal and not console.is_dumb_terminal
    names = name_runs(directories)
    runs = [Watched(*one) for one in zip(directories, [stack] * len(names), names, strict=True)]
    if once or not can_draw or not console.encoding.startswith("utf"):
        _look(runs)
        for run in runs:
            read(run.path).of_stack(stack)  # raises if the record is unusable
        with console.capture() as captured:
            for part in _screen(runs, metric, layer, console, _PRINTED):
                console.print(part)
        write_text("\n".join(line.rstrip() for line in captured.get().splitlines()))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            _look(runs)
            live.update(Group(*_screen(runs, metric, layer, console)), refresh=True)
            time.sleep(poll)


def _look(runs: Sequence[Watched]) -> None:
    """Look at all files, and raise an error if one is not a record."""
    for run in runs:
        run.look()
        if run.trouble and not run.whole:
            raise ValueError(run.trouble)


def _screen(
    runs: Sequence[Watched], metric: str | None, layer: int | None, console: Console,
    lines: int | None = None,
) -> Iterator[RenderableType]:  # fmt: skip
    """Yield the overview of each run, and below them a chart of one quantity for all runs."""
    overviews = list(_overviews(runs, console, is_brief=False))
    if lines is None:
        if _lines_left(overviews, console) < _LEAST:
            overviews = list(_overviews(runs, console, is_brief=True))
        lines = min(_lines_left(overviews, console), _MOST)
    yield from overviews
    quantity = _choose(runs, metric, layer)
    if quantity is not None and lines >= _LEAST and console.encoding.startswith("utf"):
        panel = _over_steps(runs, quantity, layer, console)
        yield charts.title_of(panel)
        if drawn := charts.build(panel, console.width - 1, lines):
            yield Text.from_ansi(drawn)


def _lines_left(overviews: Sequence[RenderableType], console: Console) -> int:
    """Count the lines that overviews leave for a chart, beside its title."""
    return console.height - len(console.render_lines(Group(*overviews))) - 2


def _overviews(
    runs: Sequence[Watched], console: Console, *, is_brief: bool
) -> Iterator[RenderableType]:
    for index, run in enumerate(runs):
        colour, dash = _look_of(index, console)
        if len(runs) > 1:
            yield safe(f"{charts.mark_of(dash)} {run.name}", f"bold {colour}")
        elif run.path.parent.name != run.name:  # found below the folder
            yield safe(str(run.path.parent), "dim")
        is_there = run.whole or run.whole.raised
        state = run.outlook()
        yield view(run.whole, state=state, is_brief=is_brief) if is_there else safe(run.state)
        if run.trouble:
            yield safe(run.trouble, "red")


def _choose(runs: Sequence[Watched], metric: str | None, layer: int | None) -> Quantity | None:
    """Choose the quantity of the chart; return None before anything was measured."""
    known = {key: each for run in runs for key, each in run.quantities.items()}
    if not known:
        return None
    if metric is None:
        found = next(iter(known.values()))
    else:
        tags: dict[str, Quantity] = {}
        for one in known.values():  # a mean over layers comes before other values of a metric
            tags.setdefault("/".join(filter(None, (one.metric, one.part))), one)
        if metric not in tags:
            raise ValueError(f"no run has '{metric}': there are {', '.join(filter(None, tags))}")
        found = tags[metric]
    layers = {n for run in runs for n in run.layers_of(found)}
    if layer is not None and layer not in layers:
        there = f"there are {min(layers)} to {max(layers)}" if layers else "it is not of layers"
        raise ValueError(f"no layer {layer} of {found.label}: {there}")
    return found


def _look_of(index: int, console: Console) -> tuple[str, str]:
    """Return the colour and the dash of a run; dashes vary only if colours are off."""
    dash = DASHES[index % len(DASHES)] if console.no_color else "solid"
    return charts.COLOURS[index % len(charts.COLOURS)], dash


def _over_steps(
    runs: Sequence[Watched], quantity: Quantity, layer: int | None, console: Console
) -> Lines:
    """Build the panel of a quantity over steps with a line for each run."""
    lines = []
    for index, run in enumerate(runs):
        colour, dash = _look_of(index, console)
        curve = quantity.curve(run.readings, layer)
        if curve:
            name = run.name if len(runs) > 1 else ""
            lines.append(line_of(thin(curve), name, colour, dash=dash))
    label = quantity.label + ("" if layer is None else f", layer {layer}")
    if len(runs) > 1 or not lines:
        return Lines(label, lines)
    (run,) = runs
    curve = quantity.curve(run.readings, layer)
    label = f"{label}  {with_margin(curve.values[-1], curve.margins[-1])}"
    null = null_of(run.readings, quantity.metric) if quantity.has_null else None
    return Lines(label, lines, null=null, alerts=alerts_of(run.whole))
