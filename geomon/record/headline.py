"""Headline values: the few values of a reading that charts show by default, in group `geomon/`.

A table lists them. A sink keeps one `Charts` and shows what it selects; the record holds every
value under its own tag.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from geomon.record import tags
from geomon.record.columns import EMPTY, NAN, Column, MetricText, Place, all_places, texts_of
from geomon.record.reading import Reading, main_stack

HEADLINE = "headline"
LAYERS = "layers"
# How much charts show: the headline values, or every charted value.
Detail = str | Sequence[str]


class Headline(NamedTuple):
    """A value that charts show by default.

    Attributes:
        name: Name after `geomon/`.
        chart: Title of the chart where pages draw it; "" for the end of an interval.
        words: Description of the value.
        value: Function of a reading; NaN if the reading lacks the value.
        tag: Tag whose value it copies; "" if it is computed.
        unit: Its unit; "" for a pure number.
    """

    name: str
    chart: str
    words: str
    value: Callable[[Reading], float]
    tag: str = ""
    unit: str = ""


# Title of the chart that several metrics share, because they measure the same quantity.
_SHARED = dict.fromkeys(("twonn", "twonn_distinct", "gride"), "Intrinsic dimension")
# Parts that say how far a layer's value can be trusted. Charting them for every layer would bury
# the values, so charts show them only for the mean; the record holds all.
TRUST = frozenset({
    "std", tags.ROWS, tags.SEQUENCES, "duplicates", "repeated", "rounding",
    "rows", "types",
})  # fmt: skip
# Reserved names in group `geomon/`: the step of W&B's charts, and the seconds of a reading.
_TAKEN = {"step", "seconds"}
# Number of charts of a run; means of other metrics take places left free.
_PLACES = 14

OVERHEAD = Headline(
    "overhead", "Overhead", "share of the time that geomon takes",
    lambda reading: reading.overhead, tags.OVERHEAD,
)  # fmt: skip
PROBE_LOSS = Headline(
    "probe_loss", "Loss on the probe", "loss on the probe's inputs",
    lambda reading: reading.training.get(tags.PROBE_LOSS, NAN), tags.training_tag(tags.PROBE_LOSS),
)  # fmt: skip


def chart_title(metric: str, text: MetricText) -> str:
    """Return the title of the chart that shows a metric by default.

    Args:
        metric: Name of the metric.
        text: Words for the metric.
    """
    return _SHARED.get(metric, text.label)


def shortened(words: str, chart: str) -> str:
    """Shorten the name of a curve by the title of its chart.

    Args:
        words: Name of the curve.
        chart: Title of the chart.

    Example:
        >>> shortened("Intrinsic dimension (Gride), scale 32", "Intrinsic dimension")
        'Gride, scale 32'
    """
    if not words.lower().startswith(chart.lower()):
        return words
    return re.sub(r"[()]", "", words[len(chart) :]).strip(" ,") or words


# How a column becomes one number, and the kind of tag under which a record also holds it ("" for
# none). Means and extremes are over all layers except layer 0.
_REDUCTIONS: dict[str, tuple[Callable[[Column], float], str]] = {
    "mean": (lambda column: column.mean, "value"),
    "low": (lambda column: column.mean - column.mean_margin, ""),
    "high": (lambda column: column.mean + column.mean_margin, ""),
    "largest layer": (
        lambda column: max((x for layer, x in column.by_layer().items() if layer), default=NAN), "",
    ),
    "lowest head": (lambda column: column.extreme("min"), "min"),
    "highest head": (lambda column: column.extreme("max"), "max"),
    "mean size": (Column.mean_size, ""),
}  # fmt: skip
# Name, metric and part, reduction, and title, in which `{}` is the metric's title. Low and high are
# the ends of the interval of a mean, drawn in its chart as a band.
_Row = tuple[str, str, str, str]
_MEAN = "{}, mean over layers"
HEADLINES: tuple[_Row, ...] = (
    ("twonn", "twonn", "mean", _MEAN),
    ("twonn_low", "twonn", "low", "lower end of its 95 % interval"),
    ("twonn_high", "twonn", "high", "upper end of its 95 % interval"),
    ("twonn_distinct", "twonn_distinct", "mean", _MEAN),
    ("gride_k32", "gride/k32", "mean", _MEAN),
    ("anisotropy", "anisotropy", "mean", _MEAN),
    ("anisotropy_max", "anisotropy", "largest layer", "{}, largest layer"),
    ("massive_share_max", "massive_share", "largest layer", "{}, largest layer"),
    ("effective_rank", "effective_rank", "mean", _MEAN),
    ("drift_norm", "drift_norm", "mean", _MEAN),
    ("qk_cosine_size", "qk_cosine", "mean size", "{}, mean size over heads"),
    ("attention_entropy", "attention_entropy", "mean", _MEAN),
    ("attention_entropy_min", "attention_entropy", "lowest head", "{}, lowest head"),
    ("attention_sink", "attention_sink", "mean", _MEAN),
    ("max_logit_max", "max_logit", "highest head", "{}, highest head"),
)


def headlines_of(metric: str, text: MetricText, *, stack: str = "") -> Iterator[Headline]:
    """List the headline values of a metric: from the table, or the mean of a user's own metric.

    Args:
        metric: Name of the metric.
        text: Words for the metric.
        stack: Name of the stack. Defaults to "".

    Yields:
        The headline values.
    """
    rows = [row for row in HEADLINES if row[1].partition("/")[0] == metric]
    if not rows and text.is_charted:
        rows = [_mean_of(metric)]
    for row in rows:
        yield _headline(row, text, stack)


def _mean_of(metric: str) -> _Row:
    return metric, metric, "mean", _MEAN


def _headline(row: _Row, text: MetricText, stack: str) -> Headline:
    name, whole, reduction, title = row
    metric, _, part = whole.partition("/")
    function, kind = _REDUCTIONS[reduction]
    tag = Place(stack, metric, part, kind=kind).tag if kind else ""
    chart = "" if reduction in ("low", "high") else chart_title(metric, text)
    value = partial(_value, stack, metric, part, function)
    return Headline(name, chart, title.format(text.title_of(part)), value, tag, text.unit)


def _value(
    stack: str, metric: str, part: str, function: Callable[[Column], float], reading: Reading
) -> float:
    """Compute a value from the column of a metric, or of one of its parts."""
    column = reading.stacks.get(stack, {}).get(metric, EMPTY)
    return function(column.parts.get(part, EMPTY) if part else column)


def headline_tag(name: str, stack: str = "") -> str:
    """Build the name under which charts show a headline value of a stack ("" for the main one).

    Example:
        >>> headline_tag("twonn"), headline_tag("twonn", "encoder")
        ('geomon/twonn', 'geomon/encoder/twonn')
    """
    return "/".join(filter(None, ("geomon", stack, name)))


def check_detail(detail: Detail) -> Detail:
    """Return the detail of charts, checked, with names of metrics as a tuple.

    Args:
        detail: "headline", "layers", or names of metrics whose means become headline values too.

    Raises:
        ValueError: If it is none of them.

    Example:
        >>> check_detail(["variance"])
        ('variance',)
    """
    if detail in (HEADLINE, LAYERS):
        return detail
    if not isinstance(detail, str) and isinstance(detail, Iterable):
        names = tuple(detail)
        if all(isinstance(name, str) and name for name in names):
            return names
    raise ValueError(
        f"detail must be '{HEADLINE}', '{LAYERS}' or a tuple of names of metrics, such as "
        f"('variance',), got {detail!r}"
    )


def without_layers(detail: Detail) -> Detail:
    """Return the detail for a place that takes only headline values.

    Args:
        detail: Detail of the charts of the run.
    """
    return HEADLINE if detail == LAYERS else detail


class Charts:
    """Selects what one sink charts of each reading.

    If a reading holds fewer metrics than there are places for headline values, the means of other
    metrics take the free places.

    Args:
        detail: "headline"; "layers" for every charted value; or names of metrics whose means become
            headline values too. Defaults to "headline".

    Raises:
        ValueError: If the detail is none of them.
    """

    def __init__(self, detail: Detail = HEADLINE) -> None:
        detail = check_detail(detail)
        self._all = detail == LAYERS
        self.named = () if isinstance(detail, str) else detail
        self._texts: dict[str, MetricText] = {}
        # By stack and shown name; a value that was shown once is always shown.
        self._selected: dict[str, dict[str, Headline]] = {}

    def describe(self, description: Mapping[str, Any]) -> None:
        """Read the words for metrics from the description of the run.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._texts = texts_of(description)

    def select(self, reading: Reading) -> dict[str, float]:
        """Return the values that charts show, by shown name, without NaN.

        Args:
            reading: A reading.
        """
        headlines = self._headlines(reading)
        found = {name: float(headline.value(reading)) for name, headline in headlines.items()}
        if self._all:
            copied = {headline.tag for headline in headlines.values()}
            found |= {tag: x for tag, x in _charted(reading).items() if tag not in copied}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def is_end(self, tag: str) -> bool:
        """Return whether a value is the end of an interval, drawn in its quantity's chart.

        Args:
            tag: Shown name of a headline value.
        """
        found = [selected[tag] for selected in self._selected.values() if tag in selected]
        return any(not headline.chart for headline in found)

    def layout(self, reading: Reading) -> dict[str, dict[str, list[Any]]]:
        """Lay out the charts of a reading for TensorBoard's custom scalars.

        Args:
            reading: The first reading that is shown.

        Returns:
            Kind of chart and names of its curves, by category and title.
        """
        # A chart for each value, of the kind with an interval: TensorBoard smooths all others by
        # default, which lowers and moves peaks. Without ends, it is a line.
        charts: dict[str, list[Any]] = {}
        known = {
            name for name, each in self._headlines(reading).items()
            if not math.isnan(each.value(reading))
        }  # fmt: skip
        for stack, selected in self._selected.items():
            for name, headline in selected.items():
                ends = [f"{name}_low", f"{name}_high"]
                has_ends = known >= {*ends}
                words = _in_words(headline.words, stack) + ", 95 % interval" * has_ends
                words += f" ({headline.unit})" if headline.unit else ""
                if headline.chart:
                    charts[words] = ["Margin", [name, *(ends if has_ends else [name, name])]]
        # TensorBoard draws charts of this kind in reverse order.
        laid_out = {"geomon": dict(reversed(charts.items()))}
        if self._all:
            laid_out["by layer"] = self._by_layer(reading)
        return laid_out

    def _by_layer(self, reading: Reading) -> dict[str, list[Any]]:
        """Lay out, for each metric, a chart of all layers and a chart of its scales."""
        copied = {headline.tag: name for name, headline in self._headlines(reading).items()}
        charts: dict[str, list[Any]] = {}
        for stack, columns in reading.stacks.items():
            for metric, column in columns.items():
                title = _in_words(self._text_of(metric).label, stack)
                scales = [part for part in column.parts if part[1:].isdigit()]
                means = {part: Place(stack, metric, part).tag for part in ("", *scales)}
                shown = {part: f"{copied.get(tag, tag)}$" for part, tag in means.items()}
                mean = shown.pop("")
                if column.layers:
                    layers = tags.in_stack(f"{metric}/layer_[0-9]+$", stack)
                    charts[title] = ["Multiline", [layers, mean]]
                if shown:
                    charts[f"{title}, by scale"] = ["Multiline", [*shown.values()]]
        return charts

    def _headlines(self, reading: Reading) -> dict[str, Headline]:
        """Select headline values, by shown name."""
        for stack, inside in _stacks_of(reading):
            selected = self._selected.setdefault(stack, {})
            for each in self._wanted(reading, stack, inside, selected):
                selected.setdefault(headline_tag(each.name, stack), each)
        return {name: each for found in self._selected.values() for name, each in found.items()}

    def _wanted(
        self, reading: Reading, stack: str, inside: str, selected: Mapping[str, Headline]
    ) -> Iterator[Headline]:
        """List a stack's headline values: default values, values of the run, and added means."""
        columns = reading.stacks.get(inside, {})
        for metric in columns:
            yield from headlines_of(metric, self._text_of(metric), stack=inside)
        if not stack:
            yield from [PROBE_LOSS] if tags.PROBE_LOSS in reading.training else []
            yield OVERHEAD
        for metric, column in columns.items():
            text = self._text_of(metric)
            taken = len(selected.keys() - {headline_tag(PROBE_LOSS.name)})
            is_free = taken < _PLACES and not any(headlines_of(metric, text))
            has_mean = any(column.depths()) or not math.isnan(column.mean)
            if (metric in self.named or is_free) and has_mean and metric not in _TAKEN:
                yield _headline(_mean_of(metric), text, inside)

    def _text_of(self, metric: str) -> MetricText:
        return self._texts.get(metric, MetricText(metric))


def _in_words(title: str, stack: str) -> str:
    return f"{stack}: {title}" if stack else title


def _charted(reading: Reading) -> dict[str, float]:
    """Select what charts of all layers show: no heads, and no trust parts of single layers."""
    found = {
        place.tag: place.find(reading.stacks)
        for place in all_places(reading.stacks)
        if place.kind != "head"
        and not (
            place.layer is not None
            and (place.kind == "margin" or place.part.rpartition("/")[2] in TRUST)
        )
    }
    return found | reading.of_run()


def _stacks_of(reading: Reading) -> list[tuple[str, str]]:
    """Name each stack in charts and in the record; in charts, the main one comes first, as ""."""
    names = list(reading.stacks) or [""]
    main = main_stack(names)
    return [("", main), *((name, name) for name in names if name != main)]
