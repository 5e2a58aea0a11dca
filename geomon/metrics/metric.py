"""What a metric is: one record with its function, its words, its null and its margin."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import torch

from geomon.capture.snapshot import LAST, source_of
from geomon.kernels.groups import GROUPS
from geomon.metrics.views import can_be_made, captured_views, is_view, parameters
from geomon.record.columns import MetricText

# What ends a measurement: memory that another device may have, and Ctrl-C. Anything else that a
# metric raises, SystemExit too, costs its own values alone.
ENDING = (KeyboardInterrupt, torch.OutOfMemoryError)

# Parts that say on what a value stands: they have no margin.
COUNTS = frozenset({"n", "types", "coverage", "sequences"})


class Sizes(NamedTuple):
    """Sizes of a reading, on which the values depend that data without structure gives.

    Attributes:
        rows: Number of rows of hidden states in one split, without copies; 0 where there are none.
        width: Width of the hidden states.
        heads: Number of query heads and width of one; None if unknown, or not the same at all
            layers.
        queries: Number of sampled queries that see a key, at each layer.
        log_visible: Mean logarithm of the number of keys that a sampled query sees, at each layer.
        sequences: Number of sequences whose last tokens were measured; 0 where none were.
    """

    rows: int
    width: int
    heads: tuple[int, int] | None = None
    queries: tuple[int, ...] = ()
    log_visible: tuple[float, ...] = ()
    sequences: int = 0


Null = Callable[[Sizes], Mapping[str, float]]


@dataclass(frozen=True, eq=False)  # known by itself: two of the same words are two metrics
class Metric:
    """A metric: a function of views, and all that pages and readings need to know of it.

    Args:
        function: Function that returns a scalar, a vector [heads], or a dict of both by part, ""
            for the value itself.
        text: Title, unit, meaning and more, as pages show them.
        null: Function of the sizes of a reading that returns numbers of the metric as a whole by
            name, {"null": 0.0}, {} if there are none; None for none at all.
        has_margin: Whether other sequences would move the value smoothly; False for an extreme.
        without_margin: Parts that say on what the value stands, and have no margin.
        each_group: Function of views that returns what the function returns without each group of
            sequences, a vector [groups] by part; None if it is called once for each group.
        reads: Names of the views that the function is called with; by default its required
            parameters name them.
        rows: "all", or "last" for the last token of each sequence alone.
        at_least: Fewest sequences of whose last tokens the metric is measured.
        degrees: Degrees of freedom of Student's distribution in margins: 7 with 8 groups of
            sequences; fewer if few rows decide, so that fewer groups say how a value scatters.
        no_margin: Why a value may lack its margin.
    """

    function: Callable[..., Any]
    text: MetricText
    null: Null | None = None
    has_margin: bool = True
    without_margin: frozenset[str] = field(default=COUNTS)
    each_group: Callable[..., Mapping[str, torch.Tensor]] | None = None
    reads: tuple[str, ...] = ()
    rows: Literal["all", "last"] = "all"
    at_least: int = 2
    degrees: int = GROUPS - 1
    no_margin: str = "without a group of sequences there is no value"
    # Those that geomon brings, by name: the table fills it.
    bundled: ClassVar[Mapping[str, "Metric"]] = {}

    def __post_init__(self) -> None:
        """Take the names of the parameters as those of the views."""
        object.__setattr__(self, "reads", self.reads or parameters(self.function))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy a metric that geomon brings by its name: it is known by itself."""
        for name, known in self.bundled.items():
            if known is self:
                return _bundled, (name,)
        return Metric, tuple(getattr(self, one.name) for one in fields(self))

    def __call__(self, *views: Any) -> Any:
        """Call the function."""
        return self.function(*views)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Names of the captured views from which its views are made, in any way."""
        of_all = captured_views(self.reads)
        return frozenset(LAST + name for name in of_all) if self.rows == "last" else of_all

    @cached_property
    def sources(self) -> frozenset[str]:
        """What these are taken from: "hidden", "attention", "projection" and others."""
        return frozenset(map(source_of, self.captured))

    def can_be_measured(self, captured: Iterable[str]) -> bool:
        """Return whether its views can all be made.

        Args:
            captured: Names of the captured views that are there.
        """
        there = frozenset(captured)
        if self.rows == "last":
            there = frozenset(n.removeprefix(LAST) for n in there if source_of(n) == "last")
        return can_be_made(self.reads, there)


def _bundled(name: str) -> Metric:
    return Metric.bundled[name]


def as_metric(name: str, function: Callable[..., Any]) -> Metric:
    """Make a metric of a plain function: its name is the title, its docstring the meaning.

    Args:
        name: Name of the metric.
        function: A function of views, or a metric, which is returned as it is.
    """
    if isinstance(function, Metric):
        return function
    own = getattr(function, "__doc__", None) if inspect.isroutine(function) else None
    meaning = (inspect.cleandoc(own).partition("\n\n")[0].replace("\n", " ")) if own else ""
    return Metric(function, MetricText(name, meaning=meaning, is_charted=True))


def at_last(metric: Callable[..., Any], *, at_least: int = 2) -> Metric:
    """Make a metric read the last token of each sequence that is no padding, one row a sequence.

    Its value has a part `n`, the number of sequences. If the last tokens are not known, or the
    sequences are too few, the value is missing and a note says why.

    Args:
        metric: A function of views of rows, such as those of `METRICS`.
        at_least: Fewest sequences of which it is measured.

    Raises:
        ValueError: The metric reads no view of rows, so that last tokens would change nothing.

    Example:
        >>> from geomon import METRICS
        >>> more = METRICS | {"cosine_last": at_last(METRICS["cosine"])}
    """
    known = as_metric(getattr(metric, "__name__", "value"), metric)
    if not all(map(is_view, known.reads)) or known.sources != {"hidden"}:
        raise ValueError(
            f"the metric reads {', '.join(known.reads) or 'no view'}: expected views of rows, such "
            "as hidden or spectrum"
        )
    text = msgspec.structs.replace(
        known.text, title=f"{known.text.title}, last tokens", null="",
        meaning=f"At the last token of each sequence: {known.text.meaning}",
    )  # fmt: skip
    return replace(known, text=text, null=None, rows="last", at_least=at_least)


def said(error: BaseException) -> str:
    """Return what an error says; with its name if it is none that a metric should raise."""
    kind = type(error).__name__
    return (str(error) or kind) if isinstance(error, Exception) else f"{kind}: {error}"
