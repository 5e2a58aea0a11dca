"""Quantities: every value of a run that pages can draw over training, by its tag."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from geomon.analysis.curves import Curve, curve_of, plain_curve
from geomon.record import Reading, Readings, tags
from geomon.record.headline import OVERHEAD, PROBE_LOSS, beside, headlines_of
from geomon.record.printable import printable

_LOSSES = {tags.LOSS: "training loss", tags.PROBE_LOSS: PROBE_LOSS.chart}


@dataclass(frozen=True)
class Quantity:
    """A value of each reading of a run.

    Attributes:
        tag: Tag of the value, that of the mean over layers; its headline name where it has no tag.
        title: What it is, in words.
        unit: Its unit; "" for a pure number.
        metric: Name of the metric; "" for a value of the run as a whole.
        part: Name of a part of the metric, "k32" say; "" for its value.
        chart: Title of the chart that shows it by default; "" where it is shown only if chosen.
        words: What it is beside the other curves of that chart.
        value: Function of a reading; None for the mean over layers, which has a margin.
    """

    tag: str
    title: str
    unit: str = ""
    metric: str = ""
    part: str = ""
    chart: str = ""
    words: str = ""
    value: Callable[[Reading], float] | None = None

    @property
    def label(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def curve(self, readings: Iterable[Reading], layer: int | None = None) -> Curve:
        """Collect the curve over training.

        Args:
            readings: Readings of the run.
            layer: Number of a layer, for a value of layers; None for the value of all.
        """
        if self.value is None or layer is not None:
            return curve_of(readings, self.metric, part=self.part, layer=layer)
        return plain_curve(readings, self.value)


def quantities_of(readings: Readings) -> dict[str, Quantity]:
    """List the quantities of a run by tag: those of metrics, what the training logs, geomon's cost.

    Texts of the record are made printable. A quantity may have no value at any step.

    Args:
        readings: Readings of a run, of one stack.
    """
    parts: dict[str, dict[str, None]] = {}
    logged: dict[str, None] = {}
    for reading in readings:
        logged |= dict.fromkeys(reading.training)
        for metric, column in reading.columns.items():
            parts.setdefault(metric, {"": None}).update(dict.fromkeys(column.parts))
    found: dict[str, Quantity] = {}
    for metric in dict.fromkeys([*(name for name in readings.metrics if name in parts), *parts]):
        text = readings.text_of(metric)
        unit, chart = printable(text.unit), printable(readings.text_of(beside(metric)).title)
        for part in parts[metric]:
            tag = tags.mean_tag(metric, part)
            found[tag] = Quantity(tag, printable(text.title_of(part)), unit, metric, part)
        for each in headlines_of(metric, text):
            if each.chart:  # the ends of the interval have none: they are a band
                tag, words = each.tag or each.name, printable(each.words)
                made = Quantity(tag, words, unit, metric, value=each.value)
                found[tag] = replace(found.get(tag, made), chart=chart, words=words)
    for name in logged:
        chart, tag = _LOSSES.get(name, ""), tags.training_tag(name)
        title = chart or printable(f"training {name}")
        found[tag] = Quantity(tag, title, chart=chart, words=title, value=_logged(name))
    found[tags.OVERHEAD] = Quantity(tags.OVERHEAD, OVERHEAD.words, value=OVERHEAD.value)
    return found


def _logged(name: str) -> Callable[[Reading], float]:
    return lambda reading: reading.training.get(name, float("nan"))


__all__ = ["Quantity", "quantities_of"]
