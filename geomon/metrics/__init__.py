"""MEASURE: metrics, the views that they read, and how their values combine."""

from geomon.kernels.neighbours import searched_by
from geomon.metrics.at_once import in_modes, in_pieces, stacks_suffice
from geomon.metrics.combine import Evaluation
from geomon.metrics.evaluate import Evaluator
from geomon.metrics.layer_values import LayerValues
from geomon.metrics.metric import Metric, at_last
from geomon.metrics.oddities import odd_layers
from geomon.metrics.table import METRICS, MORE_METRICS, check_metrics, select

__all__ = [
    "Evaluation",
    "Evaluator",
    "LayerValues",
    "METRICS",
    "MORE_METRICS",
    "Metric",
    "at_last",
    "check_metrics",
    "in_modes",
    "in_pieces",
    "odd_layers",
    "searched_by",
    "select",
    "stacks_suffice",
]
