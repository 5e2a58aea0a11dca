"""Facts of a run: each headline quantity now, at its peak and at its start, and how it goes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from geomon.analysis.curves import single_source
from geomon.analysis.phase import Phase
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.record import Reading, Readings

# Metrics of the intrinsic dimension, which expands and compresses; all others rise and fall.
DIMENSIONS = ("twonn", "twonn_distinct", "gride")
_OTHER_WORDS = {"expanding": "rising", "compressing": "falling"}


@dataclass(frozen=True)
class Fact:
    """One headline quantity of a run.

    Attributes:
        quantity: What it is.
        phase: Its last value, peak and start, and its phase.
        null: Value of rows without structure, in words; "" if it is not known.
    """

    quantity: Quantity
    phase: Phase
    null: str = ""

    @property
    def word(self) -> str:
        """Name of the phase; "rising" and "falling" for what is no dimension."""
        name = self.phase.name
        is_dimension = self.quantity.metric in DIMENSIONS
        return name if is_dimension else _OTHER_WORDS.get(name, name)

    @property
    def now(self) -> str:
        """The last value with its margin and unit, and its step."""
        last = self.phase.last
        unit = f" {self.quantity.unit}" * bool(self.quantity.unit)
        return f"{last.words()}{unit} at step {last.step:,}"

    @property
    def trend(self) -> str:
        """The phase with the change that it follows from; "" if it is unknown."""
        words = self.phase.words()
        return "" if self.word == "unknown" else words.replace(self.phase.name, self.word, 1)

    @property
    def sentence(self) -> str:
        """The fact in one sentence, the same on all pages."""
        first = ", ".join(filter(None, (self.now, self.trend)))
        parts = filter(None, (first, self.phase.course(), self.null))
        return f"{self.quantity.words}: {'; '.join(parts)}."


def facts_of(readings: Iterable[Reading]) -> list[Fact]:
    """List the facts of a run, one for each headline quantity that was measured.

    Args:
        readings: Readings of a run, in any order. Those of the source that the run used most are
            taken, of the main stack.
    """
    runs = readings.runs if isinstance(readings, Readings) else []
    selected = Readings(runs, single_source(readings))
    found = []
    for quantity in quantities_of(selected).values():
        curve = quantity.curve(selected)
        if quantity.chart and quantity.metric and len(curve):
            found.append(Fact(quantity, curve.phase(), _null_words(selected, quantity)))
    return found


def _null_words(readings: Readings, quantity: Quantity) -> str:
    if quantity.part or not quantity.is_mean:
        return ""
    found = null_of(readings, quantity.metric)
    return found[1] if found else ""


def null_of(readings: Readings, metric: str) -> tuple[float, str] | None:
    """Return the last null of a metric, the value of rows without structure, and its words.

    Args:
        readings: Readings of a run, of one stack.
        metric: Name of a metric.
    """
    for reading in reversed(readings):
        null = reading.column(metric).whole.get("null", math.nan)
        if math.isfinite(null):
            return null, f"{readings.text_of(metric).null_label}: {null:.2g}"
    return None


__all__ = ["DIMENSIONS", "Fact", "facts_of", "null_of"]
