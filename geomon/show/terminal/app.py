"""`geomon watch` as an application: runs that are recorded, as charts that keys change."""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text

from geomon.show.terminal import charts, headings
from geomon.show.terminal.charts import Line
from geomon.show.terminal.choices import DIMENSION, Choices
from geomon.show.terminal.history import Look, Watched
from geomon.show.terminal.quantities import Quantity

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

_HELP = """\
m, M         next or previous metric
l, L         next or previous layer, or the mean over them
h            next metric of the attention heads
x            logarithmic or linear axis of steps
left, right  earlier or later reading, for layers and heads
end          newest reading again
r            next run, for layers, heads and notes
tab          one chart alone, the next one, and all again
n            all alerts and notes
q, Ctrl-C    leave; the training goes on

Curves: one line for each run. The shaded band is the 95 % interval: another sample of the text \
would move the curve within it, so a change inside the band is noise. Without a band the interval \
was not measured.

Layers: the same metric over depth, from the input of the first block (0) to the output of the \
last one, now, at the start and at the peak.

Heads: a field for each attention head and layer. Colours mean the same during the whole run.

Phase: the intrinsic dimension is the number of directions in which the hidden states of a layer \
vary. Often it expands at first, reaches a peak, and is compressing from then on. Steady: no \
change above its errors.

What each metric means: `geomon metrics`. What an alert means: `geomon alerts`.
"""


class Chart(PlotextPlot):
    """A chart that is drawn again at the size that it has.

    Args:
        draw: Function that draws into a plot of plotext, given its columns and rows, and returns
            whether there was something to draw.
    """

    def __init__(self, draw: Callable[[Any, tuple[int, int]], bool]) -> None:
        super().__init__()
        self._draw = draw

    def render(self) -> Any:
        """Draw the chart."""
        width, height = self.size.width, self.size.height
        if width < 8 or height < 3 or not self._draw(self.plt, (width, height)):
            return ""
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
        self.choices = Choices(runs, coloured=not self.no_color)
        self._poll = poll
        self._has_ended = threading.Event()
        self._alone = ""  # name of the panel that is shown alone

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
        self._has_ended.set()

    def on_resize(self, event: Resize) -> None:
        """Lay out the screen for another size."""
        self.call_after_refresh(self.show)

    def _follow(self, poll: float) -> None:
        """Look at all files until the application ends; in a thread, for a record can be large."""
        while not self._has_ended.is_set():
            for run in self.choices.runs:
                look = run.look()
                if look is not None:
                    with contextlib.suppress(RuntimeError):  # the application has just ended
                        self.call_later(self._take, run, look)
            self._has_ended.wait(poll)

    def look(self) -> None:
        """Look at all files once, and show what is new."""
        for run in self.choices.runs:
            if (look := run.look()) is not None:
                self._take(run, look)

    def _take(self, run: Watched, look: Look) -> None:
        if look.trouble and not run.latest.readings:
            self.exit(look.trouble, return_code=2)
            return
        run.take(look)
        self.show()

    # -- the screen ------------------------------------------------------------------------------

    def show(self) -> None:
        """Show everything again."""
        if not self.is_running or len(self.screen_stack) == 0:
            return
        self._lay_out()
        self._show_runs()
        choices, width = self.choices, self.size.width - 2
        curves = self._panel("curves")
        curves.show(headings.title_of_curves(choices, (curves.size.width or width) - 2))
        self._panel("layers").show(headings.title_of_layers(choices))
        self._panel("loss").show(headings.title_of_loss(choices))
        self._panel("heads").show(headings.title_of_heads(choices))
        rows = max(1, min(8, (self.size.height - 16) // 4))
        self._text("events").update(headings.list_events(choices.run, width, rows))
        alone = bool(self._alone) or self._is_small
        self._text("keys").update(headings.list_keys(choices, width, alone=alone))

    def _show_runs(self) -> None:
        self._text("runs").update(headings.describe_runs(self.choices, self.size.width - 2))

    def _text(self, name: str) -> Static:
        return self.screen_stack[0].query_one(f"#{name}", Static)

    def _panel(self, name: str) -> Panel:
        return self.screen_stack[0].query_one(f"#{name}", Panel)

    @property
    def _is_small(self) -> bool:
        """Whether there is room for one chart only."""
        return self.size.width < _ALL_COLUMNS or self.size.height < _ALL_ROWS

    def _panels(self) -> list[str]:
        """Name the panels that have something to show."""
        has_loss, has_heads = self.choices.loss is not None, bool(self.choices.heads)
        return ["curves", "layers", *["loss"] * has_loss, *["heads"] * has_heads]

    def _lay_out(self) -> None:
        panels = self._panels()
        alone = self._alone if self._alone in panels else "curves" if self._is_small else ""
        shown = [alone] if alone else panels
        for name in ("curves", "layers", "loss", "heads"):
            panel = self._panel(name)
            panel.display = name in shown
            panel.styles.column_span = 2 if len(shown) == 3 and name == shown[-1] else 1
        grid = self.screen_stack[0].query_one(Grid)
        grid.styles.grid_size_columns = 1 if alone else 2
        grid.styles.grid_columns = "1fr" if alone else "3fr 2fr"
        grid.styles.grid_rows = "1fr" if len(shown) < 3 else "3fr 2fr"

    # -- charts ----------------------------------------------------------------------------------

    def _draw_curves(self, plot: Any, size: tuple[int, int]) -> bool:
        metric, layer = self.choices.metric, self.choices.layer
        return metric is not None and self._draw_over_steps(plot, size, metric, layer)

    def _draw_loss(self, plot: Any, size: tuple[int, int]) -> bool:
        loss = self.choices.loss
        return loss is not None and self._draw_over_steps(plot, size, loss, None)

    def _draw_over_steps(
        self, plot: Any, size: tuple[int, int], quantity: Quantity, layer: int | None
    ) -> bool:
        choices = self.choices
        logarithmic = choices.logarithmic
        lines = [
            charts.line_of(
                run.curve(quantity, layer), *choices.look_of(index), logarithmic=logarithmic
            )
            for index, run in enumerate(choices.runs)
        ]
        ends = [run.selected[end].step for run in choices.runs if run.selected for end in (0, -1)]
        if not any(line.values for line in lines):
            return False
        top = choices.peak if quantity.is_dimension and layer is None else None
        peak = None if top is None else (top.step, top.column(DIMENSION.metric).mean)
        charts.draw_over_steps(
            plot, lines, size, steps=(min(ends), max(ends)), logarithmic=logarithmic,
            cursor=choices.step, peak=peak,
        )  # fmt: skip
        return True

    def _draw_layers(self, plot: Any, size: tuple[int, int]) -> bool:
        metric, layers = self.choices.metric, self.choices.layers
        if metric is None or not layers:
            return False
        lines = []
        for _, reading, colour, marker in self.choices.profiles():
            curves = [(layer, metric.curve([reading], layer)) for layer in layers]
            known = [(float(layer), curve) for layer, curve in curves if len(curve)]
            values = [curve.values[0] for _, curve in known]
            margins = [curve.margins[0] for _, curve in known]
            lines.append(Line([layer for layer, _ in known], values, margins, colour, marker))
        charts.draw_profile(plot, lines, size, layers=layers)
        return any(line.values for line in lines)

    def _draw_heads(self, size: tuple[int, int]) -> Text:
        name, reading = self.choices.heads, self.choices.reading
        if not name or reading is None or size[0] < 8 or size[1] < 3:
            return Text()
        layers, heads = charts.head_rows(reading, name)
        known = [value for row in heads for value in row if not math.isnan(value)]
        if not known:
            return Text(f"not measured at step {reading.step:,}", style="dim")
        scale = charts.scale_of(name, *self.choices.run.extremes(name))
        return charts.draw_heads(layers, heads, scale, size, coloured=self.choices.coloured)

    # -- keys ------------------------------------------------------------------------------------

    def action_metric(self, by: int) -> None:
        """Show another metric."""
        self.choices.change_metric(by)
        self.show()

    def action_layer(self, by: int) -> None:
        """Show the curve of another layer, or of the mean."""
        self.choices.change_layer(by)
        self.show()

    def action_heads(self) -> None:
        """Show another metric of the heads."""
        self.choices.change_heads()
        self.show()

    def action_scale(self) -> None:
        """Change between a logarithmic and a linear axis of steps."""
        self.choices.logarithmic = not self.choices.logarithmic
        self.show()

    def action_reading(self, by: int) -> None:
        """Show the layers and heads of an earlier or a later reading."""
        self.choices.change_reading(by)
        self.show()

    def action_newest(self) -> None:
        """Show the layers and heads of the newest reading."""
        self.choices.step = None
        self.show()

    def action_run(self) -> None:
        """Show the layers, heads and notes of another run."""
        self.choices.change_run()
        self.show()

    def action_panel(self) -> None:
        """Show one chart alone, then the next, then all."""
        places = [*([] if self._is_small else [""]), *self._panels()]
        now = places.index(self._alone) if self._alone in places else 0
        self._alone = places[(now + 1) % len(places)]
        self.show()
        self.call_after_refresh(self.show)  # titles fit the new widths

    def action_notes(self) -> None:
        """Show all alerts and notes of the shown run."""
        self.push_screen(Page(headings.list_all_events(self.choices.run)))

    def action_help(self) -> None:
        """Show what keys do and what charts mean."""
        self.push_screen(Page(Text(_HELP)))
