"""Shows a run as text: an overview with its history."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence

from geomon.advice import to_install
from geomon.analysis import (
    alert_sentences,
    bands_so_far,
    facts_of,
    first_alerts,
    number,
    single_source,
)
from geomon.record import Reading, Readings, printable
from geomon.show.collect import furthest_loss
from geomon.show.tables import short_title, watched

try:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError(f"the terminal view needs rich: {to_install('terminal')}") from error

_BLOCKS = "▁▂▃▄▅▆▇█"
# A curve is drawn flat if its range is below this share of its largest value.
_FLAT = 0.02
_SPARK = 16  # characters


def view(
    readings: Readings | Sequence[Reading], *, state: str = "", is_brief: bool = False
) -> Group:
    """Build an overview of the last reading and the history, for rich to print.

    Args:
        readings: Readings of a run so far.
        state: Whether the run goes on, in words. Defaults to "", for unknown.
        is_brief: Whether to fit 80 columns with a line for each value. Defaults to False.
    """
    whole = readings if isinstance(readings, Readings) else Readings([], list(readings))
    remarks = [safe(remark, "red") for remark in whole.remarks()]
    alerts = [*_alerts(whole, is_brief=is_brief)]
    selected = Readings(whole.runs, single_source(whole))
    if not selected:
        return Group(safe("no readings yet", "dim"), *alerts, *remarks)
    table = Table.grid(padding=(0, 2, 0, 0))
    for no_wrap in (False, True, True, False):
        table.add_column(no_wrap=no_wrap)
    for label, value, line, after in _rows(selected, is_brief=is_brief):
        table.add_row(safe(label), safe(value, "bold"), safe(line, "blue"), safe(after, "dim"))
    notes = [] if is_brief else _last_note(selected[-1])
    return Group(_first_line(selected, state, is_brief=is_brief), *alerts, table, *notes, *remarks)


def _alerts(readings: Readings, *, is_brief: bool) -> Iterator[Text]:
    """Yield the lines of alerts: a sentence and what to do for each kind, or one line for all."""
    said = alert_sentences(readings)
    if is_brief and said:
        first = first_alerts(readings)
        kinds = ", ".join(f"{each.alert.kind} at step {each.step:,}" for each in first)
        said = [f"Alerts: {kinds}"]
    for words in said:
        first_line, *others = words.split("\n")
        yield safe(first_line, "red")
        yield from (safe(f"  {line}", "dim") for line in others)


def _last_note(reading: Reading) -> list[Text]:
    """Return the last note of a reading, and how many more it has."""
    notes = [note.words() for note in reading.notes if not note.is_alert]
    more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    return [safe(f"note{more}: {' '.join(notes[-1].split())}", "dim")] if notes else []


def _first_line(readings: Readings, state: str, *, is_brief: bool) -> Text:
    """Describe the last reading of a run, how it is watched, and whether it goes on."""
    last, bands = readings[-1], bands_so_far(readings).partition(":")
    share = f"geomon {last.overhead * 100:.{1 if last.overhead < 0.1 else 0}f} %"
    if not is_brief:
        share += " of the time"
    parts = (
        f"{duration(time.time() - last.time)} ago",
        "" if is_brief else f"{last.source}, {last.mode}",
        state,
        share if math.isfinite(last.overhead) else "",
        bands[0] if bands[1] and last.count and not is_brief else "",  # not yet
    )
    return safe(f"step {last.step:,}", "bold").append_text(
        safe("".join(f" · {part}" for part in parts if part), "not bold dim")
    )


def _rows(readings: Readings, *, is_brief: bool) -> Iterator[tuple[str, str, str, str]]:
    """Yield the label, last value, spark line and trend of each watched quantity."""
    for fact in watched(facts_of(readings)):
        curve = fact.quantity.curve(readings)
        trend = [f"{fact.arrow} {fact.word}"] if is_brief else [fact.trend, fact.turn]
        after = trend if fact.trend else [f"from {fact.phase.start.words()}"]
        after.append(_known_to(fact.phase.last.step, readings))
        line = spark(curve.values, statistics.median(curve.margins))
        label = short_title(fact.quantity) if is_brief else fact.quantity.label
        yield label, fact.phase.last.words(), line, "; ".join(filter(None, after))
    name, loss = furthest_loss(readings)
    if loss:  # the last reading has no next batch
        after = [f"from {number(loss.values[0])}"] if len(loss) > 1 else []
        after.append(_known_to(loss.steps[-1], readings))
        yield name, number(loss.values[-1]), spark(loss.values), ", ".join(filter(None, after))
    profile = readings[-1].column("anisotropy").by_layer()
    if profile and not is_brief:
        top, values = max(profile, key=profile.__getitem__), list(profile.values())
        ends = f"{number(values[0])} to {number(values[-1])}"
        yield (
            f"{readings.text_of('anisotropy').title} by layer", ends, spark(values),
            f"highest {number(profile[top])} at layer {top}",
        )  # fmt: skip


def _known_to(step: int, readings: Readings) -> str:
    return f"known to step {step:,}" if step < readings[-1].step else ""


def spark(values: Sequence[float], margin: float = 0.0) -> str:
    """Draw values as at most sixteen block characters, flat if they vary less than their margin.

    Example:
        >>> spark([1, 2, 4, 8, 8, 4])
        '▁▂▄██▄'
    """
    count = min(len(values), _SPARK)
    shown = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    low, high = min(shown), max(shown)
    if high - low <= max(_FLAT * max(abs(high), abs(low)), 2 * margin):
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[round((value - low) / (high - low) * 7)] for value in shown)


def safe(words: str, style: str = "") -> Text:
    """Make printable text from words of a record, so that they cannot control the terminal."""
    return Text(printable(words), style)


def duration(seconds: float) -> str:
    """Format a time in a suitable unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
