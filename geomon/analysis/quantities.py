"""Quantities: every value of a run that pages can draw over training, by its tag."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from geomon.analysis.curves import Curve, curve_of, plain_curve
from geomon.record import (
    NAN,
    OVERHEAD,
    MetricText,
    Reading,
    Readings,
    headlines_of,
    printable,
    shortened,
    tags,
)

_LOSSES = {tags.LOSS: "Training loss", tags.PROBE_LOSS: "Loss on the probe"}


@dataclass(frozen=True)
class Quantity:
    """A value of each reading of a run.

    Attributes:
        tag: Tag of the value (of the mean over layers), or its headline name if it has no tag.
        title: Title of the value.
        unit: Its unit; "" for a pure number.
        metric: Name of the metric; "" for a value of the run as a whole.
        part: Name of a part of the metric, such as "k32". Defaults to "", for its value.
        chart: Title of the chart that shows it by default. Defaults to "", if it is shown only on
            request.
        value: Function of a reading. Defaults to None, for the mean over layers, which has a
            margin.
    """

    tag: str
    title: str
    unit: str = ""
    metric: str = ""
    part: str = ""
    chart: str = ""
    value: Callable[[Reading], float] | None = None

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over layers, which have values of their own."""
        return self.value is None

    @property
    def has_null(self) -> bool:
        """Whether a null of its metric may be compared with it."""
        return self.is_mean and not self.part

    @property
    def label(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def words(self) -> str:
        """The title, with what a mean is over."""
        return f"{self.title}, mean over layers" if self.is_mean else self.title

    @property
    def name(self) -> str:
        """Its name below the title of its chart."""
        return shortened(self.words, self.chart.removesuffix(f" ({self.unit})"))

    def curve(self, readings: Iterable[Reading], layer: int | None = None) -> Curve:
        """Collect the curve over training.

        Args:
            readings: Readings of the run.
            layer: Index of a layer. Defaults to None, for the value of all layers.
        """
        if self.value is not None and layer is None:
            return plain_curve(readings, self.value)
        return curve_of(readings, self.metric, part=self.part, layer=layer)


def quantities_of(readings: Readings) -> dict[str, Quantity]:
    """List the quantities of a run by tag: metrics, logged values, and geomon's cost.

    Quantities that charts show by default come first. Deviations over splits, and quantities
    without any value, are left out. Texts of the record are made printable.

    Args:
        readings: Readings of a run, of one stack.
    """
    parts: dict[str, dict[str, None]] = {}
    names: dict[str, None] = {}
    for reading in readings:
        names |= dict.fromkeys(reading.training)
        for metric, column in reading.columns.items():
            parts.setdefault(metric, {"": None}).update(dict.fromkeys(column.parts))
    found: dict[str, Quantity] = {}
    for metric in dict.fromkeys([*(name for name in readings.metrics if name in parts), *parts]):
        found |= _of_metric(metric, parts[metric], readings.text_of(metric))
    for name in names:
        found[tags.training_tag(name)] = _of_training(name, readings)
    found[tags.OVERHEAD] = Quantity(
        tags.OVERHEAD, OVERHEAD.words.capitalize(), value=OVERHEAD.value
    )
    known = {tag: each for tag, each in found.items() if _has_values(each, readings)}
    return dict(sorted(known.items(), key=lambda item: not item[1].chart))


def _of_metric(metric: str, parts: Iterable[str], text: MetricText) -> dict[str, Quantity]:
    """List the quantities of a metric: means of its value and of its parts, and its headlines."""
    unit = printable(text.unit)
    found: dict[str, Quantity] = {}
    for part in parts:
        tag, title = tags.mean_tag(metric, part), printable(text.title_of(part))
        if part.rpartition("/")[2] != "std":
            found[tag] = Quantity(tag, title, unit, metric, part)
    for each in headlines_of(metric, text):
        if each.chart:  # the ends of an interval have no chart, because they form a band
            tag = each.tag or each.name
            made = Quantity(tag, printable(each.words), unit, metric, value=each.value)
            found[tag] = replace(found.get(tag, made), chart=printable(each.chart))
    return found


def _of_training(name: str, readings: Readings) -> Quantity:
    """Return the quantity that the training logs by a name; losses have a chart by default."""
    tag, value = tags.training_tag(name), logged(name)
    if name in _LOSSES:
        title = _LOSSES[name]
        return Quantity(tag, title, loss_unit(readings), chart=title, value=value)
    return Quantity(tag, printable(f"Training {name}"), value=value)


def loss_unit(readings: Readings) -> str:
    """Return the unit of a run's losses, its setting `loss_unit`; "" if it has none.

    Args:
        readings: Readings of a run.
    """
    run = readings.runs[-1] if readings.runs else {}
    return printable(str(run.get(tags.training_tag("loss_unit"), "")))


def _has_values(quantity: Quantity, readings: Readings) -> bool:
    if quantity.value is not None:
        return any(math.isfinite(quantity.value(reading)) for reading in readings)
    columns = (reading.column(quantity.metric, quantity.part) for reading in readings)
    return any(column.layers or math.isfinite(column.mean) for column in columns)


def logged(name: str) -> Callable[[Reading], float]:
    """Return the function of a reading that gives what the training logs by a name."""
    return lambda reading: reading.training.get(name, NAN)
