"""Watches runs: shows their overviews and a chart, refreshed in place or printed once."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from geomon.advice import to_install
from geomon.analysis import Quantity, null_of, quantities_of, single_source
from geomon.record import Follower, Readings, printable, read
from geomon.show.collect import alerts_of, line_of
from geomon.show.colours import DASHES
from geomon.show.panels import Lines, thin
from geomon.show.settings import name_runs
from geomon.show.tables import write_text
from geomon.show.terminal import charts
from geomon.show.terminal.overview import duration, safe, view

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text
except ImportError as error:
    raise ImportError(f"the terminal view needs rich: {to_install('terminal')}") from error

# Least and largest height of a chart on the screen, and its height if printed, in lines.
_LEAST, _MOST, _PRINTED = 8, 24, 16


class Watched:
    """Run that is being watched; `look` reads its file, in any thread, and updates the attributes.

    Args:
        directory: Folder of the run, or the path of its file. Both may appear later.
        stack: Name of the stack to follow if the model has several; None for the main one.
        name: Name of the run on the screen.
        colour: Colour of the run.
        dash: Dash of its line in the chart.

    Attributes:
        follower: Reader of the record, which is in the folder, or the newest one below it.
        whole: All readings of the record, and its alerts.
        readings: One reading per step, from the source that the run used most.
        quantities: Quantities that can be drawn over steps, by tag.
        trouble: Why the file cannot be read; "" if it can.
    """

    def __init__(
        self, directory: Path, stack: str | None, name: str, colour: str, dash: str
    ) -> None:
        self.follower, self._stack = Follower(directory, searches=True), stack
        self.name, self.trouble = printable(name), ""
        self.colour, self.dash = colour, dash
        self.whole = self.readings = Readings([], [])
        self.quantities: dict[str, Quantity] = {}

    def look(self) -> None:
        """Read what was written since the last look."""
        try:
            is_new = self.follower.look()
            every = self.follower.readings()
            # Alerts are lines of their own, and a resumed run can have fewer readings.
            sizes, known = [(len(x), len(x.raised)) for x in (every, self.whole)]
            if any(sizes) and (is_new or self.trouble or sizes != known):
                self.whole = every.of_stack(self._stack) if every else every
                self.readings = Readings(self.whole.runs, single_source(self.whole))
                self.quantities, self.trouble = quantities_of(self.readings), ""
        except (OSError, ValueError) as error:
            self.trouble = " ".join(str(error).split())

    @property
    def state(self) -> str:
        """Why there is nothing to show yet."""
        path = self.follower.path
        return "no readings yet" if path.is_file() else f"waiting for {printable(str(path))}"

    def outlook(self) -> str:
        """Say whether the training lives, and when the next reading is expected."""
        writer = self.follower.writer()
        if not writer:
            return "not training" if writer is None else "its process was killed"
        if len(self.readings) < 2:
            return "training"
        # Gaps grow slowly, so the next one is about as long as the last one.
        before, last = self.readings[-2], self.readings[-1]
        step, left = 2 * last.step - before.step, 2 * last.time - before.time - time.time()
        when = f"in {duration(left)}" if left >= 0 else f"due {duration(-left)} ago"
        return f"training, next reading near step {step:,} {when}"


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
    looks = zip(cycle(charts.COLOURS), cycle(DASHES if console.no_color else ["solid"]))
    runs = [
        Watched(directory, stack, name, *look)
        for directory, name, look in zip(directories, name_runs(directories), looks, strict=False)
    ]
    if once or not can_draw or not console.encoding.startswith("utf"):
        _look(runs)
        for run in runs:
            read(run.follower.path).of_stack(stack)  # raises if the record is unusable
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
    overviews = list(_overviews(runs, is_brief=False))
    if lines is None:
        if _lines_left(overviews, console) < _LEAST:
            overviews = list(_overviews(runs, is_brief=True))
        lines = min(_lines_left(overviews, console), _MOST)
    yield from overviews
    quantity = _choose(runs, metric, layer)
    if quantity is not None and lines >= _LEAST and console.encoding.startswith("utf"):
        panel = _over_steps(runs, quantity, layer)
        yield charts.title_of(panel)
        if panel.lines:
            yield Text.from_ansi(charts.build(panel, console.width - 1, lines))


def _lines_left(overviews: Sequence[RenderableType], console: Console) -> int:
    """Count the lines that overviews leave for a chart, without its title."""
    return console.height - len(console.render_lines(Group(*overviews))) - 2


def _overviews(runs: Sequence[Watched], *, is_brief: bool) -> Iterator[RenderableType]:
    for run in runs:
        if len(runs) > 1:
            yield safe(f"{charts.mark_of(run.dash)} {run.name}", f"bold {run.colour}")
        elif run.follower.path.parent.name != run.name:  # found below the folder
            yield safe(str(run.follower.path.parent), "dim")
        if run.whole or run.whole.raised:
            yield view(run.whole, state=run.outlook(), is_brief=is_brief)
        else:
            yield safe(run.state)
        if run.trouble:
            yield safe(run.trouble, "red")


def _choose(runs: Sequence[Watched], metric: str | None, layer: int | None) -> Quantity | None:
    """Choose the quantity of the chart; return None before anything was measured."""
    tags = _drawable(runs)
    if not tags:
        return None
    if metric is not None and metric not in tags:
        raise ValueError(f"no run has '{metric}': there are {', '.join(filter(None, tags))}")
    found = next(iter(tags.values())) if metric is None else tags[metric]
    columns = (x.column(found.metric, found.part) for run in runs for x in run.readings)
    layers = {layer for column in columns for layer in column.depths() if found.is_mean}
    if layer is not None and layer not in layers:
        there = f"there are {min(layers)} to {max(layers)}" if layers else "it is not of layers"
        raise ValueError(f"no layer {layer} of {found.label}: {there}")
    return found


def _drawable(runs: Sequence[Watched]) -> dict[str, Quantity]:
    """List the quantities of all runs by metric and part."""
    tags: dict[str, Quantity] = {}
    for run in runs:
        for one in run.quantities.values():
            # A mean over layers comes before other values of a metric.
            tags.setdefault("/".join(filter(None, (one.metric, one.part))), one)
    return tags


def _over_steps(runs: Sequence[Watched], quantity: Quantity, layer: int | None) -> Lines:
    """Build the panel of a quantity over steps with a line for each run."""
    curves = [(run, quantity.curve(run.readings, layer)) for run in runs]
    lines = [
        line_of(thin(curve), run.name if len(runs) > 1 else "", run.colour, dash=run.dash)
        for run, curve in curves
        if curve
    ]
    label = quantity.label + ("" if layer is None else f", layer {layer}")
    if len(runs) > 1 or not lines:
        return Lines(label, lines)
    ((run, curve),) = curves
    null = null_of(run.readings, quantity.metric) if quantity.has_null else None
    label = f"{label}  {curve.points[-1].words()}"
    return Lines(label, lines, null=null, alerts=alerts_of(run.whole))
