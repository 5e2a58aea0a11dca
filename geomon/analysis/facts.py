"""Facts of a run: each headline quantity now, at its peak and at its start, and its trend."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geomon.analysis.curves import single_source
from geomon.analysis.numbers import significant
from geomon.analysis.phase import Phase, Point, phase_of
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.record import Reading, Readings

# Metrics of the intrinsic dimension, which expand and compress; all others rise and fall.
_DIMENSIONS = ("twonn", "twonn_distinct", "gride")
_ARROWS = {"expanding": "↑", "compressing": "↓", "falling": "↓", "level": "→", "unclear": "?"}
_OTHER_WORDS = {"expanding": "rising", "compressing": "falling"}


@dataclass(frozen=True)
class Fact:
    """One headline quantity of a run.

    Attributes:
        quantity: The quantity.
        phase: Its last value, peak and start, and its phase.
        null: Value of rows without structure, in words. Defaults to "", if unknown.
    """

    quantity: Quantity
    phase: Phase
    null: str = ""

    @property
    def word(self) -> str:
        """Name of the phase, with "rising" and "falling" for quantities other than dimensions."""
        name = self.phase.name
        is_dimension = self.quantity.metric in _DIMENSIONS
        return name if is_dimension else _OTHER_WORDS.get(name, name)

    @property
    def now(self) -> str:
        """The last value with its margin, unit and step."""
        words = " ".join(filter(None, (self.phase.last.words(), self.quantity.unit)))
        return f"{words} at step {self.phase.last.step:,}"

    @property
    def start(self) -> str:
        """The first value with its margin, unless it is the only one."""
        return self.phase.start.words() if self.phase.count > 1 else ""

    @property
    def turn(self) -> str:
        """Peak and low with their steps, if they differ from the first and the last reading."""
        return ", ".join(turn.words() for turn in self.phase.turns)

    @property
    def arrow(self) -> str:
        """The phase in one character: "↑", "↓", "→", or "?" if it is unclear; "" if unknown."""
        return _ARROWS.get(self.phase.name, "")

    @property
    def trend(self) -> str:
        """The phase with the change that it follows from; "" if unknown."""
        if self.word == "unknown":
            return ""
        return self.phase.words().replace(self.phase.name, self.word, 1)

    @property
    def sentence(self) -> str:
        """The fact in one sentence, the same on all pages."""
        first = ", ".join(filter(None, (self.now, self.trend)))
        parts = filter(None, (first, self.phase.course(), self.null))
        return f"{self.quantity.words}: {'; '.join(parts)}."


class FactLog:
    """The curves of a run's headline quantities, with few numbers per quantity and reading.

    Args:
        runs: Descriptions of the starts of the run, which hold the names of its metrics. Defaults
            to ().
    """

    def __init__(self, runs: Sequence[Mapping[str, Any]] = ()) -> None:
        self._runs = [dict(run) for run in runs]
        self._quantities: dict[str, Quantity] = {}
        self._nulls: dict[str, str] = {}
        # By source (sources see different tokens), tag and step.
        self._points: dict[str, dict[str, dict[int, Point]]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, readings: Sequence[Reading]) -> None:
        """Process the next readings, all from one source.

        If the run went back to an earlier step, its later readings are forgotten; if it was resumed
        with other settings, its earlier ones are.

        Args:
            readings: Readings, steps ascending.
        """
        some = Readings(self._runs, [*readings])
        if not some:
            return
        first, source = some[0].step, some[0].source
        # Readings before a resume with other settings are of other rows.
        begun = max((at for at, _ in some.breaks if at <= some[-1].step), default=0)
        self._counts[source] += len(some)
        points = self._points.setdefault(source, {})
        for tag, kept in points.items():
            points[tag] = {at: found for at, found in kept.items() if begun <= at <= first}
        for tag, quantity in quantities_of(some).items():
            if quantity.chart and quantity.metric:
                new = quantity.curve(some).points
                points.setdefault(tag, {}).update(
                    {point.step: point for point in new if point.step >= begun}
                )
                self._quantities[tag] = quantity
                null = null_of(some, quantity.metric) if quantity.has_null else None
                self._nulls[tag] = null[1] if null else self._nulls.get(tag, "")

    def facts(self) -> list[Fact]:
        """List the facts so far, from the source that the run used most."""
        most = max(reversed(self._counts), key=self._counts.__getitem__, default="")
        points = self._points.get(most, {})
        return [
            Fact(quantity, phase_of([*found.values()]), self._nulls[tag])
            for tag, quantity in self._quantities.items()
            if (found := points.get(tag))
        ]


def facts_of(readings: Iterable[Reading]) -> list[Fact]:
    """List the facts of a run, one for each headline quantity that was measured.

    Args:
        readings: Readings of a run, in the order in which they were written. Only the main stack
            and the most common source are used.
    """
    log = FactLog(readings.runs if isinstance(readings, Readings) else [])
    log.add(single_source(readings))
    return log.facts()


def null_of(readings: Readings, metric: str) -> tuple[float, str] | None:
    """Return the last null of a metric, the value of rows without structure, and its words.

    Args:
        readings: Readings of a run, of one stack.
        metric: Name of a metric.
    """
    for reading in reversed(readings):
        null = reading.column(metric).whole.get("null", math.nan)
        if math.isfinite(null):
            return null, f"{readings.text_of(metric).null_label}: {significant(null, 2)}"
    return None
