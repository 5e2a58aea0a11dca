"""MEASURE: metrics, the views that they read, and how their values combine."""

from geomon.kernels.neighbours import searched_by
from geomon.metrics.evaluate import Evaluator
from geomon.metrics.layer_values import LayerValues
from geomon.metrics.metric import Metric, at_last
from geomon.metrics.table import METRICS, MORE_METRICS, check_metrics, select

__all__ = [
    "METRICS",
    "MORE_METRICS",
    "Evaluator",
    "LayerValues",
    "Metric",
    "at_last",
    "check_metrics",
    "searched_by",
    "select",
]
