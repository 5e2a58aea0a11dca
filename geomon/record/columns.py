"""Columns: the values of a metric at all layers and heads of a reading, and their tags.

A reading holds a `Column` for each metric of each stack of blocks. A tag such as `twonn/layer_03`
is built from a column when a logger or a user asks for it by name, and is never parsed.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from geomon.record import tags

# A value that is not finite is null in JSON, and NaN in memory.
if TYPE_CHECKING:
    Number = float
else:
    Number = float | None

NAN = math.nan


@functools.cache
def student(degrees: int, chance: float) -> float:
    """Return the value that Student's distribution exceeds, on either side, by this chance.

    Args:
        degrees: Degrees of freedom.
        chance: The probability.
    """
    from scipy import special  # type: ignore[import-untyped]  # slow to load

    return float(special.stdtrit(degrees, 1 - chance / 2))


def margin(values: Iterable[float], degrees: int = 7, chance: float = 0.05) -> float:
    """Compute the half width of an interval from the values without each group.

    It is t sqrt((G - 1) / G sum (value_g - mean)^2), where t is the quantile of Student's
    distribution with G - 1 degrees of freedom (the grouped jackknife; Quenouille 1956, Tukey 1958).
    The values may belong to a difference, or of any other sum, of readings that leave out the
    same groups.

    Args:
        values: Value without each of the G = 8 groups.
        degrees: Degrees of freedom. Defaults to 7.
        chance: Probability that the interval misses the value. Defaults to 0.05, for 95 %.

    Returns:
        At least 0; NaN if there are no values or any is not finite.

    Example:
        >>> round(margin([1.0, 3.0] * 4), 3) # 2.365 sqrt(7/8 x 8)
        6.256
    """
    found = [*map(float, values)]
    if not found or not all(map(math.isfinite, found)):
        return math.nan
    mean = [math.fsum(found) / len(found)] * len(found)
    return student(degrees, chance) * math.sqrt(1 - 1 / len(found)) * math.dist(found, mean)


def number(value: Any) -> Any:
    """Replace None by NaN in a number, or in a list or dict of numbers.

    Args:
        value: A number, or a list or dict of numbers, as read from JSON.
    """
    if isinstance(value, list):
        return [*map(number, value)] if None in value or _is_nested(value) else value
    if isinstance(value, dict):
        return {name: number(each) for name, each in value.items()}
    return NAN if value is None else value


def _is_nested(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], list)


class Column(msgspec.Struct, omit_defaults=True):
    """Values of one metric, or of one part of it, in one stack of blocks.

    Attributes:
        first: Depth of the first entry of `layers`, `margin` and `heads`: 1 if the input of the
            first block lacks a value. Defaults to 0.
        layers: Value at each depth; NaN if it could not be measured. For a metric of heads, the
            mean over heads.
        margin: Half width of the 95 % interval at each depth; empty if there are none.
        heads: Values of the heads at each depth; empty for a metric without heads.
        mean: Mean over all layers except layer 0.
        mean_margin: Half width of the 95 % interval of the mean.
        mean_without: Mean without each of the 8 groups of sequences, from which `mean_margin`
            follows; empty if there is none.
        parts: Columns of the metric's parts by name: "n", "k32", "std".
        whole: Numbers of the stack as a whole by name: "null".
    """

    first: int = 0
    layers: list[Number] = []
    margin: list[Number] = []
    heads: list[list[Number]] = []
    mean: Number = NAN
    mean_margin: Number = NAN
    mean_without: list[Number] = []
    parts: dict[str, "Column"] = {}
    whole: dict[str, Number] = {}

    def __post_init__(self) -> None:
        """Replace JSON nulls by NaN."""
        for name in ("layers", "margin", "heads", "mean", "mean_margin", "whole"):
            setattr(self, name, number(getattr(self, name)))

    def at(self, layer: int | None) -> float:
        """Return the value at a depth, or the mean over layers; NaN if there is none.

        Args:
            layer: Index of the layer, or None for the mean.
        """
        return self.mean if layer is None else _entry(self.layers, layer - self.first)

    def margin_at(self, layer: int | None) -> float:
        """Return the half width of the 95 % interval of `at`; NaN if there is none.

        Args:
            layer: Index of the layer, or None for the mean.
        """
        return self.mean_margin if layer is None else _entry(self.margin, layer - self.first)

    def heads_at(self, layer: int) -> list[float]:
        """Return the values of the heads at a depth; empty if there are none."""
        place = layer - self.first
        return self.heads[place] if 0 <= place < len(self.heads) else []

    def depths(self) -> range:
        """Return the depths of the entries of `layers`."""
        return range(self.first, self.first + len(self.layers))

    def by_layer(self) -> dict[int, float]:
        """Return the finite values by depth."""
        pairs = zip(self.depths(), self.layers, strict=True)
        return {layer: value for layer, value in pairs if math.isfinite(value)}

    def mean_size(self) -> float:
        """Return the mean absolute value over all heads; NaN if there are none."""
        sizes = [abs(value) for value in self.by_head().values()]
        return math.fsum(sizes) / len(sizes) if sizes else NAN

    def by_head(self) -> dict[tuple[int, int], float]:
        """Return the finite values of heads by depth and head."""
        return {
            (layer, head): value
            for layer, heads in enumerate(self.heads, self.first)
            for head, value in enumerate(heads)
            if math.isfinite(value)
        }

    def extreme(self, kind: str, layer: int | None = None) -> float:
        """Return the smallest or largest value of the heads, in one layer or in all except layer 0.

        Args:
            kind: "min" or "max".
            layer: Index of the layer. Defaults to None, for all except layer 0.
        """
        deep = self.heads[max(0, 1 - self.first) :]
        rows = deep if layer is None else [self.heads_at(layer)]
        found = [value for heads in rows for value in heads if math.isfinite(value)]
        return (min if kind == "min" else max)(found, default=NAN)


def _entry(values: list[float], place: int) -> float:
    return values[place] if 0 <= place < len(values) else NAN


EMPTY = Column()  # without values

Columns = dict[str, Column]  # by metric
Stacks = dict[str, Columns]  # by name of the stack; "" for the only one of a model


class Place(NamedTuple):
    """The place of a value in the columns of a reading.

    Attributes:
        stack: Name of the stack.
        metric: Name of the metric.
        part: Name of the part. Defaults to "", for the value itself.
        layer: Depth. Defaults to None, for the mean over layers.
        kind: "value", "margin", "head", "min" or "max" over heads, or "whole". Defaults to "value".
        head: Index of the head, if the kind is "head".
        name: Name of the number, if the kind is "whole".
    """

    stack: str
    metric: str
    part: str = ""
    layer: int | None = None
    kind: str = "value"
    head: int = 0
    name: str = ""

    @property
    def tag(self) -> str:
        """The tag of the value."""
        if self.kind == "whole":
            plain = f"{self.metric}/{self.name}"
        else:
            ending = {"value": "", "head": tags.head_part(self.head)}.get(self.kind, self.kind)
            part = "/".join(filter(None, (self.part, ending)))
            plain = (
                tags.mean_tag(self.metric, part)
                if self.layer is None
                else tags.layer_tag(self.metric, self.layer, part)
            )
        return tags.in_stack(plain, self.stack)

    def find(self, stacks: Mapping[str, Mapping[str, Column]]) -> float:
        """Return the value at this place; NaN if there is none.

        Args:
            stacks: Columns of a reading, by stack and metric.
        """
        column = stacks.get(self.stack, {}).get(self.metric, EMPTY)
        if self.part:
            column = column.parts.get(self.part, EMPTY)
        match self.kind:
            case "whole":
                return column.whole.get(self.name, NAN)
            case "min" | "max":
                return column.extreme(self.kind, self.layer)
            case "head":
                return _entry(column.heads_at(self.layer or 0), self.head)
            case "margin":
                return column.margin_at(self.layer)
        return column.at(self.layer)


def places_of(metric: str, column: Column, stack: str = "") -> Iterator[Place]:
    """List the places of all values of a column.

    Args:
        metric: Name of the metric.
        column: Its column.
        stack: Name of the stack. Defaults to "".

    Yields:
        The places.
    """
    for part, own in {"": column, **column.parts}.items():
        has_mean = any(own.depths()) or not math.isnan(own.mean)
        for layer in (*own.depths(), *([None] if has_mean else [])):
            at = Place(stack, metric, part, layer)
            yield at
            if math.isfinite(own.margin_at(layer)):
                yield at._replace(kind="margin")
            if heads := own.heads if layer is None else own.heads_at(layer):
                yield from (at._replace(kind=kind) for kind in ("min", "max"))
                if layer is not None:
                    yield from (at._replace(kind="head", head=i) for i in range(len(heads)))
        for name in own.whole:
            yield Place(stack, metric, part, kind="whole", name=name)


def all_places(stacks: Mapping[str, Mapping[str, Column]]) -> Iterator[Place]:
    """List the places of all values of a reading."""
    for stack, columns in stacks.items():
        for metric, column in columns.items():
            yield from places_of(metric, column, stack)


def tagged(stacks: Mapping[str, Mapping[str, Column]]) -> dict[str, float]:
    """Return every value by its tag.

    Args:
        stacks: Columns of a reading, by stack and metric.

    Example:
        >>> tagged({"": {"cosine": Column(layers=[0.1, 0.3], mean=0.3)}})
        {'cosine/layer_00': 0.1, 'cosine/layer_01': 0.3, 'cosine/mean': 0.3}
    """
    return {place.tag: place.find(stacks) for place in all_places(stacks)}


class MetricText(msgspec.Struct, frozen=True, omit_defaults=True):
    """Words with which pages describe a metric; a record holds them for each of its metrics.

    Attributes:
        title: Name of the quantity, as titles and axes show it.
        unit: Its unit; "" for a pure number.
        meaning: One sentence on what it means.
        null: Data that the number `null` of its column describes, in words; "" if there is none.
        missing: When the value is missing, in words.
        healthy: Its range in healthy runs of the recipes, and what to check if it leaves that
            range.
        is_charted: Whether charts show its mean by default (for geomon's own metrics, see
            `geomon.record.headline`). Defaults to False.
        parts: Titles of its parts by name.
    """

    title: str
    unit: str = ""
    meaning: str = ""
    null: str = ""
    missing: str = ""
    healthy: str = ""
    is_charted: bool = False
    parts: dict[str, str] = {}

    @property
    def label(self) -> str:
        """The title with the unit, as axes show it."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def null_label(self) -> str:
        """Describe the null's data in few enough words for a line in a chart."""
        words = self.null.partition(" of as many")[0]
        return re.sub(r"^an? ", "", words) or "noise"

    def title_of(self, part: str) -> str:
        """Return the title of a part, or of the metric for "".

        Args:
            part: Name of the part.
        """
        return f"{self.title}, {self.parts.get(part, part)}" if part else self.title


def texts_of(description: Mapping[str, Any]) -> dict[str, MetricText]:
    """Read the words for each metric from the description of a run, as a record holds it."""
    texts = description.get("metrics")
    found: dict[str, MetricText] = {}
    for name, text in texts.items() if isinstance(texts, dict) else ():
        with contextlib.suppress(msgspec.ValidationError):  # damaged: use only the name
            found[name] = msgspec.convert(text, MetricText)
    return found
