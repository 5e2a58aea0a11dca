"""Definition of a metric: its function with its words, its null and its margin."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import torch

from geomon.capture import LAST, source_of
from geomon.kernels.groups import GROUPS
from geomon.metrics.views import can_be_made, captured_views, is_view, parameters
from geomon.record import MetricText

# Errors that end a measurement: Ctrl-C, and lack of memory (another device may have it). Any other
# error of a metric, even SystemExit, costs only its own values.
ENDING = (KeyboardInterrupt, torch.OutOfMemoryError)

# Parts that count what a value rests on; they have no margin.
COUNTS = frozenset({"n", "types", "coverage", "sequences"})


class Sizes(NamedTuple):
    """Sizes of a reading that the nulls of metrics depend on.

    Attributes:
        rows: Number of rows of hidden states in one split, without copies; 0 if there are none.
        width: Width of the hidden states.
        heads: Number of query heads and the width of one, or None if unknown or different between
            layers.
        queries: Number of sampled queries that see a key, at each layer.
        log_visible: Mean logarithm of the number of keys that a sampled query sees, at each layer.
        sequences: Number of sequences whose last tokens were measured. Defaults to 0.
    """

    rows: int
    width: int
    heads: tuple[int, int] | None = None
    queries: tuple[int, ...] = ()
    log_visible: tuple[float, ...] = ()
    sequences: int = 0


Null = Callable[[Sizes], Mapping[str, float]]


@dataclass(frozen=True, eq=False)  # compared by identity: equal words do not make equal metrics
class Metric:
    """A metric: a function of views, and all that pages and readings need to know about it.

    Args:
        function: Function that returns a scalar, a vector [heads], or a dict of these by part, in
            which "" is the value itself.
        text: Title, unit, meaning and more, as pages show them.
        null: Function from the sizes of a reading to numbers that describe the metric as a whole,
            by name, such as {"null": 0.0}; {} if there are none for these sizes. Defaults to None,
            for no null.
        has_margin: Whether the value changes smoothly with the sequences; False for an extreme.
            Defaults to True.
        without_margin: Parts without a margin. Defaults to those that count rows and the like.
        each_group: Function of views that returns the values without each group of sequences at
            once, a vector [groups] by part. Defaults to None: `function` is called for each group.
        reads: Names of the views that are the function's arguments. Defaults to the names of its
            required parameters.
        rows: "all" rows, or only the "last" token of each sequence. Defaults to "all".
        at_least: Fewest sequences for which a metric of last tokens is measured. Defaults to 2.
        degrees: Degrees of freedom of Student's distribution in margins. Defaults to 7, for 8
            groups of sequences; fewer if a few rows decide the value, so that fewer groups show how
            it scatters.
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
    # geomon's own metrics by name, filled in by the table.
    bundled: ClassVar[Mapping[str, "Metric"]] = {}

    def __post_init__(self) -> None:
        """Use the names of the parameters as names of the views."""
        object.__setattr__(self, "reads", self.reads or parameters(self.function))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy geomon's own metrics by name, so that they keep their identity."""
        for name, known in self.bundled.items():
            if known is self:
                return _bundled, (name,)
        return Metric, tuple(getattr(self, one.name) for one in fields(self))

    def __call__(self, *views: Any) -> Any:
        """Call the function."""
        return self.function(*views)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Names of all captured views from which its views can be made."""
        of_all = captured_views(self.reads)
        return frozenset(LAST + name for name in of_all) if self.rows == "last" else of_all

    @cached_property
    def sources(self) -> frozenset[str]:
        """Sources of these captured views: "hidden", "attention", "projection" and others."""
        return frozenset(map(source_of, self.captured))

    def can_be_measured(self, captured: Iterable[str]) -> bool:
        """Return whether all of its views can be made.

        Args:
            captured: Names of the available captured views.
        """
        there = frozenset(captured)
        if self.rows == "last":
            there = frozenset(n.removeprefix(LAST) for n in there if source_of(n) == "last")
        return can_be_made(self.reads, there)


def _bundled(name: str) -> Metric:
    return Metric.bundled[name]


def as_metric(name: str, function: Callable[..., Any]) -> Metric:
    """Make a metric of a plain function, with its name as title and its docstring as meaning."""
    if isinstance(function, Metric):
        return function
    own = getattr(function, "__doc__", None) if inspect.isroutine(function) else None
    meaning = (inspect.cleandoc(own).partition("\n\n")[0].replace("\n", " ")) if own else ""
    return Metric(function, MetricText(name, meaning=meaning, is_charted=True))


def at_last(metric: Callable[..., Any], *, at_least: int = 2) -> Metric:
    """Make a metric read only the last token of each sequence that is not padding, as one row each.

    Its value gets a part `n`, the number of sequences. If the last tokens are unknown, or the
    sequences are too few, the value is missing and a note says why.

    Args:
        metric: A function of views of rows, such as a value of `METRICS`.
        at_least: Fewest sequences for which it is measured. Defaults to 2.

    Returns:
        The metric of the last tokens.

    Raises:
        ValueError: If the metric reads no view of rows, so that last tokens would change nothing.

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
    """Return the message of an error, with its type if metrics should not raise that type."""
    kind = type(error).__name__
    return (str(error) or kind) if isinstance(error, Exception) else f"{kind}: {error}"
