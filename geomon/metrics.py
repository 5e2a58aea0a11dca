"""The table of metrics: a plain dict from a name to a kernel.

A metric is a function whose required parameter names say which views it reads (`geomon.layer`). It
returns a scalar, a vector [heads], or a dict of named parts in which "" is the value itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from geomon.kernels import dimension
from geomon.kernels.angles import cosine, qk_cosine, qk_dot
from geomon.kernels.attention import (
    attention_entropy,
    attention_entropy_normalised,
    attention_max,
    attention_sink,
)
from geomon.kernels.moments import drift_norm, mean_square_norm, variance
from geomon.kernels.spectrum import anisotropy
from geomon.layer import CAPTURED, DERIVED, captured_views, parameters

Metric = Callable[..., Any]


def twonn(neighbours: Tensor, duplicates: float) -> dict[str, Tensor | float]:
    """TwoNN on all rows (the paper's), with the rows it stands on and the share of copies."""
    return {"": dimension.twonn(neighbours), "n": len(neighbours), "duplicates": duplicates}


def twonn_distinct(distinct_neighbours: Tensor, repeated: float) -> dict[str, Tensor | float]:
    """TwoNN on one row per (token id, position), with the rows left and the share left out."""
    value = dimension.twonn(distinct_neighbours)
    return {"": value, "n": len(distinct_neighbours), "repeated": repeated}


def gride(neighbours: Tensor) -> dict[str, Tensor]:
    """Intrinsic dimension at each scale: parts k1, k2, k4, ..."""
    estimates = dimension.gride(neighbours)
    return {f"k{k}": value for k, value in zip(dimension.SCALES, estimates, strict=True)}


METRICS: dict[str, Metric] = {
    "anisotropy": anisotropy,
    "cosine": cosine,
    "drift_norm": drift_norm,
    "variance": variance,
    "mean_square_norm": mean_square_norm,
    "twonn": twonn,
    "twonn_distinct": twonn_distinct,
    "gride": gride,
    "qk_cosine": qk_cosine,
    "qk_dot": qk_dot,
    "attention_entropy": attention_entropy,
    "attention_entropy_normalised": attention_entropy_normalised,
    "attention_max": attention_max,
    "attention_sink": attention_sink,
}


def check_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """A copy of `metrics` after checking every name and every view that it asks for.

    Raises:
        ValueError: No metric at all, a name that cannot be a tag, or an unknown view.
        TypeError: Not a mapping from names to functions.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics is a dict from names to functions, got {type(metrics).__name__}: "
            'choose by name with select("anisotropy", "twonn"), or add your own with '
            'METRICS | {"name": function}'
        )
    if not metrics:
        raise ValueError("metrics is empty: give at least one, or leave the default, METRICS")
    for name, function in metrics.items():
        _check(name, function)
    return dict(metrics)


def select(*names: str) -> dict[str, Metric]:
    """The named metrics of `METRICS`.

    Raises:
        ValueError: A name that is not a metric; the message lists those that are.

    Example:
        >>> list(select("anisotropy", "twonn"))
        ['anisotropy', 'twonn']
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"no metric is called {_quoted(unknown)}; there are {', '.join(METRICS)}")
    return {name: METRICS[name] for name in names}


def views_of(metrics: Mapping[str, Metric]) -> set[str]:
    """The captured views that the metrics come down to."""
    return captured_views(view for metric in metrics.values() for view in parameters(metric))


def _check(name: str, function: Metric) -> None:
    if not isinstance(name, str) or not name or "/" in name or name == "geomon":
        raise ValueError(
            f"{name!r} cannot name a metric: expected a word without '/', other than 'geomon' "
            "(tags are built from it)"
        )
    if not callable(function):
        raise TypeError(f"metric '{name}' is {function!r}: expected a function of views")
    asked = parameters(function)
    unknown = [view for view in asked if view not in CAPTURED and view not in DERIVED]
    if unknown:
        raise ValueError(
            f"metric '{name}' asks for {_quoted(unknown)}, which is no view; there are "
            f"{', '.join([*CAPTURED, *DERIVED])}"
        )
    if not asked:
        raise ValueError(
            f"metric '{name}' reads no view: name at least one as a parameter without a default, "
            f"of {', '.join([*CAPTURED, *DERIVED])}"
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
