"""Lines of text around the charts of the application: runs in words, alerts, keys, titles."""

import math
import time

from rich.text import Text

from geomon.analysis import Curve
from geomon.analysis.numbers import number, with_margin
from geomon.analysis.summary import dimension_course, dimension_now, name_alerts
from geomon.record import Readings
from geomon.record.printable import printable
from geomon.show.terminal.charts import Colour
from geomon.show.terminal.choices import DIMENSION, Choices
from geomon.show.terminal.history import Watched
from geomon.show.terminal.overview import ago, percent

# Most runs that have a line of their own.
_MOST_NAMED = 6
_PHASES = {"expanding": "#00b282", "compressing": "#56b4e9", "erratic": "#d55e00"}
_OVER_LAYERS = ", mean over layers"


def describe_runs(choices: Choices, width: int) -> Text:
    """Say in words where the runs are; of several, each line is the legend too.

    Args:
        choices: The runs, and what of them is shown.
        width: Number of columns.
    """
    lines: list[Text] = []
    for index, run in enumerate(choices.runs[:_MOST_NAMED]):
        lines += _one_of_several(choices, index) if choices.several else _only(run, width)
    if len(choices.runs) > _MOST_NAMED:
        lines.append(Text(f"and {len(choices.runs) - _MOST_NAMED} more", style="dim"))
    for run in choices.runs:
        for words in filter(None, (*run.latest.remarks, run.latest.trouble)):
            lines.append(Text(f"{run.name}: {words}" if choices.several else words, style="red"))
    return _cut(lines, width)


def _only(run: Watched, width: int) -> list[Text]:
    """Describe the only run: how far it is, its alerts, its dimension and the phase of that."""
    first = Text(run.name, style="bold")
    if not run.selected:
        return [first, Text(_without_readings(run), style="dim")]
    last = run.selected[-1]
    first.append(f" · step {last.step:,} · {ago(time.time() - last.time)}", style="not bold")
    overhead = last.overhead
    more = [f"{last.source}, {last.mode} mode"]
    if math.isfinite(overhead):
        more.append(f"geomon's share of the time {percent(overhead)}")
    for part in more:
        if first.cell_len + len(part) + 3 <= width:
            first.append(f" · {part}", style="not bold dim")
    alerts, selected = name_alerts(run.readings), Readings(run.readings.runs, run.selected)
    lines = [first, *[Text(alerts, style="bold red")] * bool(alerts)]
    lines.append(Text(dimension_now(selected) or _not_measured(run), style="bold"))
    if len(run.curve(DIMENSION)):
        phase = run.phase(DIMENSION)
        lines.append(Text(phase.words(), style=_PHASES.get(phase.name, "")))
    return lines


def _one_of_several(choices: Choices, index: int) -> list[Text]:
    """Describe one of several runs in a line."""
    run, (colour, marker) = choices.runs[index], choices.look_of(index)
    text = Text("▸" if run is choices.run else " ")
    text.append(f"{_mark(marker) * 2} ", style=_style(colour)).append(f"{run.name}  ", style="bold")
    if not run.selected:
        return [text.append(_without_readings(run), style="dim")]
    last = run.selected[-1]
    text.append(f"step {last.step:,} · {ago(time.time() - last.time)}  ", style="dim")
    if not len(run.curve(DIMENSION)):
        return [text.append(_not_measured(run), style="dim")]
    return [text.append(dimension_course(Readings(run.readings.runs, run.selected)), style="bold")]


def _not_measured(run: Watched) -> str:
    return f"{run.readings.text_of(DIMENSION.metric).title}: not measured"


def _without_readings(run: Watched) -> str:
    if not run.is_looked_at:
        return f"reading {run.path}"
    return f"waiting for {run.path}" if run.latest.waiting else "no readings yet"


def list_events(run: Watched, width: int, rows: int) -> Text:
    """List the alerts of a run, the newest first, and the notes of its last reading.

    Args:
        run: The run.
        width: Number of columns.
        rows: Largest number of lines.
    """
    lines = [Text(f"alert at step {step:,}: {words}", style="red") for step, words in run.alerts]
    lines = lines[::-1] + [Text(f"note: {note}", style="dim") for note in run.notes()]
    if not lines:
        return Text("no alerts, no notes", style="dim")
    if len(lines) > rows:
        more = Text(f"[n: {len(lines) - rows} more] ", style="dim")
        lines = [*lines[: rows - 1], more.append_text(lines[rows - 1])]
    return _cut(lines, width)


def list_all_events(run: Watched) -> Text:
    """List all alerts of a run and the notes of its last reading, in whole sentences."""
    text = Text(f"{run.name}\n", style="bold")
    for step, words in reversed(run.alerts):
        text.append(f"\nalert at step {step:,}: {words}\n", style="not bold red")
    for note in run.notes():
        text.append(f"\n{note}\n", style="not bold")
    if not run.alerts and not run.notes():
        text.append("\nno alerts, no notes\n", style="not bold dim")
    return text


def list_keys(choices: Choices, width: int, *, alone: bool) -> Text:
    """List as many keys as there is room for; how to leave and where help is come first.

    Args:
        choices: The runs, and what of them is shown.
        width: Number of columns.
        alone: Whether one chart is shown alone.
    """
    hints = [
        ("q", "quit"), ("?", "help"), ("m", "metric"), *[("r", "run")] * choices.several,
        ("l", "layer"), ("tab", "next chart" if alone else "one chart"),
        ("x", "linear steps" if choices.logarithmic else "log steps"), ("h", "heads"),
        ("←→", "reading"), ("n", "notes"),
    ]  # fmt: skip
    text = Text()
    for key, words in hints:
        if text.cell_len + len(key) + len(words) + 1 <= width:
            text.append(f"{key} ", style="bold").append(f"{words}  ")
    return text


def title_of_curves(choices: Choices, width: int) -> Text:
    """Name the chart of the curves: the quantity, its last value and the axis, as far as they fit.

    Args:
        choices: The runs, and what of them is shown.
        width: Number of columns.
    """
    metric = choices.metric
    if metric is None:
        return Text("no values yet", style="bold")
    title = metric.title(choices.layer)
    curve = choices.run.curve(metric, choices.layer)
    value = f"  {_last(curve)}" if len(curve) and not choices.several else ""
    axis = "  log steps" if choices.logarithmic else "  linear steps"
    if len(title) + len(value) > width:
        title = title.removesuffix(_OVER_LAYERS)
    text = _safe(Text(title, style="bold").append(value, style="not bold"))
    readings, newest = choices.run.readings, choices.run.at(None)
    null = newest.column(metric.metric).whole.get("null", math.nan) if newest else math.nan
    if math.isfinite(null) and not (metric.group or metric.part):
        words = readings.text_of(metric.metric).null or "null"
        axis = f"  {printable(words)} {number(null)}{axis}"
    return text.append(axis, style="dim not bold") if text.cell_len + len(axis) <= width else text


def title_of_layers(choices: Choices) -> Text:
    """Name the chart of the layers, with its legend, the newest first."""
    text = Text("by layer", style="bold")
    if not choices.layers:
        return text.append(" not measured" if choices.metric is not None else "", style="not bold")
    profiles = choices.profiles()
    for profile in profiles if choices.several else reversed(profiles):
        mark = _mark(profile.marker)
        text.append(f" {mark}{profile.name}", style=f"{_style(profile.colour)} not bold")
    return _safe(text)


def title_of_loss(choices: Choices) -> Text:
    """Name the chart of the loss, with its last value."""
    if choices.loss is None:
        return Text()
    curve = choices.run.curve(choices.loss)
    newest = choices.run.at(None)
    value = f"  {curve.values[-1]:.4g}" if len(curve) and not choices.several else ""
    if value and newest is not None and curve.steps[-1] < newest.step:
        value += f" at step {curve.steps[-1]:,}"  # no batch comes after the last reading
    return _safe(Text(choices.loss.title(), style="bold").append(value, style="not bold"))


def title_of_heads(choices: Choices) -> Text:
    """Name the chart of the heads."""
    name, reading = choices.heads, choices.reading
    text = Text(f"heads: {choices.run.readings.text_of(name).title}", style="bold")
    if reading is not None and choices.several:
        text.append(f"  {choices.run.name}", style="not bold")
    if reading is not None and choices.step is not None:
        text.append(f"  step {reading.step:,}", style="not bold")
    return _safe(text)


def _cut(lines: list[Text], width: int) -> Text:
    for line in lines:
        _safe(line).truncate(max(width, 1), overflow="ellipsis")
    return Text("\n").join(lines)


def _safe(text: Text) -> Text:
    """Let nothing of a record act on the terminal."""
    text.plain = printable(text.plain)
    return text


def _last(curve: Curve) -> str:
    return with_margin(curve.values[-1], curve.margins[-1])


def _mark(marker: str) -> str:
    """Return the mark of a line in a legend."""
    return "━" if marker == "braille" else marker


def _style(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
