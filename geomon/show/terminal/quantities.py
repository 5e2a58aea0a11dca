"""What a chart of the terminal can show of a record, by the titles that the record gives."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from geomon.analysis import Curve, curve_of, mean_abs_over_heads
from geomon.analysis.curves import plain_curve, training_curve
from geomon.record import Reading, tags
from geomon.record.columns import MetricText
from geomon.record.headline import TRUST

# The heads that are shown before one has chosen others.
_FIRST_OF_HEADS = "attention_entropy"


class Quantity(NamedTuple):
    """A value of each reading that a chart draws over steps.

    Attributes:
        metric: Name of the metric, or of a value of the run as a whole.
        part: Name of a part of the metric, for instance "k32"; "" for its value.
        name: Title of it with its unit.
        group: "training" or "geomon" for a value of the run as a whole; "" for a metric.
        has_layers: Whether layers have the value.
        has_mean: Whether a mean over layers has it.
        is_signed: Whether over all heads its sizes are averaged, for signs would cancel.
    """

    metric: str
    part: str = ""
    name: str = ""
    group: str = ""
    has_layers: bool = False
    has_mean: bool = False
    is_signed: bool = False

    @property
    def is_dimension(self) -> bool:
        """Whether it is the intrinsic dimension, whose phase is told."""
        return (self.metric, self.part, self.group) == ("twonn", "", "")

    def title(self, layer: int | None = None) -> str:
        """Name the quantity at a layer, or over all of them, in words.

        Args:
            layer: Number of a layer; None for the mean.

        Example:
            >>> Quantity("twonn", name="intrinsic dimension", has_layers=True).title(3)
            'intrinsic dimension, layer 3'
        """
        name = self.name or self.metric
        if layer is not None:
            return f"{name}, layer {layer}"
        if self.is_signed:
            return f"{name}, size, mean over heads"
        return f"{name}, mean over layers" if self.has_layers else name

    def curve(self, readings: Iterable[Reading], layer: int | None = None) -> Curve:
        """Extract the curve of the quantity.

        Args:
            readings: Readings of one source.
            layer: Number of a layer; None for the mean.
        """
        if self.group == "training":
            return training_curve(readings, self.metric)
        if self.group:
            return plain_curve(readings, _OF_RUN[self.metric])
        if layer is None and self.is_signed:
            return mean_abs_over_heads(readings, self.metric)
        return curve_of(readings, self.metric, part=self.part, layer=layer)


# What geomon costs, as functions of a reading.
_OF_RUN: dict[str, Callable[[Reading], float]] = {
    "overhead": lambda reading: reading.overhead,
    "seconds": lambda reading: reading.seconds,
}


class Contents(NamedTuple):
    """What a record holds for charts.

    Attributes:
        quantities: Quantities that can be drawn over steps.
        layers: Numbers of the layers of each quantity that has any.
        with_heads: Names of the metrics that heads have.
    """

    quantities: list[Quantity]
    layers: dict[Quantity, list[int]]
    with_heads: list[str]


def contents_of(
    readings: Iterable[Reading], texts: Mapping[str, MetricText] = MappingProxyType({})
) -> Contents:
    """List what charts can show: metrics that have charts first, then others, then the run's own.

    Args:
        readings: Readings of a record, of one stack.
        texts: How pages speak of each metric, in the order in which they are listed.
    """
    places = {metric: place for place, metric in enumerate(texts)}

    def text_of(metric: str) -> MetricText:
        return texts.get(metric, MetricText(metric))

    def rank(quantity: Quantity) -> tuple[bool, int]:
        return not text_of(quantity.metric).charts, places.get(quantity.metric, len(places))

    layers: dict[tuple[str, str], set[int]] = {}
    means: set[tuple[str, str]] = set()
    heads: dict[str, None] = {}
    logged: dict[str, None] = {}
    for reading in readings:
        logged |= dict.fromkeys(reading.training)
        for metric, column in reading.columns.items():
            if column.heads:
                heads[metric] = None
            for part, own in {"": column, **column.parts}.items():
                depths, has_mean = own.depths(), not math.isnan(own.mean)
                if part.rpartition("/")[2] in TRUST or not (depths or has_mean):
                    continue
                layers.setdefault((metric, part), set()).update(depths)
                if has_mean:
                    means.add((metric, part))
    found = {}
    for key in _one_for_each_metric(layers):
        text = text_of(key[0])
        name = text.title_of(key[1]) + f" ({text.unit})" * bool(text.unit)
        quantity = Quantity(
            *key, name, has_layers=bool(layers[key]), has_mean=key in means,
            is_signed="size" in text.charts,
        )  # fmt: skip
        found[quantity] = sorted(layers[key])
    of_run = [Quantity(name, name=f"training {name}", group="training") for name in logged]
    of_run += [Quantity(name, name=f"geomon's {name}", group="geomon") for name in _OF_RUN]
    return Contents(
        [*sorted(found, key=rank), *of_run],
        {quantity: known for quantity, known in found.items() if known},
        sorted(heads, key=lambda metric: metric != _FIRST_OF_HEADS),
    )


def _one_for_each_metric(keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out parts where the metric has a value of its own; of scales, keep the largest."""
    plain = {metric for metric, part in keys if not part}
    scales = {key: int(key[1][1:]) for key in keys if key[1][1:].isdigit()}
    largest = {metric: max(k for key, k in scales.items() if key[0] == metric)
               for metric, _ in scales}  # fmt: skip
    return [
        key
        for key in keys
        if not key[1] or (key[0] not in plain and scales.get(key, -1) == largest.get(key[0], -1))
    ]


def loss_of(quantities: Sequence[Quantity]) -> Quantity | None:
    """Find the loss of the training, or else another value that it logs; None without any.

    Args:
        quantities: Quantities of a record.
    """
    logged = [quantity for quantity in quantities if quantity.group == "training"]
    return min(logged, key=lambda quantity: quantity.metric != tags.LOSS, default=None)
