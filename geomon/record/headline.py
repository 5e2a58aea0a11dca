"""Headline values: the few that charts show of a reading by default, all in the group `geomon/`.

`HEADLINES` says what they are and of which tags each is made. A sink keeps one `Charts` and shows
what that selects; the record holds every value under its own tag.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from geomon.record import tags
from geomon.record.reading import Reading, Readings, main_stack

HEADLINE = "headline"
LAYERS = "layers"
# How much charts show: the headline values, or every value that is charted.
Detail = str | Sequence[str]

Values = Mapping[str, float]


class Headline(NamedTuple):
    """A value that charts show by default.

    Attributes:
        name: Name after `geomon/`.
        metric: Name of the metric of which it is made.
        chart: Title of the chart in which TensorBoard's layout draws it, with its kin.
        words: What it is, in words.
        value: Function of the values of one stack, NaN where it cannot be made of them.
        tag: Tag of which the value is a copy; "" where it is computed.
        optional: Whether only some runs have it, beside the others.
    """

    name: str
    metric: str
    chart: str
    words: str
    value: Callable[[Values], float]
    tag: str = ""
    optional: bool = False


def _copy(name: str, chart: str, words: str, tag: str, *, optional: bool = False) -> Headline:
    metric = tag.partition("/")[0]
    return Headline(
        name, metric, chart, words, lambda values: values.get(tag, math.nan), tag, optional
    )


def _bound(tag: str, sign: int) -> Callable[[Values], float]:
    """Make the function that gives an end of the 95 % interval of a value."""

    def bound(values: Values) -> float:
        margin = values.get(f"{tag}/{tags.margin_part()}", math.nan)
        return values.get(tag, math.nan) + sign * margin

    return bound


def _parts_of(values: Values, metric: str) -> Iterator[tuple[tags.Tag, float]]:
    """The values of a metric at single layers, without layer 0, that are numbers."""
    beginning = f"{metric}/layer_"
    for tag, value in values.items():
        if tag.startswith(beginning) and not math.isnan(value):
            parsed = tags.parse(tag)
            if parsed is not None and parsed.layer:
                yield parsed, value


def _largest(metric: str) -> Callable[[Values], float]:
    """Make the function that gives the largest value of a metric over layers."""

    def largest(values: Values) -> float:
        found = [
            value for tag, value in _parts_of(values, metric) if tag.head is None and not tag.part
        ]
        return max(found, default=math.nan)

    return largest


def _mean_size(metric: str) -> Callable[[Values], float]:
    """Make the function that gives the mean absolute value of a metric over heads and layers."""

    def mean_size(values: Values) -> float:
        sizes = [abs(value) for tag, value in _parts_of(values, metric) if tag.head is not None]
        return math.fsum(sizes) / len(sizes) if sizes else math.nan

    return mean_size


# Names in the group `geomon/` that are taken: the step of W&B's charts, the seconds of a reading.
_TAKEN = {"step", "seconds"}

_DIMENSION = "intrinsic dimension: paper's, distinct tokens, scale 32"
_INTERVAL = "intrinsic dimension, 95 % interval"
_FIRST = "geomon: intrinsic dimension"  # the category of charts that comes first
_TWONN = tags.mean_tag("twonn")

# "Mean" is over the layers without layer 0, as in the tags `<metric>/mean`.
HEADLINES = (
    _copy("twonn", _DIMENSION, "intrinsic dimension by TwoNN, mean", _TWONN),
    Headline(
        "twonn_low", "twonn", _INTERVAL, "lower end of its 95 % interval", _bound(_TWONN, -1)
    ),
    Headline(
        "twonn_high", "twonn", _INTERVAL, "upper end of its 95 % interval", _bound(_TWONN, +1)
    ),
    _copy(
        "twonn_distinct", _DIMENSION, "the same on one row per (token id, position), mean",
        tags.mean_tag("twonn_distinct"),
    ),
    _copy(
        "gride_k32", _DIMENSION, "intrinsic dimension at the scale of 32 neighbours, mean",
        tags.mean_tag("gride", "k32"),
    ),
    _copy("anisotropy", "anisotropy", "anisotropy, mean", tags.mean_tag("anisotropy")),
    Headline(
        "anisotropy_max", "anisotropy", "anisotropy", "anisotropy of the layer with the largest",
        _largest("anisotropy"),
    ),
    _copy(
        "attention_entropy", "attention entropy", "attention entropy in nats, mean",
        tags.mean_tag("attention_entropy"),
    ),
    _copy(
        "attention_entropy_min", "attention entropy", "attention entropy of the lowest head",
        tags.mean_tag("attention_entropy", "min"),
    ),
    Headline(
        "qk_cosine_size", "qk_cosine", "query and key",
        "mean size of the cosine of a head's mean query and mean key",
        _mean_size("qk_cosine"),
    ),
    _copy("attention_sink", "attention sink", "attention on the sink, mean",
          tags.mean_tag("attention_sink")),
    _copy("drift_norm", "drift", "norm of the mean row, mean", tags.mean_tag("drift_norm")),
    _copy("effective_rank", "effective rank", "effective rank, mean",
          tags.mean_tag("effective_rank")),
    _copy(
        "probe_loss", "loss on the probe", "loss on the probe's inputs, with `probe_loss`",
        tags.training_tag(tags.PROBE_LOSS), optional=True,
    ),
    _copy("overhead", "overhead", "share of the time that geomon takes", tags.OVERHEAD),
)  # fmt: skip

# Charts of a run: where it measures fewer metrics, the means of others take the free ones.
_PLACES = sum(not headline.optional for headline in HEADLINES)


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
    if isinstance(detail, str) and detail in (HEADLINE, LAYERS):
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

    A headline value that equals one before it in the list is left out until it first differs: it
    would draw the same curve twice. Where a reading holds fewer metrics than the headline values
    are made of, the means of its other metrics take the free places.

    Args:
        detail: "headline"; "layers" for every value that is charted; or names of metrics whose
            means are headline values too.

    Raises:
        ValueError: The detail is none of them.
    """

    def __init__(self, detail: Detail = HEADLINE) -> None:
        detail = check_detail(detail)
        self._all = detail == LAYERS
        self._named = () if isinstance(detail, str) else tuple(detail)
        self._selected: dict[str, dict[str, Headline]] = {}  # by stack and name
        self._distinct: set[str] = set()  # that have differed from those before them

    def select(self, reading: Reading) -> dict[str, float]:
        """Select the values that charts show, by the name under which they are shown; no NaN.

        Args:
            reading: A reading.
        """
        headlines = self.headlines(reading)
        if not self._all:
            return headlines
        copied = self._copied(reading)
        rest = {tag: value for tag, value in reading.charted().items() if tag not in copied}
        return headlines | rest

    def headlines(self, reading: Reading) -> dict[str, float]:
        """Select the headline values alone, by the name under which they are shown; no NaN.

        Args:
            reading: A reading.
        """
        shown: dict[str, float] = {}
        for stack, values, selected in self._by_stack(reading):
            found: list[float] = []
            for name, headline in selected.items():
                value = float(headline.value(values))
                if math.isnan(value):
                    continue
                tag = headline_tag(name, stack)
                if value not in found:
                    self._distinct.add(tag)
                found.append(value)
                if tag in self._distinct:
                    shown[tag] = value
        return shown

    def layout(self, reading: Reading) -> dict[str, dict[str, list[object]]]:
        """Lay out the charts of a reading for TensorBoard's custom scalars.

        Args:
            reading: The first reading that is shown.

        Returns:
            Kind of chart and names of its curves, by category and title.
        """
        charts: dict[str, list[object]] = {}
        intervals: dict[str, list[object]] = {}
        for stack, values, selected in self._by_stack(reading):
            before = f"{stack}: " if stack else ""
            ends = [headline_tag(name, stack) for name in ("twonn", "twonn_low", "twonn_high")]
            if not math.isnan(_bound(_TWONN, 1)(values)):
                intervals[f"{before}{_INTERVAL}"] = ["Margin", ends]
            titles: dict[str, list[str]] = {}
            for name, headline in selected.items():
                if headline.chart != _INTERVAL:
                    tag = f"{headline_tag(name, stack)}$"
                    titles.setdefault(f"{before}{headline.chart}", []).append(tag)
            charts |= {title: ["Multiline", names] for title, names in titles.items()}
        # In one category TensorBoard draws the charts of intervals below all others.
        laid_out: dict[str, dict[str, list[object]]] = {}
        if intervals:
            laid_out[_FIRST] = intervals
        laid_out["geomon"] = charts
        if self._all:
            copied = {
                source: headline_tag(name, stack)
                for source, (name, stack) in self._copied(reading).items()
            }
            laid_out |= tags.layout(reading.charted(), shown_as=copied)
        return laid_out

    def _copied(self, reading: Reading) -> dict[str, tuple[str, str]]:
        """Tags that headline values copy, with name and stack of these."""
        main, stacks = _stacks_of(reading)
        copied: dict[str, tuple[str, str]] = {}
        for stack, _, selected in self._by_stack(reading):
            # Tags leave out the name of an only stack, headline values that of the main one.
            inside = stack or (main if stacks != [""] else "")
            for name, headline in selected.items():
                if headline.tag:
                    tag = headline.tag
                    copied[tag if tags.is_of_run(tag) else tags.in_stack(tag, inside)] = name, stack
        return copied

    def _by_stack(self, reading: Reading) -> Iterator[tuple[str, Values, dict[str, Headline]]]:
        """For each stack: its name, "" for the main one; its values; its headlines."""
        main, stacks = _stacks_of(reading)
        whole = Readings([], [reading])
        for stack in sorted(stacks, key=lambda name: name != main):
            values = whole.of_stack(stack)[0].values
            name = "" if stack == main else stack
            yield name, values, self._select(name, values)

    def _select(self, stack: str, values: Values) -> dict[str, Headline]:
        """Add what a reading is the first to have to the headlines of a stack."""
        selected = self._selected.setdefault(stack, {})
        measured = {tag.partition("/")[0] for tag in values if not tags.is_of_run(tag)}
        for headline in HEADLINES:
            of_run = tags.is_of_run(headline.tag) and not stack
            if of_run and headline.optional:
                of_run = headline.tag in values
            if headline.metric in measured or of_run:
                selected.setdefault(headline.name, headline)
        means = [
            tag.metric
            for tag in map(tags.parse, values)
            if tag is not None and tag.layer is None and not tag.part
        ]
        copied = {headline.tag for headline in selected.values()}
        for metric in dict.fromkeys(means):
            tag = tags.mean_tag(metric)
            wanted = metric in self._named or len(selected) < _PLACES
            if wanted and tag not in copied and metric not in selected.keys() | _TAKEN:
                selected[metric] = _copy(metric, metric, f"{metric}, mean", tag)
        return selected


def _stacks_of(reading: Reading) -> tuple[str, list[str]]:
    """The name of the main stack, and the names of all."""
    stacks = Readings([], [reading]).stacks()
    return main_stack(stacks), stacks
