"""What a metric is: one record with its function, its words, its null and its margin."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

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
        function: Function whose required parameter names say which views of a layer it reads. It
            returns a scalar, a vector [heads], or a dict of both by part, "" for the value itself.
        text: Title, unit, meaning and more, as pages show them.
        null: Function of the sizes of a reading that returns numbers of the metric as a whole by
            name, {"null": 0.0}, {} where there are none; None for none at all.
        has_margin: Whether other sequences would move the value smoothly; False for an extreme.
        without_margin: Parts that say on what the value stands, and have no margin.
        each_group: Function of views that returns what the function returns without each group of
            sequences, a vector [groups] by part; None if it is called once for each group.
    """

    function: Callable[..., Any]
    text: MetricText
    null: Null | None = None
    has_margin: bool = True
    without_margin: frozenset[str] = field(default=COUNTS)
    each_group: Callable[..., Mapping[str, torch.Tensor]] | None = None
    # Those that geomon brings, by name: the table fills it.
    bundled: ClassVar[Mapping[str, "Metric"]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy a metric that geomon brings by its name: it is known by itself."""
        for name, known in self.bundled.items():
            if known is self:
                return _bundled, (name,)
        parts = self.function, self.text, self.null, self.has_margin, self.without_margin
        return Metric, (*parts, self.each_group)

    def __call__(self, *views: Any) -> Any:
        """Call the function."""
        return self.function(*views)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the function, whose parameters name views."""
        return inspect.signature(self.function)


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
    return Metric(function, MetricText(name, meaning=meaning, charts=("mean",)))


def said(error: BaseException) -> str:
    """Return what an error says; with its name if it is none that a metric should raise."""
    kind = type(error).__name__
    return (str(error) or kind) if isinstance(error, Exception) else f"{kind}: {error}"
