"""Headline values: the few that charts show of a reading by default, all in the group `geomon/`.

The text of a metric (`MetricText.charts`) says which they are. A sink keeps one `Charts` and shows
what that selects; the record holds every value under its own tag.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from geomon.record import tags
from geomon.record.columns import NAN, Column, MetricText, Place, places_of, texts_of
from geomon.record.reading import Reading, main_stack

HEADLINE = "headline"
LAYERS = "layers"
# How much charts show: the headline values, or every value that is charted.
Detail = str | Sequence[str]


class Headline(NamedTuple):
    """A value that charts show by default.

    Attributes:
        name: Name after `geomon/`.
        chart: Title of the chart in which TensorBoard's layout draws it, with its kin.
        words: What it is, in words.
        value: Function of a reading; NaN where it has no such value.
        tag: Tag of which the value is a copy; "" where it is computed.
    """

    name: str
    chart: str
    words: str
    value: Callable[[Reading], float]
    tag: str = ""


# Metrics that share a chart, because they measure the same, and its title.
_SHARED = dict.fromkeys(("twonn", "twonn_distinct", "gride"), "Intrinsic dimension")
# Parts that say how far a layer's value can be trusted. Charts of them for every layer would bury
# the values, so charts show those of the mean only; the record holds all.
TRUST = frozenset({
    "std", tags.ROWS, tags.SEQUENCES, tags.STEPS, "duplicates", "repeated", "rounding",
    "rows", "types",
})  # fmt: skip
# Names in the group `geomon/` that are taken: the step of W&B's charts, the seconds of a reading.
_TAKEN = {"step", "seconds"}
# Charts of a run: where it measures fewer metrics, the means of others take the free ones.
_PLACES = 14

OVERHEAD = Headline(
    "overhead", "Overhead", "share of the time that geomon takes",
    lambda reading: reading.overhead, tags.OVERHEAD,
)  # fmt: skip
PROBE_LOSS = Headline(
    "probe_loss", "Loss on the probe", "loss on the probe's inputs, with `probe_loss`",
    lambda reading: reading.training.get(tags.PROBE_LOSS, NAN), tags.training_tag(tags.PROBE_LOSS),
)  # fmt: skip


def chart_title(metric: str, text: MetricText) -> str:
    """Return the title of the chart that shows a metric by default.

    Args:
        metric: Name of the metric.
        text: How pages speak of it.
    """
    return _SHARED.get(metric, text.label)


def shortened(words: str, chart: str) -> str:
    """Shorten what a curve is called below the title of its chart.

    Args:
        words: Its words.
        chart: Title of the chart.

    Example:
        >>> shortened("Intrinsic dimension (Gride), scale 32", "Intrinsic dimension")
        'Gride, scale 32'
    """
    if not words.lower().startswith(chart.lower()):
        return words
    return re.sub(r"[()]", "", words[len(chart) :]).strip(" ,") or words


def headlines_of(metric: str, text: MetricText, *, stack: str = "") -> Iterator[Headline]:
    """List the headline values of a metric. Means are over the layers without layer 0.

    Args:
        metric: Name of the metric.
        text: How pages speak of it.
        stack: Name of the stack.
    """
    chart, title = chart_title(metric, text), text.title

    def copy(name: str, words: str, part: str = "", kind: str = "value") -> Headline:
        place = Place(stack, metric, part, kind=kind)
        return Headline(name, chart, words, lambda reading: place.find(reading.stacks), place.tag)

    def made(name: str, words: str, function: Callable[[Column], float]) -> Headline:
        def value(reading: Reading) -> float:
            column = reading.stacks.get(stack, {}).get(metric)
            return NAN if column is None else function(column)

        return Headline(f"{metric}_{name}", chart, words, value)

    for kind in text.charts:
        if kind == "mean":
            yield copy(metric, f"{title}, mean over layers")
        elif kind == "interval":
            for name, words, sign in (("low", "lower", -1), ("high", "upper", 1)):
                yield made(name, f"{words} end of its 95 % interval", _end(sign))._replace(chart="")
        elif kind == "largest":
            yield made("max", f"{title}, largest layer", _largest)
        elif kind == "smallest":
            yield copy(f"{metric}_min", f"{title}, lowest head", kind="min")
        elif kind == "highest":
            yield copy(f"{metric}_max", f"{title}, highest head", kind="max")
        elif kind == "size":
            yield made("size", f"{title}, mean size over heads", Column.mean_size)
        else:
            yield copy(f"{metric}_{kind}", f"{text.title_of(kind)}, mean over layers", kind)


def _end(sign: int) -> Callable[[Column], float]:
    """Make the function that gives an end of the 95 % interval of a mean."""
    return lambda column: column.mean + sign * column.mean_margin


def _largest(column: Column) -> float:
    """Return the largest value over the layers without layer 0."""
    return max((value for layer, value in column.by_layer().items() if layer), default=NAN)


def headline_tag(name: str, stack: str = "") -> str:
    """Build the name under which charts show a headline value.

    Args:
        name: Name of the value, for instance "twonn".
        stack: Name of the stack; "" for the main one.

    Example:
        >>> headline_tag("twonn"), headline_tag("twonn", "encoder")
        ('geomon/twonn', 'geomon/encoder/twonn')
    """
    return "/".join(filter(None, ("geomon", stack, name)))


def check_detail(detail: Detail) -> Detail:
    """Return the detail of charts, checked; names of metrics become a tuple.

    Args:
        detail: "headline", "layers", or names of metrics whose means are headline values too.

    Raises:
        ValueError: It is none of them.

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
        f"detail is '{HEADLINE}', '{LAYERS}' or a tuple of names of metrics, ('variance',) for "
        f"instance, got {detail!r}"
    )


def without_layers(detail: Detail) -> Detail:
    """Return the detail of a place that takes headline values only.

    Args:
        detail: Detail of the charts of the run.
    """
    return HEADLINE if detail == LAYERS else detail


class Charts:
    """Selects what one sink charts of each reading.

    Where a reading holds fewer metrics than there are places for headline values, the means of its
    other metrics take the free ones.

    Args:
        detail: "headline"; "layers" for every value that is charted; or names of metrics whose
            means are headline values too.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(self, detail: Detail = HEADLINE) -> None:
        detail = check_detail(detail)
        self._all = detail == LAYERS
        self.named = () if isinstance(detail, str) else detail
        self._texts: dict[str, MetricText] = {}
        self._selected: dict[str, dict[str, Headline]] = {}  # by stack and name

    def describe(self, description: Mapping[str, Any]) -> None:
        """Take the description of the run, which holds the texts of its metrics.

        Args:
            description: Description of the run, as the record holds it.
        """
        self._texts = texts_of(description)

    def select(self, reading: Reading) -> dict[str, float]:
        """Select the values that charts show, by the name under which they are shown; no NaN.

        Args:
            reading: A reading.
        """
        headlines = self.headlines(reading)
        if not self._all:
            return headlines
        copied = self._copied(reading)
        return headlines | {t: v for t, v in _charted(reading).items() if t not in copied}

    def headlines(self, reading: Reading) -> dict[str, float]:
        """Select the headline values alone, by the name under which they are shown; no NaN.

        Args:
            reading: A reading.
        """
        found = {
            headline_tag(headline.name, stack): float(headline.value(reading))
            for stack, selected in self._by_stack(reading)
            for headline in selected
        }
        return {tag: value for tag, value in found.items() if not math.isnan(value)}

    def is_end(self, tag: str) -> bool:
        """Return whether a name is that of an end of an interval, which has no chart of its own.

        Args:
            tag: Name under which a headline value is shown.
        """
        return any(
            not headline.chart and headline_tag(headline.name, stack) == tag
            for stack, selected in self._selected.items()
            for headline in selected.values()
        )

    def layout(self, reading: Reading) -> dict[str, dict[str, list[Any]]]:
        """Lay out the charts of a reading for TensorBoard's custom scalars.

        Args:
            reading: The first reading that is shown.

        Returns:
            Kind of chart and names of its curves, by category and title.
        """
        charts: dict[str, list[Any]] = {}
        for stack, selected in self._by_stack(reading):
            titles: dict[str, list[str]] = {}
            for headline in selected:
                if headline.chart:
                    tag = f"{headline_tag(headline.name, stack)}$"
                    titles.setdefault(_in_words(headline.chart, stack), []).append(tag)
            charts |= {title: ["Multiline", names] for title, names in titles.items()}
        # In one category TensorBoard draws the charts of intervals below all others.
        laid_out: dict[str, dict[str, list[Any]]] = {}
        for title, stack, ends in self._intervals(reading):
            category = laid_out.setdefault(next(iter(laid_out), f"geomon: {title}"), {})
            category[f"{_in_words(title, stack)}, 95 % interval"] = ["Margin", ends]
        laid_out["geomon"] = charts
        if self._all:
            laid_out["by layer"] = dict(self._by_layer(reading))
        return laid_out

    def _intervals(self, reading: Reading) -> Iterator[tuple[str, str, list[str]]]:
        """For each metric with an interval: its title, the stack, and the names of the curves."""
        for stack, inside in _stacks_of(reading):
            for metric, column in reading.stacks.get(inside, {}).items():
                text = self._text_of(metric)
                if "interval" in text.charts and math.isfinite(column.mean_margin):
                    names = metric, f"{metric}_low", f"{metric}_high"
                    yield text.title, stack, [headline_tag(name, stack) for name in names]

    def _by_layer(self, reading: Reading) -> Iterator[tuple[str, list[Any]]]:
        """For each metric: the title of a chart of all layers, and patterns of its curves."""
        copied = self._copied(reading)
        for inside, columns in reading.stacks.items():
            for metric, column in columns.items():
                title = _in_words(self._text_of(metric).label, inside)
                if column.layers:
                    mean = Place(inside, metric).tag
                    layers = tags.in_stack(f"{metric}/layer_[0-9]+$", inside)
                    yield title, ["Multiline", [layers, f"{copied.get(mean, mean)}$"]]
                scales = [part for part in column.parts if part[1:].isdigit()]
                if scales:
                    tags_of = [Place(inside, metric, part).tag for part in scales]
                    others = [f"{copied[tag]}$" for tag in tags_of if tag in copied]
                    pattern = tags.in_stack(f"{tags.mean_tag(metric, 'k')}[0-9]+$", inside)
                    yield f"{title}, by scale", ["Multiline", [pattern, *others]]

    def _copied(self, reading: Reading) -> dict[str, str]:
        """Tags that headline values copy, and the names under which these are shown."""
        return {
            headline.tag: headline_tag(headline.name, stack)
            for stack, selected in self._by_stack(reading)
            for headline in selected
        }

    def _by_stack(self, reading: Reading) -> Iterator[tuple[str, list[Headline]]]:
        """For each stack: its name, "" for the main one, and its headline values."""
        for stack, inside in _stacks_of(reading):
            selected = self._selected.setdefault(stack, {})
            for headline in self._wanted(reading, stack, inside, selected):
                selected.setdefault(headline.name, headline)
            yield stack, list(selected.values())

    def _wanted(
        self, reading: Reading, stack: str, inside: str, selected: Mapping[str, Headline]
    ) -> Iterator[Headline]:
        """List the headline values of a stack: by default, of the run, and in free places."""
        columns = reading.stacks.get(inside, {})
        for metric in columns:
            yield from headlines_of(metric, self._text_of(metric), stack=inside)
        if not stack:
            if tags.PROBE_LOSS in reading.training:
                yield PROBE_LOSS
            yield OVERHEAD
        for metric, column in columns.items():
            text = self._text_of(metric)
            free = len(selected.keys() - {PROBE_LOSS.name}) < _PLACES and not text.charts
            has_mean = any(column.depths()) or not math.isnan(column.mean)
            if (metric in self.named or free) and has_mean and metric not in _TAKEN:
                yield from headlines_of(metric, _mean_alone(text), stack=inside)

    def _text_of(self, metric: str) -> MetricText:
        return self._texts.get(metric, MetricText(metric))


def _mean_alone(text: MetricText) -> MetricText:
    return MetricText(text.title, text.unit, charts=("mean",))


def _in_words(title: str, stack: str) -> str:
    return f"{stack}: {title}" if stack else title


def _charted(reading: Reading) -> dict[str, float]:
    """Select what charts of all layers show: no heads, and of single layers no error parts."""
    places = (
        place
        for stack, columns in reading.stacks.items()
        for metric, column in columns.items()
        for place in places_of(metric, column, stack)
        if place.kind != "head"
    )
    found = {
        place.tag: place.find(reading.stacks)
        for place in places
        if place.layer is None
        or not (place.kind == "margin" or place.part.rpartition("/")[2] in TRUST)
    }
    found |= {tags.training_tag(name): value for name, value in reading.training.items()}
    found |= {tags.SECONDS: reading.seconds, tags.OVERHEAD: reading.overhead}
    return {tag: value for tag, value in found.items() if not math.isnan(value)}


def _stacks_of(reading: Reading) -> list[tuple[str, str]]:
    """Names of stacks in charts, where the main one comes first and has none, and in the record."""
    names = list(reading.stacks) or [""]
    main = main_stack(names)
    return [("", main), *((name, name) for name in names if name != main)]
