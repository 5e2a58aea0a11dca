"""A run in the terminal: the last reading, its history as spark lines, its phase in words."""

import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from geomon.analysis import Curve, curve_of, mean_abs_over_heads, single_source
from geomon.analysis.alerts import alert_notes
from geomon.analysis.curves import training_curve
from geomon.analysis.numbers import number, with_margin
from geomon.analysis.summary import dimension_now, estimates, name_alerts, why_they_differ
from geomon.record import Reading, Readings, tags
from geomon.record.columns import NAN
from geomon.record.printable import printable
from geomon.show.terminal.scales import FLAT, thin, typical

try:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text
except ImportError as error:
    raise ImportError("the terminal view needs rich: pip install 'geomon[terminal]'") from error

_BLOCKS = "▁▂▃▄▅▆▇█"
# For terminals without Unicode.
_ASCII = str.maketrans(_BLOCKS + "·±→−–…", "_.-~=+*#|+>--.")
# Widths in characters: of labels, of values, and of spark lines at most and at least.
_VALUE, _MAX_SPARK, _MIN_SPARK = 13, 28, 6
# Width of labels, and the width from which on a terminal has room for long ones.
_LABELS, _ROOMY = (20, 36), 100
# Metrics that a line of plain text gives beside the dimension.
_IN_A_LINE = ("anisotropy", "attention_entropy", "qk_cosine")
# Characters of the spark lines beside words, and of the terminals that have room for them.
_SHORT_SPARK, _WIDE = 12, 48


def view(readings: Readings | Sequence[Reading], *, width: int | None = None) -> "View":
    """Build a view of the last reading and the history, for rich to print.

    It has about 16 lines; below them it says what is to be known of the record as a whole.

    Args:
        readings: Readings of a run so far.
        width: Largest width in characters; None for the width of the terminal.
    """
    whole = readings if isinstance(readings, Readings) else Readings([], list(readings))
    return View(whole, width)


def format_line(reading: Reading, readings: Readings | Sequence[Reading]) -> str:
    """Format a reading as one line of plain text, for output that is not a terminal.

    Args:
        reading: Reading to describe.
        readings: Readings of the run; those of later steps are ignored.

    Returns:
        "step 128: Intrinsic dimension (TwoNN) 7.4 ± 0.1 (expanding), distinct tokens 7.5 ± 0.2,
        Anisotropy 0.32", for instance.
    """
    runs = readings.runs if isinstance(readings, Readings) else []
    past = [other for other in readings if other.step <= reading.step] or [reading]
    now = Readings(runs, [reading])
    size = mean_abs_over_heads([reading], "qk_cosine")
    alerts = alert_notes(reading)
    names = {name: now.text_of(name).title for name in _IN_A_LINE}
    parts = [
        *_dimension_parts(now, past),
        *(_part(names[name], reading.column(name).mean) for name in _IN_A_LINE[:2]),
        _part(f"|{names['qk_cosine']}|", size.values[-1] if len(size) else math.nan),
        _part("loss", reading.training.get(tags.LOSS, NAN)),
        f"alert: {' '.join('; '.join(map(str, alerts)).split())}" if alerts else "",
    ]
    known = [part for part in parts if part]
    return f"step {reading.step}: " + (", ".join(known) or _nothing_usual(now))


def _dimension_parts(now: Readings, past: Sequence[Reading]) -> list[str]:
    """Format both estimates of the dimension at a reading, the first with its phase."""
    parts = [f"{name} {_with_margin(curve)}" for name, curve in estimates(now)]
    phase = curve_of(past, "twonn").phase().name
    if parts and phase != "unknown":
        parts[0] += f" ({phase})"
    return parts


def _nothing_usual(now: Readings) -> str:
    """Say why a line has no value: other metrics were chosen, or they are not finite."""
    usual = [name for name in ("twonn", *_IN_A_LINE[:2]) if name in now[0].columns]
    lost = ", ".join(now.text_of(name).title for name in usual)
    return f"{lost} not finite" if lost else f"{len(now[0].values)} values"


def spark(values: Sequence[float], width: int, margin: float = 0.0) -> str:
    """Draw values as a line of block characters; neighbouring values are averaged to fit.

    Values are drawn as they are printed: where the printed ends agree, so do those of the line. A
    range within the margins of error is drawn flat.

    Args:
        values: Values from left to right.
        width: Largest number of characters.
        margin: Typical half width of the 95 % intervals of the values; 0 where it is unknown.

    Example:
        >>> spark([1, 2, 4, 8, 8, 4], 6)
        '▁▂▄██▄'
    """
    if not values or width < 1:
        return ""
    shown = [float(number(value)) for value in thin(values, width)]
    low, high = min(shown), max(shown)
    if high - low <= max(FLAT * max(abs(high), abs(low)), 2 * margin):
        return _BLOCKS[3] * len(shown)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in shown)


@dataclass(frozen=True)
class View:
    """Text of a run, laid out for the width of the console that prints it.

    Attributes:
        readings: Readings of a run so far.
        width: Largest width in characters; None for the width of the console.
    """

    readings: Readings
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out the lines, each cut to the width; remarks go on in the next line."""
        width = min(self.width or options.max_width, options.max_width)
        remarks = [
            line
            for remark in self.readings.remarks()
            for line in Text(printable(remark), style="red").wrap(console, width)
        ]
        for text in (*_lines(self.readings, width), *remarks):
            text.plain = printable(text.plain)  # nothing of a record acts on the terminal
            if options.ascii_only:
                plain = Text(text.plain.translate(_ASCII), spans=text.spans)
                plain.truncate(width, overflow="crop")
                yield plain
            else:
                text.truncate(width, overflow="ellipsis")
                yield text


def _lines(readings: Readings, width: int) -> Iterator[Text]:
    selected = single_source(readings)
    if not selected:
        yield Text("no readings yet", style="dim")
        return
    last = selected[-1]
    yield from _heading(last, width)
    yield from _wrapped(name_alerts(readings), width, "bold red")
    yield from _dimension(Readings(readings.runs, selected), width)
    yield _anisotropy(f"{readings.text_of('anisotropy').title} by layer", last, width)
    entropy = curve_of(selected, "attention_entropy")
    share = f"{entropy.values[-1] / entropy.values[0]:.0%}" if _has_start(entropy) else ""
    after = f"{share.replace('%', ' %')} of its start" if share else ""
    text = readings.text_of("attention_entropy")
    yield _row(text.title, _unit(entropy, f" {text.unit}".rstrip()), entropy, after, width)
    size = mean_abs_over_heads(selected, "qk_cosine")
    after = f"from {number(size.values[0])}" if len(size) > 1 else ""
    yield _row(f"|{readings.text_of('qk_cosine').title}|", _unit(size, ""), size, after, width)
    loss = training_curve(selected)
    if len(loss):
        after = f"from {number(loss.values[0])}" if len(loss) > 1 else ""
        if loss.steps[-1] < last.step:  # the last reading has no batch after it
            after = ", ".join(filter(None, (after, f"known to step {loss.steps[-1]:,}")))
        yield _row("training loss", _unit(loss, ""), loss, after, width)
    yield from _last_alert(readings, width)
    notes = [note.words() for note in last.notes if not note.is_alert]
    if notes:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        yield Text(f"note{more}: {' '.join(notes[-1].split())}", style="dim")


def _dimension(readings: Readings, width: int) -> Iterator[Text]:
    """Lay out both estimates of the dimension: their values in one line, then their phases."""
    found = estimates(readings)
    if not found:
        yield _row(readings.text_of("twonn").title, "", Curve([], [], []), "", width)
        return
    yield from _wrapped(dimension_now(readings), width, "bold")
    for index, (name, curve) in enumerate(found):
        phase = curve.phase()
        words = f"{name}: {phase.words()}" if index else phase.words()
        line = spark(curve.values, _SHORT_SPARK, typical(curve.margins)) * (width >= _WIDE)
        start = f"  {line:<{_SHORT_SPARK}}  " if line else "  "
        rest = textwrap.wrap(words, max(width - len(start), 1))
        for place, part in enumerate(rest):
            text = Text(start if not place else " " * len(start), style="blue")
            yield text.append(part, style=_COLOURS.get(phase.name, "none"))
    yield from _wrapped(why_they_differ(readings), width, "dim")


def _wrapped(words: str, width: int, style: str) -> Iterator[Text]:
    """Lay out words in as many lines as they take, so that nothing of them is cut."""
    return (Text(line, style=style) for line in textwrap.wrap(" ".join(words.split()), width))


def _last_alert(readings: Readings, width: int) -> Iterator[Text]:
    """Lay out the last alert of a run, with its step and the number of those before."""
    alerts = [
        (reading.step, alert.words()) for reading in readings for alert in alert_notes(reading)
    ]
    if alerts:
        step, words = alerts[-1]
        earlier = f" (and {len(alerts) - 1} before)" if len(alerts) > 1 else ""
        yield from _wrapped(f"alert at step {step:,}{earlier}: {words}", width, "red")


_COLOURS = {"expanding": "green", "compressing": "cyan", "erratic": "red"}


def _heading(reading: Reading, width: int) -> Iterator[Text]:
    overhead = reading.overhead
    parts = [ago(time.time() - reading.time), f"{reading.source}, {reading.mode} mode"]
    if math.isfinite(overhead):
        parts.append(f"geomon's share of the time {percent(overhead)}")
    heading = Text(f"step {reading.step:,}", style="bold")
    heading.append("".join(f" · {part}" for part in parts), style="not bold dim")
    if heading.cell_len <= width:
        yield heading
        return
    yield Text(f"step {reading.step:,}", style="bold").append(
        f" · {parts[0]} · {parts[1]}", style="not bold dim"
    )
    yield from (Text(part, style="dim") for part in parts[2:])


def _row(label: str, value: str, curve: Curve, after: str, width: int) -> Text:
    """Lay out a label, a value, a spark line and the text after it."""
    text = _label(label, width)
    if not len(curve):
        return text.append("not measured", style="dim")
    text.append(f"{value:<{_VALUE}}", style="bold")
    columns = width - text.cell_len - 1
    after = f"  {after}" if after and columns - len(after) - 2 >= _MIN_SPARK else ""
    line = spark(curve.values, min(columns - len(after), _MAX_SPARK), typical(curve.margins))
    text.append(" " + line, style="blue")
    return text.append(after, style="dim")


def _label(words: str, width: int) -> Text:
    """Lay out the label of a row, cut where it is too long."""
    text, room = Text(words), _LABELS[width >= _ROOMY]
    text.truncate(room - 1, overflow="ellipsis")
    return text.append(" " * (room - text.cell_len))


def _anisotropy(label: str, reading: Reading, width: int) -> Text:
    """Lay out the profile over depth, with the values at its ends and at its highest layer."""
    text = _label(label, width)
    profile = list(reading.column("anisotropy").by_layer().items())
    if not profile:
        return text.append("not measured", style="dim")
    left, right = f"{number(profile[0][1])} ", f" {number(profile[-1][1])}"
    top = max(profile, key=lambda pair: pair[1])
    columns = width - text.cell_len - len(left) - len(right)
    after = f"  highest {number(top[1])} at layer {top[0]} of {profile[-1][0]}"
    if columns - len(after) < _MIN_SPARK:
        after = f"  max {number(top[1])} at {top[0]}"
    if columns - len(after) < _MIN_SPARK:
        after = ""
    bars = spark([value for _, value in profile], columns - len(after))
    text.append(left, style="bold").append(bars, style="blue").append(right, style="bold")
    return text.append(after, style="dim")


def _with_margin(curve: Curve) -> str:
    """Format the last value of a curve and the half width of its interval."""
    return with_margin(curve.values[-1], curve.margins[-1]) if len(curve) else ""


def _unit(curve: Curve, unit: str) -> str:
    return f"{number(curve.values[-1])}{unit}" if len(curve) else ""


def _has_start(curve: Curve) -> bool:
    """Return whether the curve has a first value to which the last can be compared."""
    return len(curve) > 1 and curve.values[0] > 0


def _part(name: str, value: float) -> str:
    return f"{name} {number(value)}" if math.isfinite(value) else ""


def percent(share: float) -> str:
    """Format a share as a percentage, with a decimal below ten."""
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def ago(seconds: float) -> str:
    """Format how long ago something was, in a unit that suits."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
