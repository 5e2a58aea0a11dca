"""`geomon watch` as an application: runs that are recorded, as charts that keys change."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text

from geomon.analysis import Curve
from geomon.record import Reading, tags
from geomon.show.terminal import charts
from geomon.show.terminal.charts import Line
from geomon.show.terminal.history import Look, Watched
from geomon.show.terminal.overview import ago, percent
from geomon.show.terminal.quantities import Quantity, loss_of
from geomon.show.terminal.scales import with_margin

try:
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import Grid, Vertical, VerticalScroll
    from textual.events import Resize
    from textual.screen import ModalScreen
    from textual.widgets import Static
    from textual_plotext import PlotextPlot
except ImportError as error:
    raise ImportError(
        "the application needs textual and textual-plotext: pip install 'geomon[terminal]'"
    ) from error

# Smallest terminal that shows all charts at once.
_ALL_COLUMNS, _ALL_ROWS = 72, 20
# Most runs that have a line of their own at the top.
_MOST_NAMED = 6
_START = (150, 150, 150)
_PHASES = {"expanding": "#00b282", "peak": "#f0e442", "compressing": "#56b4e9"}
_DIMENSION = Quantity("twonn", has_layers=True, has_mean=True)

_HELP = """\
m  M          next or previous metric
l  L          next or previous layer, or the mean over all layers
h             next metric of the attention heads
x             steps on a logarithmic or a linear axis
left  right   an earlier or a later reading, for the layers and the heads
end           the newest reading again
r             next run, for the layers, the heads and the notes
tab           one chart alone, the next one, and all again
n             all alerts and notes
q  Ctrl-C     leave; the training goes on

Curves     One line for each run. The shaded band is the 95 % interval: another
           sample of the text would move the curve within it. A change inside
           the band is noise. No band: the interval was not measured.
Layers     The same metric over depth, from the input of the first block (0) to
           the output of the last, at the start, at the peak and now.
Heads      One field for each attention head and layer. The colours mean the
           same during the whole run.
Phase      The intrinsic dimension is the number of directions in which the
           hidden states of a layer vary. Often it expands at first, has a
           peak, and is then compressing. Steady: no change above its errors.

What each metric means: docs/metrics.md. What alerts mean: docs/alerts.md.
"""


class Chart(PlotextPlot):
    """A chart that is drawn again at the size that it has.

    Args:
        draw: Function that draws into a plot of plotext, given its columns and rows.
    """

    def __init__(self, draw: Callable[[Any, tuple[int, int]], None]) -> None:
        super().__init__()
        self._draw = draw

    def render(self) -> Any:
        """Draw the chart."""
        width, height = self.size.width, self.size.height
        if width < 8 or height < 3:
            return ""
        self._draw(self.plt, (width, height))
        return super().render()


class Fields(Static):
    """The heads by layers.

    Args:
        draw: Function that gives the text, given its columns and rows.
    """

    def __init__(self, draw: Callable[[tuple[int, int]], Text]) -> None:
        super().__init__()
        self._draw = draw

    def render(self) -> Any:
        """Draw the fields."""
        return self._draw((self.size.width, self.size.height))


class Panel(Vertical):
    """A chart below a line that says what it shows.

    Args:
        name: Name of the panel, its id.
        body: Widget of the chart.
    """

    def __init__(self, name: str, body: Chart | Fields) -> None:
        self.head = Static(classes="head")
        self.body = body
        super().__init__(self.head, body, id=name)

    def show(self, title: Text) -> None:
        """Draw the panel again, below another title."""
        self.head.update(title)
        self.body.refresh()


class Page(ModalScreen[None]):
    """A page of text over the charts, which any of its keys closes.

    Args:
        text: The text.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, "app.pop_screen", "close") for key in ("escape", "q", "enter", "question_mark")
    ]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Make the page."""
        with VerticalScroll():
            yield Static(self._text)
            yield Static(Text("\nesc: back to the charts", style="dim"))


class WatchApp(App[str]):
    """Shows runs while they are recorded.

    Args:
        runs: The runs.
        poll: Seconds between two looks at the files; None to look only when `look` is called.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "geomon watch"
    CSS = """
    Screen { layout: vertical; }
    #runs { height: auto; padding: 0 1; }
    Grid {
        grid-size: 2; grid-columns: 3fr 2fr; grid-rows: 3fr 2fr; grid-gutter: 0 1; height: 1fr;
    }
    Panel { height: 1fr; width: 1fr; }
    .head {
        height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
    }
    Fields { height: 1fr; width: 1fr; background: $surface; }
    #events { height: auto; padding: 0 1; }
    #keys { height: 1; background: $panel; padding: 0 1; }
    Page { align: center middle; }
    Page VerticalScroll {
        width: 84; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("m", "metric(1)", "metric"),
        Binding("M", "metric(-1)", "metric back"),
        Binding("l", "layer(1)", "layer"),
        Binding("L", "layer(-1)", "layer back"),
        Binding("h", "heads", "heads"),
        Binding("x", "scale", "log/linear"),
        Binding("left", "reading(-1)", "earlier"),
        Binding("right", "reading(1)", "later"),
        Binding("end", "newest", "newest"),
        Binding("r", "run", "run"),
        Binding("tab", "panel", "one chart", priority=True),
        Binding("n", "notes", "notes"),
        Binding("question_mark", "help", "help"),
    ]

    def __init__(self, runs: Sequence[Watched], *, poll: float | None = 0.5) -> None:
        super().__init__()
        self.runs = list(runs)
        self._poll = poll
        self._ends = threading.Event()
        self._run = 0  # whose layers, heads and notes are shown
        self._metric: Quantity | None = None
        self._layer: int | None = None
        self._heads: str | None = None
        self._logarithmic = True
        self._at: int | None = None  # step of the reading that is shown; None for the newest
        self._alone = ""  # name of the panel that is shown alone

    # -- what is shown ---------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Make the screen."""
        yield Static(id="runs")
        with Grid():
            yield Panel("curves", Chart(self._draw_curves))
            yield Panel("layers", Chart(self._draw_layers))
            yield Panel("loss", Chart(self._draw_loss))
            yield Panel("heads", Fields(self._draw_heads))
        yield Static(id="events")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Begin to look at the files."""
        self.show()
        if self._poll is not None:
            self.set_interval(1, self._show_runs)  # it says how old the last reading is
            threading.Thread(target=self._follow, args=(self._poll,), daemon=True).start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._ends.set()

    def on_resize(self, event: Resize) -> None:
        """Lay out the screen for another size."""
        self.call_after_refresh(self.show)

    def _follow(self, poll: float) -> None:
        """Look at all files until the application ends; in a thread, for a record can be large."""
        while not self._ends.is_set():
            for run in self.runs:
                look = run.look()
                if look is not None and not self._ends.is_set():
                    self.call_from_thread(self._take, run, look)
            self._ends.wait(poll)

    def look(self) -> None:
        """Look at all files once, and show what is new."""
        for run in self.runs:
            if (look := run.look()) is not None:
                self._take(run, look)

    def _take(self, run: Watched, look: Look) -> None:
        if look.trouble and not run.latest.readings:
            self.exit(look.trouble, return_code=2)
            return
        run.take(look)
        self.show()

    @property
    def shown_run(self) -> Watched:
        """The run whose layers, heads and notes are shown."""
        return self.runs[self._run]

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities that any of the runs has."""
        return list(dict.fromkeys(q for run in self.runs for q in run.contents.quantities))

    @property
    def metric(self) -> Quantity | None:
        """The quantity that is shown; None without any."""
        known = self.quantities
        return self._metric if self._metric in known else next(iter(known), None)

    def show(self) -> None:
        """Show everything again."""
        if not self.is_running or not self.query("#runs"):
            return
        self._lay_out()
        self._show_runs()
        self.query_one("#curves", Panel).show(self._title_of_curves())
        self.query_one("#layers", Panel).show(self._title_of_layers())
        self.query_one("#loss", Panel).show(self._title_of_loss())
        self.query_one("#heads", Panel).show(self._title_of_heads())
        self.query_one("#events", Static).update(self._events())
        self.query_one("#keys", Static).update(self._keys())

    def _panels(self) -> list[str]:
        """Name the panels that have something to show."""
        has_loss = loss_of(self.quantities) is not None
        has_heads = any(run.contents.with_heads for run in self.runs)
        return ["curves", "layers", *["loss"] * has_loss, *["heads"] * has_heads]

    def _lay_out(self) -> None:
        panels = self._panels()
        small = self.size.width < _ALL_COLUMNS or self.size.height < _ALL_ROWS
        alone = self._alone if self._alone in panels else "curves" if small else ""
        shown = [alone] if alone else panels
        for name in ("curves", "layers", "loss", "heads"):
            panel = self.query_one(f"#{name}", Panel)
            panel.display = name in shown
            panel.styles.column_span = 2 if len(shown) == 3 and name == shown[-1] else 1
        grid = self.query_one(Grid)
        grid.styles.grid_size_columns = 1 if alone else 2
        grid.styles.grid_columns = "1fr" if alone else "3fr 2fr"
        grid.styles.grid_rows = "1fr" if len(shown) < 3 else "3fr 2fr"

    # -- lines of text ---------------------------------------------------------------------------

    def _show_runs(self) -> None:
        width = max(self.size.width - 2, 10)
        several = len(self.runs) > 1
        lines: list[Text] = []
        for index, run in enumerate(self.runs[:_MOST_NAMED]):
            lines += self._line_of_run(index, run) if several else self._lines_of_run(run, width)
        if len(self.runs) > _MOST_NAMED:
            lines.append(Text(f"and {len(self.runs) - _MOST_NAMED} more", style="dim"))
        lines += [
            Text(f"{run.name}: {words}" if several else words, style="red")
            for run in self.runs
            for words in (*run.latest.remarks, *filter(None, [run.latest.trouble]))
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        self.query_one("#runs", Static).update(Text("\n").join(lines))

    def _lines_of_run(self, run: Watched, width: int) -> list[Text]:
        """Describe the only run in two lines."""
        last = run.selected[-1] if run.selected else None
        first = Text(run.name, style="bold")
        if last is None:
            return [first, Text(_without_readings(run), style="dim")]
        parts = [f"step {last.step:,}", ago(time.time() - last.time)]
        overhead = last.values.get(tags.OVERHEAD)
        more = [f"{last.source}, {last.mode} mode"]
        if overhead is not None and overhead == overhead:
            more.append(f"geomon's share of the time {percent(overhead)}")
        for part in (*parts, *more):
            if part in parts or first.cell_len + len(part) + 3 <= width:
                first.append(f" · {part}", style="not bold dim" if part in more else "not bold")
        return [first, self._words(run, Text())]

    def _line_of_run(self, index: int, run: Watched) -> list[Text]:
        """Describe one of several runs in a line, which is the legend too."""
        colour, marker = self._look_of(index)
        mark = _mark(marker) * 2
        text = Text("▸" if index == self._run else " ").append(f"{mark} ", style=_style(colour))
        text.append(f"{run.name}  ", style="bold")
        if not run.selected:
            return [text.append(_without_readings(run), style="dim")]
        last = run.selected[-1]
        text.append(f"step {last.step:,} · {ago(time.time() - last.time)}  ", style="dim")
        return [self._words(run, text, name="dimension")]

    def _words(self, run: Watched, text: Text, name: str = "intrinsic dimension") -> Text:
        """Append the intrinsic dimension of a run and its phase, in words."""
        dimension = run.curve(_DIMENSION)
        if not len(dimension):
            return text.append(f"{name}: not measured", style="dim")
        phase = run.phase(_DIMENSION)
        text.append(f"{name} {_last(dimension)}", style="bold")
        colour = _PHASES.get(phase.name, "") if len(self.runs) == 1 else ""
        return text.append(f", {phase.words()}", style=colour)

    def _events(self) -> Text:
        """List what the shown run has of alerts and notes, the newest first."""
        rows = max(1, min(8, (self.size.height - 16) // 4))
        alerts, notes = self.shown_run.alerts, self.shown_run.notes()
        lines = [
            Text(f"alert at step {step:,}: {' '.join(words.split())}", style="red")
            for step, words in reversed(alerts)
        ] + [Text(f"note: {note}", style="dim") for note in notes]
        if len(lines) > rows:
            rest = len(lines) - rows + 1
            lines = [*lines[: rows - 1], lines[rows - 1]]
            lines[-1] = Text(f"[n: {rest - 1} more] ", style="dim").append_text(lines[-1])
        for line in lines:
            line.truncate(max(self.size.width - 2, 10), overflow="ellipsis")
        return Text("\n").join(lines) if lines else Text("no alerts, no notes", style="dim")

    def _keys(self) -> Text:
        """List as many keys as there is room for; how to leave and where help is come first."""
        small = self.size.width < _ALL_COLUMNS or self.size.height < _ALL_ROWS
        hints = [
            ("q", "quit"), ("?", "help"), ("m", "metric"), ("l", "layer"), 
            ("tab", "next chart" if self._alone or small else "one chart"),
            ("x", "linear steps" if self._logarithmic else "log steps"), ("h", "heads"),
            ("←→", "reading"), ("n", "notes"),
        ]  # fmt: skip
        if len(self.runs) > 1:
            hints.insert(4, ("r", "run"))
        text = Text()
        for key, words in hints:
            if text.cell_len + len(key) + len(words) + 3 <= self.size.width - 2:
                text.append(f"{key} ", style="bold").append(f"{words}  ")
        return text

    def _title_of_curves(self) -> Text:
        metric = self.metric
        if metric is None:
            return Text("no values yet", style="bold")
        title = metric.title(self._layer)
        curve = self.shown_run.curve(metric, self._layer)
        value = f"  {_last(curve)}" if len(curve) and not self.runs[1:] else ""
        axis = "  logarithmic steps" if self._logarithmic else "  linear steps"
        room = self.query_one("#curves").size.width - 2
        if len(title) + len(value) > room:
            title = title.removesuffix(", mean over layers")
        text = Text(title, style="bold").append(value, style="not bold")
        return (
            text.append(axis, style="not bold dim") if text.cell_len + len(axis) <= room else text
        )

    def _title_of_layers(self) -> Text:
        text = Text("by layer", style="bold")
        for words, _, colour, marker in self._profiles():
            text.append(f"  {_mark(marker)} {words}", style=_style(colour) + " not bold")
        return text

    def _title_of_loss(self) -> Text:
        loss = loss_of(self.quantities)
        if loss is None:
            return Text("")
        curve = self.shown_run.curve(loss)
        value = f"  {curve.values[-1]:.4g}" if len(curve) and not self.runs[1:] else ""
        return Text(loss.title(), style="bold").append(value, style="not bold")

    def _title_of_heads(self) -> Text:
        name, reading = self._metric_of_heads(), self._reading()
        if name is None or reading is None:
            return Text("heads", style="bold")
        title = Quantity(name, has_layers=False).title().removesuffix(", size, mean over heads")
        text = Text(f"heads: {title}", style="bold")
        if self._at is not None or len(self.runs) > 1:
            text.append(f"  step {reading.step:,}", style="not bold dim")
        return text

    # -- charts ----------------------------------------------------------------------------------

    def _look_of(self, index: int) -> tuple[charts.Colour, str]:
        """Return the colour and the marker of a run."""
        marker = charts.MARKERS[index % len(charts.MARKERS)] if self.no_color else "braille"
        return charts.RUNS[index % len(charts.RUNS)], marker

    def _draw_curves(self, plot: Any, size: tuple[int, int]) -> None:
        metric = self.metric
        if metric is not None:
            self._draw_over_steps(plot, size, metric, self._layer)

    def _draw_loss(self, plot: Any, size: tuple[int, int]) -> None:
        loss = loss_of(self.quantities)
        if loss is not None:
            self._draw_over_steps(plot, size, loss, None)

    def _draw_over_steps(
        self, plot: Any, size: tuple[int, int], quantity: Quantity, layer: int | None
    ) -> None:
        lines = [
            charts.line_of(
                run.curve(quantity, layer), *self._look_of(index), logarithmic=self._logarithmic
            )
            for index, run in enumerate(self.runs)
        ]
        ends = [run.selected[end].step for run in self.runs if run.selected for end in (0, -1)]
        if ends:
            steps = min(ends), max(ends)
            log = self._logarithmic
            peak = self._peak() if quantity.tag(layer) == _DIMENSION.tag() else None
            charts.draw_over_steps(
                plot, lines, size, steps=steps, logarithmic=log, cursor=self._at,
                peak=peak and (peak.step, peak.values[_DIMENSION.tag()]),
            )  # fmt: skip

    def _profiles(self) -> list[tuple[str, Reading, charts.Colour, str]]:
        """Choose the profiles over depth: name, reading, colour and marker of each."""
        if len(self.runs) > 1:
            return [
                (run.name, reading, *self._look_of(index))
                for index, run in enumerate(self.runs)
                if (reading := run.at(self._at)) is not None
            ]
        run, now = self.shown_run, self._reading()
        if now is None:
            return []
        found = [("start", run.selected[0], _START, self._marker(2))]
        peak = self._peak()
        if peak is not None:
            found.append((f"peak {peak.step:,}", peak, charts.PEAK, self._marker(1)))
        name = "now" if self._at is None else f"step {now.step:,}"
        found = [line for line in found if line[1].step != now.step]
        return [*found, (name, now, *self._look_of(0))]

    def _peak(self) -> Reading | None:
        """Return the reading at the peak of the only run; None where it has none, or of several."""
        run = self.shown_run
        if len(self.runs) > 1 or not len(run.curve(_DIMENSION)):
            return None
        phase = run.phase(_DIMENSION)
        return run.at(phase.peak_step) if phase.earliest is not None else None

    def _marker(self, index: int) -> str:
        return charts.MARKERS[index] if self.no_color else "braille"

    def _draw_layers(self, plot: Any, size: tuple[int, int]) -> None:
        metric = self.metric
        layers = sorted(
            {layer for run in self.runs for layer in run.contents.layers.get(metric, [])}
            if metric is not None
            else ()
        )
        if metric is None or not layers:
            plot.clear_figure()
            return
        lines = []
        for _, reading, colour, marker in self._profiles():
            curves = [(layer, metric.curve([reading], layer)) for layer in layers]
            known = [(layer, curve) for layer, curve in curves if len(curve)]
            values = [curve.values[0] for _, curve in known]
            margins = [curve.margins[0] for _, curve in known]
            lines.append(
                Line([float(layer) for layer, _ in known], values, margins, colour, marker)
            )
        charts.draw_profile(plot, lines, size, layers=layers)

    def _draw_heads(self, size: tuple[int, int]) -> Text:
        name, reading = self._metric_of_heads(), self._reading()
        if name is None or reading is None or size[0] < 8 or size[1] < 3:
            return Text("")
        layers, heads = charts.head_rows(reading, name)
        known = [value for row in heads for value in row if value == value]
        if not known:
            return Text(f"{name}: not measured at step {reading.step:,}", style="dim")
        lowest = self.shown_run.curve(Quantity(name, "min", has_mean=True)).values
        highest = self.shown_run.curve(Quantity(name, "max", has_mean=True)).values
        scale = charts.scale_of(name, min([*lowest, *known]), max([*highest, *known]))
        return charts.draw_heads(layers, heads, scale, size, coloured=not self.no_color)

    def _metric_of_heads(self) -> str | None:
        """Name the metric of heads that is shown: the chosen, else that of the curves."""
        known = self.shown_run.contents.with_heads
        chosen = self._heads or (self.metric.metric if self.metric is not None else "")
        return chosen if chosen in known else next(iter(known), None)

    def _reading(self) -> Reading | None:
        """Return the reading whose layers and heads are shown."""
        run = self.shown_run
        return run.at(self._at) or (run.selected[0] if run.selected else None)

    # -- keys ------------------------------------------------------------------------------------

    def action_metric(self, by: int) -> None:
        """Show another metric."""
        known = self.quantities
        if known and self.metric is not None:
            self._metric = known[(known.index(self.metric) + by) % len(known)]
            self._heads = None
            if self._layer not in self._layers():
                self._layer = None
        self.show()

    def _layers(self) -> list[int]:
        metric = self.metric
        found = {
            layer
            for run in self.runs
            if metric is not None
            for layer in run.contents.layers.get(metric, [])
        }
        return sorted(found)

    def action_layer(self, by: int) -> None:
        """Show the curve of another layer, or of the mean."""
        places = [None, *self._layers()]
        now = places.index(self._layer) if self._layer in places else 0
        self._layer = places[(now + by) % len(places)]
        self.show()

    def action_heads(self) -> None:
        """Show another metric of the heads."""
        known, name = self.shown_run.contents.with_heads, self._metric_of_heads()
        if name is not None:
            self._heads = known[(known.index(name) + 1) % len(known)]
        self.show()

    def action_scale(self) -> None:
        """Change between a logarithmic and a linear axis of steps."""
        self._logarithmic = not self._logarithmic
        self.show()

    def action_reading(self, by: int) -> None:
        """Show the layers and heads of an earlier or a later reading."""
        steps = [reading.step for reading in self.shown_run.selected]
        reading = self._reading()
        if reading is not None:
            index = max(0, steps.index(reading.step) + by)
            self._at = steps[index] if index < len(steps) - 1 else None
        self.show()

    def action_newest(self) -> None:
        """Show the newest reading."""
        self._at = None
        self.show()

    def action_run(self) -> None:
        """Show the layers, heads and notes of another run."""
        self._run = (self._run + 1) % len(self.runs)
        self.show()

    def action_panel(self) -> None:
        """Show one chart alone, then the next, then all."""
        small = self.size.width < _ALL_COLUMNS or self.size.height < _ALL_ROWS
        places = [*([] if small else [""]), *self._panels()]
        now = places.index(self._alone) if self._alone in places else 0
        self._alone = places[(now + 1) % len(places)]
        self.show()

    def action_notes(self) -> None:
        """Show all alerts and notes of the shown run."""
        run = self.shown_run
        text = Text(f"{run.name}\n", style="bold")
        for step, words in reversed(run.alerts):
            text.append(
                f"\nalert at step {step:,}: {' '.join(words.split())}\n", style="not bold red"
            )
        for note in run.notes():
            text.append(f"\n{note}\n", style="not bold")
        if not run.alerts and not run.notes():
            text.append("\nno alerts, no notes\n", style="not bold dim")
        self.push_screen(Page(text))

    def action_help(self) -> None:
        """Show what keys do and what charts mean."""
        self.push_screen(Page(Text(_HELP)))


def _without_readings(run: Watched) -> str:
    if run.latest.waiting:
        return f"waiting for {run.path}"
    return "no readings yet"


def _last(curve: Curve) -> str:
    return with_margin(curve.values[-1], curve.margins[-1])


def _mark(marker: str) -> str:
    """Return the mark of a line in a list."""
    return "━" if marker == "braille" else marker


def _style(colour: charts.Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
