"""`geomon watch` as an application: runs that are recorded, as charts that keys change."""

import contextlib
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text

from geomon.analysis import Curve
from geomon.analysis.numbers import number, with_margin
from geomon.analysis.quantities import Quantity
from geomon.analysis.summary import alert_sentences
from geomon.record import Reading, Readings
from geomon.show.collect import alerts_of, depth_panel, furthest_loss, line_of, null_of
from geomon.show.colours import DASHES
from geomon.show.panels import Line, Lines, thin
from geomon.show.terminal import charts
from geomon.show.terminal.overview import describe, safe
from geomon.show.terminal.runs import Watched

try:
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.color import Gradient
    from textual.containers import Grid, Horizontal, VerticalScroll
    from textual.widgets import DataTable, Footer, Select, Static, TabbedContent, TabPane
    from textual_plotext import PlotextPlot
except ImportError as error:
    raise ImportError(
        "the application needs textual and textual-plotext: pip install 'geomon[terminal]'; or "
        "print the present by --once"
    ) from error

_HELP = """\
m, M     next or previous metric
l, L     next or previous layer, or the mean over them
h        next metric of the attention heads
r        next run, for layers, heads and notes
p, n, e  previous, next, newest reading, for layers and heads
x        logarithmic or linear axis of steps
t, T     next or previous page
tab      to the next list, which enter opens; arrows scroll what does not fit
q        leave (Ctrl-Q too); the training goes on

Curve: a line for each run, between dim lines that are the ends of its 95 % interval: another \
sample of the text would move the curve within them, so that a change inside is noise. Without \
them the interval was not measured. The dot is the peak. Vertical lines are alerts.

By layer: the same metric over depth, from the input of the first block (0) to the output of the \
last one, now, at the start and at the peak; the dim lines are the ends of the intervals now.

Heads: a row for each layer, the first at the bottom, and a column for each attention head. \
Colours mean the same during the whole run.

Phase: the intrinsic dimension is the number of directions in which the hidden states of a layer \
vary. Often it expands at first, reaches a peak, and is compressing from then on. Steady: no \
change above its errors.

What each metric means: `geomon metrics`. What an alert means: `geomon alerts`.
"""
# Of the heads, from low to high: cividis without its darkest end; and around zero.
_RISING = Gradient.from_colors("#142856", "#7c7b78", "#fae746")
_AROUND_ZERO = Gradient.from_colors("#56b4e9", "#262626", "#f5aa14")
_ALL = -1  # stands for all layers in their list
# Readings of a run, evenly chosen, whose heads decide what a colour means.
_SAMPLE = 50


class Chart(PlotextPlot):
    """A panel below a line that says what it shows."""

    def show(self, panel: Lines, **how: Any) -> None:
        """Draw a panel in the place of what was there.

        Args:
            panel: What to draw.
            how: Keyword arguments of `charts.draw`.
        """
        self.plt.clear_figure()
        charts.draw(self.plt, panel, **how)
        self.border_title = charts.title_of(panel)
        self.refresh()


class WatchApp(App[str]):
    """Shows runs while they are recorded.

    Args:
        runs: The runs.
        poll: Seconds between two looks at the files; None to look only when `look` is called.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "geomon watch"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-tall")]  # noqa: RUF012
    CSS = """
    #runs { height: auto; max-height: 60%; padding: 0 1; }
    #runs Static { height: auto; }
    #choices { height: 1; }
    Select { width: 1fr; }
    #heads_metric { height: 1; width: 100%; }
    TabPane { padding: 0; }
    TabbedContent, ContentSwitcher, TabPane, Grid { height: 1fr; }
    Grid { grid-size: 1; grid-gutter: 0 2; }
    .-wide Grid { grid-size: 2; grid-columns: 3fr 2fr; }
    .-tall Grid { grid-rows: 3fr 2fr; }
    .-tall Grid.-lossless { grid-rows: 1fr; }
    .-narrow #beside, .-low #loss, .-lossless #loss { display: none; }
    .-wide #loss { column-span: 2; }
    Chart, DataTable { border-top: solid $primary; border-title-color: $foreground; }
    DataTable { height: 1fr; }
    #notes Static, #help Static { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("question_mark", "page('help')", "help", key_display="?"),
        Binding("t", "pages(1)", "page"),
        Binding("T", "pages(-1)", show=False),
        Binding("m", "cycle('metric', 1)", "metric"),
        Binding("M", "cycle('metric', -1)", show=False),
        Binding("l", "cycle('layer', 1)", "layer"),
        Binding("L", "cycle('layer', -1)", show=False),
        Binding("h", "cycle('heads_metric', 1)", "heads"),
        Binding("r", "cycle('run', 1)", "run"),
        Binding("p", "reading(-1)", "earlier"),
        Binding("n", "reading(1)", "later"),
        Binding("e", "newest", show=False),
        Binding("x", "scale", "log"),
    ]

    def __init__(self, runs: Sequence[Watched], *, poll: float | None = 0.5) -> None:
        super().__init__()
        self.runs = list(runs)
        self.step: int | None = None  # of the reading that is shown; None for the newest
        self._is_linear = False
        self._poll = poll
        self._has_ended = threading.Event()
        self._offered: dict[str, list[tuple[str, Any]]] = {}

    def compose(self) -> ComposeResult:
        """Make the screen."""
        with VerticalScroll(id="runs"):
            yield Static(id="headline")
        with Horizontal(id="choices"):
            for name in ("metric", "layer", "run"):
                yield Select([("", "")], allow_blank=False, compact=True, id=name)
        with TabbedContent():
            with TabPane("Curve", id="curve"), Grid():
                yield Chart(id="over_steps")
                yield Chart(id="beside")
                yield Chart(id="loss")
            with TabPane("By layer", id="layers"):
                yield Chart(id="over_depth")
            with TabPane("Heads", id="heads"):
                yield Select([("", "")], allow_blank=False, compact=True, id="heads_metric")
                yield DataTable(show_cursor=False, cell_padding=0)
            with TabPane("Alerts and notes", id="notes"), VerticalScroll():
                yield Static(id="all_notes")
            with TabPane("Help", id="help"), VerticalScroll():
                yield Static(Text(_HELP))
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look at the files."""
        self.show()
        if self._poll is not None:
            self.set_interval(1, self._show_headline)  # it says how old the last reading is
            threading.Thread(target=self._follow, args=(self._poll,), daemon=True).start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._has_ended.set()

    def _follow(self, poll: float) -> None:
        """Look at all files until the application ends; in a thread, for a record can be large."""
        while True:
            news = [run.look() for run in self.runs]
            if any(news):
                with contextlib.suppress(RuntimeError):  # the application has just ended
                    self.call_later(self.show)
            if self._has_ended.wait(poll):
                return

    def look(self) -> None:
        """Look at all files once, and show what is new."""
        for run in self.runs:
            run.look()
        self.show()

    # -- what is chosen --------------------------------------------------------------------------

    @property
    def run_shown(self) -> Watched:
        """The run whose layers, heads and notes are shown."""
        return self.runs[self._chosen("run") or 0]

    @property
    def reading(self) -> Reading | None:
        """The reading whose layers and heads are shown; None without any."""
        return self._reading_of(self.run_shown)

    def _reading_of(self, run: Watched) -> Reading | None:
        """Return the last reading of a run up to the chosen step."""
        earlier = [r for r in run.readings if self.step is None or r.step <= self.step]
        return earlier[-1] if earlier else None

    def _chosen(self, name: str) -> Any:
        return self.query_one(f"#{name}", Select).value if name in self._offered else None

    @property
    def _quantity(self) -> Quantity | None:
        found = [run.quantities.get(self._chosen("metric")) for run in self.runs]
        return next((each for each in found if each is not None), None)

    @property
    def _layer(self) -> int | None:
        """The chosen layer; None for the value of all."""
        chosen: int | None = self._chosen("layer")
        return None if chosen == _ALL else chosen

    def _offer(self, name: str, options: list[tuple[str, Any]]) -> None:
        """Offer a choice; what was chosen stays chosen where it is still there."""
        select = self.query_one(f"#{name}", Select)
        select.display = len(options) > 1
        if not options or options == self._offered.get(name):
            return
        before = self._chosen(name)
        self._offered[name] = options
        with select.prevent(Select.Changed):
            # A prompt is drawn as it is, and not as markup.
            select.set_options([(safe(words), value) for words, value in options])
            if before in [value for _, value in options]:
                select.value = before

    def _offer_all(self) -> None:
        self._offer("run", [(run.name, index) for index, run in enumerate(self.runs)])
        quantities = {key: each for run in self.runs for key, each in run.quantities.items()}
        self._offer("metric", [(each.label, key) for key, each in quantities.items()])
        quantity = self._quantity
        layers = {n for run in self.runs if quantity for n in run.layers_of(quantity)}
        places = [(f"layer {layer}", layer) for layer in sorted(layers)]
        self._offer("layer", [("mean over layers", _ALL), *places])
        reading = self.reading
        columns = reading.columns if reading is not None else {}
        names = [metric for metric, column in columns.items() if column.heads]
        titles = self.run_shown.readings.text_of
        self._offer("heads_metric", [(titles(name).label, name) for name in names])

    # -- the screen ------------------------------------------------------------------------------

    def show(self) -> None:
        """Show everything again."""
        if not self.is_running:
            return
        for run in self.runs:
            if run.trouble and not run.whole:
                self.exit(run.trouble, return_code=2)
                return
        self._offer_all()
        self._show_headline()
        steps = {"is_linear": self._is_linear, "chosen": self.step}
        by_layer, loss = self._by_layer(), self._loss()
        self.query_one("#over_steps", Chart).show(self._over_steps(), **steps)
        self.query_one("#beside", Chart).show(by_layer)
        self.query_one("#over_depth", Chart).show(by_layer)
        self.query_one("#loss", Chart).show(loss, **steps)
        self.query_one(Grid).set_class(not loss.lines, "-lossless")
        self._show_heads()
        self._show_notes()

    def _show_headline(self) -> None:
        parts = []
        for index, run in enumerate(self.runs):
            colour, dash = self._look_of(index)
            name = f"{charts.mark_of(dash)} {run.name}"
            if run.readings:
                said = describe(run.readings[-1], run.headline)
                parts.append(Text.assemble((f"{name} · ", f"bold {colour}"), said))
            else:
                parts.append(Text.assemble((name, colour), (f" · {run.state}", "dim")))
            alerts = () if run.readings else alert_sentences(run.whole)  # else in the headline
            remarks = filter(None, (*alerts, *run.whole.remarks(), run.trouble))
            parts += [safe(remark, "red") for remark in remarks]
        self.query_one("#headline", Static).update(Text("\n").join(parts))

    def _show_heads(self) -> None:
        table, reading = self.query_one(DataTable), self.reading
        table.clear(columns=True)
        name = self._chosen("heads_metric")
        known = reading.column(name).by_head() if reading is not None and name else {}
        if reading is None or not known:
            table.border_title = "not measured"
            return
        readings = self.run_shown.readings
        few = readings.readings[:: math.ceil(len(readings) / _SAMPLE)]
        every = [v for each in few for v in each.column(name).by_head().values()] + [
            *known.values()
        ]
        low, high = min(every), max(every)
        if low < 0:
            low, high = -max(-low, high), max(-low, high)
        gradient = _AROUND_ZERO if low < 0 else _RISING
        where = f"{self.run_shown.name}  " if len(self.runs) > 1 else ""
        words = f"step {reading.step:,}  columns: heads  colours: {number(low)} to {number(high)}"
        table.border_title = Text(f"{where}{words}")
        heads = range(1 + max(head for _, head in known))
        table.add_columns(*(f"{head:^7}" for head in heads))
        for layer in sorted({layer for layer, _ in known}, reverse=True):  # as in all pictures
            fields = []
            for head in heads:
                value = known.get((layer, head))
                if value is None:
                    fields.append(Text())
                    continue
                ground = gradient.get_color((value - low) / (high - low) if high > low else 0.5)
                style = Style(color=ground.get_contrast_text().hex6, bgcolor=ground.hex6)
                fields.append(Text(f"{number(value):^7}", style))
            table.add_row(*fields, label=f"layer {layer}")

    def _show_notes(self) -> None:
        run = self.run_shown
        text = Text()
        for sentence in alert_sentences(run.whole):
            text.append_text(safe(f"{sentence}\n", "red")).append("\n")
        for note in run.readings[-1].notes if run.readings else ():
            if not note.is_alert:
                text.append_text(safe(note.words())).append("\n\n")
        self.query_one("#all_notes", Static).update(text or Text("no alerts, no notes"))

    # -- panels ----------------------------------------------------------------------------------

    def _look_of(self, index: int) -> tuple[str, str]:
        """Return the colour and the dash of a run; dashes differ where no colour is shown."""
        dash = DASHES[index % len(DASHES)] if self.no_color else "solid"
        return charts.COLOURS[index % len(charts.COLOURS)], dash

    def _lines_of(self, curves: Sequence[Curve]) -> list[Line]:
        """Make the lines of the curves of all runs."""
        lines = []
        for index, curve in enumerate(curves):
            colour, dash = self._look_of(index)
            name = self.runs[index].name if len(self.runs) > 1 else ""
            if curve:
                lines.append(line_of(thin(curve), name, colour, dash=dash))
        return lines

    def _over_steps(self) -> Lines:
        quantity, layer = self._quantity, self._layer
        if quantity is None:
            return Lines("no values yet", [])
        lines = self._lines_of([quantity.curve(run.readings, layer) for run in self.runs])
        run, label = self.run_shown, quantity.label
        label += "" if layer is None else f", layer {layer}"
        if len(self.runs) > 1 or not lines:
            return Lines(label, lines)
        has_null = quantity.is_mean and not quantity.part
        null = null_of(run.readings, quantity.metric) if has_null else None
        curve = quantity.curve(run.readings, layer)
        label = f"{label}  {with_margin(curve.values[-1], curve.margins[-1])}"
        if curve.steps[-1] < run.readings[-1].step:
            label += f" at step {curve.steps[-1]:,}"
        if run.fallen and (quantity.metric, quantity.part, layer) == ("twonn", "", None):
            peak = run.fallen
            lines.append(Line("", [peak.peak_step], [peak.peak], charts.COLOURS[1]))
        return Lines(label, lines, null=null, alerts=alerts_of(run.whole))

    def _loss(self) -> Lines:
        found = [furthest_loss(run.readings) for run in self.runs]
        lines = self._lines_of([curve for _, curve in found])
        name, curve = found[0]
        last = f"  {number(curve.values[-1])}" if len(self.runs) == 1 and len(curve) else ""
        return Lines(f"{name}{last}", lines)

    def _by_layer(self) -> Lines:
        """The same metric over depth: of each run, or of the only one at several readings.

        These are its first reading, that at the peak, and the chosen one.
        """
        quantity, label = self._quantity, "by layer"
        if quantity is None or not quantity.metric:
            return Lines("not a value of layers", [])
        if len(self.runs) > 1:
            lines = []
            for index, run in enumerate(self.runs):
                reading, (colour, dash) = self._reading_of(run), self._look_of(index)
                shown = Readings(run.readings.runs, [reading] if reading else [])
                panel = depth_panel(shown, quantity.metric, quantity.part)
                lines += [replace(x, name=run.name, colour=colour, dash=dash) for x in panel.lines]
            return Lines(label, lines, "layer")
        (run,), now = self.runs, self.reading
        if now is None:
            return Lines(label, [], "layer")
        top = run.fallen.peak_step if run.fallen else None
        looks = {run.readings[0].step: ("start", charts.GREY, "dot")}
        looks |= {top: (f"peak {top:,}", charts.COLOURS[1], "dash")} if top else {}
        words = "now" if self.step is None else f"step {now.step:,}"
        looks |= {now.step: (words, charts.COLOURS[0], "solid")}
        some = [each for each in run.readings if each.step in looks]
        panel = depth_panel(Readings(run.readings.runs, some), quantity.metric, quantity.part)
        lines = []
        for line in panel.lines:
            words, colour, dash = looks[int(line.name.replace(",", ""))]
            dash = dash if self.no_color else "solid"
            lines.append(replace(line, name=words, colour=colour, dash=dash))
        return replace(panel, label=label, lines=lines, null=None)

    # -- keys ------------------------------------------------------------------------------------

    def on_select_changed(self, event: Select.Changed) -> None:
        """Show what was chosen."""
        self.show()

    def action_cycle(self, name: str, by: int) -> None:
        """Choose the next of a list, or the one before."""
        values = [value for _, value in self._offered.get(name, [])]
        if values:
            select = self.query_one(f"#{name}", Select)
            select.value = values[(values.index(select.value) + by) % len(values)]

    def action_page(self, name: str) -> None:
        """Show a page."""
        self.query_one(TabbedContent).active = name

    def action_pages(self, by: int) -> None:
        """Show the next page, or the one before."""
        names, pages = [pane.id for pane in self.query(TabPane)], self.query_one(TabbedContent)
        pages.active = str(names[(names.index(pages.active) + by) % len(names)])

    def action_scale(self) -> None:
        """Change between a logarithmic and a linear axis of steps."""
        self._is_linear = not self._is_linear
        self.show()

    def action_reading(self, by: int) -> None:
        """Show an earlier or a later reading; after the last one the newest is followed."""
        steps = [reading.step for reading in self.run_shown.readings]
        if self.reading is not None:
            index = max(0, steps.index(self.reading.step) + by)
            self.step = steps[index] if index < len(steps) - 1 else None
            self.show()

    def action_newest(self) -> None:
        """Show the newest reading."""
        self.step = None
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave out the key that changes the run where there is one alone."""
        return not (parameters[:1] == ("run",) and len(self.runs) == 1)
