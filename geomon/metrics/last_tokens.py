"""Metrics of the last token of each sequence, made of metrics of all rows."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from geomon.metrics.views import MissingViewError, has_last, parameters, renamed

_ROWS = "last_hidden"


class AtLast:
    """A metric that reads the last token of each sequence in place of all rows.

    Args:
        metric: A function of views.
        at_least: Fewest sequences of which it is measured.

    Attributes:
        metric: The function.
        at_least: Fewest sequences of which it is measured.
    """

    def __init__(self, metric: Callable[..., Any], at_least: int) -> None:
        self.metric = metric
        self.at_least = at_least
        self._function = read_last(metric)
        names = dict.fromkeys([_ROWS, *parameters(self._function)])
        self.__signature__ = inspect.signature(renamed(self._function, *names))
        self.__doc__ = f"At the last token of each sequence: {inspect.getdoc(metric) or metric}"

    def __call__(self, *views: Any) -> Any:
        """Measure, and say on how many sequences the value stands (part `n`)."""
        given = dict(zip(parameters(self), views, strict=True))
        sequences = len(given[_ROWS])
        if sequences < self.at_least:
            raise MissingViewError(
                f"fewer than {self.at_least} sequences in a reading: give larger batches, or a "
                "probe with more sequences"
            )
        result = self._function(*(given[name] for name in parameters(self._function)))
        parts = dict(result) if isinstance(result, Mapping) else {"": result}
        return {"n": sequences, **parts}


def at_last(metric: Callable[..., Any], *, at_least: int = 2) -> AtLast:
    """Make a metric read the last token of each sequence that is no padding, one row a sequence.

    Its value has a part `n`, the number of sequences. Where the last tokens are not known, or the
    sequences too few, the value is missing and a note says why.

    Args:
        metric: A function of views of rows, such as those of `METRICS`.
        at_least: Fewest sequences of which it is measured.

    Raises:
        ValueError: The metric reads no view of rows, so that last tokens would change nothing.

    Example:
        >>> from geomon import METRICS
        >>> more = METRICS | {"cosine_last": at_last(METRICS["cosine"])}
    """
    if not any(map(has_last, parameters(metric))):
        raise ValueError(
            f"the metric reads {', '.join(parameters(metric)) or 'no view'}: expected views of "
            "rows, such as hidden or spectrum"
        )
    return AtLast(metric, at_least)


def read_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rename the views of rows that a function reads to those of the last tokens."""
    names = [f"last_{name}" if has_last(name) else name for name in parameters(function)]
    return renamed(function, *names)
