"""Tables of plain text, at most 100 characters wide: readings as they come, and a whole run."""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from geomon.analysis import (
    Fact,
    FactLog,
    Quantity,
    alert_sentences,
    facts_of,
    quantities_of,
    significant,
    summarise,
)
from geomon.record import Reading, Readings, printable

# Tags of the quantities that terminals show, in this order.
_WATCHED = (
    "twonn/mean", "twonn_distinct/mean", "anisotropy/mean", "attention_entropy/mean",
    "qk_cosine_size",
)  # fmt: skip
# Titles that are too long for a column.
_SHORT = {
    "twonn_distinct/mean": "Dimension, distinct tokens", "qk_cosine_size": "Query-key cosine",
    "training/probe_loss": "Probe loss",
}  # fmt: skip
_WIDTH = 100
# Widths of the columns of readings: the step, means with margin and arrow, other numbers.
_STEP, _MEAN, _NUMBER = 7, 13, 9
# A table of readings has its head again after this many rows.
_REPEATED = 25
# Head and widths of the columns of a run's table.
_RUN_HEAD = ("", "start", "peak or low", "now", "trend")
_RUN_WIDTHS = (20, 17, 18, 13, 24)
# Spaces at which no line of a cell ends: "6.9 ± 0.4", "at step 108".
_GLUE = re.compile(r" (?=±|step)|(?<=±) |(?<=step) ")
_ASCII = str.maketrans("▁▂▃▄▅▆▇█·±→←↑↓−–…", "_.-~=+*#|+><^v--.")


class Printer:
    """Sink that prints each reading as a row of a table, at most 100 characters wide.

    The columns are the step, at most five headline values, each with the half width of its 95 %
    interval and an arrow for its phase ("↑", "↓", "→", or "?" if it is unclear), and the losses.
    """

    def __init__(self) -> None:
        self._runs: list[dict[str, Any]] = []
        self._facts = FactLog()
        self._losses: dict[str, Quantity] = {}
        self._head: list[str] = []
        self._rows = 0  # since the head was printed

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep the description of the run, which names its metrics."""
        self._runs = [dict(description)]
        self._facts = FactLog(self._runs)

    def write(self, reading: Reading) -> None:
        """Print a reading."""
        columns = list(self._columns(reading))
        while sum(width + 2 for *_, width in columns) > _width() + 2:
            columns.pop()
        titles, cells, widths = zip(*columns, strict=True)
        lines = ["  ".join(map(str.rjust, cells, widths)).rstrip()]
        head = [*_lines(titles, widths, str.rjust), "  ".join("-" * width for width in widths)]
        if head != self._head or self._rows == _REPEATED:
            lines, self._head, self._rows = head + lines, head, 0
        self._rows += 1
        # A rich console would write into the progress bar of another one.
        write_text("\n".join(map(printable, lines)))

    def close(self) -> None:
        """Do nothing, because rows are printed at once."""

    def _columns(self, reading: Reading) -> Iterator[tuple[str, str, int]]:
        """Yield the title, cell and width of each column."""
        self._facts.add([reading])
        known = quantities_of(Readings(self._runs, [reading])).items()
        self._losses |= {tag: each for tag, each in known if each.chart and not each.metric}
        step = f"{reading.step:,}"
        yield "Step", step, max(_STEP, len(step))
        for loss in self._losses.values():
            value = loss.value(reading) if loss.value else math.nan
            words = f"{value:.2f}" if 0.1 <= abs(value) < 1000 else significant(value, 3)
            cell = words if math.isfinite(value) else ""  # the last reading has no next batch
            yield short_title(loss), cell, _NUMBER
        facts = watched(self._facts.facts())
        for fact in facts:
            quantity, last = fact.quantity, fact.phase.last
            width = _MEAN if quantity.is_mean else _NUMBER
            words = last.words().replace(" ", "")
            if len(words) > width - 2:  # more digits than a reader needs
                words = significant(last.value, 4)
            cell = f"{words} {fact.arrow or ' '}" if last.step == reading.step else ""
            yield short_title(quantity), cell, width
        if not facts:
            yield "Values", f"{len(reading.values)}", _NUMBER


def watched(facts: Sequence[Fact]) -> list[Fact]:
    """Select at most five facts that a terminal shows, in their order."""
    known = {fact.quantity.tag: fact for fact in facts}
    found = [known[tag] for tag in _WATCHED if tag in known]
    return (found or list(facts))[: len(_WATCHED)]


def run_words(readings: Readings, facts: Sequence[Fact]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the table of a run, its head first, and the sentences that it does not hold."""
    rows = [
        (fact.quantity.label, fact.start, fact.turn, fact.phase.last.words(), fact.trend)
        for fact in facts
    ]
    known = {fact.sentence for fact in facts}
    others = [words for words in summarise(readings, facts) if words not in known]
    return [_RUN_HEAD, *rows], others


def run_table(readings: Readings) -> str:
    """Describe a run as a table of plain text, at most 100 characters wide.

    Args:
        readings: Readings of a run.

    Returns:
        A row for each headline quantity: its start, its peak or low, its last value and its trend;
        then the other sentences of `summarise`, such as alerts and the cost.
    """
    (head, *rows), others = run_words(readings, facts_of(readings))
    widths = [width * _width() // _WIDTH for width in _RUN_WIDTHS]
    table = [head, ["-" * width for width in widths], *rows] if rows else []
    lines = [printable(line) for row in table for line in _lines(row, widths, str.ljust)]
    alerts = alert_sentences(readings)
    for words in others:
        told = words.replace("\n", "\n  ").split("\n") if words in alerts else [words]
        lines += [fit(printable(each)) for each in told]
    return "\n".join(lines)


def fit(text: str) -> str:
    """Wrap a text to the width of the terminal; files and pipes get it in one line."""
    columns = _terminal_width()
    return text if not columns else textwrap.fill(
        text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def _width() -> int:
    """Return the width of tables, in characters: 100, or less on a narrow terminal."""
    return min(_WIDTH, _terminal_width() or _WIDTH)


def _terminal_width() -> int:
    """Return the width of the terminal; 0 if the output is none, or an object of a program."""
    is_terminal = getattr(sys.stdout, "isatty", bool)()
    return shutil.get_terminal_size().columns if is_terminal else 0


def write_text(text: str) -> None:
    """Write a text to standard output, without characters that it lacks."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    sys.stdout.write(f"{text if is_unicode else text.translate(_ASCII)}\n")
    sys.stdout.flush()


def short_title(quantity: Quantity) -> str:
    """Return a title that fits into a column, with its unit."""
    return ", ".join(filter(None, (_SHORT.get(quantity.tag, quantity.title), quantity.unit)))


def _lines(cells: Sequence[str], widths: Sequence[int], adjust: Any) -> list[str]:
    """Wrap cells to their widths, without a break within a value and its margin."""
    columns = [
        textwrap.wrap(_GLUE.sub("\xa0", cell), width, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    return [
        "  ".join(map(adjust, row, widths)).rstrip().replace("\xa0", " ")
        for row in zip_longest(*columns, fillvalue="")
    ]
