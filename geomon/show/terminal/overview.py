"""Shows a run as text: an overview with its history, and a line for each reading."""

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from geomon.advice import to_install
from geomon.analysis import Fact, facts_of, single_source
from geomon.analysis.numbers import number
from geomon.analysis.summary import alert_sentences, headline
from geomon.record import Reading, Readings
from geomon.record.printable import printable
from geomon.record.sinks import Memory
from geomon.show.collect import furthest_loss

try:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError(f"the terminal view needs rich: {to_install('terminal')}") from error

# Tags of the quantities in an overview, in this order.
_WATCHED = (
    "twonn/mean", "twonn_distinct/mean", "anisotropy/mean", "attention_entropy/mean",
    "qk_cosine_size",
)  # fmt: skip
_BLOCKS = "▁▂▃▄▅▆▇█"
# A curve is drawn flat if its range is below this share of its largest value.
_FLAT = 0.02
_SPARK = 16  # characters


def view(readings: Readings | Sequence[Reading]) -> Group:
    """Build an overview of the last reading and the history, for rich to print.

    Args:
        readings: Readings of a run so far.
    """
    whole = readings if isinstance(readings, Readings) else Readings([], list(readings))
    remarks = [safe(remark, "red") for remark in whole.remarks()]
    alerts = [safe(sentence, "red") for sentence in alert_sentences(whole)]
    selected = Readings(whole.runs, single_source(whole))
    if not selected:
        return Group(safe("no readings yet", "dim"), *alerts, *remarks)
    table = Table.grid(padding=(0, 2, 0, 0))
    for no_wrap in (False, True, True, False):
        table.add_column(no_wrap=no_wrap)
    for label, value, line, after in _rows(selected):
        table.add_row(safe(label), safe(value, "bold"), safe(line, "blue"), safe(after, "dim"))
    notes = [note.words() for note in selected[-1].notes if not note.is_alert]
    more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    last = [safe(f"note{more}: {' '.join(notes[-1].split())}", "dim")] if notes else []
    return Group(describe(selected[-1], headline(whole)), table, *alerts, *last, *remarks)


def describe(last: Reading, words: str) -> Text:
    """Describe the last reading of a run and its headline."""
    text = safe(f"step {last.step:,}", "bold")
    parts = [ago(time.time() - last.time), printable(f"{last.source}, {last.mode}")]
    if math.isfinite(last.overhead):
        parts.append(f"geomon {percent(last.overhead)} of the time")
    text.append("".join(f" · {part}" for part in parts), style="not bold dim")
    said = safe(words, "bold")
    if words.startswith("Alert"):
        said.stylize("red", 0, words.index(". "))
    return text.append("\n").append_text(said)


def _watched(readings: Readings) -> list[Fact]:
    """Select the facts that an overview shows, in their order."""
    known = {fact.quantity.tag: fact for fact in facts_of(readings)}
    return [known[tag] for tag in _WATCHED if tag in known]


def _rows(readings: Readings) -> Iterator[tuple[str, str, str, str]]:
    """Yield the label, last value, spark line and trend of each watched quantity."""
    for fact in _watched(readings):
        curve = fact.quantity.curve(readings)
        after = [fact.trend] if fact.trend else [f"from {fact.phase.start.words()}"]
        if fact.phase.last.step < readings[-1].step:
            after.append(f"known to step {fact.phase.last.step:,}")
        line = spark(curve.values, statistics.median(curve.margins))
        yield fact.quantity.label, fact.phase.last.words(), line, ", ".join(after)
    name, loss = furthest_loss(readings)
    if loss:
        after = [f"from {number(loss.values[0])}"] if len(loss) > 1 else []
        if loss.steps[-1] < readings[-1].step:
            after.append(f"known to step {loss.steps[-1]:,}")  # the last reading has no next batch
        yield name, number(loss.values[-1]), spark(loss.values), ", ".join(after)
    profile = readings[-1].column("anisotropy").by_layer()
    if profile:
        top, values = max(profile, key=profile.__getitem__), list(profile.values())
        title = readings.text_of("anisotropy").title
        ends = f"{number(values[0])} to {number(values[-1])}"
        highest = f"highest {number(profile[top])} at layer {top}"
        yield f"{title} by layer", ends, spark(values), highest


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


def format_line(reading: Reading, readings: Readings | Sequence[Reading]) -> str:
    """Format a reading as one line of plain text.

    Args:
        reading: Reading to describe.
        readings: Readings of the run; those after `reading` are ignored.

    Returns:
        For instance "step 128: Intrinsic dimension (TwoNN) 7.4 ± 0.1 (expanding), Anisotropy 0.32 ±
        0.01 (level)"; the number of values if none of these was measured.
    """
    runs = readings.runs if isinstance(readings, Readings) else []
    past = [other for other in readings if other.step <= reading.step] or [reading]
    parts = [
        f"{fact.quantity.title} {fact.phase.last.words()}"
        + f" ({fact.word})" * (fact.word != "unknown")
        for fact in _watched(Readings(runs, past))
        if fact.phase.last.step == reading.step
    ]
    name, loss = furthest_loss(Readings(runs, [reading]))
    parts += [f"{name} {number(loss.values[-1])}"] if loss else []
    return f"step {reading.step}: {', '.join(parts) or f'{len(reading.values)} values'}"


class Printer(Memory):
    """Sink that prints each reading as one line, formatted by `format_line`."""

    _runs: tuple[dict[str, Any], ...] = ()

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep the description of the run, which names its metrics."""
        self._runs = (dict(description),)

    def write(self, reading: Reading) -> None:
        """Print a reading."""
        super().write(reading)
        shown = Readings([*self._runs], list(self.readings)).of_stack()
        # A rich console would write into the progress bar of another one.
        sys.stdout.write(printable(format_line(shown[-1], shown)) + "\n")
        sys.stdout.flush()


def safe(words: str, style: str = "") -> Text:
    """Make printable text from words of a record, so that they cannot control the terminal."""
    return Text(printable(words), style)


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal below 10 %."""
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def ago(seconds: float) -> str:
    """Format the time since an event in a suitable unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
